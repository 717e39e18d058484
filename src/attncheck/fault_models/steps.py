"""Steps of attention that a faulty kernel changes: one definition of a fault for two uses.

The same ``Steps`` plant a fault in the ideal kernel (``subjects.ideal``), in fp32 and tile by tile,
and predict in float64 the outputs of a kernel with that fault (``exact_attention``).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar

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

# Kernels compute exp2: they multiply scores by this factor, and divide LSE by it.
LOG2E = math.log2(math.e)

Mod = TypeVar("Mod")
Builder = Callable[[Any, Dimensions, str], Mod]
"""Builds a mod of a part's values by name, the Dimensions and the device."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _TileSteps:
    """Changes to what is done for each tile of keys."""

    first_maximum: float = -math.inf  # the running maximum before the first tile
    # Whether a row that has seen nothing keeps a maximum of 0.
    zero_maximum_when_empty: bool = False
    # Tiles whose weights are relative to the maximum.
    maximum_in_tiles: Literal["all", "all but the last", "none"] = "all"
    # rescales_out, rescales_sum: whether the running sums are rescaled at a tile.
    rescales_out: bool = True
    rescales_sum: bool = True
    rescale_exponent: float = 1.0  # factor of the exponent of the rescaling
    rescale_maximum: float = 1.0  # factor of the new maximum in that exponent
    first_weight: float = 1.0  # factor of the first key's weight
    # Change of a tile's weights before they multiply the values.
    weights: Callable[[Tensor], Tensor] | None = None
    # Change of a tile's weights before they are summed.
    summed_weights: Callable[[Tensor], Tensor] | None = None
    weights_scale: float | None = None  # factor of fp8 weights before they are rounded
    # kept_out, kept_sum: change of the running sums after each tile.
    kept_out: Callable[[Tensor], Tensor] | None = None
    kept_sum: Callable[[Tensor], Tensor] | None = None
    # The following are only predicted: the ideal kernel does not read them.
    # (scores of a tile, the maximum) → the exponents of the weights.
    exponent: Callable[[Tensor, Tensor], Tensor] = operator.sub
    # of_out, of_sum: (running sums, their rescaling factor) → the rescaled sums.
    of_out: Callable[[Tensor, Tensor], Tensor] = operator.mul
    of_sum: Callable[[Tensor, Tensor], Tensor] = operator.mul
    # sign_of_out, sign_of_sum: factors of a tile's sums.
    sign_of_out: float = 1.0
    sign_of_sum: float = 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class _BackwardSteps:
    """Changes to the backward."""

    # (problem, device) → the mask that is applied, only in the backward.
    backward_mask: Callable[[Problem, str], MaskMod | None] | None = None
    backward_lse: float = 1.0  # factor of LSE in the backward
    # (delta, dLSE) → the term that is subtracted from dP.
    delta: Callable[[Tensor, Tensor], Tensor] | None = None
    # Whether the score mod's derivative is applied for a Problem.
    slope: Callable[[Problem], bool] | None = None
    # Those of dq and dk that are multiplied by the scale.
    scaled_gradients: tuple[str, ...] = ("dq", "dk")
    # Query heads ``(kv_heads, any)`` over which dK and dV of a key head are summed.
    group_heads: Callable[[Problem], Tensor] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Steps(_TileSteps, _BackwardSteps):
    """Changes to the steps of a kernel; the defaults are the steps of a right kernel.

    A mask, score mod or scale stays right if it is None, or its function returns None.
    """

    # (problem, device) → the mask that is applied, in both passes.
    mask: Callable[[Problem, str], MaskMod | None] | None = None
    # (problem, device) → the score mod, also for its derivative.
    score: Callable[[Problem, str], ScoreMod | None] | None = None
    scale: Callable[[Problem], float | None] | None = None  # factor of q·k
    # (name of q, k or v, its descales) → the descales that are applied.
    descale: Callable[[str, Tensor], Tensor] | None = None
    products: Callable[[Tensor], Tensor] | None = None  # change of q·k before it is scaled
    hidden: float = -math.inf  # the score of a hidden key
    sink: bool = True  # whether the sink takes part in the softmax
    # Factor of out at the end, besides the reciprocal of the row sum.
    normaliser: float = 1.0
    lse: Callable[[Tensor], Tensor] | None = None  # change of the natural LSE

    def relative(self, *, last: bool) -> bool:
        """Return whether a tile's weights are relative to the maximum."""
        return self.maximum_in_tiles == "all" or (self.maximum_in_tiles != "none" and not last)

    @property
    def by_tile(self) -> bool:
        """Return whether the changes depend on the tiles of keys."""
        return any(getattr(self, one.name) != one.default for one in fields(_TileSteps))

    @property
    def of_backward(self) -> bool:
        """Return whether a step of the backward is changed."""
        return any(getattr(self, one.name) != one.default for one in fields(_BackwardSteps))


