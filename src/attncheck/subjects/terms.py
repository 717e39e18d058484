"""Terms of testing a plain function: how to call it, and what it was found to support."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from attncheck.core.errors import UsageError
from attncheck.subjects.capabilities.capability_table import Capabilities
from attncheck.subjects.capabilities.declared import Declared
from attncheck.subjects.capabilities.subject import Subject
from attncheck.subjects.conventions.convention import ConventionOptions
from attncheck.subjects.conventions.declarations import make_subject
from attncheck.subjects.conventions.function_subject import FunctionSubject


class Terms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a function is called, and the limits of its Problems."""

    convention: str  # a name of a calling convention
    # lse, empty_row, causal: as in ConventionOptions; empty means the convention's own.
    lse: str = ""
    empty_row: str = ""
    causal: str = ""
    table: Capabilities | None = None  # what it computed correctly in trials; None for no limit
    limits: str = ""  # why Problems beyond the table are refused, in one line
    # Ids of Problems that are asked although the table excludes them.
    admitted: tuple[str, ...] = ()


def subject_on_terms(subject: Subject, terms: Terms) -> Subject:
    """Return a kernel on other terms, without its own table.

    Raises:
        UsageError: if it does not follow the convention, or if it is a Subject and the terms have
            options, because a Subject itself defines how it is called.
    """
    plain = subject.inner if isinstance(subject, Declared) else subject
    how: dict[str, Any] = {n: getattr(terms, n) for n in ("lse", "empty_row", "causal")}
    if isinstance(plain, FunctionSubject):
        options = replace(plain.options, **how)
        called = make_subject(plain.function, plain.name, terms.convention, options)
    else:
        called = make_subject(plain, plain.name, terms.convention, ConventionOptions(**how))
    if isinstance(called, str):
        raise UsageError(f"kernel {subject.name!r} {called}.")
    called.conventions = plain.conventions
    if terms.table is None:
        return called
    return Declared(
        called, terms.table, called.name, limits=terms.limits, admitted=frozenset(terms.admitted)
    )
