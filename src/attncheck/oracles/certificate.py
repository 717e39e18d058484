"""A proof of how far a float64 result is from the exact one, row by row, on Arb's balls.

Nothing of the float64 oracle is trusted: the exact result of a row is enclosed in balls, and the
distance of the given numbers from the far end of the balls is rounded up. Needs python-flint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from attncheck.arb import each_ball, error_bound, working_precision
from attncheck.oracles.numbers.ball import Balls
from attncheck.oracles.one_head import one_head
from attncheck.oracles.result import Result

if TYPE_CHECKING:
    from torch import Tensor

    from attncheck.arb import BallArray
    from attncheck.conditions import Rows
    from attncheck.inputs import Inputs
    from attncheck.oracles.numbers.ball import Ball
    from attncheck.outputs import Outputs

__all__ = ["ProvenError", "enclosed", "proven_error"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ProvenError:
    """Upper bounds of |given − exact|, float64 on the CPU; ∞ where nothing is proven.

    Attributes:
        rows: Which rows.
        out: ``(heads, rows, value_dim)``; of a softmax ``(heads, rows, kv)``.
        lse: ``(heads, rows)``; 0 where both are −∞.
    """

    rows: Rows
    out: Tensor
    lse: Tensor


def proven_error(outputs: Outputs, exact: Result[Balls], rows: Rows) -> ProvenError:
    """How far at most ``outputs`` are from the exact result.

    Args:
        outputs: Of the whole Problem, float64, with LSE.
        exact: What ``enclosed`` gave of ``rows``.
        rows: Which rows.
    """
    assert outputs.lse is not None, "an oracle always gives LSE"
    heads, query = slice(rows.heads.start, rows.heads.stop), rows.query.cpu()
    out = outputs.out.cpu().flatten(0, 1)[heads][:, query]
    lse = outputs.lse.cpu().flatten(0, 1)[heads][:, query]
    with working_precision(exact.out.bits):
        of_out = _ERROR(out.numpy(), exact.out.array[0])
        of_lse = _ERROR(lse.numpy(), exact.lse.array[0, ..., 0])
    return ProvenError(rows=rows, out=_tensor(of_out), lse=_tensor(of_lse))


def enclosed(numbers: Ball, inputs: Inputs, rows: Rows) -> Result[Balls]:
    """Balls around the exact out and LSE of some rows, whatever the size of the Problem.

    The work is that of ``rows`` alone, and memory does not grow with the keys.

    Args:
        numbers: Balls, with what evaluates a score mod.
        inputs: Of an attention or a softmax, on any device.
        rows: Which rows.

    Returns:
        Out ``(1, heads, rows, value_dim)``, of a softmax ``(1, heads, rows, kv)``, and natural-log
        LSE ``(1, heads, rows, 1)``; exactly 0 and −∞ in rows that attend to no key.
    """
    inputs = inputs.to("cpu")
    found = [one_head(numbers, inputs, head, rows.query.cpu()) for head in rows.heads]
    out, lse = ([getattr(result, part).array for result in found] for part in ("out", "lse"))
    return Result(*(Balls(np.concatenate(part, axis=1), numbers.bits) for part in (out, lse)))


def _tensor(values: BallArray) -> Tensor:
    return torch.from_numpy(values.astype(np.float64))


_ERROR = each_ball(error_bound, 2)
