"""The calling conventions: native, sdpa, flash_attn, varlen, flex and paged.

Names and meanings are those of flash_attn_func and flash_attn_varlen_func (flash-attn 2.8, and the
interface of its Hopper kernels): https://github.com/Dao-AILab/flash-attention.

Names and meanings are those of flash-attn's ``flash_attn_with_kvcache`` and of vLLM's and
FlashInfer's functions, where these differ: https://github.com/Dao-AILab/flash-attention,
https://github.com/vllm-project/vllm, https://docs.flashinfer.ai. Keys are in the cache already.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention.flex_attention import AuxRequest

from attncheck.capabilities.subject import Subject
from attncheck.conventions.call_tensors import (
    attention_mask,
    inputs_page_table,
    paged_inputs,
    sequence_lengths,
)
from attncheck.conventions.convention import (
    SINKS,
    Argument,
    Arguments,
    Convention,
    ConventionOptions,
    MadeArgument,
    Request,
    needed,
    offered,
    spare,
)
from attncheck.conventions.function_subject import Calling, convention_of
from attncheck.conventions.layouts import (
    Band,
    Lengths,
    PackedProblem,
    band_window,
    bhsd,
    bshd,
    diagonal_offset,
    mask_band,
    pack,
    packed_layout,
)
from attncheck.conventions.render import render_score_mod
from attncheck.core.errors import UnknownName
from attncheck.mods import library
from attncheck.mods.library import FULL
from attncheck.mods.page_table import draw_page_table
from attncheck.mods.scores import alibi_slopes
from attncheck.mods.spec import Spec
from attncheck.subjects.torch_kernels import block_mask, score_mod, uncompiled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.conventions.layouts import Layout
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Problem

__all__ = [
    "CONVENTIONS",
    "EMPTY_LSE",
    "FLASH_ATTN",
    "FLEX",
    "KEYWORDS",
    "LSE_FLAGS",
    "NATIVE",
    "PAGED",
    "SDPA",
    "SIGNS",
    "SPELLINGS",
    "VARLEN",
    "Convention",
    "adopted",
    "convention_named",
    "window_arguments",
]


def _claims(found: object) -> bool:
    return isinstance(found, Subject)


def _unfit(found: object) -> str | None:
    return None if isinstance(found, Subject) else "be a Subject"


def _adopt(found: object, name: str, options: ConventionOptions) -> Subject:
    del name, options  # it has its own
    assert isinstance(found, Subject)
    return found


NATIVE = Convention(
    name="native",
    summary="a Subject of attncheck: it says itself what it takes and how it is called",
    claims=_claims,
    unfit=_unfit,
    adopt=_adopt,
)


SPELLINGS = {
    "softmax_scale": ("softmax_scale", "scale", "sm_scale"),
    "causal": ("causal", "is_causal"),
    "window_size": ("window_size",),
    "softcap": ("softcap",),
    "alibi_slopes": ("alibi_slopes",),
    "dropout_p": ("dropout_p",),
    "q_descale": ("q_descale",),
    "k_descale": ("k_descale",),
    "v_descale": ("v_descale",),
    "sinks": SINKS,
    "return_attn_probs": ("return_lse", "return_softmax_lse", "return_attn_probs"),
}
"""By meaning, the names that functions have for it."""

LSE_FLAGS = frozenset({"return_attn_probs"})
"""Meanings that ask for LSE."""

EMPTY_LSE = (float("-inf"), float("inf"))
"""flash-attn gives +∞ where it does not split the keys (``normalize_softmax_lse``), else -∞."""

_NO_WINDOW = (-1, -1)

# Score mods in the order in which flash-attn applies them, softcap before slopes.
_SCORES = {(), ("softcap",), ("alibi",), ("softcap", "alibi")}


def window_arguments(
    asked: Request,
    seen: Band | None,
    sequences: list[Lengths],
    leads: list[int] | None = None,
) -> Arguments | str:
    """Arguments for a mask that is a band in each of ``sequences``, or why there are none.

    ``leads`` are as ``diagonals.window`` has them.
    """
    problem = asked.problem
    leads = leads or [0] * len(sequences)
    edges = None
    if seen is not None:
        edges = band_window(seen, sequences, bottom_right=asked.bottom_right, leads=leads)
    if edges is None:
        return f"no causal flag or window_size is the mask {problem.mask} at these lengths"
    scores = list(_flat(problem.score))
    if tuple(score.name for score in scores) not in _SCORES:
        return f"neither softcap nor alibi_slopes are the score mod {problem.score}"
    mods = {score.name: score for score in scores}
    offsets = {
        diagonal_offset(lengths, bottom_right=asked.bottom_right) + lead
        for lengths, lead in zip(sequences, leads, strict=True)
        if min(lengths)
    }
    if "alibi" in mods and not _slopes_fit(edges, offsets):
        return "alibi_slopes are -slope·|i + kv - query - j|: not this bias without causal"
    softcap = mods.get("softcap")
    return {
        "dropout_p": offered(0.0),
        "softmax_scale": asked.scale(),
        "softcap": needed(softcap.values["cap"]) if softcap else spare(0.0),
        "alibi_slopes": needed(_slopes(problem)) if "alibi" in mods else spare(None),
        **_descales(problem),
        **_edges(edges, asked.able),
        "sinks": asked.sinks(),
        "return_attn_probs": asked.lse_flag(),
    }


def _edges(edges: tuple[int, int], able: frozenset[str]) -> Arguments:
    """The flag where the right edge is the diagonal and there is one; else the window."""
    left, right = edges
    causal = right == 0 and "causal" in able
    if edges == _NO_WINDOW or (causal and left < 0):
        return {"causal": offered(causal), "window_size": spare(_NO_WINDOW)}
    if right == 0 and left < 0 and "window_size" not in able:
        return {"causal": needed(value=True)}  # it takes neither
    return {"causal": offered(causal), "window_size": needed(edges)}


def _flat(score: Spec) -> Iterator[Spec]:
    if score.name not in {"chain", "none"}:
        yield score
    for part in score.parts:
        yield from _flat(part)


def _slopes_fit(edges: tuple[int, int], offsets: set[int]) -> bool:
    """Whether -slope·|i + offset - j| is alibi's slope·(j - i) wherever a key is seen.

    It is for j up to i + offset, but for slope·offset: out is the same then, and LSE is not.
    """
    return edges[1] == 0 and offsets <= {0}


def _slopes(problem: Problem) -> MadeArgument:
    slopes = alibi_slopes(problem.heads)

    def make(inputs: Inputs) -> torch.Tensor:
        return torch.tensor(slopes, dtype=torch.float32, device=inputs.device)

    return MadeArgument(make=make, text=f"torch.tensor({list(slopes)}, device=q.device)")


def _descales(problem: Problem) -> Arguments:
    """fp32 ``(batch, kv_heads)`` each."""
    if not problem.formats.scaled:
        return {f"{name}_descale": spare(None) for name in "qkv"}

    def made(name: str) -> MadeArgument:
        def make(inputs: Inputs) -> Any:
            return getattr(inputs.descale, name)

        return MadeArgument(make=make, text=f"{name}_descale")

    return {f"{name}_descale": needed(made(name)) for name in "qkv"}


KEYWORDS = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
"""What the convention has besides query, key and value, with torch's meanings."""

