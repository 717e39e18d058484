"""Faults of masks: alignment, sliding windows, lists of tiles, documents."""

from __future__ import annotations

from attncheck.faults.fault import Fault, decode, flash1, flash2, ideal, varlen

__all__ = ["BLOCK_MASK", "DOCUMENTS", "MASK_ALIGNMENT", "SLIDING_WINDOW"]

MASK_ALIGNMENT = (
    Fault(
        id="causal-top-left-when-rect",
        summary="a causal mask that is to end at the last key begins at the first one",
        when="causal, with other numbers of rows than of keys",
        seen="rows that see other keys, in O and LSE alike; nothing where the lengths agree",
        reports=(
            "Dao-AILab/flash-attention#282 #402 #436 #517 NVIDIA/cutlass#2336 jax-ml/jax#24491 "
            "gittensor-ai-lab/sparkinfer#3"
        ),
        named=("mask-top-left",),
        ideal=ideal(model="mask-top-left"),
        triton=varlen("""
            -    diagonal = kv - query
            +    diagonal = 0
             if CAUSAL:

            -    diagonal = kv - query
            +    diagonal = 0
             return diagonal
        """),
    ),
    Fault(
        id="causal-strict-drops-diagonal",
        summary="a row does not see its own key: > in place of ≥",
        when="causal",
        seen="a first row of nothing, then errors as one over the number of keys seen",
        reports="flashinfer-ai/flashinfer#348",
        named=("mask-one-key-narrower",),
        ideal=ideal(model="mask-one-key-narrower"),
        triton=varlen("""
            -seen_by_first = tl.maximum(0, tl.minimum(kv, first_row + 1 + diagonal))
            +seen_by_first = tl.maximum(0, tl.minimum(kv, first_row + diagonal))

            -seen = seen & (keys[None, :] <= rows[:, None] + diagonal)
            +seen = seen & (keys[None, :] < rows[:, None] + diagonal)

            -p = tl.where(keys[None, :] <= rows[:, None] + diagonal, p, 0.0)
            +p = tl.where(keys[None, :] < rows[:, None] + diagonal, p, 0.0)

            -p = tl.where(keys[:, None] <= rows[None, :] + diagonal, p, 0.0)
            +p = tl.where(keys[:, None] < rows[None, :] + diagonal, p, 0.0)
        """),
    ),
    Fault(
        id="causal-one-future-key",
        summary="a row sees the key after its own",
        when="causal",
        seen="errors as one over the number of keys seen; the first rows are the worst",
        reports="flashinfer-ai/flashinfer#348 huggingface/transformers#39408",
        named=("mask-one-key-wider",),
        ideal=ideal(model="mask-one-key-wider"),
        triton=varlen("""
             end = kv
            -diagonal = 0
            +diagonal = 1  # of row i the last key that causal shows is i + diagonal
             if BOTTOM_RIGHT:
            -    diagonal = kv - query
            +    diagonal = kv - query + 1

            -diagonal = 0
            +diagonal = 1
             if BOTTOM_RIGHT:
            -    diagonal = kv - query
            +    diagonal = kv - query + 1
             return diagonal
        """),
    ),
    Fault(
        id="causal-loop-bound-floor",
        summary="the loop over tiles of keys ends with the last whole one below the diagonal",
        when="causal, where the diagonal leaves a block of rows inside a tile of keys",
        seen="a part of a tile of keys is missing from every row of the block",
        reports="Dao-AILab/flash-attention#1778 #436",
        named=("last-tile-dropped",),
        ideal=ideal("""
            +if self.problem.mask.name in {"causal", "causal_bottom_right"}:
            +    block_query, block_kv = self.tile.block_query, self.tile.block_kv
            +    row = torch.arange(rows.start, rows.stop, device=self.device)
            +    end = (row // block_query + 1) * block_query
            +    if self.problem.mask.name == "causal_bottom_right":
            +        end = end + self.problem.kv - self.problem.query
            +    seen = seen & (keys.start < end // block_kv * block_kv)[:, None]
             if bool(seen.any()):
        """),
        triton=varlen("""
            -    end = tl.minimum(kv, first_row + BLOCK_Q + diagonal)
            +    end = tl.minimum(kv, (first_row + BLOCK_Q + diagonal) // BLOCK_K * BLOCK_K)  # below 0 where no row sees a key
             whole = 0
        """),
    ),
    Fault(
        id="bwd-ignores-causal-flag",
        summary="the backward is causal whatever the call says",
        when="gradients without a causal mask",
        seen="a right O, and dQ, dK and dV that are wrong throughout",
        reports="triton-lang/triton#4541 #5660 #4174 #7216",
        named=("backward-causal-always",),
        ideal=ideal(model="backward-causal-always"),
        triton=varlen("""
            -"IDENTITY": self.score is None, "CAUSAL": self.causal != "",
            +"IDENTITY": self.score is None, "CAUSAL": True,
        """),
    ),
    Fault(
        id="mask-dropped-when-divisible",
        summary="no mask where both lengths are whole tiles: the path without bounds has none",
        when="rows and keys that fill their tiles, and a mask that hides something",
        seen="rows that see what their tiles hold",
        reports="bledden/triton-msl#7",
        # Where every tile is visited and all are whole it is the mask that is ignored.
        named=("mask-dropped-in-whole-tiles", "mask-ignored"),
        ideal=ideal("""
             seen = self.visible(self.mask, at) & inside
            +if not (problem.query % self.tile.block_query or problem.kv % self.tile.block_kv):
            +    seen = torch.ones_like(seen)
        """),
        triton=flash2("""
             partial = _may_hide(of_run, start, kv, LISTED, FREE, BLOCK_K)
            +partial = partial & ((query % BLOCK_Q != 0) | (kv % BLOCK_K != 0))
        """),
    ),
    Fault(
        id="causal-flag-ignored",
        summary="the causal flag is taken and has no effect",
        when="causal",
        seen="what the call without the flag gives, bit by bit",
        reports="jax-ml/jax#19237",
        named=("mask-ignored",),
        ideal=ideal(model="mask-ignored"),
        triton=varlen("""
            -"IDENTITY": self.score is None, "CAUSAL": self.causal != "",
            +"IDENTITY": self.score is None, "CAUSAL": False,

            -CAUSAL=causal != "", BOTTOM_RIGHT=causal == "bottom_right", LOCAL=places is None,
            +CAUSAL=False, BOTTOM_RIGHT=causal == "bottom_right", LOCAL=places is None,
        """),
    ),
    Fault(
        id="decode-offset-missing-in-mask-mod",
        summary="a mask of a few late rows is asked about rows counted from 0",
        when="decoding: fewer rows than keys, and a mask that reads the row",
        seen="rows that see what the first rows of the whole sequence would",
        reports="pytorch/pytorch#163314 meta-pytorch/gpt-fast#233",
        named=("query-offset-missing", "mask-top-left"),
        ideal=ideal(model="query-offset-missing"),
        triton=decode("""
            -mod = key.problem.mask_mod(key.device)
            +mask = key.problem.mask
            +if mask.name == "causal_bottom_right":
            +    mask = type(mask).of("causal")
            +if mask.name == "offset":
            +    mask = mask.parts[0]
            +mod = key.problem.replace(mask=mask).mask_mod(key.device)
        """),
    ),
)

