"""Device functions on one tile of attention, which our forward and backward kernels share.

A tile is a block of query rows by a block of keys; a tile of gradients may also be keys by rows.
Without a score mod (IDENTITY) scores are in log2 units: natural scores times log2 e, which is part
of the factor of q·k. With a score mod they stay natural, since log2 e times a finite score may
overflow fp32 (torch.finfo's smallest number added to every score of a row hides no key), and their
differences are multiplied by log2 e instead. Every offset is 64-bit: batch · heads · length · dim
passes 2^31 in ordinary use, and a stride alone may.

``rows`` (BLOCK_Q,) and ``keys`` (BLOCK_K,) are indices as the mods read them; ``h`` is a number or,
where the rows of a tile belong to several heads, (BLOCK_Q, 1). The functions of backwards take
``rows``, ``keys``, ``lse`` and ``delta`` as a column or a row of the tile. Blocks are numbered in
the order of their start, over all heads of all sequences.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The body of a Triton function is another language: its arguments have no Python types.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def blocks_to_check(again_ptr, mine, every):
    """Return the number of blocks in a careful program's share; 0 if none of them is flagged.

    The share is every ``num_programs``-th of ``every`` blocks, from ``mine`` on. Flags are read 256
    at a time: one by one, reading them would take longer than the work itself.
    """
    step = tl.num_programs(0)
    any_flag = 0
    for first in range(mine, every, 256 * step):
        number = first + tl.arange(0, 256) * step
        flags = tl.load(again_ptr + number, mask=number < every, other=0)
        any_flag = tl.maximum(any_flag, tl.max(flags, 0))
    return any_flag * tl.cdiv(every - mine, step)


@triton.jit
def is_due(again_ptr, number, CAREFUL: tl.constexpr):
    """Return whether a launch computes a block; the careful one does if the block is flagged."""
    due = True
    if CAREFUL:
        due = tl.load(again_ptr + number) != 0
    return due


@triton.jit
def place(number, blocks, together, BESIDE: tl.constexpr = 4):
    """Return (block of rows, batch · heads + head) of the ``number``-th block to start.

    The last block first: under a causal mask it is the longest, and the short ones fill the end.
    BESIDE heads start side by side: the blocks of one head would not fill the GPU, and K and V of
    all heads do not stay in the L2 cache.
    """
    leading = number // (BESIDE * blocks) * BESIDE
    heads_here = tl.minimum(BESIDE, together - leading)
    within = number % (BESIDE * blocks)
    return blocks - 1 - within // heads_here, leading + within % heads_here


@triton.jit
def number_of(block, bh, blocks, together):
    """Return the number whose ``place`` (4 heads side by side) is ``block`` and ``bh``."""
    leading = bh // 4 * 4
    heads_here = tl.minimum(4, together - leading)
    return leading * blocks + (blocks - 1 - block) * heads_here + bh - leading


# Parameters of one name mean the same in all functions. They stand in lines, not in a column.
# fmt: off


@triton.jit
def listed(tiles, b, h, block):
    """Return the address of a block's first run in a ``VisitList``, and the number of its runs."""
    b64, h64, block64 = b.to(tl.int64), h.to(tl.int64), block.to(tl.int64)
    visits = tiles[0] + b64 * tiles[2] + h64 * tiles[3] + block64 * tiles[4]
    return visits, tl.load(tiles[1] + b64 * tiles[5] + h64 * tiles[6] + block64 * tiles[7])


@triton.jit
def run_of(visits, run, every, LISTED: tl.constexpr):
    """Return a run's first tile, the tile behind its last, and whether its tiles need masking.

    Not LISTED, there is one run of all ``every`` tiles, and ``may_hide`` decides about each tile.
    """
    if LISTED:
        head = tl.load(visits + 2 * run)
        first = head >> 2
        beyond = first + tl.load(visits + 2 * run + 1)
        partial = (head & 2) == 0
    else:
        first = 0
        beyond = every
        partial = True
    return first, beyond, partial


@triton.jit
def loaded(pointer, i, j, i_stride, j_stride, i_size, j_size):
    """Return the elements (i, j) of a matrix, 0 beyond its sizes."""
    return tl.load(
        pointer + i[:, None].to(tl.int64) * i_stride + j[None, :].to(tl.int64) * j_stride,
        mask=(i[:, None] < i_size) & (j[None, :] < j_size),
        other=0.0,
    )


