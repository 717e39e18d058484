"""Do all worlds say the same of a mask or score mod? What ``attncheck mods`` is made of."""

from __future__ import annotations

from typing import Literal

import msgspec

from attncheck.record import Environment  # noqa: TC001  # msgspec reads the annotations

__all__ = ["SCHEMA", "Answer", "ModRecord", "ModReport"]

SCHEMA = 1


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one world says of a mod, beside what the callable itself says.

    Attributes:
        status: ``equal``; ``different``; ``unknown`` where it differs nowhere, but somewhere
            nothing can be said; ``unsupported``; ``error`` where it raised.
        detail: The first difference, why it is unsupported or unknown, or what was raised; in one
            line.
    """

    status: Literal["equal", "different", "unknown", "unsupported", "error"]
    detail: str = ""


class ModRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One mod of a file.

    Attributes:
        name: Its name in the file.
        kind: ``mask`` or ``score mod``.
        line: Where it is defined; None where nothing says so.
        expression: As traced.
        answers: By world.
    """

    name: str
    kind: Literal["mask", "score mod"]
    line: int | None
    expression: str
    answers: dict[str, Answer]


class ModReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Records with what they share.

    Attributes:
        schema: Version of this layout.
        command: The command line that made it, without paths.
        environment: Where.
        mpmath: Version of mpmath.
        file: Name of the file, without its folder.
        shape: The index ranges, such as ``B2 H2 Q40 K48``: every place in them is compared.
        worlds: Name of each world → what it is, in a line.
        records: One a mod, in the order of the file.
    """

    schema: int = SCHEMA
    command: str
    environment: Environment
    mpmath: str
    file: str
    shape: str
    worlds: dict[str, str]
    records: tuple[ModRecord, ...]
