"""Blind spot of a problem: the smallest faults that its allowances would have exposed.

A right kernel may be off by the allowance, and a fault that moves every result by less cannot be
seen on these inputs. That is no fault of theirs: equal values never notice a key, and q = 0 never a
scale. Everything here is computed from exact quantities and the allowances that were applied; no
kernel takes part. The smallest fault is the one whose effect alone exceeds an allowance: a kernel's
rounding, a small part of it as a rule, is left out.

**Scale.** The softmax scale σ times 1 + ε changes the product x_j into (1 + ε) x_j, and the score
by ε s_j with s_j = x_j · f′(x_j), f being the score mod. To first order, with weights P and out O,

    dO/dε = Σ_j P_j s_j (v_j − O)        dLSE/dε = Σ_j P_j s_j

and the smallest ε is the least of allowance ÷ |derivative| over elements and rows.

**Single keys.** With A the allowance of O (element by element):

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

**Accumulators.** The fault is played, not estimated: products are added up exactly in steps of 16,
as a tensor core takes them, and after every step the sum is cut to t significant bits, toward zero.
Once this is done to P·V, with exact weights and keys in their order, and once to q·k, with the
exact softmax of what comes out. A cut sum is always too small, so that what is lost adds up over
the steps: this is what tells a truncating accumulator from a rounding one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from attncheck.core.conditions import Conditions
from attncheck.core.judgement import BlindSpot
from attncheck.judge.allowance import Allowance, at_rows

EXAMINED = 2**23
"""Elements (head, row, key, dim) at most for single keys and accumulators, which take a pass over
each: rows spread evenly where there are more. About a quarter of a second on one core."""

STEP = 16  # products that are added in one step: of 16-bit operands on Hopper

_FEW = 2**17  # sums in every number of bits that are made at once

MOST_BITS = 24  # significant bits of fp32: an accumulator of no fewer is no fault

CutSums = dict[int, dict[int, Tensor]]
"""Sums of P·V by block of rows and by the bits to which they were cut: whatever is allowed."""

_UNIT = 2.0**-52  # twice float64's unit roundoff: a sum of n terms is off by n times half of it
_LEAST = torch.finfo(torch.float64).tiny  # in place of no allowance at all: 0 ÷ 0 is no share


def blind_spot(
    rows: Iterable[tuple[Conditions, Tensor | None]],
    allowance: Allowance,
    *,
    generic: bool,
    exposes_lse: bool,
    cut_sums: CutSums | None = None,
) -> BlindSpot | None:
    """Find the smallest faults that the sampled rows of a problem would have exposed.

    Args:
        rows: Of each of the allowance's samples, in order, the exact quantities and the score mod's
            derivative at the products, ``(heads, rows, kv)``. Where there is a mod and no
            derivative, errors of scores are not examined; without a mod None will do.
        generic: Whether the inputs are drawn without structure, so that the probabilistic bound
            was applied beside the deterministic one.
        cut_sums: Those that were made of the same rows for another allowance; new ones are added.

    None where no row sees a key and has a finite allowance.
    """
    exposed, kept = _Exposed(), {} if cut_sums is None else cut_sums
    for number, ((known, slope), sample) in enumerate(zip(rows, allowance.samples, strict=True)):
        out, lse = at_rows(sample.rows, allowance.out), at_rows(sample.rows, allowance.lse)
        if generic:
            out = torch.minimum(out, sample.probable_out)
            lse = torch.minimum(lse, sample.probable_lse)
        some = _AllowedRows.of(known, out, lse if exposes_lse else None, slope)
        exposed.add(some, EXAMINED // len(allowance.samples), kept.setdefault(number, {}))
    return exposed.summary()


@dataclass(slots=True)
class _Exposed:
    """Faults that the blocks of rows so far would have exposed."""

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
    judges_lse: bool = False

    def add(self, rows: _AllowedRows, examined: int, cut_sums: dict[int, Tensor]) -> None:
        bounded = rows.out_allowance.isfinite()
        out = rows.known.out[bounded].abs()
        allowed = rows.out_allowance[bounded]
        self.elements += int(bounded.sum())
        self.judges_lse = self.judges_lse or bool(rows.lse_allowance.isfinite().any())
        self.allowances.append(float(allowed.sum()))
        self.squares.append(float(out.square().sum()))
        self.half = self.half or bool((out / 2 > allowed).any())
        self.zeros = self.zeros or bool((out > allowed).any())
        self.scale = min(self.scale, _smallest_scale(rows))

        some = rows.evenly_spread(examined)
        smallest, dropped, pairs = _key_weights(some)
        # Easiest pair over all blocks; counts add up.
        self.smallest = min(self.smallest, smallest)
        self.dropped += dropped
        self.pairs += pairs
        self.bits = _accumulator_bits(some, self.bits, cut_sums)

    def summary(self) -> BlindSpot | None:
        if not self.elements and not self.judges_lse:
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


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _AllowedRows:
    """Rows, their exact softmax weights, and the allowances that were applied to them."""

    known: Conditions
    weights: Tensor  # P, ``(heads, rows, kv)``; 0 where not seen
    out_allowance: Tensor  # ``(heads, rows, value_dim)``; infinite where nothing is judged
    # ``(heads, rows)``; infinite where nothing is judged, and where the kernel does not expose
    # LSE.
    lse_allowance: Tensor
    # Derivative of the score mod at the products, ``(heads, rows, kv)``; None where it is not
    # known.
    slope: Tensor | None

    @classmethod
    def of(
        cls, known: Conditions, out: Tensor, lse: Tensor | None, slope: Tensor | None
    ) -> _AllowedRows:
        """Return ``known`` with these allowances; without ``lse`` none of LSE."""
        alive = known.seen.any(-1)
        if lse is None:
            lse = torch.full_like(known.lse, math.inf)
        if slope is None and not known.has_score_mod:
            slope = torch.ones_like(known.products)
        # Another rule judges rows that see no key.
        return cls(
            known=known,
            weights=_softmax(known.scores, known.seen),
            out_allowance=torch.where(alive[..., None] & ~out.isnan(), out, math.inf),
            lse_allowance=torch.where(alive & ~lse.isnan(), lse, math.inf),
            slope=slope,
        )

    def evenly_spread(self, examined: int) -> _AllowedRows:
        """Return as many rows, first and last among them, as make no more elements than that."""
        heads, count, keys = self.weights.shape
        of_a_row = heads * keys * max(1, self.known.v.shape[-1])
        number = max(1, min(count, examined // of_a_row))
        device = self.weights.device
        chosen = torch.linspace(0, count - 1, number, dtype=torch.float64, device=device)
        chosen = chosen.round().long()
        by_row = ("q", "products", "scores", "seen", "maximum", "total", "out", "lse")
        return _AllowedRows(
            known=replace(self.known, **{n: getattr(self.known, n)[:, chosen] for n in by_row}),
            weights=self.weights[:, chosen],
            out_allowance=self.out_allowance[:, chosen],
            lse_allowance=self.lse_allowance[:, chosen],
            slope=None if self.slope is None else self.slope[:, chosen],
        )

    def through_values(self, weights: Tensor) -> Tensor:
        """``weights`` times V, ``(heads, rows, value_dim)``; of a softmax V is the identity."""
        return weights if self.known.given_scores else weights @ self.known.v

    def size(self, weights: Tensor) -> Tensor:
        """The same of |weights| and |V|: what a sum's own rounding is in proportion to."""
        sizes = weights.abs()
        return sizes if self.known.given_scores else sizes @ self.known.v.abs()

    @property
    def resolution(self) -> float:
        """Relative rounding error of a float64 sum over the keys, of two products and a factor."""
        return (self.weights.shape[-1] + 4) * _UNIT

    def exposed(self, out: Tensor, lse: Tensor) -> Tensor:
        """Return which of these results in place of the exact ones are beyond an allowance.

        Args:
            out: ``(results, heads, rows, value_dim)``.
            lse: ``(results, heads, rows)``, or the same of all.

        Returns:
            Bool, ``(results,)``.
        """
        known = self.known
        beyond = (out - known.out).abs() > self.out_allowance
        of_lse = (lse - known.lse).abs() > self.lse_allowance
        return beyond.flatten(1).any(1) | of_lse.flatten(-2).any(-1)


