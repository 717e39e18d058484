"""Covering arrays: every pair and triple that can be, counted in another way."""

import itertools

import pytest
import torch

from attncheck.cases import covering
from attncheck.cases.covering import (
    ALONE,
    BACKWARD,
    EXCLUSIONS,
    EXTENTS,
    HEADS,
    MASKS,
    PLAIN_ROW,
    SCALES,
    SCORES,
    SHAPES,
    TOGETHER,
    VARIED,
    alone_rows,
    compiled_rows,
    covering_rows,
    lengths_kind,
    row_problem,
)
from attncheck.cases.covering import AXES as ALL_AXES
from attncheck.core.errors import ProblemError
from attncheck.inputs.problem import Case
from attncheck.subjects.ideal import Ideal
from attncheck.verify.verify import verify

MASK_NAMES = tuple(MASKS)[:4]
AXES = {
    "mask": MASK_NAMES,
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
    rows = covering_rows(AXES, strength)
    for chosen in itertools.combinations(AXES, strength):
        covered = {tuple(row[name] for name in chosen) for row in rows}
        assert covered == possible(AXES, chosen, EXCLUDED)


def test_an_array_of_fewer_rows_misses_some():
    rows = covering_rows(AXES, 2)
    pairs = {(row["mask"], row["heads"]) for row in rows[: len(MASK_NAMES) * len(HEADS) - 1]}
    assert pairs != possible(AXES, ("mask", "heads"), EXCLUDED)


COMPILED = AXES | {
    "mask": ("full", "sliding_window", "window_bottom_right"),
    "dims": ("64", "80"),
    "shape": tuple(SHAPES["medium"]),
    "distribution": ("normal", "uniform"),
}


def threes(rows):
    return {frozenset(three) for row in rows for three in itertools.combinations(row.items(), 3)}


def compilation(row):
    of_row = {name: value for name, value in row.items() if name not in VARIED}
    return (*of_row.items(), lengths_kind(SHAPES["medium"][row["shape"]]))


@pytest.mark.parametrize("least", [0, 700])
def test_few_compilations_have_every_three_that_there_can_be(least):
    first, again = compiled_rows(COMPILED, "medium", least)
    plain = covering_rows(COMPILED, 3)
    assert threes([*first, *again]) == threes(plain)
    assert not any(never(row) for row in (*first, *again) for _, never in EXCLUSIONS[:4])
    compiled = [compilation(row) for row in first]
    assert len(compiled) == len(set(compiled)) < 0.8 * len({compilation(row) for row in plain})
    # Of a row that cannot have some lengths another mask has them.
    assert len({compilation(row) for row in again} - set(compiled)) < 5
    assert len(first) + len(again) >= least
    assert (first, again) == compiled_rows(COMPILED, "medium", least)


def test_what_one_axis_after_the_other_misses_is_added(monkeypatch):
    monkeypatch.setattr(covering._Triples, "varied", lambda self, row: (next(self.every(row)), 0))
    covering._compiled_rows.cache_clear()
    first, again = compiled_rows(COMPILED, "medium", 0)
    covering._compiled_rows.cache_clear()
    assert threes([*first, *again]) == threes(covering_rows(COMPILED, 3))


def test_of_few_values_there_are_as_many_rows():
    one = {name: values[:1] for name, values in COMPILED.items()}
    first, again = compiled_rows(one, "medium", 40)
    assert (len(first), len(again)) == (1, 39)
    assert compiled_rows(one | {"dtype": ()}, "medium", 40) == ([], [])


def test_values_that_cannot_be_combined_raise_an_error():
    one = {name: values[:1] for name, values in COMPILED.items()}
    with pytest.raises(ProblemError, match="no values of these axes can be combined"):
        compiled_rows(one | {"mask": ("full",), "extent": ("half",)}, "medium", 40)


def test_nothing_excluded_is_in_a_row():
    rows = covering_rows(AXES, 3)
    assert not any(never(row) for row in rows for _, never in EXCLUDED)
    assert any(row["stored"] == "paged" for row in rows)


def test_the_rows_are_the_same_every_time():
    assert covering_rows(AXES, 2) == covering_rows(AXES, 2)


def test_an_axis_without_values_makes_no_rows():
    assert covering_rows({**AXES, "dtype": ()}, 2) == []


@pytest.mark.parametrize("shapes", SHAPES)
def test_every_mask_has_a_problem_of_every_shape_and_heads(shapes):
    for mask, shape, heads in itertools.product(MASKS, SHAPES[shapes], HEADS):
        row = {"mask": mask, "shape": shape, "heads": heads}
        problem = row_problem(row, shapes, 0)
        assert (problem.query, problem.kv) == SHAPES[shapes][shape]


SINGLE = [{axis: value} for axis, values in ALL_AXES.items() for value in values]
PAIRS = [
    *({"mask": mask, "extent": extent} for mask in MASKS for extent in EXTENTS),
    *({"scale": scale, "score": score} for scale in SCALES for score in SCORES),
]
# A backward judges the forward too: of pairs it is asked by itself.
POSSIBLE = [
    pytest.param(row, backward, id="-".join([*row.values(), backward]))
    for rows, backwards in ((SINGLE, BACKWARD), (PAIRS, ("backward of LSE",)))
    for row in rows
    if not any(never(PLAIN_ROW | row) for _, never in EXCLUSIONS) and row.get("dtype") != "tf32"
    for backward in backwards
]


@pytest.mark.parametrize(("row", "backward"), POSSIBLE)
def test_a_right_kernel_is_right_at_every_value(row, backward):
    row = {"dtype": "fp16", "mask": "causal", "shape": "ragged", "backward": backward} | row
    if any(never(PLAIN_ROW | row) for _, never in EXCLUSIONS):
        row["backward"] = ""
    case = Case(problem=row_problem(row, "tiny", 0))
    (record,) = verify(Ideal(), [("", case)], device="cpu", command="").records
    assert record.status in {"pass", "unsupported"}, record.judgement


def test_a_boundary_is_where_it_is_said_to_be():
    """Of windows 0, 1, all but one and all: keys that the last row sees."""
    seen = {}
    for extent in EXTENTS:
        row = {"mask": "sliding_window", "extent": extent, "shape": "even"}
        problem = row_problem(row, "tiny", 0)
        last = torch.tensor(problem.query - 1)
        zero = torch.zeros_like(last)
        seen[extent] = int(problem.mask_mod()(zero, zero, last, torch.arange(problem.kv)).sum())
    assert seen == {
        "": 16,
        "half": 32,
        "no key": 0,
        "one key": 1,
        "all but one": 63,
        "all": 64,
        "beyond": 64,
    }


def test_what_leaves_nothing_to_see_has_rows_of_its_own():
    rows = list(alone_rows(ALL_AXES))
    for axis, values in ALONE.items():
        assert {row[axis] for row in rows} >= set(values)
    for row in rows[: -len(TOGETHER)]:
        assert sum(row[axis] in values for axis, values in ALONE.items()) == 1


def test_what_shows_beside_one_another_stands_together():
    """The distribution is there though there is no time for it elsewhere."""
    axes = ALL_AXES | {"distribution": ("normal",)}
    rows = list(alone_rows(axes))[-len(TOGETHER) :]
    for row, values in zip(rows, TOGETHER, strict=True):
        assert row.items() >= values.items()
    forward = list(alone_rows(axes | {"backward": ("",)}))
    assert not [row for row in forward if row["backward"]]
