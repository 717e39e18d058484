"""The error map of a failed record: which heads and rows are wrong."""

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
    """An ideal kernel with the elements of out at these indices replaced."""

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


def wrong_cells(record):
    """The (line, column) of each cell of the map that exceeds its bound."""
    lines = enumerate(record.error_map.values)
    return {(i, j) for i, line in lines for j, share in enumerate(line) if share > 1}


@pytest.mark.parametrize("brief", [True, False])
def test_map_locates_head_and_row_across_the_batch(brief):
    failure = record({(1, 0, 2, 3): 50.0}, brief=brief)
    assert failure.status == "fail"
    assert (failure.error_map.heads, wrong_cells(failure)) == (1, {(0, 2)})
    assert [len(line) for line in failure.error_map.values] == [4 // failure.error_map.rows] * 2


def test_largest_share_of_the_map_equals_out_over_bound():
    failure = record({(0, 1, 3, 0): 7.0, (1, 1, 3, 1): 5.0})
    largest = max(map(max, failure.error_map.values))
    assert largest == pytest.approx(failure.judgement.out_over_bound, rel=1e-2)


def test_nan_has_an_infinite_share():
    failure = record({(0, 0, 0, 0): math.nan})
    assert failure.judgement.rule == "finite"
    assert failure.error_map.values[0][0] == math.inf


def test_failed_probe_has_an_error_map():
    failure = record({(0, 0, 1, 0): 9.0}, question="ones")
    assert failure.status == "fail"
    assert (0, 1) in wrong_cells(failure)


def test_passing_record_has_no_error_map():
    assert record({}).error_map is msgspec.UNSET
    assert record({}, question="ones").error_map is msgspec.UNSET


def test_cells_are_the_query_tiles_of_the_kernel():
    tiling = Tiling(block_query=16, block_kv=16)
    failure = record({(0, 0, 20, 0): 9.0}, tiling=tiling, query=40, batch=1)
    assert (failure.error_map.rows, wrong_cells(failure)) == (16, {(0, 1)})
    assert len(failure.error_map.values[0]) == 3


@pytest.mark.parametrize(("query", "rows", "columns"), [(64, 1, 64), (65, 2, 33), (129, 3, 43)])
def test_number_of_columns_is_capped(query, rows, columns):
    tiling = Tiling(block_query=256, block_kv=16)
    last = {(0, 0, query - 1, 0): 9.0}
    failure = record(last, query=query, batch=1, heads=1, kv_heads=1, tiling=tiling)
    assert failure.error_map.rows == rows
    assert len(failure.error_map.values[0]) == columns <= MOST_ROWS
    assert wrong_cells(failure) == {(0, columns - 1)}


def test_heads_are_grouped_beyond_the_maximum():
    failure = record({(0, 39, 0, 0): 9.0}, batch=1, heads=40, kv_heads=40)
    assert failure.error_map.heads == 2
    assert len(failure.error_map.values) == 20 <= MOST_HEADS
    assert wrong_cells(failure) == {(19, 0)}


def test_map_round_trips_through_builtins_with_three_digits():
    error_map = record({(0, 0, 1, 0): 9.0}).error_map
    assert msgspec.convert(msgspec.to_builtins(error_map), ErrorMap) == error_map
    assert all(share == float(f"{share:.3g}") for line in error_map.values for share in line)
