"""Reports of surveys: oracles, their certificates, mods, block masks, and a kernel's arithmetic."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from attncheck.core.judgement import Place
from attncheck.records.record import Environment

TRUTH = "truth"  # the oracle that kernels are compared with, in certificates


class Distance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The largest error among those that are finite, as multiples of a unit of their own."""

    # Largest |error| ÷ unit, at most the largest float; None where no number was compared.
    units: float | None
    at: Place | None  # where; None where no number was compared
    compared: int  # numbers that are finite, as are the exact one and the unit
    nonfinite: int = 0  # the others, of rows that see a key


class Rows(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Results in the rows that see a key."""

    total: int  # how many there are
    nonfinite: int = 0  # those where LSE or an element of out, or the exact one, is NaN or infinite
    # Apart from other NaNs: some oracles must overflow, by their definition.
    overflowed: int = 0  # of those, where the sum of exponentials or a product with it is infinite
    vanished: int = 0  # of those, where the sum of exponentials is 0, and out 0/0
    # Rows that see no key, and whose out is not exactly 0 or whose LSE is not −∞.
    dead_wrong: int = 0


class OracleRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One float64 oracle on one Case."""

    # case_id, case: the Case and its short id.
    case_id: str
    case: dict[str, Any]
    variant: str  # the plan's name for the mask and score mod; ``softmax`` for that operation
    distribution: str  # of the inputs, as in the Case
    oracle: str  # its name; ``streaming`` is the one that kernels are compared with
    # In units of 2^-53 Σ_j p_j |v_j| of each element; of 2^-53 p_j for softmax. The sum counts as
    # 2^-1022, the smallest normal number, where it is smaller.
    out: Distance
    lse: Distance  # in units of 2^-53 max(1, |LSE|)
    rows: Rows  # where it is not finite


class Agreement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The recurrences on one Case among themselves, all at the same number of digits."""

    case_id: str  # the Case
    # variant, distribution: as in its OracleRecords.
    variant: str
    distribution: str
    oracles: tuple[str, ...]  # which recurrences
    # Decimal logarithm of the largest finite distance from the reference: of out relative to Σ_j
    # p_j |v_j| (p_j for softmax), of LSE to max(1, |LSE|). None where there is none.
    # A logarithm, since the distance at many digits is below the smallest float.
    log10: float | None
    # Numbers, over all recurrences, whose distance is not finite: either is NaN or infinite and
    # not the very same, or they differ where what they are relative to is 0.
    infinite: int = 0
    # The recurrence with the largest distance; None where all are equal.
    furthest: str | None = None

    def holds(self, digits: int) -> bool:
        """Return whether every distance is at most 10^-digits."""
        # None: the distance of every number is 0.
        return not self.infinite and (self.log10 is None or self.log10 <= -digits)


class OracleReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Records with what they share."""

    schema: int = 1
    command: str
    environment: Environment
    mpmath: str
    # With either the digits are the same; gmpy2 takes less time.
    backend: str  # what multiplies its whole numbers: ``gmpy2 2.1.5``, or ``python``
    digits: int  # decimal digits of the exact side
    # Fewer than ``digits``: the last ones are rounding of the many digits themselves.
    must_agree: int  # to how many digits the recurrences must agree there
    reference: str  # name of the recurrence that is the exact result: the safe softmax, dense
    may_overflow: tuple[str, ...]  # oracles that cannot be finite everywhere, by their definition
    oracles: dict[str, str]  # name of each float64 oracle → what it is, in a line
    records: tuple[OracleRecord, ...]  # one a Case and oracle
    agreements: tuple[Agreement, ...]  # one a Case


class ProvenError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Upper bounds of an oracle's error in one tensor, beside what a kernel is allowed there."""

    # Largest proven error ÷ allowance, at most the largest float; None where nothing was proven
    # beside an allowance.
    share: float | None
    error: float | None  # the proven error there
    # The allowance there; 0 in a row that sees no key, of an error that is not 0.
    allowance: float | None
    at: Place | None
    # Largest proven error ÷ what the judge assumes of the oracle without a proof, its own bound
    # for float64; None where that was not asked, or is infinite throughout.
    a_priori: float | None = None
    elements: int  # numbers with a proven error and a finite allowance
    # Numbers of which nothing is proven: balls say nothing, or the oracle's or the exact one is
    # not finite.
    # Counted, not left out: a Certificate with one of them does not hold.
    unproven: int = 0
    unbounded: int = 0  # numbers with a proven error and without an allowance


class Certificate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Proven error of one float64 oracle on one Case."""

    # case_id, case: the Case and its short id.
    case_id: str
    case: dict[str, Any]
    variant: str  # the plan's name for the mask and score mod; ``softmax`` for that operation
    distribution: str  # of the inputs, as in the Case
    oracle: str  # its name; ``truth`` is the one that kernels are compared with
    # out, lse: see ``ProvenError``.
    out: ProvenError
    lse: ProvenError
    rows: int
    # Balls take far longer than floats: of a large Problem a sample must do.
    proven_rows: int  # those that were enclosed: all of a small Problem, a sample of a large one's

    def holds(self, limit: float) -> bool:
        """Return whether all of it is proven to be at most this part of its allowance."""
        # What is not proven may be anything, so it counts against the oracle.
        return all(
            not part.unproven and (part.share is None or part.share <= limit)
            for part in (self.out, self.lse)
        )

    @property
    def within_a_priori(self) -> bool:
        """Return whether no proven error is beyond what is assumed without a proof."""
        parts = (self.out.a_priori, self.lse.a_priori)
        return all(part is None or part <= 1 for part in parts)


class CertificateReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Certificates with what they share."""

    schema: int = 1
    command: str
    environment: Environment
    flint: str
    bits: int  # of the midpoints of the balls
    limit: float  # part of an allowance that the truth's error may be for the judge to decide
    arithmetics: dict[str, str]  # dtype → the profile that its allowances are of, in a line
    oracles: dict[str, str]  # name of each float64 oracle → what it is, in a line
    records: tuple[Certificate, ...]  # one a Case and oracle

    @property
    def truths(self) -> tuple[Certificate, ...]:
        """Those of the oracle that kernels are compared with."""
        return tuple(record for record in self.records if record.oracle == TRUTH)


class ModAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Result of one backend on a mod, compared with that of the callable itself."""

    # ``equal``; ``different``; ``unknown`` where it differs nowhere, but somewhere nothing can be
    # said; ``unsupported``; ``error`` where it raised.
    # Backends that enclose may abstain, which is neither right nor wrong.
    status: Literal["equal", "different", "unknown", "unsupported", "error"]
    # The first difference, why it is unsupported or unknown, or what was raised; in one line.
    detail: str = ""


class ModRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One mod of a file."""

    name: str  # its name in the file
    kind: Literal["mask", "score mod"]  # ``mask`` or ``score mod``
    line: int | None  # where it is defined; None where nothing says so
    expression: str  # as traced
    answers: dict[str, ModAnswer]  # by backend


class ModReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Records with what they share."""

    schema: int = 2  # 1 said worlds for backends
    command: str
    environment: Environment
    mpmath: str
    # Without its folder: a report is passed on.
    file: str  # name of the file, without its folder
    shape: str  # the index ranges, such as ``B2 H2 Q40 K48``: every place in them is compared
    backends: dict[str, str]  # name of each backend → what it is, in a line
    records: tuple[ModRecord, ...]  # one a mod, in the order of the file


# One character each, so that a row of tiles is a text that reads as a picture.
EMPTY, PARTIAL, FULL = "0", "1", "2"  # kinds of tile in a map


class BlockRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tiles of one size, counted over all sequences and heads."""

    block_query: int
    block_kv: int
    total: int
    empty: int  # those of which the mask hides every element
    # At a ragged edge a kernel has to mask even what the mask shows whole.
    partial: int  # those of which it shows some, and those at a ragged edge that it shows whole
    full: int  # those that are whole and of which it shows every element
    sparsity: float
    # total ÷ tiles that are not empty: how much faster a kernel would be whose time is that of
    # the tiles it visits; None where all are empty.
    speedup: float | None
    # The kinds of the first sequence's and head's tiles, a text for each query block with a digit
    # for each key block; nothing where it was not asked for.
    map: tuple[str, ...] = ()


class BlockReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Records with what they share."""

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
    records: tuple[BlockRecord, ...]  # one a size of tile, in the order asked for


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
"""Parts that are read, in this order, and what each is."""

ReadingVerdict = Literal["agrees", "finer", "differs", "not declared", "not seen"]
"""A reading beside the declaration: the same; less error than is declared; another thing, or more
error; there is nothing to compare it with; nothing was read."""


class Reading(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One field."""

    field: str  # a name in ``FIELDS``
    standing: ReadingVerdict  # see ``ReadingVerdict``
    read: str = ""  # what was read; empty where nothing was
    declared: str = ""  # what the kernel declares; empty for nothing
    reason: str = ""  # why nothing was read, or what is to be said of it


class DtypeFingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kernel in one dtype."""

    dtype: str  # a name of ``formats.DTYPES``
    calls: int  # questions that it answered
    arithmetic: str = ""  # what it declares, in a line; empty where it answered nothing
    readings: tuple[Reading, ...]  # one a field


class FingerprintReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Records with what they share."""

    schema: int = 1
    command: str
    kernel: str
    device: str
    environment: Environment
    records: tuple[DtypeFingerprint, ...]  # one a dtype, in the order asked for
