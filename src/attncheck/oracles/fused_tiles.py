"""Tiles on a Hopper GPU whose scores stay in registers, or are written to memory only once.

With torch, a tile costs a product that writes its scores, a pass for the exponential, one for a
partial mask, and a product that reads them; a backward costs more. At 64 and 128 dimensions those
passes take longer than the products. Here a forward tile is one kernel that writes no scores, and a
backward tile is one kernel that writes P and dX, from which torch computes the gradients.

The compiler is CUDA's own, not Triton, whose faults the tested kernels would share. Sums are in
float64, on tensor cores, which share the pipe of float64 arithmetic; ``exp`` is the one that torch
calls, off by 1 ulp at most, without its branch for overflow, which cannot occur; and the scale
multiplies the rounded sum, as in torch. Only the order of sums differs.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from attncheck.core.cuda_compiler import Launch, compile_kernel
from attncheck.core.errors import HostError
from attncheck.inputs.problem import Problem
from attncheck.oracles.mod_calls import seen_by_blocks

_CELL = 128  # Keys per cell: a forward skips cells that a block of rows does not see.
_STEP, _MOST_DIMS = 16, 128  # Dimensions are multiples of 16; a forward's registers hold 128.
_HOPPER = (9, 0)  # Capability with the fast float64 instruction; others have a slower one, or none.
# Multiplications of q·k and P·V from which the half second of CUDA's compiler pays off.
_FEWEST_PRODUCTS = 2**38
_BLOCK, _STAGES = 64, 3  # A backward's rows and keys in a block, and stages of prefetched steps.


def takes(problem: Problem, device: torch.device, *, backward: bool = False) -> bool:
    """Return whether fused tiles support ``problem`` on ``device``, and pay off.

    Args:
        backward: Whether to fuse a backward's tiles, which keep no output in registers.
    """
    dims = problem.head_dim, problem.value_dim
    products = problem.batch * problem.heads * problem.query * problem.kv * sum(dims)
    if device.type != "cuda" or torch.version.hip or products < _FEWEST_PRODUCTS:
        return False
    if any(dim % _STEP or (dim > _MOST_DIMS and not backward) for dim in dims):
        return False
    if torch.cuda.get_device_capability(device) != _HOPPER:
        return False
    try:
        _kernel(device, *dims, backward=backward)
    except HostError:  # without CUDA's compiler, torch's tiles are as exact but slower
        return False
    return True


def add_tile(
    sums: Tensor, q: Tensor, k: Tensor, v: Tensor, *, scale: float, seen: Tensor | None
) -> None:
    """Add exp(scale · q·kᵀ) · v to ``sums``, and Σ exp(scale · q·kᵀ) to column value_dim.

    Rows are contiguous and aligned to 16 bytes. All |scores| must be below 700: for larger ones
    ``exp`` would be wrong.

    Args:
        sums: ``(batch · kv_heads, group · rows, value_dim + 1 or more)``.
        q: ``(batch · kv_heads, group · rows, head_dim)``.
        k: ``(batch · kv_heads, keys, head_dim)``.
        v: ``(batch · kv_heads, keys, value_dim)``.
        seen: Bool ``(batch, heads, rows, keys)``; None if every key is seen.
    """
    lines, rows, _ = q.shape
    kernel = _kernel(q.device, q.shape[2], v.shape[2])
    _, warps = _sizes(q.shape[2])
    size, kinds = warps * _STEP, None
    # Cells are classified if each block of rows belongs to one head, else the mask is read by row.
    if seen is not None and (seen.shape[2] == rows or seen.shape[2] % size == 0):
        kinds = _classify_cells(seen, size)
    kernel(
        (-(-rows // size), lines, 1),
        [
            *(sums, q, k, v, seen, kinds, scale, rows, k.shape[1], *_heads(lines, rows, seen)),
            *_strides(sums, q, k, v),
            *((0, 0, 0, 0) if seen is None else seen.stride()),
            *((0, 0, 0, 0) if kinds is None else kinds.stride()),
        ],
    )


def _classify_cells(seen: Tensor, rows: int) -> Tensor:
    """Return 0, 1 or 2 for blocks of ``rows`` and ``_CELL`` keys: nothing, some or all is seen.

    Bytes ``(batch, heads, blocks of rows, cells of keys)``.
    """
    some, every = seen_by_blocks(seen, rows, _CELL)
    shape = -(-seen.shape[2] // rows), -(-seen.shape[3] // _CELL)
    return (some.byte() + every.byte()).expand(*seen.shape[:2], *shape)


def fill_tiles(
    tiles: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    loss: Tensor,
    v: Tensor,
    *,
    scale: float,
    seen: Tensor | None,
) -> None:
    """Fill ``tiles`` with W = exp(scale · q·kᵀ), 0 where not seen, and W · (loss·vᵀ + term).

    Args:
        tiles: Both ``(batch · kv_heads, group · rows, keys)``, contiguous; an even number of keys.
        q: As in ``add_tile``, and so are ``k``, ``v``, ``scale`` and ``seen``.
        k: See ``q``.
        loss: ``(batch · kv_heads, group · rows, value_dim + 1 or more)``; column value_dim is the
            term.
        v: See ``q``.
        scale: See ``q``.
        seen: See ``q``.
    """
    lines, rows, keys = tiles[0].shape
    kernel = _kernel(q.device, q.shape[2], v.shape[2], backward=True)
    kernel(
        (-(-keys // _BLOCK), -(-rows // _BLOCK), lines),
        [
            *(*tiles, q, k, loss, v, seen, scale, rows, keys, *_heads(lines, rows, seen)),
            *_strides(q, k, loss, v),
            *((0, 0, 0, 0) if seen is None else seen.stride()),
        ],
    )


def _heads(lines: int, rows: int, seen: Tensor | None) -> tuple[int, int]:
    """Return how many key heads a sequence has, and how many rows a query head has."""
    if seen is None:
        return lines, rows
    return seen.shape[1] * seen.shape[2] // rows, seen.shape[2]


def _strides(*tensors: Tensor) -> list[int]:
    return [tensor.stride(axis) for tensor in tensors for axis in (0, 1)]


def _sizes(head_dim: int) -> tuple[int, int]:
    """Return a forward's keys per step and warps, which fit a multiprocessor's memory."""
    return (32, 4) if head_dim <= _MOST_DIMS // 2 else (16, 8)


@functools.cache
def _kernel(device: torch.device, dim: int, value: int, *, backward: bool = False) -> Launch:
    if backward:
        numbers, warps = 2 * _STAGES * _BLOCK * (_STEP + 2), 4
        defines = {"STAGES": _STAGES}
    else:
        keys, warps = _sizes(dim)
        rows, stage = warps * _STEP, keys * (dim + value + 4)
        held = max(dim, value) <= _MOST_DIMS // 2  # whether registers hold the queries
        queries = rows * (dim + 2)
        numbers = stage + max(stage, queries) if held else 2 * stage + queries
        defines = {"FORWARD": 1, "KEYS": keys, "WARPS": warps, "ROWS": rows, "CELL": _CELL}
        defines["HELD"] = int(held)
    return compile_kernel(
        Path(__file__).with_suffix(".cu").read_text(encoding="utf-8"),
        "fused_tiles",
        {"DIM": dim, "VALUE": value, **defines},
        device=device,
        threads=32 * warps,
        shared=numbers * torch.finfo(torch.float64).bits // 8,
    )
