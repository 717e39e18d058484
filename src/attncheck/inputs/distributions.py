"""Named distributions of q, k and v, and of a softmax's scores; each provokes different faults.

Numbers are drawn in float64 and elementwise, since matrix products differ between machines;
``inputs.input_tensors`` rounds them once. Statements about logits hold at the default scale,
1/√head_dim, and without a score mod.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from attncheck.core.errors import ProblemError, UnknownName, refuse_recorded, without_recorded

# Functions that draw import numpy and Draws, so that `attncheck list` need not wait for them.
if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from attncheck.core.draws import Draws

Floats: TypeAlias = "NDArray[np.float64]"
Integers: TypeAlias = "NDArray[np.int64]"
Drawn: TypeAlias = "tuple[Floats, Floats, Floats]"  # q, k and v

# Least distance of the chosen key's logit above every other in one_hot: for up to 2**38 keys
# kv·exp(−64) is below half an ulp of 1 in float64.
_ONE_HOT_GAP = 64.0
_LN2 = 0.6931471805599453


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A way to draw q, k and v, or scores."""

    name: str
    summary: str  # its character and the fault that it provokes, in one line
    draw: Callable[[Draws, Sizes], Drawn]  # (Draws, Sizes) → q, k, v
    # (Draws, Sizes) → the scores of a softmax, of the same character as the logits of q and k;
    # None if only q, k and v make sense.
    scores: Callable[[Draws, Sizes], Floats] | None = None
    # Whether rounding errors are nearly random: no two keys or rows are equal, and no number is
    # exact on purpose.
    generic: bool = True
    # (Draws, Sizes) → the loss's gradient with respect to out; None for standard normal.
    dout: Callable[[Draws, Sizes], Floats] | None = None
    sink: Callable[[], Tensor] | None = None  # the sinks; None if they are drawn as usual
    # Whether ``draw`` uses only +, − and ×, which give the same bits in torch.
    plain: bool = False


def draw(name: str, sizes: Sizes, seed: int, device: str = "cpu") -> Drawn:
    """Draw float64 q, k and v of distribution ``name``, with the same bits on every machine.

    Args:
        name: A name of ``DISTRIBUTIONS``; raises UnknownName with the valid names.
        device: Where the numbers are needed: on a GPU, tensors there may be returned, not arrays.

    Returns:
        q ``(batch, heads, query, head_dim)``, k ``(batch, kv_heads, kv, head_dim)`` and
        v ``(batch, kv_heads, kv, value_dim)``.
    """
    from attncheck.core.draws import Draws, TensorDraws

    distribution = distribution_named(name)
    on_device = distribution.plain and device != "cpu"
    draws: Any = TensorDraws(seed, device) if on_device else Draws(seed)
    return distribution.draw(draws, sizes)


def draw_scores(name: str, sizes: Sizes, seed: int) -> Floats:
    """Draw the float64 scores of a softmax, ``(batch, heads, query, kv)``.

    Arguments as for ``draw``; raises ProblemError for a distribution that has none.
    """
    from attncheck.core.draws import Draws

    return scores_of(name)(Draws(seed), sizes)


def scores_of(name: str) -> Callable[[Draws, Sizes], Floats]:
    """Return the ``scores`` of a distribution; raises ProblemError if it has none."""
    scores = distribution_named(name).scores
    if scores is None:
        able = ", ".join(d.name for d in DISTRIBUTIONS.values() if d.scores)
        raise ProblemError(f"distribution {name!r} has no scores for softmax: choose from {able}.")
    return scores


def distribution_named(name: str) -> Distribution:
    """Return the distribution called ``name``.

    Raises UnknownName with the valid names; ProblemError for that of a recording not loaded.
    """
    if isinstance(name, str) and name in DISTRIBUTIONS:
        return DISTRIBUTIONS[name]
    # Only a string can name a recording; other types are unknown.
    if isinstance(name, str):
        refuse_recorded("distribution", name)
    raise UnknownName("distribution", name, without_recorded(DISTRIBUTIONS))


def _normal(draws: Draws, sizes: Sizes) -> Drawn:
    return draws.normal("q", sizes.q), draws.normal("k", sizes.k), draws.normal("v", sizes.v)


def _outliers(draws: Draws, sizes: Sizes) -> Drawn:
    """Draw N(0, 1) + N(0, 100)·Bernoulli(0.001): FlashAttention-3 (arXiv:2407.08608, §4.3)."""
    q, k, v = (_with_outliers(draws, stream, getattr(sizes, stream)) for stream in ("q", "k", "v"))
    return q, k, v


