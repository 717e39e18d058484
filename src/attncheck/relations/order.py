"""Orders of heads, sequences and rows that keep no cyclic neighbour, and a draw in one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.relations.agreement import agree, mapped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from attncheck.outputs import Outputs
    from attncheck.relations.finding import Finding
    from attncheck.relations.relation import Errors
    from attncheck.tensor_names import TensorName

__all__ = ["compared", "reflected", "turns"]

_TURNS = 64


def reflected(count: int, turn: int) -> list[int]:
    """``turn`` − i modulo ``count``: what read its neighbour on one side has it on the other."""
    return [(turn - i) % count for i in range(count)]


def turns(count: int, order: Callable[[int], list[int]]) -> list[int]:
    """The first turns below ``count`` of which ``order`` moves anything, smallest first."""
    some = range(min(count, _TURNS))
    return [turn for turn in some if any(i != old for i, old in enumerate(order(turn)))]


def compared(
    outputs: Sequence[Outputs],
    change: Callable[[torch.Tensor], torch.Tensor],
    errors: Errors,
    gradients: Callable[[TensorName, torch.Tensor], torch.Tensor] | None = None,
) -> Finding | None:
    """What of the second run is not the first one's, changed as by ``agreement.mapped``."""
    before, after = outputs

    def moved(one: Outputs) -> Outputs:
        return mapped(one, change, gradients)

    return agree(after, moved(before), errors and [moved(errors[0]), errors[1]])
