"""What is known of a Case whatever the kernel: inputs, truth, bounds, ideal kernels' outputs.

The deterministic bound is had of every row. What needs more of a row, the probabilistic bound and
the oracle's own, is had of the sampled ones, which are all rows of a small Problem.

A backward reads the out and the LSE that the kernel's own forward left. What those are off by is
measured, and no fault of the backward: a right one is not blamed for its forward's rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from attncheck import oracles, probes
from attncheck.capabilities.subject import Tiling
from attncheck.core.conditions import Conditions, ReadConditions, Rows, ScoreModError
from attncheck.core.errors import TraceError
from attncheck.core.formats import FORMATS
from attncheck.core.outputs import Outputs
from attncheck.inputs import input_tensors as inputs_room
from attncheck.inputs.distributions import distribution_named
from attncheck.judge.allowance import Allowance, Sample
from attncheck.judge.declared_arithmetic import FP64_ORACLE
from attncheck.judge.deterministic_bound import deterministic_bound
from attncheck.judge.error_measures import measure_errors, rounding_floor
from attncheck.judge.gradient_bounds import KeyGradients, row_gradients
from attncheck.judge.probabilistic_bound import probabilistic_bound, sigmas_needed
from attncheck.judge.score_errors import likely_radius, rounds_operands, score_error
from attncheck.judge.score_gradient_errors import SavedErrors
from attncheck.judge.verdict_rules import Compared
from attncheck.mods.captured_reads import trace_reads
from attncheck.oracles.row_conditions import (
    all_rows,
    compute_conditions,
    compute_gradient_conditions,
    mask_visibility,
    sampled_rows,
    samples_all_rows,
    score_slopes,
)
from attncheck.subjects.ideal import Ideal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attncheck.core.judgement import BlindSpot, Place
    from attncheck.core.outputs import TensorName
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Case, Problem
    from attncheck.judge.declared_arithmetic import Arithmetic
    from attncheck.judge.deterministic_bound import DeterministicBound
    from attncheck.judge.score_errors import ScoreError
    from attncheck.mods.captured_reads import CapturedRead
    from attncheck.mods.expression import Expression
    from attncheck.mods.running_error import RunningError

__all__ = [
    "CapturedReads",
    "Evidence",
    "GradientAllowance",
    "allowance",
    "budget",
    "deterministic_bounds",
    "ensemble_tilings",
    "gradient_allowance",
    "mod_error",
    "on_keys",
    "row_bounds",
    "score_analysis",
    "where_seen",
]


# Of a lazy maximum, in log2 units: FlashAttention-4's.
_LAZY = 8.0


class Evidence:
    """Drawn and computed once per Case, when first asked for, and shared by all its kernels.

    Attributes:
        case: The Case; of a probe's the inputs are the probe's.
        device: ``cpu`` or ``cuda``, where kernels run and the truth is computed.

    Args:
        case: The Case.
        device: Where.
        inputs: What is read, where it is not drawn: tensors that were given, or a relation's.
    """

    def __init__(self, case: Case, device: str, inputs: Inputs | None = None) -> None:
        self.case = case
        self.device = device
        if inputs is not None:
            self.__dict__["inputs"] = inputs
        self._allowances: dict[Arithmetic, Allowance] = {}
        self._blind_spots: dict[tuple[Arithmetic, bool], BlindSpot | None] = {}
        self._ideals: dict[tuple[Tiling, bool], Outputs] = {}
        self._ideal_rmse: dict[Tiling, float] = {}
        self._ideal_gradients: dict[Tiling, dict[TensorName, float]] = {}

    def establish(self, *, yardsticks: bool = True) -> None:
        """Compute inputs and truth now, so that nothing a kernel does can change them.

        With ``yardsticks`` also what its errors are compared with.
        """
        _ = self.inputs, self.truth
        if yardsticks:
            _ = self.floor_rmse, self.input_rmse, self.gradient_floors
        self.__dict__.pop("_originals", None)  # many gigabytes, and needed no more

    @cached_property
    def _originals(self) -> Inputs:
        return inputs_room.unrounded_inputs(self.case.problem).to(self.device)

    @property
    def _probes(self) -> bool:
        return self.case.question in probes.PROBES

    @cached_property
    def inputs(self) -> Inputs:
        """The tensors that the kernel and the oracle read."""
        if self._probes:
            return probes.inputs(self.case, self.device)
        return inputs_room.round_inputs(self._originals, self.case.problem)

    @cached_property
    def truth(self) -> Outputs:
        """The exact result in float64: out and LSE, and gradients of a backward."""
        return oracles.truth(self.inputs)

    @cached_property
    def input_rmse(self) -> float:
        """RMSE between the exact results on the inputs as stored and as drawn.

        What rounding the inputs costs, whatever the kernel. The mask is the same in both, so the
        same rows see a key. A probe's inputs are numbers of its dtype: nothing.
        """
        if self._probes:
            return 0.0
        drawn = oracles.truth(self._originals.forward()).out
        return measure_errors(self.truth.out, drawn, self.alive[..., None]).rmse

    @cached_property
    def alive(self) -> torch.Tensor:
        """Rows that see a key, ``(batch, heads, query)`` bool."""
        import torch

        lse = self.truth.lse
        assert lse is not None, "the oracle always gives LSE"
        return ~torch.isneginf(lse)

    @cached_property
    def floor_rmse(self) -> float:
        """RMSE of the truth correctly rounded to the output format."""
        output = self.case.problem.formats.output
        return rounding_floor(self.truth.out, self.alive[..., None], output)

    @cached_property
    def gradient_floors(self) -> dict[TensorName, float]:
        """RMSE of each exact gradient correctly rounded to its format; none without a backward."""
        storage, fp32 = self.case.problem.formats.storage, FORMATS["fp32"]
        of_keys = ("dq", "dk", "dv")
        return {
            name: rounding_floor(exact, self.touched(name), storage if name in of_keys else fp32)
            for name, exact in self.truth.gradients().items()
        }

    def touched(self, gradient: TensorName) -> torch.Tensor:
        """Where ``gradient`` is not 0 by definition, bool, broadcastable to its shape.

        Of dq in rows that see a key, of dk and dv of keys that some row sees, of dcaptured of
        numbers that are read there.
        """
        import torch

        if gradient == "dcaptured":
            return self.reads.numbers
        if gradient == "dsink":
            return torch.ones((), dtype=torch.bool, device=self.inputs.device)
        return (self.alive if gradient == "dq" else self._seen_keys)[..., None]

    @cached_property
    def _seen_keys(self) -> torch.Tensor:
        """Keys that some row sees, ``(batch, kv_heads, kv)`` bool."""
        import torch

        from attncheck.oracles.row_conditions import all_rows, compute_conditions

        problem, device = self.case.problem, self.inputs.device
        shape = (problem.batch * problem.heads, problem.kv)
        seen = torch.zeros(shape, dtype=torch.bool, device=device)
        for rows in all_rows(problem, device):
            found = compute_conditions(self.inputs, self.truth, rows).seen[..., : problem.kv]
            seen[rows.heads.start : rows.heads.stop] |= found.any(1)
        return seen.view(problem.batch, problem.kv_heads, problem.group, problem.kv).any(2)

    def allowance(self, arithmetic: Arithmetic) -> Allowance:
        """What ``examine.allowances`` allows a kernel of this arithmetic."""
        if arithmetic not in self._allowances:
            self._allowances[arithmetic] = allowance(self, arithmetic)
        return self._allowances[arithmetic]

    def blind_spot(self, arithmetic: Arithmetic, *, exposes_lse: bool) -> BlindSpot | None:
        """What this Case could not have shown of a kernel of this arithmetic."""
        from attncheck.judge.blind_spot import blind_spot
        from attncheck.oracles.row_conditions import score_slopes

        key = arithmetic, exposes_lse
        if key not in self._blind_spots:
            rows = (
                (known, score_slopes(self.inputs, known) if known.has_score_mod else None)
                for known in self.sampled_conditions()
            )
            self._blind_spots[key] = blind_spot(
                rows, self.allowance(arithmetic), generic=self.generic, exposes_lse=exposes_lse
            )
        return self._blind_spots[key]

    @property
    def generic(self) -> bool:
        """Whether the inputs are drawn without structure, so that roundings are independent."""
        return not self._probes and distribution_named(self.case.problem.distribution).generic

    def sampled_conditions(self) -> Iterator[Conditions]:
        """Conditions of the rows that are examined more closely, computed as they are asked for.

        In the order of an Allowance's samples. They are large: hold one at a time.
        """
        from attncheck.oracles.row_conditions import compute_conditions, sampled_rows

        for rows in sampled_rows(self.case.problem, self.inputs.device):
            yield compute_conditions(self.inputs, self.truth, rows)

    def running_error(self, arithmetic: Arithmetic) -> RunningError | None:
        """The analysis of the score mod in this arithmetic; None where it cannot be traced."""
        return (
            None if self._traced_score is None else score_analysis(self._traced_score, arithmetic)
        )

    def slope_error(self, arithmetic: Arithmetic) -> RunningError | None:
        """The same of the score mod's derivative."""
        return (
            None if self._traced_slope is None else score_analysis(self._traced_slope, arithmetic)
        )

    @cached_property
    def reads(self) -> CapturedReads:
        """What the score mod reads of captured tensors."""
        return CapturedReads(self)

    @cached_property
    def _traced_score(self) -> Expression | None:
        from attncheck.subjects.kernel_mods import score_expression

        try:
            return score_expression(self.case.problem, self.device)
        except TraceError:
            return None

    @cached_property
    def _traced_slope(self) -> Expression | None:
        from attncheck.mods.trace import trace_derivative

        try:
            return trace_derivative(self.case.problem.score_mod(self.device), self.device)
        except TraceError:
            return None

    def ideal_outputs(self, tiling: Tiling, *, truncates: bool = False) -> Outputs:
        """What the ideal kernel gives at ``tiling``.

        Args:
            tiling: How it walks over the keys.
            truncates: Whether it truncates tf32 operands, as tensor cores do.
        """
        truncates = truncates and self.case.problem.formats.products.name == "tf32"
        asked = tiling, truncates
        if asked not in self._ideals:
            kernel = Ideal(tiling, tf32="truncate") if truncates else Ideal(tiling)
            self._ideals[asked] = kernel.run(self.inputs.forward())
        return self._ideals[asked]

    def ensemble(self, *, truncates: bool = False) -> Iterator[Outputs]:
        """What ideal kernels of several tilings give, one after the other."""
        for tiling in ensemble_tilings(self.case.problem):
            yield self.ideal_outputs(tiling, truncates=truncates)

    def ideal_rmse(self, tiling: Tiling) -> float:
        """RMSE of the ideal kernel at ``tiling``."""
        if tiling not in self._ideal_rmse:
            out = self.ideal_outputs(tiling).out
            rmse = measure_errors(out, self.truth.out, self.alive[..., None]).rmse
            self._ideal_rmse[tiling] = rmse
        return self._ideal_rmse[tiling]

    def ideal_gradients(self, tiling: Tiling) -> dict[TensorName, float]:
        """RMSE of each gradient of the ideal kernel at ``tiling``, after its own forward."""
        if tiling not in self._ideal_gradients:
            exact = self.truth.gradients()
            self._ideal_gradients[tiling] = {
                name: measure_errors(gradient, exact[name], self.touched(name)).rmse
                for name, gradient in Ideal(tiling).run(self.inputs).gradients().items()
            }
        return self._ideal_gradients[tiling]