def _with_outliers(draws: Draws, stream: str, shape: tuple[int, ...]) -> Floats:
    # In place, since these are the largest arrays drawn.
    large = draws.normal(f"{stream} outliers", shape)
    large *= 10.0
    large *= draws.uniform(f"{stream} is an outlier", shape) < 0.001
    large += draws.normal(stream, shape)
    return large


def _uniform(draws: Draws, sizes: Sizes) -> Drawn:
    return draws.uniform("q", sizes.q), draws.uniform("k", sizes.k), draws.uniform("v", sizes.v)


def _large_logits(draws: Draws, sizes: Sizes) -> Drawn:
    """Draw q and k so that q·k/√head_dim has variance (√32)⁴ = 32²."""
    q, k, v = _normal(draws, sizes)
    q *= math.sqrt(32.0)
    k *= math.sqrt(32.0)
    return q, k, v


def _negative_logits(draws: Draws, sizes: Sizes) -> Drawn:
    """Draw q = a(1 + n/16), k = −a(1 + n'/16) with n, n' normal and a²·√head_dim = 128.

    As |n| < 8.3 (``Draws.normal``), every product is negative, and every logit lies between
    −128·(1 + 8.3/16)² and −128·(1 − 8.3/16)² < −29.
    """
    q, k, v = _normal(draws, sizes)
    size = math.sqrt(128.0 / math.sqrt(sizes.head_dim))
    q += 16.0
    k += 16.0
    q *= size / 16.0
    k *= -size / 16.0
    return q, k, v


def _negative_scores(draws: Draws, sizes: Sizes) -> Floats:
    """Draw −128 ± 17 (|normal| < 8.3): every exp is below half of fp32's smallest number."""
    return -2.0 * (64.0 + draws.normal("x", sizes.x))


