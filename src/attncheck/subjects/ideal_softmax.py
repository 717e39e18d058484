"""What a perfect softmax kernel gives: safe, in fp32, with every rounding on purpose."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attncheck.outputs import Outputs

if TYPE_CHECKING:
    from attncheck.inputs import Inputs

__all__ = ["ideal_softmax"]

# Scores held at a time: 4 million of them are 16 MiB in fp32, 32 MiB in float64.
_SCORES_AT_A_TIME = 2**22


def ideal_softmax(inputs: Inputs) -> Outputs:
    """Softmax of ``inputs.x`` ``(batch, heads, query, kv)`` over kv, and its LSE.

    * x − m in fp32, m the row's maximum; exp rounded once, to fp32.
    * The row sum in fp32, pairwise (torch's), of exp unrounded.
    * out = exp · (1 / sum), the reciprocal in fp32, as a good kernel does: one division a row
      and a rounding more for each element; then rounded once to the output format.
    * LSE = m + log(sum), log rounded once.
    * Rows that are −inf throughout give 0 and −∞; a NaN or +inf makes its row NaN.
    """
    x = inputs.x
    assert x is not None, "Inputs of a softmax have their scores"
    rows = x.flatten(0, 2)
    step = max(1, _SCORES_AT_A_TIME // rows.shape[1])
    with torch.no_grad():
        parts = [_rows(rows[i : i + step]) for i in range(0, rows.shape[0], step)]
    out = torch.cat([out for out, _ in parts]).view(x.shape)
    lse = torch.cat([lse for _, lse in parts]).view(x.shape[:-1])
    return Outputs(out.to(inputs.problem.formats.output.torch_dtype), lse)


def _rows(stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = stored.float()
    maximum = x.amax(-1)
    base = torch.where(torch.isneginf(maximum), 0.0, maximum)
    e = torch.exp((x - base[:, None]).double()).float()
    total = e.sum(-1)
    dead = total == 0
    total = torch.where(dead, 1.0, total)
    lse = torch.where(dead, -math.inf, maximum + torch.log(total.double()).float())
    return (e * (1.0 / total)[:, None]).to(stored.dtype), lse
