"""The same keys and values in other pages give the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.paging import Paging
from attncheck.relations.agreement import agree
from attncheck.relations.fit import of_attention
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.relations.finding import Finding

__all__ = ["PAGES"]

_USUAL = (16, 64, 256)
_ODD = 3
_ORDERS = (1, 2)


def _unfit(problem: Problem) -> str | None:
    return "its keys are in no pages" if problem.paging is None else None


def _paging(problem: Problem) -> Paging:
    assert problem.paging is not None, "asked of what has pages"
    return problem.paging


def _allowed(problem: Problem) -> Mapping[str, Sequence[int]]:
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


def _runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    problem = inputs.problem
    other = Paging(
        size=int(parameters["size"]),
        seed=(_paging(problem).seed + int(parameters["order"])) % 2**63,
        shared=int(parameters["shared"]),
    )
    return inputs, inputs.replace(problem=problem.replace(paging=other))


def _holds(
    _: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, errors: Errors
) -> Finding | None:
    before, after = outputs
    return agree(after, before, errors)


PAGES = Relation(
    name="pages",
    summary="the same keys and values in pages of `size`, in another order and with `shared` "
    "leading pages of all sequences, give what they gave before",
    runs=_runs,
    holds=_holds,
    promise="layout",
    unfit=of_attention(_unfit),
    allowed=_allowed,
)
"""Holds for every right kernel within bounds: pages change where a number lies, and no number. To
the last bit of one in which the order of sums does not depend on them; a kernel whose tile is a
page promises less. Free pages, which are NaN, are others in the second run. Finds tables that are
read transposed, across sequences, by another page size or beyond their end, and what is kept of a
page by its number. A kernel that takes no pages of a size may refuse them."""
