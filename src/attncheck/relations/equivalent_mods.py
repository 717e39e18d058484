"""Relations between masks or score mods that are the same function for a Problem."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from attncheck.core.outputs import Outputs
from attncheck.mods.library import NONE
from attncheck.mods.spec import Spec
from attncheck.relations.relation import Errors, Relation, compare_outputs, of_attention

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Allowed, Parameters, Problem
    from attncheck.relations.relation import Finding

__all__ = ["PREFIX_FULL", "PREFIX_ZERO", "SOFTCAP_INFINITE", "WINDOW_BEYOND", "equal_masks"]


def equal_masks(
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
    return compare_outputs(given, plain, errors)


_INT32_LARGEST = 2**31 - 1


def _windows(problem: Problem) -> tuple[int, ...]:
    """The last row is query − 1 from the first key, which a window of query just reaches."""
    return (problem.query, problem.query + 1, _INT32_LARGEST)


WINDOW_BEYOND = equal_masks(
    name="window_beyond",
    summary="sliding_window with a `window` of the length or more is causal",
    plain="causal",
    argument=("sliding_window", "window"),
    numbers=_windows,
)
"""Finds windows off by one, and a largest window that overflows where an index is added."""


def _nothing(problem: Problem) -> tuple[int, ...]:
    """Key 0 is seen by every row anyway: a prefix of 1 hides and shows what 0 does."""
    del problem
    return (0, 1)


def _everything(problem: Problem) -> tuple[int, ...]:
    return (problem.kv, problem.kv + 1, _INT32_LARGEST)


PREFIX_ZERO = equal_masks(
    name="prefix_zero",
    summary="prefix_lm with a `prefix` of 0 or 1 is causal",
    plain="causal",
    argument=("prefix_lm", "prefix"),
    numbers=_nothing,
)
"""The plain causal mask may take a path of its own, which knows where its tiles end."""

PREFIX_FULL = equal_masks(
    name="prefix_full",
    summary="prefix_lm with a `prefix` of all keys or more is full",
    plain="full",
    argument=("prefix_lm", "prefix"),
    numbers=_everything,
)
"""No key after the last is a key, however long the prefix."""


# Powers of two: score / cap and cap · tanh are exact. 2^24 is as far above a score of 1 as fp32
# resolves; below 2^-62 a score would be a subnormal number when divided by 2^64.
_EXPONENTS = (24, 40, 64)


def _exponents(problem: Problem) -> Mapping[str, Sequence[int]]:
    del problem
    return {"exponent": _EXPONENTS}


def _unfit(problem: Problem) -> str | None:
    if problem.score.name not in {"none", "softcap"}:
        return "its score mod is neither none nor softcap"
    return None


def _runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    softcap = Spec.of("softcap", cap=2.0 ** parameters["exponent"])
    plain, capped = (inputs.problem.replace(score=score) for score in (NONE, softcap))
    return inputs.replace(problem=plain), inputs.replace(problem=capped)


def _holds_of_softcap_infinite(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], parameters: Parameters, errors: Errors
) -> Finding | None:
    assert errors is not None, "tanh rounds"
    plain, capped = outputs
    between = _difference(runs[0], 2.0 ** parameters["exponent"], errors[0])
    return compare_outputs(capped, plain, [*errors, between])


def _difference(inputs: Inputs, cap: float, like: Outputs) -> Outputs:
    """How far the two exact results may be apart, as far as ``like`` has out and LSE.

    |x − tanh x| ≤ |x|³ / 3, so that a score of at most S moves by at most δ = S³ / (3·cap²), LSE by
    δ and out by (e^2δ − 1)·max|v|: each weight changes by a factor within e^±2δ, and Σ of weights
    is 1. S = scale · max‖q‖ · max‖k‖ of a head, by Cauchy and Schwarz; twice that is more than
    float64's own roundings make of it.
    """
    q, k, v = inputs.promoted()
    group = inputs.problem.group
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    longest = (tensor.norm(dim=-1).amax(-1) for tensor in (q, k))
    largest = 2 * inputs.problem.scale * torch.stack(list(longest)).prod(0)
    moved = (largest**3 / (3 * cap**2))[..., None]
    out = torch.expm1(2 * moved)[..., None] * v.abs().amax(2, keepdim=True)
    lse = None if like.lse is None else moved.expand_as(like.lse)
    return Outputs(out.expand_as(like.out), lse)


SOFTCAP_INFINITE = Relation(
    name="softcap_infinite",
    summary="softcap with a cap of 2^`exponent`, far above every score, is no score mod",
    runs=_runs,
    holds=_holds_of_softcap_infinite,
    promise="bounds",
    unfit=of_attention(_unfit),
    allowed=_exponents,
)
"""Holds for every right kernel: what tanh of a small number leaves out is allowed for, see
``_difference``, and the judge's bounds know the kernel's tanh. Finds a tanh that is made of
exponentials and loses small numbers, and a cap that is fixed somewhere."""