def score_analysis(expression: Expression, arithmetic: Arithmetic) -> RunningError:
    """The analysis of what a kernel of this arithmetic evaluates of scores."""
    from attncheck.mods.operation_errors import KERNEL_FP32, TORCH_FP64
    from attncheck.mods.running_error import RunningError

    fp64 = arithmetic.computes.name == "fp64"
    return RunningError(
        expression, arithmetic.tanh_error, arithmetic=TORCH_FP64 if fp64 else KERNEL_FP32
    )


def ensemble_tilings(problem: Problem) -> tuple[Tiling, ...]:
    """Four tilings of right kernels: large and small tiles, from either end, a lazy maximum.

    A softmax has no tiles. In fp8 no maximum is lazy: P would lose its scale to it.
    """
    first = Tiling(block_query=128, block_kv=64)
    if problem.operation == "softmax":
        return (first,)
    lazy = 0.0 if problem.formats.weights.saturates else _LAZY
    return (
        first,
        Tiling(block_query=64, block_kv=128),
        Tiling(block_query=64, block_kv=32, reverse=True),
        Tiling(block_query=32, block_kv=16, lazy_rescale=lazy),
    )


def allowance(evidence: Evidence, arithmetic: Arithmetic) -> Allowance:
    """The largest errors of a kernel of this arithmetic that rounding explains, on this Case.

    Infinite where the exact result is not finite, and where the score mod cannot be traced, or may
    hide another key after rounding: nothing is known there.
    """
    problem, device = evidence.case.problem, evidence.inputs.device
    found = _Found.of(evidence)
    whole = samples_all_rows(problem, device)
    if not whole:
        for rows in all_rows(problem, device):
            judged = _Judged.of(evidence, arithmetic, rows)
            found.bound(judged, judged.deterministic)
    for rows in sampled_rows(problem, device):
        judged = _Judged.of(evidence, arithmetic, rows)
        certain = found.sample(evidence, judged)
        if whole:
            found.bound(judged, certain)
        found.prove(_Judged.of(evidence, FP64_ORACLE, rows))
    return found.allowance()


