"""Bounds of a backward's gradients: equations B36–B40."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attncheck.core.conditions import GradientConditions, ReadConditions, Rows, ScoreModError
from attncheck.core.declared_arithmetic import FP32, FP64, Accumulator, Arithmetic
from attncheck.core.formats import FORMATS, Format
from attncheck.core.tensor_names import TensorName
from attncheck.judge.score_errors import ScoreError
from attncheck.judge.score_gradient_errors import (
    RecomputedWeights,
    SavedErrors,
    ScoreGradients,
    recompute_weights,
    score_gradients,
    zero_elsewhere,
)
from attncheck.judge.sum_roundings import half_ulp, steps_with_keys

_MOST_GROWTH = 512.0  # e to it is a float64

OUTPUT = "output rounding"
PARTS = "rounding of parts"
_ACCUMULATION, _SAVED = "accumulation", "saved out"

# The scale as it is multiplied by at the end (B5's two roundings), q·√scale and k·√scale, and one
# of the products.
_AROUND = 7


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Sums:
    """Sums Σ x_t y_t and their errors, float64; nonnegative but for ``shift`` and ``exact``."""

    moved: Tensor  # Σ of the largest errors of x times |y|, ``(heads, count, dim)``
    size: Tensor  # Σ |x y|, x without its error
    # What the saved out makes of the sum, exactly; None where that touches nothing.
    shift: Tensor | None
    exact: Tensor | None  # the exact sum; None where it is not needed
    parts: dict[str, Tensor]  # what ``moved`` is made of, in proportion, each ``(heads, count)``
    term_count: Tensor  # terms that are summed, ``(heads, count)``
    lost: Tensor  # what is taken for 0 below the normal range, ``(heads, count)``
    unknown: Tensor  # bool ``(heads, count)``: nothing is known of some term

    def spread(self, to: Tensor, count: int) -> Sums:
        """Return the sums of ``count`` heads: each one's added to number ``to``."""

        def of(x: Tensor) -> Tensor:
            whole = torch.zeros((count, *x.shape[1:]), dtype=torch.float64, device=x.device)
            return whole.index_add_(0, to, x.to(torch.float64))

        return Sums(
            moved=of(self.moved),
            size=of(self.size),
            shift=None if self.shift is None else of(self.shift),
            exact=None if self.exact is None else of(self.exact),
            parts={name: of(part) for name, part in self.parts.items()},
            term_count=of(self.term_count),
            lost=of(self.lost),
            unknown=of(self.unknown) > 0,
        )

    def plus(self, other: Sums) -> Sums:
        """Return both added up; a name of parts may be in one alone."""
        nothing = torch.zeros_like(self.lost)
        names = sorted(self.parts.keys() | other.parts.keys())
        return Sums(
            moved=self.moved + other.moved,
            size=self.size + other.size,
            shift=_sum(self.shift, other.shift),
            exact=_sum(self.exact, other.exact),
            parts={n: self.parts.get(n, nothing) + other.parts.get(n, nothing) for n in names},
            term_count=self.term_count + other.term_count,
            lost=self.lost + other.lost,
            unknown=self.unknown | other.unknown,
        )

    def terms(
        self,
        arithmetic: Arithmetic,
        accumulator: Accumulator,
        *,
        scale: float = 1.0,
        operand: float = 0.0,
        steps: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """B36: what the bound is made of before the sum is rounded, ``(heads, count, dim)``.

        Args:
            operand: Relative error of y.
            steps: Of a truncating accumulator, where they do not follow on each other.
        """
        # Parts are sums over terms: they share out the bound in proportion.
        whole = sum(self.parts.values(), torch.zeros_like(self.lost))
        share = {n: torch.where(whole > 0, part / whole, 0.0) for n, part in self.parts.items()}
        terms = {n: scale * part[..., None] * self.moved for n, part in share.items()}
        total = self.moved + self.size
        if self.shift is not None:
            terms[_SAVED] = scale * self.shift.abs()
        added = accumulator.det(self.term_count + _AROUND, steps)[..., None]
        terms[_ACCUMULATION] = scale * (added * (1 + operand)) * total
        if operand:
            terms["rounding of operands"] = scale * operand * total
        terms["underflow"] = self.lost[..., None].expand_as(total) * max(1.0, scale)
        beyond = 2 * max(1.0, scale) * total > arithmetic.computes.max
        terms[_ACCUMULATION] = torch.where(beyond, torch.inf, terms[_ACCUMULATION])
        # The sums of this bound are float64 themselves, and some dozen operations each term.
        inflation = 1 + 8 * (self.term_count[..., None] + total.shape[-1] + 8) * 2.0**-53
        return {name: term * inflation for name, term in terms.items()}


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return None if one is None or other is None else one + other


def rounding_error(exact: Tensor, terms: dict[str, Tensor], fmt: Format) -> Tensor:
    """Return B4 of a sum that is off by ``terms``."""
    return half_ulp(exact.abs() + sum(terms.values()), fmt)


def partial_sum_error(size: Tensor, terms: dict[str, Tensor], parts: int, fmt: Format) -> Tensor:
    """Return B39 of a sum added up in ``parts``, in ``fmt``, in any order; infinite beyond it.

    Args:
        size: Σ of the magnitudes of what is summed, which no partial sum passes.
        terms: What the sum is off by before.
    """
    rate = parts * math.log1p(fmt.unit_roundoff)
    growth = math.expm1(rate) if rate < _MOST_GROWTH else math.inf
    whole = size + sum(terms.values())
    # A tiny part grows like the sum: η ÷ 2 each, and as often as it is rounded again.
    error = growth * whole + (1 + growth) * parts * fmt.subnormal_spacing / 2
    return torch.where((1 + growth) * whole > fmt.max, math.inf, error)


def mask_unknown(
    terms: dict[str, Tensor], zero: Tensor, unknown: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The bound and its terms: 0 where nothing is summed, infinite where nothing is known."""
    terms = {
        name: torch.where(zero, 0.0, torch.where(unknown | torch.isnan(term), torch.inf, term))
        for name, term in terms.items()
    }
    return torch.stack(list(terms.values())).sum(0), terms


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RowGradients:
    """Largest errors of these rows' gradients, float64."""

    rows: Rows
    scale: float
    # Bound of |error|, ``(heads, rows, head_dim)``; 0 in rows that see no key, infinite where
    # nothing is known.
    dq: Tensor
    dq_terms: dict[str, Tensor]  # what it is made of, by name; they sum to it
    dk: Sums  # their part of dk, before the scale, ``(heads, kv, head_dim)``, each head its own
    dv: Sums  # their part of dv, ``(heads, kv, value_dim)``
    dsink: Sums | None  # their part of the sink's gradient, ``(heads, 1, 1)``; None without a sink
    # Their part of those of captured numbers, ``(numbers, 1, 1)``; None where the score mod reads
    # none, or they have no gradients.
    dcaptured: Sums | None = None


def row_gradients(
    known: GradientConditions,
    arithmetic: Arithmetic,
    scores: ScoreError,
    saved: SavedErrors,
    mod: ScoreModError | None = None,
    slope: ScoreModError | None = None,
    reads: Sequence[ReadConditions] = (),
    numbers: int = 0,
) -> RowGradients:
    """Bound every backward of this arithmetic in these rows, whatever its tiles and order.

    Args:
        saved: How far the kernel's own out and LSE are off in these rows.
        slope: Of its derivative, in place of the mod, likewise; None where that has no error.
        reads: What it reads of captured tensors, where those have gradients.
        numbers: How many numbers they hold.

    Source: B30–B40 in ``docs/explanation/bounds.md``.
    """
    weights = recompute_weights(known, arithmetic, scores, saved, mod)
    captured = None
    if reads:  # B40: the gradient of each number is a sum over the scores that read it
        parts = [
            _of_read(known, arithmetic, weights, saved, read).spread(read.place.flatten(), numbers)
            for read in reads
        ]
        captured = functools.reduce(Sums.plus, parts)
    # Where the slope jumps within the score's error nothing is known of the row's dX.
    if slope is not None:
        weights = weights.without(~torch.isfinite(slope.radius))
    known, saved = zero_elsewhere(known, saved, weights.live.any(-1))
    gradients = score_gradients(known, arithmetic, weights, saved, slope)
    rows = _Rows(known, arithmetic, weights, gradients)
    dq, dq_terms = rows.query_bound()
    return RowGradients(
        rows=known.known.rows,
        scale=abs(known.known.scale),
        dq=dq,
        dq_terms=dq_terms,
        dk=rows.key_sums(),
        dv=rows.value_sums(),
        dsink=rows.sink_sums() if known.known.has_sink else None,
        dcaptured=captured,
    )


def _of_read(
    known: GradientConditions,
    arithmetic: Arithmetic,
    weights: RecomputedWeights,
    saved: SavedErrors,
    read: ReadConditions,
) -> Sums:
    """B40: each score's gradient times the slope of what it reads, a sum of one term."""
    # A sink, the last key, reads nothing: its slope is 0.
    sink = (0, known.dx.shape[-1] - read.place.shape[-1])
    # The read's derivative stands in for the mod's own: dX times it, not times the slope.
    slope = torch.nn.functional.pad(read.slope, sink)
    of_slope = ("radius", "own", "jump")
    padded = {n: torch.nn.functional.pad(getattr(read.error, n), sink) for n in of_slope}
    error = replace(read.error, **padded)
    weights = weights.without(~(torch.isfinite(error.radius) & torch.isfinite(slope)))
    known, saved = zero_elsewhere(replace(known, slope=slope), saved, weights.live.any(-1))
    gradients = score_gradients(known, arithmetic, weights, saved, error)
    return _Rows(known, arithmetic, weights, gradients).score_sums(read.place.shape[-1])


def query_operand(arithmetic: Arithmetic) -> float:
    """Relative error of q or k as the products of dk and dq read them."""
    scaled = arithmetic.scaled_query
    return arithmetic.operand_error + (0.0 if scaled is None else scaled.unit_roundoff)


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Some rows: exact quantities, P and the scores' gradients as a backward has them."""

    known: GradientConditions
    arithmetic: Arithmetic
    weights: RecomputedWeights
    gradients: ScoreGradients

    def query_bound(self) -> tuple[Tensor, dict[str, Tensor]]:
        """B36: the bound of dq and its terms."""
        known, arithmetic, gradients = self.known, self.arithmetic, self.gradients
        forward, keys = known.known, known.known.k.abs()
        count = self.weights.live.sum(-1).to(torch.float64)
        error, size = gradients.error + gradients.rounded, gradients.size
        sums = Sums(
            moved=error @ keys,
            size=size @ keys,
            shift=gradients.shift @ forward.k,
            exact=None,
            parts={name: part.sum(-1) for name, part in gradients.parts.items()},
            term_count=count,
            lost=self._lost(count, (error + size).sum(-1), keys),
            unknown=self.weights.unbounded,
        )
        scale, steps = abs(forward.scale), steps_with_keys(forward, arithmetic.values)
        terms = sums.terms(
            arithmetic,
            arithmetic.values,
            scale=scale,
            operand=query_operand(arithmetic),
            steps=None if steps is None else steps[..., 0],
        )
        if arithmetic.dq_parts > 1:
            terms[PARTS] = partial_sum_error(
                scale * sums.size, terms, arithmetic.dq_parts, arithmetic.output
            )
        terms[OUTPUT] = rounding_error(known.dq, terms, arithmetic.output)
        dead = ~forward.seen.any(-1, keepdim=True)
        return mask_unknown(terms, dead, self.weights.unbounded[..., None])

    def key_sums(self) -> Sums:
        """B37: these rows' part of dk, before the scale."""
        gradients = self.gradients
        error, q = gradients.error + gradients.rounded, self.known.known.q
        sums = self._over_rows(q, error, gradients.size, self.known.dx, gradients.parts)
        return replace(sums, shift=self._of_keys(gradients.shift).mT @ q)

    def value_sums(self) -> Sums:
        """B37: these rows' part of dv."""
        weights = self.weights
        whole = sum(weights.parts.values(), torch.zeros_like(weights.exact))
        each = torch.where(whole > 0, weights.moved / whole, 0.0)
        parts = {name: part * each for name, part in weights.parts.items() if bool(part.any())}
        if self.arithmetic.weights_error:
            parts["rounding of P"] = weights.rounded
        error, exact = weights.moved + weights.rounded, weights.exact
        return self._over_rows(self.known.dout, error, exact, exact, parts)

    def sink_sums(self) -> Sums:
        """B38: these rows' part of the sink's gradient: the sum of dX, in fp32."""
        unknown = self.weights.unbounded.any(-1, keepdim=True)
        return self._without_products(lambda x: x[..., -1:].sum(-2), unknown)

    def score_sums(self, keys: int) -> Sums:
        """B40: every score apart, ``(scores, 1, 1)``, of the first ``keys`` keys."""

        def each(x: Tensor) -> Tensor:
            return x[..., :keys].reshape(-1, 1)

        exposed = self.weights.exposed & self.weights.unbounded[..., None]
        return self._without_products(each, each(exposed))

    def _of_keys(self, x: Tensor) -> Tensor:
        """``(heads, rows, kv)`` without a sink, the last key."""
        return x[..., : self.known.dx.shape[-1] - self.known.known.has_sink]

    def _over_rows(
        self, operand: Tensor, error: Tensor, size: Tensor, exact: Tensor, parts: dict[str, Tensor]
    ) -> Sums:
        """Sums over the rows of a factor ``(heads, rows, kv)`` times ``operand``, for every key."""
        error, size, largest = self._of_keys(error).mT, self._of_keys(size).mT, operand.abs()
        count = self._of_keys(self.weights.live).sum(-2).to(torch.float64)
        # Keys that a row of which nothing is known may see.
        exposed = self.weights.exposed & self.weights.unbounded[..., None]
        apart = self.arithmetic.sums_rounded_heads
        return Sums(
            moved=error @ largest,
            size=size @ largest,
            shift=None,
            exact=self._of_keys(exact).mT @ operand if apart else None,
            parts={name: self._of_keys(part).sum(-2) for name, part in parts.items()},
            term_count=count,
            lost=self._lost(count, (error + size).sum(-1), largest),
            unknown=self._of_keys(exposed).any(-2),
        )

    def _without_products(self, take: Callable[[Tensor], Tensor], unknown: Tensor) -> Sums:
        """Sums of dX alone, which what is fused does not round to a product's format."""
        gradients, fused = self.gradients, self.arithmetic.fused
        parts = {
            name: take(part)
            for name, part in gradients.parts.items()
            if not (fused and part is gradients.rounded)
        }
        size, count = take(gradients.size), take(self.weights.live).to(torch.float64)
        moved = sum(parts.values(), torch.zeros_like(size))
        return Sums(
            moved=moved[..., None],
            size=size[..., None],
            shift=take(gradients.shift)[..., None],
            exact=None,
            parts=parts,
            term_count=count,
            lost=2.0**self.arithmetic.computes.min_exponent * (2 * count + moved + size),
            unknown=unknown,
        )

    def _lost(self, count: Tensor, total: Tensor, operand: Tensor) -> Tensor:
        """B36: numbers below the normal range taken for 0, of every product, term and operand."""
        largest = operand.amax((-1, -2))[..., None]
        scaled = self.arithmetic.scaled_query
        lost = 2.0**self.arithmetic.computes.min_exponent * (count * (2 + largest) + total)
        return lost if scaled is None else lost + scaled.subnormal_spacing / 2 * total


HEADS = "rounding of heads"


class KeyGradients:
    """Sums of the parts of all rows of a Problem, every row of every head once, in any order."""

    def __init__(
        self, arithmetic: Arithmetic, *, batch: int, heads: int, kv_heads: int, query: int
    ) -> None:
        self._arithmetic, self._query = arithmetic, query
        self._batch, self._heads, self._group = batch, heads, heads // kv_heads
        self._scale = 0.0
        self._sums: dict[str, Sums] = {}

    def add(self, rows: RowGradients) -> None:
        """Add the parts of some rows."""
        self._scale = rows.scale
        heads = torch.arange(rows.rows.heads.start, rows.rows.heads.stop, device=rows.dq.device)
        # Rounded head by head, sums of heads that share a key head must stay apart until then.
        apart = self._arithmetic.sums_rounded_heads
        self._add("dk", rows.dk, heads if apart else heads // self._group)
        self._add("dv", rows.dv, heads if apart else heads // self._group)
        if rows.dsink is not None:
            self._add("dsink", rows.dsink, heads % self._heads)
        if rows.dcaptured is not None:  # summed by number already
            self._merge("dcaptured", rows.dcaptured)

    def bounds(
        self, exact: Mapping[TensorName, Tensor]
    ) -> tuple[dict[TensorName, Tensor], dict[TensorName, dict[str, Tensor]]]:
        """Return bounds of |error| by name, and by name what each is made of, once all was added.

        Args:
            exact: Exact gradients, float64: dk ``(batch, kv_heads, kv, head_dim)``, dv, dsink
                ``(heads,)`` of a Problem with a sink, dcaptured ``(numbers,)`` where rows were
                added with reads.

        Bounds have the shapes of ``exact``, are infinite where nothing is known, and 0 for keys
        that no row sees. The terms of each sum to it.
        """
        arithmetic = self._arithmetic
        results: dict[TensorName, tuple[Tensor, dict[str, Tensor]]] = {}
        for name, gradient in exact.items():
            if name == "dk":
                operand = query_operand(arithmetic)
                results[name] = self._of_keys(name, gradient, self._scale, operand)
            elif name == "dv":
                results[name] = self._of_keys(name, gradient, 1.0, arithmetic.operand_error)
            else:
                results[name] = self._in_fp32(name, gradient)
        return (
            {name: bound for name, (bound, _) in results.items()},
            {name: terms for name, (_, terms) in results.items()},
        )

    def _add(self, name: str, part: Sums, to: Tensor) -> None:
        of_sinks = name == "dsink"
        apart = self._arithmetic.sums_rounded_heads
        whole = self._heads * (1 if of_sinks else self._batch)
        count = whole if of_sinks or apart else whole // self._group
        self._merge(name, part.spread(to, count))

    def _merge(self, name: str, part: Sums) -> None:
        before = self._sums.get(name)
        self._sums[name] = part if before is None else before.plus(part)

    def _of_keys(
        self, name: str, exact: Tensor, scale: float, operand: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """B37 and B39, in the shape of ``exact``."""
        sums, arithmetic = self._sums[name], self._arithmetic
        accumulator = arithmetic.values
        steps = self._steps(sums, accumulator)
        terms = sums.terms(arithmetic, accumulator, scale=scale, operand=operand, steps=steps)
        seen, unknown = sums.term_count > 0, sums.unknown
        if arithmetic.sums_rounded_heads:
            assert sums.exact is not None, "rows keep it where heads are rounded"
            terms = self._of_heads(scale * sums.exact, terms)
            seen, unknown = (_by_group(x, self._group).any(1) for x in (seen, unknown))
        if arithmetic.dkv_parts > 1:
            # B39: added up part after part in the output format.
            size = scale * sums.size
            if arithmetic.sums_rounded_heads:
                size = _by_group(size, self._group).sum(1)
            terms[PARTS] = partial_sum_error(size, terms, arithmetic.dkv_parts, arithmetic.output)
        flat = exact.flatten(0, 1)
        terms[OUTPUT] = rounding_error(flat, terms, arithmetic.output)
        bound, terms = mask_unknown(terms, ~(seen | unknown)[..., None], unknown[..., None])
        return bound.view(exact.shape), {n: term.view(exact.shape) for n, term in terms.items()}

    def _of_heads(self, exact: Tensor, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        """B39: each head's sum rounded, and the sums of heads added in the output format."""
        output = self._arithmetic.output
        terms[HEADS] = rounding_error(exact, terms, output)
        # Each head is rounded as it is; sums of rounded heads are rounded again.
        size = exact.abs() + sum(terms.values())
        terms = {n: _by_group(term, self._group).sum(1) for n, term in terms.items()}
        size = _by_group(size, self._group).sum(1)
        # Partial sums are rounded at most half an ulp of the largest they can be.
        terms[HEADS] = terms[HEADS] + (self._group - 1) * half_ulp(
            size * (1 + output.unit_roundoff) ** self._group, output
        )
        return terms

    def _steps(self, sums: Sums, accumulator: Accumulator) -> Tensor | None:
        """Steps of a truncating accumulator in which a key is seen: at most all of its tiles'."""
        if accumulator.block is None:
            return None
        heads = 1 if self._arithmetic.sums_rounded_heads else self._group
        return sums.term_count.clamp(max=heads * math.ceil(self._query / accumulator.block))

    def _in_fp32(self, name: str, exact: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """B38 and B40: summed in fp32 and given in fp32, whatever the products are."""
        sums, arithmetic = self._sums[name], self._arithmetic
        fp64 = arithmetic.computes.name == "fp64"
        terms = sums.terms(arithmetic, FP64 if fp64 else FP32)
        output = FORMATS["fp64"] if fp64 else FORMATS["fp32"]
        terms[OUTPUT] = rounding_error(exact.view_as(sums.moved), terms, output)
        # Every row sees a sink; a number may be read by no score that counts.
        unread = (sums.term_count == 0) & ~sums.unknown & (name == "dcaptured")
        bound, terms = mask_unknown(terms, unread[..., None], sums.unknown[..., None])
        return bound.flatten(), {name: term.flatten() for name, term in terms.items()}


def _by_group(x: Tensor, group: int) -> Tensor:
    """``(heads, …)`` as ``(key heads, group, …)``."""
    return x.reshape(-1, group, *x.shape[1:])
