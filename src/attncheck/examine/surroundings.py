"""The same numbers in other surroundings: what lies beside an input, and where its elements lie."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch.utils.dlpack import from_dlpack

from attncheck import spread
from attncheck.examine.poison import pattern
from attncheck.inputs import Descale

if TYPE_CHECKING:
    from attncheck.inputs import Inputs

__all__ = ["Contents", "Surroundings", "surrounded"]

Contents = Literal["numbers", "others", "nan"]
"""Ordinary numbers, others in their place, or NaN."""

_BAND = 1 << 16  # bytes before and after: more than a tile of a small problem's rows
_ALIGNED = 4096
_VECTOR = 16  # bytes: the widest load of a GPU's thread, and what TMA wants strides to be made of
_AXES = 4  # of a tensor with rows: (batch, heads, length, dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What is no part of the inputs: around them, and between the elements of one that is a view.

    Attributes:
        contents: What lies there, beside the inputs that ``of`` names; beside all others
            ``numbers``.
        of: Names of inputs with commas between them; empty for all.
        apart: Name of an input whose rows lie further apart, with its heads beside each other
            within a row; empty for none. What is between them is no part of it either.
    """

    contents: Contents = "numbers"
    of: str = ""
    apart: str = ""


def surrounded(inputs: Inputs, by: Surroundings) -> Inputs:
    """The same numbers, each input in memory of its own with ``by`` around it.

    Strides stay, but those of ``by.apart``. Of what lies spread over gibibytes nothing is filled.
    """
    named = by.of.split(",") if by.of else list(inputs.tensors())
    tensors = {
        name: _placed(
            _apart(tensor) if name == by.apart else tensor,
            by.contents if name in named else "numbers",
        )
        for name, tensor in inputs.tensors().items()
    }
    scales = {n[0]: tensors.pop(n) for n in list(tensors) if n.endswith("_descale")}
    descale = Descale(**scales) if scales else None
    return dataclasses.replace(inputs, descale=descale, **tensors)  # type: ignore[arg-type]


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """Laid out as ``strides_far`` does it, and near: rows with all their heads, and 16 bytes."""
    if tensor.dim() != _AXES:
        return tensor
    batch, heads, length, dim = tensor.shape
    vector = _VECTOR // tensor.element_size()
    wide = -(-dim // vector) * vector
    row = batch * heads * wide + vector
    memory = torch.zeros(max(length * row, 1), dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, (heads * wide, wide, row, 1)).copy_(tensor)


def _placed(tensor: torch.Tensor, contents: Contents) -> torch.Tensor:
    size = tensor.untyped_storage().nbytes()
    if not size or not tensor.numel():
        return tensor.clone()
    if spread.is_spread(tensor):
        return spread.copied(tensor)
    band = max(_BAND, -(-size // _ALIGNED) * _ALIGNED)
    memory = torch.empty(band + size + band + _ALIGNED, dtype=torch.uint8, device=tensor.device)
    start = band + -(memory.data_ptr() + band) % _ALIGNED
    for part in (memory[start - band : start], memory[start : start + size + _BAND]):
        _fill(part[: len(part) // tensor.element_size() * tensor.element_size()], tensor, contents)
    # Through DLPack the view knows of no more memory than the input had.
    alone = from_dlpack(torch._C._to_dlpack(memory[start : start + size])).view(tensor.dtype)
    # A stride of 0 leads to one element over and over, which is written once.
    once = [1 if step == 0 else n for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
    at = (tensor.stride(), tensor.storage_offset())
    alone.as_strided(once, *at).copy_(tensor.as_strided(once, *at))
    return alone.as_strided(tensor.shape, *at)


def _fill(part: torch.Tensor, like: torch.Tensor, contents: Contents) -> None:
    memory = part.view(like.dtype)
    if contents == "nan":
        memory.copy_(torch.full((1,), math.nan, device=memory.device).to(like.dtype))
        return
    fill: Literal["pattern", "inverse"] = "pattern" if contents == "numbers" else "inverse"
    hashed = pattern(len(memory), len(memory), memory.device, fill).float()
    memory.copy_((hashed / 32 - 4).to(like.dtype))  # −4 to 4: what a score or a value may be
