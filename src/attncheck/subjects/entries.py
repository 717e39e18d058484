"""What an entry names: ``path/to/file.py::name``, ``package.module:name``, or a kernel here."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

from attncheck.errors import UsageError
from attncheck.source_files import member, member_of_module
from attncheck.subjects import builtin
from attncheck.subjects.capabilities import AUTOGRAD

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from attncheck.subjects.capabilities import Capabilities

__all__ = ["backward_of", "entered", "from_here", "is_reference", "referred"]


def is_reference(kernel: str) -> bool:
    """Whether ``kernel`` is of a file or module, and no name."""
    return ":" in kernel


def from_here(entry: str, folder: Path) -> str:
    """An entry that is relative to ``folder``."""
    file, colons, name = entry.partition("::")
    return f"{folder / file}{colons}{name}" if colons else entry


def referred(kernel: str, what: str) -> Any:
    """The object of ``file.py::name`` or ``package.module:name``."""
    file, _, name = kernel.partition(":")
    if file.endswith(".py") and not name.startswith(":"):
        raise UsageError(f"{what}: a file takes two colons: {file}::{name or 'NAME'}.")
    return (member if "::" in kernel else member_of_module)(kernel, what)


def entered(entry: str, folder: Path, what: str) -> Any:
    """The object that a table's entry names; modules are looked for in ``folder`` too."""
    if entry in builtin.SUBJECTS:
        return builtin.subject_named(entry)
    if not is_reference(entry):
        raise UsageError(
            f"{what}: its entry {entry!r} is neither FILE.py::NAME nor package.module:NAME."
        )
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return referred(entry, what)


def backward_of(table: Capabilities, folder: Path, what: str) -> Callable[..., object] | None:
    """The function that a table's ``backward`` names; None where it names none."""
    said = table.backward
    if not isinstance(said, str) or said == AUTOGRAD:
        return None
    found = entered(from_here(said, folder), folder, f"{what}: its backward")
    if not callable(found) or inspect.isclass(found):
        kind = type(found).__name__
        raise UsageError(f"{what}: its backward {said!r} is {kind}: it must be a function.")
    function: Callable[..., object] = found
    return function