@triton.jit
def key_rows(keys, kv, row_stride, page_stride, table, PAGE: tl.constexpr):
    """Return the offsets of the rows of ``keys`` in a cache, (BLOCK_K,) int64.

    With pages of PAGE keys, ``table`` points to the numbers of this sequence's pages in order;
    keys beyond the last read no table entry. With PAGE 0 rows are ``row_stride`` apart.
    """
    if PAGE == 0:
        at = keys.to(tl.int64) * row_stride
    else:
        page = tl.load(table + keys // PAGE, mask=keys < kv, other=0)
        at = page.to(tl.int64) * page_stride + (keys % PAGE).to(tl.int64) * row_stride
    return at


@triton.jit
def loaded_keys(k_ptr, at, k_col, keys, kv, head_dim, BLOCK_D: tl.constexpr):
    """Return K of a tile transposed, (BLOCK_D, BLOCK_K); ``at`` are its ``key_rows``."""
    cols = tl.arange(0, BLOCK_D)
    return tl.load(
        k_ptr + at[None, :] + cols[:, None].to(tl.int64) * k_col,
        mask=(cols[:, None] < head_dim) & (keys[None, :] < kv),
        other=0.0,
    )


@triton.jit
def loaded_values(v_ptr, at, v_col, keys, kv, value_dim, BLOCK_V: tl.constexpr):
    """Return V of a tile, (BLOCK_K, BLOCK_V); ``at`` are its ``key_rows``."""
    cols = tl.arange(0, BLOCK_V)
    return tl.load(
        v_ptr + at[:, None] + cols[None, :].to(tl.int64) * v_col,
        mask=(keys[:, None] < kv) & (cols[None, :] < value_dim),
        other=0.0,
    )


@triton.jit
def factor_of(factor, descale, kv_head, SCALED: tl.constexpr):
    """Return the factor of q·k: ``factor``, in fp8 times the descale of q and k."""
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
    """Return the scores of a tile, unmasked; in log2 units if IDENTITY, else natural."""
    product = tl.dot(
        q_block, k_block, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE
    )
    s = product * factor
    if not IDENTITY:
        s = SCORE(s, b, h, rows[:, None], keys[None, :], captured)
    return s


@triton.jit
def hidden(s, seen):
    """Return the scores, −inf where not ``seen``."""
    return tl.where(seen, s, float("-inf"))


@triton.jit
def power(difference, IDENTITY: tl.constexpr):
    """Return the weight e^difference, of a difference of two ``scores`` in their units."""
    if not IDENTITY:
        difference = difference * 1.4426950408889634
    return tl.exp2(difference)


@triton.jit
def started(sink, h, SINK: tl.constexpr, IDENTITY: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Return the maximum and row sum (BLOCK_Q,) of rows that have seen no key: −inf and 0.

    With SINK, rows start with a key of value 0 and score ``sink[h]``, natural in memory: the
    maximum is that score in the units of ``scores``, and the sum 1.
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
def update_softmax(s, m, total, IDENTITY: tl.constexpr):
    """Return a tile's weights, the factor of sums so far, and the new maximum and row sum."""
    m_new = tl.maximum(m, tl.max(s, 1))
    # A row that has seen nothing keeps m = −inf; 0 stands in so that −inf − −inf never happens.
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = power(s - shift[:, None], IDENTITY)
    alpha = power(m - shift, IDENTITY)
    return p, alpha, m_new, total * alpha + tl.sum(p, 1)


@triton.jit
def normalised(acc, total):
    """Return ``acc`` divided by the sum of weights ``total``; 0 for rows without weights."""
    empty = total == 0.0
    return tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, total)[:, None])


