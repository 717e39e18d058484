"""Fixtures that shrink a strategy and draw examples of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import SearchStrategy

FIND = settings(
    database=None,
    derandomize=True,
    max_examples=4000,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def shrink() -> Callable[..., Any]:
    """``shrink(strategy, wanted)``: the smallest example of which ``wanted`` is true."""

    def find_smallest(
        strategy: SearchStrategy[Any], wanted: Callable[[Any], bool] = lambda _: True
    ) -> Any:
        return find(strategy, wanted, settings=FIND)

    return find_smallest


@pytest.fixture
def draw() -> Callable[..., list[Any]]:
    """``draw(strategy, count)``: that many examples, the same every time."""

    def draw_examples(strategy: SearchStrategy[Any], count: int = 300) -> list[Any]:
        values: list[Any] = []

        @settings(FIND, max_examples=count, phases=[Phase.generate])
        @given(strategy)
        def collect(value: Any) -> None:
            values.append(value)

        collect()
        return values

    return draw_examples
