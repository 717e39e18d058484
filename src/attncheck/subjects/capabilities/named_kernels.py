"""The subjects that attncheck brings, by name; importing this imports neither torch nor Triton."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attncheck.core.errors import UnknownName

if TYPE_CHECKING:
    from attncheck.subjects.capabilities.subject import Subject

__all__ = ["BUILTIN", "builtin_names", "subject_named"]


@dataclass(frozen=True, slots=True)
class _BuiltIn:
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
        """Return a new subject."""
        subject: Subject = getattr(importlib.import_module(self.module), self.name)(*self.arguments)
        return subject


# Text, not classes: importing these modules takes a second, and listing names must not.
_FLASH = "attncheck.subjects.triton_flash"
_CACHES = "attncheck.subjects.triton_caches"
_TORCH = "attncheck.subjects.torch_kernels"
_SOFTMAX = "attncheck.subjects.softmax_kernels"

BUILTIN: dict[str, _BuiltIn] = {
    "triton-flash2": _BuiltIn(_FLASH, "Flash2"),
    "triton-flash2-vt": _BuiltIn(_FLASH, "Flash2TransposedValues"),
    "triton-flash2-fastacc": _BuiltIn(_FLASH, "Flash2FastAccumulation"),
    "triton-flash1": _BuiltIn(_FLASH, "Flash1"),
    "triton-varlen": _BuiltIn(_CACHES, "Varlen"),
    "triton-paged": _BuiltIn(_CACHES, "Paged"),
    "triton-decode": _BuiltIn(_CACHES, "Decode"),
    "ideal": _BuiltIn("attncheck.subjects.ideal", "Ideal"),
    "sdpa-math": _BuiltIn(_TORCH, "Sdpa", ("math",)),
    "sdpa-flash": _BuiltIn(_TORCH, "Sdpa", ("flash",)),
    "sdpa-efficient": _BuiltIn(_TORCH, "Sdpa", ("efficient",)),
    "sdpa-cudnn": _BuiltIn(_TORCH, "Sdpa", ("cudnn",)),
    "flex": _BuiltIn(_TORCH, "Flex"),
    "triton-softmax-naive": _BuiltIn(_SOFTMAX, "Softmax", ("naive",)),
    "triton-softmax-safe": _BuiltIn(_SOFTMAX, "Softmax", ("safe",)),
    "triton-softmax-online": _BuiltIn(_SOFTMAX, "Softmax", ("online",)),
    "triton-softmax-blocked": _BuiltIn(_SOFTMAX, "Softmax", ("blocked",)),
    "torch-softmax": _BuiltIn(_SOFTMAX, "TorchSoftmax"),
}


def builtin_names() -> tuple[str, ...]:
    """Names of the subjects, in the order in which they are listed."""
    return tuple(BUILTIN)


def subject_named(name: str) -> Subject:
    """Return a new subject called ``name``; raises UnknownName with the valid names."""
    if name not in BUILTIN:
        raise UnknownName("kernel", name, BUILTIN)
    return BUILTIN[name]()
