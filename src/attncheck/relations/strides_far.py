"""One tensor's rows so far apart that 32 bits do not count the elements between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck import spread
from attncheck.relations.agreement import agree
from attncheck.relations.fit import of_attention
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.question import Allowed
    from attncheck.relations.finding import Finding

__all__ = ["STRIDES_FAR", "TENSORS"]

_FAR = 2**31  # elements: one more than an int32 counts
TENSORS = ("q", "k", "v", "dout")
"""What the parameter ``tensor`` counts."""
_VECTOR = 16  # bytes: the widest load of a GPU's thread, and what TMA wants strides to be made of


def _allowed(problem: Problem) -> Allowed:
    rows = {"q": problem.query}
    if problem.paging is None:  # pages lie where the page table says
        rows |= {"k": problem.kv, "v": problem.kv}
    if problem.backward:
        rows["dout"] = problem.query
    # Of two rows the stride itself is more than an int32 holds, and so none is what it is kept in.
    return {"tensor": [TENSORS.index(name) for name, length in rows.items() if length > 2]}


def _unfit(problem: Problem) -> str | None:
    return None if _allowed(problem)["tensor"] else "two rows are no more than a stride apart"


def _runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    tensors = inputs.tensors()
    name = TENSORS[int(parameters["tensor"])]
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
    whole = spread.reserved(_FAR + (length - 1) * row + batch * heads * wide, tensor)
    view = whole.as_strided(tensor.shape, (heads * wide, wide, row, 1), _FAR)
    return view.copy_(tensor)


def _whole(number: int, of: int) -> int:
    return -(-number // of) * of


def _holds(
    _: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, errors: Errors
) -> Finding | None:
    near, far = outputs
    return agree(far, near, errors)


STRIDES_FAR = Relation(
    name="strides_far",
    summary="with the rows of `tensor` (0 q, 1 k, 2 v, 3 dOut) 2³¹ elements apart, all stays",
    runs=_runs,
    holds=_holds,
    promise="layout",
    spacious=True,
    unfit=of_attention(_unfit, gradients=True),
    allowed=_allowed,
)
"""A 32-bit product of a row's number and a stride wraps, and another row is read."""
