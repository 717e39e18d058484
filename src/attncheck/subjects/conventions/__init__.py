"""Kernels that are no Subjects: functions of a known calling convention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.errors import UnknownName
from attncheck.subjects.conventions.convention import Convention
from attncheck.subjects.conventions.flash_attn import FLASH_ATTN
from attncheck.subjects.conventions.flex import FLEX
from attncheck.subjects.conventions.native import NATIVE
from attncheck.subjects.conventions.options import ConventionOptions
from attncheck.subjects.conventions.paged import PAGED
from attncheck.subjects.conventions.sdpa import SDPA
from attncheck.subjects.conventions.varlen import VARLEN

if TYPE_CHECKING:
    from attncheck.subjects.contract import Subject

__all__ = ["CONVENTIONS", "Convention", "adopted", "convention_named"]

CONVENTIONS: dict[str, Convention] = {
    c.name: c for c in (NATIVE, SDPA, FLASH_ATTN, VARLEN, FLEX, PAGED)
}

# Who is asked first whether an object shows that it is theirs. Where none is sure it is SDPA's.
_SURE = (NATIVE, VARLEN, PAGED, FLEX, SDPA, FLASH_ATTN)

_AS_USUAL = ConventionOptions()


def convention_named(name: str) -> Convention:
    """The convention called ``name``; raises UnknownName with the valid names."""
    if name not in CONVENTIONS:
        raise UnknownName("convention", name, CONVENTIONS)
    return CONVENTIONS[name]


def adopted(
    found: object,
    name: str,
    convention: str | None = None,
    options: ConventionOptions = _AS_USUAL,
) -> Subject | str:
    """``found`` as a Subject.

    Args:
        found: What a file or module holds.
        name: What reports are to call it.
        convention: A name of ``CONVENTIONS``; None for the one that its signature, or its name,
            shows, which is sdpa where they show none.
        options: Where it differs from its convention.

    Returns:
        The Subject, or why there is none, to stand after ``it must``.

    Raises:
        UnknownName: for a convention that is not known.
    """
    if convention:
        taken = convention_named(convention)
    else:
        taken = next((each for each in _SURE if each.claims(found)), SDPA)
    reason = taken.unfit(found)
    if reason is not None:
        return reason if convention else f"be a Subject, or {reason}"
    if taken is NATIVE and options != _AS_USUAL:
        return "be a function: a Subject says itself how it is called"
    return taken.adopt(found, name, options)
