"""Conditions of small calls by the plain formula: these tests need no oracle and no Problem."""

import math

import torch

from attncheck.core.conditions import Conditions, Rows


def attention(q, k, v, *, scale=1.0, seen=None, scores=None) -> Conditions:
    """Conditions of attention: q (heads, rows, dim), k and v (heads, kv, dim).

    ``scores`` are those a score mod would have made of q·k.
    """
    q, k, v = (torch.as_tensor(x, dtype=torch.float64) for x in (q, k, v))
    products = scale * (q @ k.mT)
    shape = products.shape
    seen = torch.ones(shape, dtype=torch.bool) if seen is None else seen.expand(shape)
    has_mod = scores is not None
    return _conditions(q, k, v, scale, products, scores if has_mod else products, seen, has_mod)


def softmax(x) -> Conditions:
    """Conditions of a softmax over the scores x (heads, rows, kv)."""
    x = torch.as_tensor(x, dtype=torch.float64)
    seen = torch.ones_like(x, dtype=torch.bool)
    none = x.new_empty((*x.shape[:1], x.shape[1], 0)), x.new_empty((x.shape[0], x.shape[2], 0))
    return _conditions(none[0], none[1], none[1], 1.0, x, x, seen, False)


def _conditions(q, k, v, scale, products, scores, seen, has_mod) -> Conditions:
    alive = seen.any(-1)
    scores = torch.where(seen, scores, 0.0)
    maximum = torch.where(seen, scores, -math.inf).amax(-1)
    maximum = torch.where(alive, maximum, 0.0)
    weights = torch.where(seen, torch.exp(scores - maximum[..., None]), 0.0)
    total = weights.sum(-1)
    lse = torch.where(alive, maximum + torch.log(total), -math.inf)
    share = weights / torch.where(alive, total, 1.0)[..., None]
    is_softmax = v.shape[-1] == 0
    return Conditions(
        rows=Rows(range(scores.shape[0]), torch.arange(scores.shape[1])),
        q=q,
        k=k,
        v=v,
        scale=scale,
        products=torch.where(seen, products, 0.0),
        scores=scores,
        seen=seen,
        maximum=maximum,
        total=total,
        out=share if is_softmax else share @ v,
        lse=lse,
        given_scores=is_softmax,
        has_score_mod=has_mod,
    )


def random_attention(*, heads=2, rows=5, kv=24, dim=8, seen=None) -> Conditions:
    """Conditions of attention to standard normal q, k and v."""
    q, k, v = (normal(heads, n, dim, seed=i) for i, n in enumerate((rows, kv, kv)))
    return attention(q, k, v, scale=dim**-0.5, seen=seen)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Standard normal numbers drawn in fp32, as float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).double()
