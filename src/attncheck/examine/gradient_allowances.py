"""How far a kernel's gradients may be off on a Case: the judge's bounds, beside its own forward.

A backward reads the out and the LSE that the kernel's own forward left. What those are off by is
measured, and no fault of the backward: a right one is not blamed for its forward's rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.conditions import ScoreModError
from attncheck.examine.allowances import mod_error, on_keys
from attncheck.examine.captured_reads import where_seen
from attncheck.judge.gradients.keys import KeyGradients
from attncheck.judge.gradients.rows import row_gradients
from attncheck.judge.gradients.saved import Saved
from attncheck.judge.rules import Compared
from attncheck.judge.scores import score_error
from attncheck.oracles.conditions import blocks
from attncheck.oracles.gradient_conditions import gradient_conditions

if TYPE_CHECKING:
    from torch import Tensor

    from attncheck.conditions import Conditions, Rows
    from attncheck.examine.evidence import Evidence
    from attncheck.judge.arithmetic import Arithmetic
    from attncheck.judge.scores import ScoreError
    from attncheck.judgement import Place
    from attncheck.outputs import Outputs
    from attncheck.tensor_names import TensorName

__all__ = ["GradientAllowance", "gradient_allowance"]


@dataclass(frozen=True, slots=True, eq=False)
class GradientAllowance:
    """Largest errors of gradients that rounding can explain, float64.

    Attributes:
        bounds: By the gradient's name, in its own axes; exactly 0 in rows that see no key and for
            keys that no row sees, infinite where nothing is known.
        terms: What each is made of, by the names of ``docs/bounds.md``.
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
    for rows in blocks(problem, evidence.inputs.device):
        known = gradient_conditions(evidence.inputs, truth, rows)
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
    captured = exact.get("dcaptured") if evidence.reads.all else None
    keys = sums.finished(exact["dk"], exact["dv"], exact.get("dsink"), captured)
    shape = exact["dq"].shape
    bounds: dict[TensorName, Tensor] = {"dq": dq.view(shape), "dk": keys.dk, "dv": keys.dv}
    terms: dict[TensorName, dict[str, Tensor]] = {
        "dq": {name: term.view(shape) for name, term in dq_terms.items()},
        "dk": keys.dk_terms,
        "dv": keys.dv_terms,
    }
    if keys.dsink is not None:
        bounds["dsink"], terms["dsink"] = keys.dsink, keys.dsink_terms
    if keys.dcaptured is not None:
        bounds["dcaptured"], terms["dcaptured"] = keys.dcaptured, keys.dcaptured_terms
    elif problem.dcaptured:  # nothing says which numbers a score mod reads that cannot be traced
        bounds["dcaptured"] = torch.full_like(exact["dcaptured"], torch.inf)
        terms["dcaptured"] = {}
    return GradientAllowance(bounds, terms)


def _saved(evidence: Evidence, arithmetic: Arithmetic, outputs: Outputs, rows: Rows) -> Saved:
    """How far the kernel's own out and LSE are off; LSE by its bound where it is not exposed."""

    def of(tensor: Tensor) -> Tensor:
        return tensor.flatten(0, 1)[rows.heads.start : rows.heads.stop][:, rows.query]

    truth = evidence.truth
    assert truth.lse is not None, "the oracle always gives LSE"
    out = of(outputs.out).double() - of(truth.out)
    if outputs.lse is None:
        return Saved(out_error=out, lse_error=of(evidence.allowance(arithmetic).lse))
    lse, exact = of(outputs.lse).double(), of(truth.lse)
    return Saved(out_error=out, lse_error=torch.where(lse == exact, 0.0, lse - exact))


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