SLIDING_WINDOW = (
    Fault(
        id="window-left-off-by-one",
        summary="a window of w keys is one of w + 1: its left end is taken in",
        when="any window that does not reach beyond the first key",
        seen="errors as one over the window, in O and LSE alike",
        reports=(
            "huggingface/transformers#39408 #29176 #29623 zml/zml#763 "
            "Dao-AILab/flash-attention#1133"
        ),
        named=("window-one-wider",),
        ideal=ideal(model="window-one-wider"),
        triton=flash2("""
            +if problem.mask.name == "sliding_window":
            +    window = problem.mask.values["window"] + 1
            +    problem = problem.replace(mask=type(problem.mask).of("sliding_window", window=window))
             forward = self.forward()
             mask = to_triton(mask_expression(problem, device))

             device, problem = inputs.device.type, inputs.problem
            +if problem.mask.name == "sliding_window":
            +    window = problem.mask.values["window"] + 1
            +    problem = problem.replace(mask=type(problem.mask).of("sliding_window", window=window))
        """),
    ),
    Fault(
        id="window-loop-start-ceil",
        summary="the loop begins with the first tile that is whole in the window",
        when="a window that begins inside a tile of keys",
        seen="up to a tile of each row's oldest keys is missing",
        reports="vllm-project/vllm#24390 #44584",
        named=("first-tile-dropped",),
        ideal=ideal("""
            +if self.problem.mask.name == "sliding_window":
            +    block_query, block_kv = self.tile.block_query, self.tile.block_kv
            +    row = torch.arange(rows.start, rows.stop, device=self.device)
            +    of_block = row // block_query * block_query
            +    start = (of_block - self.problem.mask.values["window"] + 1).clamp(min=0)
            +    begin = (start + block_kv - 1) // block_kv * block_kv
            +    seen = seen & (keys.start >= begin)[:, None]
             if bool(seen.any()):
        """),
        triton=flash2("""
            +start = (some.argmax(-1) + block_kv - 1) // block_kv
            +listed = torch.arange(shape[-2], device=some.device) >= start[..., None]
            +kinds = kinds * listed
             strips.append(kinds)
        """),
    ),
    Fault(
        id="window-garbage-v-outside",
        summary="scores outside the window are masked, values there are multiplied by weights of 0",
        when="keys that the mask hides hold what is not finite: freed or never written pages",
        seen="NaN in every row whose tile holds one",
        reports="vllm-project/vllm#30887",
        named=("hidden-values-leak",),
        ideal=ideal("""
            -return self.product(p, v) if self.v_is_finite else weighted(self.product, p, seen, v)
            +return self.product(p, v)
        """),
        triton=flash2("""
             _forward[grid](*given, **options, CAREFUL=False, num_stages=launch.stages, **most)
            -if not launch.free and needs_careful_launch(again):
            +if False:
        """),
    ),
    Fault(
        id="bwd-window-ignored",
        summary="the backward is causal and has no window",
        when="gradients with a window",
        seen="a right O, and dQ, dK and dV that are wrong throughout",
        reports="Dao-AILab/flash-attention#2199 #580 triton-lang/triton#4541",
        named=("backward-window-ignored",),
        ideal=ideal(model="backward-window-ignored"),
        triton=flash2("""
             device, problem = inputs.device.type, inputs.problem
            +if problem.mask.name == "sliding_window":
            +    problem = problem.replace(mask=type(problem.mask).of("causal"))
             identity = problem.score == library.NONE
        """),
    ),
)

