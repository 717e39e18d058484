"""A proof of how far a float64 result is from the exact one, row by row, on Arb's balls.

Nothing of the float64 oracle is trusted: the exact result of a row is enclosed in balls, and the
distance of the given numbers from the far end of the balls is rounded up. Needs python-flint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from attncheck.arb import each_ball, error_bound, working_precision
from attncheck.oracles.flash2 import rows_of
from attncheck.oracles.indices import Indices
from attncheck.oracles.numbers.ball import Balls
from attncheck.oracles.result import Result
from attncheck.oracles.scores import Scores
from attncheck.oracles.softmax import safe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attncheck.arb import BallArray
    from attncheck.conditions import Rows
    from attncheck.inputs import Inputs
    from attncheck.oracles.numbers.ball import Ball
    from attncheck.oracles.numbers.protocol import Array, Numbers
    from attncheck.outputs import Outputs

__all__ = ["ProvenError", "enclosed", "one_head", "proven_error"]

A = TypeVar("A", bound="Array")

_SCORES = 2**17  # of a block: balls take some hundred bytes each, in half a dozen arrays


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


def one_head(numbers: Numbers[A], inputs: Inputs, head: int, query: Tensor) -> Result[A]:
    """Rows ``query`` of one (batch, head) pair, by FlashAttention-2's recurrence in any numbers.

    Args:
        numbers: The number system.
        inputs: On its device.
        head: batch · heads + head.
        query: int64 indices of the rows.

    Returns:
        Out ``(1, 1, rows, value_dim)`` and natural-log LSE ``(1, 1, rows, 1)``.
    """
    problem = inputs.problem
    if problem.operation == "softmax":
        x = inputs.scores().flatten(0, 1)[None, head : head + 1, query]
        scores = numbers.exact(x)
        return Result(*safe(numbers, scores, ~numbers.is_minus_infinity(scores)))
    blocks = _key_blocks(numbers, inputs, head, query)
    shape = (1, 1, len(query), problem.value_dim)
    return Result(*rows_of(numbers, blocks, shape, _sink(numbers, inputs, head)))


def _sink(numbers: Numbers[A], inputs: Inputs, head: int) -> A | None:
    """That of one head, ``(1, 1, 1, 1)``."""
    if inputs.sink is None:
        return None
    return numbers.exact(inputs.sink[head % inputs.problem.heads].double().view(1, 1, 1, 1))


def _key_blocks(
    numbers: Numbers[A], inputs: Inputs, head: int, query: Tensor
) -> Iterator[tuple[A, Tensor, A]]:
    """Scores, what is attended, and values, a block of keys at a time."""
    problem, device = inputs.problem, inputs.device
    key_head = head // problem.group  # batch · kv_heads + kv head
    promoted = _promoted(inputs, head, key_head)
    q = numbers.exact(promoted[0][:, :, query])
    scores = Scores.of(numbers, inputs)
    step = max(1, _SCORES // len(query))
    for start in range(0, problem.kv, step):
        keys = range(start, min(start + step, problem.kv))
        k, v = (numbers.exact(x[:, :, keys.start : keys.stop]) for x in promoted[1:])
        indices = Indices(
            b=torch.full((1, 1, 1, 1), head // problem.heads, device=device),
            h=torch.full((1, 1, 1, 1), head % problem.heads, device=device),
            q_idx=query.view(1, 1, -1, 1),
            kv_idx=torch.arange(keys.start, keys.stop, device=device).view(1, 1, 1, -1),
        )
        yield *scores.at(q, k, indices), v


def _promoted(inputs: Inputs, head: int, key_head: int) -> tuple[Tensor, Tensor, Tensor]:
    """The float64 q, k and v that one head means, ``(1, 1, length, dim)``."""
    q, k, v = (
        tensor.flatten(0, 1)[None, at : at + 1].double()
        for tensor, at in ((inputs.q, head), (inputs.k, key_head), (inputs.v, key_head))
    )
    if inputs.descale is None:
        return q, k, v
    scales = (inputs.descale.q, inputs.descale.k, inputs.descale.v)
    of_q, of_k, of_v = (scale.flatten()[key_head].double() for scale in scales)
    return q * of_q, k * of_k, v * of_v


def _tensor(values: BallArray) -> Tensor:
    return torch.from_numpy(values.astype(np.float64))


_ERROR = each_ball(error_bound, 2)
