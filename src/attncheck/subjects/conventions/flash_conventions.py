"""The conventions of flash-attn: ``flash_attn_func``, ``flash_attn_varlen_func``, and paged caches.

Names and meanings are those of flash-attn 2.8 and of its Hopper kernels' interface; for caches also
those of vLLM and FlashInfer if they differ: https://github.com/Dao-AILab/flash-attention,
https://github.com/vllm-project/vllm, https://docs.flashinfer.ai. Caches already hold all keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch

from attncheck.core.mod_spec import NONE, Spec
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Problem
from attncheck.mods.masks import Band, band_of
from attncheck.mods.page_table import draw_page_table
from attncheck.mods.scores import alibi_slopes, sequence_slopes
from attncheck.subjects.conventions import layouts, window_masks
from attncheck.subjects.conventions.call_tensors import (
    inputs_page_table,
    paged_inputs,
    sequence_lengths,
)
from attncheck.subjects.conventions.convention import (
    SINKS,
    WRITTEN_OUT,
    Argument,
    Arguments,
    ComputedArgument,
    Convention,
    Parameter,
    Request,
    must_pass,
    number_tensor,
    pass_if_accepted,
    pass_if_required,
)
from attncheck.subjects.conventions.layouts import Lengths
from attncheck.subjects.conventions.parse import CallArguments, ParsedCall, UnreadableCall

_PARAMETERS = (
    Parameter("dropout", ("dropout_p",), of_result=True),
    Parameter("scale", ("softmax_scale", "scale", "sm_scale")),
    Parameter("causal", ("causal", "is_causal")),
    Parameter("window_size", ("window_size",)),
    Parameter("softcap", ("softcap",)),
    Parameter("alibi_slopes", ("alibi_slopes",)),
    Parameter("deterministic", ("deterministic",), bound=False, matters=False),
    Parameter(
        "return_lse",
        ("return_lse", "return_softmax_lse", "return_attn_probs"),
        by_name=True,
        of_result=True,
    ),
    *(Parameter(f"{name}_descale", (f"{name}_descale",), by_position=False) for name in "qkv"),
    Parameter("sinks", SINKS, by_name=True, by_position=False),
    Parameter("num_splits", ("num_splits",), bound=False, matters=False, by_position=False),
    Parameter("pack_gqa", ("pack_gqa",), bound=False, matters=False, by_position=False),
    Parameter("sm_margin", ("sm_margin",), bound=False, matters=False, by_position=False),
)

# flash-attn's LSE is +∞ unless it splits the keys (``normalize_softmax_lse``), else -∞.
_convention = partial(
    Convention, most_results=4, bottom_right=True, empty_lse=(-math.inf, math.inf)
)

_NO_WINDOW = (-1, -1)

# Supported sequences of score mods: flash-attn applies softcap before slopes.
_SLOPES = ("alibi", "alibi_by_sequence")
_SCORES = {(), ("softcap",), *((one,) for one in _SLOPES), *(("softcap", one) for one in _SLOPES)}
_COMPOSITIONS = ("none", "chain", "offset")  # steps of their own compute nothing


# ------------------------------------------------------------------ shared by all three


def _bind_band(
    request: Request,
    band: Band | None,
    sequences: list[Lengths],
    leads: list[int] | None = None,
    *,
    aligned: bool = False,
) -> Arguments | str:
    """Return arguments for a mask that is a band in each of ``sequences``, or why there are none.

    ``leads`` and ``aligned`` are those of ``band_window``.
    """
    problem = request.problem
    leads = leads or [0] * len(sequences)
    bottom_right = request.bottom_right
    edges = None
    if band is not None:
        edges = window_masks.band_window(
            band, sequences, bottom_right=bottom_right, leads=leads, aligned=aligned
        )
    if edges is None:
        return "neither causal nor window_size makes this mask at these lengths"
    steps = [part for part in problem.score.walk() if part.name not in _COMPOSITIONS]
    # Any other order is another function, such as slopes that are capped.
    if tuple(step.name for step in steps) not in _SCORES:
        return f"neither softcap nor alibi_slopes makes the score mod {problem.score}"
    diagonals = {
        window_masks.diagonal_offset(lengths, bottom_right=bottom_right) + lead
        for lengths, lead in zip(sequences, leads, strict=True)
        if min(lengths)
    }
    # A function declared to be aligned top-left counts distance from that diagonal, too.
    # -slope·|i + diagonal - j| equals the mod's slope·(j - i - rows) for j up to i + diagonal if
    # its rows are the diagonal. With others out would be the same, but LSE would not.
    sloped = any(step.name in _SLOPES for step in steps)
    if sloped and not (edges[1] == 0 and diagonals <= {_later_rows(problem.score)}):
        diagonal = "i + kv - query" if bottom_right else "i"
        return f"alibi_slopes add -slope·|{diagonal} - j|, which is another bias here"
    cap = next((step for step in steps if step.name == "softcap"), None)
    return {
        "dropout": pass_if_accepted(0.0),
        "scale": request.scale(),
        "softcap": must_pass(cap.values["cap"]) if cap else pass_if_required(0.0),
        **_slopes(problem, range(problem.batch)),
        **_descales(problem),
        **_edges(edges, request.able),
        "sinks": request.sinks(),
        "return_lse": request.lse_flag(),
    }


def _later_rows(score: Spec) -> int:
    """Return how many rows later than its own a row's slopes count distance: those of offsets."""
    if score.name == "offset" and any(part.name in _SLOPES for part in score.walk()):
        return int(score.values["rows"]) + _later_rows(score.parts[0])
    return sum(map(_later_rows, score.parts))


