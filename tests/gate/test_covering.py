"""Covering arrays: every pair and triple that can be, counted in another way."""

import itertools

import pytest

from attncheck.cases.covering import EXCLUSIONS, HEADS, MASKS, SHAPES, covering_rows, row_problem

AXES = {
    "mask": MASKS[:4],
    "stored": ("plain", "sink", "paged"),
    "backward": ("", "backward"),
    "dtype": ("fp32", "bf16", "e4m3"),
    "heads": tuple(HEADS),
}
EXCLUDED = [each for each in EXCLUSIONS if set(each[0]) <= set(AXES)]


def possible(axes, chosen, exclusions):
    """Values of the axes ``chosen`` for which a whole row exists: all rows are tried."""
    whole = (dict(zip(axes, row, strict=True)) for row in itertools.product(*axes.values()))
    able = (row for row in whole if not any(never(row) for _, never in exclusions))
    return {tuple(row[name] for name in chosen) for row in able}


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_every_choice_is_covered(strength):
    rows = covering_rows(AXES, strength, EXCLUDED)
    for chosen in itertools.combinations(AXES, strength):
        covered = {tuple(row[name] for name in chosen) for row in rows}
        assert covered == possible(AXES, chosen, EXCLUDED)


def test_an_array_of_fewer_rows_misses_some():
    rows = covering_rows(AXES, 2, EXCLUDED)
    pairs = {(row["mask"], row["heads"]) for row in rows[: len(MASKS[:4]) * len(HEADS) - 1]}
    assert pairs != possible(AXES, ("mask", "heads"), EXCLUDED)


def test_nothing_excluded_is_in_a_row():
    rows = covering_rows(AXES, 3, EXCLUDED)
    assert not any(never(row) for row in rows for _, never in EXCLUDED)
    assert any(row["stored"] == "paged" for row in rows)


def test_the_rows_are_the_same_every_time():
    assert covering_rows(AXES, 2, EXCLUDED) == covering_rows(AXES, 2, EXCLUDED)


def test_an_axis_without_values_makes_no_rows():
    assert covering_rows({**AXES, "dtype": ()}, 2) == []


@pytest.mark.parametrize("shapes", SHAPES)
def test_every_mask_has_a_problem_of_every_shape_and_heads(shapes):
    row = {
        "score": "none",
        "stored": "plain",
        "backward": "",
        "dtype": "bf16",
        "dims": "64",
        "distribution": "normal",
    }
    for mask, shape, heads in itertools.product(MASKS, SHAPES[shapes], HEADS):
        problem = row_problem(row | {"mask": mask, "shape": shape, "heads": heads}, shapes, 0)
        assert (problem.query, problem.kv) == SHAPES[shapes][shape]
