"""Outputs as bytes, and back: names, dtypes and shapes in words, and the bits one after another."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from attncheck.examine.connection import HostError
from attncheck.formats import FORMATS
from attncheck.outputs import Outputs
from attncheck.tensor_names import AXES

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["packed", "unpacked"]

_DTYPES = {str(fmt.torch_dtype): fmt.torch_dtype for fmt in FORMATS.values()}


def packed(outputs: Outputs) -> tuple[list[list[Any]], bytes]:
    """``[name, dtype, shape]`` of each tensor, and the bits of all, row-major."""
    about: list[list[Any]] = []
    parts = []
    for name, tensor in outputs.tensors().items():
        about.append([name, str(tensor.dtype), list(tensor.shape)])
        flat = tensor.detach().cpu().contiguous().flatten()
        parts.append(flat.view(torch.uint8).numpy().tobytes())
    return about, b"".join(parts)


def unpacked(about: Any, data: bytes | bytearray, device: torch.device) -> Outputs:
    """What ``packed`` was given, on ``device``; raises HostError for anything else."""
    found: dict[str, torch.Tensor] = {}
    at = 0
    for name, dtype, shape in _each(about):
        count = math.prod(shape) * dtype.itemsize
        if name in found or at + count > len(data):
            raise HostError("tensors of more bytes than came.")
        bits = torch.frombuffer(bytearray(data[at : at + count]) or bytearray(1), dtype=torch.uint8)
        found[name] = bits[:count].view(dtype).reshape(shape).to(device)
        at += count
    if at != len(data) or "out" not in found:
        raise HostError("tensors of fewer bytes than came, or no out.")
    return Outputs(**found)


def _each(about: Any) -> Iterator[tuple[str, torch.dtype, list[int]]]:
    if not isinstance(about, list):
        raise HostError("what came is no list of tensors.")
    for one in about:
        if not (isinstance(one, list) and len(one) == 3):
            raise HostError("what came is no tensor.")
        name, dtype, shape = one
        if name not in AXES or dtype not in _DTYPES or not _is_shape(shape):
            raise HostError("what came is no tensor of a kernel's.")
        yield name, _DTYPES[dtype], shape


def _is_shape(shape: Any) -> bool:
    if not isinstance(shape, list) or len(shape) > 4:
        return False
    return all(type(size) is int and size >= 0 for size in shape)
