"""The truth: three float64 oracles that agree. Strangers to every kernel.

Each takes Inputs and gives Outputs in float64: out ``(batch, heads, query, value_dim)`` and the
natural-log LSE ``(batch, heads, query)``; rows that attend to no key are 0 and −∞.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.oracles.dense import dense_attention
from attncheck.oracles.flash2 import flash2_forward
from attncheck.oracles.numbers import Float64
from attncheck.oracles.streaming import streaming

if TYPE_CHECKING:
    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs

__all__ = ["dense", "flash2", "streaming"]


def dense(inputs: Inputs) -> Outputs:
    """Attention by definition in float64; memory grows with query · kv."""
    return dense_attention(Float64(inputs.q.device), inputs)


def flash2(inputs: Inputs, *, block_query: int, block_kv: int) -> Outputs:
    """FlashAttention-2's forward recurrence in float64; raises UsageError for blocks below 1."""
    numbers = Float64(inputs.q.device)
    return flash2_forward(numbers, inputs, block_query=block_query, block_kv=block_kv)