def _one_hot(draws: Draws, sizes: Sizes) -> Drawn:
    """Draw distinct vectors of signs as k, and a multiple of one of them as each row of q.

    The bits of a key's index, repeated along head_dim, are its signs (times a random sign for each
    column and head). With B = ⌈log₂ kv⌉ bits, two keys differ in r = ⌊head_dim/B⌋ columns at
    least, so the logit of the chosen key of q = c·k[chosen] is 2cr/√head_dim or more above every
    other; c is a power of two that makes this at least 64. Signs and powers of two are exact in
    every format. If head_dim < B, up to 2**(B − head_dim) keys are equal and share the weight.
    """
    import numpy as np

    bits = max(1, (sizes.kv - 1).bit_length())
    # With fewer columns than bits, keys that differ only in the bits left out are equal.
    used = min(bits, sizes.head_dim)
    flips = draws.integers("k signs", (*sizes.k[:2], 1, sizes.head_dim), 2)
    chosen = draws.integers("chosen key", sizes.q[:3], sizes.kv)
    k = _signs(np.arange(sizes.kv), used, flips)
    q = _signs(chosen, used, np.repeat(flips, sizes.heads // sizes.kv_heads, axis=1))
    needed = _ONE_HOT_GAP * math.sqrt(sizes.head_dim) / (2 * (sizes.head_dim // used))
    q *= math.ldexp(1.0, math.frexp(needed)[1])
    return q, k, draws.normal("v", sizes.v)


def _signs(numbers: Integers, bits: int, flips: Integers) -> Floats:
    """Return ±1 by the low ``bits`` of each number, repeated along ``flips``'s last axis."""
    import numpy as np

    # Bit j % bits of the number in column j, exclusive-or a random sign.
    column_bit = np.arange(flips.shape[-1]) % bits
    signs = ((numbers[..., None] >> column_bit) & 1 ^ flips).astype(np.float64)
    # Bit 0 becomes +1, bit 1 becomes −1.
    signs *= -2.0
    signs += 1.0
    return signs


def _one_hot_scores(draws: Draws, sizes: Sizes) -> Floats:
    """Draw one score of ``_ONE_HOT_GAP`` in each row; all others are 0."""
    import numpy as np

    scores = np.zeros(sizes.x)
    chosen = draws.integers("chosen key", sizes.x[:3], sizes.kv)
    np.put_along_axis(scores, chosen[..., None], _ONE_HOT_GAP, axis=-1)
    return scores


def _constant_rows(draws: Draws, sizes: Sizes) -> Drawn:
    import numpy as np

    def rows(stream: str, shape: tuple[int, int, int, int]) -> Floats:
        # One row is drawn and repeated, so all are bitwise equal.
        row = draws.normal(stream, (*shape[:2], 1, shape[3]))
        return np.repeat(row, shape[2], axis=2)

    return rows("q", sizes.q), rows("k", sizes.k), draws.normal("v", sizes.v)


def _constant_scores(draws: Draws, sizes: Sizes) -> Floats:
    import numpy as np

    return np.broadcast_to(draws.normal("x", (*sizes.x[:3], 1)), sizes.x).copy()


def _sink(draws: Draws, sizes: Sizes) -> Drawn:
    """Draw k so that key 0, the sink, has the same logit L in every row, by column 0 of q and k.

    The other logits are normal with variance below 1, so their exponentials add up to about
    kv·√e; L = 4 + ln(kv, rounded up to a power of two) gives the sink about e⁴/(e⁴ + √e) = 0.97.
    """
    q, k, v = _normal(draws, sizes)
    column = math.sqrt(_sink_logit(sizes) * math.sqrt(sizes.head_dim))
    q[..., 0] = column
    # Column 0 adds nothing to the logits of other keys.
    k[..., 0] = 0.0
    k[..., 0, :] = 0.0
    k[..., 0, 0] = column
    # The sink's values are small, so that the other keys' small weights show in out if lost.
    v[..., 0, :] /= 64.0
    return q, k, v


def _sink_logit(sizes: Sizes) -> float:
    # By the bit length, since a library's log differs in its last bit between machines.
    return 4.0 + _LN2 * (sizes.kv - 1).bit_length()


def _sink_scores(draws: Draws, sizes: Sizes) -> Floats:
    """Draw normal scores, with the logit of ``_sink`` in column 0."""
    scores = draws.normal("x", sizes.x)
    scores[..., 0] = _sink_logit(sizes)
    return scores


def _ones_v(draws: Draws, sizes: Sizes) -> Drawn:
    import numpy as np

    return draws.normal("q", sizes.q), draws.normal("k", sizes.k), np.ones(sizes.v)


def _zero_q(draws: Draws, sizes: Sizes) -> Drawn:
    import numpy as np

    return np.zeros(sizes.q), draws.normal("k", sizes.k), draws.normal("v", sizes.v)


def _zero_scores(_draws: Draws, sizes: Sizes) -> Floats:
    import numpy as np

    return np.zeros(sizes.x)


_TERM_SIZES = 6
"""Number of sizes of small terms: from 1.3/2^13 on, each half the one before.

For at least one size, tiles of 16 to 512 terms add up to no whole number of ulps of a bf16 or fp16
sum that begins with 1: then each tile is rounded, and in the same direction."""


def _small_terms(draws: Draws, sizes: Sizes) -> Drawn:
    """Draw sums of one term of 1 and small terms, along the longer axis of rows and keys.

    With at least as many keys as rows, these sums are out and the row sum of three rows in four,
    whose first or last key weighs 1 and all others c; and out (in some columns, by V) and dQ of
    every fourth row, where all weights are equal and k has small terms. With more rows than keys
    they are dK and dV, by q and dOut. dP is ±1 times a common number in each row.
    """
    import numpy as np

    q, k, v = np.zeros(sizes.q), np.zeros(sizes.k), np.ones(sizes.v)
    half = sizes.value_dim // 2
    v[..., half:] = (1.0 - 2.0 * (np.arange(sizes.kv) % 2))[:, None]
    if sizes.query > sizes.kv:
        q[..., 2:] = _terms(draws, "q", sizes.q)[..., 2:]
        k[..., 0] = draws.normal("k", sizes.k[:3])
        v[..., :half] = 0.0
        return q, k, v
    # Columns 0 and 1 of k belong to the first and the last key; a row of q uses one or none.
    k[..., 2:] = _terms(draws, "k", sizes.k)[..., 2:]
    k[..., 1::2, 2:] *= -1.0  # like dP, so that all terms of dQ have one sign
    k[..., :2] = 0.0
    k[..., 0, 0] = 4.0
    k[..., -1, -1 if sizes.head_dim < 2 else 1] = 4.0
    rows = np.arange(sizes.query) + draws.integers("level", (*sizes.q[:2], 1), 2 * _TERM_SIZES)
    level = rows % _TERM_SIZES
    gaps = (12.62 + level) * _LN2 * math.sqrt(sizes.head_dim) / 4.0
    # A last key of weight 1 rescales earlier sums by c, which kernels may flush to 0 below 2^-14.
    last = (rows // _TERM_SIZES % 2 == 1) & (level < 2)
    weighted = rows % 4 != 3
    q[..., 0] = gaps * (weighted & ~last)
    if sizes.head_dim > 1:
        q[..., 1] = gaps * (weighted & last)
    column, small = np.arange(half), _terms(draws, "v", sizes.v)[..., :half]
    v[..., :half] = np.where(column % 8 < 4, column % 4.0, small)
    v[..., 0, :half] = v[..., -1, :half] = 1.0
    return q, k, v


def _small_terms_of_loss(draws: Draws, sizes: Sizes) -> Floats:
    import numpy as np

    shape = (*sizes.q[:3], sizes.value_dim)
    dout = np.ones(shape)
    half = sizes.value_dim // 2
    dout[..., :half] = _terms(draws, "dout", shape)[..., :half] if sizes.query > sizes.kv else 0.0
    return dout


def _terms(draws: Draws, stream: str, shape: tuple[int, int, int, int]) -> Floats:
    """Return 1 in the first or the last row, and small terms of one size in all others."""
    import numpy as np

    batch, heads, rows, columns = shape
    place = np.arange(columns) + draws.integers(f"{stream} level", (batch, heads, 1), _TERM_SIZES)
    terms = np.repeat(np.ldexp(1.3, -13 - place % _TERM_SIZES)[:, :, None], rows, axis=2)
    at = np.where(place // _TERM_SIZES % 2 == 0, 0, rows - 1)
    np.put_along_axis(terms, at[:, :, None], 1.0, axis=2)
    return terms


DISTRIBUTIONS: dict[str, Distribution] = {
    d.name: d
    # Draws depend only on seed and stream, so the order of entries changes no bits.
    for d in (
        Distribution(
            name="normal",
            summary="standard normal q, k and v: the ordinary case",
            draw=_normal,
            plain=True,
            scores=lambda draws, sizes: draws.normal("x", sizes.x),
        ),
        Distribution(
            name="outliers",
            summary="N(0,1) + N(0,100)·Bernoulli(0.001), FlashAttention-3's: "
            "low-precision products",
            draw=_outliers,
            plain=True,
            scores=lambda draws, sizes: _with_outliers(draws, "x", sizes.x),
        ),
        Distribution(
            name="uniform",
            summary="uniform on [0, 1): all signs equal, so errors add up as a bias",
            draw=_uniform,
            plain=True,
            scores=lambda draws, sizes: draws.uniform("x", sizes.x),
        ),
        Distribution(
            name="large_logits",
            summary="logits of standard deviation 32: "
            "exp without the maximum subtracted overflows fp32",
            draw=_large_logits,
            plain=True,
            scores=lambda draws, sizes: 32.0 * draws.normal("x", sizes.x),
        ),
        Distribution(
            name="negative_logits",
            summary="every logit near −128: a running maximum that starts at 0 divides 0 by 0",
            draw=_negative_logits,
            plain=True,
            scores=_negative_scores,
            generic=False,
        ),
        Distribution(
            name="one_hot",
            summary="each row gives one key the weight 1 (if kv ≤ 2**head_dim): "
            "the key's index and head",
            draw=_one_hot,
            scores=_one_hot_scores,
            generic=False,
        ),
        Distribution(
            name="constant_rows",
            summary="all q rows equal, all k rows equal: even weights, from logits that are not 0",
            draw=_constant_rows,
            scores=_constant_scores,
            generic=False,
        ),
        Distribution(
            name="sink",
            summary="key 0 takes over 9/10 of the weight and its v is small: "
            "the rest must not be lost",
            draw=_sink,
            scores=_sink_scores,
            generic=False,
        ),
        Distribution(
            name="ones_v",
            summary="V = 1: out is exactly 1, so only normalisation is left",
            draw=_ones_v,
            generic=False,
        ),
        Distribution(
            name="zero_q",
            summary="q = 0: even weights over the visible keys, by counting",
            draw=_zero_q,
            scores=_zero_scores,
            generic=False,
        ),
        Distribution(
            name="small_terms",
            summary="a term of 1 and thousands of small ones: what sums in 16 bits drop",
            draw=_small_terms,
            generic=False,
            dout=_small_terms_of_loss,
        ),
    )
}
