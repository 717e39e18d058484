"""Covering arrays contain every possible pair and triple, counted here by brute force."""

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


def possible_values(axes, names, exclusions):
    """Values of the axes ``chosen`` for which a whole row exists, by trying all rows."""
    rows = (dict(zip(axes, row, strict=True)) for row in itertools.product(*axes.values()))
    allowed = (row for row in rows if not any(never(row) for _, never in exclusions))
    return {tuple(row[name] for name in names) for row in allowed}


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_covering_rows_cover_every_possible_combination(strength):
    rows = covering_rows(AXES, strength)
    for names in itertools.combinations(AXES, strength):
        covered = {tuple(row[name] for name in names) for row in rows}
        assert covered == possible_values(AXES, names, EXCLUDED)


def test_fewer_rows_miss_some_pairs():
    rows = covering_rows(AXES, 2)
    pairs = {(row["mask"], row["heads"]) for row in rows[: len(MASK_NAMES) * len(HEADS) - 1]}
    assert pairs != possible_values(AXES, ("mask", "heads"), EXCLUDED)


COMPILED = AXES | {
    "mask": ("full", "sliding_window", "window_bottom_right"),
    "dims": ("64", "80"),
    "shape": tuple(SHAPES["medium"]),
    "distribution": ("normal", "uniform"),
}


def triples(rows):
    return {frozenset(three) for row in rows for three in itertools.combinations(row.items(), 3)}


def compilation(row):
    of_row = {name: value for name, value in row.items() if name not in VARIED}
    return (*of_row.items(), lengths_kind(SHAPES["medium"][row["shape"]]))


@pytest.mark.parametrize("least", [0, 700])
def test_compiled_rows_cover_every_triple_with_few_compilations(least):
    distinct, repeated = compiled_rows(COMPILED, "medium", least)
    plain = covering_rows(COMPILED, 3)
    assert triples([*distinct, *repeated]) == triples(plain)
    assert not any(never(row) for row in (*distinct, *repeated) for _, never in EXCLUSIONS[:4])
    compiled = [compilation(row) for row in distinct]
    assert len(compiled) == len(set(compiled)) < 0.8 * len({compilation(row) for row in plain})
    # Where a row excludes some lengths, a row of another mask has them.
    assert len({compilation(row) for row in repeated} - set(compiled)) < 5
    assert len(distinct) + len(repeated) >= least
    assert (distinct, repeated) == compiled_rows(COMPILED, "medium", least)


def test_compiled_rows_add_triples_that_varying_single_axes_misses(monkeypatch):
    monkeypatch.setattr(covering._Triples, "varied", lambda self, row: (next(self.every(row)), 0))
    covering._compiled_rows.cache_clear()
    distinct, repeated = compiled_rows(COMPILED, "medium", 0)
    covering._compiled_rows.cache_clear()
    assert triples([*distinct, *repeated]) == triples(covering_rows(COMPILED, 3))


def test_compiled_rows_reach_the_requested_number():
    axes = {name: values[:1] for name, values in COMPILED.items()}
    distinct, repeated = compiled_rows(axes, "medium", 40)
    assert (len(distinct), len(repeated)) == (1, 39)
    assert compiled_rows(axes | {"dtype": ()}, "medium", 40) == ([], [])


def test_values_that_cannot_be_combined_raise_an_error():
    one = {name: values[:1] for name, values in COMPILED.items()}
    with pytest.raises(ProblemError, match="no values of these axes can be combined"):
        compiled_rows(one | {"mask": ("full",), "extent": ("half",)}, "medium", 40)


def test_covering_rows_contain_nothing_excluded():
    rows = covering_rows(AXES, 3)
    assert not any(never(row) for row in rows for _, never in EXCLUDED)
    assert any(row["stored"] == "paged" for row in rows)


def test_covering_rows_are_deterministic():
    assert covering_rows(AXES, 2) == covering_rows(AXES, 2)


def test_axis_without_values_gives_no_rows():
    assert covering_rows({**AXES, "dtype": ()}, 2) == []


@pytest.mark.parametrize("shapes", SHAPES)
def test_every_mask_fits_every_shape_and_number_of_heads(shapes):
    for mask, shape, heads in itertools.product(MASKS, SHAPES[shapes], HEADS):
        row = {"mask": mask, "shape": shape, "heads": heads}
        problem = row_problem(row, shapes, 0)
        assert (problem.query, problem.kv) == SHAPES[shapes][shape]


SINGLE = [{axis: value} for axis, values in ALL_AXES.items() for value in values]
PAIRS = [
    *({"mask": mask, "extent": extent} for mask in MASKS for extent in EXTENTS),
    *({"scale": scale, "score": score} for scale in SCALES for score in SCORES),
]
# A backward judges the forward too, so pairs need no forward of their own.
POSSIBLE = [
    pytest.param(row, backward, id="-".join([*row.values(), backward]))
    for rows, backwards in ((SINGLE, BACKWARD), (PAIRS, ("backward of LSE",)))
    for row in rows
    if not any(never(PLAIN_ROW | row) for _, never in EXCLUSIONS) and row.get("dtype") != "tf32"
    for backward in backwards
]


@pytest.mark.parametrize(("row", "backward"), POSSIBLE)
def test_ideal_kernel_passes_at_every_value_of_every_axis(row, backward):
    row = {"dtype": "fp16", "mask": "causal", "shape": "ragged", "backward": backward} | row
    if any(never(PLAIN_ROW | row) for _, never in EXCLUSIONS):
        row["backward"] = ""
    case = Case(problem=row_problem(row, "tiny", 0))
    (record,) = verify(Ideal(), [("", case)], device="cpu", command="").records
    assert record.status in {"pass", "unsupported"}, record.judgement


def test_window_extents_show_the_last_row_the_named_number_of_keys():
    visible = {}
    for extent in EXTENTS:
        row = {"mask": "sliding_window", "extent": extent, "shape": "even"}
        problem = row_problem(row, "tiny", 0)
        last = torch.tensor(problem.query - 1)
        zero = torch.zeros_like(last)
        visible[extent] = int(problem.mask_mod()(zero, zero, last, torch.arange(problem.kv)).sum())
    assert visible == {
        "": 16,
        "half": 32,
        "no key": 0,
        "one key": 1,
        "all but one": 63,
        "all": 64,
        "beyond": 64,
    }


def test_alone_rows_have_every_value_that_hides_other_faults():
    rows = list(alone_rows(ALL_AXES))
    for axis, values in ALONE.items():
        assert {row[axis] for row in rows} >= set(values)
    for row in rows[: -len(TOGETHER)]:
        assert sum(row[axis] in values for axis, values in ALONE.items()) == 1


def test_alone_rows_end_with_the_values_to_be_tested_together():
    """They keep their distribution even where the tier has no time for it elsewhere."""
    axes = ALL_AXES | {"distribution": ("normal",)}
    rows = list(alone_rows(axes))[-len(TOGETHER) :]
    for row, values in zip(rows, TOGETHER, strict=True):
        assert row.items() >= values.items()
    forward = list(alone_rows(axes | {"backward": ("",)}))
    assert not [row for row in forward if row["backward"]]