RIGHT = Steps()  # the steps of a right kernel


def steps_with_masks(instead: Mapping[str, Builder[MaskMod]]) -> Steps:
    """Return Steps with other masks in place of the parts that ``instead`` names.

    They are right on a Problem whose mask has none of these parts.
    """
    return Steps(
        mask=lambda problem, device: _replace_parts(
            MASKS, problem.mask, problem.dimensions, device, instead
        )
    )


def steps_with_scores(instead: Mapping[str, Builder[ScoreMod]]) -> Steps:
    """Return Steps with other score mods, as ``steps_with_masks`` does."""
    return Steps(
        score=lambda problem, device: _replace_parts(
            SCORES, problem.score, problem.dimensions, device, instead
        )
    )


def _replace_parts(
    entries: Mapping[str, Entry[Mod]],
    spec: Spec,
    dims: Dimensions,
    device: str,
    instead: Mapping[str, Builder[Mod]],
) -> Mod | None:
    """Return the mod with some parts replaced; None where it has none of them."""
    # If a part is replaced as a whole, its own parts are not: the builder gets them as ``of``.
    if build := instead.get(spec.name):
        return build(spec.values | ({"of": spec.parts} if spec.parts else {}), dims, device)
    entry = entries[spec.name]
    if entry.compose is None:
        return None
    inside = entry.within(spec.values, dims)
    parts = [_replace_parts(entries, part, inside, device, instead) for part in spec.parts]
    if all(part is None for part in parts):
        return None
    built = [
        build_entry(entries, one, inside, device) if part is None else part
        for one, part in zip(spec.parts, parts, strict=True)
    ]
    return entry.compose(*built, **entry.keywords(spec.values, dims, device))


def round_to_format(name: str, *, nearest: bool = False) -> Callable[[Tensor], Tensor]:
    """Return a conversion to format ``name`` and back, in the tensor's own dtype.

    Numbers that are too large become infinity, or the largest number in fp8; tf32 truncates
    unless it is to round to ``nearest``, as all others do.
    """
    fmt = FORMATS[name]

    def rounded(x: Tensor) -> Tensor:
        # Tensor cores read fp32 as tf32 by dropping the last 13 bits.
        if name == "tf32":
            mantissa, exponent = torch.frexp(x)
            bits = mantissa * 2.0**11
            return torch.ldexp((bits.round() if nearest else bits.trunc()) * 2.0**-11, exponent)
        # Conversions to fp8 saturate finite numbers, and keep NaN and infinities.
        if fmt.saturates:
            x = torch.where(x.isfinite(), x.clamp(-fmt.max, fmt.max), x)
        return x.float().to(fmt.torch_dtype).to(x.dtype)

    return rounded


def rounded_log2e() -> dict[str, float]:
    """Return log2 e rounded to 16-bit formats, by their names, as a multiple of log2 e."""
    exact = torch.tensor(LOG2E, dtype=torch.float64)
    return {name: float(round_to_format(name)(exact)) / LOG2E for name in ("bf16", "fp16")}
