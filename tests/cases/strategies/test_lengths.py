"""Lengths sit where tiles end, and every number of a range is drawn and can be shrunk to."""

from __future__ import annotations

import pytest

from attncheck.cases import strategies
from attncheck.cases.strategies.sizes import TILES, numbers

EDGES = {1, 2, 3} | {n * tile + step for tile in TILES for n in (1, 2, 3) for step in (-1, 0, 1)}


def test_lengths_sit_at_tile_edges_half_of_the_time(drawn) -> None:
    found = drawn(strategies.lengths(longest=130), 600)
    at_edges = sum(length in EDGES for length in found)
    assert len(found) / 3 < at_edges < len(found) * 2 / 3
    assert {edge for edge in EDGES if edge <= 130} <= set(found)
    assert all(1 <= length <= 130 for length in found)


def test_lengths_take_bounds_without_any_edge(drawn) -> None:
    assert set(drawn(strategies.lengths(shortest=40, longest=42))) == {40, 41, 42}


@pytest.mark.parametrize("least", [1, 17, 50, 97, 130])
def test_the_shortest_that_fails_is_found(smallest, least: int) -> None:
    assert smallest(strategies.lengths(), lambda length: length >= least) == least


def test_special_numbers_come_often_and_last(drawn, smallest) -> None:
    found = drawn(numbers(1, 70, 0, 71))
    assert 0.2 < sum(n in {0, 71} for n in found) / len(found) < 0.5
    assert smallest(numbers(1, 70, 0, 71)) == 1
    assert smallest(numbers(1, 70, 0, 71), lambda n: n > 50) == 51
    assert smallest(numbers(1, 70, 0, 71), lambda n: not 0 < n <= 70) == 0