BLOCK_MASK = (
    Fault(
        id="blockmask-partial-as-full",
        summary="a tile of which more than half is visible counts as full: its mask is not applied",
        when="tiles with a few hidden places",
        seen="hidden keys count",
        reports="pytorch/pytorch#143534 #141126",
        named=("tile-mostly-seen-as-full", "mask-one-key-wider", "tail-unmasked"),
        ideal=ideal("""
            -seen = self.visible(self.mask, at) & inside
            +seen = (self.visible(self.mask, at) & inside).expand(problem.batch, problem.heads, len(row), len(key))
            +tiles = seen.unflatten(2, (-1, self.tile.block_query))
            +full = tiles.double().mean((-2, -1), keepdim=True) > 0.5
            +seen = (tiles | full).flatten(2, 3)
        """),
        triton=flash2("""
            +mostly = pad(every, beyond).view(shape).double().mean(-1) > 0.5
            +kinds = pad(some, beyond).view(shape).amax(-1) + mostly.byte()
             strips.append(kinds)
        """),
    ),
    Fault(
        id="blockmask-wrong-block-size",
        summary="the list is of tiles twice as wide as those that the kernel walks over",
        when="a mask that hides something, and several tiles of keys",
        seen="listed tiles are taken for others; the later half of the keys is never visited",
        reports="kuleshov-group/bd3lms#23 pytorch/pytorch#182593 #133562",
        # The later half that is never visited is the last of two splits, too.
        named=("last-tile-dropped", "tile-skipped", "split-dropped"),
        ideal=ideal("""
            -if bool(seen.any()):
            +listed = self.problem.mask == library.FULL
            +listed |= bool(self.seen(rows, slice(2 * keys.start, 2 * keys.stop))[0].any())
            +if listed and bool(seen.any()):
        """),
        triton=flash2("""
            -block_kv=block_kv,
            +block_kv=block_kv if by_keys else 2 * block_kv,
             device=key.device,
        """),
    ),
    Fault(
        id="blockmask-larger-than-seq",
        summary="a list made for a longer sequence is used, and nobody looks at its length",
        when="lengths that end within a tile that is full in the longer sequence",
        seen="what lies behind the last key counts",
        reports="pytorch/pytorch#136232 #141625 meta-pytorch/attention-gym#31",
        named=("full-tile-beyond-the-end", "tail-unmasked"),
        ideal=ideal("""
            -seen = self.visible(self.mask, at) & inside
            +seen = self.visible(self.mask, at).expand(problem.batch, problem.heads, len(row), len(key))
            +tiles = seen.unflatten(2, (-1, self.tile.block_query))
            +full = tiles.all(-1, keepdim=True).all(-2, keepdim=True)
            +full = full & (self.problem.mask != library.FULL)
            +seen = (tiles & (inside[:, :, None] | full)).flatten(2, 3)
        """),
        triton=flash2("""
            -key.problem.mask_mod(key.device),
            -key.dimensions,
            +(longer := _longer(key.problem, block_query, block_kv)).mask_mod(key.device),
            +longer.dimensions,

            +def _longer(problem, block_query, block_kv):
            +    plain = {"causal", "sliding_window", "prefix_lm", "padding", "and", "or", "not"}
            +    if any(part.name not in plain for part in problem.mask.walk()):
            +        return problem
            +    rows, keys = -problem.query % block_query, -problem.kv % block_kv
            +    return problem.replace(query=problem.query + rows, kv=problem.kv + keys)
        """),
    ),
)

