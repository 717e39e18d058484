"""How small a fault is still seen: one run of ``attncheck faults --sensitivity``, as data."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["OURS", "SCHEMA", "Least", "Seen", "SensitivityReport"]

SCHEMA = 1

OURS = "attncheck"
"""In place of a rule's name: the gate."""


class Least(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The smallest size of a fault that somebody sees.

    Attributes:
        size: It; None where even the largest is not seen.
        below: The next one of the scale, which no question sees; None where there is none.
        question: Who sees ``size``.
        asked: How many times a question was asked of some size.
        unfit: Questions of which a rule says nothing, since it refuses some right kernel there.
    """

    size: float | None
    below: float | None
    question: str = ""
    asked: int = 0
    unfit: int = 0


class Seen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How small one fault is still seen in one dtype.

    Attributes:
        fault: Its id.
        summary: What the kernel does wrong.
        unit: ``ε`` or ``bits``.
        dtype: In which.
        tier: How hard the gate is.
        device: Where.
        questions: How many the gate has, of which the rules are asked ``plain``.
        plain: Comparisons and probes of attention.
        rules: By rule, ``OURS`` among them.
        seconds: That all this took.
    """

    fault: str
    summary: str
    unit: Literal["ε", "bits"]
    dtype: str
    tier: str
    device: str
    questions: int
    plain: int
    rules: dict[str, Least]
    seconds: float = 0.0


class SensitivityReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a run found.

    Attributes:
        schema: Version of this layout.
        command: The command line that made it, without paths.
        seen: Fault by fault, dtype by dtype.
    """

    schema: int = SCHEMA
    command: str
    seen: tuple[Seen, ...]
