"""Terms on which a plain function is asked: how it is called, and what was found that it takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from attncheck.core.errors import UsageError
from attncheck.subjects.capabilities.capability_table import Capabilities
from attncheck.subjects.capabilities.declared import Declared
from attncheck.subjects.capabilities.subject import Subject
from attncheck.subjects.conventions.convention import ConventionOptions
from attncheck.subjects.conventions.declarations import adopted
from attncheck.subjects.conventions.function_subject import FunctionSubject


class Terms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a function is called, and within what."""

    convention: str  # a name of a calling convention
    lse: str = ""  # this and the next as of ConventionOptions; empty: as the convention has it
    empty_row: str = ""
    causal: str = ""
    table: Capabilities | None = None  # what it was right on when it was tried; None for no limit
    limits: str = ""  # the same in a line: why it is not asked more
    # Ids of Problems that are asked although the table has no place for them.
    admitted: tuple[str, ...] = ()


def subject_on_terms(subject: Subject, terms: Terms) -> Subject:
    """Return a kernel on other terms, and without the table that it has.

    Raises:
        UsageError: for what is none of the convention, and for terms of a Subject, which says
            itself how it is called.
    """
    plain = subject.inner if isinstance(subject, Declared) else subject
    how: dict[str, Any] = {n: getattr(terms, n) for n in ("lse", "empty_row", "causal")}
    if isinstance(plain, FunctionSubject):
        options = replace(plain.options, **how)
        called = adopted(plain.function, plain.name, terms.convention, options)
    else:
        called = adopted(plain, plain.name, terms.convention, ConventionOptions(**how))
    if isinstance(called, str):
        raise UsageError(f"kernel {subject.name!r} must {called}.")
    called.conventions = plain.conventions
    if terms.table is None:
        return called
    return Declared(
        called, terms.table, called.name, limits=terms.limits, admitted=frozenset(terms.admitted)
    )
