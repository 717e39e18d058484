"""What must be true of a call and its tensors: asked before one is kept and when one is read.

One place for both, so that no call is written that would make its file unreadable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

from attncheck.errors import ProblemError
from attncheck.formats import FORMATS
from attncheck.recordings.recording import sizes_problem
from attncheck.recordings.schema import DTYPES, Call

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["call_fact", "tensor_fact"]


def call_fact(call: Call) -> str | None:
    """What is wrong with a call's description; None where nothing is."""
    if not call.name.strip() or not call.name.isprintable():
        return "its name must be printable, and not blank"
    try:
        # As it will be read: a constructor checks nothing, and JSON has no NaN.
        msgspec.json.decode(msgspec.json.encode(call), type=Call)
        sizes_problem(call)
    except (msgspec.ValidationError, ProblemError) as error:
        return str(error).rstrip(".")
    return None


def tensor_fact(call: Call, name: str, tensor: Tensor) -> str | None:
    """What is wrong with q, k, v or the mask of a call; None where nothing is."""
    return _mask_fact(call, tensor) if name == "mask" else _fact(call, name, tensor)


def _fact(call: Call, name: str, tensor: Tensor) -> str | None:
    shape, dtype = call.shapes[name], FORMATS[call.dtype].torch_dtype
    if tuple(tensor.shape) != shape:
        return f"{name} has shape {tuple(tensor.shape)}, but should have {shape}"
    if tensor.dtype != dtype:
        return f"{name} is {tensor.dtype}, but should be {dtype}"
    odd = int((~torch.isfinite(tensor)).sum())
    if odd:
        return f"{name} holds {odd} NaN or infinite numbers: no error can be measured from them"
    return None


def _mask_fact(call: Call, mask: Tensor) -> str | None:
    fits = mask.dim() == 4 and all(
        have in {1, size} for have, size in zip(mask.shape, call.scores, strict=True)
    )
    if not fits:
        return f"its mask has shape {tuple(mask.shape)}, which does not broadcast to {call.scores}"
    able = [torch.bool] if call.mask == "bool" else [FORMATS[n].torch_dtype for n in DTYPES]
    if mask.dtype not in able:
        return f"its mask is {mask.dtype}, but should be {' or '.join(map(str, able))}"
    if call.mask == "additive" and bool((torch.isnan(mask) | torch.isposinf(mask)).any()):
        return "its mask adds NaN or +infinity: no error can be measured from them"
    return None
