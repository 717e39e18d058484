"""Whether a kernel has other launches to be asked about."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.capabilities.subject import Subject
from attncheck.relations import RELATIONS

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["has_launches_for"]


def has_launches_for(subject: Subject, questions: Iterable[str]) -> bool:
    """Whether any of ``questions`` can be asked of ``subject`` as far as its launches go.

    A kernel that says nothing of other launches is not asked about them: it gets no such test.
    """
    relaunched = (q in RELATIONS and RELATIONS[q].relaunched for q in questions)
    return not all(relaunched) or type(subject).launches is not Subject.launches
