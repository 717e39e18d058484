"""Whole Problems."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

from hypothesis import strategies as st

from attncheck.core.errors import UnknownName, UsageError, without_recorded
from attncheck.core.formats import DTYPES
from attncheck.inputs.distributions import DISTRIBUTIONS
from attncheck.inputs.problem import Problem
from attncheck.mods.library import NONE
from attncheck.mods.spec import Dimensions
from attncheck.strategies import nearest
from attncheck.strategies.masks import masks as any_masks
from attncheck.strategies.shapes import shapes as any_shapes

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from attncheck.core.paged_layout import Paging
    from attncheck.inputs.distributions import Sizes
    from attncheck.mods.spec import Spec

__all__ = ["AMPLITUDES", "problems"]

Supports = Callable[[Problem], bool]

_DTYPES = tuple(name for name, dtype in DTYPES.items() if dtype.measured)
AMPLITUDES = (1, 10, 60, 400)
"""How many times larger than usual scores are: at 400 a softmax is all but one-hot."""

_USUAL = 3  # times more often than each other amplitude
_LARGEST_SEED = 999  # a draw among many; a short number to read in a failure


@st.composite
def _problems(
    draw: st.DrawFn,
    shapes: SearchStrategy[Sizes],
    masks: Callable[..., SearchStrategy[Spec]],
    scores: SearchStrategy[Spec],
    amplitudes: SearchStrategy[float],
    plain: SearchStrategy[dict[str, Any]],
) -> Problem:
    sizes = draw(shapes)
    dimensions = Dimensions(batch=sizes.batch, heads=sizes.heads, query=sizes.query, kv=sizes.kv)
    return Problem(
        batch=sizes.batch,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        query=sizes.query,
        kv=sizes.kv,
        head_dim=sizes.head_dim,
        value_dim=sizes.value_dim,
        mask=draw(masks(dimensions=dimensions)),
        score=draw(scores),
        scale=draw(amplitudes) / math.sqrt(sizes.head_dim),
        **draw(plain),
    )


def problems(  # noqa: PLR0913  # each is a part of a Problem
    *,
    shapes: SearchStrategy[Sizes] | None = None,
    masks: Callable[..., SearchStrategy[Spec]] = any_masks,
    scores: SearchStrategy[Spec] | None = None,
    dtypes: Iterable[str] = _DTYPES,
    distributions: Iterable[str] | None = None,
    amplitudes: Iterable[float] = AMPLITUDES,
    pagings: SearchStrategy[Paging] | None = None,
    sinks: bool | None = False,
    backward: bool = False,
    dlse: bool | None = False,
    dcaptured: bool = False,
    supports: Supports | None = None,
) -> SearchStrategy[Problem]:
    """Problems, small enough for an interpreted kernel unless ``shapes`` says otherwise.

    Args:
        shapes: Sizes (default: ``strategies.shapes()``).
        masks: ``masks(dimensions=…)`` gives masks for these dimensions.
        scores: Score mods (default: none).
        dtypes: Which, plainest first.
        distributions: Which, plainest first (default: all, without those of recordings).
        amplitudes: Of scale · √head_dim, plainest first: the first is drawn more often.
        pagings: How keys lie in pages (default: in none), as ``strategies.pagings()``.
        sinks: Whether they have a sink; None for either, and none before one.
        backward: Whether gradients are asked for.
        dlse: Of a backward, whether the loss depends on LSE too; None for either.
        dcaptured: Of a backward, whether gradients are asked for of what ``scores`` read from
            tensors, which each of them has to do then.
        supports: Whether the kernel takes a Problem. One that it does not take is moved to the
            nearest that it does (same mask and values; other dims, lengths, kv heads or dtype, and
            no sink and no loss of LSE where both are drawn) and dropped only where there is none: a
            kernel of few head dims is tested as often as one of many.

    Raises:
        UnknownName: for a dtype or distribution that is not known.
        UsageError: for no amplitude, or one that is not positive.
    """
    known = without_recorded(DISTRIBUTIONS)
    dtypes, distributions = tuple(dtypes), tuple(known if distributions is None else distributions)
    _check("dtype", dtypes, _DTYPES)
    _check("distribution", distributions, DISTRIBUTIONS)
    plain: SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(dtypes),
            "distribution": st.sampled_from(distributions),
            "seed": st.integers(0, _LARGEST_SEED),
        }
        | ({} if pagings is None else {"paging": pagings})
        | _flag("sink", drawn=sinks)
        | _flag("backward", drawn=backward)
        | _flag("dlse", drawn=dlse)
        | _flag("dcaptured", drawn=dcaptured)
    )
    drawn = _problems(
        any_shapes() if shapes is None else shapes,
        masks,
        st.just(NONE) if scores is None else scores,
        _amplitudes(tuple(amplitudes)),
        plain,
    )
    if supports is None:
        return drawn
    drops = [name for name, either in (("sink", sinks), ("dlse", dlse)) if either is None]
    # Where even the nearest is refused nothing can be derived: only then it is a filter.
    moved = drawn.map(lambda problem: nearest.supported(problem, supports, dtypes, drops=drops))
    return cast("SearchStrategy[Problem]", moved.filter(lambda problem: problem is not None))


def _flag(name: str, *, drawn: bool | None) -> dict[str, SearchStrategy[bool]]:
    """Nothing is drawn where there is none: what was drawn before stays what it was."""
    if drawn is False:
        return {}
    return {name: st.booleans() if drawn is None else st.just(value=True)}


def _amplitudes(amplitudes: tuple[float, ...]) -> SearchStrategy[float]:
    if not amplitudes or not all(0 < amplitude < math.inf for amplitude in amplitudes):
        raise UsageError(f"amplitudes={amplitudes} must be one or more positive numbers.")
    return st.sampled_from((*amplitudes[:1] * _USUAL, *amplitudes[1:]))


def _check(kind: str, names: tuple[str, ...], valid: Iterable[str]) -> None:
    for name in names or ("",):
        if name not in valid:
            raise UnknownName(kind, name, valid)
