"""Blind spot of a problem: the smallest faults that its allowances would have exposed.

A right kernel may be off by the allowance, so a fault that moves every result by less cannot be
detected on these inputs. Some inputs hide faults of any size: if all values are equal, no single
key matters, and if q = 0, no scale does. Everything here is computed from exact quantities and the
allowances that were applied, without a kernel. A fault counts as exposed if its effect alone
exceeds an allowance; the kernel's rounding, usually a small part of it, is neglected.

**Scale.** The softmax scale σ times 1 + ε changes the product x_j into (1 + ε) x_j, and the score
by ε s_j with s_j = x_j · f′(x_j), f being the score mod. To first order, with weights P and out O,

    dO/dε = Σ_j P_j s_j (v_j − O)        dLSE/dε = Σ_j P_j s_j

and the smallest ε is the least of allowance ÷ |derivative| over elements and rows.

**Single keys.** With A the allowance of O (element by element):

* If key j's weight is multiplied by 1 + η, O becomes (O + η P_j v_j) ÷ (1 + η P_j): it moves by
  η P_j (v_j − O) ÷ (1 + η P_j), and LSE by log(1 + η P_j).
* Let M_j = max over dim of |v_jd − O_d| ÷ A_d. The smallest |η| that moves some element by its
  allowance is 1 ÷ (P_j (M_j + 1)) for a weight that is too small. If that is 1 or more, no weight
  is small enough, and it is 1 ÷ (P_j (M_j − 1)) for a weight that is too large, if M_j > 1.
* LSE exposes |η| = (1 − e^−A) ÷ P_j if the weight is too small, (e^A − 1) ÷ P_j if too large.
* Dropping key j is η = −1: O moves by P_j ÷ (1 − P_j) · (v_j − O), LSE by −log(1 − P_j).

For the key with the largest weight, 1 − P_j and v_j − O may be lost in float64. With O′ and LSE′ of
the row without it, v_j − O = (1 − P_j)(v_j − O′), and dropping it moves O by P_j (v_j − O′);
1 − P_j is added up from the other weights, each of which is at most ½.

**Accumulators.** The fault is simulated, not estimated: products are added up exactly in steps of
16, as in a tensor core, and after every step the sum is truncated to t significant bits. This is
done once to P·V, with exact weights and keys in order, and once to q·k, followed by an exact
softmax. Truncated sums are always too small, so that the losses of the steps add up: this
distinguishes a truncating accumulator from a rounding one.
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
"""Most elements (head, row, key, dim) to examine for single keys and accumulators, which take a
pass over each: about a quarter of a second on one core. If there are more, rows are sampled."""

STEP = 16  # Products of 16-bit operands that a Hopper tensor core adds in one step.

_FEW_SUMS = 2**17  # Up to this many sums, over all numbers of bits, are computed at once.

MOST_BITS = 24  # Significant bits of fp32: an accumulator with as many is right.

CutSums = dict[int, dict[int, Tensor]]
"""Truncated sums of P·V by number of the row block and by bits; they depend on no allowance."""

_UNIT = 2.0**-52  # Twice float64's unit roundoff; a sum of n terms is off by at most n/2 of it.
_LEAST = torch.finfo(torch.float64).tiny  # Smallest divisor: avoids 0 ÷ 0 for an allowance of 0.


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
        rows: For each of the allowance's samples, in order, the exact quantities and the score
            mod's derivative at the products, ``(heads, rows, kv)``. With a mod and no derivative,
            errors of scores are not examined; without a mod None suffices.
        generic: Whether the inputs are drawn without structure, so that the probabilistic bound
            was applied as well as the deterministic one.
        cut_sums: Truncated sums of the same rows from a call with another allowance; extended here.

    None if no row sees a key and has a finite allowance.
    """
    exposed, cache = _Exposed(), {} if cut_sums is None else cut_sums
    for number, ((conditions, slope), sample) in enumerate(
        zip(rows, allowance.samples, strict=True)
    ):
        out, lse = at_rows(sample.rows, allowance.out), at_rows(sample.rows, allowance.lse)
        if generic:
            out = torch.minimum(out, sample.probable_out)
            lse = torch.minimum(lse, sample.probable_lse)
        allowed = _AllowedRows.of(conditions, out, lse if exposes_lse else None, slope)
        exposed.add(allowed, EXAMINED // len(allowance.samples), cache.setdefault(number, {}))
    return exposed.summary()


@dataclass(slots=True)
class _Exposed:
    """Faults exposed by the blocks of rows that were added."""

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
        out = rows.conditions.out[bounded].abs()
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

    conditions: Conditions
    weights: Tensor  # P, ``(heads, rows, kv)``; 0 where not seen
    out_allowance: Tensor  # ``(heads, rows, value_dim)``; infinite where not judged
    lse_allowance: Tensor  # ``(heads, rows)``; infinite where not judged or not exposed
    # Derivative of the score mod at the products, ``(heads, rows, kv)``; None if not known.
    slope: Tensor | None

    @classmethod
    def of(
        cls, conditions: Conditions, out: Tensor, lse: Tensor | None, slope: Tensor | None
    ) -> _AllowedRows:
        """Return ``conditions`` with these allowances; LSE's is infinite if ``lse`` is None."""
        alive = conditions.seen.any(-1)
        if lse is None:
            lse = torch.full_like(conditions.lse, math.inf)
        if slope is None and not conditions.has_score_mod:
            slope = torch.ones_like(conditions.products)
        # Rows that see no key are judged by a rule of their own.
        return cls(
            conditions=conditions,
            weights=_softmax(conditions.scores, conditions.seen),
            out_allowance=torch.where(alive[..., None] & ~out.isnan(), out, math.inf),
            lse_allowance=torch.where(alive & ~lse.isnan(), lse, math.inf),
            slope=slope,
        )

    def evenly_spread(self, examined: int) -> _AllowedRows:
        """Return evenly spread rows, first and last included, of at most ``examined`` elements."""
        heads, count, keys = self.weights.shape
        of_a_row = heads * keys * max(1, self.conditions.v.shape[-1])
        number = max(1, min(count, examined // of_a_row))
        device = self.weights.device
        chosen = torch.linspace(0, count - 1, number, dtype=torch.float64, device=device)
        chosen = chosen.round().long()
        by_row = ("q", "products", "scores", "seen", "maximum", "total", "out", "lse")
        return _AllowedRows(
            conditions=replace(
                self.conditions, **{n: getattr(self.conditions, n)[:, chosen] for n in by_row}
            ),
            weights=self.weights[:, chosen],
            out_allowance=self.out_allowance[:, chosen],
            lse_allowance=self.lse_allowance[:, chosen],
            slope=None if self.slope is None else self.slope[:, chosen],
        )

    def through_values(self, weights: Tensor) -> Tensor:
        """Return ``weights`` · V, ``(heads, rows, value_dim)``; a softmax's V is the identity."""
        return weights if self.conditions.given_scores else weights @ self.conditions.v

    def size(self, weights: Tensor) -> Tensor:
        """Return |weights| · |V|, to which the sum's own rounding is proportional."""
        sizes = weights.abs()
        return sizes if self.conditions.given_scores else sizes @ self.conditions.v.abs()

    @property
    def resolution(self) -> float:
        """Relative rounding error of a float64 sum over the keys of two products and a factor."""
        return (self.weights.shape[-1] + 4) * _UNIT

    def exposed(self, out: Tensor, lse: Tensor) -> Tensor:
        """Return which of several results have an element beyond its allowance.

        Args:
            out: ``(results, heads, rows, value_dim)``.
            lse: ``(results, heads, rows)``, or ``(heads, rows)`` for all results.

        Returns:
            Bool, ``(results,)``.
        """
        conditions = self.conditions
        beyond = (out - conditions.out).abs() > self.out_allowance
        of_lse = (lse - conditions.lse).abs() > self.lse_allowance
        return beyond.flatten(1).any(1) | of_lse.flatten(-2).any(-1)


def _softmax(scores: Tensor, seen: Tensor) -> Tensor:
    """Return the softmax over the seen keys, ``(…, kv)``; zeros in rows that see none."""
    hidden = torch.where(seen, scores, -math.inf)
    largest = hidden.amax(-1, keepdim=True)
    powers = torch.exp(hidden - torch.where(largest.isfinite(), largest, 0.0))
    total = powers.sum(-1, keepdim=True)
    return powers / torch.where(total > 0, total, 1.0)


def _smallest_scale(rows: _AllowedRows) -> float:
    """Return the smallest relative error of the scale that ``rows`` expose, to first order."""
    if rows.slope is None:
        return math.inf
    moved = rows.weights * rows.conditions.products * rows.slope
    of_lse = moved.sum(-1)
    out = rows.conditions.out
    of_out = rows.through_values(moved) - out * of_lse[..., None]
    sizes = moved.abs().sum(-1)
    blur = rows.resolution * (rows.size(moved) + out.abs() * sizes[..., None])
    # Rounding errors are subtracted: float64 may turn a derivative of exactly 0 into more.
    return min(
        _least_ratio(rows.out_allowance, of_out.abs() - blur),
        _least_ratio(rows.lse_allowance, of_lse.abs() - rows.resolution * sizes),
    )


def _least_ratio(allowance: Tensor, derivative: Tensor) -> float:
    """Return the least allowance ÷ derivative; infinite if no derivative is positive."""
    moves = derivative > 0
    return float((allowance[moves] / derivative[moves]).min()) if bool(moves.any()) else math.inf


def _key_weights(rows: _AllowedRows) -> tuple[float, int, int]:
    """Find the faults of single keys that the allowances of ``rows`` expose.

    Returns the smallest exposed relative error of one key's weight (infinite if there is none), how
    many (row, key) pairs would be exposed if the key were dropped, and how many pairs there are: of
    seen keys in rows that see two or more.
    """
    conditions, weights = rows.conditions, rows.weights
    top = weights.argmax(-1, keepdim=True)
    others = conditions.seen.scatter(-1, top, value=False)
    without = _softmax(conditions.scores, others)
    alone = ~others.any(-1, keepdim=True)
    rest = torch.where(others, weights, 0.0).sum(-1, keepdim=True)  # 1 − P of the largest

    # The only key of a row has weight 1 after any change, which therefore does not show.
    farthest = _farthest(rows).masked_fill(alone, 0.0)
    from_rest = _farthest_of_top(rows, top, without).masked_fill(alone, 0.0)
    farthest = farthest.scatter(-1, top, rest * from_rest)
    moved = weights / (1 - weights) * farthest
    moved = moved.scatter(-1, top, weights.gather(-1, top) * from_rest)
    lse_moved = -torch.log1p(-weights)
    hidden = torch.where(others, conditions.scores, -math.inf)
    of_top = conditions.lse[..., None] - torch.logsumexp(hidden, -1, keepdim=True)
    lse_moved = lse_moved.scatter(-1, top, of_top)

    paired = conditions.seen & ~alone
    dropped = paired & ((moved > 1) | (lse_moved > rows.lse_allowance[..., None]))
    smallest = _smallest_change(weights, farthest, rows.lse_allowance[..., None])
    visible = smallest[conditions.seen & (weights > 0)]
    least = float(visible.min()) if visible.numel() else math.inf
    return least, int(dropped.sum()), int(paired.sum())


def _farthest(rows: _AllowedRows) -> Tensor:
    """Return M, ``(heads, rows, kv)``; huge where an element with an allowance of 0 moves."""
    if rows.conditions.given_scores:
        # V is the identity: key j has |1 − P_j| in its own dim, and P_d in every other dim d.
        weights, allowance = rows.weights, rows.out_allowance
        each = _in_units(weights, allowance)
        top = each.argmax(-1, keepdim=True)
        other = each.amax(-1, keepdim=True).expand_as(each)
        other = other.scatter(-1, top, each.scatter(-1, top, 0.0).amax(-1, keepdim=True))
        return torch.maximum(_in_units(1 - weights, allowance), other)
    # One dim at a time fits into a CPU's caches; a GPU needs larger steps to be busy.
    step = 1 if rows.weights.device.type == "cpu" else 32
    values = rows.conditions.v.mT.contiguous()[:, :, None]
    out, blur, inverse = (
        part.mT[..., None].contiguous()
        for part in (
            rows.conditions.out,
            rows.resolution * rows.size(rows.weights),
            1 / rows.out_allowance.clamp_min(_LEAST),
        )
    )
    farthest = torch.zeros_like(rows.weights)
    for first in range(0, values.shape[1], step):
        dims = slice(first, first + step)
        excess = (values[:, dims] - out[:, dims]).abs_().sub_(blur[:, dims]).mul_(inverse[:, dims])
        torch.maximum(farthest, excess.amax(1), out=farthest)
    return farthest


def _farthest_of_top(rows: _AllowedRows, top: Tensor, without: Tensor) -> Tensor:
    """Return M ÷ (1 − P) of the key with the largest weight, ``(heads, rows, 1)``."""
    out_without = rows.through_values(without)
    blur = rows.resolution * rows.size(without)
    if rows.conditions.given_scores:
        top_value = torch.zeros_like(out_without).scatter(-1, top, 1.0)
    else:
        dim = rows.conditions.v.shape[-1]
        top_value = rows.conditions.v.gather(1, top.expand(-1, -1, dim))
    distance = (top_value - out_without).abs() - blur
    return _in_units(distance, rows.out_allowance).amax(-1, keepdim=True)


def _in_units(moved: Tensor, allowance: Tensor) -> Tensor:
    """Return ``moved`` ÷ ``allowance``; 0 where nothing moves or nothing is judged."""
    return moved.clamp_min(0.0) / allowance.clamp_min(_LEAST)


def _smallest_change(weights: Tensor, farthest: Tensor, allowance: Tensor) -> Tensor:
    """Return the smallest exposed |η| of each pair by out or LSE, ``(heads, rows, kv)``."""
    # The change to a smaller weight is the lesser one; it is impossible from 1 on.
    too_small = torch.minimum(1 / (weights * (farthest + 1)), -torch.expm1(-allowance) / weights)
    through_out = torch.where(farthest > 1, 1 / (weights * (farthest - 1)), math.inf)
    too_large = torch.minimum(through_out, torch.expm1(allowance) / weights)
    return torch.where(too_small < 1, too_small, too_large)


def _accumulator_bits(rows: _AllowedRows, exposed: int, cut_sums: dict[int, Tensor]) -> int:
    """Return the most bits, fewer than fp32's, at which a truncated sum exceeds an allowance.

    Args:
        rows: The rows whose sums are truncated.
        exposed: Number of bits known to be exposed, or 0; returned if no larger one is.
        cut_sums: Truncated sums of P·V by number of bits; new ones are added.

    Found by bisection, since fewer bits lose more.
    """
    if rows.conditions.given_scores:
        return exposed  # a softmax multiplies no matrices
    values = _Sums(rows.weights, rows.conditions.v, cut_sums)
    # Sums of q·k are not cached: they are large (one per pair) and cheap (few steps).
    scores = None if rows.slope is None else _Sums(rows.conditions.q, rows.conditions.k.mT, {})

    def try_bits(tried: Sequence[int]) -> dict[int, bool]:
        exposed_sums = rows.exposed(values.cut(tried), rows.conditions.lse)
        if scores is not None and not bool(exposed_sums.all()):
            exposed_sums = exposed_sums | _exposed_by_scores(rows, scores.cut(tried))
        return dict(zip(tried, exposed_sums.tolist(), strict=True))

    # All numbers of bits that expose the fault are below all that hide it.
    hidden = MOST_BITS
    bits = exposed + 1  # usually a later block exposes nothing new
    few_sums = rows.conditions.out.numel() * MOST_BITS <= _FEW_SUMS
    exposed_by_bits = try_bits(range(bits, hidden)) if few_sums else {}
    while exposed < bits < hidden:
        exposed_by_bits = exposed_by_bits if bits in exposed_by_bits else try_bits([bits])
        if exposed_by_bits[bits]:
            exposed = bits
        else:
            hidden = bits
        bits = (exposed + hidden) // 2
    return exposed


def first_bits(bits: int) -> int:
    """Return a mask of the sign, exponent and first ``bits`` significant bits of a float64."""
    return -(1 << (53 - bits))


def cut(values: Tensor, kept: int | Tensor) -> Tensor:
    """Return float64 ``values`` truncated to the bits of the mask ``kept`` (``first_bits``).

    For normal numbers: float64 stores sign and magnitude, so clearing bits reduces the magnitude.
    """
    return (values.contiguous().view(torch.int64) & kept).view(torch.float64)


@dataclass(eq=False)
class _Sums:
    """A product of two matrices whose sums are truncated; cached, since many allowances need it."""

    left: Tensor
    right: Tensor
    kept: dict[int, Tensor]  # number of significant bits → truncated sums

    @cached_property
    def steps(self) -> Tensor:
        return _steps(self.left, self.right)

    def cut(self, bits: Sequence[int]) -> Tensor:
        """Return the sums, truncated after every step, stacked for each number of ``bits``."""
        if new := [each for each in bits if each not in self.kept]:
            self.kept.update(zip(new, _cut_sums(self.steps, new).unbind(), strict=True))
        return torch.stack([self.kept[each] for each in bits])


def _steps(left: Tensor, right: Tensor) -> Tensor:
    """Return the product by steps of ``STEP`` terms, ``(steps, heads, rows, columns)``."""
    extra = -left.shape[-1] % STEP
    left = torch.nn.functional.pad(left, (0, extra))
    right = torch.nn.functional.pad(right, (0, 0, 0, extra))
    left = left.reshape(*left.shape[:-1], -1, STEP).permute(2, 0, 1, 3)
    return left @ right.reshape(right.shape[0], -1, STEP, right.shape[-1]).transpose(0, 1)


def _cut_sums(steps: Tensor, bits: Sequence[int]) -> Tensor:
    """Return the sum of ``steps``, truncated after each, stacked for each number of ``bits``."""
    total = steps.new_zeros((len(bits), *steps.shape[1:]))
    kept = torch.tensor([*map(first_bits, bits)], device=steps.device)[:, None, None, None]
    significands = total.view(torch.int64)  # ``cut``, in place: a long row has hundreds of steps
    for step in steps.unbind():
        total.add_(step)
        significands.bitwise_and_(kept)
    return total


def _exposed_by_scores(rows: _AllowedRows, total: Tensor) -> Tensor:
    """Return which of the q·k in ``total`` bring out or LSE beyond an allowance, bool ``(sums,)``.

    Score mods are applied to first order, with their slope at the exact products.
    """
    conditions = rows.conditions
    assert rows.slope is not None
    # The judge has the mod's slope but not its callable.
    scores = conditions.scores + rows.slope * (conditions.scale * total - conditions.products)
    weights = _softmax(scores, conditions.seen)
    hidden = torch.where(conditions.seen, scores, -torch.inf)
    return rows.exposed(rows.through_values(weights), torch.logsumexp(hidden, -1))
