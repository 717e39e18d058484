"""Fault models: what attention would give that is wrong in one known way and exact otherwise.

On the truth's side, and a stranger to oracles and kernels. A diagnosis compares what a kernel gave
with what each model predicts (``judge.diagnose``).
"""

from __future__ import annotations

from attncheck.hypotheses import (
    fp8,
    full_tiles,
    gradient_buffers,
    gradient_reads,
    gradients,
    heads,
    infinities,
    masks,
    memory,
    memory_beside,
    mods,
    precision,
    recurrence,
    scales,
    sequences,
    sinks,
    softmax,
    splits,
    tiles,
)
from attncheck.hypotheses.given import Given
from attncheck.hypotheses.model import MODELS, Model, Variant

__all__ = ["MODELS", "ORDER", "Given", "Model", "Variant"]

_ROOMS = (
    sequences, masks, memory, infinities, softmax, scales, mods, recurrence, fp8, tiles, full_tiles,
    heads, memory_beside, sinks, splits, precision, gradients, gradient_reads, gradient_buffers,
)  # fmt: skip
_ROOM_OF = {room.__name__: place for place, room in enumerate(_ROOMS)}

ORDER: dict[str, int] = {
    one.id: place
    for place, one in enumerate(
        # As they are defined in each room: what a special mask may have is told first.
        sorted(MODELS.values(), key=lambda one: (one.order, _ROOM_OF[one.room]))
    )
}
"""Where each stands among those that explain as much: the smallest is told first."""
