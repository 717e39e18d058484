"""The report of ``attncheck bench``: times and verdicts of kernels that were run in turn."""

from __future__ import annotations

import statistics
from typing import Any, Literal

import msgspec

from attncheck.records.record import Environment, Record

Finding = Literal["faster", "slower", "same", "unclear"]
"""A kernel compared with another commit's: the confidence interval of the ratio of their times lies
below 1, above 1, or within the margin around 1; ``unclear`` where it is too wide."""


class Times(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of one call, in the order of the rounds; in each round, kernels take turns."""

    seconds: tuple[float, ...]  # one for each round
    clock: Literal["cpu", "events", "graph"]  # wall time; CUDA events; events around a CUDA graph

    @property
    def median(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the interquartile range divided by the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median


class BenchRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kernel in one cell."""

    # Verdict on the timed call's outputs; the worse one of forward and backward. The inputs are
    # random numbers drawn by torch on the device instead of those of the Case.
    record: Record
    verified: str = ""  # part of the outputs that was compared with exact results; empty for none
    forward: Times | None = None  # times of the forward; None where it gave nothing
    both: Times | None = None  # times of forward and backward in one call; None without a backward
    lacks: str = ""  # why it has no backward although one was requested

    @property
    def backward(self) -> float | None:
        """Median over rounds of the seconds of ``both`` minus those of ``forward``."""
        if self.forward is None or self.both is None:
            return None
        pairs = zip(self.both.seconds, self.forward.seconds, strict=True)
        return statistics.median(both - forward for both, forward in pairs)


class Work(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The least work of a call, over all sequences and heads."""

    pairs: int  # number of (query row, visible key) pairs
    # Operations of the matrix products of visible pairs: two products forward, five backward.
    forward_flops: float
    backward_flops: float  # 0 without a backward
    forward_bytes: int  # bytes of q, k, v and out, each once
    cache_bytes: int  # bytes of k and v, which determine the speed of decoding
    decoding: bool  # whether it has so few rows that reading k and v dominates

    def flops(self, *, backward: bool) -> float:
        """Return the operations of the forward, or of forward and backward."""
        return self.forward_flops + (self.backward_flops if backward else 0.0)


class BenchCell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One problem, and all kernels that were timed on it in turn."""

    table: str  # table of shapes that it belongs to; ``own`` for shapes of the command line
    case_id: str
    case: dict[str, Any]  # the Case, as in a Record
    variant: str  # mask and score mod, by name
    heads: str  # ``MHA``, ``GQA`` or ``MQA``
    work: Work
    # Lowest and highest MHz of the GPU's multiprocessors after a turn; None where unknown.
    clocks: tuple[int, int] | None = None
    rows: tuple[BenchRow, ...] = ()


class TimeChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of one kernel compared with another commit's, in one cell."""

    kernel: str
    cell: int  # index of the cell, from 0
    timed: Literal["forward", "both"]
    ratio: float  # median over rounds of its time ÷ the other commit's
    # Confidence interval of the ratio; None where there are too few rounds.
    interval: tuple[float, float] | None
    finding: Finding


class BenchReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cells of a benchmark, with the data that they share."""

    schema: int = 1
    command: str
    environment: Environment
    kernels: dict[str, str]  # name of each kernel asked for → its one-line summary
    absent: dict[str, str] = {}  # kernels that can run nothing here → why
    claims: dict[str, tuple[str, ...]] = {}  # plain functions → which problems they seem to take
    baseline: str  # the kernel that others are compared with
    rounds: int  # number of rounds
    # Best rates of this machine, measured in the same run; without dtypes that have no matrix
    # product.
    matmul: dict[str, float] = {}  # operations a second of a large matrix product, by dtype
    copy: float = 0.0  # bytes a second of a large copy, counting reads and writes
    against: str = ""  # the other commit; empty for none
    chance: float = 0.0  # probability that any change is wrongly called faster, slower or the same
    margin: float = 0.0  # relative difference up to which two times count as the same
    cells: tuple[BenchCell, ...] = ()
    changes: tuple[TimeChange, ...] = ()
    incomplete: str = ""  # why the run ended early, and how far it came