def row_bounds(evidence: Evidence, arithmetic: Arithmetic, rows: Rows) -> tuple[Tensor, Tensor]:
    """The deterministic bounds of rows: out ``(heads, rows, value_dim)``, LSE ``(heads, rows)``.

    As in ``allowance``: infinite where nothing is known, 0 where a row sees no key.
    """
    judged = _Judged.of(evidence, arithmetic, rows)
    found = judged.deterministic
    return judged.allowed(found.out, found.lse)


def deterministic_bounds(evidence: Evidence, arithmetic: Arithmetic) -> Outputs:
    """The deterministic bounds of every row, as ``allowance`` has them, and nothing else."""
    found = _Found.of(evidence)
    for rows in all_rows(evidence.case.problem, evidence.inputs.device):
        judged = _Judged.of(evidence, arithmetic, rows)
        found.bound(judged, judged.deterministic)
    whole = found.allowance()
    return Outputs(whole.out, whole.lse)


def budget(evidence: Evidence, arithmetic: Arithmetic, place: Place) -> dict[str, float]:
    """What the allowance of one element is made of, by the names of ``docs/explanation/bounds.md``.

    Args:
        evidence: The Case.
        arithmetic: What the allowance is for.
        place: An element of out, or with ``dim`` −1 a row of LSE.
    """
    head = place.batch * evidence.case.problem.heads + place.head
    rows = Rows(range(head, head + 1), torch.tensor([place.query]))
    bound = _Judged.of(evidence, arithmetic, rows).deterministic
    if place.dim < 0:
        return {name: float(part[0, 0]) for name, part in bound.lse_terms.items()}
    return {name: float(part[0, 0, place.dim]) for name, part in bound.out_terms.items()}


