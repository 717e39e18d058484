"""Oracles: exact attention in float64 by several algorithms that agree.

Each takes Inputs and returns Outputs in float64: out ``(batch, heads, query, value_dim)`` (softmax:
``(batch, heads, query, kv)``) and the natural-log LSE ``(batch, heads, query)``; rows that attend
to no key are 0 and −∞. All but ``streaming`` are a Recurrence over ``Float64``; over
``mp_numbers.Mp`` the same recurrences compute any number of digits.
``BACKWARDS`` compute gradients of Inputs with a loss.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Inputs
from attncheck.oracles.backward_recurrences import dense_backward, flash2_backward
from attncheck.oracles.float64_numbers import Float64
from attncheck.oracles.forward_recurrences import (
    dense_attention,
    dense_softmax,
    flash1_forward,
    flash2_forward,
    split_forward,
)
from attncheck.oracles.recurrence_steps import SOFTMAXES as _SOFTMAXES
from attncheck.oracles.recurrence_steps import Backward, Recurrence
from attncheck.oracles.streaming_forward import softmax_by_rows, streaming
from attncheck.oracles.streaming_gradients import streaming_backward

__all__ = [
    "BACKWARDS",
    "BACKWARD_RECURRENCES",
    "MAY_OVERFLOW",
    "ORACLES",
    "RECURRENCES",
    "REFERENCE",
    "SOFTMAXES",
    "SOFTMAX_RECURRENCES",
    "dense",
    "flash1",
    "flash2",
    "split",
    "streaming",
    "truth",
]

REFERENCE = "safe"
"""The recurrence that computes reference results with many digits: the definition, safely."""

MAY_OVERFLOW = frozenset({"naive"})
"""Recurrences that may overflow in float64, by their definition."""

# Block size and splits of the registered recurrences: a small problem should have several blocks.
_BLOCK = 16
_SPLITS = 3


def _in_float64(recurrence: Recurrence | Backward) -> Callable[[Inputs], Outputs]:
    def oracle(inputs: Inputs) -> Outputs:
        numbers = Float64(inputs.device)
        return recurrence(numbers, inputs).rounded(numbers)

    return oracle


RECURRENCES: dict[str, Recurrence] = {
    **{name: partial(dense_attention, softmax=softmax) for name, softmax in _SOFTMAXES.items()},
    "flash1": partial(flash1_forward, block_query=_BLOCK, block_kv=_BLOCK),
    "flash2": partial(flash2_forward, block_query=_BLOCK, block_kv=_BLOCK),
    "split": partial(split_forward, splits=_SPLITS),
}
"""Attention in any number system, by name."""

SOFTMAX_RECURRENCES: dict[str, Recurrence] = {
    name: partial(dense_softmax, softmax=softmax) for name, softmax in _SOFTMAXES.items()
}
"""The operation softmax in any number system, by name."""

ORACLES: dict[str, Callable[[Inputs], Outputs]] = {
    **{name: _in_float64(recurrence) for name, recurrence in RECURRENCES.items()},
    "streaming": streaming,
}
"""Attention in float64, by name."""

BACKWARD_RECURRENCES: dict[str, Backward] = {
    "dense": dense_backward,
    "flash2": partial(flash2_backward, block_query=_BLOCK, block_kv=_BLOCK),
}
"""Gradients in any number system, by name."""

BACKWARDS: dict[str, Callable[[Inputs], Outputs]] = {
    **{name: _in_float64(backward) for name, backward in BACKWARD_RECURRENCES.items()},
    "streaming": streaming_backward,
}
"""Gradients in float64, with out and LSE, by name."""

SOFTMAXES: dict[str, Callable[[Inputs], Outputs]] = {
    name: _in_float64(recurrence) for name, recurrence in SOFTMAX_RECURRENCES.items()
}
"""The operation softmax in float64, by name."""


def dense(inputs: Inputs) -> Outputs:
    """Return attention by definition in float64, by the safe softmax; memory is O(query · kv)."""
    return ORACLES[REFERENCE](inputs)


def flash1(inputs: Inputs, *, block_query: int, block_kv: int) -> Outputs:
    """Compute FlashAttention-1's forward in float64; raise UsageError for blocks below 1."""
    recurrence = partial(flash1_forward, block_query=block_query, block_kv=block_kv)
    return _in_float64(recurrence)(inputs)


def flash2(inputs: Inputs, *, block_query: int, block_kv: int) -> Outputs:
    """Compute FlashAttention-2's forward in float64; raise UsageError for blocks below 1."""
    recurrence = partial(flash2_forward, block_query=block_query, block_kv=block_kv)
    return _in_float64(recurrence)(inputs)


def split(inputs: Inputs, *, splits: int) -> Outputs:
    """Compute splits of the keys, merged by LSE, in float64; raise UsageError below one split."""
    return _in_float64(partial(split_forward, splits=splits))(inputs)


def truth(inputs: Inputs) -> Outputs:
    """Return the exact result that kernels are compared with, at any size, on the inputs' device.

    Attention is computed by ``streaming``, in O(query + kv) memory, with gradients if the Problem
    has a backward. A softmax is the safe one, some rows at a time.
    """
    # A softmax's out is as large as its scores, so only temporary memory is limited.
    if inputs.problem.operation == "softmax":
        return softmax_by_rows(inputs)
    return streaming_backward(inputs) if inputs.problem.backward else streaming(inputs)
