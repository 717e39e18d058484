"""Relations between calls on the same numbers: repeated, reordered, laid out otherwise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from attncheck.core import strided_alloc
from attncheck.core.paged_layout import Paging
from attncheck.inputs import input_tensors as inputs_room
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Parameters, fits_all
from attncheck.mods.library import FULL
from attncheck.mods.spec import Spec
from attncheck.relations.excerpt import Excerpt, can_excerpt
from attncheck.relations.relation import (
    Errors,
    Relation,
    compare_outputs,
    map_outputs,
    of_attention,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attncheck.core.outputs import Outputs
    from attncheck.inputs.problem import Allowed, Problem
    from attncheck.relations.relation import Finding

__all__ = [
    "CALL_ORDER",
    "DESCALE",
    "LAUNCHES",
    "MASK_ORDER",
    "PAGES",
    "REPEAT",
    "STRIDED_TENSORS",
    "STRIDES",
    "STRIDES_FAR",
]


def _runs(inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
    return inputs, inputs


def _holds(
    _: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, errors: Errors
) -> Finding | None:
    before, after = outputs
    return compare_outputs(after, before, errors)


REPEAT = Relation(
    name="repeat",
    summary="two runs on the same inputs agree",
    runs=_runs,
    holds=_holds,
    promise="repeat",
)
"""D1: to the last bit in a deterministic kernel; atomics change the order of sums."""


_LONGER = 2


def _allowed(problem: Problem) -> Mapping[str, Sequence[int]]:
    shorter = max(problem.query, problem.kv) > 1 and can_excerpt(problem, _half(problem))
    return {"between": (0, 1, 2) if shorter else (0,)}


def _half(problem: Problem) -> Excerpt:
    rows, keys = (range((length + 1) // 2) for length in (problem.query, problem.kv))
    return Excerpt.of(problem, rows=rows, keys=keys)


def _runs_of_call_order(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    problem = inputs.problem
    # Normal whatever the first: another draw of constant values is the same.
    other = problem.replace(distribution="normal", seed=(problem.seed + 1) % 2**63)
    if parameters["between"]:
        other = _half(other).problem(other)
    drawn = inputs_room.draw_inputs(other, inputs.device)
    return (drawn, inputs, drawn) if parameters["between"] == _LONGER else (inputs, drawn, inputs)


def _holds_of_call_order(
    _: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, errors: Errors
) -> Finding | None:
    before, _between, after = outputs
    return compare_outputs(after, before, errors and [errors[0], errors[2]])


CALL_ORDER = Relation(
    name="call_order",
    summary="a call after one on other inputs, with `between` 1 shorter ones and with 2 longer "
    "ones, gives what it gave before",
    runs=_runs_of_call_order,
    holds=_holds_of_call_order,
    promise="repeat",
    unfit=of_attention(gradients=True),
    allowed=_allowed,
)
"""Holds to the last bit for every kernel that gives the same bits twice: nothing is left of the
call between, whose inputs are as long, half as long, or twice. Finds workspaces that are not
cleared, padding that holds what a longer call left there, and what is kept of the last call by
pointer or shape: the runs' tensors may lie in the same memory. What is kept for good gives the
first call's again; then the call between is wrong, which comparing with exact attention shows."""


