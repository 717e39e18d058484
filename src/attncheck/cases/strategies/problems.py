"""Whole Problems, of attention and of softmax, and the nearest that a kernel takes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, cast

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from attncheck.cases.strategies.mask_strategies import masks as any_masks
from attncheck.cases.strategies.sizes import lengths
from attncheck.cases.strategies.sizes import shapes as any_shapes
from attncheck.core.errors import ProblemError, UsageError, require_known, without_recorded
from attncheck.core.formats import DTYPES
from attncheck.core.mod_spec import NONE, Dimensions, Spec
from attncheck.core.paged_layout import Paging
from attncheck.inputs.distributions import DISTRIBUTIONS, Sizes
from attncheck.inputs.problem import SOFTMAX_DTYPES, USUAL_SCALE, Problem

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
        **asdict(sizes),
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
    require_known("dtype", dtypes or ("",), _DTYPES)
    require_known("distribution", distributions or ("",), DISTRIBUTIONS)
    plain: SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(dtypes),
            "distribution": st.sampled_from(distributions),
            "seed": st.integers(0, _LARGEST_SEED),
        }
        | ({} if pagings is None else {"paging": pagings})
        | _flag_strategy("sink", drawn=sinks)
        | _flag_strategy("backward", drawn=backward)
        | _flag_strategy("dlse", drawn=dlse)
        | _flag_strategy("dcaptured", drawn=dcaptured)
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
    # Only what was left open: a property about sinks keeps its sinks.
    drops = [name for name, either in (("sink", sinks), ("dlse", dlse)) if either is None]
    # Where even the nearest is refused nothing can be derived: only then it is a filter.
    moved = drawn.map(lambda problem: nearest_supported(problem, supports, dtypes, drops=drops))
    return cast("SearchStrategy[Problem]", moved.filter(lambda problem: problem is not None))


def _flag_strategy(name: str, *, drawn: bool | None) -> dict[str, SearchStrategy[bool]]:
    """Nothing is drawn where there is none: what was drawn before stays what it was."""
    if drawn is False:
        return {}
    return {name: st.booleans() if drawn is None else st.just(value=True)}


def _amplitudes(amplitudes: tuple[float, ...]) -> SearchStrategy[float]:
    if not amplitudes or not all(0 < amplitude < math.inf for amplitude in amplitudes):
        raise UsageError(f"amplitudes={amplitudes} must be one or more positive numbers.")
    return st.sampled_from((*amplitudes[:1] * _USUAL, *amplitudes[1:]))


_MOST_ROWS = 9


def softmax_problems(
    *,
    longest: int = 130,
    dtypes: Iterable[str] = SOFTMAX_DTYPES,
    distributions: Iterable[str] = (),
    supports: Callable[[Problem], bool] | None = None,
) -> SearchStrategy[Problem]:
    """Softmax of few rows of up to ``longest`` scores; shrinks to one row of one score.

    Args:
        dtypes: Which, plainest first; what softmax has not is left out.
        distributions: Which, plainest first (default: all that have scores).
        supports: Whether the kernel takes a Problem; others are dropped.

    Raises:
        ProblemError: where no dtype is left.
    """
    able = tuple(name for name in dtypes if name in SOFTMAX_DTYPES)
    if not able:
        raise ProblemError(f"softmax has none of the dtypes {', '.join(dtypes)}.")
    named = tuple(distributions) or tuple(n for n, d in DISTRIBUTIONS.items() if d.scores)
    drawn = st.builds(
        Problem,
        operation=st.just("softmax"),
        batch=st.integers(1, 2),
        heads=st.integers(1, 2),
        query=st.integers(1, _MOST_ROWS),
        kv=lengths(longest=longest),
        dtype=st.sampled_from(able),
        distribution=st.sampled_from(named),
        seed=st.integers(0, _LARGEST_SEED),
    )
    # Filtered and not moved: a softmax has little but its lengths that could be others.
    return drawn if supports is None else drawn.filter(supports)


Changes = dict[str, Any]

# Taken by most kernels, the commonest first.
_COMMON_HEAD_DIMS = (64, 128, 32, 256)
_COMMON_PAGE_SIZES = (16, 64, 256)
_LARGEST_TILE, _SMALLEST_TILE = 128, 16


def nearest_supported(
    problem: Problem,
    supports: Callable[[Problem], bool],
    dtypes: Sequence[str],
    *,
    drops: Sequence[str] = (),
) -> Problem | None:
    """Return ``problem``, or the same with few fields changed that ``supports``; else None.

    With another head_dim the scale changes too, so that scores stay as large as they were.

    kv, mask, score mod and values stay, except that kv may grow to whole tiles, so that what was
    chosen for them (a key to hide, say) stays possible; it shrinks only where all else is refused.

    Args:
        dtypes: Those that ``problem`` may have instead, plainest first.
        drops: What it may do without: ``sink``, ``dlse``.
    """
    if supports(problem):  # nearly always: what else it could be is not worked out
        return problem
    # The default scale of one head_dim is not that of another, and some kernels take no other.
    default = problem.has_usual_scale
    refused: set[frozenset[tuple[str, Any]]] = {frozenset()}
    for changes in _fewest_first(problem, dtypes, drops, default=default):
        real = frozenset(_real_changes(problem, changes, default=default).items())
        if real in refused:  # a plain Problem has few that differ
            continue
        refused.add(real)
        try:
            moved = problem.replace(**changes)
        except ProblemError:  # documents do not cover a length that has grown
            continue
        if supports(moved):
            return moved
    return None


def _real_changes(problem: Problem, changes: Changes, *, default: bool) -> Changes:
    """Return the changes without those to what it is; the usual scale is that of a head_dim."""
    real = {name: value for name, value in changes.items() if getattr(problem, name) != value}
    if default and "head_dim" not in real:
        real.pop("scale", None)
    return real


def _fewest_first(
    problem: Problem, dtypes: Sequence[str], drops: Sequence[str], *, default: bool
) -> Iterator[Changes]:
    combinations = itertools.product(
        _dims(problem, default=default),
        _lengths(problem),
        _heads(problem),
        _pagings(problem),
        _dtypes(problem, dtypes),
        *_without(problem, drops),
        [{}] if default else [{}, {"scale": USUAL_SCALE}],
    )
    # As few changes as possible; among as many, sorting keeps the order of the axes' choices.
    for changed in sorted(combinations, key=lambda axes: sum(map(bool, axes))):
        yield {name: value for axis in changed for name, value in axis.items()}


def _dims(problem: Problem, *, default: bool) -> list[Changes]:
    def scale(dim: int) -> float:
        # 0 asks for 1/√dim, to its last bit: a kernel may take no other.
        kept = problem.scale * math.sqrt(problem.head_dim / dim)
        return USUAL_SCALE if default else kept

    common: list[Changes] = [
        {"head_dim": dim, "value_dim": dim, "scale": scale(dim)} for dim in _COMMON_HEAD_DIMS
    ]
    return [{}, {"value_dim": problem.head_dim}, *common]


def _lengths(problem: Problem) -> list[Changes]:
    whole = -(-problem.kv // _LARGEST_TILE) * _LARGEST_TILE
    # One row is what decoding takes, and few keys what lies whole in one tile.
    few = {"query": min(problem.query, _SMALLEST_TILE), "kv": min(problem.kv, _SMALLEST_TILE)}
    lengths: list[Changes] = [{}, {"query": problem.kv}, {"query": whole, "kv": whole}]
    return [*lengths, {"query": few["query"]}, {"query": 1}, few]


def _heads(problem: Problem) -> list[Changes]:
    return [{}, {"kv_heads": problem.heads}]


def _pagings(problem: Problem) -> list[Changes]:
    """Pages stay pages: a kernel that takes none of a size may take others."""
    if problem.paging is None:
        return [{}]
    sizes = [size for size in _COMMON_PAGE_SIZES if size != problem.paging.size]
    return [{}, *({"paging": replace(problem.paging, size=size)} for size in sizes)]


def _without(problem: Problem, drops: Sequence[str]) -> list[list[Changes]]:
    return [[{}, {name: False}] for name in drops if getattr(problem, name)]


def _dtypes(problem: Problem, dtypes: Sequence[str]) -> list[Changes]:
    return [{}, *({"dtype": dtype} for dtype in dtypes if dtype != problem.dtype)]
