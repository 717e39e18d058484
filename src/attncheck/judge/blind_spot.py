"""What a problem could not have shown: the smallest faults that its allowances would have exposed.

A right kernel may be off by the allowance, and a fault that moves every result by less is not to be
seen on these inputs. That is no fault of theirs: equal values never notice a key, and q = 0 never a
scale. Everything here is computed from exact quantities and the allowances that were applied; no
kernel is asked. The smallest fault is the one whose effect alone exceeds an allowance: a kernel's
rounding, a small part of it as a rule, is left out.

Of single keys see ``key_weights``, of accumulators ``truncation``. The softmax scale σ times 1 + ε
changes the product x_j into (1 + ε) x_j, and the score by ε s_j with s_j = x_j · f′(x_j), f being
the score mod. To first order, with weights P and out O,

    dO/dε = Σ_j P_j s_j (v_j − O)        dLSE/dε = Σ_j P_j s_j

and the smallest ε is the least of allowance ÷ |derivative| over elements and rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from attncheck.judge.exposure import Exposure
from attncheck.judge.key_weights import key_weights
from attncheck.judge.shares import at
from attncheck.judge.truncation import accumulator_bits
from attncheck.judgement import BlindSpot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from attncheck.conditions import Conditions
    from attncheck.judge.allowance import Allowance, Sample

__all__ = ["blind_spot"]

EXAMINED = 2**23
"""Elements (head, row, key, dim) at most for single keys and accumulators, which take a pass over
each: rows spread evenly where there are more. About a quarter of a second on one core."""


def blind_spot(
    conditions: Iterable[Conditions],
    allowance: Allowance,
    *,
    generic: bool,
    exposes_lse: bool,
    slopes: Callable[[Conditions], torch.Tensor] | None = None,
) -> BlindSpot | None:
    """The smallest faults that the sampled rows of a problem would have exposed.

    Args:
        conditions: Of the sampled rows, in the order of the allowance's samples.
        allowance: What was allowed.
        generic: Whether the inputs are drawn without structure, so that the probabilistic bound
            was applied beside the deterministic one.
        exposes_lse: Whether the kernel gives LSE.
        slopes: With a score mod: its derivative at the exact products, ``(heads, rows, kv)``.
            Where there is a mod and this is None, errors of scores are not examined.

    None where no row sees a key and has a finite allowance.
    """
    found = _Found()
    parts = len(allowance.samples)
    for known, sample in zip(conditions, allowance.samples, strict=True):
        slope = slopes(known) if slopes is not None and known.has_score_mod else None
        out, lse = _applied(allowance, sample, generic=generic)
        rows = Exposure.of(known, out, lse if exposes_lse else None, slope)
        found.add(rows, EXAMINED // parts)
    return found.summary()


def _applied(
    allowance: Allowance, sample: Sample, *, generic: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What out and LSE of the sampled rows could be off by at most and pass."""
    out, lse = at(sample.rows, allowance.out), at(sample.rows, allowance.lse)
    if generic:
        out, lse = torch.minimum(out, sample.probable_out), torch.minimum(lse, sample.probable_lse)
    return out, lse


@dataclass(slots=True)
class _Found:
    """What the blocks of rows seen so far would have exposed."""

    smallest: float = math.inf
    scale: float = math.inf
    bits: int = 0
    dropped: int = 0
    pairs: int = 0
    half: bool = False
    zeros: bool = False
    allowances: list[float] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)
    elements: int = 0
    lse_asked: bool = False

    def add(self, rows: Exposure, examined: int) -> None:
        asked = rows.out_allowance.isfinite()
        out = rows.known.out[asked].abs()
        allowed = rows.out_allowance[asked]
        self.elements += int(asked.sum())
        self.lse_asked = self.lse_asked or bool(rows.lse_allowance.isfinite().any())
        self.allowances.append(float(allowed.sum()))
        self.squares.append(float(out.square().sum()))
        self.half = self.half or bool((out / 2 > allowed).any())
        self.zeros = self.zeros or bool((out > allowed).any())
        self.scale = min(self.scale, smallest_scale(rows))

        some = rows.rows(_spread(rows, examined))
        keys = key_weights(some)
        self.smallest = min(self.smallest, keys.smallest)
        self.dropped += keys.dropped
        self.pairs += keys.pairs
        self.bits = accumulator_bits(some, self.bits)

    def summary(self) -> BlindSpot | None:
        if not self.elements and not self.lse_asked:
            return None
        elements = max(1, self.elements)
        root = math.sqrt(math.fsum(self.squares) / elements)
        mean = math.fsum(self.allowances) / elements
        return BlindSpot(
            dropped_keys=self.dropped / self.pairs if self.pairs else None,
            weight=self.smallest,
            scale=self.scale,
            accumulator_bits=self.bits,
            half=self.half,
            zeros=self.zeros,
            mean_allowance=mean / root if root else math.inf,
        )


def smallest_scale(rows: Exposure) -> float:
    """Smallest relative error of the scale that some allowance of ``rows`` exposes, first order."""
    if rows.slope is None:
        return math.inf
    moved = rows.weights * rows.known.products * rows.slope
    of_lse = moved.sum(-1)
    out = rows.known.out
    of_out = rows.through_values(moved) - out * of_lse[..., None]
    sizes = moved.abs().sum(-1)
    blur = rows.resolution * (rows.size(moved) + out.abs() * sizes[..., None])
    return min(
        _least(rows.out_allowance, of_out.abs() - blur),
        _least(rows.lse_allowance, of_lse.abs() - rows.resolution * sizes),
    )


def _least(allowance: torch.Tensor, derivative: torch.Tensor) -> float:
    """Least of allowance ÷ derivative; infinite where nothing moves."""
    moves = derivative > 0
    return float((allowance[moves] / derivative[moves]).min()) if bool(moves.any()) else math.inf


def _spread(rows: Exposure, examined: int) -> torch.Tensor:
    """Indices of as many rows, first and last among them, as make no more elements than that."""
    heads, count, keys = rows.weights.shape
    of_a_row = heads * keys * max(1, rows.known.v.shape[-1])
    kept = max(1, min(count, examined // of_a_row))
    device = rows.weights.device
    return torch.linspace(0, count - 1, kept, dtype=torch.float64, device=device).round().long()