def _rows(problem: Problem) -> range:
    """Half of them: another shape than the whole."""
    return range((problem.query + 1) // 2)


def _unfit(problem: Problem) -> str | None:
    if problem.query == 1 or problem.kv == 1:
        return "it needs two rows, of which one is left out, and two keys, of which one is hidden"
    if not can_excerpt(problem, Excerpt.of(problem, rows=_rows(problem))):
        return "its mask or score mod cannot be said of some rows alone"
    return None


def _runs_of_mask_order(inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
    problem = inputs.problem
    other = Spec.of("causal") if problem.mask == FULL else FULL
    alone = Excerpt.of(problem, rows=_rows(problem)).inputs(inputs)
    return alone, inputs.replace(problem=problem.replace(mask=other)), inputs


def _holds_of_mask_order(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], _: Parameters, errors: Errors
) -> Finding | None:
    rows = len(_rows(runs[-1].problem))

    def first(of: Outputs) -> Outputs:
        return map_outputs(of, lambda tensor: tensor[:, :, :rows])

    alone, _other, whole = outputs
    return compare_outputs(first(whole), alone, errors and [errors[0], first(errors[2])])


MASK_ORDER = Relation(
    name="mask_order",
    summary="after a call of the same shape under another mask, the first rows are what they are "
    "alone",
    runs=_runs_of_mask_order,
    holds=_holds_of_mask_order,
    promise="bounds",
    unfit=of_attention(_unfit),
)
"""Holds for every right kernel: nothing is left of the call between. Finds what is kept by shape,
be it a mask, a block mask or a plan, where the shape was first met under another mask: the rows
alone are of another shape, and not mistaken. See ``rectangular`` for why they are the whole's.
"""


_MOST = 8


def _allowed_of_launches(problem: Problem) -> Allowed:
    del problem
    return {"launch": range(_MOST)}


def _holds_of_launches(
    _: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, errors: Errors
) -> Finding | None:
    own, other = outputs
    return compare_outputs(other, own, errors)


LAUNCHES = Relation(
    name="launches",
    summary="the kernel launched otherwise (`launch`: which of its launches, counted round) gives "
    "the same",
    runs=_runs,
    holds=_holds_of_launches,
    promise="bounds",
    relaunched=True,
    unfit=of_attention(gradients=True),
    allowed=_allowed_of_launches,
)
"""Other tiles, more splits or no list of tiles to skip: what the kernel's Subject says it has
(``Subject.launches``). Each run is within its own bound of the exact result, so that both together
are the bound between them. Finds what goes wrong at the edges of tiles and splits, wherever they
are, and a block mask that leaves out what a dense walk finds: at lengths where no oracle ends."""


_TENSORS = ("q", "k", "v")


def _allowed_of_descale(problem: Problem) -> Mapping[str, Sequence[int]]:
    del problem
    return {"tensor": range(len(_TENSORS))}


def _unfit_of_descale(problem: Problem) -> str | None:
    return None if problem.formats.scaled else "only fp8 has descales"


def _runs_of_descale(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    name = _TENSORS[int(parameters["tensor"])]
    whole, half = _halved(inputs.tensors()[name])
    scales = inputs.descale
    assert scales is not None, "asked of fp8"
    doubled = dataclasses.replace(scales, **{name: inputs.tensors()[f"{name}_descale"] * 2})
    replaced = partial(dataclasses.replace, inputs)
    return replaced(**{name: whole}), replaced(**{name: half, "descale": doubled})


def _halved(stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stored numbers and their halves; 0 in both where a half is not a number of the format."""
    values = stored.float()
    exact = (values / 2).to(stored.dtype).float() * 2 == values
    values = torch.where(exact, values, 0.0)
    return values.to(stored.dtype), (values / 2).to(stored.dtype)


DESCALE = Relation(
    name="descale",
    summary="q, k or v (`tensor` 0, 1, 2) stored half as large with twice the descale keeps every "
    "bit",
    runs=_runs_of_descale,
    holds=_holds,
    unfit=of_attention(_unfit_of_descale),
    allowed=_allowed_of_descale,
)
"""Holds for every right kernel, in whatever order it multiplies descales: a power of two commutes
with every rounding, also with sums that tensor cores align to their largest product. Products of
fp8 numbers and sums of them are no subnormal numbers of fp32, and drawn descales are far from both
ends of it. So it is for kernels that multiply by the descale first."""


Layout = Callable[[Inputs], Inputs]

_VECTOR = 16  # bytes: the widest load of a GPU's thread, and what TMA wants strides to be made of


def _runs_of_strides(layout: Layout, inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
    laid_out = layout(inputs)
    # A clone: one that starts in the middle of its memory counts as contiguous too.
    return _each(laid_out, partial(torch.clone, memory_format=torch.contiguous_format)), laid_out


def _holds_of_strides(
    _: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, errors: Errors
) -> Finding | None:
    contiguous, laid_out = outputs
    return compare_outputs(laid_out, contiguous, errors)


def _each(inputs: Inputs, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
    dout = None if inputs.dout is None else change(inputs.dout)
    return inputs.replace(q=change(inputs.q), k=change(inputs.k), v=change(inputs.v), dout=dout)


def _nothing(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """NaN throughout: who reads a gap shows it."""
    return torch.full(tuple(shape), math.nan, device=like.device).to(like.dtype)


def _heads_last(tensor: torch.Tensor) -> torch.Tensor:
    """(batch, length, heads, dim) in memory, as a linear layer gives it."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _gapped(tensor: torch.Tensor) -> torch.Tensor:
    """In a buffer with a row more, as a cache has, and columns more: 16 bytes."""
    batch, heads, length, dim = tensor.shape
    wider = dim + _VECTOR // tensor.element_size()
    buffer = _nothing(tensor, (batch, heads, length + 1, wider))
    view = buffer[:, :, :length, :dim]
    view.copy_(tensor)
    return view


def _offset(tensor: torch.Tensor) -> torch.Tensor:
    """From the second element of its memory on: aligned to an element, and to no vector."""
    buffer = _nothing(tensor, (tensor.numel() + 1,))
    view = buffer[1:].view(tensor.shape)
    view.copy_(tensor)
    return view


def _packed(inputs: Inputs) -> Inputs:
    """Rows of q's heads, k's heads and v's heads side by side, as one linear layer gives them."""
    tensors = (inputs.q, inputs.k, inputs.v)
    widths = [tensor.shape[1] * tensor.shape[3] for tensor in tensors]
    longest = max(tensor.shape[2] for tensor in tensors)
    buffer = _nothing(inputs.q, (inputs.q.shape[0], longest, sum(widths)))
    views = []
    for tensor, columns in zip(tensors, torch.split(buffer, widths, dim=-1), strict=True):
        batch, heads, length, dim = tensor.shape
        view = columns[:, :length].view(batch, length, heads, dim).transpose(1, 2)
        view.copy_(tensor)
        views.append(view)
    q, k, v = views
    return inputs.replace(q=q, k=k, v=v)


def _transposed(inputs: Inputs) -> Inputs:
    """K as (batch, heads, dim, length) in memory."""
    return inputs.replace(k=inputs.k.mT.contiguous().mT)


def _expanded(inputs: Inputs) -> Inputs:
    """K and V of the first sequence's first head, for all by strides of 0.

    And one number for all of dOut: the gradient of a sum, which is what ``out.sum()`` passes on.
    """
    k, v = (tensor[:1, :1].clone().expand(tensor.shape) for tensor in (inputs.k, inputs.v))
    dout = inputs.dout
    if dout is not None:
        dout = dout.flatten()[:1].clone().expand(dout.shape)
    return inputs.replace(k=k, v=v, dout=dout)


def _one_head(problem: Problem) -> str | None:
    lengths = max(problem.query, problem.kv)
    return "heads lie beside each other already" if problem.heads == 1 or lengths == 1 else None


def _one_pair(problem: Problem) -> str | None:
    pairs = problem.batch * problem.kv_heads
    return "its one key head lies where any view of it does" if pairs == 1 else None


def _one_line(problem: Problem) -> str | None:
    return "a vector has no other layout" if 1 in {problem.kv, problem.head_dim} else None


def _relation(
    name: str, how: str, layout: Layout, same: Callable[[Problem], str | None] = fits_all
) -> Relation:
    """Every bit stays when ``layout`` changes strides alone.

    Holds for every right kernel within bounds, and to the last bit where the order of sums does not
    depend on strides. A kernel that asks for contiguous rows or for an alignment may refuse.
    """
    return Relation(
        name=name,
        summary=f"q, k and v {how} give what they give contiguous",
        runs=partial(_runs_of_strides, layout),
        holds=_holds_of_strides,
        promise="layout",
        unfit=of_attention(same, gradients=True),
    )


STRIDES = (
    _relation(
        "strides_heads_last",
        "with heads beside each other in memory (batch, length, heads, dim)",
        partial(_each, change=_heads_last),
        _one_head,
    ),
    _relation(
        "strides_gapped",
        "inside larger buffers whose other numbers are NaN",
        partial(_each, change=_gapped),
    ),
    _relation(
        "strides_offset",
        "from the second element of their memory on",
        partial(_each, change=_offset),
    ),
    _relation("strides_packed", "as views of one buffer", _packed),
    _relation("strides_expanded", "with one k and v for all by strides of 0", _expanded, _one_pair),
    _relation("strides_transposed", "with k's dim not innermost in memory", _transposed, _one_line),
)
"""A kernel that takes another layout than it was given reads other rows, or a gap's NaN."""


_FAR = 2**31  # elements: one more than an int32 counts
STRIDED_TENSORS = ("q", "k", "v", "dout")
"""What the parameter ``tensor`` counts."""


def _allowed_of_strides_far(problem: Problem) -> Allowed:
    rows = {"q": problem.query}
    if problem.paging is None:  # pages lie where the page table says
        rows |= {"k": problem.kv, "v": problem.kv}
    if problem.backward:
        rows["dout"] = problem.query
    # Of two rows the stride itself is more than an int32 holds, and so none is what it is kept in.
    return {"tensor": [STRIDED_TENSORS.index(name) for name, length in rows.items() if length > 2]}


def _unfit_of_strides_far(problem: Problem) -> str | None:
    return (
        None
        if _allowed_of_strides_far(problem)["tensor"]
        else "two rows are no more than a stride apart"
    )


def _runs_of_strides_far(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    tensors = inputs.tensors()
    name = STRIDED_TENSORS[int(parameters["tensor"])]
    tensors[name] = _far(tensors[name])
    q, k, v = (tensors[name] for name in "qkv")
    return inputs, inputs.replace(q=q, k=k, v=v, dout=tensors.get("dout"))


def _far(tensor: torch.Tensor) -> torch.Tensor:
    """Rows of its last quarter are 2³¹ elements and more behind the first, and as many before it.

    The last alone may be hidden from all. And an offset that has become negative is still one of
    this memory: what is there is read, and nothing is stopped.
    """
    batch, heads, length, dim = tensor.shape
    vector = _VECTOR // tensor.element_size()
    wide = _whole(dim, vector)
    far = max(2, 3 * length // 4)  # the first such row; times it, its stride is an int32 still
    row = _whole(max(-(-_FAR // far), batch * heads * wide), vector)
    whole = strided_alloc.reserve_memory(_FAR + (length - 1) * row + batch * heads * wide, tensor)
    view = whole.as_strided(tensor.shape, (heads * wide, wide, row, 1), _FAR)
    return view.copy_(tensor)


def _whole(number: int, of: int) -> int:
    return -(-number // of) * of


def _holds_of_strides_far(
    _: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, errors: Errors
) -> Finding | None:
    near, far = outputs
    return compare_outputs(far, near, errors)


STRIDES_FAR = Relation(
    name="strides_far",
    summary="with the rows of `tensor` (0 q, 1 k, 2 v, 3 dOut) 2³¹ elements apart, all stays",
    runs=_runs_of_strides_far,
    holds=_holds_of_strides_far,
    promise="layout",
    spacious=True,
    unfit=of_attention(_unfit_of_strides_far, gradients=True),
    allowed=_allowed_of_strides_far,
)
"""A 32-bit product of a row's number and a stride wraps, and another row is read."""


_USUAL = (16, 64, 256)
_ODD = 3
_ORDERS = (1, 2)


def _unfit_of_pages(problem: Problem) -> str | None:
    return "its keys are in no pages" if problem.paging is None else None


def _paging(problem: Problem) -> Paging:
    assert problem.paging is not None, "asked of what has pages"
    return problem.paging


def _allowed_of_pages(problem: Problem) -> Mapping[str, Sequence[int]]:
    """The Problem's own size and usual ones; an odd one where its own is no multiple of 16 either.

    Sharing may be undone, and not added: only what was drawn alike can lie there once.
    """
    own = _paging(problem)
    odd = {_ODD} if own.size % _USUAL[0] else set()
    return {
        "size": sorted({own.size, *_USUAL, *odd}),
        "order": _ORDERS,
        "shared": sorted({0, own.shared}),
    }


def _runs_of_pages(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
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
    runs=_runs_of_pages,
    holds=_holds,
    promise="layout",
    unfit=of_attention(_unfit_of_pages),
    allowed=_allowed_of_pages,
)
"""Holds for every right kernel within bounds: pages change where a number lies, and no number. To
the last bit of one in which the order of sums does not depend on them; a kernel whose tile is a
page promises less. Free pages, which are NaN, are others in the second run. Finds tables that are
read transposed, across sequences, by another page size or beyond their end, and what is kept of a
page by its number. A kernel that takes no pages of a size may refuse them."""
