"""One tile of attention on the device: what our forward and backward kernels do with it.

Rows are a block of queries, columns a block of keys; a tile of gradients may also be keys by rows.
Without a score mod (IDENTITY) scores are in log2 units: the natural ones times log2 e, which the
factor of q·k holds already. With one they stay natural, since log2 e times a finite score may be
beyond fp32 (torch.finfo's smallest number added to every score of a row hides no key), and a
difference of two of them is multiplied. Every offset is 64-bit: batch · heads · length · dim passes
2^31 in ordinary use, and a stride alone may.

``rows`` (BLOCK_Q,) and ``keys`` (BLOCK_K,) are indices as the mods read them; ``h`` is a number or,
where the rows of a tile are of several heads, (BLOCK_Q, 1). Of gradients, ``rows``, ``keys``,
``lse`` and ``delta`` are a column or a row of the tile already. Blocks are counted in the order of
their start, over all heads of all sequences.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The body of a Triton function is another language: its arguments have no Python types.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def turns_of(again_ptr, mine, every):
    """Return how many of ``every`` block a careful program has to look at: mostly none.

    256 of them at a time: one after the other they would take longer than what is to be done.
    """
    apart = tl.num_programs(0)
    most = 0
    for first in range(mine, every, 256 * apart):
        number = first + tl.arange(0, 256) * apart
        flags = tl.load(again_ptr + number, mask=number < every, other=0)
        most = tl.maximum(most, tl.max(flags, 0))
    return most * tl.cdiv(every - mine, apart)


@triton.jit
def is_due(again_ptr, number, CAREFUL: tl.constexpr):
    """Return whether a launch does a block: the careful one, only what was not finite before."""
    due = True
    if CAREFUL:
        due = tl.load(again_ptr + number) != 0
    return due


@triton.jit
def place(number, blocks, together, BESIDE: tl.constexpr = 4):
    """Block of rows, and batch and head, of what starts as ``number``.

    The last block first: under a causal mask it is the longest, and the short ones fill the end.
    BESIDE heads side by side: of one alone they would be too few, and K and V of all of them do
    not stay in the L2 cache.
    """
    leading = number // (BESIDE * blocks) * BESIDE
    heads_here = tl.minimum(BESIDE, together - leading)
    within = number % (BESIDE * blocks)
    return blocks - 1 - within // heads_here, leading + within % heads_here


@triton.jit
def number_of(block, bh, blocks, together):
    """Return the number whose ``place`` is this block of this batch and head."""
    leading = bh // 4 * 4
    heads_here = tl.minimum(4, together - leading)
    return leading * blocks + (blocks - 1 - block) * heads_here + bh - leading


# Each argument's meaning is the same throughout. A column of names says less than a line of them.
# fmt: off


@triton.jit
def listed(tiles, b, h, block):
    """Return where the list of a block's runs begins, and how many they are; of a ``VisitList``."""
    b64, h64, block64 = b.to(tl.int64), h.to(tl.int64), block.to(tl.int64)
    visits = tiles[0] + b64 * tiles[2] + h64 * tiles[3] + block64 * tiles[4]
    return visits, tl.load(tiles[1] + b64 * tiles[5] + h64 * tiles[6] + block64 * tiles[7])


@triton.jit
def run_of(visits, run, every, LISTED: tl.constexpr):
    """A run of tiles: its first, the one behind its last, and whether they hide something.

    Not LISTED, there is one run of ``every`` tile, and what they hide is to be found out.
    """
    if LISTED:
        head = tl.load(visits + 2 * run)
        first = head >> 1
        beyond = first + tl.load(visits + 2 * run + 1)
        partial = (head & 1) == 0
    else:
        first = 0
        beyond = every
        partial = True
    return first, beyond, partial


@triton.jit
def loaded(pointer, i, j, i_stride, j_stride, i_size, j_size):
    """The elements (i, j) of a matrix, 0 beyond its sizes."""
    return tl.load(
        pointer + i[:, None].to(tl.int64) * i_stride + j[None, :].to(tl.int64) * j_stride,
        mask=(i[:, None] < i_size) & (j[None, :] < j_size),
        other=0.0,
    )


