"""Relations between two masks or score mods that are the same function for a Problem."""

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
_COMPOSED = {"and", "or", "not"}  # not ``offset``: with shifted rows, other numbers are equivalent


def _walk_composed(mask: Spec) -> Iterator[Spec]:
    yield mask
    if mask.name in _COMPOSED:
        for part in mask.parts:
            yield from _walk_composed(part)


def _replace_masks(inputs: Inputs, names: set[str], new: Spec) -> Inputs:
    """Return inputs in which ``new`` replaces all masks with one of ``names``."""

    def swap(mask: Spec) -> Spec:
        if mask.name in names:
            return new
        return Spec.of(mask.name, *map(swap, mask.parts)) if mask.name in _COMPOSED else mask

    return inputs.replace(problem=inputs.problem.replace(mask=swap(inputs.problem.mask)))


def _equal_masks_relation(
    name: str, summary: str, plain: str, other: str, numbers: Callable[[Problem], Sequence[int]]
) -> Relation:
    """Return the relation that a mask without arguments equals another mask with some argument.

    Applies to Problems whose mask is one of the two or is composed of one (``and``, ``or``,
    ``not``); all occurrences are replaced. Holds for every right kernel within bounds: the two
    masks are the same function of the indices, but the kernel may visit other tiles.

    Args:
        plain: The mask that has no arguments.
        other: The mask that has one argument, ``window`` or ``prefix``.
        numbers: Problem → the arguments that make both masks equal, smallest first.
    """
    names, parameter = {plain, other}, "window" if other == "sliding_window" else "prefix"

    def unfit(problem: Problem) -> str | None:
        if any(part.name in names for part in _walk_composed(problem.mask)):
            return None
        return f"its mask is neither {plain} nor {other}, nor composed of one"

    def runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
        exchange = partial(_replace_masks, inputs, names)
        equal_mask = Spec.of(other, **{parameter: int(parameters[parameter])})
        return exchange(Spec.of(plain)), exchange(equal_mask)

    return Relation(
        name=name,
        summary=summary,
        runs=runs,
        promise="bounds",
        unfit=of_attention(unfit, gradients=True),
        allowed=lambda problem: {parameter: numbers(problem)},
    )


WINDOW_BEYOND = _equal_masks_relation(
    "window_beyond",
    "sliding_window with a `window` of the length or more is causal",
    "causal",
    "sliding_window",
    # The last row is query − 1 from the first key, which a window of query just reaches.
    lambda problem: (problem.query, problem.query + 1, _INT32_LARGEST),
)
"""Finds windows off by one, and overflows when an index is added to the largest window."""

PREFIX_ZERO = _equal_masks_relation(
    "prefix_zero",
    "prefix_lm with a `prefix` of 0 or 1 is causal",
    "causal",
    "prefix_lm",
    # Every row sees key 0 anyway, so that prefixes of 0 and 1 are the same mask.
    lambda _: (0, 1),
)
"""A kernel may have a path of its own for plain causal masks, with its own tile limits."""

PREFIX_FULL = _equal_masks_relation(
    "prefix_full",
    "prefix_lm with a `prefix` of all keys or more is full",
    "full",
    "prefix_lm",
    lambda problem: (problem.kv, problem.kv + 1, _INT32_LARGEST),
)
"""Finds kernels that read beyond the last key when the prefix is longer."""

# ------------------------------------------------------------------ score mods

# Caps are powers of two, so that score / cap and cap · tanh are exact. 2^24 is as far above a score
# of 1 as fp32 resolves; a score below 2^-62 would become subnormal when divided by 2^64.
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
    """Return how far the exact out, and LSE if ``like`` has it, may be apart with and without cap.

    |x − tanh x| ≤ |x|³ / 3, so that a score of at most S moves by at most δ = S³ / (3·cap²), LSE by
    δ and out by (e^2δ − 1)·max|v|: each weight changes by a factor within e^±2δ, and the weights
    sum to 1. S = |scale| · max‖q‖ · max‖k‖ of a head, by Cauchy–Schwarz; it is doubled to cover
    float64's rounding errors.
    """
    q, k, v = inputs.promoted()
    group = inputs.problem.group
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    longest = (tensor.norm(dim=-1).amax(-1) for tensor in (q, k))
    largest = 2 * abs(inputs.problem.scale) * torch.stack(list(longest)).prod(0)
    lse_shift = (largest**3 / (3 * cap**2))[..., None]
    out = torch.expm1(2 * lse_shift)[..., None] * v.abs().amax(2, keepdim=True)
    lse = None if like.lse is None else lse_shift.expand_as(like.lse)
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
"""Holds for every right kernel: the tolerance includes what tanh changes in small numbers, see
``_exact_difference``, and the judge's bounds include the kernel's tanh. Finds a tanh computed from
exponentials, which is inaccurate for small numbers, and a cap that is hard-coded somewhere."""
