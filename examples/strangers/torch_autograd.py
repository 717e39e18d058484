"""FlashAttention-2 in torch alone, tile by tile, with a backward of its own."""

import torch

TILE_Q = 64
TILE_K = 48


def _hidden(rows, keys, start_q, start_k, device):
    """Keys after a row's own, of one tile."""
    i = torch.arange(start_q, start_q + rows, device=device)[:, None]
    j = torch.arange(start_k, start_k + keys, device=device)[None, :]
    return j > i


class TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, scale):
        batch, heads, n_q, _ = q.shape
        out = torch.zeros(batch, heads, n_q, v.shape[3], dtype=torch.float32, device=q.device)
        lse = torch.full((batch, heads, n_q), -torch.inf, dtype=torch.float32, device=q.device)
        for i in range(0, n_q, TILE_Q):
            q_i = q[:, :, i : i + TILE_Q].float() * scale
            m_i = torch.full(q_i.shape[:3], -torch.inf, device=q.device)
            l_i = torch.zeros(q_i.shape[:3], device=q.device)
            o_i = torch.zeros(*q_i.shape[:3], v.shape[3], device=q.device)
            for j in range(0, k.shape[2], TILE_K):
                if causal and j > i + TILE_Q - 1:
                    break
                k_j = k[:, :, j : j + TILE_K].float()
                v_j = v[:, :, j : j + TILE_K].float()
                s = q_i @ k_j.mT
                if causal:
                    mask = _hidden(s.shape[2], s.shape[3], i, j, q.device)
                    s = s.masked_fill(mask, -torch.inf)
                m_new = torch.maximum(m_i, s.amax(-1))
                m_ref = torch.where(m_new == -torch.inf, 0.0, m_new)
                p = torch.exp(s - m_ref[..., None])
                alpha = torch.exp(m_i - m_ref)
                l_i = l_i * alpha + p.sum(-1)
                o_i = o_i * alpha[..., None] + p @ v_j
                m_i = m_new
            seen = l_i > 0
            l_safe = torch.where(seen, l_i, 1.0)
            out[:, :, i : i + TILE_Q] = o_i / l_safe[..., None]
            lse[:, :, i : i + TILE_Q] = torch.where(seen, m_i + torch.log(l_safe), -torch.inf)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.scale = causal, scale
        return out, lse

    @staticmethod
    def backward(ctx, d_out, d_lse):
        q, k, v, out, lse = ctx.saved_tensors
        scale = ctx.scale
        d_out = d_out.float()
        delta = (d_out * out.float()).sum(-1)
        if d_lse is not None:
            delta = delta - d_lse
        dq = torch.zeros_like(q, dtype=torch.float32)
        dk = torch.zeros_like(k, dtype=torch.float32)
        dv = torch.zeros_like(v, dtype=torch.float32)
        for j in range(0, k.shape[2], TILE_K):
            k_j = k[:, :, j : j + TILE_K].float()
            v_j = v[:, :, j : j + TILE_K].float()
            dk_j = torch.zeros_like(k_j)
            dv_j = torch.zeros_like(v_j)
            for i in range(0, q.shape[2], TILE_Q):
                if ctx.causal and j > i + TILE_Q - 1:
                    continue
                q_i = q[:, :, i : i + TILE_Q].float()
                do_i = d_out[:, :, i : i + TILE_Q]
                lse_i = lse[:, :, i : i + TILE_Q]
                lse_i = torch.where(lse_i == -torch.inf, torch.inf, lse_i)
                s = q_i @ k_j.mT * scale
                if ctx.causal:
                    mask = _hidden(s.shape[2], s.shape[3], i, j, q.device)
                    s = s.masked_fill(mask, -torch.inf)
                p = torch.exp(s - lse_i[..., None])
                dv_j += p.mT @ do_i
                dp = do_i @ v_j.mT
                ds = p * (dp - delta[:, :, i : i + TILE_Q, None])
                dq[:, :, i : i + TILE_Q] += ds @ k_j * scale
                dk_j += ds.mT @ q_i * scale
            dk[:, :, j : j + TILE_K] = dk_j
            dv[:, :, j : j + TILE_K] = dv_j
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def attention(query, key, value, is_causal=False, scale=None, enable_gqa=False, return_lse=False):
    """Out, and LSE on request; differentiable, and called like torch's SDPA."""
    group = query.shape[1] // key.shape[1]
    if group > 1:
        if not enable_gqa:
            raise ValueError("fewer key heads than query heads: say enable_gqa=True")
        key = key.repeat_interleave(group, dim=1)
        value = value.repeat_interleave(group, dim=1)
    scale = query.shape[3] ** -0.5 if scale is None else scale
    out, lse = TiledAttention.apply(query, key, value, is_causal, scale)
    return (out, lse) if return_lse else out
