"""The report of ``attncheck bench``: times of kernels that took turns, and what they gave."""

from __future__ import annotations

import statistics
from typing import Any, Literal

import msgspec

from attncheck.records.record import Environment, Record

Finding = Literal["faster", "slower", "same", "unclear"]
"""A kernel beside another commit's: the interval of the ratio of their times lies below 1, above 1,
or around 1 within the margin; ``unclear`` where it is too wide to say."""


class Times(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of one call, in the order of the rounds in which kernels took turns."""

    seconds: tuple[float, ...]  # one a round
    clock: Literal["cpu", "events", "graph"]  # wall time; CUDA events; those around a CUDA graph

    @property
    def median(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half of what lies between the quartiles, as a part of the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median


class BenchRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kernel in one cell."""

    # Verdict on what the timed call gave; of forward and backward the worse. The numbers that it
    # read are torch's own draw on that device, and not those that the Case draws.
    record: Record
    verified: str = ""  # which part of it was compared with the exact result; empty for none
    forward: Times | None = None  # of the forward; None where it gave nothing
    both: Times | None = None  # of forward and backward in one call; None without a backward
    lacks: str = ""  # why it has no backward where one was asked for

    @property
    def backward(self) -> float | None:
        """Median seconds of the backward alone: those of both less the forward's, by round."""
        if self.forward is None or self.both is None:
            return None
        pairs = zip(self.both.seconds, self.forward.seconds, strict=True)
        return statistics.median(both - forward for both, forward in pairs)


class Work(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a call has to do at least, over all sequences and heads."""

    pairs: int  # of a query row and a key that it sees
    # Operations of the products of visible pairs: two products forward, five backward.
    forward_flops: float
    backward_flops: float  # 0 without a backward
    forward_bytes: int  # of q, k, v and out, each once
    cache_bytes: int  # of k and v; the rate of decoding is theirs
    decoding: bool  # whether its rows are so few that k and v decide

    def flops(self, *, backward: bool) -> float:
        """Operations of the forward, or of both."""
        return self.forward_flops + (self.backward_flops if backward else 0.0)


class BenchCell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One problem, and all kernels that were timed on it in turn."""

    table: str  # which table it is of; ``own`` for shapes that were typed
    case_id: str
    case: dict[str, Any]  # its Problem, as of a Record
    variant: str  # mask and score mod, by name
    heads: str  # ``MHA``, ``GQA`` or ``MQA``
    work: Work
    # MHz of the GPU's multiprocessors after each turn, lowest and highest; None where unknown.
    clocks: tuple[int, int] | None = None
    rows: tuple[BenchRow, ...] = ()


class TimeChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kernel beside that of another commit, in one cell."""

    kernel: str
    cell: int  # its number, from 0
    timed: Literal["forward", "both"]
    ratio: float  # median over rounds of its time ÷ the other's
    # What holds that ratio, but for the chance of error; None where rounds are too few.
    interval: tuple[float, float] | None
    finding: Finding


class BenchReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cells with what they share."""

    schema: int = 1
    command: str
    environment: Environment
    kernels: dict[str, str]  # name of each kernel asked for → its one-line summary
    absent: dict[str, str] = {}  # kernels that can run nothing here → why
    claims: dict[str, tuple[str, ...]] = {}  # of plain functions, what was found that they take
    baseline: str  # the kernel that others are beside
    rounds: int  # in which kernels took turns
    # What this machine does at best, measured in the same run; a dtype without a product is left
    # out.
    matmul: dict[str, float] = {}  # operations a second of a large product, by dtype
    copy: float = 0.0  # bytes a second of a large copy, read and written
    against: str = ""  # the other commit; empty for none
    chance: float = 0.0  # that any of the changes is found wrongly faster, slower or the same
    margin: float = 0.0  # that two times may differ by and be the same
    cells: tuple[BenchCell, ...] = ()
    changes: tuple[TimeChange, ...] = ()
    incomplete: str = ""  # why it ends early, and how far it came
