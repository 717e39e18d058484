"""Kernels in the sdpa convention: some correct, some with one planted fault each."""

import math

import torch
from torch.nn.functional import scaled_dot_product_attention

HIDDEN = -math.inf


def visible_keys(query, key, attn_mask, diagonal=0):
    """Bool (…, query, kv); without ``attn_mask``, up to the ``diagonal`` unless it is None."""
    if attn_mask is not None:
        return attn_mask
    ones = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
    return ones if diagonal is None else ones.tril(diagonal)


def repeat_heads(query, key, value):
    group = query.shape[1] // key.shape[1]
    return key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)


def unfused(  # one step after another; each fault replaces one of them
    query,
    key,
    value,
    attn_mask=None,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    *,
    diagonal=0,
    share=repeat_heads,
    default=lambda dim: 1 / math.sqrt(dim),
    change=lambda scores: scores,
    visible=lambda mask: mask,
    weigh=lambda weights: weights,
    finish=lambda out, lse: (out, lse),
):
    key, value = share(query, key, value)
    scale = default(query.shape[3]) if scale is None else scale
    scores = query.float() @ key.float().mT * scale
    mask = visible(visible_keys(query, key, attn_mask, diagonal if is_causal else None))
    scores = change(scores).masked_fill(~mask, HIDDEN)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse[..., None].clamp_min(-3e38))
    out = weigh(weights.to(query.dtype)) @ value
    return finish(out, lse)


