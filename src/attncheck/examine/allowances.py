"""How far a kernel may be off on a Case: the judge's bounds, from the oracle's conditions.

The deterministic bound is had of every row. What needs more of a row, the probabilistic bound and
the oracle's own, is had of the sampled ones, which are all rows of a small Problem.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from attncheck.conditions import Conditions, Rows, ScoreModError
from attncheck.judge.allowance import Allowance, Sample
from attncheck.judge.arithmetic import FP64_ORACLE
from attncheck.judge.bounds import deterministic
from attncheck.judge.probable import deviations, probable
from attncheck.judge.scores import likely_radius, rounds_operands, score_error
from attncheck.oracles.conditions import blocks, conditions, is_whole, sampled, shown, slopes
from attncheck.outputs import Outputs

if TYPE_CHECKING:
    from torch import Tensor

    from attncheck.examine.evidence import Evidence
    from attncheck.judge.arithmetic import Arithmetic
    from attncheck.judge.bounds import Bound
    from attncheck.judge.scores import ScoreError
    from attncheck.judgement import Place
    from attncheck.mods.running_error import RunningError

__all__ = ["allowance", "budget", "certain", "mod_error", "on_keys", "row_bounds"]


def allowance(evidence: Evidence, arithmetic: Arithmetic) -> Allowance:
    """The largest errors of a kernel of this arithmetic that rounding explains, on this Case.

    Infinite where the exact result is not finite, and where the score mod cannot be traced, or may
    hide another key after rounding: nothing is known there.
    """
    problem, device = evidence.case.problem, evidence.inputs.device
    found = _Found.of(evidence)
    whole = is_whole(problem, device)
    if not whole:
        for rows in blocks(problem, device):
            judged = _Judged.of(evidence, arithmetic, rows)
            found.bound(judged, judged.deterministic)
    for rows in sampled(problem, device):
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


def certain(evidence: Evidence, arithmetic: Arithmetic) -> Outputs:
    """The deterministic bounds of every row, as ``allowance`` has them, and nothing else."""
    found = _Found.of(evidence)
    for rows in blocks(evidence.case.problem, evidence.inputs.device):
        judged = _Judged.of(evidence, arithmetic, rows)
        found.bound(judged, judged.deterministic)
    whole = found.allowance()
    return Outputs(whole.out, whole.lse)


def budget(evidence: Evidence, arithmetic: Arithmetic, place: Place) -> dict[str, float]:
    """What the allowance of one element is made of, by the names of ``docs/bounds.md``.

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
        known = conditions(evidence.inputs, evidence.truth, rows)
        scores = score_error(known, arithmetic)
        if not known.has_score_mod:
            return cls(arithmetic, known, scores, None)
        mod = mod_error(evidence, arithmetic, known, scores)
        if scores.bias is not None or rounds_operands(arithmetic):
            mod = replace(mod, falls=slopes(evidence.inputs, known) < 0)
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
    def deterministic(self) -> Bound:
        return deterministic(self.known, self.arithmetic, self.scores, self.mod)

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
        by_mask = shown(evidence.case.problem, known.rows)
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

    def bound(self, judged: _Judged, found: Bound) -> None:
        """The deterministic bound of some rows."""
        rows = judged.known.rows
        heads = slice(rows.heads.start, rows.heads.stop)
        out, lse = judged.allowed(found.out, found.lse)
        self.out[heads, rows.query] = out
        self.lse[heads, rows.query] = lse
        if judged.mod is not None:
            self.jumps += int(judged.mod.jump.sum())

    def sample(self, evidence: Evidence, judged: _Judged) -> Bound:
        """The probabilistic bound of some rows; gives the deterministic one."""
        elements = self.out.numel() + self.lse.numel()
        known, scores = judged.known, judged.scores
        mod = judged.of_likely_errors(evidence, deviations(elements))
        found = probable(known, judged.arithmetic, scores, mod, elements=elements)
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
