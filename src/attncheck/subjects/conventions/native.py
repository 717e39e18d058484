"""attncheck's own convention: a Subject."""

from __future__ import annotations

from attncheck.subjects.contract import Subject
from attncheck.subjects.conventions.convention import Convention

__all__ = ["NATIVE"]


def _unfit(found: object) -> str | None:
    return None if isinstance(found, Subject) else "be a Subject"


def _adopt(found: object, name: str) -> Subject:
    del name  # it has its own
    assert isinstance(found, Subject)
    return found


NATIVE = Convention(
    name="native",
    summary="a Subject of attncheck: it says itself what it takes and how it is called",
    unfit=_unfit,
    adopt=_adopt,
)
