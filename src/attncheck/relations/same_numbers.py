"""Relations between calls on the same numbers: repeated, in another order or memory layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from attncheck.core import strided_alloc
from attncheck.core.mod_spec import FULL, Spec
from attncheck.core.paged_layout import Paging
from attncheck.inputs.input_tensors import Inputs, draw_inputs
from attncheck.inputs.problem import Allowed, Parameters, Problem
from attncheck.relations.excerpt import Excerpt, can_excerpt
from attncheck.relations.relation import (
    Finding,
    Relation,
    Results,
    Unfit,
    change_tensors,
    compare_ends,
    describe_turn,
    each_tensor,
    of_attention,
)

# ------------------------------------------------------------------ calls

REPEAT = Relation(
    name="repeat",
    summary="two runs on the same inputs agree",
    runs=lambda inputs, _: (inputs, inputs),
    promise="repeat",
)
"""Holds bitwise in a deterministic kernel; atomics change the order of sums (D1)."""

_LONGER = 2  # `between`: the call between is the longer one.


def _half(problem: Problem) -> Excerpt:
    rows, keys = (range((length + 1) // 2) for length in (problem.query, problem.kv))
    return Excerpt.of(problem, rows=rows, keys=keys)


def _lengths_between(problem: Problem) -> Allowed:
    shorter = max(problem.query, problem.kv) > 1 and can_excerpt(problem, _half(problem))
    return {"between": (0, 1, 2) if shorter else (0,)}


def _call_between(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    problem = inputs.problem
    # Always normal, because another draw of a constant distribution would be the same numbers.
    other = problem.replace(distribution="normal", seed=(problem.seed + 1) % 2**63)
    if parameters["between"]:
        other = _half(other).problem(other)
    drawn = draw_inputs(other, inputs.device)
    return (drawn, inputs, drawn) if parameters["between"] == _LONGER else (inputs, drawn, inputs)


def _compare_around(results: Results) -> Finding | None:
    finding = compare_ends(results)
    return finding and replace(finding, what=f"{describe_turn(results.inputs, 2)}, is call 1 again")


CALL_ORDER = Relation(
    name="call_order",
    summary="a call after one on other inputs, with `between` 1 shorter ones and with 2 longer "
    "ones, gives what it gave before",
    runs=_call_between,
    rule=_compare_around,
    promise="repeat",
    consecutive_calls=True,
    unfit=of_attention(gradients=True),
    allowed=_lengths_between,
)
"""Holds bitwise for every kernel that gives the same bits twice: a call must not depend on the call
between, whose inputs are as long, half as long, or twice as long. Finds workspaces that are not
cleared, padding that holds numbers of a longer call, counters that are not reset, an output buffer
that is returned twice, and caches keyed by pointer or shape: tensors of the same size lie in the
same memory. A cache that is never updated repeats the first call's result; then the call between is
outside its bounds."""


def _first_half(problem: Problem) -> range:
    """Return the first half of the rows, which has another shape than the whole Problem."""
    return range((problem.query + 1) // 2)


def _unless_rows_alone(problem: Problem) -> str | None:
    if problem.query == 1 or problem.kv == 1:
        return "it needs two rows, of which one is left out, and two keys, of which one is hidden"
    if not can_excerpt(problem, Excerpt.of(problem, rows=_first_half(problem))):
        return "its mask or score mod cannot be said of some rows alone"
    return None


def _mask_between(inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
    problem = inputs.problem
    other = Spec.of("causal") if problem.mask == FULL else FULL
    alone = Excerpt.of(problem, rows=_first_half(problem)).inputs(inputs)
    return alone, inputs.replace(problem=problem.replace(mask=other)), inputs


def _compare_first_half(results: Results) -> Finding | None:
    rows = len(_first_half(results.inputs[-1].problem))
    return compare_ends(results, last=each_tensor(lambda tensor: tensor[:, :, :rows]))


MASK_ORDER = Relation(
    name="mask_order",
    summary="after a call of the same shape under another mask, the first rows are what they are "
    "alone",
    runs=_mask_between,
    rule=_compare_first_half,
    promise="bounds",
    consecutive_calls=True,
    unfit=of_attention(_unless_rows_alone),
)
"""Holds for every right kernel: a call must not depend on the call between. Finds masks, block
masks and plans that are cached by shape alone, and so reused under another mask. The first rows
alone have another shape, so they are right; ``rectangular`` says why they equal the whole's."""

_LAUNCHES = 8