@triton.jit
def key_rows(keys, kv, row_stride, page_stride, table, PAGE: tl.constexpr):
    """Return where the rows of ``keys`` begin in a cache, (BLOCK_K,) int64.

    With pages of PAGE keys, ``table`` points to the numbers of this sequence's pages in order; of
    a key beyond the last nothing is read. With PAGE 0 they are ``row_stride`` apart.
    """
    if PAGE == 0:
        at = keys.to(tl.int64) * row_stride
    else:
        page = tl.load(table + keys // PAGE, mask=keys < kv, other=0)
        at = page.to(tl.int64) * page_stride + (keys % PAGE).to(tl.int64) * row_stride
    return at


@triton.jit
def loaded_keys(k_ptr, at, k_col, keys, kv, head_dim, BLOCK_D: tl.constexpr):
    """K of a tile as its product takes it, (BLOCK_D, BLOCK_K); ``at`` as of ``key_rows``."""
    cols = tl.arange(0, BLOCK_D)
    return tl.load(
        k_ptr + at[None, :] + cols[:, None].to(tl.int64) * k_col,
        mask=(cols[:, None] < head_dim) & (keys[None, :] < kv),
        other=0.0,
    )


@triton.jit
def loaded_values(v_ptr, at, v_col, keys, kv, value_dim, BLOCK_V: tl.constexpr):
    """V of a tile, (BLOCK_K, BLOCK_V); ``at`` as of ``key_rows``."""
    cols = tl.arange(0, BLOCK_V)
    return tl.load(
        v_ptr + at[:, None] + cols[None, :].to(tl.int64) * v_col,
        mask=(keys[:, None] < kv) & (cols[None, :] < value_dim),
        other=0.0,
    )


@triton.jit
def factor_of(factor, descale, kv_head, SCALED: tl.constexpr):
    """The factor of q·k: ``factor``, in fp8 times what q's and k's stored numbers stand for."""
    if SCALED:
        factor = factor * (tl.load(descale[0] + kv_head) * tl.load(descale[1] + kv_head))
    return factor


@triton.jit
def visible(
    b, h, rows, keys, kv, captured, MASK: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return which keys each row sees, (BLOCK_Q, BLOCK_K) whatever the mask reads."""
    seen = MASK(b, h, rows[:, None], keys[None, :], captured) & (keys < kv)[None, :]
    return tl.broadcast_to(seen, [BLOCK_Q, BLOCK_K])


@triton.jit
def scores(
    q_block, k_block, b, h, rows, keys, factor, captured, SCORE: tl.constexpr,
    IDENTITY: tl.constexpr, PRECISION: tl.constexpr, IMPRECISE: tl.constexpr,
):
    """Scores of a tile, of hidden keys too; in log2 units if IDENTITY, else natural."""
    product = tl.dot(
        q_block, k_block, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE
    )
    s = product * factor
    if not IDENTITY:
        s = SCORE(s, b, h, rows[:, None], keys[None, :], captured)
    return s


@triton.jit
def hidden(s, seen):
    """Scores, −inf where not ``seen``."""
    return tl.where(seen, s, float("-inf"))


@triton.jit
def power(difference, IDENTITY: tl.constexpr):
    """A weight: e to the power of a difference of two ``scores``, which is in their units."""
    if not IDENTITY:
        difference = difference * 1.4426950408889634
    return tl.exp2(difference)


@triton.jit
def started(sink, h, SINK: tl.constexpr, IDENTITY: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Maximum and row sum (BLOCK_Q,) of rows that have seen no key yet: −inf and 0.

    With SINK they have seen one of value 0 and score ``sink[h]``, a natural one in memory: that
    score in the units of ``scores``, and 1.
    """
    if SINK:
        logit = tl.load(sink + h)
        if IDENTITY:
            logit = logit * 1.4426950408889634
        m = tl.zeros([BLOCK_Q], tl.float32) + logit
        total = tl.full([BLOCK_Q], 1.0, tl.float32)
    else:
        m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_Q], tl.float32)
    return m, total


