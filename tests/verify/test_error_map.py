"""Where the errors of a failure are."""

import math

import msgspec
import pytest
from tests.planted_kernels.outputs_given import spoiled

from attncheck.core.outputs import Outputs
from attncheck.inputs.problem import Case, Problem
from attncheck.records.record import ErrorMap
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.verify.judging import MOST_HEADS, MOST_ROWS
from attncheck.verify.run_case import run_case


def changed(at, tiling):
    """An ideal kernel, some elements of whose out are something else."""

    def change(_, right):
        out = right.out.clone()
        for index, value in at.items():
            out[index] = value
        return Outputs(out, right.lse)

    return spoiled(change, tiling)


def record(at, *, question="compare", brief=True, tiling=None, **sizes):
    small = {"batch": 2, "heads": 2, "kv_heads": 2, "query": 4, "kv": 4, "head_dim": 4}
    case = Case(problem=Problem(**(small | sizes)), question=question)
    subject = changed(at, tiling)
    return run_case(subject, case, device="cpu", variant="v", environment="e", brief=brief)


def beyond(found):
    """Cells that are wrong, as (line, column)."""
    lines = enumerate(found.error_map.values)
    return {(i, j) for i, line in lines for j, share in enumerate(line) if share > 1}


@pytest.mark.parametrize("brief", [True, False])
def test_a_wrong_element_is_in_its_head_and_row_whatever_its_batch(brief):
    found = record({(1, 0, 2, 3): 50.0}, brief=brief)
    assert found.status == "fail"
    assert (found.error_map.heads, beyond(found)) == (1, {(0, 2)})
    assert [len(line) for line in found.error_map.values] == [4 // found.error_map.rows] * 2


def test_the_largest_share_of_the_map_is_that_of_the_verdict():
    found = record({(0, 1, 3, 0): 7.0, (1, 1, 3, 1): 5.0})
    largest = max(map(max, found.error_map.values))
    assert largest == pytest.approx(found.judgement.out_over_bound, rel=1e-2)


def test_nan_is_infinitely_wrong():
    found = record({(0, 0, 0, 0): math.nan})
    assert found.judgement.rule == "finite"
    assert found.error_map.values[0][0] == math.inf


def test_a_probe_that_fails_has_one():
    found = record({(0, 0, 1, 0): 9.0}, question="ones")
    assert found.status == "fail"
    assert (0, 1) in beyond(found)


def test_a_pass_has_none():
    assert record({}).error_map is msgspec.UNSET
    assert record({}, question="ones").error_map is msgspec.UNSET


def test_cells_are_whole_tiles_of_the_kernel():
    tiling = Tiling(block_query=16, block_kv=16)
    found = record({(0, 0, 20, 0): 9.0}, tiling=tiling, query=40, batch=1)
    assert (found.error_map.rows, beyond(found)) == (16, {(0, 1)})
    assert len(found.error_map.values[0]) == 3


@pytest.mark.parametrize(("query", "rows", "columns"), [(64, 1, 64), (65, 2, 33), (129, 3, 43)])
def test_a_long_map_is_capped(query, rows, columns):
    tiling = Tiling(block_query=256, block_kv=16)
    last = {(0, 0, query - 1, 0): 9.0}
    found = record(last, query=query, batch=1, heads=1, kv_heads=1, tiling=tiling)
    assert found.error_map.rows == rows
    assert len(found.error_map.values[0]) == columns <= MOST_ROWS
    assert beyond(found) == {(0, columns - 1)}


def test_many_heads_are_grouped():
    found = record({(0, 39, 0, 0): 9.0}, batch=1, heads=40, kv_heads=40)
    assert found.error_map.heads == 2
    assert len(found.error_map.values) == 20 <= MOST_HEADS
    assert beyond(found) == {(19, 0)}


def test_it_is_json_of_three_digits():
    found = record({(0, 0, 1, 0): 9.0}).error_map
    assert msgspec.convert(msgspec.to_builtins(found), ErrorMap) == found
    assert all(share == float(f"{share:.3g}") for line in found.values for share in line)
