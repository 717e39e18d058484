"""Steps of attention that a faulty kernel does otherwise: a fault, written once.

The same ``Steps`` plant a fault in the ideal kernel (``subjects.ideal``), in fp32 and tile by tile,
and predict in float64 what a kernel with that fault gives (``exact_attention``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

import torch

from attncheck.core.formats import FORMATS
from attncheck.core.mod_spec import Dimensions, Entry, Spec, build_entry
from attncheck.mods.masks import MASKS
from attncheck.mods.scores import SCORES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from attncheck.inputs.problem import Problem
    from attncheck.mods.signatures import MaskMod, ScoreMod

# Kernels compute exp2: scores are multiplied by it, and LSE is divided by it.
LOG2E = math.log2(math.e)

Mod = TypeVar("Mod")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steps:
    """Steps that one kernel does otherwise; every default is what a right kernel does.

    A mask, score mod or scale of None, or a function that gives None for a Problem, leaves it.
    """

    # (problem, device) → the mask that is applied, in both passes.
    mask: Callable[[Problem, str], MaskMod | None] | None = None
    # (problem, device) → the score mod, its derivative included.
    score: Callable[[Problem, str], ScoreMod | None] | None = None
    scale: Callable[[Problem], float | None] | None = None  # what q·k is multiplied by
    # (which of q, k and v, its descales) → those that are used.
    descale: Callable[[str, Tensor], Tensor] | None = None
    products: Callable[[Tensor], Tensor] | None = None  # what becomes of q·k before it is scaled
    hidden: float = -math.inf  # the score of a hidden key
    sink: bool = True  # whether the sink has a part in the softmax
    first_maximum: float = -math.inf  # the running maximum before the first tile
    # Whether a row that has seen nothing keeps a maximum of 0.
    zero_maximum_when_empty: bool = False
    # Of which tiles the weights are relative to the maximum.
    maximum_in_tiles: Literal["all", "all but the last", "none"] = "all"
    # rescales_out, rescales_sum: whether what was summed before a tile is rescaled.
    rescales_out: bool = True
    rescales_sum: bool = True
    rescale_exponent: float = 1.0  # what the exponent of that factor is multiplied by
    rescale_maximum: float = 1.0  # what the new maximum is multiplied by in that exponent
    first_weight: float = 1.0  # what the first key's weight is multiplied by
    # What becomes of a tile's weights before they multiply the values.
    weights: Callable[[Tensor], Tensor] | None = None
    # What becomes of them before they are summed.
    summed_weights: Callable[[Tensor], Tensor] | None = None
    weights_scale: float | None = None  # what fp8 weights are multiplied by before they are rounded
    # kept_out, kept_sum: what becomes of the running sums after each tile.
    kept_out: Callable[[Tensor], Tensor] | None = None
    kept_sum: Callable[[Tensor], Tensor] | None = None
    # What out is multiplied by at the end, beside the reciprocal of the row sum.
    normaliser: float = 1.0
    lse: Callable[[Tensor], Tensor] | None = None  # what becomes of the natural LSE
    # As ``mask``, in the backward alone.
    backward_mask: Callable[[Problem, str], MaskMod | None] | None = None
    backward_lse: float = 1.0  # what the backward multiplies LSE by
    # (delta, dLSE) → what is taken off dP.
    delta: Callable[[Tensor, Tensor], Tensor] | None = None
    # Whether the score mod's derivative is applied to a Problem.
    slope: Callable[[Problem], bool] | None = None
    # Which of dq and dk are multiplied by the scale.
    scaled_gradients: tuple[str, ...] = ("dq", "dk")
    # Query heads ``(kv_heads, any)`` over which dK and dV of a key head are summed.
    group_heads: Callable[[Problem], Tensor] | None = None

    def relative(self, *, last: bool) -> bool:
        """Return whether a tile's weights are relative to the maximum."""
        return self.maximum_in_tiles == "all" or (self.maximum_in_tiles != "none" and not last)

    @property
    def by_tile(self) -> bool:
        """Return whether what is done otherwise depends on the tiles of keys."""
        return any(getattr(self, name) != getattr(RIGHT, name) for name in _OF_TILES)

    @property
    def of_backward(self) -> bool:
        """Return whether it is the backward alone that is done otherwise."""
        return any(getattr(self, name) != getattr(RIGHT, name) for name in _OF_BACKWARD)


RIGHT = Steps()  # those of a right kernel

_OF_TILES = (
    "weights",
    "summed_weights",
    "kept_out",
    "kept_sum",
    "zero_maximum_when_empty",
    "rescales_out",
    "rescales_sum",
    "maximum_in_tiles",
    "rescale_exponent",
    "rescale_maximum",
    "first_weight",
    "weights_scale",
    "first_maximum",
)
_OF_BACKWARD = (
    "backward_mask",
    "backward_lse",
    "delta",
    "slope",
    "scaled_gradients",
    "group_heads",
)


def replace_mask_parts(
    problem: Problem, device: str, change: Callable[[Spec, Dimensions, str], MaskMod | None]
) -> MaskMod | None:
    """Return the mask with what ``change`` gives for a part in its place.

    None where it gives None for all of them.
    """
    return _replaced(MASKS, problem.mask, problem.dimensions, device, change)


def replace_score_parts(
    problem: Problem, device: str, change: Callable[[Spec, Dimensions, str], ScoreMod | None]
) -> ScoreMod | None:
    """Return the score mod with what ``change`` gives for a part in its place, as for masks."""
    return _replaced(SCORES, problem.score, problem.dimensions, device, change)


def _replaced(
    entries: Mapping[str, Entry[Mod]],
    spec: Spec,
    dims: Dimensions,
    device: str,
    change: Callable[[Spec, Dimensions, str], Mod | None],
) -> Mod | None:

    changed = change(spec, dims, device)
    entry = entries[spec.name]
    # A part that is changed as a whole is not looked into.
    if changed is not None or entry.compose is None:
        return changed
    inside = entry.within(spec.values, dims)
    parts = [_replaced(entries, part, inside, device, change) for part in spec.parts]
    if all(part is None for part in parts):
        return None
    built = [
        build_entry(entries, one, inside, device) if part is None else part
        for one, part in zip(spec.parts, parts, strict=True)
    ]
    return entry.compose(*built, **spec.values)


def round_to_format(name: str) -> Callable[[Tensor], Tensor]:
    """Return a conversion to format ``name`` and back, in the tensor's own dtype.

    What is too large becomes the format's infinity, or its largest number in fp8; tf32 is cut off.
    """
    fmt = FORMATS[name]

    def rounded(x: Tensor) -> Tensor:
        # As tensor cores read fp32: the last 13 bits are dropped.
        if name == "tf32":
            mantissa, exponent = torch.frexp(x)
            return torch.ldexp((mantissa * 2.0**11).trunc() * 2.0**-11, exponent)
        # Conversions to fp8 saturate, and keep NaN and infinities that there are.
        if fmt.saturates:
            x = torch.where(x.isfinite(), x.clamp(-fmt.max, fmt.max), x)
        return x.float().to(fmt.torch_dtype).to(x.dtype)

    return rounded
