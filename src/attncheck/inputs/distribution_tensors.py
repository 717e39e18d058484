"""q, k and v of each named distribution.

What is said of logits holds at the default scale, 1/√head_dim, and without a score mod.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from attncheck.core.draws import Draws

__all__ = [
    "ONE_HOT_GAP",
    "Drawn",
    "Floats",
    "Integers",
    "Sizes",
    "constant_rows",
    "large_logits",
    "negative_logits",
    "normal",
    "one_hot",
    "ones_v",
    "outliers",
    "sink",
    "sink_logit",
    "uniform",
    "with_outliers",
    "zero_q",
]


Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Drawn = tuple[Floats, Floats, Floats]
"""q, k and v."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of q ``(batch, heads, query, head_dim)``, k and v, as in a Problem."""

    batch: int
    heads: int
    kv_heads: int
    query: int
    kv: int
    head_dim: int
    value_dim: int

    @property
    def q(self) -> tuple[int, int, int, int]:
        """Shape of q, ``(batch, heads, query, head_dim)``."""
        return (self.batch, self.heads, self.query, self.head_dim)

    @property
    def k(self) -> tuple[int, int, int, int]:
        """Shape of k, ``(batch, kv_heads, kv, head_dim)``."""
        return (self.batch, self.kv_heads, self.kv, self.head_dim)

    @property
    def v(self) -> tuple[int, int, int, int]:
        """Shape of v, ``(batch, kv_heads, kv, value_dim)``."""
        return (self.batch, self.kv_heads, self.kv, self.value_dim)

    @property
    def x(self) -> tuple[int, int, int, int]:
        """Shape of a softmax's scores, ``(batch, heads, query, kv)``."""
        return (self.batch, self.heads, self.query, self.kv)


# ruff: noqa: D103  (the table in ``__init__`` says what each provokes)


# How far the chosen key's logit stands above every other in one_hot: kv·exp(−64) is below half a
# unit of float64's 1 for up to 2**38 keys.
ONE_HOT_GAP = 64.0


def normal(draws: Draws, sizes: Sizes) -> Drawn:
    return draws.normal("q", sizes.q), draws.normal("k", sizes.k), draws.normal("v", sizes.v)


def outliers(draws: Draws, sizes: Sizes) -> Drawn:
    """N(0, 1) + N(0, 100)·Bernoulli(0.001): FlashAttention-3 (arXiv:2407.08608), section 4.3."""
    q, k, v = (with_outliers(draws, stream, getattr(sizes, stream)) for stream in ("q", "k", "v"))
    return q, k, v


def with_outliers(draws: Draws, stream: str, shape: tuple[int, ...]) -> Floats:
    large = draws.normal(f"{stream} outliers", shape)
    large *= 10.0
    large *= draws.uniform(f"{stream} is an outlier", shape) < 0.001
    large += draws.normal(stream, shape)
    return large


def uniform(draws: Draws, sizes: Sizes) -> Drawn:
    return draws.uniform("q", sizes.q), draws.uniform("k", sizes.k), draws.uniform("v", sizes.v)


def large_logits(draws: Draws, sizes: Sizes) -> Drawn:
    """q·k/√head_dim has variance (√32)⁴ = 32²."""
    q, k, v = normal(draws, sizes)
    q *= math.sqrt(32.0)
    k *= math.sqrt(32.0)
    return q, k, v


def negative_logits(draws: Draws, sizes: Sizes) -> Drawn:
    """Draw q = a(1 + n/16), k = −a(1 + n'/16) with n, n' normal and a²·√head_dim = 128.

    As |n| < 8.3 (``Draws.normal``), every product is negative, and every logit lies between
    −128·(1 + 8.3/16)² and −128·(1 − 8.3/16)² < −29.
    """
    q, k, v = normal(draws, sizes)
    size = math.sqrt(128.0 / math.sqrt(sizes.head_dim))
    q += 16.0
    k += 16.0
    q *= size / 16.0
    k *= -size / 16.0
    return q, k, v


def one_hot(draws: Draws, sizes: Sizes) -> Drawn:
    """Let k be distinct vectors of signs, and each row of q a multiple of one of them.

    The bits of a key's number, repeated along head_dim, are its signs (times a random sign a
    column and head). With B = ⌈log₂ kv⌉ bits, two keys differ in r = ⌊head_dim/B⌋ columns at
    least, so q = c·k[chosen] has its logit 2cr/√head_dim or more above every other; c is a power
    of two that makes this at least 64. Signs and powers of two are exact in every format. Where
    head_dim < B, up to 2**(B − head_dim) keys are equal, and share the weight evenly.
    """
    bits = max(1, (sizes.kv - 1).bit_length())
    used = min(bits, sizes.head_dim)
    flips = draws.integers("k signs", (*sizes.k[:2], 1, sizes.head_dim), 2)
    chosen = draws.integers("chosen key", sizes.q[:3], sizes.kv)
    k = _signs(np.arange(sizes.kv), used, flips)
    q = _signs(chosen, used, np.repeat(flips, sizes.heads // sizes.kv_heads, axis=1))
    needed = ONE_HOT_GAP * math.sqrt(sizes.head_dim) / (2 * (sizes.head_dim // used))
    q *= math.ldexp(1.0, math.frexp(needed)[1])
    return q, k, draws.normal("v", sizes.v)


def _signs(numbers: Integers, bits: int, flips: Integers) -> Floats:
    """±1 by the low ``bits`` of each number, over and over along a last axis like ``flips``'s."""
    column_bit = np.arange(flips.shape[-1]) % bits
    signs = ((numbers[..., None] >> column_bit) & 1 ^ flips).astype(np.float64)
    signs *= -2.0
    signs += 1.0
    return signs


def constant_rows(draws: Draws, sizes: Sizes) -> Drawn:
    def rows(stream: str, shape: tuple[int, int, int, int]) -> Floats:
        row = draws.normal(stream, (*shape[:2], 1, shape[3]))
        return np.repeat(row, shape[2], axis=2)

    return rows("q", sizes.q), rows("k", sizes.k), draws.normal("v", sizes.v)


def sink(draws: Draws, sizes: Sizes) -> Drawn:
    """Column 0 of q and k is the sink's own: its logit is the same number, L, in every row.

    The other logits are normal with variance below 1, so their exponentials add up to about
    kv·√e; L = 4 + ln(kv, rounded up to a power of two) gives the sink about e⁴/(e⁴ + √e) = 0.97.
    """
    q, k, v = normal(draws, sizes)
    column = math.sqrt(sink_logit(sizes) * math.sqrt(sizes.head_dim))
    q[..., 0] = column
    k[..., 0] = 0.0
    k[..., 0, :] = 0.0
    k[..., 0, 0] = column
    v[..., 0, :] /= 64.0
    return q, k, v


def sink_logit(sizes: Sizes) -> float:
    return 4.0 + 0.6931471805599453 * (sizes.kv - 1).bit_length()  # ln 2 a bit


def ones_v(draws: Draws, sizes: Sizes) -> Drawn:
    return draws.normal("q", sizes.q), draws.normal("k", sizes.k), np.ones(sizes.v)


def zero_q(draws: Draws, sizes: Sizes) -> Drawn:
    return np.zeros(sizes.q), draws.normal("k", sizes.k), draws.normal("v", sizes.v)
