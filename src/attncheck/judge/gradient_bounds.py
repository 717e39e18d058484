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

_LARGEST_RATE = 512.0  # expm1 of a larger exponent is taken as infinite; e^512 is a float64.

OUTPUT = "output rounding"
PARTS = "rounding of parts"
_ACCUMULATION, _SAVED = "accumulation", "saved out"

# Roundings of a term besides its additions: 2 of the scale that is multiplied in at the end (B5),
# 4 of q·√scale and k·√scale, and 1 of the product itself.
_FACTOR_ROUNDINGS = 7


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Sums:
    """Sums Σ x_t y_t and their errors, float64; nonnegative but for ``shift`` and ``exact``."""

    moved: Tensor  # Σ of the largest errors of x times |y|, ``(heads, count, dim)``
    size: Tensor  # Σ |x y|, x without its error
    # Exact change of the sum by the error of the saved out; None if it does not depend on out.
    shift: Tensor | None
    exact: Tensor | None  # the exact sum; None if it is not needed
    parts: dict[str, Tensor]  # the parts of ``moved`` in proportion, each ``(heads, count)``
    term_count: Tensor  # number of terms, ``(heads, count)``
    lost: Tensor  # largest error by flushing numbers below the normal range, ``(heads, count)``
    unknown: Tensor  # bool ``(heads, count)``: some term has no bound

    def spread(self, to: Tensor, count: int) -> Sums:
        """Return the sums of ``count`` heads: each head's sums are added to head number ``to``."""

        def scatter(x: Tensor) -> Tensor:
            whole = torch.zeros((count, *x.shape[1:]), dtype=torch.float64, device=x.device)
            return whole.index_add_(0, to, x.to(torch.float64))

        return Sums(
            moved=scatter(self.moved),
            size=scatter(self.size),
            shift=None if self.shift is None else scatter(self.shift),
            exact=None if self.exact is None else scatter(self.exact),
            parts={name: scatter(part) for name, part in self.parts.items()},
            term_count=scatter(self.term_count),
            lost=scatter(self.lost),
            unknown=scatter(self.unknown) > 0,
        )

    def plus(self, other: Sums) -> Sums:
        """Return both added up; ``parts`` may have different names."""
        nothing = torch.zeros_like(self.lost)
        names = sorted(self.parts.keys() | other.parts.keys())
        return Sums(
            moved=self.moved + other.moved,
            size=self.size + other.size,
            shift=_sum_or_none(self.shift, other.shift),
            exact=_sum_or_none(self.exact, other.exact),
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
        """Return B36: the terms of the bound before the sum is rounded, ``(heads, count, dim)``.

        Args:
            operand: Relative error of y.
            steps: Steps of a truncating accumulator with a nonzero term, if not consecutive.
        """
        # ``parts`` lack the last axis: they divide the bound in proportion.
        whole = sum(self.parts.values(), torch.zeros_like(self.lost))
        share = {n: torch.where(whole > 0, part / whole, 0.0) for n, part in self.parts.items()}
        terms = {n: scale * part[..., None] * self.moved for n, part in share.items()}
        total = self.moved + self.size
        if self.shift is not None:
            terms[_SAVED] = scale * self.shift.abs()
        added = accumulator.det(self.term_count + _FACTOR_ROUNDINGS, steps)[..., None]
        terms[_ACCUMULATION] = scale * (added * (1 + operand)) * total
        if operand:
            terms["rounding of operands"] = scale * operand * total
        terms["underflow"] = self.lost[..., None].expand_as(total) * max(1.0, scale)
        beyond = 2 * max(1.0, scale) * total > arithmetic.computes.max
        terms[_ACCUMULATION] = torch.where(beyond, torch.inf, terms[_ACCUMULATION])
        # The bound itself is computed in float64, with some dozen operations per term.
        inflation = 1 + 8 * (self.term_count[..., None] + total.shape[-1] + 8) * 2.0**-53
        return {name: term * inflation for name, term in terms.items()}


def _sum_or_none(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return None if one is None or other is None else one + other


def rounding_error(exact: Tensor, terms: dict[str, Tensor], fmt: Format) -> Tensor:
    """Return B4: the error of rounding to ``fmt`` a sum that is off by ``terms``."""
    return half_ulp(exact.abs() + sum(terms.values()), fmt)


def partial_sum_error(size: Tensor, terms: dict[str, Tensor], parts: int, fmt: Format) -> Tensor:
    """Return B39: the error of adding up ``parts`` in ``fmt`` in any order; infinite on overflow.

    Args:
        size: Σ of the magnitudes of the terms, which no exact partial sum exceeds.
        terms: Errors of the sum before its parts are added.
    """
    rate = parts * math.log1p(fmt.unit_roundoff)
    growth = math.expm1(rate) if rate < _LARGEST_RATE else math.inf
    magnitude = size + sum(terms.values())
    # Each part adds an error of η ÷ 2 below the normal range, which grows like the sum itself.
    error = growth * magnitude + (1 + growth) * parts * fmt.subnormal_spacing / 2
    return torch.where((1 + growth) * magnitude > fmt.max, math.inf, error)


def mask_unknown(
    terms: dict[str, Tensor], zero: Tensor, unknown: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the bound and its terms: 0 where ``zero``, infinite where ``unknown`` or NaN."""
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
    # Bound of |error|, ``(heads, rows, head_dim)``; 0 in rows that see no key, infinite in rows
    # without a bound.
    dq: Tensor
    dq_terms: dict[str, Tensor]  # the terms of ``dq`` by name; they sum to it
    dk: Sums  # the rows' part of dk per query head, before the scale, ``(heads, kv, head_dim)``
    dv: Sums  # the rows' part of dv per query head, ``(heads, kv, value_dim)``
    dsink: Sums | None  # the rows' part of dsink, ``(heads, 1, 1)``; None without a sink
    # The rows' part of dcaptured, ``(numbers, 1, 1)``; None if the score mod reads no captured
    # numbers, or they have no gradients.
    dcaptured: Sums | None = None


def row_gradients(
    conditions: GradientConditions,
    arithmetic: Arithmetic,
    scores: ScoreError,
    saved: SavedErrors,
    mod: ScoreModError | None = None,
    slope: ScoreModError | None = None,
    reads: Sequence[ReadConditions] = (),
    numbers: int = 0,
) -> RowGradients:
    """Bound the gradients of every backward of this arithmetic, whatever its tiles and order.

    Args:
        saved: Errors of the kernel's own out and LSE in these rows.
        mod: Error of the score mod; None without a mod.
        slope: Error of the score mod's derivative; None if that has no error.
        reads: The mod's reads of captured tensors, if those have gradients.
        numbers: Number of elements of the captured tensors.

    Source: B30–B40 in ``docs/explanation/bounds.md``.
    """
    weights = recompute_weights(conditions, arithmetic, scores, saved, mod)
    captured = None
    if reads:  # B40: the gradient of each number is a sum over the scores that read it
        parts = [
            _read_sum(conditions, arithmetic, weights, saved, read).spread(
                read.place.flatten(), numbers
            )
            for read in reads
        ]
        captured = functools.reduce(Sums.plus, parts)
    # If the slope jumps within a score's error, the row's dX has no bound.
    if slope is not None:
        weights = weights.without(~torch.isfinite(slope.radius))
    conditions, saved = zero_elsewhere(conditions, saved, weights.live.any(-1))
    gradients = score_gradients(conditions, arithmetic, weights, saved, slope)
    rows = _Rows(conditions, arithmetic, weights, gradients)
    dq, dq_terms = rows.query_bound()
    return RowGradients(
        rows=conditions.known.rows,
        scale=abs(conditions.known.scale),
        dq=dq,
        dq_terms=dq_terms,
        dk=rows.key_sums(),
        dv=rows.value_sums(),
        dsink=rows.sink_sums() if conditions.known.has_sink else None,
        dcaptured=captured,
    )


def _read_sum(
    conditions: GradientConditions,
    arithmetic: Arithmetic,
    weights: RecomputedWeights,
    saved: SavedErrors,
    read: ReadConditions,
) -> Sums:
    """Return B40: each score's gradient times its derivative by the number read, as a Sums."""
    # A sink, the last key, reads nothing: its slope is 0.
    sink = (0, conditions.dx.shape[-1] - read.place.shape[-1])
    # The derivative by the number read takes the place of the one by the score.
    slope = torch.nn.functional.pad(read.slope, sink)
    of_slope = ("radius", "own", "jump")
    padded = {n: torch.nn.functional.pad(getattr(read.error, n), sink) for n in of_slope}
    error = replace(read.error, **padded)
    weights = weights.without(~(torch.isfinite(error.radius) & torch.isfinite(slope)))
    conditions, saved = zero_elsewhere(
        replace(conditions, slope=slope), saved, weights.live.any(-1)
    )
    gradients = score_gradients(conditions, arithmetic, weights, saved, error)
    return _Rows(conditions, arithmetic, weights, gradients).score_sums(read.place.shape[-1])


def query_operand(arithmetic: Arithmetic) -> float:
    """Return the relative error of q or k as operands of the products of dk and dq."""
    scaled = arithmetic.scaled_query
    return arithmetic.operand_error + (0.0 if scaled is None else scaled.unit_roundoff)


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Some rows: exact quantities, and P and the score gradients as a backward computes them."""

    conditions: GradientConditions
    arithmetic: Arithmetic
    weights: RecomputedWeights
    gradients: ScoreGradients

    def query_bound(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return B36: the bound of dq and its terms."""
        conditions, arithmetic, gradients = self.conditions, self.arithmetic, self.gradients
        forward, keys = conditions.known, conditions.known.k.abs()
        count = self.weights.live.sum(-1).to(torch.float64)
        error, size = gradients.error + gradients.rounded, gradients.size
        sums = Sums(
            moved=error @ keys,
            size=size @ keys,
            shift=gradients.shift @ forward.k,
            exact=None,
            parts={name: part.sum(-1) for name, part in gradients.parts.items()},
            term_count=count,
            lost=self._flushed(count, (error + size).sum(-1), keys),
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
        terms[OUTPUT] = rounding_error(conditions.dq, terms, arithmetic.output)
        dead = ~forward.seen.any(-1, keepdim=True)
        return mask_unknown(terms, dead, self.weights.unbounded[..., None])

    def key_sums(self) -> Sums:
        """Return B37: these rows' part of dk, before the scale."""
        gradients = self.gradients
        error, q = gradients.error + gradients.rounded, self.conditions.known.q
        sums = self._sum_over_rows(q, error, gradients.size, self.conditions.dx, gradients.parts)
        return replace(sums, shift=self._no_sink(gradients.shift).mT @ q)

    def value_sums(self) -> Sums:
        """Return B37: these rows' part of dv."""
        weights = self.weights
        whole = sum(weights.parts.values(), torch.zeros_like(weights.exact))
        each = torch.where(whole > 0, weights.moved / whole, 0.0)
        parts = {name: part * each for name, part in weights.parts.items() if bool(part.any())}
        if self.arithmetic.weights_error:
            parts["rounding of P"] = weights.rounded
        error, exact = weights.moved + weights.rounded, weights.exact
        return self._sum_over_rows(self.conditions.dout, error, exact, exact, parts)

    def sink_sums(self) -> Sums:
        """Return B38: these rows' part of the sink's gradient: the sum of dX, in fp32."""
        unknown = self.weights.unbounded.any(-1, keepdim=True)
        return self._sum_gradients(lambda x: x[..., -1:].sum(-2), unknown)

    def score_sums(self, keys: int) -> Sums:
        """Return B40: a sum for each score of the first ``keys`` keys, ``(scores, 1, 1)``."""

        def each(x: Tensor) -> Tensor:
            return x[..., :keys].reshape(-1, 1)

        exposed = self.weights.exposed & self.weights.unbounded[..., None]
        return self._sum_gradients(each, each(exposed))

    def _no_sink(self, x: Tensor) -> Tensor:
        """Return ``x``, ``(heads, rows, kv)``, without a sink, the last key."""
        return x[..., : self.conditions.dx.shape[-1] - self.conditions.known.has_sink]

    def _sum_over_rows(
        self, operand: Tensor, error: Tensor, size: Tensor, exact: Tensor, parts: dict[str, Tensor]
    ) -> Sums:
        """Return each key's sum over rows of a factor ``(heads, rows, kv)`` times ``operand``."""
        error, size, largest = self._no_sink(error).mT, self._no_sink(size).mT, operand.abs()
        count = self._no_sink(self.weights.live).sum(-2).to(torch.float64)
        # Keys that a row without a bound may see.
        exposed = self.weights.exposed & self.weights.unbounded[..., None]
        separate_heads = self.arithmetic.sums_rounded_heads
        return Sums(
            moved=error @ largest,
            size=size @ largest,
            shift=None,
            exact=self._no_sink(exact).mT @ operand if separate_heads else None,
            parts={name: self._no_sink(part).sum(-2) for name, part in parts.items()},
            term_count=count,
            lost=self._flushed(count, (error + size).sum(-1), largest),
            unknown=self._no_sink(exposed).any(-2),
        )

    def _sum_gradients(self, take: Callable[[Tensor], Tensor], unknown: Tensor) -> Sums:
        """Return sums of dX itself, which a fused backward does not round to a product's format."""
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

    def _flushed(self, count: Tensor, total: Tensor, operand: Tensor) -> Tensor:
        """Return B36's underflow: every product, term and operand may be flushed to 0."""
        largest = operand.amax((-1, -2))[..., None]
        scaled = self.arithmetic.scaled_query
        lost = 2.0**self.arithmetic.computes.min_exponent * (count * (2 + largest) + total)
        return lost if scaled is None else lost + scaled.subnormal_spacing / 2 * total


HEADS = "rounding of heads"


class KeyGradients:
    """Sums over all rows of a Problem; each row of each head is added once, in any order."""

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
        # If each head's sum is rounded, heads that share a key head stay separate until then.
        separate_heads = self._arithmetic.sums_rounded_heads
        self._add("dk", rows.dk, heads if separate_heads else heads // self._group)
        self._add("dv", rows.dv, heads if separate_heads else heads // self._group)
        if rows.dsink is not None:
            self._add("dsink", rows.dsink, heads % self._heads)
        if rows.dcaptured is not None:  # summed by number already
            self._merge("dcaptured", rows.dcaptured)

    def bounds(
        self, exact: Mapping[TensorName, Tensor]
    ) -> tuple[dict[TensorName, Tensor], dict[TensorName, dict[str, Tensor]]]:
        """Return bounds of |error| by name, and the terms of each, after all rows were added.

        Args:
            exact: Exact gradients, float64: dk ``(batch, kv_heads, kv, head_dim)``, dv, dsink
                ``(heads,)`` of a Problem with a sink, dcaptured ``(numbers,)`` if rows were added
                with reads.

        Bounds have the shapes of ``exact``. They are infinite where none is known, and 0 for keys
        that no row sees. The terms of each bound sum to it.
        """
        arithmetic = self._arithmetic
        results: dict[TensorName, tuple[Tensor, dict[str, Tensor]]] = {}
        for name, gradient in exact.items():
            if name == "dk":
                operand = query_operand(arithmetic)
                results[name] = self._key_bound(name, gradient, self._scale, operand)
            elif name == "dv":
                results[name] = self._key_bound(name, gradient, 1.0, arithmetic.operand_error)
            else:
                results[name] = self._fp32_bound(name, gradient)
        return (
            {name: bound for name, (bound, _) in results.items()},
            {name: terms for name, (_, terms) in results.items()},
        )

    def _add(self, name: str, part: Sums, to: Tensor) -> None:
        is_sink = name == "dsink"
        separate_heads = self._arithmetic.sums_rounded_heads
        whole = self._heads * (1 if is_sink else self._batch)
        count = whole if is_sink or separate_heads else whole // self._group
        self._merge(name, part.spread(to, count))

    def _merge(self, name: str, part: Sums) -> None:
        before = self._sums.get(name)
        self._sums[name] = part if before is None else before.plus(part)

    def _key_bound(
        self, name: str, exact: Tensor, scale: float, operand: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return B37 and B39: the bound of dk or dv and its terms, in the shape of ``exact``."""
        sums, arithmetic = self._sums[name], self._arithmetic
        accumulator = arithmetic.values
        steps = self._steps(sums, accumulator)
        terms = sums.terms(arithmetic, accumulator, scale=scale, operand=operand, steps=steps)
        seen, unknown = sums.term_count > 0, sums.unknown
        if arithmetic.sums_rounded_heads:
            assert sums.exact is not None, "rows keep it where heads are rounded"
            terms = self._round_heads(scale * sums.exact, terms)
            seen, unknown = (_by_group(x, self._group).any(1) for x in (seen, unknown))
        if arithmetic.dkv_parts > 1:
            # B39: parts are added up one after another in the output format.
            size = scale * sums.size
            if arithmetic.sums_rounded_heads:
                size = _by_group(size, self._group).sum(1)
            terms[PARTS] = partial_sum_error(size, terms, arithmetic.dkv_parts, arithmetic.output)
        flat = exact.flatten(0, 1)
        terms[OUTPUT] = rounding_error(flat, terms, arithmetic.output)
        bound, terms = mask_unknown(terms, ~(seen | unknown)[..., None], unknown[..., None])
        return bound.view(exact.shape), {n: term.view(exact.shape) for n, term in terms.items()}

    def _round_heads(self, exact: Tensor, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return B39: terms with each head's sum rounded, and those added in the output format."""
        output = self._arithmetic.output
        terms[HEADS] = rounding_error(exact, terms, output)
        size = exact.abs() + sum(terms.values())
        terms = {n: _by_group(term, self._group).sum(1) for n, term in terms.items()}
        size = _by_group(size, self._group).sum(1)
        # Each partial sum of heads is rounded by at most half an ulp of its largest magnitude.
        terms[HEADS] = terms[HEADS] + (self._group - 1) * half_ulp(
            size * (1 + output.unit_roundoff) ** self._group, output
        )
        return terms

    def _steps(self, sums: Sums, accumulator: Accumulator) -> Tensor | None:
        """Return the most steps of a truncating accumulator that see a key; None for any other."""
        if accumulator.block is None:
            return None
        heads = 1 if self._arithmetic.sums_rounded_heads else self._group
        return sums.term_count.clamp(max=heads * math.ceil(self._query / accumulator.block))

    def _fp32_bound(self, name: str, exact: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return B38 or B40: sum and result are fp32 at least, whatever the products' format."""
        sums, arithmetic = self._sums[name], self._arithmetic
        fp64 = arithmetic.computes.name == "fp64"
        terms = sums.terms(arithmetic, FP64 if fp64 else FP32)
        output = FORMATS["fp64"] if fp64 else FORMATS["fp32"]
        terms[OUTPUT] = rounding_error(exact.view_as(sums.moved), terms, output)
        # Every row sees a sink, but a captured number may be read by no seen score.
        unread = (sums.term_count == 0) & ~sums.unknown & (name == "dcaptured")
        bound, terms = mask_unknown(terms, unread[..., None], sums.unknown[..., None])
        return bound.flatten(), {name: term.flatten() for name, term in terms.items()}


def _by_group(x: Tensor, group: int) -> Tensor:
    """Return ``x``, ``(heads, …)``, as ``(key heads, group, …)``."""
    return x.reshape(-1, group, *x.shape[1:])
