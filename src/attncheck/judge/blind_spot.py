"""Blind spot of a problem: the smallest faults that its allowances would have exposed.

With P the exact weights of a row, O = P·V, and A the allowance of O (element by element):

* Key j's weight times 1 + η makes (O + η P_j v_j) ÷ (1 + η P_j), so that O moves by
  η P_j (v_j − O) ÷ (1 + η P_j) and LSE by log(1 + η P_j).
* Let M_j = max over dim of |v_jd − O_d| ÷ A_d. The smallest |η| that moves some element by its
  allowance is 1 ÷ (P_j (M_j + 1)) for a weight that is too small; where that is 1 or more, a weight
  cannot be so small, and it is 1 ÷ (P_j (M_j − 1)) for one too large, if M_j > 1.
* LSE exposes 1 − e^−A ÷ P_j of a weight too small, (e^A − 1) ÷ P_j of one too large.
* Key j dropped is η = −1: O moves by P_j ÷ (1 − P_j) · (v_j − O), LSE by −log(1 − P_j).

For the key of the largest weight 1 − P_j and v_j − O may be lost in float64. With O′ of the row
without it, v_j − O = (1 − P_j)(v_j − O′), and dropping it moves O by P_j (v_j − O′); 1 − P_j is
added up from the other weights, each of which is at most ½. LSE′ is of the other scores.

The fault is played, not estimated: products are added up exactly in steps of 16, as a tensor core
takes them, and after every step the sum is cut to t significant bits, toward zero. Once this is
done to P·V, with exact weights and keys in their order, and once to q·k, with the exact softmax of
what comes out. A cut sum is always too small, so that what is lost adds up over the steps: this is
what tells a truncating accumulator from a rounding one.

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

from attncheck.core.judgement import BlindSpot
from attncheck.judge.allowance import at_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from attncheck.core.conditions import Conditions
    from attncheck.judge.allowance import Allowance, Sample

__all__ = ["Exposure", "KeyWeights", "accumulator_bits", "blind_spot", "cut", "key_weights"]


UNIT = 2.0**-52
"""Twice float64's unit roundoff: what a sum of n terms may be off by is n times half of it."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Exposure:
    """Rows, their exact softmax weights, and the allowances that were applied to them.

    Attributes:
        known: The exact quantities.
        weights: P, ``(heads, rows, kv)``; 0 where not seen.
        out_allowance: ``(heads, rows, value_dim)``; infinite where nothing is asked.
        lse_allowance: ``(heads, rows)``; infinite where nothing is asked, and where the kernel does
            not expose LSE.
        slope: Derivative of the score mod at the products, ``(heads, rows, kv)``; None where it is
            not known.
    """

    known: Conditions
    weights: torch.Tensor
    out_allowance: torch.Tensor
    lse_allowance: torch.Tensor
    slope: torch.Tensor | None

    @classmethod
    def of(
        cls,
        known: Conditions,
        out_allowance: torch.Tensor,
        lse_allowance: torch.Tensor | None,
        slope: torch.Tensor | None,
    ) -> Exposure:
        """The exposure of ``known`` with these allowances; without ``lse_allowance`` no LSE."""
        alive = known.seen.any(-1)
        if lse_allowance is None:
            lse_allowance = torch.full_like(known.lse, math.inf)
        if slope is None and not known.has_score_mod:
            slope = torch.ones_like(known.products)
        return cls(
            known=known,
            weights=softmax(known.scores, known.seen),
            out_allowance=_asked(out_allowance, alive[..., None]),
            lse_allowance=_asked(lse_allowance, alive),
            slope=slope,
        )

    def rows(self, chosen: torch.Tensor) -> Exposure:
        """Those of the rows with these int64 indices into the axis ``rows``."""
        known = self.known
        part = {
            name: getattr(known, name)[:, chosen]
            for name in ("q", "products", "scores", "seen", "maximum", "total", "out", "lse")
        }
        kept = {
            name: getattr(known, name)
            for name in (
                "rows",
                "k",
                "v",
                "scale",
                "given_scores",
                "has_score_mod",
                "has_sink",
            )
        }
        return Exposure(
            known=type(known)(**part, **kept),
            weights=self.weights[:, chosen],
            out_allowance=self.out_allowance[:, chosen],
            lse_allowance=self.lse_allowance[:, chosen],
            slope=None if self.slope is None else self.slope[:, chosen],
        )

    def through_values(self, weights: torch.Tensor) -> torch.Tensor:
        """``weights`` times V, ``(heads, rows, value_dim)``; of a softmax V is the identity."""
        return weights if self.known.given_scores else weights @ self.known.v

    def size(self, weights: torch.Tensor) -> torch.Tensor:
        """The same of |weights| and |V|: what a sum's own rounding is in proportion to."""
        sizes = weights.abs()
        return sizes if self.known.given_scores else sizes @ self.known.v.abs()

    @property
    def resolution(self) -> float:
        """Relative rounding error of a float64 sum over the keys, of two products and a factor."""
        return (self.weights.shape[-1] + 4) * UNIT

    def exposed(self, out: torch.Tensor, lse: torch.Tensor) -> bool:
        """Whether these results instead of the exact ones would be beyond an allowance."""
        known = self.known
        beyond = (out - known.out).abs() > self.out_allowance
        return bool(beyond.any() or ((lse - known.lse).abs() > self.lse_allowance).any())


