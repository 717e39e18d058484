"""Attention in float64 by torch and autograd: the reference for kernels and oracles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Attention:
    """The results and intermediate values of attention; autograd can differentiate them all."""

    x: torch.Tensor  # scores before the score mod, ``(batch, heads, query, kv)``
    z: torch.Tensor  # scores after the score mod, including those of hidden keys
    seen: torch.Tensor  # bool: whether a row sees a key
    p: torch.Tensor  # weights; with a sink, its weight is behind those of the keys
    out: torch.Tensor  # ``(batch, heads, query, value_dim)``; 0 in rows without keys and sink
    lse: torch.Tensor  # ``(batch, heads, query)``; −∞ in these rows


def indices(*sizes: int) -> list[torch.Tensor]:
    """Return b, h, q_idx and kv_idx, each along its own axis."""
    shapes = torch.eye(4, dtype=torch.int64) * (torch.tensor(sizes) - 1) + 1
    return [torch.arange(n).view(*shape) for n, shape in zip(sizes, shapes.tolist(), strict=True)]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None = None,
    *,
    scale: float,
    mask: Callable[..., torch.Tensor],
    score: Callable[..., torch.Tensor] | None = None,
) -> Attention:
    """Compute attention of q ``(batch, heads, query, dim)``; k and v may have fewer heads."""
    group, kv = q.shape[1] // k.shape[1], k.shape[2]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    x = scale * (q @ k.mT)
    at = indices(*x.shape)
    z = x if score is None else score(x, *at)
    seen = mask(*at).expand(x.shape)
    scores = z.masked_fill(~seen, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink[:, None, None].expand(*x.shape[:3], 1)], -1)
    dead = scores.detach().isneginf().all(-1)
    safe = scores.masked_fill(dead[..., None], 0.0)
    p = safe.softmax(-1).masked_fill(dead[..., None], 0.0)
    lse = safe.logsumexp(-1).masked_fill(dead, -torch.inf)
    return Attention(x, z, seen, p, p[..., :kv] @ v, lse)


def gradients(
    of: Attention, leaves: dict[str, torch.Tensor], dout, dlse
) -> dict[str, torch.Tensor]:
    """Return the gradients of the loss Σ out·dout + Σ LSE·dLSE by name: ``dq`` for leaf ``q``."""
    dlse = dlse.masked_fill(of.lse.isneginf(), 0.0)
    grads = torch.autograd.grad((of.out, of.lse), list(leaves.values()), (dout, dlse))
    return {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
