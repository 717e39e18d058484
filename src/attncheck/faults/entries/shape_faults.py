"""Faults of shapes: the last tile, degenerate lengths, head dims, integer overflow."""

from __future__ import annotations

from attncheck.faults.fault import Edit, Fault, Host

__all__ = [
    "CONTIGUOUS",
    "FAULTS",
    "FAULTS_of_degenerate_shapes",
    "FAULTS_of_head_dim",
    "FAULTS_of_integer_overflow",
    "edits_of_reads",
]


CONTIGUOUS = """\
def _strides(tensor):
    _, heads, length, dim = tensor.shape
    return heads * length * dim, length * dim, dim, 1
"""
"""Text of ``_strides(tensor)``: those of a tensor that is contiguous."""

_READ = '''def _read(tensor, strides, columns=0, kept=lambda at: at):
    """What lies where these strides lead, in fp32; 0 outside its memory."""
    at = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for axis, stride in enumerate(strides):
        length = columns if axis == 3 and columns else tensor.shape[axis]
        steps = torch.arange(length, device=tensor.device) * stride
        at = at + kept(steps).view([-1 if each == axis else 1 for each in range(4)])
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    memory = tensor.as_strided((size,), (1,), 0)
    at = at + tensor.storage_offset()
    return torch.where((at >= 0) & (at < size), memory[at.clamp(0, size - 1)].float(), 0.0)


{text}

'''
_ATTENTION = "subjects.ideal_attention"
_BEFORE = "def _in_nats(problem: Problem)"


def edits_of_reads(text: str = "", **reads: str) -> tuple[Edit, ...]:
    """The ideal kernel's q, k or v are what other offsets lead to.

    Args:
        text: Python that ``reads`` need.
        reads: By name what each is: an expression with ``_read(tensor, strides, columns, kept)``.
    """
    return (
        Edit(module=_ATTENTION, old=_BEFORE, new=_READ.format(text=text) + _BEFORE),
        *(
            Edit(module=_ATTENTION, old=f"inputs.{name}.float()", new=read)
            for name, read in reads.items()
        ),
    )


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
                        module="kernels.tile",
                        old=" & (rows < query) & (keys < kv)",
                        new=" & (rows < query)",
                    ),
                    # What is added in memory would be added beyond it.
                    Edit(
                        module="kernels.flash2_backward",
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
                        module="kernels.varlen_backward",
                        old="    delta = loaded_rows(delta_ptr + of_rows, rows, query)\n\n"
                        "    ragged = first_row",
                        new="""    heads = tl.num_programs(1)
    at = (query_start + 128 * document + rows) * heads + h
    delta = tl.load(delta_ptr + at, mask=rows < query, other=0.0)

    ragged = first_row""",
                    ),
                    Edit(
                        module="kernels.varlen_backward",
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
                        module="kernels.tile",
                        old="    dx = p * (dp - delta)\n",
                        new="    dx = tl.where(p == 0.0, 0.0, p * (dp - delta))\n",
                    ),
                    Edit(
                        module="kernels.tile",
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


_IDEAL = "subjects.ideal_attention"
_WEIGHTS = (
    "        p = self._weights(s, maximum)\n        alpha = self._power(run.maximum, maximum)\n"
)
_LAST = "def _in_nats(problem: Problem) -> bool:\n"

FAULTS_of_degenerate_shapes = (
    Fault(
        id="seqlen-k-zero-uninit",
        category="degenerate shapes",
        summary="a sequence without keys is left before anything is stored",
        when="a sequence or document of no keys beside others",
        seen="out and LSE are what the memory held",
        sources=(
            "Dao-AILab/flash-attention#2470",
            "Dao-AILab/flash-attention#1155",
            "pytorch/pytorch#81077",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module=_IDEAL,
                        old="lse = torch.where(dead, -math.inf, run.maximum * unit + log)\n",
                        new="""lse = torch.where(dead, -math.inf, run.maximum * unit + log)
        left = dead.all(-1, keepdim=True)
        out = torch.where(left[..., None], torch.empty_like(out), out)
        lse = torch.where(left, torch.empty_like(lse), lse)
""",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-varlen",
                edits=(
                    Edit(
                        module="kernels.varlen_forward",
                        old="    kv = tl.load(kv_starts + document + 1) - kv_start\n",
                        new="    kv = tl.load(kv_starts + document + 1) - kv_start\n"
                        "    if kv == 0:\n        return\n",
                    ),
                ),
            ),
        },
        named=("rows-unwritten",),
    ),
    Fault(
        id="one-key-row-slice-nan",
        category="degenerate shapes",
        summary="a tile is done in two halves, and one in which a row sees nothing is not guarded",
        when="one key, or rows whose keys all lie in one half of a tile",
        seen="−∞ − −∞ is NaN in those rows",
        sources=(
            "flashinfer-ai/flashinfer#4401",
            "flashinfer-ai/flashinfer#4451",
            "flashinfer-ai/flashinfer#4452",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module=_IDEAL,
                        old=_WEIGHTS,
                        new="""        half = s.shape[-1] // 2
        own = s.unflatten(-1, (2, half)).amax(-1).repeat_interleave(half, -1)
        c = self.factors.exponent[..., None]
        exp2 = self.kernel.exp2
        p = exp2((s - own) * c) * exp2((own - maximum[..., None]) * c)
        alpha = self._power(run.maximum, maximum)
""",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.tile",
                        old="    p = power(s - shift[:, None], IDENTITY)\n",
                        new="""    halves = tl.reshape(s, [s.shape[0], 2, s.shape[1] // 2])
    own = tl.max(halves, 2)
    parts = power(halves - own[:, :, None], IDENTITY)
    parts = parts * power(own - shift[:, None], IDENTITY)[:, :, None]
    p = tl.reshape(parts, [s.shape[0], s.shape[1]])
""",
                    ),
                ),
            ),
        },
        named=("empty-split-nan",),
    ),
    Fault(
        id="varlen-max-seqlen-one",
        category="degenerate shapes",
        summary="where no document has more than one row, each is taken to have one",
        when="documents of one row, and some of none",
        seen="rows behind an empty document read another document's keys",
        sources=("Dao-AILab/flash-attention#1537",),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module=_IDEAL,
                        old="        self.mask = problem.mask_mod(self.device)\n",
                        new="        self.mask = _a_row_each(problem).mask_mod(self.device)\n",
                    ),
                    Edit(
                        module=_IDEAL,
                        old=_LAST,
                        new="""def _a_row_each(problem):
    def swapped(spec):
        given = spec.values
        rows = given.get("query_lengths", ())
        if rows and max(rows) == 1:
            given["query_lengths"] = [1] * sum(rows) + [0] * (len(rows) - sum(rows))
        return spec.of(spec.name, *map(swapped, spec.parts), **given)

    return problem.replace(mask=swapped(problem.mask))


"""
                        + _LAST,
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-varlen",
                edits=(
                    Edit(
                        module="subjects.varlen",
                        old="    return found\n\n\ndef _alone(",
                        new="""    if max(rows for rows, _ in found.lengths()) > 1:
        return found
    swapped = []
    for parts in found.segments:
        there = sum(rows for rows, _ in parts)
        swapped.append([(int(i < there), keys) for i, (_, keys) in enumerate(parts)])
    return replace(found, segments=swapped)


def _alone(""",
                    ),
                ),
            ),
        },
        named=("empty-documents-not-counted",),
    ),
)