def softmax(scores: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """exp(score − maximum) ÷ Σ over the seen keys, ``(…, kv)``; zeros where none is seen."""
    hidden = torch.where(seen, scores, -math.inf)
    largest = hidden.amax(-1, keepdim=True)
    powers = torch.exp(hidden - torch.where(largest.isfinite(), largest, 0.0))
    total = powers.sum(-1, keepdim=True)
    return powers / torch.where(total > 0, total, 1.0)


def _asked(allowance: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
    """Infinite in rows that see no key, which another rule asks about, and where it is NaN."""
    return torch.where(alive & ~allowance.isnan(), allowance, math.inf)


_LEAST = torch.finfo(torch.float64).tiny  # in place of no allowance at all: 0 ÷ 0 is no share


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyWeights:
    """What would be exposed of single keys.

    Attributes:
        smallest: Smallest relative error of one key's weight; infinite where none.
        dropped: Visible (row, key) pairs of rows that see two keys or more of which one dropped
            would be seen.
        pairs: All such pairs.
    """

    smallest: float
    dropped: int
    pairs: int


def key_weights(rows: Exposure) -> KeyWeights:
    """What the allowances of ``rows`` expose of single keys, by the formulas above."""
    known, weights = rows.known, rows.weights
    top = weights.argmax(-1, keepdim=True)
    others = known.seen.scatter(-1, top, value=False)
    without = softmax(known.scores, others)
    alone = ~others.any(-1, keepdim=True)
    rest = torch.where(others, weights, 0.0).sum(-1, keepdim=True)  # 1 − P of the largest

    farthest = _farthest(rows).masked_fill(alone, 0.0)
    from_rest = _farthest_of_top(rows, top, without).masked_fill(alone, 0.0)
    farthest = farthest.scatter(-1, top, rest * from_rest)
    moved = weights / (1 - weights) * farthest
    moved = moved.scatter(-1, top, weights.gather(-1, top) * from_rest)
    lse_moved = -torch.log1p(-weights)
    hidden = torch.where(others, known.scores, -math.inf)
    of_top = known.lse[..., None] - torch.logsumexp(hidden, -1, keepdim=True)
    lse_moved = lse_moved.scatter(-1, top, of_top)

    paired = known.seen & ~alone
    dropped = paired & ((moved > 1) | (lse_moved > rows.lse_allowance[..., None]))
    smallest = _smallest_change(weights, farthest, rows.lse_allowance[..., None])
    visible = smallest[known.seen & (weights > 0)]
    return KeyWeights(
        smallest=float(visible.min()) if visible.numel() else math.inf,
        dropped=int(dropped.sum()),
        pairs=int(paired.sum()),
    )


def _farthest(rows: Exposure) -> torch.Tensor:
    """M, ``(heads, rows, kv)``; huge where an element without an allowance moves.

    One dim after the other, so that nothing of the size rows × kv × dim is ever held.
    """
    if rows.known.given_scores:
        return _farthest_of_softmax(rows)
    values = rows.known.v.mT.contiguous()
    out, blur, asked = (
        part.mT[..., None].contiguous()
        for part in (
            rows.known.out,
            rows.resolution * rows.size(rows.weights),
            1 / rows.out_allowance.clamp_min(_LEAST),
        )
    )
    found = torch.zeros_like(rows.weights)
    for d in range(values.shape[1]):
        apart = (values[:, d, None] - out[:, d]).abs_().sub_(blur[:, d]).mul_(asked[:, d])
        torch.maximum(found, apart, out=found)
    return found


def _farthest_of_top(rows: Exposure, top: torch.Tensor, without: torch.Tensor) -> torch.Tensor:
    """M ÷ (1 − P) of the key of the largest weight, ``(heads, rows, 1)``."""
    elsewhere = rows.through_values(without)
    blur = rows.resolution * rows.size(without)
    if rows.known.given_scores:
        own = torch.zeros_like(elsewhere).scatter(-1, top, 1.0)
    else:
        dim = rows.known.v.shape[-1]
        own = rows.known.v.gather(1, top.expand(-1, -1, dim))
    apart = (own - elsewhere).abs() - blur
    return _share(apart, rows.out_allowance).amax(-1, keepdim=True)


def _farthest_of_softmax(rows: Exposure) -> torch.Tensor:
    """The same with V the identity: |1 − P_j| of key j itself, P_d of every other."""
    weights, allowance = rows.weights, rows.out_allowance
    each = _share(weights, allowance)
    top = each.argmax(-1, keepdim=True)
    other = each.amax(-1, keepdim=True).expand_as(each)
    other = other.scatter(-1, top, each.scatter(-1, top, 0.0).amax(-1, keepdim=True))
    return torch.maximum(_share(1 - weights, allowance), other)


def _share(moved: torch.Tensor, allowance: torch.Tensor) -> torch.Tensor:
    """How many times its allowance each moves; 0 of what does not move or nobody asks about."""
    return moved.clamp_min(0.0) / allowance.clamp_min(_LEAST)


def _smallest_change(
    weights: torch.Tensor, farthest: torch.Tensor, allowance: torch.Tensor
) -> torch.Tensor:
    """|η| of every pair, ``(heads, rows, kv)``, through out or LSE, whichever needs less."""
    too_small = torch.minimum(1 / (weights * (farthest + 1)), -torch.expm1(-allowance) / weights)
    through_out = torch.where(farthest > 1, 1 / (weights * (farthest - 1)), math.inf)
    too_large = torch.minimum(through_out, torch.expm1(allowance) / weights)
    return torch.where(too_small < 1, too_small, too_large)


STEP = 16
"""Products that are added in one step: of 16-bit operands on Hopper."""

MOST = 24
"""Significant bits of fp32: an accumulator of no fewer is no fault."""


def accumulator_bits(rows: Exposure, known: int = 0) -> int:
    """Largest number of bits below fp32's at which a cut sum is beyond an allowance of ``rows``.

    Args:
        rows: Where to look.
        known: A number of bits that is exposed already; nothing smaller is looked for.

    0 where none is. Found by halving: fewer bits lose more.
    """
    if rows.known.given_scores:
        return known  # nothing is multiplied
    seen, unseen = known, MOST
    bits = known + 1  # most often a later block shows nothing new
    while seen < bits < unseen:
        if _exposed(rows, bits):
            seen = bits
        else:
            unseen = bits
        bits = (seen + unseen) // 2
    return seen


def cut(values: torch.Tensor, bits: int) -> torch.Tensor:
    """float64 ``values`` with the first ``bits`` significant bits alone: rounded toward zero.

    Normal numbers; the sign is apart from the significand, so that clearing bits lessens the size.
    """
    return (values.contiguous().view(torch.int64) & -(1 << (53 - bits))).view(torch.float64)


def _exposed(rows: Exposure, bits: int) -> bool:
    return _values_exposed(rows, bits) or (rows.slope is not None and _scores_exposed(rows, bits))


def _values_exposed(rows: Exposure, bits: int) -> bool:
    """Whether P·V added up in ``bits`` bits is beyond what out is allowed."""
    weights, values = rows.weights, rows.known.v
    total = torch.zeros_like(rows.known.out)
    for start in range(0, weights.shape[-1], STEP):
        keys = slice(start, start + STEP)
        total = cut(total + weights[..., keys] @ values[:, keys], bits)
    return rows.exposed(total, rows.known.lse)


def _scores_exposed(rows: Exposure, bits: int) -> bool:
    """Whether q·k added up in ``bits`` bits makes out or LSE beyond what they are allowed.

    Through a score mod to first order, with its slope at the exact products.
    """
    known = rows.known
    assert rows.slope is not None
    total = torch.zeros_like(known.products)
    for start in range(0, known.q.shape[-1], STEP):
        dims = slice(start, start + STEP)
        total = cut(total + known.q[..., dims] @ known.k[..., dims].mT, bits)
    scores = known.scores + rows.slope * (known.scale * total - known.products)
    weights = softmax(scores, known.seen)
    hidden = torch.where(known.seen, scores, -torch.inf)
    return rows.exposed(rows.through_values(weights), torch.logsumexp(hidden, -1))


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
    out, lse = at_rows(sample.rows, allowance.out), at_rows(sample.rows, allowance.lse)
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
