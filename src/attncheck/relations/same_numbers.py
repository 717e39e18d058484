"""Relations between calls on the same numbers: repeated, reordered, laid out otherwise."""

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
    compare_outputs,
    describe_turn,
    map_outputs,
    of_attention,
)

# ------------------------------------------------------------------ calls

REPEAT = Relation(
    name="repeat",
    summary="two runs on the same inputs agree",
    runs=lambda inputs, _: (inputs, inputs),
    promise="repeat",
)
"""D1: to the last bit in a deterministic kernel; atomics change the order of sums."""

_LONGER = 2


def _half(problem: Problem) -> Excerpt:
    rows, keys = (range((length + 1) // 2) for length in (problem.query, problem.kv))
    return Excerpt.of(problem, rows=rows, keys=keys)


def _lengths_between(problem: Problem) -> Allowed:
    shorter = max(problem.query, problem.kv) > 1 and can_excerpt(problem, _half(problem))
    return {"between": (0, 1, 2) if shorter else (0,)}


def _call_between(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    problem = inputs.problem
    # Normal whatever the first: another draw of constant values is the same.
    other = problem.replace(distribution="normal", seed=(problem.seed + 1) % 2**63)
    if parameters["between"]:
        other = _half(other).problem(other)
    drawn = draw_inputs(other, inputs.device)
    return (drawn, inputs, drawn) if parameters["between"] == _LONGER else (inputs, drawn, inputs)


def _compare_around(results: Results) -> Finding | None:
    before, _, after = results.outputs
    errors = results.errors
    finding = compare_outputs(after, before, errors and [errors[0], errors[2]])
    return finding and replace(finding, what=f"{describe_turn(results.inputs, 2)}, is call 1 again")


CALL_ORDER = Relation(
    name="call_order",
    summary="a call after one on other inputs, with `between` 1 shorter ones and with 2 longer "
    "ones, gives what it gave before",
    runs=_call_between,
    rule=_compare_around,
    promise="repeat",
    in_turn=True,
    unfit=of_attention(gradients=True),
    allowed=_lengths_between,
)
"""Holds to the last bit for every kernel that gives the same bits twice: nothing is left of the
call between, whose inputs are as long, half as long, or twice. Finds workspaces that are not
cleared, padding that holds what a longer call left there, counters that are not set back, an
output that is handed out twice, and what is kept of the last call by pointer or shape: tensors of
the same size lie in the same memory. What is kept for good gives the first call's again; then the
call between is beyond its bounds."""


def _first_half(problem: Problem) -> range:
    """Half of the rows: another shape than the whole."""
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
    first = partial(map_outputs, change=lambda tensor: tensor[:, :, :rows])
    alone, _, whole = results.outputs
    errors = results.errors
    return compare_outputs(first(whole), alone, errors and [errors[0], first(errors[2])])


MASK_ORDER = Relation(
    name="mask_order",
    summary="after a call of the same shape under another mask, the first rows are what they are "
    "alone",
    runs=_mask_between,
    rule=_compare_first_half,
    promise="bounds",
    in_turn=True,
    unfit=of_attention(_unless_rows_alone),
)
"""Holds for every right kernel: nothing is left of the call between. Finds what is kept by shape,
be it a mask, a block mask or a plan, where the shape was first met under another mask: the rows
alone are of another shape, and not mistaken. See ``rectangular`` for why they are the whole's.
"""

_LAUNCHES = 8

LAUNCHES = Relation(
    name="launches",
    summary="the kernel launched otherwise (`launch`: which of its launches, counted round) gives "
    "the same",
    runs=lambda inputs, _: (inputs, inputs),
    promise="bounds",
    relaunched=True,
    unfit=of_attention(gradients=True),
    allowed=lambda _: {"launch": range(_LAUNCHES)},
)
"""Other tiles, more splits or no list of tiles to skip: what the kernel's Subject says it has
(``Subject.launches``). Each run is within its own bound of the exact result, so that both together
are the bound between them. Finds what goes wrong at the edges of tiles and splits, wherever they
are, and a block mask that leaves out what a dense walk finds: at lengths where no oracle ends."""

# ------------------------------------------------------------------ stored numbers

_DESCALED = ("q", "k", "v")


def _halve(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    """Stored numbers and their halves; 0 in both where a half is not a number of the format."""
    name, scales = _DESCALED[int(parameters["tensor"])], inputs.descale
    assert scales is not None, "only fp8 has them"
    stored = inputs.tensors()[name]
    values = stored.float()
    exact = (values / 2).to(stored.dtype).float() * 2 == values
    values = torch.where(exact, values, 0.0)
    tensors: tuple[dict[str, Any], ...] = tuple(
        {name: x.to(stored.dtype)} for x in (values, values / 2)
    )
    doubled = replace(scales, **{name: inputs.tensors()[f"{name}_descale"] * 2})
    return inputs.replace(**tensors[0]), inputs.replace(**tensors[1], descale=doubled)


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
fp8 numbers and sums of them are no subnormal numbers of fp32, and drawn descales are far from both
ends of it. So it is for kernels that multiply by the descale first."""

# ------------------------------------------------------------------ strides

_VECTOR = 16  # bytes: the widest load of a GPU's thread, and what TMA wants strides to be made of


def _each(inputs: Inputs, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
    return inputs.replace(**change_tensors(inputs, change, "q", "k", "v", "dout"))


def _nan_buffer(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """NaN throughout: who reads a gap shows it."""
    return torch.full(shape, math.nan, device=like.device).to(like.dtype)


def _heads_last(tensor: torch.Tensor) -> torch.Tensor:
    """(batch, length, heads, dim) in memory, as a linear layer gives it."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _gapped(tensor: torch.Tensor) -> torch.Tensor:
    """In a buffer with a row more, as a cache has, and columns more: 16 bytes."""
    batch, heads, length, dim = tensor.shape
    wider = dim + _VECTOR // tensor.element_size()
    view = _nan_buffer(tensor, batch, heads, length + 1, wider)[:, :, :length, :dim]
    view.copy_(tensor)
    return view


def _offset(tensor: torch.Tensor) -> torch.Tensor:
    """From the second element of its memory on: aligned to an element, and to no vector."""
    view = _nan_buffer(tensor, tensor.numel() + 1)[1:].view(tensor.shape)
    view.copy_(tensor)
    return view


def _packed(inputs: Inputs) -> Inputs:
    """Rows of q's heads, k's heads and v's heads side by side, as one linear layer gives them."""
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


def _expanded(inputs: Inputs) -> Inputs:
    """K and V of the first sequence's first head, for all by strides of 0.

    And one number for all of dOut: the gradient of a sum, which is what ``out.sum()`` passes on.
    """
    return inputs.replace(
        **change_tensors(inputs, lambda x: x[:1, :1].clone().expand(x.shape), "k", "v"),
        **change_tensors(inputs, lambda x: x.flatten()[:1].clone().expand(x.shape), "dout"),
    )


def _strides(
    name: str, layout_text: str, layout: Callable[[Inputs], Inputs], *reasons: Unfit
) -> Relation:
    """Every bit stays when ``layout`` changes strides alone.

    Holds for every right kernel within bounds, and to the last bit where the order of sums does not
    depend on strides. A kernel that asks for contiguous rows or for an alignment may refuse. One
    that takes another layout than the tensors have reads other rows, or a gap's NaN.
    """

    def runs(inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
        laid_out = layout(inputs)
        # A clone: one that starts in the middle of its memory counts as contiguous too.
        contiguous = partial(torch.clone, memory_format=torch.contiguous_format)
        return _each(laid_out, contiguous), laid_out

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
    _strides(
        "strides_heads_last",
        "with heads beside each other in memory (batch, length, heads, dim)",
        partial(_each, change=_heads_last),
        _unless_heads_apart,
    ),
    _strides(
        "strides_gapped",
        "inside larger buffers whose other numbers are NaN",
        partial(_each, change=_gapped),
    ),
    _strides(
        "strides_offset",
        "from the second element of their memory on",
        partial(_each, change=_offset),
    ),
    _strides("strides_packed", "as views of one buffer", _packed),
    _strides(
        "strides_expanded", "with one k and v for all by strides of 0", _expanded, _unless_key_heads
    ),
    _strides(
        "strides_transposed",
        "with k's dim not innermost in memory",
        lambda inputs: inputs.replace(k=inputs.k.mT.contiguous().mT),
        _unless_matrix,
    ),
)

STRIDED_TENSORS = ("q", "k", "v", "dout")
"""Tensors that the parameter ``tensor`` of ``strides_far`` and others counts."""


def _other_layouts(problem: Problem) -> Allowed:
    rows = dict.fromkeys(("q", "dout"), problem.heads * problem.query)
    rows |= dict.fromkeys(("k", "v"), problem.kv_heads * problem.kv)
    columns = dict.fromkeys(("q", "k"), problem.head_dim)
    columns |= dict.fromkeys(("v", "dout"), problem.value_dim)
    # Pages lie where the page table says.
    names = ("q",) if problem.paging else STRIDED_TENSORS[: 3 + problem.backward]
    able = (name for name in names if min(rows[name], columns[name]) > 1)
    return {"tensor": [STRIDED_TENSORS.index(name) for name in able]}


def _alone(name: str, layout_text: str, layout: Callable[[torch.Tensor], torch.Tensor]) -> Relation:
    """Every bit stays when one tensor's strides change, and no other's, as of ``_strides``.

    A kernel that asks of one tensor how another lies reads other numbers.
    """

    def runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
        tensor = STRIDED_TENSORS[int(parameters["tensor"])]
        laid_out = inputs.replace(**change_tensors(inputs, layout, tensor))
        return _each(laid_out, torch.Tensor.contiguous), laid_out

    def unfit(problem: Problem) -> str | None:
        return None if _other_layouts(problem)["tensor"] else "a vector has no other layout"

    return Relation(
        name=name,
        summary=f"`tensor` alone (0 q, 1 k, 2 v, 3 dOut) {layout_text} gives what it gives "
        "contiguous",
        runs=runs,
        promise="layout",
        unfit=of_attention(unfit, gradients=True),
        allowed=_other_layouts,
    )


def _heads_innermost(tensor: torch.Tensor) -> torch.Tensor:
    """(batch, dim, length, heads) in memory: as far from any kernel's own as can be."""
    return tensor.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1)


STRIDES_ALONE = (
    _alone("strides_alone", "with its heads innermost in memory", _heads_innermost),
    _alone(
        "strides_of_one_column",
        "with one number for all columns of a row, by a stride of 0,",
        lambda tensor: tensor[..., :1].contiguous().expand(tensor.shape),
    ),
)

_FAR = 2**31  # elements: one more than an int32 counts


def _tensors_with_rows(problem: Problem) -> Allowed:
    rows = {"q": problem.query}
    if problem.paging is None:  # pages lie where the page table says
        rows |= {"k": problem.kv, "v": problem.kv}
    if problem.backward:
        rows["dout"] = problem.query
    # Of two rows the stride itself is more than an int32 holds, and so none is what it is kept in.
    far = [STRIDED_TENSORS.index(name) for name, length in rows.items() if length > 2]
    return {"tensor": far}


def _unless_rows_far(problem: Problem) -> str | None:
    if _tensors_with_rows(problem)["tensor"]:
        return None
    return "two rows are no more than a stride apart"


def _place_far(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    name = STRIDED_TENSORS[int(parameters["tensor"])]
    return inputs, inputs.replace(**change_tensors(inputs, _far, name))


def _far(tensor: torch.Tensor) -> torch.Tensor:
    """Rows of its last quarter are 2³¹ elements and more behind the first, and as many before it.

    The last alone may be hidden from all. And an offset that has become negative is still one of
    this memory: what is there is read, and nothing is stopped.
    """
    batch, heads, length, dim = tensor.shape
    vector = _VECTOR // tensor.element_size()
    wide = _multiple(dim, vector)
    far = max(2, 3 * length // 4)  # the first such row; times it, its stride is an int32 still
    row = _multiple(max(-(-_FAR // far), batch * heads * wide), vector)
    whole = strided_alloc.reserve_memory(_FAR + (length - 1) * row + batch * heads * wide, tensor)
    view = whole.as_strided(tensor.shape, (heads * wide, wide, row, 1), _FAR)
    return view.copy_(tensor)


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of


STRIDES_FAR = Relation(
    name="strides_far",
    summary="with the rows of `tensor` (0 q, 1 k, 2 v, 3 dOut) 2³¹ elements apart, all stays",
    runs=_place_far,
    promise="layout",
    spacious=True,
    unfit=of_attention(_unless_rows_far, gradients=True),
    allowed=_tensors_with_rows,
)
"""A 32-bit product of a row's number and a stride wraps, and another row is read."""

# ------------------------------------------------------------------ pages

_USUAL_SIZES = (16, 64, 256)
_ODD_SIZE = 3


def _paging(problem: Problem) -> Paging:
    assert problem.paging is not None, "asked of what has pages"
    return problem.paging


def _other_pagings(problem: Problem) -> Allowed:
    """The Problem's own size and usual ones; an odd one where its own is no multiple of 16 either.

    Sharing may be undone, and not added: only what was drawn alike can lie there once.
    """
    own = _paging(problem)
    odd = {_ODD_SIZE} if own.size % _USUAL_SIZES[0] else set()
    return {
        "size": sorted({own.size, *_USUAL_SIZES, *odd}),
        "order": (1, 2),
        "shared": sorted({0, own.shared}),
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
"""Holds for every right kernel within bounds: pages change where a number lies, and no number. To
the last bit of one in which the order of sums does not depend on them; a kernel whose tile is a
page promises less. Free pages, which are NaN, are others in the second run. Finds tables that are
read transposed, across sequences, by another page size or beyond their end, and what is kept of a
page by its number. A kernel that takes no pages of a size may refuse them."""