def _softmax(scores: Tensor, seen: Tensor) -> Tensor:
    """exp(score − maximum) ÷ Σ over the seen keys, ``(…, kv)``; zeros where none is seen."""
    hidden = torch.where(seen, scores, -math.inf)
    largest = hidden.amax(-1, keepdim=True)
    powers = torch.exp(hidden - torch.where(largest.isfinite(), largest, 0.0))
    total = powers.sum(-1, keepdim=True)
    return powers / torch.where(total > 0, total, 1.0)


def _smallest_scale(rows: _AllowedRows) -> float:
    """Smallest relative error of the scale that some allowance of ``rows`` exposes, first order."""
    if rows.slope is None:
        return math.inf
    moved = rows.weights * rows.known.products * rows.slope
    of_lse = moved.sum(-1)
    out = rows.known.out
    of_out = rows.through_values(moved) - out * of_lse[..., None]
    sizes = moved.abs().sum(-1)
    blur = rows.resolution * (rows.size(moved) + out.abs() * sizes[..., None])
    # Less what float64 may have made of a derivative that is exactly 0.
    return min(
        _least_ratio(rows.out_allowance, of_out.abs() - blur),
        _least_ratio(rows.lse_allowance, of_lse.abs() - rows.resolution * sizes),
    )


def _least_ratio(allowance: Tensor, derivative: Tensor) -> float:
    """Least of allowance ÷ derivative; infinite where nothing moves."""
    moves = derivative > 0
    return float((allowance[moves] / derivative[moves]).min()) if bool(moves.any()) else math.inf


