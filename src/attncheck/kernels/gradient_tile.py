"""One tile of attention's gradients on the device: what our backward kernels do with it.

A tile is of rows by keys, (BLOCK_Q, BLOCK_K), or of keys by rows, as the kernel needs it: ``rows``
and ``keys`` are indices as the mods read them, ``lse`` and ``delta`` numbers of the rows, each of
them a column or a row of the tile already. Units are those of ``tile.scores``: log2 without a score
mod (IDENTITY), else natural.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The body of a Triton function is another language: its arguments have no Python types.
# Each argument's meaning is the same throughout. A column of names says less than a line of them.
# fmt: off

from __future__ import annotations

import triton
import triton.language as tl

from attncheck.kernels.tile import power

__all__ = ["loaded_lse", "loaded_rows", "may_hide", "row_gradients", "score_gradients", "weights"]


@triton.jit
def loaded_rows(pointer, rows, query):
    """An fp32 number for each row, 0 beyond ``query``."""
    return tl.load(pointer + rows, mask=rows < query, other=0.0)


@triton.jit
def loaded_lse(lse_ptr, rows, query, IDENTITY: tl.constexpr):
    """LSE of each row in the units of scores; +∞, so that its weights are 0, where it is −∞.

    That is of a row that saw no key, and it is so beyond ``query``: −∞ − −∞ never happens.
    """
    lse = tl.load(lse_ptr + rows, mask=rows < query, other=float("inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    if IDENTITY:
        lse = lse * 1.4426950408889634
    return lse


@triton.jit
def may_hide(partial, start, length, ragged, LISTED: tl.constexpr, FREE: tl.constexpr,
             BLOCK: tl.constexpr):
    """Whether something in a tile from ``start`` on may be hidden; of its run, if LISTED.

    ``ragged``: whether the block that visits it reaches beyond its own length.
    """
    if not LISTED:
        partial = not FREE or (ragged | (start + BLOCK > length))
    return partial


@triton.jit
def weights(
    x, partial, b, h, rows, keys, query, kv, lse, mask_captured, score_captured,
    MASK: tl.constexpr, SCORE: tl.constexpr, IDENTITY: tl.constexpr,
):
    """P of a tile from its scaled products and LSE; 0 where the mask hides a key."""
    s = x
    if not IDENTITY:
        s = SCORE(x, b, h, rows, keys, score_captured)
    p = power(s - lse, IDENTITY)
    if partial:
        # Of P, not of the score: −∞ less an LSE that is NaN, of a row that sees one, is NaN.
        seen = MASK(b, h, rows, keys, mask_captured) & (rows < query) & (keys < kv)
        p = tl.where(seen, p, 0.0)
    return p


@triton.jit
def score_gradients(
    x, p, dp, delta, b, h, rows, keys, slope_captured, SLOPE: tl.constexpr,
    IDENTITY: tl.constexpr,
):
    """The loss's gradient with respect to a tile's scaled products; 0 where a weight is.

    Whatever a hidden key's value and the slope at its score are, NaN and infinity among them.
    """
    dx = p * (dp - delta)
    if not IDENTITY:
        dx = dx * SLOPE(x, b, h, rows, keys, slope_captured)
    return tl.where(p == 0.0, 0.0, dx)


@triton.jit
def row_gradients(dx, k_block, acc, CAREFUL: tl.constexpr, PRECISION: tl.constexpr):
    """``acc`` (BLOCK_Q, BLOCK_D) plus dX·K, dX rounded to k's format; K is (BLOCK_D, BLOCK_K).

    0 · NaN is NaN: CAREFUL, what is not finite in K counts as 0. A row that sees it has a dX that
    is NaN already.
    """
    if CAREFUL:
        finite = tl.abs(k_block.to(tl.float32)) < float("inf")
        k_block = tl.where(finite, k_block, tl.zeros_like(k_block))
    return tl.dot(dx.to(k_block.dtype), tl.trans(k_block), acc, input_precision=PRECISION)


# fmt: on
