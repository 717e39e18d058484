"""How far each float64 oracle is from the exact result; what ``attncheck oracles`` is made of."""

from __future__ import annotations

from typing import Any

import msgspec

from attncheck.judgement import Place  # noqa: TC001  # msgspec reads the annotations
from attncheck.record import Environment  # noqa: TC001  # and these

__all__ = [
    "CERTIFICATE_SCHEMA",
    "SCHEMA",
    "TRUTH",
    "Agreement",
    "Certificate",
    "CertificateReport",
    "Distance",
    "OracleRecord",
    "OracleReport",
    "Proven",
    "Rows",
]

SCHEMA = 1
CERTIFICATE_SCHEMA = 1

TRUTH = "truth"
"""The oracle that kernels are compared with, in certificates."""


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


class Proven(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Upper bounds of an oracle's error in one tensor, beside what the judge allows a kernel there.

    Attributes:
        share: Largest proven error ÷ allowance, at most the largest float; None where nothing was
            proven beside an allowance.
        error: The proven error there.
        allowance: The allowance there; 0 in a row that sees no key, of an error that is not 0.
        at: Where.
        a_priori: Largest proven error ÷ what the judge assumes of the oracle without a proof, its
            own bound for float64; None where that was not asked, or is infinite throughout.
        elements: Numbers with a proven error and a finite allowance.
        unproven: Numbers of which nothing is proven: balls say nothing, or the oracle's or the
            exact one is not finite.
        unbounded: Numbers with a proven error and without an allowance.
    """

    share: float | None
    error: float | None
    allowance: float | None
    at: Place | None
    a_priori: float | None = None
    elements: int
    unproven: int = 0
    unbounded: int = 0


class Certificate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is proven of one float64 oracle on one Case.

    Attributes:
        case_id, case: The Case and its short id.
        variant: The plan's name for the mask and score mod; ``softmax`` for that operation.
        distribution: Of the inputs, as in the Case.
        oracle: Its name; ``truth`` is the one that kernels are compared with.
        out, lse: See ``Proven``.
        rows: Rows of the Case.
        proven_rows: Those that were enclosed: all of a small Problem, a sample of a large one's.
    """

    case_id: str
    case: dict[str, Any]
    variant: str
    distribution: str
    oracle: str
    out: Proven
    lse: Proven
    rows: int
    proven_rows: int

    def holds(self, limit: float) -> bool:
        """Whether all of it is proven to be at most this part of its allowance."""
        return all(
            not part.unproven and (part.share is None or part.share <= limit)
            for part in (self.out, self.lse)
        )

    @property
    def within_a_priori(self) -> bool:
        """Whether no proven error is beyond what is assumed of the oracle without a proof."""
        parts = (self.out.a_priori, self.lse.a_priori)
        return all(part is None or part <= 1 for part in parts)


class CertificateReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Certificates with what they share.

    Attributes:
        schema: Version of this layout.
        command: The command line that made it, without paths.
        environment: Where.
        flint: Version of python-flint.
        bits: Of the midpoints of the balls.
        limit: Part of an allowance that the truth's error may be for the judge to decide.
        arithmetics: Dtype → the profile that its allowances are of, in a line.
        oracles: Name of each float64 oracle → what it is, in a line.
        records: One a Case and oracle.
    """

    schema: int = CERTIFICATE_SCHEMA
    command: str
    environment: Environment
    flint: str
    bits: int
    limit: float
    arithmetics: dict[str, str]
    oracles: dict[str, str]
    records: tuple[Certificate, ...]

    @property
    def truths(self) -> tuple[Certificate, ...]:
        """Those of the oracle that kernels are compared with."""
        return tuple(record for record in self.records if record.oracle == TRUTH)
