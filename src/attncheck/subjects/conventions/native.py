"""attncheck's own convention: a Subject."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.subjects.contract import Subject
from attncheck.subjects.conventions.convention import Convention

if TYPE_CHECKING:
    from attncheck.subjects.conventions.options import ConventionOptions

__all__ = ["NATIVE"]


def _claims(found: object) -> bool:
    return isinstance(found, Subject)


def _unfit(found: object) -> str | None:
    return None if isinstance(found, Subject) else "be a Subject"


def _adopt(found: object, name: str, options: ConventionOptions) -> Subject:
    del name, options  # it has its own
    assert isinstance(found, Subject)
    return found


NATIVE = Convention(
    name="native",
    summary="a Subject of attncheck: it says itself what it takes and how it is called",
    claims=_claims,
    unfit=_unfit,
    adopt=_adopt,
)