_GRADIENTS = "subjects.ideal_gradients"
_WIDE = """\
def _wide(tensor):
    return _read(tensor, tensor.stride(), 1 << (tensor.shape[3] - 1).bit_length())
"""

FAULTS_of_head_dim = (
    Fault(
        id="headdim-pad-not-masked",
        category="head dim",
        summary="the columns up to a power of two are read from memory, not taken for 0",
        when="a head dim that is no power of two",
        seen="scores with products of other rows in them, NaN, another result each time",
        sources=(
            "turboderp-org/exllamav3#316",
            "vllm-project/vllm#4128",
            "Dao-AILab/flash-attention#1214",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    *edits_of_reads(_WIDE, q="_wide(inputs.q)", k="_wide(inputs.k)"),
                    Edit(
                        module=_GRADIENTS,
                        old="dim=2)[:, :, : problem.query]",
                        new="dim=2)[:, :, : problem.query, : problem.head_dim]",
                    ),
                    Edit(
                        module=_GRADIENTS,
                        old="dk = self.dk[:, :, : problem.kv]",
                        new="dk = self.dk[:, :, : problem.kv, : problem.head_dim]",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash1",
                edits=(
                    Edit(
                        module="kernels.tile",
                        old="mask=(i[:, None] < i_size) & (j[None, :] < j_size),",
                        new="mask=i[:, None] < i_size,",
                    ),
                    Edit(
                        module="kernels.tile",
                        old="mask=(cols[:, None] < head_dim) & (keys[None, :] < kv),",
                        new="mask=keys[None, :] < kv,",
                    ),
                ),
            ),
        },
        named=("head-dim-padding-read", "reads-beside-an-input"),
    ),
    Fault(
        id="dv-ne-d-extent",
        category="head dim",
        summary="the backward reads as many columns of V and dO as q has",
        when="gradients with a value dim that is not the head dim",
        seen="dQ and dK without the columns beyond, or with numbers that are no part of V",
        sources=(
            "XunhaoLai/native-sparse-attention-triton#27",
            "Dao-AILab/flash-attention#2552",
            "Dao-AILab/flash-attention#2368",
            "vllm-project/vllm#40705",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    *edits_of_reads(),
                    Edit(
                        module=_GRADIENTS,
                        old="import Index, Pass\n",
                        new="import Index, Pass, _read\n",
                    ),
                    Edit(
                        module=_GRADIENTS,
                        old="        self.all_finite = all(",
                        new="""\
        dim, width = self.problem.head_dim, 1 << (self.problem.value_dim - 1).bit_length()
        fmt = self.problem.formats.products
        read = [_read(x, x.stride(), min(dim, width)) for x in (inputs.v, inputs.dout)]
        blocks = (self.tile.block_kv, rows)
        self.v_there, self.dout_there = (
            padded(kernel.operand(x, fmt), block) for x, block in zip(read, blocks)
        )
        self.all_finite = all(""",
                    ),
                    Edit(
                        module=_GRADIENTS,
                        old="        v = self.expanded(self.v[:, :, keys])\n"
                        "        dp = self.product(self.dout[:, :, rows], v.mT)\n",
                        new="        v = self.expanded(self.v_there[:, :, keys])\n"
                        "        dp = self.product(self.dout_there[:, :, rows], v.mT)\n",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.flash2_backward",
                        old="dout_row, dout_col, query, value_dim)",
                        new="dout_row, dout_col, query, head_dim)",
                    ),
                    Edit(
                        module="kernels.flash2_backward",
                        old="loaded_keys(v_ptr, v_at, v_col, keys, kv, value_dim, BLOCK_V)",
                        new="loaded_keys(v_ptr, v_at, v_col, keys, kv, head_dim, BLOCK_V)",
                    ),
                ),
            ),
        },
        named=("backward-columns", "reads-beside-an-input"),
    ),
)


