"""The kernels that a command line names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from attncheck.capabilities.subject import Subject

__all__ = ["named", "unconcerned"]


def named(kernels: Iterable[str]) -> list[Subject]:
    """The kernels called ``kernels``, each once.

    Raises:
        UsageError: for one that cannot be (``subjects.load``), or two that reports would call the
            same.
    """
    from attncheck.core.errors import UsageError
    from attncheck.subjects.load import load_subject

    by_name: dict[str, Subject] = {}
    for kernel in dict.fromkeys(kernels):
        subject = load_subject(kernel)
        if subject.name in by_name:
            raise UsageError(f"kernel {kernel!r}: another one is called {subject.name!r} too.")
        by_name[subject.name] = subject
    return list(by_name.values())


def unconcerned(subject: Subject) -> str:
    """What is wrong with asking by name for a kernel that nothing asked for concerns."""
    return (
        f"kernel {subject.name!r} is for other operations or dtypes than are asked for: "
        "see attncheck list."
    )