def _slopes(problem: Problem, sequences: Iterable[int]) -> Arguments:
    """Return fp32 slopes ``(heads,)``, or ``(parts, heads)`` if sequences have their own."""
    names = {score.name for score in problem.score.walk()}
    if not names & set(_SLOPES):
        return {"alibi_slopes": pass_if_required(None)}
    slopes: Sequence[float | list[float]] = alibi_slopes(problem.heads)
    if "alibi" not in names:
        each = sequence_slopes(problem.batch, problem.heads)
        slopes = [each[b] for b in sequences]
    return {"alibi_slopes": must_pass(number_tensor(slopes, torch.float32))}


def _descales(problem: Problem, sequences: list[int] | None = None) -> Arguments:
    """Return fp32 descales ``(batch, kv_heads)``, or ``(parts, kv_heads)`` of ``sequences``."""
    if not problem.formats.scaled:
        return {f"{name}_descale": pass_if_required(None) for name in "qkv"}

    def descale_argument(name: str) -> ComputedArgument:
        def make(inputs: Inputs) -> torch.Tensor:
            descale: torch.Tensor = getattr(inputs.descale, name)
            return descale if sequences is None else descale[sequences]

        of_parts = "" if sequences is None else f"[{sequences}]"
        return ComputedArgument(make=make, text=f"{name}_descale{of_parts}")

    return {f"{name}_descale": must_pass(descale_argument(name)) for name in "qkv"}


def _edges(edges: tuple[int, int], able: frozenset[str]) -> Arguments:
    """Return the causal flag if it expresses the right edge, and a window if it is needed."""
    left, right = edges
    causal = right == 0 and "causal" in able
    # A window is left out if there is none or the causal flag expresses it.
    if edges == _NO_WINDOW or (causal and left < 0):
        return {"causal": pass_if_accepted(causal), "window_size": pass_if_required(_NO_WINDOW)}
    if right == 0 and left < 0 and "window_size" not in able:
        return {"causal": must_pass(value=True)}  # a reason for refusal: neither is supported
    if causal and left % 2:
        # Callers like transformers give a window the same length on both sides: the flag overrides
        # its right one. Every second window is passed so, the others with 0 on the right.
        edges = left, left
    return {"causal": pass_if_accepted(causal), "window_size": must_pass(edges)}