DOCUMENTS = (
    Fault(
        id="doc-mask-ignored",
        summary="packed documents attend to one another",
        when="two documents or more in a sequence",
        seen="rows are averages over all documents; a model learns all the same",
        reports=(
            "huggingface/transformers#46634 axolotl-ai-cloud/axolotl#3796 "
            "fla-org/flash-linear-attention#842"
        ),
        named=("document-ignored",),
        ideal=ideal(model="document-ignored"),
        triton=varlen("""
             assert found is not None, "asked of what it takes"
            -return found
            +whole = [[tuple(map(sum, zip(*parts, strict=True)))] for parts in found.segments]
            +return replace(found, segments=whole)
        """),
    ),
    Fault(
        id="lse-delta-padding-nan",
        summary="LSE and delta are padded with memory that nobody wrote, and read without a mask",
        when="gradients where the rows are no whole number of blocks",
        seen="NaN in dK and dV, if the memory holds it",
        reports="tile-ai/tilelang#2461 fla-org/flash-linear-attention#892",
        # Memory that nobody wrote holds something else another time, on a GPU mostly.
        named=("backward-rows-behind", "not-the-same-again"),
        ideal=ideal("""
            -self.lse = padded(outputs.lse[..., None] * self.steps.backward_lse, rows)[..., 0]
            +behind = (*outputs.lse.shape[:2], -self.problem.query % rows)
            +self.lse = torch.cat((outputs.lse, outputs.lse.new_empty(behind)), 2)

            -seen = seen & there
        """),
        triton=flash2("""
            -dk, dv = _by_keys(known, keys, by_keys, dq32)
            +behind = (*lse.shape[:2], -query % keys.block_query)
            +longer = [torch.cat((x, x.new_empty(behind)), 2) for x in (lse, delta)]
            +padded = _Known(q, k, v, dout, *longer, scale, mask, score, slope)
            +dk, dv = _by_keys(padded, keys, by_keys, dq32)

            -first = (b64 * heads + h64) * query
            +first = (b64 * heads + h64) * (tl.cdiv(query, BLOCK_Q) * BLOCK_Q)

            -lse = loaded_lse(lse_ptr + first, rows, query, IDENTITY)
            -delta = loaded_rows(delta_ptr + first, rows, query)
            +lse = loaded_lse(lse_ptr + first, rows, start + BLOCK_Q, IDENTITY)
            +delta = loaded_rows(delta_ptr + first, rows, start + BLOCK_Q)
             x = tl.dot(k_block, tl.trans(q_block), input_precision=PRECISION) * factor

            -x, partial, b, h, rows[None, :], keys[:, None], query, kv, lse[None, :],
            +x, partial, b, h, rows[None, :], keys[:, None], start + BLOCK_Q, kv, lse[None, :],
        """),
    ),
    Fault(
        id="prefix-lost-in-causal-tile-skip",
        summary="tiles above the diagonal are skipped, though a prefix is visible to all rows",
        when="a prefix longer than a block of rows",
        seen="the first rows see a part of the prefix alone",
        reports="vllm-project/vllm#47217 #40106 huggingface/transformers#39389",
        named=("prefix-ignored", "tiles-above-diagonal-skipped", "last-tile-dropped"),
        ideal=ideal("""
             seen = self.visible(self.mask, at) & inside
            +if any(part.name == "prefix_lm" for part in problem.mask.walk()):
            +    size = self.tile.block_kv
            +    seen = seen & (keys.start < (row // size + 1) * size)[:, None]
        """),
        triton=flash1("""
            -return mask.name in {"causal", "sliding_window"}
            +return mask.name in {"causal", "sliding_window", "prefix_lm"}
        """),
    ),
    Fault(
        id="prefix-boundary-off-by-one",
        summary="the prefix is one key shorter than it should be",
        when="a prefix, for rows before its last key",
        seen="about one key in as many as a row sees",
        reports="bigscience-workshop/Megatron-DeepSpeed#167",
        named=("prefix-one-narrower",),
        ideal=ideal(model="prefix-one-narrower"),
        triton=flash1("""
            -mod = key.problem.mask_mod(key.device)
            +mod = _read(key.problem).mask_mod(key.device)

            +def _read(problem):
            +    def shorter(spec):
            +        less = spec.name == "prefix_lm"
            +        given = tuple((n, max(0, value - 1) if less else value) for n, value in spec.arguments)
            +        return type(spec)(spec.name, given, tuple(shorter(part) for part in spec.parts))
            +    return problem.replace(mask=shorter(problem.mask))
        """),
    ),
    Fault(
        id="pad-tokens-treated-as-prefix",
        summary="padding has the token type of the prefix, and all rows see it",
        when="a prefix and padding in one mask",
        seen="what stands in padding reaches out",
        reports="huggingface/transformers#30993",
        named=("padding-as-prefix",),
        ideal=ideal(model="padding-as-prefix"),
        triton=flash1("""
            -mod = key.problem.mask_mod(key.device)
            +mod = _read(key.problem).mask_mod(key.device)

            +def _read(problem):
            +    from attncheck.mods.spec import Spec
            +    mask = problem.mask
            +    parts = {part.name: part for part in mask.walk()}
            +    if {"prefix_lm", "padding"} <= set(parts):
            +        mask = Spec.of("or", mask, Spec.of("not", parts["padding"]))
            +    return problem.replace(mask=mask)
        """),
    ),
)
