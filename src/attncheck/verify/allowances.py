"""How far a kernel may be off on a Case: the judge's bounds, from the oracle's conditions.

The deterministic bound is had of every row, or of those in which a verdict could tell: see
``settle``. What needs more of a row, the probabilistic bound and the oracle's own, is had of the
sampled ones, which are all rows of a small Problem.

A backward reads the out and the LSE that the kernel's own forward left. What those are off by is
measured, and no fault of the backward: a right one is not blamed for its forward's rounding.
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
from attncheck.judge.verdict_rules import Compared
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

_FEWEST_SETTLED = 64  # rows that are given their bound at once; twice as many the next time
# Part of all rows beyond which floors tell too few apart: then every row is given its bound.
_MOST_SETTLED = 0.25
_LEAST = torch.finfo(torch.float64).tiny


def allowances(
    evidence: Evidence,
    arithmetics: Sequence[Arithmetic],
    totals: RowTotals | None = None,
    sampled: Sequence[Rows] | None = None,
) -> list[Allowance]:
    """Return the largest errors that rounding explains of kernels of each arithmetic on this Case.

    Of several at once: they share most of what there is to compute of a row. Infinite where the
    exact result is not finite, and where the score mod cannot be traced, or may hide another key
    after rounding: nothing is known there.

    With ``totals``, as ``totals_of_rows`` gives them, of rows that are not sampled a floor: which
    of those need their bound depends on what a kernel gave, and is for ``settle`` to find. With
    ``sampled`` nobody looks for those again, for which the mask is asked of all pairs.
    """
    problem, device = evidence.case.problem, evidence.inputs.device
    collected = [_Bounds.of(evidence, arithmetic, totals) for arithmetic in arithmetics]
    whole = samples_all_rows(problem, device)
    # The sampled rows of a small Problem are all rows: they are bounded below, and not twice.
    if not whole and totals is None:
        for rows in all_rows(problem, device):
            known = compute_conditions(evidence.inputs, evidence.truth, rows)
            for each, arithmetic in zip(collected, arithmetics, strict=True):
                each.bound(_RowBounds.of(evidence, arithmetic, known))
    for rows in sampled_rows(problem, device) if sampled is None else sampled:
        known = compute_conditions(evidence.inputs, evidence.truth, rows)
        # Its steps, which no kernel shares, go with the copy.
        oracle = _RowBounds.of(evidence, FP64_ORACLE, replace(known)).deterministic
        for each, arithmetic in zip(collected, arithmetics, strict=True):
            bounds = _RowBounds.of(evidence, arithmetic, known)
            certain = each.sample(evidence, bounds)
            if whole or totals is not None:
                each.bound(bounds, certain)
            # A bound is no use where the truth may be off by as much: the judge is told the share.
            each.prove(oracle, known.rows)
    return [each.allowance() for each in collected]


def totals_of_rows(evidence: Evidence) -> RowTotals | None:
    """Return what floors of the bounds are made of, of every row.

    None where there are none: rows are all sampled, have gradients, a score mod or a sink, or are
    those of a softmax, or the exact result is not finite.
    """
    problem, device = evidence.case.problem, evidence.inputs.device
    plain = problem.operation == "attention" and problem.score == NONE and not problem.sink
    if not plain or problem.backward or samples_all_rows(problem, device):
        return None
    if not bool(evidence.truth.out.isfinite().all() & (evidence.lse < math.inf).all()):
        return None
    shape = problem.batch * problem.heads, problem.query
    whole: dict[str, Any] = {}
    for rows in all_rows(problem, device, few_arrays=True):
        part = row_totals(weigh_rows(evidence.inputs, evidence.truth, rows))
        for name in (each.name for each in fields(part)):
            value = getattr(part, name)
            if not isinstance(value, torch.Tensor):
                whole[name] = value
            elif not value.dim():
                whole[name] = torch.maximum(value, whole.get(name, value))
            else:
                # Kept in pieces they would lie between the arrays of all pairs, and hold those.
                if name not in whole:
                    whole[name] = value.new_empty(*shape, *value.shape[2:])
                whole[name][_place_of(rows)] = value
    return RowTotals(**whole)


def settle(
    allowance: Allowance, evidence: Evidence, arithmetic: Arithmetic, outputs: Outputs | None = None
) -> None:
    """Give the rows of ``allowance`` their bound in which a verdict on ``outputs`` could tell.

    Those are all with an error beyond its floor, and by falling share of it as many as may have the
    largest share of the bound: how many elements are beyond it, and which is so most, is what it
    would be with the bound of every row. Without ``outputs`` every row is given its own.
    """
    if allowance.exact is None:
        return
    exact, alive = (rows.flatten(0, 1) for rows in (allowance.exact, evidence.alive))
    shape = (allowance.lse.shape[0], allowance.lse.shape[1])
    collected = _Bounds(
        allowance.out.flatten(0, 1), allowance.lse.flatten(0, 1), shape, exact=exact
    )
    sides = [] if outputs is None else _sides(outputs, evidence, collected)
    most = _FEWEST_SETTLED
    while bool((wanted := _wanted(sides, alive, exact)).any()):
        if int((wanted > 0).sum()) <= _MOST_SETTLED * int(alive.sum()):
            # Those of the largest shares first: they raise what others must reach.
            wanted = wanted * (wanted >= wanted.flatten().topk(min(most, wanted.numel()))[0][-1])
        else:
            wanted = (alive & ~exact).double()
        for rows in some_rows(evidence.case.problem, wanted > 0):
            bounds = _RowBounds.at(evidence, arithmetic, rows)
            collected.bound(bounds)
            for side in sides:
                side.measure(_place_of(bounds.known.rows))
        most *= 2


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """One output beside its bound, heads flattened."""

    got: Tensor
    truth: Tensor
    bound: Tensor
    share: Tensor  # the largest of each row, ``(heads, query)``

    def measure(self, at: tuple[slice, Any]) -> None:
        """Take the shares of some rows anew."""
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


def _wanted(sides: list[_Side], alive: Tensor, exact: Tensor) -> Tensor:
    """How much the bound of each row is wanted, ``(heads, query)``: 0 where a floor will do."""
    rest = alive & ~exact
    wanted = torch.zeros_like(rest, dtype=torch.float64) if sides else rest.double()
    for side in sides:
        largest = torch.where(alive & exact, side.share, 0.0).amax()
        share = torch.where(rest, side.share, 0.0)
        # An equal share might lie before it; no error at all is nobody's largest.
        share = torch.where((share >= largest) | (share > 1), share, 0.0)
        wanted = torch.maximum(wanted, share / largest.clamp(_LEAST, 1 / _LEAST))
    return wanted


def _place_of(rows: Rows) -> tuple[slice, Tensor]:
    return slice(rows.heads.start, rows.heads.stop), rows.query


def row_bounds(evidence: Evidence, arithmetic: Arithmetic, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return deterministic bounds: out ``(heads, rows, value_dim)``, LSE ``(heads, rows)``.

    As in ``allowances``: infinite where nothing is known, 0 where a row sees no key.
    """
    bounds = _RowBounds.at(evidence, arithmetic, rows)
    certain = bounds.deterministic
    return bounds.allowed(certain.out, certain.lse)


