"""Error bounds of a kernel on a Case, computed by the judge from the oracle's row conditions.

The deterministic bound is computed for every row, or only for the rows that can change a verdict
(see ``bound_deciding_rows``). The probabilistic bound and the oracle's own bound cost more, and are
computed for sampled rows only; in a small Problem these are all rows.

A backward pass reads the out and LSE of the kernel's own forward pass. The errors of those two are
measured and allowed for, so that a right backward is not blamed for its forward's rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from attncheck.core.conditions import (
    Conditions,
    ReadConditions,
    Rows,
    RowTotals,
    ScoreModError,
    kept_step,
)
from attncheck.core.declared_arithmetic import FP64_ORACLE, Arithmetic
from attncheck.core.mod_spec import NONE
from attncheck.core.outputs import Outputs
from attncheck.judge.allowance import Allowance, Sample, shares
from attncheck.judge.bound_floor import bound_floor, row_totals
from attncheck.judge.deterministic_bound import DeterministicBound, deterministic_bound
from attncheck.judge.gradient_bounds import KeyGradients, row_gradients
from attncheck.judge.probabilistic_bound import probabilistic_bound, sigmas_needed
from attncheck.judge.score_errors import ScoreError, likely_radius, rounds_operands, score_error
from attncheck.judge.score_gradient_errors import SavedErrors
from attncheck.judge.verdict_rules import ComparedTensor
from attncheck.oracles.row_conditions import (
    all_rows,
    compute_conditions,
    compute_gradient_conditions,
    mask_visibility,
    sampled_rows,
    samples_all_rows,
    score_slopes,
    some_rows,
    weigh_rows,
)
from attncheck.verify.evidence import Evidence, score_analysis

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attncheck.core.judgement import Place
    from attncheck.core.tensor_names import TensorName
    from attncheck.mods.captured_reads import CapturedRead
    from attncheck.mods.running_error import RunningError

_FEWEST_BOUNDED = (
    64  # Rows bounded in the first round of ``bound_deciding_rows``; it doubles every round.
)
# If more than this part of the rows need their bound, floors save little: all rows are bounded.
_MOST_BOUNDED = 0.25
_TINY = torch.finfo(torch.float64).tiny


def allowances(
    evidence: Evidence,
    arithmetics: Sequence[Arithmetic],
    totals: RowTotals | None = None,
    sampled: Sequence[Rows] | None = None,
) -> list[Allowance]:
    """Return, for each arithmetic, the largest errors that rounding can explain on this Case.

    Arithmetics share most of the work on a row. A bound is infinite where the exact result is not
    finite, and where the score mod cannot be traced or may hide another key after rounding.

    Args:
        totals: From ``totals_of_rows``. Rows that are not sampled then get only a lower bound
            (floor); ``bound_deciding_rows`` replaces it where a kernel's outputs require the bound
            itself.
        sampled: The sampled rows, if known: finding them evaluates the mask at all pairs.
    """
    problem, device = evidence.case.problem, evidence.inputs.device
    bounds_of_each = [_Bounds.of(evidence, arithmetic, totals) for arithmetic in arithmetics]
    samples_all = samples_all_rows(problem, device)
    # In a small Problem all rows are sampled: the second loop below bounds them.
    if not samples_all and totals is None:
        for rows in all_rows(problem, device):
            conditions = compute_conditions(evidence.inputs, evidence.truth, rows)
            for each, arithmetic in zip(bounds_of_each, arithmetics, strict=True):
                each.bound(_RowBounds.of(evidence, arithmetic, conditions))
    for rows in sampled_rows(problem, device) if sampled is None else sampled:
        conditions = compute_conditions(evidence.inputs, evidence.truth, rows)
        # A copy, so that its cached steps, which no kernel shares, are freed with it.
        oracle = _RowBounds.of(evidence, FP64_ORACLE, replace(conditions)).deterministic
        for each, arithmetic in zip(bounds_of_each, arithmetics, strict=True):
            bounds = _RowBounds.of(evidence, arithmetic, conditions)
            certain = each.sample(evidence, bounds)
            if samples_all or totals is not None:
                each.bound(bounds, certain)
            # The oracle's own error limits what a bound is worth: the judge needs their ratio.
            each.prove(oracle, conditions.rows)
    return [each.allowance() for each in bounds_of_each]


def totals_of_rows(evidence: Evidence) -> RowTotals | None:
    """Return the totals of every row from which ``bound_floor`` computes lower bounds.

    None if floors do not apply: all rows are sampled, the Problem has gradients, a score mod or a
    sink or is a softmax, or the exact result is not finite.
    """
    problem, device = evidence.case.problem, evidence.inputs.device
    plain = problem.operation == "attention" and problem.score == NONE and not problem.sink
    if not plain or problem.backward or samples_all_rows(problem, device):
        return None
    if not bool(evidence.truth.out.isfinite().all() & (evidence.lse < math.inf).all()):
        return None
    shape = problem.batch * problem.heads, problem.query
    totals: dict[str, Any] = {}
    for rows in all_rows(problem, device, few_arrays=True):
        part = row_totals(weigh_rows(evidence.inputs, evidence.truth, rows))
        for name in (each.name for each in fields(part)):
            value = getattr(part, name)
            if not isinstance(value, torch.Tensor):
                totals[name] = value
            elif not value.dim():
                totals[name] = torch.maximum(value, totals.get(name, value))
            else:
                # Pieces between the large arrays over all pairs would keep these from being freed.
                if name not in totals:
                    totals[name] = value.new_empty(*shape, *value.shape[2:])
                totals[name][_place_of(rows)] = value
    return RowTotals(**totals)


def bound_deciding_rows(
    allowance: Allowance, evidence: Evidence, arithmetic: Arithmetic, outputs: Outputs | None = None
) -> None:
    """Replace floors in ``allowance`` by bounds in the rows that can change a verdict.

    Rows with an error beyond the floor are bounded first, then the others by decreasing ratio of
    error to floor, until no other row can have the largest ratio of error to bound. The number of
    elements beyond their bound, and the worst of them, are then what they would be if every row
    had been bounded. Without ``outputs`` every row is bounded.
    """
    if allowance.full_rows is None:
        return
    full, alive = (rows.flatten(0, 1) for rows in (allowance.full_rows, evidence.alive))
    shape = (allowance.lse.shape[0], allowance.lse.shape[1])
    collected = _Bounds(
        allowance.out.flatten(0, 1), allowance.lse.flatten(0, 1), shape, full_rows=full
    )
    sides = [] if outputs is None else _sides(outputs, evidence, collected)
    batch = _FEWEST_BOUNDED
    while bool((ranks := _rank_rows(sides, alive, full)).any()):
        if int((ranks > 0).sum()) <= _MOST_BOUNDED * int(alive.sum()):
            # The largest shares first: they raise the share that other rows must reach.
            ranks = ranks * (ranks >= ranks.flatten().topk(min(batch, ranks.numel()))[0][-1])
        else:
            ranks = (alive & ~full).double()
        for rows in some_rows(evidence.case.problem, ranks > 0):
            bounds = _RowBounds.at(evidence, arithmetic, rows)
            collected.bound(bounds)
            for side in sides:
                side.measure(_place_of(bounds.conditions.rows))
        batch *= 2


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """An output with its exact values and bound; batch and heads are flattened."""

    got: Tensor
    truth: Tensor
    bound: Tensor
    share: Tensor  # largest error / bound of each row, ``(heads, query)``

    def measure(self, at: tuple[slice, Any]) -> None:
        """Compute the shares of some rows again."""
        share = shares(self.got[at].double() - self.truth[at], self.bound[at])
        self.share[at] = share.flatten(2).amax(-1) if share.dim() > 2 else share


def _sides(outputs: Outputs, evidence: Evidence, bounds: _Bounds) -> list[_Side]:
    truth, sides = evidence.truth.tensors(), []
    for name, got in Outputs(outputs.out, outputs.lse).tensors().items():
        bound = bounds.out if name == "out" else bounds.lse
        side = _Side(
            got.flatten(0, 1), truth[name].flatten(0, 1), bound, torch.empty_like(bounds.lse)
        )
        side.measure((slice(None), slice(None)))
        sides.append(side)
    return sides


def _rank_rows(sides: list[_Side], alive: Tensor, full: Tensor) -> Tensor:
    """Return ranks ``(heads, query)``: higher ones are bounded first, 0 needs only a floor."""
    unbounded = alive & ~full
    ranks = torch.zeros_like(unbounded, dtype=torch.float64) if sides else unbounded.double()
    for side in sides:
        largest = torch.where(alive & full, side.share, 0.0).amax()
        share = torch.where(unbounded, side.share, 0.0)
        # Ties count, since the worst is the first of equals; a row without errors is never worst.
        share = torch.where((share >= largest) | (share > 1), share, 0.0)
        ranks = torch.maximum(ranks, share / largest.clamp(_TINY, 1 / _TINY))
    return ranks


def _place_of(rows: Rows) -> tuple[slice, Tensor]:
    return slice(rows.heads.start, rows.heads.stop), rows.query


def row_bounds(evidence: Evidence, arithmetic: Arithmetic, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return deterministic bounds: out ``(heads, rows, value_dim)``, LSE ``(heads, rows)``.

    As in ``allowances``: infinite where no bound is known, 0 where a row sees no key.
    """
    bounds = _RowBounds.at(evidence, arithmetic, rows)
    certain = bounds.deterministic
    return bounds.allowed(certain.out, certain.lse)


