"""Problems of row softmax."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

from attncheck.core.errors import ProblemError
from attncheck.inputs.distributions import DISTRIBUTIONS
from attncheck.inputs.problem import SOFTMAX_DTYPES, Problem
from attncheck.strategies.lengths import lengths

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hypothesis.strategies import SearchStrategy

__all__ = ["softmax_problems"]

_LARGEST_SEED = 999
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
        longest: Most columns.
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
    return drawn if supports is None else drawn.filter(supports)
