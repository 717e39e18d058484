"""Faults of the last tile: keys that are not there, and what memory holds in their place."""

from __future__ import annotations

from attncheck.faults.fault import Edit, Fault, Host

__all__ = ["FAULTS"]

FAULTS = (
    Fault(
        id="tail-keys-not-masked-exp0",
        category="tail tile",
        summary="keys beyond the last one count with score 0, and with value 0",
        when="keys that do not fill the last tile",
        seen="a row sum that is too large by up to a tile of e^(0 − m): O too small, LSE too large",
        sources=(
            "flashinfer-ai/flashinfer#5090",
            "flashinfer-ai/flashinfer#3716",
            "pytorch/pytorch#159247",
            "jax-ml/jax#27224",
            "66RING/tiny-flash-attention#12",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal",
                        old="        return keys < kv\n",
                        new="        return keys < kv + len(keys)\n",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.tile",
                        old="captured) & (keys < kv)[None, :]",
                        new="captured) & (keys < kv + BLOCK_K)[None, :]",
                    ),
                ),
            ),
        },
        named=("tail-unmasked",),
    ),
    Fault(
        id="bwd-tail-cols-not-masked",
        category="tail tile",
        summary="the backward gives keys beyond the last one the weight e^(0 − LSE)",
        when="gradients, keys that do not fill the last tile, and an LSE below −88",
        seen="∞ · 0: NaN in dQ, and in nothing else",
        sources=(
            "pytorch/pytorch#196678",
            "NVIDIA/cudnn-frontend#1072",
            "ROCm/aiter#3551",
            "Dao-AILab/flash-attention#1947",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_gradients",
                        old="            seen = seen & there\n",
                        new="""            key = torch.arange(keys.start, keys.stop).to(self.device)
            seen = (seen | (key >= self.problem.kv)) & there
""",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.gradient_tile",
                        old=" & (rows < query) & (keys < kv)",
                        new=" & (rows < query)",
                    ),
                    # What is added in memory would be added beyond it.
                    Edit(
                        module="kernels.gradients_by_rows",
                        old="                TERMS(x, p, dp, ",
                        new="                TERMS(x, tl.where(keys[None, :] < kv, p, 0.0), dp, ",
                    ),
                ),
            ),
        },
        named=("backward-tail-nan",),
    ),
    Fault(
        id="kv-loop-floor-div",
        category="tail tile",
        summary="the loop is over whole tiles of keys",
        when="keys that do not fill the last tile",
        seen="the last keys are missing from every row",
        sources=("jax-ml/jax#27224", "66RING/tiny-flash-attention#12"),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old="for start in range(0, self.k.shape[2], size)]",
                        new="for start in range(0, self.problem.kv // size * size, size)]",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-decode",
                edits=(
                    Edit(
                        module="kernels.decode_forward",
                        old="    blocks = tl.cdiv(kv, BLOCK_K)\n",
                        new="    blocks = kv // BLOCK_K\n",
                    ),
                ),
            ),
        },
        named=("last-tile-dropped",),
    ),
    Fault(
        id="padding-tile-constant-mismatch",
        category="tail tile",
        summary="one kernel pads each sequence's rows to 64, the next one reads them padded to 128",
        when="gradients of several sequences in one buffer",
        seen="dQ and dK of the first sequence are right, those of later ones are not",
        sources=("Dao-AILab/flash-attention#2337",),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_gradients",
                        old="        self.delta = padded(delta[..., None], rows)[..., 0]\n",
                        new="""        written = padded(delta[..., None], rows // 2).flatten()
        read = (*delta.shape[:2], -(-delta.shape[2] // rows) * rows)
        more = read[0] * read[1] * read[2] - written.numel()
        self.delta = torch.nn.functional.pad(written, (0, more)).view(read)
""",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-varlen",
                edits=(
                    Edit(
                        module="kernels.varlen_backward",
                        old="        known = _Known(",
                        new="""        rows = delta[0].T.contiguous()
        documents = len(cu_seqlens_q) - 1
        delta = rows.new_zeros((len(rows) + 128 * documents, rows.shape[1]))
        for n in range(documents):
            first, last = int(cu_seqlens_q[n]), int(cu_seqlens_q[n + 1])
            delta[first + 64 * n : last + 64 * n] = rows[first:last]
        known = _Known(""",
                    ),
                    Edit(
                        module="kernels.varlen_backward",
                        old="sink_gradient(sink, lse[None], delta)",
                        new="sink_gradient(sink, lse[None], rows.T.contiguous()[None])",
                    ),
                    Edit(
                        module="kernels.varlen_gradients",
                        old="    delta = loaded_rows(delta_ptr + of_rows, rows, query)\n\n"
                        "    ragged = first_row",
                        new="""    heads = tl.num_programs(1)
    at = (query_start + 128 * document + rows) * heads + h
    delta = tl.load(delta_ptr + at, mask=rows < query, other=0.0)

    ragged = first_row""",
                    ),
                    Edit(
                        module="kernels.varlen_gradients",
                        old="            delta = loaded_rows(delta_ptr + of_rows, rows, query)\n"
                        "            # All of a tile",
                        new="""            heads = tl.num_programs(1) * group
            at = (query_start + 128 * document + rows) * heads + h
            delta = tl.load(delta_ptr + at, mask=rows < query, other=0.0)
            # All of a tile""",
                    ),
                ),
            ),
        },
        named=("delta-padded-otherwise",),
    ),
    Fault(
        id="score-mod-on-oob-nan-bwd",
        category="tail tile",
        summary="the score mod's derivative at hidden scores multiplies what was masked",
        when="gradients with a mask and a score mod whose derivative is not finite there",
        seen="0 · NaN in dQ and dK",
        sources=("pytorch/pytorch#153799",),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_gradients",
                        old="        if self.score:\n            dx = dx * kernel.slope(",
                        new="        dx = torch.where(seen, dx, 0.0)\n"
                        "        if self.score:\n            dx = dx * kernel.slope(",
                    ),
                    Edit(
                        module="subjects.ideal_gradients",
                        old="        # Whatever a hidden key holds, it has no part.\n"
                        "        dx = torch.where(seen, dx, 0.0)\n",
                        new="",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.gradient_tile",
                        old="    dx = p * (dp - delta)\n",
                        new="    dx = tl.where(p == 0.0, 0.0, p * (dp - delta))\n",
                    ),
                    Edit(
                        module="kernels.gradient_tile",
                        old="    return tl.where(p == 0.0, 0.0, dx)\n",
                        new="    return dx\n",
                    ),
                ),
            ),
        },
        named=("slope-of-hidden-scores",),
    ),
    Fault(
        id="nofill-garbage-kv",
        category="tail tile",
        summary="what is loaded beyond the last key is not replaced by zeros",
        when="keys that do not fill the last tile, and NaN in memory behind them",
        seen="0 · NaN in every row",
        sources=("thu-ml/SageAttention#377", "Dao-AILab/flash-attention#1395"),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old="        self.v = padded(kernel.operand(inputs.v.float(), fmt), "
                        "self.tile.block_kv)\n"
                        "        self.v_is_finite = bool(torch.isfinite(self.v).all())\n",
                        new="""        # As it lies in memory; zeros beyond all of it.
        v, beyond = inputs.v, -problem.kv % self.tile.block_kv
        there = v.untyped_storage().nbytes() // v.element_size()
        memory, at = v.as_strided((there,), (1,), 0), v.storage_offset()
        for axis, length in enumerate((*v.shape[:2], problem.kv + beyond, v.shape[3])):
            steps = torch.arange(length, device=v.device) * v.stride(axis)
            at = at + steps.view([-1 if each == axis else 1 for each in range(4)])
        whole_v = torch.where(at < there, memory[at.clamp(max=there - 1)].float(), 0.0)
        self.v = kernel.operand(whole_v, fmt)
        self.v_is_finite = bool(torch.isfinite(inputs.v.float()).all())
""",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-paged",
                edits=(
                    Edit(
                        module="kernels.tile",
                        old="        mask=(cols[:, None] < head_dim) & (keys[None, :] < kv),\n",
                        new="        mask=cols[:, None] < head_dim,\n",
                    ),
                    Edit(
                        module="kernels.tile",
                        old="        mask=(keys[:, None] < kv) & (cols[None, :] < value_dim),\n",
                        new="        mask=cols[None, :] < value_dim,\n",
                    ),
                ),
            ),
        },
        # What lies behind the last value lies beside the input, or is of another page.
        named=("values-behind-keys", "reads-beside-an-input", "page-boundary-leak"),
    ),
)