_ALIASES = {
    "attn_mask": ("mask",),
    "is_causal": ("causal",),
    "scale": ("sm_scale", "softmax_scale"),
}
# torch's own gives no LSE.
_LSE = {"return_lse": ("return_lse", "return_softmax_lse")}
_SINKS = {"sinks": SINKS}
_OWN = {"attn_mask", "mask", "is_causal", "enable_gqa", "sm_scale"}


def sdpa_arguments(asked: Request) -> Arguments | str:
    """The convention's arguments for a Problem, or why it has none.

    * ``is_causal`` is passed for the causal mask, aligned top-left as in torch; every other mask is
      a boolean ``attn_mask`` (True: seen) that broadcasts to the scores;
    * ``scale`` is left out where it is 1/√head_dim, so that its default is examined too;
    * ``enable_gqa`` is passed where there are fewer key than query heads.
    """
    problem = asked.problem
    if problem.score != library.NONE:
        return "the sdpa convention has no score mod"
    causal = _is_causal(problem, bottom_right=asked.bottom_right)
    flagged = causal and "is_causal" in asked.able
    mask = spare(None) if flagged or problem.mask == library.FULL else _written_out(problem)
    grouped = problem.group > 1
    wanted = {
        "enable_gqa": needed(value=True) if grouped else offered(value=False),
        "scale": asked.scale(),
        "attn_mask": mask,
        "dropout_p": offered(0.0),
        "is_causal": offered(flagged),
        "return_lse": asked.lse_flag(),
        "sinks": asked.sinks(),
    }
    if causal and mask.when == "needed" and "attn_mask" not in asked.able:
        # What else it lacks is said first.
        lacks = [n for n in ("enable_gqa", "scale", "sinks") if wanted[n].when == "needed"]
        lacks = [name for name in lacks if name not in asked.able]
        return f"takes no {lacks[0]}" if lacks else "takes no attn_mask or is_causal"
    return wanted


