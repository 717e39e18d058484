"""Terms on which a plain function is asked: how it is called, and what was found that it takes."""

from __future__ import annotations

from typing import Any

import msgspec

from attncheck.subjects.capabilities.capability_table import Capabilities
from attncheck.subjects.capabilities.declared import Declared
from attncheck.subjects.capabilities.subject import Subject
from attncheck.subjects.conventions.convention import ConventionOptions
from attncheck.subjects.conventions.declarations import adopted
from attncheck.subjects.conventions.function_subject import FunctionSubject


class Terms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a function is called, and within what."""

    convention: str  # a name of a calling convention
    lse: str = ""  # the logarithm of its LSE, where it is not the convention's
    causal: str = ""  # where its diagonal ends, where that is not the convention's
    table: Capabilities | None = None  # what it was right on when it was tried; None for no limit
    limits: str = ""  # the same in a line: why it is not asked more
    # Ids of Problems that are asked although the table has no place for them.
    admitted: tuple[str, ...] = ()


def subject_on_terms(subject: Subject, terms: Terms) -> Subject:
    """Return a function's Subject on other terms; raises TypeError for any other Subject."""
    plain = subject.inner if isinstance(subject, Declared) else subject
    if not isinstance(plain, FunctionSubject):
        raise TypeError(f"{subject.name} is no plain function")
    how: dict[str, Any] = {"lse": terms.lse, "causal": terms.causal}
    options = ConventionOptions(**how)
    called = adopted(plain.function, plain.name, terms.convention, options)
    assert isinstance(called, Subject), called
    called.conventions = plain.conventions
    if terms.table is None:
        return called
    return Declared(
        called, terms.table, called.name, limits=terms.limits, admitted=frozenset(terms.admitted)
    )