_WRAPPED = """\
def _wrapped(at):
    return at.to(torch.int32).to(torch.int64)
"""
_UNLAUNCHED = "        # A grid of more is refused, and nobody asks whether it was.\n"

FAULTS_of_integer_overflow = (
    Fault(
        id="int32-row-offset",
        category="integer overflow",
        summary="a row's number times the stride between rows is a 32-bit integer",
        when="an element that is 2³¹ or more behind the first: a view with a large stride",
        seen="the last rows are others, or the program is stopped",
        sources=(
            "thu-ml/SageAttention#386",
            "thu-ml/SageAttention#387",
            "fla-org/flash-linear-attention#1080",
            "fla-org/flash-linear-attention#1082",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=edits_of_reads(
                    _WRAPPED,
                    **{
                        name: f"_read(inputs.{name}, inputs.{name}.stride(), kept=_wrapped)"
                        for name in "qkv"
                    },
                ),
            ),
            "triton": Host(
                kernel="triton-flash1",
                edits=(
                    Edit(
                        module="kernels.tile",
                        old="pointer + i[:, None].to(tl.int64) * i_stride +",
                        new="pointer + i[:, None] * i_stride +",
                    ),
                    Edit(
                        module="kernels.tile",
                        old="at = keys.to(tl.int64) * row_stride\n",
                        new="at = keys * row_stride\n",
                    ),
                ),
            ),
        },
        named=("offsets-of-32-bits", "far-offsets-wrap"),
    ),
    Fault(
        id="mask-offset-overflow",
        category="integer overflow",
        summary="where a mask or bias is read is a 32-bit integer; of q, k and v it is not",
        when="a mask or bias of 2³¹ numbers or more: 65 536 rows and keys",
        seen="from some row on another row's mask",
        sources=(
            "ggml-org/llama.cpp#23610",
            "ggml-org/llama.cpp#24912",
            "pytorch/pytorch#162588",
        ),
        unplanted="our kernels have it: they compute in 32 bits where a mod reads, so that a "
        "Problem with a bias of 2³¹ numbers is refused",
    ),
    Fault(
        id="grid-z-65535",
        category="integer overflow",
        summary="batch · heads is an axis of the grid that has 65 535 places; no launch, no error",
        when="more sequences and heads than that together",
        seen="what was in the memory of O before",
        sources=(
            "pytorch/pytorch#142228",
            "pytorch/pytorch#146704",
            "pytorch/pytorch#176096",
            "facebookresearch/xformers#845",
            "flashinfer-ai/flashinfer#3125",
            "SandAI-org/MagiAttention#40",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old="        parts = [self._rows(rows) for rows in self.row_blocks()]\n",
                        new=f"""\
{_UNLAUNCHED}        if problem.batch * problem.heads > 65_535:
            shape = (problem.batch, problem.heads, problem.query)
            out = torch.empty((*shape, problem.value_dim), device=self.device)
            lse = torch.empty(shape, device=self.device)
            return Outputs(out.to(problem.formats.output.torch_dtype), lse)
        parts = [self._rows(rows) for rows in self.row_blocks()]
""",
                    ),
                ),
                needs="cuda",
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="subjects.flash",
                        old="_MOST_TOGETHER = 65_535\n",
                        new="_MOST_TOGETHER = 2**31 - 1\n",
                    ),
                    Edit(
                        module="kernels.flash2_forward",
                        old="    again = torch.empty(grid,",
                        new=f"{_UNLAUNCHED[4:]}    if grid[1] > 65_535:\n        return out, lse\n"
                        "    again = torch.empty(grid,",
                    ),
                ),
                needs="cuda",
            ),
        },
        named=("grid-axis-exceeded",),
    ),
)