def _is_causal(problem: Problem, *, bottom_right: bool) -> bool:
    """Whether the mask is the one of ``is_causal``."""
    seen = mask_band(problem.mask, problem.dimensions)
    lengths = [(problem.query, problem.kv)]
    return seen is not None and band_window(seen, lengths, bottom_right=bottom_right) == (-1, 0)


def _written_out(problem: Problem) -> Argument:
    return needed(
        MadeArgument(
            make=lambda inputs: attention_mask(problem, str(inputs.device)),
            text="mask",
            what="attn_mask",
            size=problem.query * problem.kv,
        )
    )


def _claims_of_sdpa(names: frozenset[str], dotted: str) -> bool:
    del dotted
    return bool(names & _OWN)


CALLING = Calling(
    name="sdpa",
    summary="a function of query, key, value, called like F.scaled_dot_product_attention",
    spellings={name: (name, *_ALIASES.get(name, ())) for name in KEYWORDS} | _LSE | _SINKS,
    arguments=sdpa_arguments,
    layout=bhsd,
    by_name=frozenset(_LSE | _SINKS),
    claims=_claims_of_sdpa,
)

SDPA = convention_of(CALLING)


SIGNS = {"softmax_scale", "window_size", "alibi_slopes"}
"""Names that only functions in the style of flash-attn have."""


def flash_attn_arguments(asked: Request) -> Arguments | str:
    """The convention's arguments for a Problem, or why it has none."""
    problem = asked.problem
    seen = mask_band(problem.mask, problem.dimensions)
    return window_arguments(asked, seen, [(problem.query, problem.kv)])


def _claims_of_flash_attn(names: frozenset[str], dotted: str) -> bool:
    return bool(names & SIGNS) or "flash_attn" in dotted


FLASH_ATTN = convention_of(
    Calling(
        name="flash_attn",
        summary="a function of q, k, v (batch, length, heads, dim), called like flash_attn_func",
        spellings=SPELLINGS,
        arguments=flash_attn_arguments,
        layout=bshd,
        claims=_claims_of_flash_attn,
        by_name=LSE_FLAGS | {"sinks"},
        most=4,
        bottom_right=True,
        empty_lse=EMPTY_LSE,
    )
)


_SIDES = ("q", "k")


def varlen_arguments(asked: Request) -> Arguments | str:
    """The convention's arguments for a Problem, or why it has none."""
    problem = asked.problem
    found = pack(problem)
    seen = mask_band(found.rest, problem.dimensions) if found else None
    if found is None or seen is None:
        return f"the mask {problem.mask} is no band in each of some sequences"
    wanted = window_arguments(asked, seen, found.lengths(), found.leads())
    if isinstance(wanted, str):
        return wanted
    places: Arguments = {}
    for side, name in enumerate(_SIDES):
        longest = max(lengths[side] for lengths in found.lengths())
        places[f"cu_seqlens_{name}"] = needed(_starts(found, side))
        places[f"max_seqlen_{name}"] = offered(longest)
    return places | wanted | _descales_of_varlen(problem, found)


def _starts(found: PackedProblem, side: int) -> MadeArgument:
    """int32 ``(parts + 1,)``."""
    starts = found.starts(side)

    def make(inputs: Inputs) -> torch.Tensor:
        return torch.tensor(starts, dtype=torch.int32, device=inputs.device)

    return MadeArgument(
        make=make, text=f"torch.tensor({starts}, dtype=torch.int32, device=q.device)"
    )


