"""What an accumulator of few bits loses of q·k, term by term: equation B7 of the manual."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from attncheck.judge.accumulators import Accumulator

__all__ = ["running_size", "truncation_error"]


def truncation_error(
    q: torch.Tensor, k: torch.Tensor, accumulator: Accumulator, significand: int
) -> torch.Tensor:
    """Largest error of every q·k that a truncating accumulator makes, ``(heads, rows, kv)``.

    Args:
        q: ``(heads, rows, head_dim)``, float64.
        k: ``(heads, kv, head_dim)``, float64.
        accumulator: One with a block.
        significand: Significant bits of the operands: a product has twice as many, and what is
            near the largest of its step keeps them all.

    The steps may be added up in either direction, and their sums be handed to an accumulator of
    fp32 after any number of them.
    """
    assert accumulator.block is not None
    steps = [slice(i, i + accumulator.block) for i in range(0, q.shape[-1], accumulator.block)]
    largest = [_largest_product(q[..., s], k[..., s]) for s in steps]
    size = q.abs() @ k.abs().mT
    exact, together = _range_of_sums(q, k, steps), sum(largest, torch.zeros_like(size))
    count = torch.full_like(size[..., :1, :1], len(steps))
    running = torch.minimum(running_size(exact, together, accumulator, count), size)
    unit = 2.0**-accumulator.alignment
    error = len(steps) * 2.0 ** (1 - accumulator.result) * running
    for step, terms in zip(steps, largest, strict=True):
        above = unit * torch.maximum(terms, running)
        error += _lost(q[..., step], k[..., step], above, significand)
        # The running sum is cut to its own bits already: only larger terms take more of it.
        error += unit * terms if len(steps) > 1 else 0.0
    # Sums of steps added up in fp32.
    return error + len(steps) * accumulator.unit * size


def running_size(
    exact: torch.Tensor, largest: torch.Tensor, accumulator: Accumulator, steps: torch.Tensor
) -> torch.Tensor:
    """Largest magnitude that a running sum reaches when its own errors are counted.

    Args:
        exact: Largest magnitude of any sum of consecutive steps, exactly.
        largest: Σ over the steps of a step's largest |term|, same shape.
        accumulator: One with a block.
        steps: How many, broadcastable to that shape.

    Infinite where the errors could feed on themselves.
    """
    aligned, truncated = accumulator.step_loss()
    growth = steps * (aligned + truncated)
    return torch.where(growth < 1, (exact + aligned * largest) / (1 - growth), torch.inf)


def _largest_product(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    largest = torch.zeros((*q.shape[:-1], k.shape[-2]), dtype=q.dtype, device=q.device)
    for d in range(q.shape[-1]):
        torch.maximum(largest, _products(q, k, d), out=largest)
    return largest


def _products(q: torch.Tensor, k: torch.Tensor, d: int) -> torch.Tensor:
    return q[..., d, None].abs() * k[..., None, :, d].abs()


def _range_of_sums(q: torch.Tensor, k: torch.Tensor, steps: list[slice]) -> torch.Tensor:
    """Largest |sum of consecutive steps|: largest prefix sum less the smallest."""
    total = torch.zeros((*q.shape[:-1], k.shape[-2]), dtype=q.dtype, device=q.device)
    low, high = total.clone(), total.clone()
    for step in steps:
        total = total + q[..., step] @ k[..., step].mT
        low, high = torch.minimum(low, total), torch.maximum(high, total)
    return high - low


def _lost(q: torch.Tensor, k: torch.Tensor, unit: torch.Tensor, significand: int) -> torch.Tensor:
    """What alignment cuts off the products of one step, ``unit`` at most of each.

    Args:
        q: ``(heads, rows, dims of the step)``.
        k: ``(heads, kv, dims of the step)``.
        unit: ``(heads, rows, kv)``, what an aligned product's last bit is worth at most.
        significand: Significant bits of the operands.
    """
    # The last bit of a product of 2p significant bits lies 2p − 1 below its first.
    whole = 2.0 ** (2 * significand - 1) * unit
    lost = torch.zeros_like(unit)
    for d in range(q.shape[-1]):
        term = _products(q, k, d)
        lost += torch.where(term < whole, torch.minimum(term, unit), 0.0)
    return lost