def _key_weights(rows: _AllowedRows) -> tuple[float, int, int]:
    """Find the faults of single keys that the allowances of ``rows`` expose.

    Returns the smallest relative error of one key's weight (infinite where none), the visible (row,
    key) pairs of rows that see two keys or more of which one dropped would be seen, and all such
    pairs.
    """
    known, weights = rows.known, rows.weights
    top = weights.argmax(-1, keepdim=True)
    others = known.seen.scatter(-1, top, value=False)
    without = _softmax(known.scores, others)
    alone = ~others.any(-1, keepdim=True)
    rest = torch.where(others, weights, 0.0).sum(-1, keepdim=True)  # 1 − P of the largest

    # A row of one key has weight 1 whatever that key is: no change of it shows.
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
    least = float(visible.min()) if visible.numel() else math.inf
    return least, int(dropped.sum()), int(paired.sum())


def _farthest(rows: _AllowedRows) -> Tensor:
    """M, ``(heads, rows, kv)``; huge where an element without an allowance moves."""
    if rows.known.given_scores:
        # V is the identity: |1 − P_j| of key j itself, P_d of every other.
        weights, allowance = rows.weights, rows.out_allowance
        each = _times_allowed(weights, allowance)
        top = each.argmax(-1, keepdim=True)
        other = each.amax(-1, keepdim=True).expand_as(each)
        other = other.scatter(-1, top, each.scatter(-1, top, 0.0).amax(-1, keepdim=True))
        return torch.maximum(_times_allowed(1 - weights, allowance), other)
    # A CPU's caches hold one dim at a time; a GPU has more to do at once.
    step = 1 if rows.weights.device.type == "cpu" else 32
    values = rows.known.v.mT.contiguous()[:, :, None]
    out, blur, inverse = (
        part.mT[..., None].contiguous()
        for part in (
            rows.known.out,
            rows.resolution * rows.size(rows.weights),
            1 / rows.out_allowance.clamp_min(_LEAST),
        )
    )
    farthest = torch.zeros_like(rows.weights)
    for first in range(0, values.shape[1], step):
        dims = slice(first, first + step)
        apart = (values[:, dims] - out[:, dims]).abs_().sub_(blur[:, dims]).mul_(inverse[:, dims])
        torch.maximum(farthest, apart.amax(1), out=farthest)
    return farthest


def _farthest_of_top(rows: _AllowedRows, top: Tensor, without: Tensor) -> Tensor:
    """M ÷ (1 − P) of the key of the largest weight, ``(heads, rows, 1)``."""
    elsewhere = rows.through_values(without)
    blur = rows.resolution * rows.size(without)
    if rows.known.given_scores:
        own = torch.zeros_like(elsewhere).scatter(-1, top, 1.0)
    else:
        dim = rows.known.v.shape[-1]
        own = rows.known.v.gather(1, top.expand(-1, -1, dim))
    apart = (own - elsewhere).abs() - blur
    return _times_allowed(apart, rows.out_allowance).amax(-1, keepdim=True)


def _times_allowed(moved: Tensor, allowance: Tensor) -> Tensor:
    """Multiples of its allowance that each moves; 0 of what does not move or is not judged."""
    return moved.clamp_min(0.0) / allowance.clamp_min(_LEAST)


def _smallest_change(weights: Tensor, farthest: Tensor, allowance: Tensor) -> Tensor:
    """|η| of every pair, ``(heads, rows, kv)``, through out or LSE, whichever needs less."""
    # A weight is rather too small than too large where both would show.
    too_small = torch.minimum(1 / (weights * (farthest + 1)), -torch.expm1(-allowance) / weights)
    through_out = torch.where(farthest > 1, 1 / (weights * (farthest - 1)), math.inf)
    too_large = torch.minimum(through_out, torch.expm1(allowance) / weights)
    return torch.where(too_small < 1, too_small, too_large)


