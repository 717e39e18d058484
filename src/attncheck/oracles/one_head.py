"""Some rows of one head, by FlashAttention-2's recurrence in any number system."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch

from attncheck.oracles.flash2 import rows_of
from attncheck.oracles.indices import Indices
from attncheck.oracles.result import Result
from attncheck.oracles.scores import Scores
from attncheck.oracles.softmax import safe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attncheck.inputs import Inputs
    from attncheck.oracles.numbers.protocol import Array, Numbers

__all__ = ["one_head"]

A = TypeVar("A", bound="Array")

_SCORES = 2**17  # of a block: balls take some hundred bytes each, in half a dozen arrays


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