@dataclass(frozen=True, slots=True, eq=False)
class _Judged:
    """Some rows and what is known of a kernel's errors in them."""

    arithmetic: Arithmetic
    known: Conditions
    scores: ScoreError
    mod: ScoreModError | None

    @classmethod
    def of(cls, evidence: Evidence, arithmetic: Arithmetic, rows: Rows) -> _Judged:
        known = compute_conditions(evidence.inputs, evidence.truth, rows)
        scores = score_error(known, arithmetic)
        if not known.has_score_mod:
            return cls(arithmetic, known, scores, None)
        mod = mod_error(evidence, arithmetic, known, scores)
        if scores.bias is not None or rounds_operands(arithmetic):
            mod = replace(mod, falls=score_slopes(evidence.inputs, known) < 0)
        return cls(arithmetic, known, scores, mod)

    def of_likely_errors(self, evidence: Evidence, sigmas: float) -> ScoreModError | None:
        """``mod``, with what it makes of errors within ``sigmas`` standard deviations."""
        # Without a score mod nothing is traced: that would cost more than the bound.
        analysis = None if self.mod is None else evidence.running_error(self.arithmetic)
        if self.mod is None or analysis is None:
            return self.mod
        scores = replace(self.scores, radius=likely_radius(self.scores, sigmas))
        return replace(self.mod, likely=_at(analysis, evidence, self.known, scores).radius)

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
        out = torch.where(self.known.out.isfinite(), out, math.inf)
        out, lse = (
            x.masked_fill(rows, value)
            for x, rows, value in ((out, self.dead[..., None], 0.0), (lse, self.dead, 0.0))
        )
        return out.masked_fill(self.unknown[..., None], math.inf), lse.masked_fill(
            self.unknown, math.inf
        )


