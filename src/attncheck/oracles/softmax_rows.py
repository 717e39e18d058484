"""The safe softmax in float64 of any number of rows, in little more memory than its result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attncheck.errors import ProblemError
from attncheck.oracles.numbers import Float64
from attncheck.oracles.softmax import safe
from attncheck.outputs import Outputs

if TYPE_CHECKING:
    from attncheck.inputs import Inputs

__all__ = ["softmax_by_rows"]

# Scores of one block. The softmax holds about six arrays of them: 6 MB on a CPU, inside or near
# its last cache, and 1.5 GB on a GPU.
_CPU_SCORES, _GPU_SCORES = 2**17, 2**25


def softmax_by_rows(inputs: Inputs, *, block_scores: int | None = None) -> Outputs:
    """The softmax of ``inputs.x`` on its device, some rows at a time; each row is for itself.

    Args:
        inputs: Of a Problem whose operation is softmax; raises ProblemError for attention.
        block_scores: How many scores to hold at a time, at least those of one row.

    Returns:
        Float64 out ``(batch, heads, query, kv)`` and natural-log LSE ``(batch, heads, query)``:
        0 and −∞ for a row that is −∞ throughout.
    """
    x = inputs.x
    if x is None:
        raise ProblemError(f"{inputs.problem.operation} has no scores as inputs.")
    numbers, rows = Float64(x.device), x.reshape(1, 1, -1, x.shape[-1])
    out = torch.empty(rows.shape, dtype=torch.float64, device=x.device)
    lse = torch.empty(*rows.shape[:-1], 1, dtype=torch.float64, device=x.device)
    at_once = block_scores or (_CPU_SCORES if x.device.type == "cpu" else _GPU_SCORES)
    step = max(1, at_once // x.shape[-1])
    for start in range(0, rows.shape[2], step):
        block = slice(start, start + step)
        scores = rows[:, :, block].double()
        attended = ~numbers.is_minus_infinity(scores)
        out[:, :, block], lse[:, :, block] = safe(numbers, scores, attended)
    return Outputs(out.view(x.shape), lse.view(x.shape[:-1]))
