"""Faults of grouped queries: which heads share a key head, and whose gradients it gets."""

from __future__ import annotations

from attncheck.faults.fault import Edit, Fault, Host

__all__ = ["FAULTS"]

_GRADIENTS, _BY_KEYS = "subjects.ideal_gradients", "kernels.gradients_by_keys"
_EACH_HEAD = """\
        for tile in self._in_order(list(range(tiles.shape[2]))):
            for head in range(problem.group):
                running = self.kernel.gradient_added(running, parts[:, :, head, tile])
"""

FAULTS = (
    Fault(
        id="gqa-interleave-map",
        category="gqa",
        summary="the backward splits a head's number by the number of key heads, not of sharers",
        when="gradients, several key heads, and another number of heads that share one",
        seen="dK and dV have other heads' contributions, some twice and some never",
        sources=("XunhaoLai/native-sparse-attention-triton#27",),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module=_GRADIENTS,
                        old="parts = part.view(problem.batch, problem.kv_heads, problem.group, "
                        "*part.shape[2:])",
                        new="""\
kv_heads = torch.arange(problem.kv_heads, device=part.device)[:, None]
        members = torch.arange(problem.group, device=part.device)
        parts = part[:, (kv_heads * problem.kv_heads + members) % problem.heads]""",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module=_BY_KEYS,
                        old="h = kv_head * group + member",
                        new="h = (kv_head * (heads // group) + member) % heads",
                    ),
                ),
            ),
        },
        named=("group-other-heads",),
    ),
    Fault(
        id="gqa-dkv-not-summed",
        category="gqa",
        summary="heads that share a key head write its dK and dV one over the other",
        when="gradients, and heads that share a key head",
        seen="dK and dV of the last of them",
        sources=("marin-community/levanter#449", "fla-org/flash-linear-attention#384"),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module=_GRADIENTS,
                        old="for head in range(problem.group):",
                        new="for head in (problem.group - 1,):",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module=_BY_KEYS,
                        old="        h = kv_head * group + member\n",
                        new="        h = kv_head * group + member\n"
                        "        dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)\n"
                        "        dv = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)\n",
                    ),
                ),
            ),
        },
        named=("group-last-head",),
    ),
    Fault(
        id="gqa-dkv-sum-low-precision",
        category="gqa",
        summary="dK and dV of each head are rounded to the dtype, and then summed in it",
        when="gradients in 16 bits, the more heads share a key head",
        seen="half as much error again for eight heads, three times for many",
        sources=("xlite-dev/ffpa-attn#301", "NVIDIA/TransformerEngine#821"),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module=_GRADIENTS,
                        old=_EACH_HEAD,
                        new="""\
        dtype = problem.formats.storage.torch_dtype
        for head in range(problem.group):
            own = torch.zeros_like(running)
            for tile in self._in_order(list(range(tiles.shape[2]))):
                own = self.kernel.gradient_added(own, parts[:, :, head, tile])
            running = (running + own.to(dtype).float()).to(dtype).float()
""",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module=_BY_KEYS,
                        old="    for member in range(group):\n",
                        new="    all_dk = dk\n    all_dv = dv\n    for member in range(group):\n"
                        "        dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)\n"
                        "        dv = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)\n",
                    ),
                    Edit(
                        module=_BY_KEYS,
                        old="    # Keys lie one after the other in dK and dV.\n",
                        new="""\
        own_dk = dk.to(dk_ptr.dtype.element_ty).to(tl.float32)
        own_dv = dv.to(dv_ptr.dtype.element_ty).to(tl.float32)
        all_dk = (all_dk + own_dk).to(dk_ptr.dtype.element_ty).to(tl.float32)
        all_dv = (all_dv + own_dv).to(dv_ptr.dtype.element_ty).to(tl.float32)
    dk = all_dk
    dv = all_dv
    # Keys lie one after the other in dK and dV.
""",
                    ),
                ),
            ),
        },
        discrete=False,
        named=("out-rounded",),
    ),
)