def _accumulator_bits(rows: _AllowedRows, exposed: int, cut_sums: dict[int, Tensor]) -> int:
    """Largest number of bits below fp32's at which a cut sum is beyond an allowance of ``rows``.

    Args:
        rows: Where to look.
        exposed: A number of bits that is exposed already; nothing smaller is looked for.
        cut_sums: Sums of P·V by the bits to which they were cut; new ones are added.

    0 where none is. By halving: fewer bits lose more.
    """
    if rows.known.given_scores:
        return exposed  # nothing is multiplied
    values = _Sums(rows.weights, rows.known.v, cut_sums)
    # Those of q·k are as many as pairs, and of few steps: they are not kept.
    scores = None if rows.slope is None else _Sums(rows.known.q, rows.known.k.mT, {})

    def shown(tried: Sequence[int]) -> dict[int, bool]:
        exposed_sums = rows.exposed(values.cut(tried), rows.known.lse)
        if scores is not None and not bool(exposed_sums.all()):
            exposed_sums = exposed_sums | _exposed_by_scores(rows, scores.cut(tried))
        return dict(zip(tried, exposed_sums.tolist(), strict=True))

    # Bits that show the fault are below all that hide it: halving finds the border.
    hidden = MOST_BITS
    bits = exposed + 1  # most often a later block shows nothing new
    few = rows.known.out.numel() * MOST_BITS <= _FEW
    known = shown(range(bits, hidden)) if few else {}
    while exposed < bits < hidden:
        known = known if bits in known else shown([bits])
        if known[bits]:
            exposed = bits
        else:
            hidden = bits
        bits = (exposed + hidden) // 2
    return exposed


def first_bits(bits: int) -> int:
    """Mask of sign, exponent and the first ``bits`` significant bits of a float64."""
    return -(1 << (53 - bits))


def cut(values: Tensor, kept: int | Tensor) -> Tensor:
    """Return float64 ``values`` cut to the bits that ``kept`` has (``first_bits``).

    Normal numbers; the sign is apart from the significand, so that clearing bits lessens the size.
    """
    return (values.contiguous().view(torch.int64) & kept).view(torch.float64)


@dataclass(eq=False)
class _Sums:
    """A product of two matrices whose sums are cut; the same ones are asked for many allowances."""

    left: Tensor
    right: Tensor
    kept: dict[int, Tensor]  # by the bits to which they were cut

    @cached_property
    def steps(self) -> Tensor:
        return _steps(self.left, self.right)

    def cut(self, bits: Sequence[int]) -> Tensor:
        """Return the sums, cut to so many significant bits after every step: one for each."""
        if new := [each for each in bits if each not in self.kept]:
            self.kept.update(zip(new, _cut_sums(self.steps, new).unbind(), strict=True))
        return torch.stack([self.kept[each] for each in bits])


def _steps(left: Tensor, right: Tensor) -> Tensor:
    """Products of ``STEP`` columns of ``left`` at a time, ``(steps, heads, rows, columns)``."""
    extra = -left.shape[-1] % STEP
    left = torch.nn.functional.pad(left, (0, extra))
    right = torch.nn.functional.pad(right, (0, 0, 0, extra))
    left = left.reshape(*left.shape[:-1], -1, STEP).permute(2, 0, 1, 3)
    return left @ right.reshape(right.shape[0], -1, STEP, right.shape[-1]).transpose(0, 1)


def _cut_sums(steps: Tensor, bits: Sequence[int]) -> Tensor:
    """Their sum, cut to so many significant bits after every step: one sum for each."""
    total = steps.new_zeros((len(bits), *steps.shape[1:]))
    kept = torch.tensor([*map(first_bits, bits)], device=steps.device)[:, None, None, None]
    significands = total.view(torch.int64)  # ``cut``, in place: a long row has hundreds of steps
    for step in steps.unbind():
        total.add_(step)
        significands.bitwise_and_(kept)
    return total


def _exposed_by_scores(rows: _AllowedRows, total: Tensor) -> Tensor:
    """Return for which q·k of ``total`` out or LSE is beyond what it is allowed, bool ``(sums,)``.

    Through a score mod to first order, with its slope at the exact products.
    """
    known = rows.known
    assert rows.slope is not None
    # The mod itself is not called again: the judge has its slope, and no callable.
    scores = known.scores + rows.slope * (known.scale * total - known.products)
    weights = _softmax(scores, known.seen)
    hidden = torch.where(known.seen, scores, -torch.inf)
    return rows.exposed(rows.through_values(weights), torch.logsumexp(hidden, -1))