def _descales_of_varlen(problem: Problem, found: PackedProblem) -> Arguments:
    """fp32 ``(parts, kv_heads)`` each: a part has those of its sequence."""
    if not problem.formats.scaled:
        return {}
    sequences = [b for b, _, _ in found.places()]

    def made(name: str) -> MadeArgument:
        def make(inputs: Inputs) -> torch.Tensor:
            scale: torch.Tensor = getattr(inputs.descale, name)
            return scale[sequences]

        return MadeArgument(make=make, text=f"{name}_descale[{sequences}]")

    return {f"{name}_descale": needed(made(name)) for name in "qkv"}


def _claims_of_varlen(names: frozenset[str], dotted: str) -> bool:
    return any(name.startswith("cu_seqlens") for name in names) or "varlen" in dotted


VARLEN = convention_of(
    Calling(
        name="varlen",
        summary="a function of q, k, v (total, heads, dim) and cu_seqlens_q, cu_seqlens_k, called "
        "like flash_attn_varlen_func",
        spellings={
            f"{what}_{side}": (f"{what}_{side}",)
            for what in ("cu_seqlens", "max_seqlen")
            for side in _SIDES
        }
        | SPELLINGS,
        arguments=varlen_arguments,
        layout=packed_layout,
        claims=_claims_of_varlen,
        by_name=LSE_FLAGS | {"sinks"},
        musts=("cu_seqlens_q", "cu_seqlens_k"),
        most=4,
        bottom_right=True,
        empty_lse=EMPTY_LSE,
    )
)


_SPELLINGS = {
    "score_mod": ("score_mod",),
    "block_mask": ("block_mask",),
    "mask_mod": ("mask_mod",),
    "scale": ("scale", "sm_scale", "softmax_scale"),
    "enable_gqa": ("enable_gqa",),
    "return_aux": ("return_aux",),
    "return_lse": ("return_lse",),
}

_SEES = """\
sees = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
def mask_mod(b, h, q_idx, kv_idx):
    return sees[b, h, q_idx, kv_idx]"""
_BLOCKS = (
    "torch.nn.attention.flex_attention.create_block_mask(mask_mod, *sees.shape, device=q.device)"
)
_AUX = "torch.nn.attention.flex_attention.AuxRequest(lse=True)"


def flex_arguments(asked: Request) -> Arguments | str:
    """The convention's arguments: every mask and every score mod can be passed.

    A ``block_mask`` is made before the call; where there is none, ``mask_mod`` is the callable.
    """
    problem = asked.problem
    plain = problem.score == library.NONE
    return {
        "score_mod": spare(None) if plain else needed(_score_mod(problem)),
        **_mask(problem, asked.able),
        "scale": asked.scale(),
        "enable_gqa": needed(value=True) if problem.group > 1 else offered(value=False),
        **_lse(asked),
    }


def _score_mod(problem: Problem) -> MadeArgument:
    setup = render_score_mod(problem)
    return MadeArgument(
        make=lambda inputs: score_mod(problem, str(inputs.device)),
        text="score_mod" if setup else "",
        setup=setup,
    )


def _mask(problem: Problem, able: frozenset[str]) -> dict[str, Argument]:
    if problem.mask == library.FULL:
        return {"block_mask": spare(None), "mask_mod": spare(None)}
    if "block_mask" in able or "mask_mod" not in able:
        return {"block_mask": needed(_blocks(problem)), "mask_mod": spare(None)}

    def make(inputs: Inputs) -> Any:
        return problem.mask_mod(str(inputs.device))

    return {"mask_mod": needed(MadeArgument(make=make, text="mask_mod", setup=_SEES))}


def _blocks(problem: Problem) -> MadeArgument:
    return MadeArgument(
        make=lambda inputs: block_mask(problem, str(inputs.device)),
        text=_BLOCKS,
        setup=_SEES,
        what="mask, of which blocks are made,",
        size=problem.batch * problem.heads * problem.query * problem.kv,
    )


def _lse(asked: Request) -> Arguments:
    """By ``return_aux``, since torch warns of ``return_lse``; by that one where it is alone."""
    if asked.options.returns_lse is False:
        return {"return_aux": spare(None), "return_lse": spare(value=False)}
    by_aux = "return_aux" in asked.able
    aux = MadeArgument(make=lambda _inputs: AuxRequest(lse=True), text=_AUX)
    return {
        "return_aux": offered(aux) if by_aux else spare(None),
        "return_lse": spare(value=False) if by_aux else offered(value=True),
    }


def _claims_of_flex(names: frozenset[str], dotted: str) -> bool:
    del dotted
    return bool(names & {"score_mod", "block_mask", "mask_mod"})


