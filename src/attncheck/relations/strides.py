"""The same numbers, laid out otherwise in memory, give the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from attncheck.inputs import Inputs
from attncheck.question import fits_all
from attncheck.relations.agreement import agree
from attncheck.relations.fit import of_attention
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.relations.finding import Finding

__all__ = ["STRIDES"]

Layout = Callable[[Inputs], Inputs]

_VECTOR = 16  # bytes: the widest load of a GPU's thread, and what TMA wants strides to be made of


def _runs(layout: Layout, inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
    laid_out = layout(inputs)
    # A clone: one that starts in the middle of its memory counts as contiguous too.
    return _each(laid_out, partial(torch.clone, memory_format=torch.contiguous_format)), laid_out


def _holds(
    _: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, errors: Errors
) -> Finding | None:
    contiguous, laid_out = outputs
    return agree(laid_out, contiguous, errors)


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
        runs=partial(_runs, layout),
        holds=_holds,
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