@triton.jit
def advanced(s, m, total, IDENTITY: tl.constexpr):
    """A tile's weights, the factor of what was summed before it, and the new maximum and sum."""
    m_new = tl.maximum(m, tl.max(s, 1))
    # A row that has seen nothing keeps m = −inf; 0 stands in so that −inf − −inf never happens.
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = power(s - shift[:, None], IDENTITY)
    alpha = power(m - shift, IDENTITY)
    return p, alpha, m_new, total * alpha + tl.sum(p, 1)


@triton.jit
def normalised(acc, total):
    """Return what rows whose weights add up to ``total`` give; 0 where there are none."""
    empty = total == 0.0
    return tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, total)[:, None])


@triton.jit
def log_sum(m, total, IDENTITY: tl.constexpr):
    """LSE, natural, of rows whose weights relative to the score ``m`` add up to ``total``."""
    empty = total == 0.0
    if IDENTITY:
        lse = (m + tl.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453
    else:
        lse = m + tl.log(tl.where(empty, 1.0, total))
    return tl.where(empty, float("-inf"), lse)


@triton.jit
def with_values(
    p, v_block, seen, acc, MASKED: tl.constexpr, WEIGHTS_SCALE: tl.constexpr,
    PRECISION: tl.constexpr, IMPRECISE: tl.constexpr,
):
    """``acc`` plus WEIGHTS_SCALE · P·V, P rounded to v's format.

    A value that the mask hides has weight 0, but 0 · NaN is NaN: where some row may not see a
    value (MASKED), those that are not finite leave the product and are added to the rows that see
    them. A score of −inf that a score mod gave is a weight of 0 and no more: its value is ``seen``.
    """
    weights = (p * WEIGHTS_SCALE).to(v_block.dtype)
    if MASKED:
        wide = v_block.to(tl.float32)
        finite = tl.abs(wide) < float("inf")
        if not all_finite(wide):
            acc += _not_finite(wide, finite, seen)
            v_block = _where(finite, v_block)
    return tl.dot(
        weights, v_block, acc, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE
    )


@triton.jit
def all_finite(values):
    """Return whether all of fp32 ``values`` are, a scalar."""
    finite = tl.abs(values) < float("inf")
    return tl.min(tl.min(finite.to(tl.int32), 1), 0) != 0


@triton.jit
def _not_finite(wide, finite, seen):
    """Return what a row's ``seen`` infinities and NaN add up to; 0 where it sees none.

    One product counts them: an infinity is 1, a negative one 256 and a NaN both, which fp16 holds,
    and no sum of up to 128 of them carries over.
    """
    infinity = tl.where(wide > 0.0, 1.0, tl.where(wide < 0.0, 256.0, 257.0))
    marks = tl.where(finite, 0.0, infinity).to(tl.float16)
    counts = tl.dot(seen.to(tl.float16), marks).to(tl.int32)
    positive, negative = (counts & 255) != 0, counts >= 256
    one_sign = tl.where(positive, float("inf"), tl.where(negative, float("-inf"), 0.0))
    return tl.where(positive & negative, float("nan"), one_sign)


@triton.jit
def _where(kept, values):
    """``values`` where ``kept``, else 0. Triton 3.6 selects no fp8 on an H200: its bits instead."""
    if values.dtype.primitive_bitwidth == 8:
        bits = values.to(tl.int8, bitcast=True)
        values = tl.where(kept, bits, tl.zeros_like(bits)).to(values.dtype, bitcast=True)
    else:
        values = tl.where(kept, values, tl.zeros_like(values))
    return values


# Each argument's meaning is the same throughout. A column of names says less than a line of them.


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
    """Return whether something in a tile from ``start`` on may be hidden; of its run, if LISTED.

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
