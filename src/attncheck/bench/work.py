"""What a call has to do at least: pairs of a row and a key that it sees, operations, bytes."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch

from attncheck.core.mod_spec import FULL
from attncheck.records.bench_report import Work
from attncheck.verify.run_case import mask_rows

if TYPE_CHECKING:
    from attncheck.inputs.problem import Problem

_PAIRS = {"cpu": 1 << 22, "cuda": 1 << 26}  # of which a mask is evaluated at once
_MOST_DECODED = 16  # rows up to which reading k and v takes longer than multiplying by them


def count_work(problem: Problem, device: str) -> Work:
    """Count the work of a Problem of attention, its pairs exactly, by the original mask.

    A product of a pair is a multiplication and an addition for each of head_dim or value_dim
    numbers. A forward has two, q·k and P·v; a backward five, 2.5 times as many where both
    dimensions are one: q·k again, dO·v, and those of dv, dq and dk.
    """
    plain = problem.replace(seed=0, distribution="normal", dtype="fp32", backward=False)
    pairs = visible_pairs(plain.replace(dlse=False, dcaptured=False), device)
    forward = 2.0 * pairs * (problem.head_dim + problem.value_dim)
    backward = 2.0 * pairs * (3 * problem.head_dim + 2 * problem.value_dim)
    stored = problem.formats.storage.torch_dtype.itemsize
    written = problem.formats.output.torch_dtype.itemsize
    keys = problem.batch * problem.kv_heads * problem.kv
    rows = problem.batch * problem.heads * problem.query
    cache = keys * (problem.head_dim + problem.value_dim) * stored
    read_and_written = rows * (problem.head_dim * stored + problem.value_dim * written)
    return Work(
        pairs=pairs,
        forward_flops=forward,
        backward_flops=backward if problem.backward else 0.0,
        forward_bytes=cache + read_and_written,
        cache_bytes=cache,
        decoding=problem.query <= _MOST_DECODED < problem.kv,
    )


@functools.lru_cache(maxsize=256)
def visible_pairs(problem: Problem, device: str) -> int:
    """Count the pairs of a query row and a key that it sees, over all sequences and heads."""
    sizes = (problem.batch, problem.heads)
    if problem.mask == FULL:
        return math.prod(sizes) * problem.query * problem.kv
    seen, count = mask_rows(problem, torch.device(device)), 0
    step = max(1, _PAIRS[device] // (math.prod(sizes) * problem.kv))
    for start in range(0, problem.query, step):
        rows = range(start, min(start + step, problem.query))
        part = seen(rows)
        # Axes of one element that a mask does not read stand for all of theirs.
        each = math.prod(sizes) * len(rows) * problem.kv // part.numel()
        count += int(part.sum()) * each
    return count