LAUNCHES = Relation(
    name="launches",
    summary="the kernel launched otherwise (`launch`: which of its launches, counted round) gives "
    "the same",
    runs=lambda inputs, _: (inputs, inputs),
    promise="bounds",
    uses_other_launch=True,
    unfit=of_attention(gradients=True),
    allowed=lambda _: {"launch": range(_LAUNCHES)},
)
"""Launches have other tiles, more splits or no list of tiles to skip, as the kernel's Subject lists
them (``Subject.launches``). Each run is within its own bound of the exact result, so two runs are
within the sum of both. Finds errors at the edges of tiles and splits, and tiles that a block mask
wrongly skips, also at lengths where an oracle would take too long."""

# ------------------------------------------------------------------ stored numbers

_DESCALED = ("q", "k", "v")


def _halve(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    """Return two runs, the second with halves; 0 in both where the format lacks the half."""
    name, scales = _DESCALED[int(parameters["tensor"])], inputs.descale
    assert scales is not None, "only fp8 has them"
    stored = inputs.tensors()[name]
    values = stored.float()
    has_exact_half = (values / 2).to(stored.dtype).float() * 2 == values
    values = torch.where(has_exact_half, values, 0.0)
    tensors: tuple[dict[str, Any], ...] = tuple(
        {name: x.to(stored.dtype)} for x in (values, values / 2)
    )
    doubled_descale = replace(scales, **{name: inputs.tensors()[f"{name}_descale"] * 2})
    return inputs.replace(**tensors[0]), inputs.replace(**tensors[1], descale=doubled_descale)


DESCALE = Relation(
    name="descale",
    summary="q, k or v (`tensor` 0, 1, 2) stored half as large with twice the descale keeps every "
    "bit",
    runs=_halve,
    unfit=of_attention(lambda problem: None if problem.formats.scaled else "only fp8 has descales"),
    allowed=lambda _: {"tensor": range(len(_DESCALED))},
)
"""Holds for every right kernel, in whatever order it multiplies descales: a power of two commutes
with every rounding, also with sums that tensor cores align to their largest product. Products of
fp8 numbers and their sums are never subnormal in fp32, and drawn descales are far from both ends of
its range. So it also holds for kernels that multiply by the descale first."""

# ------------------------------------------------------------------ strides

_VECTOR = 16  # Bytes: the widest load of a GPU thread, and strides for TMA must be multiples of it.


def _change_all(inputs: Inputs, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
    return inputs.replace(**change_tensors(inputs, change, "q", "k", "v", "dout"))


def _nan_buffer(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return a buffer full of NaN, so that a kernel that reads a gap returns NaN."""
    return torch.full(shape, math.nan, device=like.device).to(like.dtype)


def _lay_heads_last(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that lies in memory as (batch, length, heads, dim), as of a linear layer."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _lay_with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in a buffer with one more row, like a cache, and 16 more bytes per row."""
    batch, heads, length, dim = tensor.shape
    wider = dim + _VECTOR // tensor.element_size()
    view = _nan_buffer(tensor, batch, heads, length + 1, wider)[:, :, :length, :dim]
    view.copy_(tensor)
    return view


def _lay_off_alignment(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that starts at the second element of its memory: no vector is aligned."""
    view = _nan_buffer(tensor, tensor.numel() + 1)[1:].view(tensor.shape)
    view.copy_(tensor)
    return view


def _pack_in_rows(inputs: Inputs) -> Inputs:
    """Return inputs with q, k and v side by side in rows of one buffer, as of one linear layer."""
    tensors = (inputs.q, inputs.k, inputs.v)
    widths = [tensor.shape[1] * tensor.shape[3] for tensor in tensors]
    longest = max(tensor.shape[2] for tensor in tensors)
    buffer = _nan_buffer(inputs.q, inputs.q.shape[0], longest, sum(widths))
    views = []
    for tensor, columns in zip(tensors, torch.split(buffer, widths, dim=-1), strict=True):
        batch, heads, length, dim = tensor.shape
        view = columns[:, :length].view(batch, length, heads, dim).transpose(1, 2)
        view.copy_(tensor)
        views.append(view)
    q, k, v = views
    return inputs.replace(q=q, k=k, v=v)


def _expand(inputs: Inputs) -> Inputs:
    """Use K and V of the first sequence's first head for all heads, by strides of 0.

    dOut is one number, expanded, like the gradient that ``out.sum()`` passes on.
    """
    return inputs.replace(
        **change_tensors(inputs, lambda x: x[:1, :1].clone().expand(x.shape), "k", "v"),
        **change_tensors(inputs, lambda x: x.flatten()[:1].clone().expand(x.shape), "dout"),
    )


def _strides_relation(
    name: str, layout_text: str, layout: Callable[[Inputs], Inputs], *reasons: Unfit
) -> Relation:
    """Return the relation that every bit stays when ``layout`` changes only strides.

    Holds for every right kernel within bounds, and bitwise where the order of sums does not depend
    on strides. A kernel that needs contiguous rows or an alignment may refuse. A kernel that
    assumes another layout than the tensors have reads other rows, or the NaN in a gap.
    """

    def runs(inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
        laid_out = layout(inputs)
        # A clone, because a tensor that starts in the middle of its memory is contiguous too.
        contiguous = partial(torch.clone, memory_format=torch.contiguous_format)
        return _change_all(laid_out, contiguous), laid_out

    return Relation(
        name=name,
        summary=f"q, k and v {layout_text} give what they give contiguous",
        runs=runs,
        promise="layout",
        unfit=of_attention(*reasons, gradients=True),
    )


def _unless_heads_apart(problem: Problem) -> str | None:
    lengths = max(problem.query, problem.kv)
    return "heads lie beside each other already" if problem.heads == 1 or lengths == 1 else None


def _unless_key_heads(problem: Problem) -> str | None:
    pairs = problem.batch * problem.kv_heads
    return "its one key head lies where any view of it does" if pairs == 1 else None


def _unless_matrix(problem: Problem) -> str | None:
    return "a vector has no other layout" if 1 in {problem.kv, problem.head_dim} else None


STRIDES = (
    _strides_relation(
        "strides_heads_last",
        "with heads beside each other in memory (batch, length, heads, dim)",
        partial(_change_all, change=_lay_heads_last),
        _unless_heads_apart,
    ),
    _strides_relation(
        "strides_gapped",
        "inside larger buffers whose other numbers are NaN",
        partial(_change_all, change=_lay_with_gaps),
    ),
    _strides_relation(
        "strides_offset",
        "from the second element of their memory on",
        partial(_change_all, change=_lay_off_alignment),
    ),
    _strides_relation("strides_packed", "as views of one buffer", _pack_in_rows),
    _strides_relation(
        "strides_expanded", "with one k and v for all by strides of 0", _expand, _unless_key_heads
    ),
    _strides_relation(
        "strides_transposed",
        "with k's dim not innermost in memory",
        lambda inputs: inputs.replace(k=inputs.k.mT.contiguous().mT),
        _unless_matrix,
    ),
)

STRIDED_TENSORS = ("q", "k", "v", "dout")
"""Tensors that the parameter ``tensor`` of ``strides_far`` and other relations indexes."""


def _tensors_with_layouts(problem: Problem) -> Allowed:
    rows = dict.fromkeys(("q", "dout"), problem.heads * problem.query)
    rows |= dict.fromkeys(("k", "v"), problem.kv_heads * problem.kv)
    columns = dict.fromkeys(("q", "k"), problem.head_dim)
    columns |= dict.fromkeys(("v", "dout"), problem.value_dim)
    # k and v in pages lie where the page table says, so their strides cannot be chosen.
    names = ("q",) if problem.paging else STRIDED_TENSORS[: 3 + problem.backward]
    movable_names = (name for name in names if min(rows[name], columns[name]) > 1)
    return {"tensor": [STRIDED_TENSORS.index(name) for name in movable_names]}


def _alone(name: str, layout_text: str, layout: Callable[[torch.Tensor], torch.Tensor]) -> Relation:
    """Return the relation that every bit stays when only one tensor's strides change.

    A kernel that uses one tensor's strides for another reads other numbers.
    """

    def runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
        tensor = STRIDED_TENSORS[int(parameters["tensor"])]
        laid_out = inputs.replace(**change_tensors(inputs, layout, tensor))
        return _change_all(laid_out, torch.Tensor.contiguous), laid_out

    def unfit(problem: Problem) -> str | None:
        return None if _tensors_with_layouts(problem)["tensor"] else "a vector has no other layout"

    return Relation(
        name=name,
        summary=f"`tensor` alone (0 q, 1 k, 2 v, 3 dOut) {layout_text} gives what it gives "
        "contiguous",
        runs=runs,
        promise="layout",
        unfit=of_attention(unfit, gradients=True),
        allowed=_tensors_with_layouts,
    )


def _heads_innermost(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that lies in memory as (batch, dim, length, heads), which no kernel uses."""
    return tensor.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1)


STRIDES_ALONE = (
    _alone("strides_alone", "with its heads innermost in memory", _heads_innermost),
    _alone(
        "strides_of_one_column",
        "with one number for all columns of a row, by a stride of 0,",
        lambda tensor: tensor[..., :1].contiguous().expand(tensor.shape),
    ),
)

_FAR = 2**31  # Elements: the smallest offset that an int32 cannot hold.


def _tensors_with_rows(problem: Problem) -> Allowed:
    rows = {"q": problem.query}
    if problem.paging is None:  # pages lie where the page table says
        rows |= {"k": problem.kv, "v": problem.kv}
    if problem.backward:
        rows["dout"] = problem.query
    # With two rows the stride itself would exceed an int32, and kernels would store it in 64 bits.
    tensors = [STRIDED_TENSORS.index(name) for name, length in rows.items() if length > 2]
    return {"tensor": tensors}


def _unless_rows_far(problem: Problem) -> str | None:
    if _tensors_with_rows(problem)["tensor"]:
        return None
    return "two rows are no more than a stride apart"


def _place_far(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    name = STRIDED_TENSORS[int(parameters["tensor"])]
    return inputs, inputs.replace(**change_tensors(inputs, _lay_rows_far, name))


def _lay_rows_far(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy whose last quarter of rows lies at least 2³¹ elements behind its first row.

    A quarter, since the last row alone may be hidden from all. As many elements lie before the
    tensor, so that an offset that wraps to a negative number reads this memory and does not crash.
    """
    batch, heads, length, dim = tensor.shape
    vector = _VECTOR // tensor.element_size()
    wide = _round_up(dim, vector)
    far_row = max(2, 3 * length // 4)  # the first far row: at least 2, so the stride fits an int32
    row = _round_up(max(-(-_FAR // far_row), batch * heads * wide), vector)  # a row's stride
    memory = strided_alloc.reserve_memory(_FAR + (length - 1) * row + batch * heads * wide, tensor)
    view = memory.as_strided(tensor.shape, (heads * wide, wide, row, 1), _FAR)
    return view.copy_(tensor)


def _round_up(number: int, of: int) -> int:
    return -(-number // of) * of


STRIDES_FAR = Relation(
    name="strides_far",
    summary="with the rows of `tensor` (0 q, 1 k, 2 v, 3 dOut) 2³¹ elements apart, all stays",
    runs=_place_far,
    promise="layout",
    needs_much_memory=True,
    unfit=of_attention(_unless_rows_far, gradients=True),
    allowed=_tensors_with_rows,
)
"""Finds kernels whose 32-bit product of a row's index and a stride wraps: they read other rows."""

# ------------------------------------------------------------------ pages

_USUAL_SIZES = (16, 64, 256)
_ODD_SIZE = 3


def _paging(problem: Problem) -> Paging:
    assert problem.paging is not None, "asked of what has pages"
    return problem.paging


def _other_pagings(problem: Problem) -> Allowed:
    """Return its own page size and usual ones; an odd one too if its own is no multiple of 16.

    Shared pages may be split up, not added: sequences share only keys that were drawn equal.
    """
    own_paging = _paging(problem)
    odd_sizes = {_ODD_SIZE} if own_paging.size % _USUAL_SIZES[0] else set()
    return {
        "size": sorted({own_paging.size, *_USUAL_SIZES, *odd_sizes}),
        "order": (1, 2),
        "shared": sorted({0, own_paging.shared}),
    }


def _repage(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    problem = inputs.problem
    other = Paging(
        size=int(parameters["size"]),
        seed=(_paging(problem).seed + int(parameters["order"])) % 2**63,
        shared=int(parameters["shared"]),
    )
    return inputs, inputs.replace(problem=problem.replace(paging=other))


PAGES = Relation(
    name="pages",
    summary="the same keys and values in pages of `size`, in another order and with `shared` "
    "leading pages of all sequences, give what they gave before",
    runs=_repage,
    promise="layout",
    unfit=of_attention(lambda p: "its keys are in no pages" if p.paging is None else None),
    allowed=_other_pagings,
)
"""Holds for every right kernel within bounds: pages change where a number lies, and no number. Bits
agree if the order of sums does not depend on pages; a kernel whose tile is a page promises less.
Other pages are free in the second run, and free pages hold NaN. Finds page tables that are read
transposed, across sequences, with another page size or beyond their end, and results cached by page
number. A kernel that does not support a page size may refuse it."""