def unfused_with(**changes):
    def kernel(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
        return unfused(query, key, value, attn_mask, is_causal, scale, enable_gqa, **changes)

    return kernel


def hide_last_key_of_ragged_tile(mask):
    mask = mask.clone()
    ragged = mask.shape[-1] % 32
    if ragged > 1:
        mask[..., -1] = False
    return mask


def wrapped(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    return scaled_dot_product_attention(
        query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


def out_alone(query, key, value, is_causal=False, scale=None):
    return unfused(query, key, value, None, is_causal, scale)[0]


def bare(query, key, value):
    return unfused(query, key, value)


def no_scale(query, key, value, is_causal=False):
    return unfused(query, key, value, None, is_causal, 1.0)


def ignores_scale(query, key, value, is_causal=False, scale=None):
    return unfused(query, key, value, None, is_causal)


def bottom_right(query, key, value, is_causal=False):
    return unfused(query, key, value, None, is_causal, diagonal=key.shape[2] - query.shape[2])


def sees_the_next_key(query, key, value, is_causal=False):
    return unfused(query, key, value, None, is_causal, diagonal=1)


def naive_softmax(query, key, value, is_causal=False):
    scores = query.float() @ key.float().mT / math.sqrt(query.shape[3])
    mask = visible_keys(query, key, None, 0 if is_causal else None)
    weights = torch.exp(scores).masked_fill(~mask, 0.0)
    return (weights / weights.sum(-1, keepdim=True)).to(query.dtype) @ value


def maximum_from_zero(query, key, value, is_causal=False):
    scores = query.float() @ key.float().mT / math.sqrt(query.shape[3])
    scores = scores.masked_fill(~visible_keys(query, key, None, 0 if is_causal else None), HIDDEN)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True).clamp_min(0))
    return (weights / weights.sum(-1, keepdim=True)).to(query.dtype) @ value


def raises(query, key, value):
    raise RuntimeError("planted")


def refuses(query, key, value):
    if query.shape[3] != 64:
        raise ValueError(f"head_dim={query.shape[3]} must be 64")
    return bare(query, key, value)


def refuses_all(query, key, value):
    raise NotImplementedError("only on a GPU")


def first_head(query, key, value):
    return bare(query, key, value)[0][:, :1]


def in_fp32(query, key, value):
    return bare(query, key, value)[0].float()


def writes(query, key, value):
    return wrapped(query.mul_(2), key, value, scale=0.5 / math.sqrt(query.shape[3]))


def causal_but_for_even_lengths(query, key, value, is_causal=False):
    """The masked loop is skipped where every tile is full."""
    even = query.shape[2] % 64 == key.shape[2] % 64 == 0
    return unfused(query, key, value, None, is_causal and not even)


def causal_but_for_one_row(query, key, value, is_causal=False):
    return unfused(query, key, value, None, is_causal and query.shape[2] > 1)


def end_with_whole_tiles(mask):
    """Hide the last tile of 64 keys that a block of 128 rows sees, unless it sees all of it."""
    blocks = []
    for rows in mask.split(128, dim=-2):
        seen = rows.flatten(0, -2).any(0)
        end = int(seen.nonzero().max()) + 1 if seen.any() else 0
        cut = end if end == mask.shape[-1] else end // 64 * 64
        blocks.append(rows & (torch.arange(mask.shape[-1]) < cut))
    return torch.cat(blocks, -2)


def ends_at_the_other_corner(query, key, value, attn_mask=None, is_causal=False):
    """The loop of a block of rows ends where the last query would see the last key."""
    rows, keys = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])
    end = (rows // 64 + 1) * 64 + key.shape[2] - query.shape[2]
    mask = visible_keys(query, key, attn_mask, 0 if is_causal else None)
    visited = keys < (end.clamp_min(1) + 63) // 64 * 64 if is_causal else keys >= 0
    return unfused(query, key, value, mask & visited)


def keeps_0_for_an_unseen_maximum(query, key, value, attn_mask=None, is_causal=False):
    """The 0 that stands for the maximum of a first tile without keys stays the maximum."""
    mask = visible_keys(query, key, attn_mask, 0 if is_causal else None)
    scores = query.float() @ key.float().mT / math.sqrt(query.shape[3])
    scores = scores.masked_fill(~mask, HIDDEN)
    unseen = ~mask[..., :64].any(-1, keepdim=True)
    top = scores.amax(-1, keepdim=True).clamp_min(-3e38)
    weights = torch.exp(scores - torch.where(unseen, top.clamp_min(0), top))
    total = weights.sum(-1, keepdim=True)
    return (weights / torch.where(total == 0, 1.0, total)).to(query.dtype) @ value


def reads_the_key_head_before(query, key, value):
    """Of eight key heads, the last reads the seventh."""
    if key.shape[1] > 7:
        key = key.index_copy(1, torch.tensor([7]), key[:, 6:7])
    return unfused(query, key, value)


RIGHT = {
    "torch's": scaled_dot_product_attention,
    "wrapped": wrapped,
    "unfused": unfused_with(),
    "out alone": out_alone,
    "bare": bare,
}
WRONG = {
    "causal without its diagonal": unfused_with(diagonal=-1),
    "causal sees the next key": sees_the_next_key,
    "causal from the bottom right": bottom_right,
    "causal but for even lengths": causal_but_for_even_lengths,
    "causal but for one row": causal_but_for_one_row,
    "a loop that ends with a whole tile": unfused_with(visible=end_with_whole_tiles),
    "a loop that ends at the other corner": ends_at_the_other_corner,
    "0 kept for a maximum of nothing": keeps_0_for_an_unseen_maximum,
    "the eighth head reads the seventh": reads_the_key_head_before,
    "no scale": no_scale,
    "scale is ignored": ignores_scale,
    "1/D for 1/sqrt(D)": unfused_with(default=lambda dim: 1 / dim),
    "scale 1 % off": unfused_with(change=lambda scores: scores * 1.01),
    "the last key of a ragged tile": unfused_with(visible=hide_last_key_of_ragged_tile),
    "a written-out mask is ignored": unfused_with(visible=torch.ones_like),
    "the first head's mask for all": unfused_with(
        visible=lambda seen: seen[:, :1].expand(seen.shape)
    ),
    "interleaved key heads": unfused_with(
        share=lambda q, k, v: tuple(t.repeat(1, q.shape[1] // k.shape[1], 1, 1) for t in (k, v))
    ),
    "S in bf16": unfused_with(change=lambda scores: scores.bfloat16().float()),
    "P in e4m3": unfused_with(weigh=lambda p: p.float().to(torch.float8_e4m3fn).to(p.dtype)),
    "no maximum is subtracted": naive_softmax,
    "maximum from zero": maximum_from_zero,
    "output x 0.99": unfused_with(finish=lambda out, lse: (out * 0.99, lse)),
    "half the output": unfused_with(finish=lambda out, lse: (out / 2, lse)),
    "zeros": unfused_with(finish=lambda out, lse: (out * 0, lse)),
    "LSE in base 2": unfused_with(finish=lambda out, lse: (out, lse / math.log(2))),
    "LSE of the maximum alone": unfused_with(finish=lambda out, lse: (out, lse - 1e-3)),
    "NaN": unfused_with(finish=lambda out, lse: (out / 0 * 0, lse)),
    "one NaN": unfused_with(
        finish=lambda out, lse: (out.index_fill(2, torch.tensor([0]), math.nan), lse)
    ),
    "raises": raises,
    "the first head alone": first_head,
    "out in fp32": in_fp32,
    "writes to q": writes,
}
