"""Named distributions of q, k and v, and of a softmax's scores.

Numbers are drawn in float64 and elementwise (no matrix product is the same bits everywhere);
``inputs`` rounds them once. What is said of logits holds at the default scale, 1/√head_dim, and
without a score mod.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attncheck.core.draws import Draws
from attncheck.core.errors import ProblemError, UnknownName, refuse_recorded, without_recorded
from attncheck.inputs import distribution_scores, distribution_tensors
from attncheck.inputs.distribution_tensors import Drawn, Floats, Sizes

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "DISTRIBUTIONS",
    "Distribution",
    "Drawn",
    "Sizes",
    "distribution_named",
    "draw",
    "draw_scores",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A way to draw q, k and v, or scores.

    Attributes:
        name: Its name on the command line.
        summary: What it provokes, in one line.
        draw: The drawing itself: (Draws, Sizes) → q, k, v.
        scores: (Draws, Sizes) → the scores of a softmax, of the same character as the logits of
            q and k; None where only q, k and v make sense.
        generic: Whether rounding errors in it are as good as random: no two keys or rows alike, no
            number that is exact on purpose.
    """

    name: str
    summary: str
    draw: Callable[[Draws, Sizes], Drawn]
    scores: Callable[[Draws, Sizes], Floats] | None = None
    generic: bool = True


def draw(name: str, sizes: Sizes, seed: int) -> Drawn:
    """Draw float64 q, k and v of distribution ``name``, with the same bits on every machine.

    Args:
        name: A name of ``DISTRIBUTIONS``; raises UnknownName with the valid names.
        sizes: Sizes of the tensors.
        seed: Which draw.

    Returns:
        q ``(batch, heads, query, head_dim)``, k ``(batch, kv_heads, kv, head_dim)`` and
        v ``(batch, kv_heads, kv, value_dim)``.
    """
    return distribution_named(name).draw(Draws(seed), sizes)


def draw_scores(name: str, sizes: Sizes, seed: int) -> Floats:
    """Draw the float64 scores of a softmax, ``(batch, heads, query, kv)``.

    Arguments as for ``draw``; raises ProblemError for a distribution that has none.
    """
    drawing = distribution_named(name).scores
    if drawing is None:
        able = ", ".join(d.name for d in DISTRIBUTIONS.values() if d.scores)
        raise ProblemError(f"distribution {name!r} has no scores for softmax: choose from {able}.")
    return drawing(Draws(seed), sizes)


def distribution_named(name: str) -> Distribution:
    """The distribution called ``name``.

    Raises UnknownName with the valid names; ProblemError for one of a recording that is not loaded.
    """
    if isinstance(name, str) and name in DISTRIBUTIONS:
        return DISTRIBUTIONS[name]
    if isinstance(name, str):
        refuse_recorded("distribution", name)
    raise UnknownName("distribution", name, without_recorded(DISTRIBUTIONS))


_PROVOKES = {
    "normal": "standard normal q, k and v: the ordinary case",
    "outliers": "N(0,1) + N(0,100)·Bernoulli(0.001), FlashAttention-3's: low-precision products",
    "uniform": "uniform on [0, 1): all signs equal, so errors add up as a bias",
    "large_logits": "logits of standard deviation 32: "
    "exp without the maximum subtracted overflows fp32",
    "negative_logits": "every logit near −128: a running maximum that starts at 0 divides 0 by 0",
    "one_hot": "each row gives one key the weight 1 (if kv ≤ 2**head_dim): "
    "the key's index and head",
    "constant_rows": "all q rows equal, all k rows equal: even weights, from logits that are not 0",
    "sink": "key 0 takes over 9/10 of the weight and its v is small: the rest must not be lost",
    "ones_v": "V = 1: out is exactly 1, so only normalisation is left",
    "zero_q": "q = 0: even weights over the visible keys, by counting",
}

_STRUCTURED = ("negative_logits", "one_hot", "constant_rows", "sink", "ones_v", "zero_q")

DISTRIBUTIONS: dict[str, Distribution] = {
    name: Distribution(
        name=name,
        summary=summary,
        draw=getattr(distribution_tensors, name),
        scores=getattr(distribution_scores, name, None),  # ones_v has none
        generic=name not in _STRUCTURED,
    )
    for name, summary in _PROVOKES.items()
}