def _within(device: str) -> AbstractContextManager[object]:
    """On a CPU torch's own function gives its dense formula, without tracing or a warning."""
    return uncompiled() if device == "cpu" else nullcontext()


FLEX = convention_of(
    Calling(
        name="flex",
        summary="a function of query, key, value with score_mod and block_mask, called like "
        "flex_attention",
        spellings=_SPELLINGS,
        arguments=flex_arguments,
        layout=bhsd,
        claims=_claims_of_flex,
        by_name=frozenset({"return_aux", "return_lse"}),
        within=_within,
    )
)


_LENGTHS = ("cache_seqlens", "seqlens_k", "seq_lens", "context_lens", "seqused_k", "kv_lens")
_TABLES = ("block_table", "page_table", "block_tables", "page_tables")

# What a function may require that no Problem says, each with why.
_WRITES = "keys are in the cache already, and none are written in the same call"
_BLOCK_SCALES = "fp8 has one descale a sequence and key head (k_descale), not one a block or token"
_DECLINED = {
    **dict.fromkeys(("k", "v", "k_new", "v_new", "new_k", "new_v", "knew", "vnew"), _WRITES),
    **dict.fromkeys(("key", "value", "slot_mapping", "append_k", "append_v"), _WRITES),
    **dict.fromkeys(("dropout", "dropout_rate", "p_drop"), "dropout is not asked about"),
    **dict.fromkeys(("k_scale", "v_scale", "k_scales", "v_scales"), _BLOCK_SCALES),
    **dict.fromkeys(("k_scale_cache", "v_scale_cache", "kv_scales"), _BLOCK_SCALES),
    **dict.fromkeys(("rotary_cos", "rotary_sin"), "queries and keys are rotated already"),
}


def paged_arguments(asked: Request) -> Arguments | str:
    """The convention's arguments for a Problem, or why it has none."""
    problem = asked.problem
    lengths = sequence_lengths(problem)
    sequences = [(problem.query, length) for length in lengths]
    seen = mask_band(_without_padding(problem.mask), problem.dimensions)
    aligned = seen and band_window(seen, sequences, bottom_right=asked.bottom_right)
    if seen is not None and aligned is None and lengths != (problem.kv,) * problem.batch:
        corner = "last" if asked.bottom_right else "first"
        return (
            f"causal and window_size begin at each sequence's own {corner} key: no such thing is "
            f"{problem.mask}, of lengths {list(lengths)}"
        )
    wanted = window_arguments(asked, seen, sequences)
    if isinstance(wanted, str):
        return wanted
    assert problem.paging is not None, "asked of what has pages"
    return wanted | {
        "cache_seqlens": needed(_lengths(lengths)),
        "block_table": needed(_table(problem, lengths)),
        "max_seqlen_k": spare(max(lengths)),
        "max_seqlen_q": spare(problem.query),
        "page_size": offered(problem.paging.size),
        "block_size": spare(problem.paging.size),
    }


def _without_padding(mask: Spec) -> Spec:
    """The mask within each sequence's own keys."""
    if mask.name == "padding":
        return FULL
    if mask.name != "and":
        return mask
    return Spec.of("and", *map(_without_padding, mask.parts))


def _lengths(lengths: tuple[int, ...]) -> MadeArgument:
    """int32 ``(batch,)``."""

    def make(inputs: Inputs) -> torch.Tensor:
        return torch.tensor(lengths, dtype=torch.int32, device=inputs.device)

    text = f"torch.tensor({list(lengths)}, dtype=torch.int32, device=q.device)"
    return MadeArgument(make=make, text=text)


def _table(problem: Problem, lengths: tuple[int, ...]) -> MadeArgument:
    """int32 ``(batch, most_pages)``."""

    def make(inputs: Inputs) -> torch.Tensor:
        return inputs_page_table(inputs).table

    return MadeArgument(make=make, text="table", setup=_setup(problem, lengths))


