"""Fault models: outputs of attention with one known fault, and exact otherwise.

They import nothing from oracles or kernels. A diagnosis compares a kernel's outputs with each
model's prediction.
"""

from __future__ import annotations

from attncheck.fault_models import (
    gradient_memory_models,
    gradient_models,
    layout_models,
    mask_models,
    memory_models,
    precision_models,
    score_models,
    softmax_models,
    tile_models,
)
from attncheck.fault_models.exact_attention import ExactAttention
from attncheck.fault_models.fault_model import FaultModel, Prediction
from attncheck.fault_models.steps import RIGHT, Steps

__all__ = ["FAULT_MODELS", "ORDER", "RIGHT", "ExactAttention", "FaultModel", "Prediction", "Steps"]

FAULT_MODELS: dict[str, FaultModel] = {
    **mask_models.MODELS,
    **memory_models.MODELS,
    **softmax_models.MODELS,
    **score_models.MODELS,
    **precision_models.RECURRENCE,
    **precision_models.FP8,
    **tile_models.MODELS,
    **layout_models.MODELS,
    **softmax_models.SINKS,
    **tile_models.SPLITS,
    **precision_models.MODELS,
    **gradient_models.MODELS,
    **gradient_memory_models.MODELS,
}
"""Every fault model, by id."""

ORDER: dict[str, int] = {
    model.id: place
    # Sorting is stable: models of special masks, which are defined first, stay first.
    for place, model in enumerate(sorted(FAULT_MODELS.values(), key=lambda model: model.order))
}
"""Rank of each model among those that explain as much; the smallest is shown first."""
