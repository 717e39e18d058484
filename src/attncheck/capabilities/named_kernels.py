"""Kernels by name: those that attncheck brings, and what an entry of a table names."""

from __future__ import annotations

import importlib
import inspect
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attncheck.capabilities.capability_table import AUTOGRAD
from attncheck.core.errors import UnknownName, UsageError
from attncheck.core.source_files import load_member, load_module_member

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from attncheck.capabilities.capability_table import Capabilities
    from attncheck.capabilities.subject import Subject

__all__ = [
    "BUILTIN",
    "anchor_entry",
    "builtin_names",
    "import_backward",
    "import_entry",
    "import_reference",
    "is_reference",
    "subject_named",
]


@dataclass(frozen=True, slots=True)
class _Made:
    """A class of a subject, imported when one is made.

    Attributes:
        module: Where it is.
        name: Its name there.
        arguments: What it is made with.
    """

    module: str
    name: str
    arguments: tuple[str, ...] = ()

    def __call__(self) -> Subject:
        """A new subject."""
        subject: Subject = getattr(importlib.import_module(self.module), self.name)(*self.arguments)
        return subject


def _made_when_asked(module: str, name: str, *arguments: str) -> _Made:
    return _Made(module, name, arguments)


BUILTIN: dict[str, _Made] = {
    "triton-flash2": _made_when_asked("attncheck.subjects.triton_flash", "Flash2"),
    "triton-flash2-vt": _made_when_asked(
        "attncheck.subjects.triton_flash", "Flash2TransposedValues"
    ),
    "triton-flash2-fastacc": _made_when_asked(
        "attncheck.subjects.triton_flash", "Flash2FastAccumulation"
    ),
    "triton-flash1": _made_when_asked("attncheck.subjects.triton_flash", "Flash1"),
    "triton-varlen": _made_when_asked("attncheck.subjects.triton_caches", "Varlen"),
    "triton-paged": _made_when_asked("attncheck.subjects.triton_caches", "Paged"),
    "triton-decode": _made_when_asked("attncheck.subjects.triton_caches", "Decode"),
    "ideal": _made_when_asked("attncheck.subjects.ideal", "Ideal"),
    "sdpa-math": _made_when_asked("attncheck.subjects.torch_kernels", "Sdpa", "math"),
    "sdpa-flash": _made_when_asked("attncheck.subjects.torch_kernels", "Sdpa", "flash"),
    "sdpa-efficient": _made_when_asked("attncheck.subjects.torch_kernels", "Sdpa", "efficient"),
    "sdpa-cudnn": _made_when_asked("attncheck.subjects.torch_kernels", "Sdpa", "cudnn"),
    "flex": _made_when_asked("attncheck.subjects.torch_kernels", "Flex"),
    "triton-softmax-naive": _made_when_asked(
        "attncheck.subjects.softmax_kernels", "Softmax", "naive"
    ),
    "triton-softmax-safe": _made_when_asked(
        "attncheck.subjects.softmax_kernels", "Softmax", "safe"
    ),
    "triton-softmax-online": _made_when_asked(
        "attncheck.subjects.softmax_kernels", "Softmax", "online"
    ),
    "triton-softmax-blocked": _made_when_asked(
        "attncheck.subjects.softmax_kernels", "Softmax", "blocked"
    ),
    "torch-softmax": _made_when_asked("attncheck.subjects.softmax_kernels", "TorchSoftmax"),
}


def builtin_names() -> tuple[str, ...]:
    """Names of the subjects, in the order in which they are listed."""
    return tuple(BUILTIN)


def subject_named(name: str) -> Subject:
    """A new subject called ``name``; raises UnknownName with the valid names."""
    if name not in BUILTIN:
        raise UnknownName("kernel", name, BUILTIN)
    return BUILTIN[name]()


def is_reference(kernel: str) -> bool:
    """Whether ``kernel`` is of a file or module, and no name."""
    return ":" in kernel


def anchor_entry(entry: str, folder: Path) -> str:
    """An entry that is relative to ``folder``."""
    file, colons, name = entry.partition("::")
    return f"{folder / file}{colons}{name}" if colons else entry


def import_reference(kernel: str, what: str) -> Any:
    """The object of ``file.py::name`` or ``package.module:name``."""
    file, _, name = kernel.partition(":")
    if file.endswith(".py") and not name.startswith(":"):
        raise UsageError(f"{what}: a file takes two colons: {file}::{name or 'NAME'}.")
    return (load_member if "::" in kernel else load_module_member)(kernel, what)


def import_entry(entry: str, folder: Path, what: str) -> Any:
    """The object that a table's entry names; modules are looked for in ``folder`` too."""
    if entry in BUILTIN:
        return subject_named(entry)
    if not is_reference(entry):
        raise UsageError(
            f"{what}: its entry {entry!r} is neither FILE.py::NAME nor package.module:NAME."
        )
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return import_reference(entry, what)


def import_backward(table: Capabilities, folder: Path, what: str) -> Callable[..., object] | None:
    """The function that a table's ``backward`` names; None where it names none."""
    said = table.backward
    if not isinstance(said, str) or said == AUTOGRAD:
        return None
    found = import_entry(anchor_entry(said, folder), folder, f"{what}: its backward")
    if not callable(found) or inspect.isclass(found):
        kind = type(found).__name__
        raise UsageError(f"{what}: its backward {said!r} is {kind}: it must be a function.")
    function: Callable[..., object] = found
    return function