def deterministic_bounds(evidence: Evidence, arithmetic: Arithmetic) -> Outputs:
    """Return the deterministic bounds of every row, as ``allowances`` has them, and no more."""
    collected = _Bounds.of(evidence, arithmetic)
    for rows in all_rows(evidence.case.problem, evidence.inputs.device):
        collected.bound(_RowBounds.at(evidence, arithmetic, rows))
    whole = collected.allowance()
    return Outputs(whole.out, whole.lse)


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
    """Some rows and what is known of a kernel's errors in them."""

    arithmetic: Arithmetic
    known: Conditions
    scores: ScoreError
    mod: ScoreModError | None

    @classmethod
    def of(cls, evidence: Evidence, arithmetic: Arithmetic, known: Conditions) -> _RowBounds:
        scores = score_error(known, arithmetic)
        if not known.has_score_mod:
            return cls(arithmetic, known, scores, None)
        return cls(arithmetic, known, scores, _mod_of_rows(known, arithmetic, evidence, scores))

    @classmethod
    def at(cls, evidence: Evidence, arithmetic: Arithmetic, rows: Rows) -> _RowBounds:
        return cls.of(
            evidence, arithmetic, compute_conditions(evidence.inputs, evidence.truth, rows)
        )

    @property
    def deterministic(self) -> DeterministicBound:
        return deterministic_bound(self.known, self.arithmetic, self.scores, self.mod)

    @property
    def unknown(self) -> Tensor:
        """Rows ``(heads, rows)`` of which nothing can be said."""
        lse = self.known.lse
        unknown = ~lse.isfinite() & ~torch.isneginf(lse)
        return unknown if self.mod is None else unknown | self.mod.radius.isinf().any(-1)

    @property
    def dead(self) -> Tensor:
        """Rows ``(heads, rows)`` that see no key: exactly 0 and −∞."""
        return torch.isneginf(self.known.lse)

    def allowed(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds of these rows, infinite where nothing is known, and 0 where they see no key."""
        out, lse = (x.nan_to_num(nan=math.inf, posinf=math.inf) for x in (out, lse))
        # Where the exact result overflows there is no number to be near to.
        out = torch.where(self.known.out.isfinite(), out, math.inf)
        out, lse = (
            x.masked_fill(rows, value)
            for x, rows, value in ((out, self.dead[..., None], 0.0), (lse, self.dead, 0.0))
        )
        return out.masked_fill(self.unknown[..., None], math.inf), lse.masked_fill(
            self.unknown, math.inf
        )


@kept_step
def _mod_of_rows(
    known: Conditions, arithmetic: Arithmetic, evidence: Evidence, scores: ScoreError
) -> ScoreModError:
    mod = mod_error(evidence, arithmetic, known, scores)
    if scores.bias is not None or rounds_operands(arithmetic):
        mod = replace(mod, falls=score_slopes(evidence.inputs, known) < 0)
    return mod


@kept_step
def _likely_mod_error(
    known: Conditions,
    arithmetic: Arithmetic,
    evidence: Evidence,
    scores: ScoreError,
    mod: ScoreModError | None,
    sigmas: float,
) -> ScoreModError | None:
    """``mod``, with what it makes of errors within ``sigmas`` standard deviations."""
    # Without a score mod nothing is traced: that would cost more than the bound.
    analysis = None if mod is None else evidence.running_error(arithmetic)
    if mod is None or analysis is None:
        return mod
    scores = replace(scores, radius=likely_radius(scores, sigmas))
    return replace(mod, likely=_at(analysis, evidence, known, scores).radius)


def mod_error(
    evidence: Evidence, arithmetic: Arithmetic, known: Conditions, scores: ScoreError
) -> ScoreModError:
    """Return the score mod's errors at every pair that the mask shows, none at others."""
    analysis = evidence.running_error(arithmetic)
    if analysis is None:
        nothing = torch.full_like(known.products, math.inf)
        return ScoreModError(radius=nothing, own=nothing, jump=torch.zeros_like(known.seen))
    errors = _at(analysis, evidence, known, scores)
    # Not seen is also a key that the mod puts to −∞, which rounding may undo: that error counts,
    # unlike one where the mask hides the key. The mask costs a pass, so it is asked only then.
    if bool((errors.radius[~known.seen] > 0).any()):
        by_mask = mask_visibility(evidence.case.problem, known.rows)
        errors = ScoreModError(
            radius=torch.where(by_mask, errors.radius, 0.0),
            own=torch.where(by_mask, errors.own, 0.0),
            jump=errors.jump & by_mask,
        )
    return errors


def _at(
    analysis: RunningError, evidence: Evidence, known: Conditions, scores: ScoreError
) -> ScoreModError:
    errors = on_keys(analysis, evidence, known, scores)
    return _with_sink(errors, scores) if known.has_sink else errors


def on_keys(
    analysis: RunningError, evidence: Evidence, known: Conditions, scores: ScoreError
) -> ScoreModError:
    """The errors of an expression of the scores at every pair, ``(heads, rows, kv)``, sinks not."""
    products, *indices = _score_arguments(evidence, known)
    radius = scores.radius[..., : evidence.case.problem.kv]
    return analysis.at(products, radius, *indices)


def _with_sink(mod: ScoreModError, scores: ScoreError) -> ScoreModError:
    """The sink is no score of the mod's: its error stays what it is."""
    return ScoreModError(
        radius=torch.cat([mod.radius, scores.radius[..., -1:]], -1),
        own=torch.nn.functional.pad(mod.own, (0, 1)),
        jump=torch.nn.functional.pad(mod.jump, (0, 1), value=False),
    )


@dataclass(slots=True, eq=False)
class _Bounds:
    """Bounds of the rows so far; full tensors with heads flattened."""

    out: Tensor
    lse: Tensor
    shape: tuple[int, int]
    samples: list[Sample] = field(default_factory=list)
    jumps: int = 0
    share: float = 0.0
    # Rows ``(heads, query)`` that have their bound where others have a floor; None where all do.
    exact: Tensor | None = None

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
        return cls(out, lse, shape, exact=torch.zeros_like(lse, dtype=torch.bool))

    def bound(self, bounds: _RowBounds, certain: DeterministicBound | None = None) -> None:
        """The deterministic bound of some rows, ``certain`` where it is known already."""
        at, certain = _place_of(bounds.known.rows), certain or bounds.deterministic
        out, lse = bounds.allowed(certain.out, certain.lse)
        if self.exact is not None:
            # What is exact stays, to the bit.
            settled = self.exact[at]
            out = torch.where(settled[..., None], self.out[at], out)
            lse = torch.where(settled, self.lse[at], lse)
            self.exact[at] = True
        self.out[at], self.lse[at] = out, lse
        if bounds.mod is not None:
            self.jumps += int(bounds.mod.jump.sum())

    def sample(self, evidence: Evidence, bounds: _RowBounds) -> DeterministicBound:
        """The probabilistic bound of some rows; gives the deterministic one."""
        elements = self.out.numel() + self.lse.numel()
        known, arithmetic, scores = bounds.known, bounds.arithmetic, bounds.scores
        sigmas = sigmas_needed(elements)
        mod = _likely_mod_error(known, arithmetic, evidence, scores, bounds.mod, sigmas)
        probable = probabilistic_bound(known, arithmetic, scores, mod, elements=elements)
        out, lse = bounds.allowed(probable.out, probable.lse)
        self.samples.append(
            Sample(
                rows=bounds.known.rows,
                probable_out=out,
                probable_lse=lse,
                sd_out=probable.sd_out,
                sd_lse=probable.sd_lse,
                lost_out=probable.certain.out_terms["underflow"].expand_as(probable.sd_out),
            )
        )
        return probable.certain

    def prove(self, certain: DeterministicBound, rows: Rows) -> None:
        """The oracle's own bound on some rows that have theirs."""
        at = _place_of(rows)
        for proven, allowed in ((certain.out, self.out[at]), (certain.lse, self.lse[at])):
            # Where anything is allowed no truth is needed, and of rows without keys it is exact.
            matters = allowed.isfinite() & (allowed > 0)
            if bool(matters.any()):
                share = (proven[matters] / allowed[matters]).nan_to_num(nan=math.inf)
                self.share = max(self.share, float(share.max()))

    def allowance(self) -> Allowance:
        """All of it."""
        return Allowance(
            out=self.out.view(*self.shape, *self.out.shape[1:]),
            lse=self.lse.view(*self.shape, *self.lse.shape[1:]),
            samples=self.samples,
            exact=None
            if self.exact is None
            else self.exact.view(self.lse.shape).view(*self.shape, -1),
            jumps=self.jumps,
            oracle_share=self.share,
        )


def captured_conditions(
    evidence: Evidence, arithmetic: Arithmetic, known: Conditions, scores: ScoreError
) -> list[ReadConditions]:
    """Return every read of a captured tensor in these rows, with the errors of its slope."""
    kv = evidence.case.problem.kv
    # Sinks lie behind the keys, and no score mod reads anything for them.
    at, seen = _score_arguments(evidence, known), known.seen[..., :kv]
    reads = []
    for read in evidence.reads:
        errors = score_analysis(read.slope, arithmetic)
        slope = read.slope.evaluate(*at).to(torch.float64)
        reads.append(
            ReadConditions(
                place=_read_place(read, at),
                slope=torch.where(seen, slope, 0.0),
                error=where_seen(on_keys(errors, evidence, known, scores), known),
            )
        )
    return reads


def numbers_read(evidence: Evidence) -> Tensor:
    """Return which captured numbers some seen score reads, ``(numbers,)`` bool.

    All of them where the score mod cannot be traced.
    """
    problem, truth = evidence.case.problem, evidence.truth
    assert truth.dcaptured is not None, "asked of a Problem with dcaptured"
    if not evidence.reads:
        return torch.ones_like(truth.dcaptured, dtype=torch.bool)
    numbers = torch.zeros_like(truth.dcaptured, dtype=torch.bool)
    for rows in all_rows(problem, evidence.inputs.device):
        known = compute_conditions(evidence.inputs, truth, rows)
        at, seen = _score_arguments(evidence, known), known.seen[..., : problem.kv]
        for read in evidence.reads:
            numbers[_read_place(read, at)[seen]] = True
    return numbers


def _read_place(read: CapturedRead, at: tuple[Tensor, ...]) -> Tensor:
    return (read.start + read.place.evaluate(*at)).expand(at[0].shape)


def _score_arguments(evidence: Evidence, known: Conditions) -> tuple[Tensor, ...]:
    """Scores before the mod, and b, h, q_idx and kv_idx, which broadcast to them."""
    problem, rows, device = evidence.case.problem, known.rows, known.products.device
    heads = torch.arange(rows.heads.start, rows.heads.stop, device=device)[:, None, None]
    keys = torch.arange(problem.kv, device=device)[None, None, :]
    return (
        known.products[..., : problem.kv],
        heads // problem.heads,
        heads % problem.heads,
        rows.query[None, :, None],
        keys,
    )


def where_seen(error: ScoreModError, known: Conditions) -> ScoreModError:
    """The same of errors on keys, sinks not, with none where a key is not seen."""
    seen = known.seen[..., : error.radius.shape[-1]]
    radius, own = (torch.where(seen, x, 0.0) for x in (error.radius, error.own))
    return ScoreModError(radius=radius, own=own, jump=error.jump & seen)


@dataclass(frozen=True, slots=True, eq=False)
class GradientAllowance:
    """Largest errors of gradients that rounding can explain, float64."""

    # By the gradient's name, in its own axes; exactly 0 in rows that see no key and for keys that
    # no row sees, infinite where nothing is known.
    bounds: dict[TensorName, Tensor]
    # What each is made of, by the names of ``docs/explanation/bounds.md``.
    terms: dict[TensorName, dict[str, Tensor]]

    def compared(self, outputs: Outputs, evidence: Evidence) -> list[Compared]:
        """Each gradient beside the exact one."""
        exact, got = evidence.truth.gradients(), outputs.gradients()
        return [
            Compared.of(name, got[name], exact[name], bound, self._alive(name, evidence))
            for name, bound in self.bounds.items()
        ]

    def _alive(self, name: TensorName, evidence: Evidence) -> Tensor:
        if name == "dq":
            return evidence.alive
        # What is seen is rounded at least, and its bound more than 0.
        flat = name in {"dsink", "dcaptured"}
        return self.bounds[name] > 0 if flat else (self.bounds[name] > 0).any(-1)

    def budget(self, tensor: TensorName, place: Place) -> dict[str, float]:
        """Return what the allowance of one element is made of."""
        index = place.index(tensor)
        return {name: float(term[index]) for name, term in self.terms[tensor].items()}


def gradient_allowance(
    evidence: Evidence,
    arithmetic: Arithmetic,
    outputs: Outputs,
    lse_bound: Tensor | None = None,
) -> GradientAllowance:
    """Return what is allowed of a kernel of this arithmetic whose forward gave these out and LSE.

    Infinite where the exact result is not finite, where the score mod or its derivative cannot be
    traced or may be infinite, and in what a row touches whose own out or LSE is not finite.

    Args:
        lse_bound: The deterministic bound of LSE, ``(batch, heads, query)``, where the kernel does
            not expose it and it is known already.
    """
    problem, truth = evidence.case.problem, evidence.truth
    exact = truth.gradients()
    # A backward that keeps its LSE to itself may be off by as much as a right forward.
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
        known = compute_gradient_conditions(evidence.inputs, truth, rows)
        scores = score_error(known.known, arithmetic)
        forward = known.known
        gradients = row_gradients(
            known,
            arithmetic,
            scores,
            _saved(evidence, outputs, lse_bound, forward.rows),
            mod_error(evidence, arithmetic, forward, scores) if forward.has_score_mod else None,
            _slope_error(evidence, arithmetic, forward, scores) if forward.has_score_mod else None,
            captured_conditions(evidence, arithmetic, forward, scores),
            exact["dcaptured"].numel() if problem.dcaptured else 0,
        )
        at = _place_of(forward.rows)
        dq[at] = gradients.dq
        for name, term in gradients.dq_terms.items():
            dq_terms.setdefault(name, torch.zeros_like(dq))[at] = term
        # Gradients of keys add over rows: their bounds are known only after the last.
        sums.add(gradients)
    captured: tuple[TensorName, ...] = ("dcaptured",) if evidence.reads else ()
    of_sums: tuple[TensorName, ...] = ("dk", "dv", "dsink", *captured)
    key_bounds, key_terms = sums.bounds({name: exact[name] for name in of_sums if name in exact})
    shape = exact["dq"].shape
    bounds: dict[TensorName, Tensor] = {"dq": dq.view(shape), **key_bounds}
    dq_terms = {name: term.view(shape) for name, term in dq_terms.items()}
    terms: dict[TensorName, dict[str, Tensor]] = {"dq": dq_terms, **key_terms}
    # Nothing says which numbers a score mod reads that cannot be traced.
    if problem.dcaptured and "dcaptured" not in bounds:
        bounds["dcaptured"] = torch.full_like(exact["dcaptured"], torch.inf)
        terms["dcaptured"] = {}
    return GradientAllowance(bounds, terms)


def _saved(
    evidence: Evidence, outputs: Outputs, lse_bound: Tensor | None, rows: Rows
) -> SavedErrors:
    """Return errors of the kernel's own out and LSE; of a hidden LSE the bound."""

    def of(tensor: Tensor) -> Tensor:
        return tensor.flatten(0, 1)[_place_of(rows)]

    truth = evidence.truth
    out = of(outputs.out).double() - of(truth.out)
    if outputs.lse is None:
        assert lse_bound is not None, "it stands in the place of the LSE that nobody sees"
        return SavedErrors(out_error=out, lse_error=of(lse_bound))
    lse, exact = of(outputs.lse).double(), of(evidence.lse)
    # Equal infinities, of rows that see no key, differ by nothing; subtracted they are NaN.
    return SavedErrors(out_error=out, lse_error=torch.where(lse == exact, 0.0, lse - exact))


def _slope_error(
    evidence: Evidence, arithmetic: Arithmetic, known: Conditions, scores: ScoreError
) -> ScoreModError:
    """The errors of the score mod's derivative at every seen pair; none of a sink's, which is 1."""
    analysis = evidence.slope_error(arithmetic)
    if analysis is None:
        # A key that is not seen gets no gradient, whatever the derivative is.
        nothing = torch.where(known.seen, torch.inf, 0.0)
        return ScoreModError(radius=nothing, own=nothing, jump=torch.zeros_like(known.seen))
    errors = on_keys(analysis, evidence, known, scores)
    errors = where_seen(errors, known)
    radius, own, jump = errors.radius, errors.own, errors.jump
    if known.has_sink:
        radius, own, jump = (torch.nn.functional.pad(x, (0, 1)) for x in (radius, own, jump))
    return ScoreModError(radius=radius, own=own, jump=jump)