def _parsed_window(call: CallArguments) -> tuple[int, int]:
    """Return ``(left, right)`` of a call's window; -1 is no limit."""
    # The causal flag overrides the right edge, as in flash-attn.
    left, right = call.value("window_size") or _NO_WINDOW
    left, right = (-1 if side is None else side for side in (left, right))
    return left, 0 if call.value("causal") else right


# ------------------------------------------------------------------ flash_attn_func


def _bind_flash_attn(request: Request) -> Arguments | str:
    """Return arguments for a mask that is a band, perhaps with padding, or why there are none."""
    problem, mask, more = request.problem, request.problem.mask, Arguments()
    if "key_padding" in request.able:
        more["key_padding"] = request.key_padding(seen=True)
        mask = layouts.without_padding(mask)
    bias = request.bias()
    plain = {part.name for part in problem.score.walk()} <= {"offset", *_SLOPES}
    by_slopes = plain and "alibi_slopes" in request.able
    if "bias" in request.able and isinstance(bias, Argument) and not by_slopes:
        more["bias"] = bias
        request = replace(request, problem=problem.replace(score=NONE))
    band = band_of(mask, problem.dimensions)
    arguments = _bind_band(request, band, [(problem.query, problem.kv)])
    return arguments if isinstance(arguments, str) else arguments | more


def _parse_flash_attn(call: CallArguments) -> ParsedCall:
    """Return the computation that a call requests."""
    q, k, v = (call.tensor(name).transpose(1, 2) for name in "qkv")
    query, kv = q.shape[2], k.shape[2]
    left, right = _parsed_window(call)
    return ParsedCall(
        q=q,
        k=k,
        v=v,
        mask=window_masks.window_mask(left, right, query, kv),
        score=window_masks.softcap_and_slopes(call, q.shape[1], kv - query, causal=right == 0),
        scale=call.value("scale"),
        sink=call.value("sinks"),
        returned=call.results(lambda out: out.transpose(1, 2), lambda lse: lse),
    )


FLASH_ATTN = _convention(
    name="flash_attn",
    summary="a function of q, k, v (batch, length, heads, dim), called like flash_attn_func",
    parameters=(*_PARAMETERS, *WRITTEN_OUT),
    layout=layouts.bshd,
    bind=_bind_flash_attn,
    parse=_parse_flash_attn,
    # These names occur only in functions in the style of flash-attn.
    claims_function=lambda names, dotted: (
        bool(names & {"softmax_scale", "window_size", "alibi_slopes"}) or "flash_attn" in dotted
    ),
)


# ------------------------------------------------------------------ flash_attn_varlen_func


def _bind_varlen(request: Request) -> Arguments | str:
    """Return arguments for a mask that is a band in each part, or why there are none."""
    problem = request.problem
    packed = layouts.pack(problem)
    band = band_of(packed.aligned or packed.rest, problem.dimensions) if packed else None
    if packed is None or band is None:
        return f"the mask {problem.mask} is not the same window of keys in each sequence"
    arguments = _bind_band(
        request, band, packed.lengths(), packed.leads(), aligned=packed.aligned is not None
    )
    if isinstance(arguments, str):
        return arguments
    places: Arguments = {}
    for side, name in enumerate("qk"):
        longest = max(lengths[side] for lengths in packed.lengths())
        places[f"cu_seqlens_{name}"] = must_pass(number_tensor(packed.starts(side), torch.int32))
        places[f"max_seqlen_{name}"] = pass_if_accepted(longest)
    parts = [b for b, _, _ in packed.places()]
    return places | arguments | _descales(problem, parts) | _slopes(problem, parts)