def mod_error(
    evidence: Evidence, arithmetic: Arithmetic, known: Conditions, scores: ScoreError
) -> ScoreModError:
    """The score mod's errors at every pair that the mask shows, and none where it hides one."""
    analysis = evidence.running_error(arithmetic)
    if analysis is None:
        nothing = torch.full_like(known.products, math.inf)
        return ScoreModError(radius=nothing, own=nothing, jump=torch.zeros_like(known.seen))
    found = _at(analysis, evidence, known, scores)
    if bool((found.radius[~known.seen] > 0).any()):
        by_mask = mask_visibility(evidence.case.problem, known.rows)
        found = ScoreModError(
            radius=torch.where(by_mask, found.radius, 0.0),
            own=torch.where(by_mask, found.own, 0.0),
            jump=found.jump & by_mask,
        )
    return found


def _at(
    analysis: RunningError, evidence: Evidence, known: Conditions, scores: ScoreError
) -> ScoreModError:
    found = on_keys(analysis, evidence, known, scores)
    return _with_sink(found, scores) if known.has_sink else found


def on_keys(
    analysis: RunningError, evidence: Evidence, known: Conditions, scores: ScoreError
) -> ScoreModError:
    """The errors of an expression of the scores at every pair, ``(heads, rows, kv)``, sinks not."""
    problem, rows = evidence.case.problem, known.rows
    device = known.products.device
    heads = torch.arange(rows.heads.start, rows.heads.stop, device=device)[:, None, None]
    return analysis.at(
        known.products[..., : problem.kv],
        scores.radius[..., : problem.kv],
        heads // problem.heads,
        heads % problem.heads,
        rows.query[None, :, None],
        torch.arange(problem.kv, device=device)[None, None, :],
    )


def _with_sink(mod: ScoreModError, scores: ScoreError) -> ScoreModError:
    """The sink is no score of the mod's: its error stays what it is."""
    return ScoreModError(
        radius=torch.cat([mod.radius, scores.radius[..., -1:]], -1),
        own=torch.nn.functional.pad(mod.own, (0, 1)),
        jump=torch.nn.functional.pad(mod.jump, (0, 1), value=False),
    )


@dataclass(slots=True, eq=False)
class _Found:
    """What has been found so far; full tensors with heads flattened."""

    out: Tensor
    lse: Tensor
    shape: tuple[int, int]
    samples: list[Sample] = field(default_factory=list)
    jumps: int = 0
    share: float = 0.0

    @classmethod
    def of(cls, evidence: Evidence) -> _Found:
        truth = evidence.truth
        assert truth.lse is not None, "the oracle always gives LSE"
        out, lse = (torch.empty_like(x).flatten(0, 1) for x in (truth.out, truth.lse))
        return cls(out, lse, (truth.out.shape[0], truth.out.shape[1]))

    def bound(self, judged: _Judged, found: DeterministicBound) -> None:
        """The deterministic bound of some rows."""
        rows = judged.known.rows
        heads = slice(rows.heads.start, rows.heads.stop)
        out, lse = judged.allowed(found.out, found.lse)
        self.out[heads, rows.query] = out
        self.lse[heads, rows.query] = lse
        if judged.mod is not None:
            self.jumps += int(judged.mod.jump.sum())

    def sample(self, evidence: Evidence, judged: _Judged) -> DeterministicBound:
        """The probabilistic bound of some rows; gives the deterministic one."""
        elements = self.out.numel() + self.lse.numel()
        known, scores = judged.known, judged.scores
        mod = judged.of_likely_errors(evidence, sigmas_needed(elements))
        found = probabilistic_bound(known, judged.arithmetic, scores, mod, elements=elements)
        out, lse = judged.allowed(found.out, found.lse)
        self.samples.append(
            Sample(
                rows=judged.known.rows,
                probable_out=out,
                probable_lse=lse,
                sd_out=found.sd_out,
                sd_lse=found.sd_lse,
                lost_out=found.certain.out_terms["underflow"].expand_as(found.sd_out),
            )
        )
        return found.certain

    def prove(self, oracle: _Judged) -> None:
        """The oracle's own bound on some rows that have theirs."""
        found, rows = oracle.deterministic, oracle.known.rows
        heads = slice(rows.heads.start, rows.heads.stop)
        for proven, allowed in (
            (found.out, self.out[heads, rows.query]),
            (found.lse, self.lse[heads, rows.query]),
        ):
            asked = allowed.isfinite() & (allowed > 0)
            if bool(asked.any()):
                share = (proven[asked] / allowed[asked]).nan_to_num(nan=math.inf)
                self.share = max(self.share, float(share.max()))

    def allowance(self) -> Allowance:
        """All of it."""
        return Allowance(
            out=self.out.view(*self.shape, *self.out.shape[1:]),
            lse=self.lse.view(*self.shape, *self.lse.shape[1:]),
            samples=self.samples,
            jumps=self.jumps,
            oracle_share=self.share,
        )


