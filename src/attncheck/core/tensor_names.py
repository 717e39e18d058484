"""Names and axes of the tensors that are compared; importable without torch."""

from __future__ import annotations

from typing import Literal

TensorName = Literal["out", "lse", "dq", "dk", "dv", "dsink", "dcaptured"]
"""Names of the tensors that are compared."""

# In the order in which tables list the tensors.
AXES: dict[TensorName, tuple[str, ...]] = {
    "out": ("batch", "head", "query", "dim"),
    "lse": ("batch", "head", "query"),
    "dq": ("batch", "head", "query", "dim"),
    "dk": ("batch", "key head", "key", "dim"),
    "dv": ("batch", "key head", "key", "dim"),
    "dsink": ("head",),
    "dcaptured": ("number",),
}
"""Axes of each tensor."""

GRADIENTS: tuple[TensorName, ...] = ("dq", "dk", "dv", "dsink", "dcaptured")
"""Names of the gradients."""
