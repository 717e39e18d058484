"""Kernels and a grid that run mods, printed as Triton functions, in the repaired interpreter."""

# ruff: noqa: N803  # Triton: constexprs in capitals

import numpy as np
import pytest
import torch

from attncheck.core.errors import InterpreterUnavailable
from attncheck.core.mod_spec import Dimensions
from attncheck.kernels import interpreter
from attncheck.mods.trace import trace_mask, trace_score

try:
    interpreter.enable()
except InterpreterUnavailable:
    if not torch.cuda.is_available():
        raise

import triton  # after enable(), which must come first
import triton.language as tl

from attncheck.mods.to_triton import to_triton


@pytest.fixture(scope="session", autouse=True)
def _interpreted():
    if not interpreter.enabled():
        pytest.skip("this process compiles for its GPU")


@triton.jit
def mask_kernel(out, ROWS: tl.constexpr, KEYS: tl.constexpr, MASK: tl.constexpr, captured):
    b, h = tl.program_id(0), tl.program_id(1)
    q_idx = tl.arange(0, ROWS)[:, None]
    kv_idx = tl.arange(0, KEYS)[None, :]
    seen = MASK(b, h, q_idx, kv_idx, captured)
    tl.static_assert(seen.dtype == tl.int1)
    place = ((b * tl.num_programs(1) + h) * ROWS + q_idx) * KEYS + kv_idx
    tl.store(out + place, tl.where(seen, 1, 0) + tl.zeros((ROWS, KEYS), tl.int32))


@triton.jit
def score_kernel(x, out, ROWS: tl.constexpr, KEYS: tl.constexpr, SCORE: tl.constexpr, captured):
    b, h = tl.program_id(0), tl.program_id(1)
    q_idx = tl.arange(0, ROWS)[:, None]
    kv_idx = tl.arange(0, KEYS)[None, :]
    place = ((b * tl.num_programs(1) + h) * ROWS + q_idx) * KEYS + kv_idx
    score = SCORE(tl.load(x + place), b, h, q_idx, kv_idx, captured)
    tl.static_assert(score.dtype == tl.float32)
    tl.store(out + place, score)


class Grid:
    """All indices of a small problem, in one block that exceeds its rows and keys."""

    dimensions = Dimensions(batch=2, heads=3, query=13, kv=21)
    rows, keys = 16, 32
    shape = (dimensions.batch, dimensions.heads, rows, keys)
    existing = (slice(None), slice(None), slice(dimensions.query), slice(dimensions.kv))

    def indices(self):
        return [
            torch.arange(self.dimensions.batch)[:, None, None, None],
            torch.arange(self.dimensions.heads)[:, None, None],
            torch.arange(self.rows)[:, None],
            torch.arange(self.keys),
        ]

    def start(self):
        return torch.linspace(-30, 30, int(np.prod(self.shape))).reshape(self.shape)

    def seen(self, mask_mod):
        """The mask as Triton computes it, in blocks."""
        mod = to_triton(trace_mask(mask_mod))
        out = torch.full(self.shape, -1, dtype=torch.int32)
        mask_kernel[self.shape[:2]](out, self.rows, self.keys, mod.function, mod.captured)
        return out

    def scored(self, score_mod, start):
        """The scores as Triton computes them, in blocks."""
        outs = []
        # Distances computed as whole numbers, and as real ones, must give the same bits.
        for short in (False, True):
            mod = to_triton(trace_score(score_mod), short=short)
            out = torch.full(self.shape, float("nan"))
            where = self.rows, self.keys, mod.function, mod.captured
            score_kernel[self.shape[:2]](start, out, *where)
            outs.append(out)
        assert torch.equal(*(out.view(torch.int32) for out in outs))
        return out

    def inside(self, mod, *first):
        """The callable's values at the indices that exist."""
        b, h, q_idx, kv_idx = self.indices()
        cut = [value[self.existing] for value in first]
        sizes = self.dimensions
        value = mod(*cut, b, h, q_idx[: sizes.query], kv_idx[: sizes.kv])
        return value.expand(sizes.batch, sizes.heads, sizes.query, sizes.kv)


@pytest.fixture(scope="session")
def grid():
    return Grid()
