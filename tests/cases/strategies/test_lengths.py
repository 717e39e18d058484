"""Strategies for lengths and numbers: tile edges and special values are drawn often."""

from __future__ import annotations

import pytest

from attncheck.cases import strategies
from attncheck.cases.strategies.sizes import TILES, numbers

EDGES = {1, 2, 3} | {n * tile + step for tile in TILES for n in (1, 2, 3) for step in (-1, 0, 1)}


def test_about_half_of_lengths_are_at_tile_edges(draw) -> None:
    lengths = draw(strategies.lengths(longest=130), 600)
    at_edges = sum(length in EDGES for length in lengths)
    assert len(lengths) / 3 < at_edges < len(lengths) * 2 / 3
    assert {edge for edge in EDGES if edge <= 130} <= set(lengths)
    assert all(1 <= length <= 130 for length in lengths)


def test_lengths_between_tile_edges_are_all_drawn(draw) -> None:
    assert set(draw(strategies.lengths(shortest=40, longest=42))) == {40, 41, 42}


@pytest.mark.parametrize("least", [1, 17, 50, 97, 130])
def test_length_shrinks_to_the_shortest_that_fails(shrink, least: int) -> None:
    assert shrink(strategies.lengths(), lambda length: length >= least) == least


def test_special_numbers_are_drawn_often_and_shrunk_to_last(draw, shrink) -> None:
    drawn = draw(numbers(1, 70, 0, 71))
    assert 0.2 < sum(n in {0, 71} for n in drawn) / len(drawn) < 0.5
    assert shrink(numbers(1, 70, 0, 71)) == 1
    assert shrink(numbers(1, 70, 0, 71), lambda n: n > 50) == 51
    assert shrink(numbers(1, 70, 0, 71), lambda n: not 0 < n <= 70) == 0
