"""Kernels that are no Subjects: functions of a known calling convention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.errors import UnknownName
from attncheck.subjects.conventions.convention import Convention
from attncheck.subjects.conventions.native import NATIVE
from attncheck.subjects.conventions.sdpa import SDPA

if TYPE_CHECKING:
    from attncheck.subjects.contract import Subject

__all__ = ["CONVENTIONS", "Convention", "adopted", "convention_named"]

# In the order in which they are tried: a Subject that is callable stays one.
CONVENTIONS: dict[str, Convention] = {c.name: c for c in (NATIVE, SDPA)}


def convention_named(name: str) -> Convention:
    """The convention called ``name``; raises UnknownName with the valid names."""
    if name not in CONVENTIONS:
        raise UnknownName("convention", name, CONVENTIONS)
    return CONVENTIONS[name]


def adopted(found: object, name: str, convention: str | None = None) -> Subject | str:
    """``found`` as a Subject.

    Args:
        found: What a file or module holds.
        name: What reports are to call it.
        convention: A name of ``CONVENTIONS``; None for the first that it fits.

    Returns:
        The Subject, or why there is none, to stand after ``it must``.

    Raises:
        UnknownName: for a convention that is not known.
    """
    tried = [convention_named(convention)] if convention else list(CONVENTIONS.values())
    reasons = []
    for each in tried:
        reason = each.unfit(found)
        if reason is None:
            return each.adopt(found, name)
        reasons.append(reason)
    return ", or ".join(reasons)
