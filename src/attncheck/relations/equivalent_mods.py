"""Relations between masks or score mods that are the same function for a Problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from attncheck.core.mod_spec import NONE, Spec
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Parameters, Problem
from attncheck.relations.relation import Finding, Relation, Results, compare_outputs, of_attention

_INT32_LARGEST = 2**31 - 1
_COMPOSED = {"and", "or", "not"}  # in an offset, rows are others: a number there means another mask


def _parts(mask: Spec) -> Iterator[Spec]:
    yield mask
    if mask.name in _COMPOSED:
        for part in mask.parts:
            yield from _parts(part)


def _exchange(inputs: Inputs, names: set[str], new: Spec) -> Inputs:
    """Inputs with ``new`` in the place of all masks called one of ``names``."""

    def within(mask: Spec) -> Spec:
        if mask.name in names:
            return new
        return Spec.of(mask.name, *map(within, mask.parts)) if mask.name in _COMPOSED else mask

    return inputs.replace(problem=inputs.problem.replace(mask=within(inputs.problem.mask)))


def _equal_masks(
    name: str, summary: str, plain: str, other: str, numbers: Callable[[Problem], Sequence[int]]
) -> Relation:
    """A mask without arguments, and another that some numbers make the same, in its place.

    Applies to Problems whose mask is one of the two or is composed of one (``and``, ``or``,
    ``not``); all of them there are exchanged. Holds for every right kernel within bounds: the two
    are the same function of the indices, but the kernel may visit other tiles.

    Args:
        plain: The mask that has no arguments.
        other: The other, which has one: ``window`` or ``prefix``.
        numbers: Those that make it the same, by Problem, smallest first.
    """
    names, parameter = {plain, other}, "window" if other == "sliding_window" else "prefix"

    def unfit(problem: Problem) -> str | None:
        if any(part.name in names for part in _parts(problem.mask)):
            return None
        return f"its mask is neither {plain} nor {other}, nor composed of one"

    def runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
        exchange = partial(_exchange, inputs, names)
        same = Spec.of(other, **{parameter: int(parameters[parameter])})
        return exchange(Spec.of(plain)), exchange(same)

    return Relation(
        name=name,
        summary=summary,
        runs=runs,
        promise="bounds",
        unfit=of_attention(unfit, gradients=True),
        allowed=lambda problem: {parameter: numbers(problem)},
    )


WINDOW_BEYOND = _equal_masks(
    "window_beyond",
    "sliding_window with a `window` of the length or more is causal",
    "causal",
    "sliding_window",
    # The last row is query − 1 from the first key, which a window of query just reaches.
    lambda problem: (problem.query, problem.query + 1, _INT32_LARGEST),
)
"""Finds windows off by one, and a largest window that overflows where an index is added."""

PREFIX_ZERO = _equal_masks(
    "prefix_zero",
    "prefix_lm with a `prefix` of 0 or 1 is causal",
    "causal",
    "prefix_lm",
    # Key 0 is seen by every row anyway: a prefix of 1 hides and shows what 0 does.
    lambda _: (0, 1),
)
"""The plain causal mask may take a path of its own, which knows where its tiles end."""

PREFIX_FULL = _equal_masks(
    "prefix_full",
    "prefix_lm with a `prefix` of all keys or more is full",
    "full",
    "prefix_lm",
    lambda problem: (problem.kv, problem.kv + 1, _INT32_LARGEST),
)
"""No key after the last is a key, however long the prefix."""

# ------------------------------------------------------------------ score mods

# Powers of two: score / cap and cap · tanh are exact. 2^24 is as far above a score of 1 as fp32
# resolves; below 2^-62 a score would be a subnormal number when divided by 2^64.
_EXPONENTS = (24, 40, 64)


def _unless_capped_or_plain(problem: Problem) -> str | None:
    if problem.score.name not in {"none", "softcap"}:
        return "its score mod is neither none nor softcap"
    return None


def _cap_scores(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    softcap = Spec.of("softcap", cap=2.0 ** parameters["exponent"])
    plain, capped = (inputs.problem.replace(score=score) for score in (NONE, softcap))
    return inputs.replace(problem=plain), inputs.replace(problem=capped)


def _compare_capped(results: Results) -> Finding | None:
    plain, capped = results.outputs
    errors = results.bounds()
    cap = 2.0 ** results.parameters["exponent"]
    difference = _exact_difference(results.inputs[0], cap, errors[0])
    return compare_outputs(capped, plain, [*errors, difference])


def _exact_difference(inputs: Inputs, cap: float, like: Outputs) -> Outputs:
    """Return how far the two exact results may be apart, as far as ``like`` has out and LSE.

    |x − tanh x| ≤ |x|³ / 3, so that a score of at most S moves by at most δ = S³ / (3·cap²), LSE by
    δ and out by (e^2δ − 1)·max|v|: each weight changes by a factor within e^±2δ, and Σ of weights
    is 1. S = |scale| · max‖q‖ · max‖k‖ of a head, by Cauchy and Schwarz; twice that is more than
    float64's own roundings make of it.
    """
    q, k, v = inputs.promoted()
    group = inputs.problem.group
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    longest = (tensor.norm(dim=-1).amax(-1) for tensor in (q, k))
    largest = 2 * abs(inputs.problem.scale) * torch.stack(list(longest)).prod(0)
    moved = (largest**3 / (3 * cap**2))[..., None]
    out = torch.expm1(2 * moved)[..., None] * v.abs().amax(2, keepdim=True)
    lse = None if like.lse is None else moved.expand_as(like.lse)
    return Outputs(out.expand_as(like.out), lse)


SOFTCAP_INFINITE = Relation(
    name="softcap_infinite",
    summary="softcap with a cap of 2^`exponent`, far above every score, is no score mod",
    runs=_cap_scores,
    rule=_compare_capped,
    promise="bounds",
    unfit=of_attention(_unless_capped_or_plain),
    allowed=lambda _: {"exponent": _EXPONENTS},
)
"""Holds for every right kernel: what tanh of a small number leaves out is allowed for, see
``_exact_difference``, and the judge's bounds know the kernel's tanh. Finds a tanh that is made of
exponentials and loses small numbers, and a cap that is fixed somewhere."""
