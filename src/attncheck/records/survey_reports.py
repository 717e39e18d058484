"""Reports of surveys: oracles, their certificates, mods, block masks, and a kernel's arithmetic."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from attncheck.core.judgement import Place
from attncheck.records.record import Environment

TRUTH = "truth"  # Name in certificates of the oracle that kernels are compared with.


class Distance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The largest finite error, where each error is measured in a unit of its own."""

    # Largest |error| ÷ unit, at most the largest float; None where no number was compared.
    units: float | None
    at: Place | None  # element of the largest error; None where no number was compared
    compared: int  # numbers that are finite together with their exact values and units
    nonfinite: int = 0  # all other numbers in rows that see a key


class Rows(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Results in the rows that see a key."""

    total: int  # number of rows that see a key
    nonfinite: int = 0  # rows where LSE or an element of out, computed or exact, is not finite
    # Counted apart from other NaNs, since some oracles overflow by definition.
    overflowed: int = 0  # nonfinite rows whose sum of exponentials or a product with it overflows
    vanished: int = 0  # nonfinite rows whose sum of exponentials is 0, so that out is 0/0
    # Rows that see no key and whose out is not exactly 0 or whose LSE is not −∞.
    dead_wrong: int = 0


class OracleOnCase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One float64 oracle on one Case."""

    # case_id, case: the Case and its short id.
    case_id: str
    case: dict[str, Any]
    variant: str  # the plan's name for the mask and score mod; ``softmax`` for that operation
    distribution: str  # distribution of the inputs, as in the Case
    oracle: str  # its name; kernels are compared with ``streaming``, or a Certificate's ``truth``


class OracleRecord(OracleOnCase, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Distance of an oracle from the exact result."""

    # In units of 2^-53 Σ_j p_j |v_j| of each element, or of 2^-53 p_j for softmax. A sum below the
    # smallest normal number counts as this, 2^-1022.
    out: Distance
    lse: Distance  # in units of 2^-53 max(1, |LSE|)
    rows: Rows  # counts of rows that are not finite


class Agreement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Agreement of the recurrences on one Case, all computed to the same number of digits."""

    case_id: str  # id of the Case
    # variant, distribution: as in the Case's OracleRecords.
    variant: str
    distribution: str
    oracles: tuple[str, ...]  # names of the recurrences
    # Decimal logarithm of the largest finite distance from the reference: for out relative to Σ_j
    # p_j |v_j| (p_j for softmax), for LSE to max(1, |LSE|). None where none is above 0.
    # A logarithm, since at many digits the distance is below the smallest float.
    log10: float | None
    # Numbers, over all recurrences, without a finite distance: one side is NaN or infinite and the
    # other is different, or they differ and the scale of the distance is 0.
    infinite: int = 0
    # The recurrence with the largest distance; None where all are equal.
    furthest: str | None = None

    def holds(self, digits: int) -> bool:
        """Return whether every distance is at most 10^-digits."""
        # None: the distance of every number is 0.
        return not self.infinite and (self.log10 is None or self.log10 <= -digits)


class OracleReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Records on float64 oracles, with the data that they share."""

    schema: int = 1
    command: str
    environment: Environment
    mpmath: str
    # Both give the same digits; gmpy2 is faster.
    backend: str  # integer arithmetic of mpmath: ``gmpy2 2.1.5``, or ``python``
    digits: int  # decimal digits of the exact results
    # Fewer than ``digits``, the last of which have rounding errors themselves.
    must_agree: int  # number of digits to which the recurrences must agree
    reference: str  # name of the recurrence that is the exact result: the safe softmax, dense
    may_overflow: tuple[str, ...]  # oracles that are not finite everywhere by definition
    oracles: dict[str, str]  # name of each float64 oracle → one-line description
    records: tuple[OracleRecord, ...]  # one for each Case and oracle
    agreements: tuple[Agreement, ...]  # one for each Case


class ProvenError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Upper bounds of an oracle's error in one tensor, relative to a kernel's allowance."""

    # Largest proven error ÷ allowance, at most the largest float; None where no element has both.
    share: float | None
    error: float | None  # the proven error at ``at``
    # The allowance at ``at``; 0 for a nonzero error in a row that sees no key.
    allowance: float | None
    at: Place | None
    # Largest proven error ÷ the a-priori bound for float64, which the judge assumes of the oracle
    # without a proof; None where it was not computed, or is infinite throughout.
    a_priori: float | None = None
    elements: int  # numbers with a proven error and a finite allowance
    # Numbers without a proven error: the balls are unbounded, or the oracle's or the exact number
    # is not finite.
    # A Certificate with any of them does not hold.
    unproven: int = 0
    unbounded: int = 0  # numbers with a proven error and without an allowance


class Certificate(OracleOnCase, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Proven error of an oracle."""

    # out, lse: see ``ProvenError``.
    out: ProvenError
    lse: ProvenError
    rows: int
    # Balls take far longer than floats, so that a large Problem is sampled.
    proven_rows: int  # rows that were enclosed: all of a small Problem, a sample of a large one

    def holds(self, limit: float) -> bool:
        """Return whether every error is proven to be at most ``limit`` times its allowance."""
        # A number without a proof may be arbitrarily wrong.
        return all(
            not part.unproven and (part.share is None or part.share <= limit)
            for part in (self.out, self.lse)
        )

    @property
    def within_a_priori(self) -> bool:
        """Return whether no proven error exceeds the a-priori bound."""
        parts = (self.out.a_priori, self.lse.a_priori)
        return all(part is None or part <= 1 for part in parts)


class CertificateReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Certificates of oracles, with the data that they share."""

    schema: int = 1
    command: str
    environment: Environment
    flint: str
    bits: int  # precision of the midpoints of the balls
    limit: float  # largest error of the truth, as a share of the allowance, that permits a verdict
    arithmetics: dict[str, str]  # dtype → the arithmetic that its allowances assume, in a line
    oracles: dict[str, str]  # name of each float64 oracle → one-line description
    records: tuple[Certificate, ...]  # one for each Case and oracle

    @property
    def truths(self) -> tuple[Certificate, ...]:
        """Certificates of the oracle that kernels are compared with."""
        return tuple(record for record in self.records if record.oracle == TRUTH)


class ModAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Result of one backend on a mod, compared with that of the callable itself."""

    # ``equal``; ``different``; ``unknown`` where no difference was found but some places are
    # undecided; ``unsupported``; ``error`` where it raised.
    # Backends that enclose results in intervals may leave places undecided.
    status: Literal["equal", "different", "unknown", "unsupported", "error"]
    # The first difference, why it is unsupported or unknown, or what was raised; in one line.
    detail: str = ""


class ModRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One mod of a file."""

    name: str  # the mod's name in the file
    kind: Literal["mask", "score mod"]  # ``mask`` or ``score mod``
    line: int | None  # line of its definition; None where unknown
    expression: str  # as traced
    answers: dict[str, ModAnswer]  # by backend


class ModReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Records on mods, with the data that they share."""

    schema: int = 2  # schema 1 called the backends ``worlds``
    command: str
    environment: Environment
    mpmath: str
    # The folder is private, and reports are passed on.
    file: str  # name of the file, without its folder
    shape: str  # the index ranges, such as ``B2 H2 Q40 K48``, all of which are compared
    backends: dict[str, str]  # name of each backend → one-line description
    records: tuple[ModRecord, ...]  # one for each mod, in the order of the file


# One character each, so that a row of tiles is a readable string.
EMPTY, PARTIAL, FULL = "0", "1", "2"  # kinds of tile in a map


class BlockRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tiles of one size, counted over all sequences and heads."""

    block_query: int
    block_kv: int
    total: int
    empty: int  # tiles of which the mask hides every element
    # A kernel has to mask a tile at a ragged edge even if the mask hides none of its elements.
    partial: int  # tiles of which some elements are visible, and visible tiles at a ragged edge
    full: int  # whole tiles of which every element is visible
    sparsity: float
    # total ÷ tiles that are not empty: the speedup of a kernel whose time is proportional to the
    # tiles that it visits; None where all are empty.
    speedup: float | None
    # Kinds of the tiles of the first sequence and head: a string for each query block with a digit
    # for each key block; empty unless requested.
    map: tuple[str, ...] = ()


class BlockReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Records on block masks, with the data that they share."""

    schema: int = 1
    command: str
    attncheck: str
    mask: dict[str, Any]  # the mask, as a Problem names it
    name: str  # the mask in a line
    # batch, heads, query, kv: ranges of b, h, q_idx and kv_idx.
    batch: int
    heads: int
    query: int
    kv: int
    records: tuple[BlockRecord, ...]  # one for each tile size, in the order requested


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
"""Fields of an arithmetic that a fingerprint reads, in this order, with a description each."""

ReadingVerdict = Literal["agrees", "finer", "differs", "not declared", "not seen"]
"""A reading compared with the declaration: equal; less error than declared; different, or more
error than declared; no declaration to compare with; no reading."""


class Reading(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The reading of one field."""

    field: str  # a name in ``FIELDS``
    standing: ReadingVerdict  # see ``ReadingVerdict``
    read: str = ""  # the value that was read; empty for none
    declared: str = ""  # the value that the kernel declares; empty for none
    reason: str = ""  # why nothing was read, or a remark


class DtypeFingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arithmetic of a kernel in one dtype, as read from its answers."""

    dtype: str  # a name of ``formats.DTYPES``
    calls: int  # questions that the kernel answered
    arithmetic: str = ""  # the declared arithmetic, in a line; empty where it answered nothing
    readings: tuple[Reading, ...]  # one for each field


class FingerprintReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Records on a kernel's arithmetic, with the data that they share."""

    schema: int = 1
    command: str
    kernel: str
    device: str
    environment: Environment
    records: tuple[DtypeFingerprint, ...]  # one for each dtype, in the order requested