class CapturedReads:
    """Reads of a Case's score mod.

    Args:
        evidence: Of the Case.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._evidence, self._problem = evidence, evidence.case.problem

    @cached_property
    def all(self) -> tuple[CapturedRead, ...]:
        """None where their gradients are not asked for, or the score mod cannot be traced."""
        device = self._evidence.device
        if not self._problem.dcaptured:
            return ()
        try:
            return trace_reads(self._problem.score_mod(device), device)
        except TraceError:
            return ()

    def conditions(
        self, arithmetic: Arithmetic, known: Conditions, scores: ScoreError
    ) -> list[ReadConditions]:
        """Every read in these rows, with the errors of its slope in this arithmetic."""
        at, seen = self._at(known), known.seen[..., : self._problem.kv]
        found = []
        for read in self.all:
            errors = score_analysis(read.slope, arithmetic)
            slope = read.slope.evaluate(*at).to(torch.float64)
            found.append(
                ReadConditions(
                    place=self._place(read, at),
                    slope=torch.where(seen, slope, 0.0),
                    error=where_seen(on_keys(errors, self._evidence, known, scores), known),
                )
            )
        return found

    @cached_property
    def numbers(self) -> Tensor:
        """Those that some seen score reads, ``(numbers,)`` bool; all where nothing is known."""
        inputs, truth = self._evidence.inputs, self._evidence.truth
        assert truth.dcaptured is not None, "asked of a Problem with dcaptured"
        if not self.all:
            return torch.ones_like(truth.dcaptured, dtype=torch.bool)
        found = torch.zeros_like(truth.dcaptured, dtype=torch.bool)
        for rows in all_rows(self._problem, inputs.device):
            known = compute_conditions(inputs, truth, rows)
            at, seen = self._at(known), known.seen[..., : self._problem.kv]
            for read in self.all:
                found[self._place(read, at)[seen]] = True
        return found

    def _place(self, read: CapturedRead, at: tuple[Tensor, ...]) -> Tensor:
        return (read.start + read.place.evaluate(*at)).expand(at[0].shape)

    def _at(self, known: Conditions) -> tuple[Tensor, ...]:
        """Scores before the mod, and b, h, q_idx and kv_idx, which broadcast to them."""
        indices = _indices(known.rows, self._problem.heads, self._problem.kv)
        return (known.products[..., : self._problem.kv], *indices)


def _indices(rows: Rows, heads: int, kv: int) -> tuple[Tensor, ...]:
    device = rows.query.device
    both = torch.arange(rows.heads.start, rows.heads.stop, device=device)[:, None, None]
    keys = torch.arange(kv, device=device)[None, None, :]
    return both // heads, both % heads, rows.query[None, :, None], keys


def where_seen(error: ScoreModError, known: Conditions) -> ScoreModError:
    """The same of errors on keys, sinks not, with none where a key is not seen."""
    seen = known.seen[..., : error.radius.shape[-1]]
    radius, own = (torch.where(seen, x, 0.0) for x in (error.radius, error.own))
    return ScoreModError(radius=radius, own=own, jump=error.jump & seen)


@dataclass(frozen=True, slots=True, eq=False)
class GradientAllowance:
    """Largest errors of gradients that rounding can explain, float64.

    Attributes:
        bounds: By the gradient's name, in its own axes; exactly 0 in rows that see no key and for
            keys that no row sees, infinite where nothing is known.
        terms: What each is made of, by the names of ``docs/explanation/bounds.md``.
    """

    bounds: dict[TensorName, Tensor]
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
        """What the allowance of one element is made of."""
        index = place.index(tensor)
        return {name: float(term[index]) for name, term in self.terms[tensor].items()}


def gradient_allowance(
    evidence: Evidence, arithmetic: Arithmetic, outputs: Outputs
) -> GradientAllowance:
    """What is allowed of a kernel of this arithmetic whose forward gave these out and LSE.

    Infinite where the exact result is not finite, where the score mod or its derivative cannot be
    traced or may be infinite, and in what a row touches whose own out or LSE is not finite.
    """
    problem, truth = evidence.case.problem, evidence.truth
    exact = truth.gradients()
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
        found = row_gradients(
            known,
            arithmetic,
            scores,
            _saved(evidence, arithmetic, outputs, forward.rows),
            mod_error(evidence, arithmetic, forward, scores) if forward.has_score_mod else None,
            _slope_error(evidence, arithmetic, forward, scores) if forward.has_score_mod else None,
            evidence.reads.conditions(arithmetic, forward, scores),
            exact["dcaptured"].numel() if problem.dcaptured else 0,
        )
        at = (slice(rows.heads.start, rows.heads.stop), forward.rows.query)
        dq[at] = found.dq
        for name, term in found.dq_terms.items():
            dq_terms.setdefault(name, torch.zeros_like(dq))[at] = term
        sums.add(found)
    captured: tuple[TensorName, ...] = ("dcaptured",) if evidence.reads.all else ()
    of_sums: tuple[TensorName, ...] = ("dk", "dv", "dsink", *captured)
    key_bounds, key_terms = sums.bounds({name: exact[name] for name in of_sums if name in exact})
    shape = exact["dq"].shape
    bounds: dict[TensorName, Tensor] = {"dq": dq.view(shape), **key_bounds}
    dq_terms = {name: term.view(shape) for name, term in dq_terms.items()}
    terms: dict[TensorName, dict[str, Tensor]] = {"dq": dq_terms, **key_terms}
    if (
        problem.dcaptured and "dcaptured" not in bounds
    ):  # nothing says which numbers a score mod reads that cannot be traced
        bounds["dcaptured"] = torch.full_like(exact["dcaptured"], torch.inf)
        terms["dcaptured"] = {}
    return GradientAllowance(bounds, terms)


def _saved(evidence: Evidence, arithmetic: Arithmetic, outputs: Outputs, rows: Rows) -> SavedErrors:
    """How far the kernel's own out and LSE are off; LSE by its bound where it is not exposed."""

    def of(tensor: Tensor) -> Tensor:
        return tensor.flatten(0, 1)[rows.heads.start : rows.heads.stop][:, rows.query]

    truth = evidence.truth
    assert truth.lse is not None, "the oracle always gives LSE"
    out = of(outputs.out).double() - of(truth.out)
    if outputs.lse is None:
        return SavedErrors(out_error=out, lse_error=of(evidence.allowance(arithmetic).lse))
    lse, exact = of(outputs.lse).double(), of(truth.lse)
    return SavedErrors(out_error=out, lse_error=torch.where(lse == exact, 0.0, lse - exact))


def _slope_error(
    evidence: Evidence, arithmetic: Arithmetic, known: Conditions, scores: ScoreError
) -> ScoreModError:
    """The errors of the score mod's derivative at every seen pair; none of a sink's, which is 1."""
    analysis = evidence.slope_error(arithmetic)
    if analysis is None:
        nothing = torch.where(known.seen, torch.inf, 0.0)
        return ScoreModError(radius=nothing, own=nothing, jump=torch.zeros_like(known.seen))
    found = on_keys(analysis, evidence, known, scores)
    found = where_seen(found, known)
    radius, own, jump = found.radius, found.own, found.jump
    if known.has_sink:
        radius, own, jump = (torch.nn.functional.pad(x, (0, 1)) for x in (radius, own, jump))
    return ScoreModError(radius=radius, own=own, jump=jump)
