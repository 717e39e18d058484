"""Fault models: what attention would give that is wrong in one known way and exact otherwise.

On the truth's side, and a stranger to oracles and kernels. A diagnosis compares what a kernel gave
with what each model predicts (``judge.diagnose``).
"""

from __future__ import annotations

from attncheck.fault_models import (
    gradient_memory_models,
    gradient_models,
    mask_models,
    memory_models,
    precision_models,
    score_models,
    softmax_models,
    tile_models,
)
from attncheck.fault_models.exact_attention import ExactAttention
from attncheck.fault_models.fault_model import FAULT_MODELS, FaultModel, Prediction

__all__ = ["FAULT_MODELS", "ORDER", "ExactAttention", "FaultModel", "Prediction"]

_ROOMS = (
    mask_models, mask_models, memory_models, softmax_models, softmax_models, score_models, score_models, softmax_models, precision_models, tile_models, tile_models,
    memory_models, memory_models, softmax_models, tile_models, precision_models, gradient_models, gradient_memory_models, gradient_memory_models,
)  # fmt: skip
_ROOM_OF = {room.__name__: place for place, room in enumerate(_ROOMS)}

ORDER: dict[str, int] = {
    one.id: place
    for place, one in enumerate(
        # As they are defined in each room: what a special mask may have is told first.
        sorted(FAULT_MODELS.values(), key=lambda one: (one.order, _ROOM_OF[one.room]))
    )
}
"""Where each stands among those that explain as much: the smallest is told first."""
