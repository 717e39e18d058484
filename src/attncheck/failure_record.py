"""A failure that is kept: everything that it takes to ask the same kernel the same Case again."""

from __future__ import annotations

import msgspec

from attncheck.record import Environment, Record  # noqa: TC001  # msgspec reads the annotations

__all__ = ["SCHEMA", "Failed"]

SCHEMA = 1


class Failed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kernel that failed one Case.

    Attributes:
        schema: Version of this layout.
        id: Ten letters and digits that stand for the kernel, how it is called, the device and the
            Case: two kernels that fail the same Case have two.
        kernel: As it was asked for: a name, ``file.py::name`` or ``package.module:name``.
        convention: A name of a calling convention; empty for the first that fits.
        device: ``cpu`` or ``cuda``.
        question: What the Case asks, in one line.
        test: The property's test; empty where there is none.
        record: What the kernel answered.
        environment: Where.
    """

    schema: int = SCHEMA
    id: str
    kernel: str
    convention: str = ""
    device: str
    question: str = ""
    test: str = ""
    record: Record
    environment: Environment