def deterministic_bounds(evidence: Evidence, arithmetic: Arithmetic) -> Outputs:
    """Return the deterministic bounds of every row, as in ``allowances``."""
    collected = _Bounds.of(evidence, arithmetic)
    for rows in all_rows(evidence.case.problem, evidence.inputs.device):
        collected.bound(_RowBounds.at(evidence, arithmetic, rows))
    allowance = collected.allowance()
    return Outputs(allowance.out, allowance.lse)


def budget(evidence: Evidence, arithmetic: Arithmetic, place: Place) -> dict[str, float]:
    """Return the parts of one element's allowance, by the names of ``docs/explanation/bounds.md``.

    Args:
        place: An element of out, or with ``dim`` −1 a row of LSE.
    """
    head = place.batch * evidence.case.problem.heads + place.head
    rows = Rows(range(head, head + 1), torch.tensor([place.query]))
    bound = _RowBounds.at(evidence, arithmetic, rows).deterministic
    if place.dim < 0:
        return {name: float(part[0, 0]) for name, part in bound.lse_terms.items()}
    return {name: float(part[0, 0, place.dim]) for name, part in bound.out_terms.items()}


@dataclass(frozen=True, slots=True, eq=False)
class _RowBounds:
    """Some rows with the errors of their scores, from which bounds are computed."""

    arithmetic: Arithmetic
    conditions: Conditions
    scores: ScoreError
    mod: ScoreModError | None

    @classmethod
    def of(cls, evidence: Evidence, arithmetic: Arithmetic, conditions: Conditions) -> _RowBounds:
        scores = score_error(conditions, arithmetic)
        if not conditions.has_score_mod:
            return cls(arithmetic, conditions, scores, None)
        return cls(
            arithmetic, conditions, scores, _mod_of_rows(conditions, arithmetic, evidence, scores)
        )

    @classmethod
    def at(cls, evidence: Evidence, arithmetic: Arithmetic, rows: Rows) -> _RowBounds:
        return cls.of(
            evidence, arithmetic, compute_conditions(evidence.inputs, evidence.truth, rows)
        )

    @property
    def deterministic(self) -> DeterministicBound:
        return deterministic_bound(self.conditions, self.arithmetic, self.scores, self.mod)

    @property
    def unknown(self) -> Tensor:
        """Rows ``(heads, rows)`` that have no bound."""
        lse = self.conditions.lse
        unknown = ~lse.isfinite() & ~torch.isneginf(lse)
        return unknown if self.mod is None else unknown | self.mod.radius.isinf().any(-1)

    @property
    def dead(self) -> Tensor:
        """Rows ``(heads, rows)`` that see no key: exactly 0 and −∞."""
        return torch.isneginf(self.conditions.lse)

    def allowed(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return these bounds, infinite where none is known and 0 in rows that see no key."""
        out, lse = (x.nan_to_num(nan=math.inf, posinf=math.inf) for x in (out, lse))
        # No finite bound applies where the exact result overflows.
        out = torch.where(self.conditions.out.isfinite(), out, math.inf)
        out, lse = (
            x.masked_fill(rows, value)
            for x, rows, value in ((out, self.dead[..., None], 0.0), (lse, self.dead, 0.0))
        )
        return out.masked_fill(self.unknown[..., None], math.inf), lse.masked_fill(
            self.unknown, math.inf
        )


@kept_step
def _mod_of_rows(
    conditions: Conditions, arithmetic: Arithmetic, evidence: Evidence, scores: ScoreError
) -> ScoreModError:
    mod = mod_error(evidence, arithmetic, conditions, scores)
    if scores.bias is not None or rounds_operands(arithmetic):
        mod = replace(mod, falls=score_slopes(evidence.inputs, conditions) < 0)
    return mod


@kept_step
def _likely_mod_error(
    conditions: Conditions,
    arithmetic: Arithmetic,
    evidence: Evidence,
    scores: ScoreError,
    mod: ScoreModError | None,
    sigmas: float,
) -> ScoreModError | None:
    """Return ``mod`` with its ``likely`` errors: of scores within ``sigmas`` deviations."""
    # Without a score mod there is nothing to trace, and tracing costs more than the bound.
    analysis = None if mod is None else evidence.running_error(arithmetic)
    if mod is None or analysis is None:
        return mod
    scores = replace(scores, radius=likely_radius(scores, sigmas))
    return replace(mod, likely=_at(analysis, evidence, conditions, scores).radius)


def mod_error(
    evidence: Evidence, arithmetic: Arithmetic, conditions: Conditions, scores: ScoreError
) -> ScoreModError:
    """Return the score mod's errors at every pair that the mask shows, 0 at others."""
    analysis = evidence.running_error(arithmetic)
    if analysis is None:
        unbounded = torch.full_like(conditions.products, math.inf)
        return ScoreModError(
            radius=unbounded, own=unbounded, jump=torch.zeros_like(conditions.seen)
        )
    errors = _at(analysis, evidence, conditions, scores)
    # A key is unseen because the mask hides it, or because the mod makes its score −∞. Rounding may
    # undo only the latter, so its error counts. Evaluating the mask is costly: only if needed.
    if bool((errors.radius[~conditions.seen] > 0).any()):
        errors = _only_where(mask_visibility(evidence.case.problem, conditions.rows), errors)
    return errors


def _only_where(shown: Tensor, errors: ScoreModError) -> ScoreModError:
    """Return ``errors``, 0 where not ``shown``."""
    radius, own = (torch.where(shown, x, 0.0) for x in (errors.radius, errors.own))
    return ScoreModError(radius=radius, own=own, jump=errors.jump & shown)


def _at(
    analysis: RunningError, evidence: Evidence, conditions: Conditions, scores: ScoreError
) -> ScoreModError:
    errors = on_keys(analysis, evidence, conditions, scores)
    return _with_sink(errors, scores.radius[..., -1:]) if conditions.has_sink else errors


def on_keys(
    analysis: RunningError, evidence: Evidence, conditions: Conditions, scores: ScoreError
) -> ScoreModError:
    """Return an expression's errors at every pair ``(heads, rows, kv)``, without sinks."""
    products, *indices = _score_arguments(evidence, conditions)
    radius = scores.radius[..., : evidence.case.problem.kv]
    return analysis.at(products, radius, *indices)


def _with_sink(mod: ScoreModError, radius: Tensor) -> ScoreModError:
    """Append the error ``radius`` of a sink; score mods do not apply to sinks."""
    return ScoreModError(
        radius=torch.cat([mod.radius, radius], -1),
        own=torch.nn.functional.pad(mod.own, (0, 1)),
        jump=torch.nn.functional.pad(mod.jump, (0, 1), value=False),
    )


@dataclass(slots=True, eq=False)
class _Bounds:
    """Bounds collected row by row, in tensors of all rows with batch and heads flattened."""

    out: Tensor
    lse: Tensor
    shape: tuple[int, int]
    samples: list[Sample] = field(default_factory=list)
    jumps: int = 0
    share: float = 0.0
    # Rows ``(heads, query)`` that have a bound, where others have a floor; None if all have one.
    full_rows: Tensor | None = None

    @classmethod
    def of(
        cls, evidence: Evidence, arithmetic: Arithmetic, totals: RowTotals | None = None
    ) -> _Bounds:
        exact = evidence.truth.out
        shape = (exact.shape[0], exact.shape[1])
        if totals is None:
            out, lse = (torch.empty_like(x).flatten(0, 1) for x in (exact, evidence.lse))
            return cls(out, lse, shape)
        out, lse = bound_floor(totals, arithmetic)
        return cls(out, lse, shape, full_rows=torch.zeros_like(lse, dtype=torch.bool))

    def bound(self, bounds: _RowBounds, certain: DeterministicBound | None = None) -> None:
        """Store the deterministic bound of some rows: ``certain``, or computed if None."""
        at, certain = _place_of(bounds.conditions.rows), certain or bounds.deterministic
        out, lse = bounds.allowed(certain.out, certain.lse)
        if self.full_rows is not None:
            # A row that already has its bound keeps the same bits.
            full = self.full_rows[at]
            out = torch.where(full[..., None], self.out[at], out)
            lse = torch.where(full, self.lse[at], lse)
            self.full_rows[at] = True
        self.out[at], self.lse[at] = out, lse
        if bounds.mod is not None:
            self.jumps += int(bounds.mod.jump.sum())

    def sample(self, evidence: Evidence, bounds: _RowBounds) -> DeterministicBound:
        """Store the probabilistic bound of some rows, and return their deterministic one."""
        elements = self.out.numel() + self.lse.numel()
        conditions, arithmetic, scores = bounds.conditions, bounds.arithmetic, bounds.scores
        sigmas = sigmas_needed(elements)
        mod = _likely_mod_error(conditions, arithmetic, evidence, scores, bounds.mod, sigmas)
        probable = probabilistic_bound(conditions, arithmetic, scores, mod, elements=elements)
        out, lse = bounds.allowed(probable.out, probable.lse)
        self.samples.append(
            Sample(
                rows=bounds.conditions.rows,
                probable_out=out,
                probable_lse=lse,
                sd_out=probable.sd_out,
                sd_lse=probable.sd_lse,
                lost_out=probable.certain.out_terms["underflow"].expand_as(probable.sd_out),
            )
        )
        return probable.certain

    def prove(self, certain: DeterministicBound, rows: Rows) -> None:
        """Update the largest ratio of the oracle's bound to the kernel's on some bounded rows."""
        at = _place_of(rows)
        for proven, allowed in ((certain.out, self.out[at]), (certain.lse, self.lse[at])):
            # An infinite bound needs no exact result, and in rows without keys the truth is exact.
            matters = allowed.isfinite() & (allowed > 0)
            if bool(matters.any()):
                share = (proven[matters] / allowed[matters]).nan_to_num(nan=math.inf)
                self.share = max(self.share, float(share.max()))

    def allowance(self) -> Allowance:
        """Return the Allowance of all rows."""
        return Allowance(
            out=self.out.view(*self.shape, *self.out.shape[1:]),
            lse=self.lse.view(*self.shape, *self.lse.shape[1:]),
            samples=self.samples,
            full_rows=None
            if self.full_rows is None
            else self.full_rows.view(self.lse.shape).view(*self.shape, -1),
            jumps=self.jumps,
            oracle_share=self.share,
        )


def captured_conditions(
    evidence: Evidence, arithmetic: Arithmetic, conditions: Conditions, scores: ScoreError
) -> list[ReadConditions]:
    """Return every read of a captured tensor in these rows, with the errors of its slope."""
    kv = evidence.case.problem.kv
    # Sinks come after the keys, and score mods do not apply to them.
    at, seen = _score_arguments(evidence, conditions), conditions.seen[..., :kv]
    reads = []
    for read in evidence.reads:
        errors = score_analysis(read.slope, arithmetic)
        slope = read.slope.evaluate(*at).to(torch.float64)
        reads.append(
            ReadConditions(
                place=_read_place(read, at),
                slope=torch.where(seen, slope, 0.0),
                error=_only_where(seen, on_keys(errors, evidence, conditions, scores)),
            )
        )
    return reads


def numbers_read(evidence: Evidence) -> Tensor:
    """Return which captured numbers are read for a visible score, ``(numbers,)`` bool.

    All of them if the score mod cannot be traced.
    """
    problem, truth = evidence.case.problem, evidence.truth
    assert truth.dcaptured is not None, "asked of a Problem with dcaptured"
    if not evidence.reads:
        return torch.ones_like(truth.dcaptured, dtype=torch.bool)
    numbers = torch.zeros_like(truth.dcaptured, dtype=torch.bool)
    for rows in all_rows(problem, evidence.inputs.device):
        conditions = compute_conditions(evidence.inputs, truth, rows)
        at, seen = _score_arguments(evidence, conditions), conditions.seen[..., : problem.kv]
        for read in evidence.reads:
            numbers[_read_place(read, at)[seen]] = True
    return numbers


def _read_place(read: CapturedRead, at: tuple[Tensor, ...]) -> Tensor:
    return (read.start + read.place.evaluate(*at)).expand(at[0].shape)


def _score_arguments(evidence: Evidence, conditions: Conditions) -> tuple[Tensor, ...]:
    """Return the scores before the mod, and b, h, q_idx and kv_idx, which broadcast to them."""
    problem, rows, device = evidence.case.problem, conditions.rows, conditions.products.device
    heads = torch.arange(rows.heads.start, rows.heads.stop, device=device)[:, None, None]
    keys = torch.arange(problem.kv, device=device)[None, None, :]
    return (
        conditions.products[..., : problem.kv],
        heads // problem.heads,
        heads % problem.heads,
        rows.query[None, :, None],
        keys,
    )


@dataclass(frozen=True, slots=True, eq=False)
class GradientAllowance:
    """Largest errors of gradients that rounding can explain, float64."""

    # By gradient, in its own axes; exactly 0 in rows that see no key and for keys that no row sees,
    # infinite where no bound is known.
    bounds: dict[TensorName, Tensor]
    # The summands of each bound, by the names of ``docs/explanation/bounds.md``.
    terms: dict[TensorName, dict[str, Tensor]]

    def compared(self, outputs: Outputs, evidence: Evidence) -> list[ComparedTensor]:
        """Return each gradient with its exact values and bound."""
        exact, got = evidence.truth.gradients(), outputs.gradients()
        return [
            ComparedTensor.of(name, got[name], exact[name], bound, self._alive(name, evidence))
            for name, bound in self.bounds.items()
        ]

    def _alive(self, name: TensorName, evidence: Evidence) -> Tensor:
        if name == "dq":
            return evidence.alive
        # What a row sees or reads is rounded at least once, so its bound is more than 0.
        flat = name in {"dsink", "dcaptured"}
        return self.bounds[name] > 0 if flat else (self.bounds[name] > 0).any(-1)

    def budget(self, tensor: TensorName, place: Place) -> dict[str, float]:
        """Return the summands of one element's allowance by name."""
        index = place.index(tensor)
        return {name: float(term[index]) for name, term in self.terms[tensor].items()}


def gradient_allowance(
    evidence: Evidence,
    arithmetic: Arithmetic,
    outputs: Outputs,
    lse_bound: Tensor | None = None,
) -> GradientAllowance:
    """Return the error bounds of gradients after a forward pass that gave these out and LSE.

    Infinite where the exact result is not finite, where the score mod or its derivative cannot be
    traced or may be infinite, and in gradients to which a row with a non-finite out or LSE adds.

    Args:
        lse_bound: The deterministic bound of LSE, ``(batch, heads, query)``, which stands in for an
            LSE that the kernel does not return; computed if None.
    """
    problem, truth = evidence.case.problem, evidence.truth
    exact = truth.gradients()
    # An LSE that is not returned may be off by as much as a right forward's.
    if outputs.lse is None and lse_bound is None:
        lse_bound = deterministic_bounds(evidence, arithmetic).lse
    sums = KeyGradients(
        arithmetic,
        batch=problem.batch,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        query=problem.query,
    )
    dq = torch.empty_like(exact["dq"]).flatten(0, 1)
    dq_terms: dict[str, Tensor] = {}
    for rows in all_rows(problem, evidence.inputs.device):
        conditions = compute_gradient_conditions(evidence.inputs, truth, rows)
        scores = score_error(conditions.known, arithmetic)
        forward = conditions.known
        gradients = row_gradients(
            conditions,
            arithmetic,
            scores,
            _saved_errors(evidence, outputs, lse_bound, forward.rows),
            mod_error(evidence, arithmetic, forward, scores) if forward.has_score_mod else None,
            _slope_error(evidence, arithmetic, forward, scores) if forward.has_score_mod else None,
            captured_conditions(evidence, arithmetic, forward, scores),
            exact["dcaptured"].numel() if problem.dcaptured else 0,
        )
        at = _place_of(forward.rows)
        dq[at] = gradients.dq
        for name, term in gradients.dq_terms.items():
            dq_terms.setdefault(name, torch.zeros_like(dq))[at] = term
        # Gradients of keys are sums over rows: their bounds are known only after the last row.
        sums.add(gradients)
    captured: tuple[TensorName, ...] = ("dcaptured",) if evidence.reads else ()
    summed: tuple[TensorName, ...] = ("dk", "dv", "dsink", *captured)
    key_bounds, key_terms = sums.bounds({name: exact[name] for name in summed if name in exact})
    shape = exact["dq"].shape
    bounds: dict[TensorName, Tensor] = {"dq": dq.view(shape), **key_bounds}
    dq_terms = {name: term.view(shape) for name, term in dq_terms.items()}
    terms: dict[TensorName, dict[str, Tensor]] = {"dq": dq_terms, **key_terms}
    # If the score mod cannot be traced, it is unknown which numbers it reads.
    if problem.dcaptured and "dcaptured" not in bounds:
        bounds["dcaptured"] = torch.full_like(exact["dcaptured"], torch.inf)
        terms["dcaptured"] = {}
    return GradientAllowance(bounds, terms)


def _saved_errors(
    evidence: Evidence, outputs: Outputs, lse_bound: Tensor | None, rows: Rows
) -> SavedErrors:
    """Return the errors of the kernel's out and LSE; an LSE that it hides counts as its bound."""

    def rows_of(tensor: Tensor) -> Tensor:
        return tensor.flatten(0, 1)[_place_of(rows)]

    truth = evidence.truth
    out = rows_of(outputs.out).double() - rows_of(truth.out)
    if outputs.lse is None:
        assert lse_bound is not None, "it stands in the place of the LSE that nobody sees"
        return SavedErrors(out_error=out, lse_error=rows_of(lse_bound))
    lse, exact = rows_of(outputs.lse).double(), rows_of(evidence.lse)
    # Rows that see no key have equal infinities, whose difference would be NaN.
    return SavedErrors(out_error=out, lse_error=torch.where(lse == exact, 0.0, lse - exact))


def _slope_error(
    evidence: Evidence, arithmetic: Arithmetic, conditions: Conditions, scores: ScoreError
) -> ScoreModError:
    """Return the errors of the score mod's derivative at every seen pair; a sink's is exactly 1."""
    analysis = evidence.slope_error(arithmetic)
    if analysis is None:
        # A key that is not seen gets no gradient whatever the derivative.
        unbounded = torch.where(conditions.seen, torch.inf, 0.0)
        return ScoreModError(
            radius=unbounded, own=unbounded, jump=torch.zeros_like(conditions.seen)
        )
    seen, sink = conditions.seen[..., : evidence.case.problem.kv], scores.radius[..., -1:]
    errors = _only_where(seen, on_keys(analysis, evidence, conditions, scores))
    return _with_sink(errors, torch.zeros_like(sink)) if conditions.has_sink else errors
