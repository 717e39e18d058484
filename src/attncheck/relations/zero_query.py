"""q = 0 counts keys: LSE is the logarithm of how many a row sees, out the mean of their values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attncheck.outputs import Outputs
from attncheck.relations import sight
from attncheck.relations.agreement import agree
from attncheck.relations.fit import of_attention, without_sink
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.inputs import Inputs
    from attncheck.problem import Problem
    from attncheck.relations.finding import Finding

__all__ = ["ZERO_QUERY"]

# Score mods that leave a score of 0 at 0.
_KEEP_ZERO = {"none", "softcap", "temperature", "chain"}


def _unfit(problem: Problem) -> str | None:
    if all(part.name in _KEEP_ZERO for part in problem.score.walk()):
        return None
    return "its score mod may move a score of 0"


def _runs(inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
    return (inputs.replace(q=torch.zeros_like(inputs.q)),)


def _holds(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], _: Parameters, errors: Errors
) -> Finding | None:
    (given,) = outputs
    return agree(given, _counted(runs[0]), errors)


def _counted(inputs: Inputs) -> Outputs:
    """Means and logarithms, float64; 0 and −∞ in rows that see no key."""
    problem = inputs.problem
    v = inputs.promoted()[2].repeat_interleave(problem.group, dim=1)
    out, lse = [], []
    for _, visible in sight.blocks(problem, inputs.device):
        count = visible.sum(-1).expand(problem.batch, problem.heads, -1)
        sums = visible.double() @ v
        out.append(sums / count.clamp(min=1)[..., None])
        lse.append(count.double().log())
    return Outputs(torch.cat(out, dim=2), torch.cat(lse, dim=2))


ZERO_QUERY = Relation(
    name="zero_query",
    summary="q = 0: LSE is the logarithm of the number of keys that a row sees, out the mean of "
    "their values",
    runs=_runs,
    holds=_holds,
    promise="bounds",
    unfit=of_attention(without_sink, _unfit),
)
"""Holds of the exact result: n equal scores of 0 weigh 1/n each. The kernel's is within its bound
of that. Keys are counted by the mask's callable."""
