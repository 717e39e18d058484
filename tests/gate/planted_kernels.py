"""Kernels with one fault each, one for every stage of a gate."""

import math

import torch


def right(query, key, value, *, is_causal=False, scale=None):
    # Hidden keys may be NaN, and 0 · NaN is not 0, neither in out nor in dQ.
    key, value = (each.double().nan_to_num(0.0, 0.0, 0.0) for each in (key, value))
    scores = (query.double() @ key.mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).tril().logical_not()
        scores = scores.masked_fill(hidden, -math.inf)
    return (torch.softmax(scores, -1) @ value).to(query.dtype)


def of_another_dtype(query, key, value, *, is_causal=False, scale=None):
    return right(query, key, value, is_causal=is_causal, scale=scale).double()


def right_in_fp32(query, key, value, *, is_causal=False, scale=None):
    return right(query, key, value, is_causal=is_causal, scale=scale).float()


def sees_the_next_key(query, key, value, *, is_causal=False, scale=None):
    scores = (query.double() @ key.double().mT) * (
        query.shape[-1] ** -0.5 if scale is None else scale
    )
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(1).logical_not()
        scores = scores.masked_fill(hidden, -math.inf)
    return (torch.softmax(scores, -1) @ value.double()).to(query.dtype)


def sees_the_next_key_or_doubles(query, key, value, *, is_causal=False, scale=None):
    """Two faults that no call shows together: one with a mask, the other without."""
    if is_causal:
        return sees_the_next_key(query, key, value, is_causal=True, scale=scale)
    return right(query, key, 2 * value.double(), scale=scale).to(query.dtype)


def reads_as_if_contiguous(query, key, value, *, is_causal=False, scale=None):
    sizes = key.shape[:3].numel() // key.shape[2], key.shape[2], key.shape[3]
    flat = key.as_strided(sizes, (sizes[1] * sizes[2], sizes[2], 1)).reshape(key.shape)
    return right(query, flat, value, is_causal=is_causal, scale=scale)


CALLS = [0]


def nondeterministic(query, key, value, *, is_causal=False, scale=None):
    CALLS[0] += 1
    out = right(query, key, value, is_causal=is_causal, scale=scale)
    return out if CALLS[0] % 2 else torch.nextafter(out, torch.zeros_like(out))


def decode_only(q, k, v, *, softmax_scale=None):
    """Right, for at most 64 rows of all heads that share a key head."""
    group = q.shape[2] // k.shape[2]
    if q.shape[1] * group > 64:
        raise ValueError("at most 64 rows of all heads that share a key head")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    return right(q, k, v, scale=softmax_scale).transpose(1, 2)


def takes_a_scale_of_0_for_none(query, key, value, *, is_causal=False, scale=None):
    return right(query, key, value, is_causal=is_causal, scale=scale or None)


def refuses_everything(query, key, value, *, is_causal=False, scale=None):
    raise NotImplementedError("nothing")