@triton.jit
def log_sum(m, total, IDENTITY: tl.constexpr):
    """Return the natural LSE of rows whose weights relative to score ``m`` sum to ``total``."""
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
    """Return ``acc`` plus WEIGHTS_SCALE · P·V, P rounded to v's format.

    A hidden value has weight 0, but 0 · NaN is NaN. So where some row may not see a value (MASKED),
    non-finite values are left out of the product and added to the rows that see them. A score of
    −inf from a score mod only makes the weight 0: its value counts as ``seen``.
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
    """Return whether all of the fp32 ``values`` are finite, a scalar."""
    finite = tl.abs(values) < float("inf")
    return tl.min(tl.min(finite.to(tl.int32), 1), 0) != 0


@triton.jit
def _not_finite(wide, finite, seen):
    """Return the sum of the infinities and NaN that each row has ``seen``; 0 if none.

    One product counts them: an infinity is 1, a negative one 256 and a NaN both, which fp16 holds
    exactly, and no count of up to 128 carries over.
    """
    infinity = tl.where(wide > 0.0, 1.0, tl.where(wide < 0.0, 256.0, 257.0))
    marks = tl.where(finite, 0.0, infinity).to(tl.float16)
    counts = tl.dot(seen.to(tl.float16), marks).to(tl.int32)
    positive, negative = (counts & 255) != 0, counts >= 256
    one_sign = tl.where(positive, float("inf"), tl.where(negative, float("-inf"), 0.0))
    return tl.where(positive & negative, float("nan"), one_sign)


@triton.jit
def _where(kept, values):
    """Return ``values``, 0 where not ``kept``; fp8 as bits: Triton 3.6 on an H200 needs it."""
    if values.dtype.primitive_bitwidth == 8:
        bits = values.to(tl.int8, bitcast=True)
        values = tl.where(kept, bits, tl.zeros_like(bits)).to(values.dtype, bitcast=True)
    else:
        values = tl.where(kept, values, tl.zeros_like(values))
    return values


@triton.jit
def loaded_rows(pointer, rows, query):
    """Return one fp32 number per row, 0 beyond ``query``."""
    return tl.load(pointer + rows, mask=rows < query, other=0.0)


@triton.jit
def loaded_lse(lse_ptr, rows, query, IDENTITY: tl.constexpr):
    """Return LSE per row in the units of scores, with −∞ (a row that sees no key) replaced by +∞.

    Weights of such rows, and beyond ``query``, are then 0, and −∞ − −∞ never happens.
    """
    lse = tl.load(lse_ptr + rows, mask=rows < query, other=float("inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    if IDENTITY:
        lse = lse * 1.4426950408889634
    return lse


@triton.jit
def may_hide(partial, start, length, ragged, LISTED: tl.constexpr, FREE: tl.constexpr,
             BLOCK: tl.constexpr):
    """Return whether a tile from ``start`` on needs masking; LISTED, its run says so (``partial``).

    ``ragged``: whether the block that visits the tile ends beyond the rows or keys that there are.
    """
    if not LISTED:
        partial = not FREE or (ragged | (start + BLOCK > length))
    return partial


@triton.jit
def weights(
    x, partial, b, h, rows, keys, query, kv, lse, mask_captured, score_captured,
    MASK: tl.constexpr, SCORE: tl.constexpr, IDENTITY: tl.constexpr,
):
    """Return P of a tile from its scaled products and LSE; 0 where the mask hides a key."""
    s = x
    if not IDENTITY:
        s = SCORE(x, b, h, rows, keys, score_captured)
    p = power(s - lse, IDENTITY)
    if partial:
        # Mask P and not the score: −∞ − LSE is NaN in a row whose LSE is NaN.
        seen = MASK(b, h, rows, keys, mask_captured) & (rows < query) & (keys < kv)
        p = tl.where(seen, p, 0.0)
    return p


@triton.jit
def score_gradients(
    x, p, dp, delta, b, h, rows, keys, slope_captured, SLOPE: tl.constexpr,
    IDENTITY: tl.constexpr,
):
    """Return the loss's gradient with respect to a tile's scaled products; 0 where a weight is 0.

    That holds even if a hidden key's value, or the slope at its score, is NaN or infinite.
    """
    dx = p * (dp - delta)
    if not IDENTITY:
        dx = dx * SLOPE(x, b, h, rows, keys, slope_captured)
    return tl.where(p == 0.0, 0.0, dx)


@triton.jit
def row_gradients(dx, k_block, acc, CAREFUL: tl.constexpr, PRECISION: tl.constexpr):
    """Return ``acc`` (BLOCK_Q, BLOCK_D) plus dX·K, dX rounded to k's format.

    K is (BLOCK_D, BLOCK_K). 0 · NaN is NaN: CAREFUL, non-finite elements of K count as 0. In a row
    that sees one of them dX is NaN already.
    """
    if CAREFUL:
        finite = tl.abs(k_block.to(tl.float32)) < float("inf")
        k_block = tl.where(finite, k_block, tl.zeros_like(k_block))
    return tl.dot(dx.to(k_block.dtype), tl.trans(k_block), acc, input_precision=PRECISION)


# fmt: on
