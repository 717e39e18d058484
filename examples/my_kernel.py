"""FlashAttention in plain torch, tile by tile: one that is right, and one with a planted fault."""

import math

import torch

BLOCK = 32  # keys of a step


def attention(query, key, value, *, is_causal=False, scale=None, enable_gqa=False):
    """Out and LSE, called like torch's scaled_dot_product_attention."""
    first_hidden = 1 if is_causal else math.inf
    return tiled(query, *heads(query, key, value, enable_gqa), scale, first_hidden)


def sees_the_next_key(query, key, value, *, is_causal=False, scale=None, enable_gqa=False):
    """The same, but a causal row sees one key too many."""
    first_hidden = 2 if is_causal else math.inf
    return tiled(query, *heads(query, key, value, enable_gqa), scale, first_hidden)


def heads(query, key, value, enable_gqa):
    """Each query head with a key head of its own."""
    group = query.shape[1] // key.shape[1]
    if group > 1 and not enable_gqa:
        raise ValueError("fewer key heads than query heads need enable_gqa=True")
    return key.repeat_interleave(group, dim=1).float(), value.repeat_interleave(
        group, dim=1
    ).float()


def tiled(query, key, value, scale, first_hidden):
    """FlashAttention-2: a running maximum and row sum, one tile of keys after the other."""
    scale = query.shape[3] ** -0.5 if scale is None else scale
    maximum = query.new_full(query.shape[:3], -math.inf, dtype=torch.float32)
    total = torch.zeros_like(maximum)
    out = query.new_zeros((*query.shape[:3], value.shape[3]), dtype=torch.float32)
    rows = torch.arange(query.shape[2], device=query.device)
    wide = query.float()  # once: autograd adds up the gradients of all tiles in its dtype
    for columns in torch.arange(key.shape[2], device=query.device).split(BLOCK):
        scores = wide @ key[:, :, columns].mT * scale
        hidden = columns - rows[:, None] >= first_hidden
        scores = scores.masked_fill(hidden, -math.inf)
        # Its gradient is 0 in exact arithmetic, and would only add rounding.
        larger = torch.maximum(maximum, scores.amax(-1)).detach()
        origin = torch.where(larger == -math.inf, 0.0, larger)  # no key was seen yet
        weights = torch.exp(scores - origin[..., None])
        rescale = torch.exp(maximum - origin)
        total = total * rescale + weights.sum(-1)
        rounded = weights.to(query.dtype).float()  # what a tensor core reads
        values = value[:, :, columns]
        lost = ~values.isfinite()  # 0 · NaN is no 0: only who sees it may take it
        out = out * rescale[..., None] + rounded @ values.masked_fill(lost, 0.0)
        out = out.masked_fill((~hidden).float() @ lost.float() > 0, math.nan)
        maximum = larger
    seen = torch.where(total == 0, 1.0, total)
    return (out / seen[..., None]).to(query.dtype), maximum + torch.log(total)
