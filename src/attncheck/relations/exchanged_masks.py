"""Two masks that are the same one for this Problem give the same."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from attncheck.mods.spec import Spec
from attncheck.relations.agreement import agree
from attncheck.relations.fit import of_attention
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.question import Allowed
    from attncheck.relations.finding import Finding

__all__ = ["exchanged_masks"]


def exchanged_masks(
    *,
    name: str,
    summary: str,
    plain: str,
    argument: tuple[str, str],
    numbers: Callable[[Problem], Sequence[int]],
) -> Relation:
    """A mask without arguments, and another that some number makes the same, in its place.

    Asked of Problems whose mask is one of the two or is composed of one (``and``, ``or``, ``not``);
    all of them there are exchanged. Holds for every right kernel within bounds: the two are the
    same function of the indices, but the kernel may visit other tiles.

    Args:
        name: Of the relation.
        summary: Of the relation.
        plain: Name of the mask that has no arguments.
        argument: Name of the other, and of its argument.
        numbers: Those that make it the same, by Problem, smallest first.
    """
    other, parameter = argument
    names = {plain, other}

    def unfit(problem: Problem) -> str | None:
        if any(part.name in names for part in _unshifted(problem.mask)):
            return None
        return f"its mask is neither {plain} nor {other}, nor composed of one"

    def allowed(problem: Problem) -> Allowed:
        return {parameter: numbers(problem)}

    def runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
        given = Spec.of(other, **{parameter: int(parameters[parameter])})
        exchanged = partial(_exchanged, inputs, names)
        return exchanged(Spec.of(plain)), exchanged(given)

    return Relation(
        name=name,
        summary=summary,
        runs=runs,
        holds=_holds,
        promise="bounds",
        unfit=of_attention(unfit, gradients=True),
        allowed=allowed,
    )


_COMPOSED = {"and", "or", "not"}  # in an offset, rows are others: a number there means another mask


def _unshifted(mask: Spec) -> Iterator[Spec]:
    yield mask
    if mask.name in _COMPOSED:
        for part in mask.parts:
            yield from _unshifted(part)


def _exchanged(inputs: Inputs, names: set[str], new: Spec) -> Inputs:
    def within(mask: Spec) -> Spec:
        if mask.name in names:
            return new
        return Spec.of(mask.name, *map(within, mask.parts)) if mask.name in _COMPOSED else mask

    return inputs.replace(problem=inputs.problem.replace(mask=within(inputs.problem.mask)))


def _holds(
    _: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, errors: Errors
) -> Finding | None:
    plain, given = outputs
    return agree(given, plain, errors)