def _setup(problem: Problem, lengths: tuple[int, ...]) -> str:
    """Statements after which ``table`` is the table, and ``paged(x)`` a cache of keys or values."""
    paging = problem.paging
    assert paging is not None, "asked of what has pages"
    # Nothing shared: what lies there once as well as twice is the same.
    of = draw_page_table(paging, problem.batch, problem.kv, lengths, shared=0)
    return "\n".join(
        (
            f"table = torch.tensor({of.table.tolist()}, dtype=torch.int32, device=q.device)",
            "",
            "def paged(x):",
            f"    shape = ({of.pages}, {of.size}, x.shape[1], x.shape[3])",
            '    cache = torch.full(shape, float("nan"), device=x.device).to(x.dtype)',
            f"    for b, length in enumerate({list(lengths)}):",
            f"        for j, page in enumerate(table[b, : -(-length // {of.size})].tolist()):",
            f"            keys = x[b, :, j * {of.size} : (j + 1) * {of.size}].transpose(0, 1)",
            "            cache[page, : len(keys)] = keys",
            "    return cache",
            "",
        )
    )


def _layout(problem: Problem) -> Layout:
    """Of q and out ``(batch, query, heads, dim)``; keys are packed together: ``_tensors``."""
    plain = bshd(problem)
    texts = dict(plain.texts) | {name: f"paged({name})" for name in ("k", "v")}
    return replace(plain, texts=texts)


def _tensors(layout: Layout, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, and keys and values ``(pages, page_size, kv_heads, dim)``, contiguous."""
    found = paged_inputs(inputs)
    return layout.queries(inputs.q), found.k.transpose(1, 2), found.v.transpose(1, 2)


def _claims_of_paged(names: frozenset[str], dotted: str) -> bool:
    """A table and lengths; with ``cu_seqlens`` it is of varlen, where a table may stand too."""
    del dotted
    packed = any(name.startswith("cu_seqlens") for name in names)
    return not packed and bool(names & set(_TABLES)) and bool(names & set(_LENGTHS))


PAGED = convention_of(
    Calling(
        name="paged",
        summary="a function of q (batch, query, heads, dim), caches (pages, page_size, kv_heads, "
        "dim), cache_seqlens and block_table, called like flash_attn_with_kvcache",
        spellings={
            "cache_seqlens": _LENGTHS,
            "block_table": _TABLES,
            "max_seqlen_k": ("max_seqlen_k", "max_seq_len", "max_context_len", "max_kv_len"),
            "max_seqlen_q": ("max_seqlen_q", "max_query_len"),
            "page_size": ("page_size",),
            "block_size": ("block_size",),  # or a tile's, where it has a default
        }
        | SPELLINGS,
        arguments=paged_arguments,
        layout=_layout,
        claims=_claims_of_paged,
        by_name=LSE_FLAGS | {"page_size", "block_size", "max_seqlen_k", "max_seqlen_q", "sinks"},
        musts=("cache_seqlens", "block_table"),
        most=4,
        bottom_right=True,
        empty_lse=EMPTY_LSE,
        declined=_DECLINED,
        tensors=_tensors,
        paged=True,
    )
)


CONVENTIONS: dict[str, Convention] = {
    c.name: c for c in (NATIVE, SDPA, FLASH_ATTN, VARLEN, FLEX, PAGED)
}

# Who is asked first whether an object shows that it is theirs. Where none is sure it is SDPA's.
_SURE = (NATIVE, VARLEN, PAGED, FLEX, SDPA, FLASH_ATTN)

_AS_USUAL = ConventionOptions()


def convention_named(name: str) -> Convention:
    """The convention called ``name``; raises UnknownName with the valid names."""
    if name not in CONVENTIONS:
        raise UnknownName("convention", name, CONVENTIONS)
    return CONVENTIONS[name]


def adopted(
    found: object,
    name: str,
    convention: str | None = None,
    options: ConventionOptions = _AS_USUAL,
) -> Subject | str:
    """``found`` as a Subject.

    Args:
        found: What a file or module holds.
        name: What reports are to call it.
        convention: A name of ``CONVENTIONS``; None for the one that its signature, or its name,
            shows, which is sdpa where they show none.
        options: Where it differs from its convention.

    Returns:
        The Subject, or why there is none, to stand after ``it must``.

    Raises:
        UnknownName: for a convention that is not known.
    """
    if convention:
        taken = convention_named(convention)
    else:
        taken = next((each for each in _SURE if each.claims(found)), SDPA)
    reason = taken.unfit(found)
    if reason is not None:
        return reason if convention else f"be a Subject, or {reason}"
    if taken is NATIVE and options != _AS_USUAL:
        return "be a function: a Subject says itself how it is called"
    return taken.adopt(found, name, options)
