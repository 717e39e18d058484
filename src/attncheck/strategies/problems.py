"""Whole Problems."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

from hypothesis import strategies as st

from attncheck.distributions import DISTRIBUTIONS, Sizes
from attncheck.errors import UnknownName
from attncheck.formats import DTYPES
from attncheck.mods.library import NONE
from attncheck.mods.spec import Dimensions, Spec
from attncheck.problem import Problem
from attncheck.strategies import nearest
from attncheck.strategies.masks import masks as any_masks
from attncheck.strategies.shapes import shapes as any_shapes

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["problems", "scores"]

Supports = Callable[[Problem], bool]

_DTYPES = tuple(name for name, dtype in DTYPES.items() if dtype.measured)
_SCORES: dict[str, SearchStrategy[Spec]] = {
    NONE.name: st.just(NONE),
    "alibi": st.just(Spec.of("alibi")),
    "softcap": st.sampled_from((20.0, 1.5, 50.0)).map(lambda cap: Spec.of("softcap", cap=cap)),
    "temperature": st.sampled_from((2.0, 0.25)).map(
        lambda temperature: Spec.of("temperature", temperature=temperature)
    ),
    "relative_bias": st.integers(0, 8).map(
        lambda distance: Spec.of("relative_bias", distance=distance, seed=0)
    ),
}
_LARGEST_SEED = 999  # a draw among many; a short number to read in a failure


def scores(*, names: Iterable[str] = ()) -> SearchStrategy[Spec]:
    """Score mods of the library, not composed, each at a few strengths.

    Args:
        names: Which, simplest first (default: all, from none on).

    Raises:
        UnknownName: for a name that is none of the library's plain score mods.
    """
    chosen = tuple(names) or tuple(_SCORES)
    _check("score mod", chosen, _SCORES)
    return st.one_of([_SCORES[name] for name in chosen])


@st.composite
def _problems(
    draw: st.DrawFn,
    shapes: SearchStrategy[Sizes],
    masks: Callable[..., SearchStrategy[Spec]],
    scores: SearchStrategy[Spec],
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
        **draw(plain),
    )


def problems(
    *,
    shapes: SearchStrategy[Sizes] | None = None,
    masks: Callable[..., SearchStrategy[Spec]] = any_masks,
    scores: SearchStrategy[Spec] | None = None,
    dtypes: Iterable[str] = _DTYPES,
    distributions: Iterable[str] = tuple(DISTRIBUTIONS),
    supports: Supports | None = None,
) -> SearchStrategy[Problem]:
    """Problems, small enough for an interpreted kernel unless ``shapes`` says otherwise.

    Args:
        shapes: Sizes (default: ``strategies.shapes()``).
        masks: ``masks(dimensions=…)`` gives masks for these dimensions.
        scores: Score mods (default: none).
        dtypes: Which, plainest first.
        distributions: Which, plainest first.
        supports: Whether the kernel takes a Problem. One that it does not take is moved to the
            nearest that it does (same mask and values; other dims, lengths, kv heads or dtype)
            and dropped only where there is none: a kernel of few head dims is tested as often as
            one of many.

    Raises:
        UnknownName: for a dtype or distribution that is not known.
    """
    dtypes, distributions = tuple(dtypes), tuple(distributions)
    _check("dtype", dtypes, _DTYPES)
    _check("distribution", distributions, DISTRIBUTIONS)
    plain: SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(dtypes),
            "distribution": st.sampled_from(distributions),
            "seed": st.integers(0, _LARGEST_SEED),
        }
    )
    drawn = _problems(
        any_shapes() if shapes is None else shapes,
        masks,
        st.just(NONE) if scores is None else scores,
        plain,
    )
    if supports is None:
        return drawn
    # Where even the nearest is refused nothing can be derived: only then it is a filter.
    moved = drawn.map(lambda problem: nearest.supported(problem, supports, dtypes))
    return cast("SearchStrategy[Problem]", moved.filter(lambda problem: problem is not None))


def _check(kind: str, names: tuple[str, ...], valid: Iterable[str]) -> None:
    for name in names or ("",):
        if name not in valid:
            raise UnknownName(kind, name, valid)
