"""Somebody's own faults: a file of kernels, each of which is wrong."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from attncheck.errors import UnknownName, UsageError
from attncheck.source_files import import_file
from attncheck.subjects.contract import Subject

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

__all__ = ["faults_in", "reference"]

_TABLE = "FAULTS"
_SHIM = '''"""A fault of somebody's file, under a name of its own."""

from pathlib import Path

from attncheck.faults.kernel_file import faults_in

Planted = faults_in(Path({path!r}))[{name!r}]
'''


def faults_in(path: Path) -> dict[str, Any]:
    """The faulty kernels of a file, by id.

    Args:
        path: Of it. ``FAULTS = {"id": kernel, …}`` names them, in whatever form ``attncheck gate``
            takes a kernel; without it all of ``__all__`` are, or without that every public function
            and Subject that is defined there.

    Raises:
        UsageError: where there is no such file, importing it raises, or it has none.
    """
    what = f"--kernel-file {str(path)!r}"
    module = import_file(path, what)
    found = getattr(module, _TABLE, None)
    if found is None:
        found = _public(module)
    elif not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        kind = type(found).__name__
        raise UsageError(f'{what}: {_TABLE} is {kind}: it must be a dict, {{"id": kernel, …}}.')
    if not found:
        raise UsageError(
            f"{what} has no kernel: give it public functions or Subjects, or "
            f'{_TABLE} = {{"id": kernel, …}}.'
        )
    for name, kernel in found.items():
        _check(what, name, kernel)
    return dict(found)


def reference(path: Path, name: str, folder: Path) -> str:
    """A kernel of the file, as ``subjects.load.load`` takes it; written below ``folder``.

    Raises:
        UnknownName: where it has none called ``name``; UsageError as ``faults_in``.
    """
    found = faults_in(path)
    if name not in found:
        raise UnknownName(f"fault of {path.name}", name, found)
    file = folder / "planted_of_a_file.py"
    file.write_text(_SHIM.format(path=str(path), name=name), encoding="utf-8")
    return f"{file}::Planted"


def _public(module: ModuleType) -> dict[str, Any]:
    listed = getattr(module, "__all__", None)
    if isinstance(listed, list | tuple):
        return {str(name): getattr(module, str(name), None) for name in listed}
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and _is_kernel(value) and _is_of(module, value)
    }


def _is_kernel(value: object) -> bool:
    if inspect.isclass(value):
        return issubclass(value, Subject)
    return isinstance(value, Subject) or inspect.isfunction(value)


def _is_of(module: ModuleType, value: Any) -> bool:
    """Whether it is made there, and not imported."""
    owner = value if hasattr(value, "__name__") else type(value)
    return bool(getattr(owner, "__module__", "") == module.__name__) or isinstance(value, Subject)


def _check(what: str, name: str, kernel: object) -> None:
    """Raises UsageError for an id that cannot stand in a report, and for what is no kernel."""
    if not name or "@" in name or not name.isprintable():
        raise UsageError(f"{what}: fault {name!r} must have a name of printable characters, no @.")
    if not callable(kernel) and not isinstance(kernel, Subject):
        kind = type(kernel).__name__
        raise UsageError(f"{what}: fault {name!r} is {kind}: it must be a function or a Subject.")
