"""How far each float64 oracle is from the exact result; what ``attncheck oracles`` is made of."""

from __future__ import annotations

from typing import Any

import msgspec

from attncheck.record import Environment, Place  # noqa: TC001  # msgspec reads the annotations

__all__ = ["SCHEMA", "Agreement", "Distance", "OracleRecord", "OracleReport", "Rows"]

SCHEMA = 1


class Distance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The largest error among those that are finite, as multiples of a unit of their own.

    Attributes:
        units: Largest |error| ÷ unit, at most the largest float; None where no number was compared.
        at: Where; None where no number was compared.
        compared: Numbers that are finite, as are the exact one and the unit.
        nonfinite: The others, of rows that see a key.
    """

    units: float | None
    at: Place | None
    compared: int
    nonfinite: int = 0


class Rows(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What became of the rows that see a key.

    Attributes:
        total: How many there are.
        nonfinite: Those where LSE or an element of out, or the exact one, is NaN or infinite.
        overflowed: Of those, where the sum of exponentials or a product with it is infinite.
        vanished: Of those, where the sum of exponentials is 0, and out 0/0.
        dead_wrong: Rows that see no key, and whose out is not exactly 0 or whose LSE is not −∞.
    """

    total: int
    nonfinite: int = 0
    overflowed: int = 0
    vanished: int = 0
    dead_wrong: int = 0


class OracleRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One float64 oracle on one Case.

    Attributes:
        case_id, case: The Case and its short id.
        variant: The plan's name for the mask and score mod; ``softmax`` for that operation.
        distribution: Of the inputs, as in the Case.
        oracle: Its name; ``streaming`` is the one that kernels are compared with.
        out: In units of 2^-53 Σ_j p_j |v_j| of each element; of 2^-53 p_j for softmax. The sum
            counts as 2^-1022, the smallest normal number, where it is smaller.
        lse: In units of 2^-53 max(1, |LSE|).
        rows: Where it is not finite.
    """

    case_id: str
    case: dict[str, Any]
    variant: str
    distribution: str
    oracle: str
    out: Distance
    lse: Distance
    rows: Rows


class Agreement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The recurrences on one Case among themselves, all at the same number of digits.

    Attributes:
        case_id: The Case.
        variant, distribution: As in its OracleRecords.
        oracles: Which recurrences.
        log10: Decimal logarithm of the largest finite distance from the reference: of out relative
            to Σ_j p_j |v_j| (p_j for softmax), of LSE to max(1, |LSE|). None where there is none.
        infinite: Numbers, over all recurrences, whose distance is not finite: either is NaN or
            infinite and not the very same, or they differ where what they are relative to is 0.
        furthest: The recurrence with the largest distance; None where all are equal.
    """

    case_id: str
    variant: str
    distribution: str
    oracles: tuple[str, ...]
    log10: float | None
    infinite: int = 0
    furthest: str | None = None

    def holds(self, digits: int) -> bool:
        """Whether every distance is at most 10^-digits."""
        return not self.infinite and (self.log10 is None or self.log10 <= -digits)


class OracleReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Records with what they share.

    Attributes:
        schema: Version of this layout.
        command: The command line that made it, without paths.
        environment: Where.
        mpmath: Version of mpmath.
        backend: What multiplies its whole numbers: ``gmpy2 2.1.5``, or ``python``.
        digits: Decimal digits of the exact side.
        must_agree: To how many digits the recurrences must agree there.
        reference: Name of the recurrence that is the exact result: the safe softmax, dense.
        may_overflow: Oracles that cannot be finite everywhere, by their definition.
        oracles: Name of each float64 oracle → what it is, in a line.
        records: One a Case and oracle.
        agreements: One a Case.
    """

    schema: int = SCHEMA
    command: str
    environment: Environment
    mpmath: str
    backend: str
    digits: int
    must_agree: int
    reference: str
    may_overflow: tuple[str, ...]
    oracles: dict[str, str]
    records: tuple[OracleRecord, ...]
    agreements: tuple[Agreement, ...]
