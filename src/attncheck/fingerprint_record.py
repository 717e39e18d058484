"""What a kernel's arithmetic was read to be, beside what it declares."""

from __future__ import annotations

from typing import Literal

import msgspec

from attncheck.record import Environment  # noqa: TC001  # msgspec reads the annotations

__all__ = ["FIELDS", "SCHEMA", "DtypeFingerprint", "FingerprintReport", "Reading", "Standing"]

SCHEMA = 1

FIELDS: dict[str, str] = {
    "products": "bits of an operand that a product reads",
    "q·k": "bits that q·k is added up in",
    "exp2": "largest error of exp2 and its argument that shows",
    "P": "format of P as P·V reads it, and what it is multiplied by",
    "row sum": "of P as it is rounded, or before",
    "P·V": "bits that P·V is added up in",
    "tile": "keys of a step",
    "order": "which keys come first",
    "parts": "parts of the keys that are merged, by length and batch",
    "sentinel": "score of a hidden key",
    "subnormals": "what becomes of numbers below the smallest normal one",
}
"""What is read, in this order, and what each is."""

Standing = Literal["agrees", "finer", "differs", "not declared", "not seen"]
"""A reading beside the declaration: the same; less error than is declared; another thing, or more
error; there is nothing to compare it with; nothing was read."""


class Reading(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One field.

    Attributes:
        field: A name in ``FIELDS``.
        standing: See ``Standing``.
        read: What was read; empty where nothing was.
        declared: What the kernel declares; empty for nothing.
        reason: Why nothing was read, or what is to be said of it.
    """

    field: str
    standing: Standing
    read: str = ""
    declared: str = ""
    reason: str = ""


class DtypeFingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kernel in one dtype.

    Attributes:
        dtype: A name of ``formats.DTYPES``.
        calls: Questions that it answered.
        arithmetic: What it declares, in a line; empty where it answered nothing.
        readings: One a field.
    """

    dtype: str
    calls: int
    arithmetic: str = ""
    readings: tuple[Reading, ...]


class FingerprintReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Records with what they share.

    Attributes:
        schema: Version of this layout.
        command: The command line that made it, without paths.
        kernel: Its name.
        device: ``cpu`` or ``cuda``.
        environment: Where.
        records: One a dtype, in the order asked for.
    """

    schema: int = SCHEMA
    command: str
    kernel: str
    device: str
    environment: Environment
    records: tuple[DtypeFingerprint, ...]
