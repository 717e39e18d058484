"""Strategies for whole Problems of attention and softmax, and the nearest that a kernel takes."""

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
"""Factors by which scores are larger than usual: at 400 a softmax is almost one-hot."""

_USUAL_REPEATS = 3  # The first amplitude is drawn this many times as often as each other one.
_LARGEST_SEED = 999  # Enough different draws, and short to read in a failure.


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
        masks: ``masks(dimensions=…)`` returns a strategy for masks of these dimensions.
        scores: Score mods (default: none).
        dtypes: Names, plainest first.
        distributions: Names, plainest first (default: all, without those of recordings).
        amplitudes: Values of scale · √head_dim, plainest first: the first is drawn more often.
        pagings: How keys lie in pages (default: not in pages), as ``strategies.pagings()``.
        sinks: Whether they have a sink; None for either, no sink being the simpler.
        backward: Whether gradients are asked for.
        dlse: Whether the loss of a backward depends on LSE too; None for either.
        dcaptured: Whether a backward asks for gradients of the tensors that ``scores`` read; then
            every score mod must read one.
        supports: Whether the kernel takes a Problem. One that it does not take is replaced by the
            nearest that it does (same mask and values; other dims, lengths, kv heads or dtype, and
            no sink and no loss of LSE where both are drawn) and dropped only if there is none, so
            that a kernel with few head dims is tested as often as one with many.

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
    # Only options that were left open may be dropped: a property about sinks keeps its sinks.
    drops = [name for name, either in (("sink", sinks), ("dlse", dlse)) if either is None]
    # Examples are filtered out only if the kernel refuses even the nearest Problems.
    moved = drawn.map(lambda problem: nearest_supported(problem, supports, dtypes, drops=drops))
    return cast("SearchStrategy[Problem]", moved.filter(lambda problem: problem is not None))


def _flag_strategy(name: str, *, drawn: bool | None) -> dict[str, SearchStrategy[bool]]:
    """Return the field's strategy; nothing is drawn for False, so that other draws stay equal."""
    if drawn is False:
        return {}
    return {name: st.booleans() if drawn is None else st.just(value=True)}


def _amplitudes(amplitudes: tuple[float, ...]) -> SearchStrategy[float]:
    if not amplitudes or not all(0 < amplitude < math.inf for amplitude in amplitudes):
        raise UsageError(f"amplitudes={amplitudes} must be one or more positive numbers.")
    return st.sampled_from((*amplitudes[:1] * _USUAL_REPEATS, *amplitudes[1:]))


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
        dtypes: Names, plainest first; dtypes that softmax lacks are left out.
        distributions: Names, plainest first (default: all that have scores).
        supports: Whether the kernel takes a Problem; others are dropped.

    Raises:
        ProblemError: if no dtype is left.
    """
    softmax_dtypes = tuple(name for name in dtypes if name in SOFTMAX_DTYPES)
    if not softmax_dtypes:
        raise ProblemError(f"softmax has none of the dtypes {', '.join(dtypes)}.")
    named = tuple(distributions) or tuple(n for n, d in DISTRIBUTIONS.items() if d.scores)
    drawn = st.builds(
        Problem,
        operation=st.just("softmax"),
        batch=st.integers(1, 2),
        heads=st.integers(1, 2),
        query=st.integers(1, _MOST_ROWS),
        kv=lengths(longest=longest),
        dtype=st.sampled_from(softmax_dtypes),
        distribution=st.sampled_from(named),
        seed=st.integers(0, _LARGEST_SEED),
    )
    # Filtered, not replaced: a softmax has hardly any field but its lengths that could change.
    return drawn if supports is None else drawn.filter(supports)


Changes = dict[str, Any]

# Sizes that most kernels take, the commonest first.
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
    """Return ``problem``, or the one with fewest fields changed that ``supports`` takes; else None.

    With another head_dim the scale changes too, so that scores stay as large as they were.

    kv, mask, score mod and values stay, except that kv may grow to whole tiles, so that parameters
    chosen for them (such as a hidden key) stay valid; kv shrinks only if all else is refused.

    Args:
        dtypes: Dtypes that ``problem`` may have instead, plainest first.
        drops: Fields that may become False: ``sink``, ``dlse``.
    """
    if supports(problem):  # nearly always, so that no changes need to be tried
        return problem
    # The default scale depends on the head_dim, and some kernels take only the default.
    default = problem.has_usual_scale
    refused: set[frozenset[tuple[str, Any]]] = {frozenset()}
    for changes in _fewest_first(problem, dtypes, drops, default=default):
        effective = frozenset(_effective_changes(problem, changes, default=default).items())
        if effective in refused:  # many sets of changes have the same effect on a plain Problem
            continue
        refused.add(effective)
        try:
            moved = problem.replace(**changes)
        except ProblemError:  # such as documents that do not cover a longer kv
            continue
        if supports(moved):
            return moved
    return None


def _effective_changes(problem: Problem, changes: Changes, *, default: bool) -> Changes:
    """Return the changes that change the Problem; a usual scale changes only with the head_dim."""
    real = {name: value for name, value in changes.items() if getattr(problem, name) != value}
    if default and "head_dim" not in real:
        real.pop("scale", None)
    return real


def _fewest_first(
    problem: Problem, dtypes: Sequence[str], drops: Sequence[str], *, default: bool
) -> Iterator[Changes]:
    paging = problem.paging
    axes: list[list[Changes]] = [
        _dims(problem, default=default),
        _lengths(problem),
        [{"kv_heads": problem.heads}],
        # Keys in pages stay in pages.
        [
            {"paging": replace(paging, size=size)}
            for size in _COMMON_PAGE_SIZES
            if size != paging.size
        ]
        if paging
        else [],
        [{"dtype": dtype} for dtype in dtypes if dtype != problem.dtype],
        *([{name: False}] for name in drops if getattr(problem, name)),
        [] if default else [{"scale": USUAL_SCALE}],
    ]
    combinations = itertools.product(*([{}, *axis] for axis in axes))
    # Fewest changes first; sorting is stable and keeps the order of the axes' choices.
    for changed in sorted(combinations, key=lambda axes: sum(map(bool, axes))):
        yield {name: value for axis in changed for name, value in axis.items()}


def _dims(problem: Problem, *, default: bool) -> list[Changes]:
    def scale(dim: int) -> float:
        # USUAL_SCALE is 1/√dim to the last bit: some kernels take no other.
        same_amplitude = problem.scale * math.sqrt(problem.head_dim / dim)
        return USUAL_SCALE if default else same_amplitude

    common: list[Changes] = [
        {"head_dim": dim, "value_dim": dim, "scale": scale(dim)} for dim in _COMMON_HEAD_DIMS
    ]
    return [{"value_dim": problem.head_dim}, *common]


def _lengths(problem: Problem) -> list[Changes]:
    full_tiles = -(-problem.kv // _LARGEST_TILE) * _LARGEST_TILE
    # One row is for decoding kernels, and few keys for kernels with a single tile.
    short = {"query": min(problem.query, _SMALLEST_TILE), "kv": min(problem.kv, _SMALLEST_TILE)}
    lengths: list[Changes] = [{"query": problem.kv}, {"query": full_tiles, "kv": full_tiles}]
    return [*lengths, {"query": short["query"]}, {"query": 1}, short]
