"""The bits of what a kernel gave, in one short word."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from attncheck.outputs import Outputs

__all__ = ["DIGITS", "digest"]

DIGITS = 32
"""Hexadecimal digits: 128 bits, so that two that are equal are no coincidence."""


def digest(outputs: Outputs) -> str:
    """SHA-256 of every bit of ``outputs``, cut to ``DIGITS`` hexadecimal digits.

    Names, shapes and dtypes of the tensors and their bytes, row-major whatever their strides: equal
    digests are equal results, bit for bit. −0.0 is another result than 0.0, and a NaN another than
    a NaN with other bits.
    """
    found = hashlib.sha256()
    for name, tensor in outputs.tensors().items():
        about = [name, list(tensor.shape), str(tensor.dtype)]
        found.update(json.dumps(about).encode() + b"\n")
        # Through flat bytes: numpy has no bfloat16, nor torch's fp8.
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        found.update(flat.cpu().numpy().data)
    return found.hexdigest()[:DIGITS]