def _parse_varlen(call: CallArguments) -> ParsedCall:
    """Return the computation of a call; raises UnreadableCall if cu_seqlens do not fit tensors."""
    q, k, v = (call.tensor(name) for name in "qkv")
    starts = [call.tensor(f"cu_seqlens_{side}").tolist() for side in "qk"]
    if [each[-1] for each in starts] != [len(q), len(k)]:
        raise UnreadableCall("its sequences end elsewhere than its tensors")
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    left, right = _parsed_window(call)
    # The bias is relative to each document's end, which a score mod does not know.
    if starts[0] != starts[1] and call.value("alibi_slopes") is not None:
        raise UnreadableCall("it has slopes, and other numbers of rows than of keys")
    return ParsedCall(
        q=q,
        k=k,
        v=v,
        mask=window_masks.packed_window_mask(left, right, *starts, device=q.device),
        score=window_masks.softcap_and_slopes(call, q.shape[1], 0, causal=right == 0),
        scale=call.value("scale"),
        sink=call.value("sinks"),
        returned=call.results(lambda out: out[0].transpose(0, 1), lambda lse: lse[0]),
    )


VARLEN = _convention(
    name="varlen",
    summary="a function of q, k, v (total, heads, dim) and cu_seqlens_q, cu_seqlens_k, called "
    "like flash_attn_varlen_func",
    parameters=(
        Parameter("cu_seqlens_q", ("cu_seqlens_q",), must=True),
        Parameter("cu_seqlens_k", ("cu_seqlens_k",), must=True),
        Parameter("max_seqlen_q", ("max_seqlen_q",), matters=False),
        Parameter("max_seqlen_k", ("max_seqlen_k",), matters=False),
        *_PARAMETERS,
    ),
    layout=layouts.packed_layout,
    bind=_bind_varlen,
    parse=_parse_varlen,
    claims_function=lambda names, dotted: (
        any(name.startswith("cu_seqlens") for name in names) or "varlen" in dotted
    ),
)


# ------------------------------------------------------------------ caches in pages

_LENGTHS = ("cache_seqlens", "seqlens_k", "seq_lens", "context_lens", "seqused_k", "kv_lens")
_TABLES = ("block_table", "page_table", "block_tables", "page_tables")

# Parameters that a function may require but no Problem can supply, with the reasons.
_WRITES = "keys are in the cache already, and none are written in the same call"
_BLOCK_SCALES = "fp8 has one descale a sequence and key head (k_descale), not one a block or token"
_DECLINED = {
    **dict.fromkeys(("k", "v", "k_new", "v_new", "new_k", "new_v", "knew", "vnew"), _WRITES),
    **dict.fromkeys(("key", "value", "slot_mapping", "append_k", "append_v"), _WRITES),
    **dict.fromkeys(("dropout", "dropout_rate", "p_drop"), "dropout is not checked"),
    **dict.fromkeys(("k_scale", "v_scale", "k_scales", "v_scales"), _BLOCK_SCALES),
    **dict.fromkeys(("k_scale_cache", "v_scale_cache", "kv_scales"), _BLOCK_SCALES),
    **dict.fromkeys(("rotary_cos", "rotary_sin"), "queries and keys are rotated already"),
}


def _bind_paged(request: Request) -> Arguments | str:
    """Return arguments for a Problem with paging, or why there are none."""
    problem = request.problem
    paging, lengths = problem.paging, sequence_lengths(problem)
    assert paging is not None, "the convention has refused what has no pages"
    sequences = [(problem.query, length) for length in lengths]
    aligned = problem.mask.name == "bottom_right"
    mask = problem.mask.parts[0] if aligned else layouts.without_padding(problem.mask)
    band = band_of(mask, problem.dimensions)
    # Checked first because its reason is better: the sequences' lengths are the obstacle.
    edges = band and window_masks.band_window(
        band, sequences, bottom_right=request.bottom_right, aligned=aligned
    )
    if band is not None and edges is None and lengths != (problem.kv,) * problem.batch:
        corner = "last" if request.bottom_right else "first"
        return (
            f"causal and window_size begin at each sequence's own {corner} key: no such thing is "
            f"{problem.mask}, of lengths {list(lengths)}"
        )
    arguments = _bind_band(request, band, sequences, aligned=aligned)
    if isinstance(arguments, str):
        return arguments
    table = ComputedArgument(
        make=lambda inputs: inputs_page_table(inputs).table,
        text="table",
        setup=_cache_setup(problem, lengths),
    )
    return arguments | {
        "cache_seqlens": must_pass(number_tensor(lengths, torch.int32)),
        "block_table": must_pass(table),
        # Parameters of launches are passed only if required, so that defaults are tested too.
        "max_seqlen_k": pass_if_required(max(lengths)),
        "max_seqlen_q": pass_if_required(problem.query),
        "page_size": pass_if_accepted(paging.size),
        "block_size": pass_if_required(paging.size),
    }


