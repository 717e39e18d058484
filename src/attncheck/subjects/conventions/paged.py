"""Any function of q, caches of keys and values in pages, and a table of pages.

Names and meanings are those of flash-attn's ``flash_attn_with_kvcache`` and of vLLM's and
FlashInfer's functions, where these differ: https://github.com/Dao-AILab/flash-attention,
https://github.com/vllm-project/vllm, https://docs.flashinfer.ai. Keys are in the cache already.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attncheck.mods.library import FULL
from attncheck.mods.paging import page_table
from attncheck.mods.spec import Spec
from attncheck.subjects.conventions.arguments import (
    Arguments,
    Asked,
    Made,
    needed,
    offered,
    spare,
)
from attncheck.subjects.conventions.calling import Calling, convention_of
from attncheck.subjects.conventions.diagonals import band, window
from attncheck.subjects.conventions.layouts import bshd
from attncheck.subjects.conventions.windowed import EMPTY_LSE, LSE_FLAGS, SPELLINGS, windowed
from attncheck.subjects.pages import cached, lengths_of, table_of

if TYPE_CHECKING:
    from attncheck.inputs import Inputs
    from attncheck.problem import Problem
    from attncheck.subjects.conventions.layouts import Layout

__all__ = ["PAGED"]

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


def arguments(asked: Asked) -> Arguments | str:
    """The convention's arguments for a Problem, or why it has none."""
    problem = asked.problem
    lengths = lengths_of(problem)
    sequences = [(problem.query, length) for length in lengths]
    seen = band(_without_padding(problem.mask), problem.dimensions)
    aligned = seen and window(seen, sequences, bottom_right=asked.bottom_right)
    if seen is not None and aligned is None and lengths != (problem.kv,) * problem.batch:
        corner = "last" if asked.bottom_right else "first"
        return (
            f"causal and window_size begin at each sequence's own {corner} key: no such thing is "
            f"{problem.mask}, of lengths {list(lengths)}"
        )
    wanted = windowed(asked, seen, sequences)
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


def _lengths(lengths: tuple[int, ...]) -> Made:
    """int32 ``(batch,)``."""

    def make(inputs: Inputs) -> torch.Tensor:
        return torch.tensor(lengths, dtype=torch.int32, device=inputs.device)

    text = f"torch.tensor({list(lengths)}, dtype=torch.int32, device=q.device)"
    return Made(make=make, text=text)


def _table(problem: Problem, lengths: tuple[int, ...]) -> Made:
    """int32 ``(batch, most_pages)``."""

    def make(inputs: Inputs) -> torch.Tensor:
        return table_of(inputs).table

    return Made(make=make, text="table", setup=_setup(problem, lengths))


def _setup(problem: Problem, lengths: tuple[int, ...]) -> str:
    """Statements after which ``table`` is the table, and ``paged(x)`` a cache of keys or values."""
    paging = problem.paging
    assert paging is not None, "asked of what has pages"
    # Nothing shared: what lies there once as well as twice is the same.
    of = page_table(paging, problem.batch, problem.kv, lengths, shared=0)
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
    found = cached(inputs)
    return layout.queries(inputs.q), found.k.transpose(1, 2), found.v.transpose(1, 2)


def _claims(names: frozenset[str], dotted: str) -> bool:
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
        arguments=arguments,
        layout=_layout,
        claims=_claims,
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
