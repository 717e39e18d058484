"""The subjects that attncheck brings, by name; importing this imports neither torch nor Triton."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attncheck.errors import UnknownName

if TYPE_CHECKING:
    from attncheck.subjects.contract import Subject

__all__ = ["SUBJECTS", "names", "subject_named"]


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


SUBJECTS: dict[str, _Made] = {
    "triton-flash2": _made_when_asked("attncheck.subjects.flash2", "Flash2"),
    "triton-flash2-vt": _made_when_asked("attncheck.subjects.flash2", "Flash2TransposedValues"),
    "triton-flash2-fastacc": _made_when_asked(
        "attncheck.subjects.flash2", "Flash2FastAccumulation"
    ),
    "triton-flash1": _made_when_asked("attncheck.subjects.flash1", "Flash1"),
    "triton-varlen": _made_when_asked("attncheck.subjects.varlen", "Varlen"),
    "triton-paged": _made_when_asked("attncheck.subjects.paged", "Paged"),
    "triton-decode": _made_when_asked("attncheck.subjects.decode", "Decode"),
    "ideal": _made_when_asked("attncheck.subjects.ideal", "Ideal"),
    "sdpa-math": _made_when_asked("attncheck.subjects.sdpa", "Sdpa", "math"),
    "sdpa-flash": _made_when_asked("attncheck.subjects.sdpa", "Sdpa", "flash"),
    "sdpa-efficient": _made_when_asked("attncheck.subjects.sdpa", "Sdpa", "efficient"),
    "sdpa-cudnn": _made_when_asked("attncheck.subjects.sdpa", "Sdpa", "cudnn"),
    "flex": _made_when_asked("attncheck.subjects.flex", "Flex"),
    "triton-softmax-naive": _made_when_asked("attncheck.subjects.softmax", "Softmax", "naive"),
    "triton-softmax-safe": _made_when_asked("attncheck.subjects.softmax", "Softmax", "safe"),
    "triton-softmax-online": _made_when_asked("attncheck.subjects.softmax", "Softmax", "online"),
    "triton-softmax-blocked": _made_when_asked("attncheck.subjects.softmax", "Softmax", "blocked"),
    "torch-softmax": _made_when_asked("attncheck.subjects.torch_softmax", "TorchSoftmax"),
}


def names() -> tuple[str, ...]:
    """Names of the subjects, in the order in which they are listed."""
    return tuple(SUBJECTS)


def subject_named(name: str) -> Subject:
    """A new subject called ``name``; raises UnknownName with the valid names."""
    if name not in SUBJECTS:
        raise UnknownName("kernel", name, SUBJECTS)
    return SUBJECTS[name]()