def _cache_setup(problem: Problem, lengths: tuple[int, ...]) -> str:
    """Return source of the page ``table`` and of ``paged(x)``, which makes a cache of k or v."""
    paging = problem.paging
    assert paging is not None, "the convention has refused what has no pages"
    # No page is shared: whether sequences share a page does not change the result.
    plan = draw_page_table(paging, problem.batch, problem.kv, lengths, shared=0)
    return "\n".join(
        (
            f"table = torch.tensor({plan.table.tolist()}, dtype=torch.int32, device=q.device)",
            "",
            "def paged(x):",
            f"    shape = ({plan.pages}, {plan.size}, x.shape[1], x.shape[3])",
            '    cache = torch.full(shape, float("nan"), device=x.device).to(x.dtype)',
            f"    for b, length in enumerate({list(lengths)}):",
            f"        for j, page in enumerate(table[b, : -(-length // {plan.size})].tolist()):",
            f"            keys = x[b, :, j * {plan.size} : (j + 1) * {plan.size}].transpose(0, 1)",
            "            cache[page, : len(keys)] = keys",
            "    return cache",
            "",
        )
    )


def _paged_layout(problem: Problem) -> layouts.Layout:
    """Return the layout of q and out, ``(batch, query, heads, dim)``; k and v are in pages."""
    plain = layouts.bshd(problem)
    return replace(plain, texts=dict(plain.texts) | {name: f"paged({name})" for name in "kv"})


def _paged_tensors(
    layout: layouts.Layout, inputs: Inputs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, and contiguous keys and values ``(pages, page_size, kv_heads, dim)``."""
    paged = paged_inputs(inputs)
    return layout.queries(inputs.q), paged.k.transpose(1, 2), paged.v.transpose(1, 2)


def _claims_paged(names: frozenset[str], dotted: str) -> bool:
    """Return whether there are a table and lengths; with ``cu_seqlens`` too it is varlen."""
    del dotted
    packed = any(name.startswith("cu_seqlens") for name in names)
    return not packed and bool(names & set(_TABLES)) and bool(names & set(_LENGTHS))


PAGED = _convention(
    name="paged",
    summary="a function of q (batch, query, heads, dim), caches (pages, page_size, kv_heads, "
    "dim), cache_seqlens and block_table, called like flash_attn_with_kvcache",
    parameters=(
        Parameter("cache_seqlens", _LENGTHS, must=True),
        Parameter("block_table", _TABLES, must=True),
        Parameter(
            "max_seqlen_k",
            ("max_seqlen_k", "max_seq_len", "max_context_len", "max_kv_len"),
            by_name=True,
        ),
        Parameter("max_seqlen_q", ("max_seqlen_q", "max_query_len"), by_name=True),
        Parameter("page_size", ("page_size",), by_name=True),
        Parameter("block_size", ("block_size",), by_name=True),  # optional if it is a tile's
        *_PARAMETERS,
    ),
    layout=_paged_layout,
    bind=_bind_paged,
    claims_function=_claims_paged,
    declined=_DECLINED,
    tensors=_paged_tensors,
    paged=True,
)
