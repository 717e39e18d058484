"""The derivative of a score mod as data, as torch's own autograd has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attncheck.errors import TraceError
from attncheck.mods.kept_traces import kept
from attncheck.mods.places import described
from attncheck.mods.plainly import Plainly
from attncheck.mods.recording import record_gradient
from attncheck.mods.trace import trace_score

if TYPE_CHECKING:
    from torch import Tensor

    from attncheck.mods.expression import Expression
    from attncheck.mods.signatures import ScoreMod

__all__ = ["derivative"]


def derivative(score_mod: ScoreMod, device: str = "cpu") -> Expression:
    """The expression of ∂ score_mod / ∂ score, of the arguments of a score mod.

    Where there is no derivative (a kink, a jump, the border of a ``where``) it says what torch's
    autograd of the very callable says: it is traced from that. A number that autograd has as a
    float64 one is that number: ln 2, of exp2 and log2.

    Args:
        score_mod: Any FlexAttention callable of the vocabulary (``expression.OPERATIONS``).
        device: Where the tensors are that it captures.

    Raises:
        TraceError: as ``trace_score`` of the score mod itself, and where torch has no derivative
            of an operation, or one that the vocabulary has no words for.
    """
    return kept("derivative", score_mod, device, lambda: _derivative(score_mod, device))


def _derivative(score_mod: ScoreMod, device: str) -> Expression:
    trace_score(score_mod, device)  # what cannot be traced is refused in the same words
    name = described("score mod", score_mod)
    examples = [torch.full((1,), 0.5, dtype=torch.float64, device=device)]
    examples += [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(4)]
    try:
        recorded = record_gradient(score_mod, examples)

        def slope(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            given: Tensor = Plainly(recorded).run(score, b, h, q_idx, kv_idx)
            return given

        return trace_score(slope, device)
    except TraceError as error:
        fact = str(error).removeprefix("score mod 'slope' cannot be traced: ").removesuffix(".")
        raise TraceError(f"{name} has no derivative that can be traced: {fact}.") from None
