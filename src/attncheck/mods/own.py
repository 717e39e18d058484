"""A mask or score mod from a file of the user's: traced, checked, and in the library by its name.

The file is imported once for each device, with that device as torch's default, so that the tensors
its mods capture are made there.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from attncheck.errors import ProblemError, UsageError
from attncheck.mods import library
from attncheck.mods.index_ranges import check_index_ranges
from attncheck.mods.serialise import digest
from attncheck.mods.spec import Spec
from attncheck.mods.trace import trace_mask, trace_score
from attncheck.source_files import member

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.mods.arguments import Check
    from attncheck.mods.expression import Expression
    from attncheck.mods.spec import Argument, Dimensions

__all__ = ["is_reference", "own_mask", "own_score"]

_REFERENCE = re.compile(r".+\.py::[^:]+")


def is_reference(text: str) -> bool:
    """Whether ``text`` is ``file.py::name``, and no name of the library."""
    return _REFERENCE.fullmatch(text) is not None


def own_mask(reference: str) -> Spec:
    """The mask ``file.py::name``, from now on in the library under its file's own name.

    Its Spec carries a digest of what was traced, so that a Problem's id stands for the mask as it
    is now. A Problem is refused where the mask reads outside a tensor that it captures.

    Raises:
        UsageError: for a file or name that is not there or cannot be imported.
        TraceError: for a mask that cannot be traced, or does not give what a mask gives.
    """
    return _own(reference, "mask", trace_mask, library.MASKS)


def own_score(reference: str) -> Spec:
    """The score mod ``file.py::name``; as ``own_mask``."""
    return _own(reference, "score mod", trace_score, library.SCORES)


def _own(
    reference: str,
    what: str,
    trace: Callable[..., Expression],
    entries: dict[str, library.Entry[Any]],
) -> Spec:
    if not is_reference(reference):
        raise UsageError(f"{what} {reference!r} is not FILE.py::NAME.")
    expression = trace(_mod(reference, what, "cpu"))
    known, number = reference.rpartition("/")[2], int(digest(expression)[:10], 16)
    entries[known] = library.Entry(
        summary=str(expression),
        build=lambda _values, _dimensions, device: _mod(reference, what, device),
        arguments={"digest": _as_traced(known, what, expression, number)},
        additive=_adds(expression),
    )
    return Spec.of(known, digest=number)


@cache
def _mod(reference: str, what: str, device: str) -> Any:
    with torch.device(device):
        mod = member(reference, f"{what} {reference!r}")
    if not callable(mod):
        raise UsageError(f"{what} {reference!r} is {type(mod).__name__}: it must be a callable.")
    return mod


def _as_traced(known: str, what: str, expression: Expression, number: int) -> Check:
    """The check of a Spec's digest; indices are looked at once for each set of dimensions."""

    @cache
    def inside(dimensions: Dimensions) -> None:
        check_index_ranges(expression, dimensions, f"{what} {known!r}")

    def check(_label: str, value: Argument, dimensions: Dimensions) -> None:
        if value != number:
            raise ProblemError(
                f"{what} {known!r} has changed: the problem was made with digest {value}, "
                f"the file gives {number}."
            )
        inside(dimensions)

    return check


def _adds(expression: Expression) -> bool:
    """Whether a score mod is the score plus or minus what does not depend on the score."""
    depends: list[bool] = []
    sums: list[bool] = []
    for node in expression.structure.nodes:
        score = node.op == "input" and node.name == "score"
        added = False
        if node.op in {"add", "sub"}:
            first, second = node.operands
            added = sums[first] and not depends[second]
            added |= node.op == "add" and sums[second] and not depends[first]
        sums.append(score or added)
        depends.append(score or any(depends[i] for i in node.operands))
    return sums[-1]
