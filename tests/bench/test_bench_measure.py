"""What is counted, beside brute force; and the tables."""

import pytest
import torch

from attncheck.bench.measure import count_work, visible_pairs
from attncheck.bench.tables import TABLES, bench_plan
from attncheck.core.errors import UnknownName, UsageError
from attncheck.inputs.problem import Problem
from attncheck.oracles.mod_calls import Indices, call_mask

SEVEN = ("full", "causal", "alibi", "sliding_window", "prefix_lm", "softcap", "document")


@pytest.mark.parametrize("variant", [*SEVEN, "neighborhood", "varlen", "decode", "paged_decode"])
@pytest.mark.parametrize("shape", ["2x4/2x48x16", "1x2x24/40x8"])
def test_pairs_are_those_that_the_mask_shows(variant, shape, monkeypatch):
    monkeypatch.setattr("attncheck.bench.measure._PAIRS", {"cpu": 500})  # in several pieces
    (planned,) = bench_plan((), shapes=[shape], variants=[variant], backward=False)
    problem = planned.problem
    sizes = problem.batch, problem.heads, problem.query, problem.kv
    seen = call_mask(problem.mask_mod(), Indices.of(*map(range, sizes), "cpu")).expand(sizes)
    visible_pairs.cache_clear()
    assert visible_pairs(problem, "cpu") == int(seen.sum())


def test_operations_and_bytes():
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 8, "kv": 16, "head_dim": 32}
    work = count_work(Problem(**sizes, dtype="bf16", backward=True), "cpu")
    pairs = 2 * 4 * 8 * 16
    assert work.pairs == pairs
    assert work.forward_flops == 4 * pairs * 32
    assert work.backward_flops == 2.5 * work.forward_flops
    assert work.cache_bytes == 2 * (2 * 2 * 16 * 32) * 2
    assert work.forward_bytes == work.cache_bytes + 2 * (2 * 4 * 8 * 32) * 2
    # Products of brute force: of their inner dimensions, at each pair.
    other = count_work(Problem(**sizes, value_dim=8, backward=True), "cpu")
    assert other.forward_flops == 2 * pairs * (32 + 8)
    assert other.backward_flops == 2 * pairs * (3 * 32 + 2 * 8)
    assert count_work(Problem(**sizes), "cpu").backward_flops == 0


def test_causal_is_half():
    (planned,) = bench_plan((), shapes=["1x1x64x8"], variants=["causal"])
    assert count_work(planned.problem, "cpu").pairs == 64 * 65 // 2


def test_few_rows_over_many_keys_are_decoding():
    for plan in bench_plan(["decode"], lengths=[64], dims=[8]):
        assert count_work(plan.problem, "cpu").decoding
    (prefill,) = bench_plan((), shapes=["1x1x64x8"], variants=["full"])
    assert not count_work(prefill.problem, "cpu").decoding


def test_the_tables_have_what_the_papers_have():
    lengths = {length for table in TABLES.values() for length in table.lengths}
    assert {512 * 2**i for i in range(7)} <= lengths
    assert {dim for table in TABLES.values() for dim in table.dims} == {64, 128, 256}
    dtypes = {dtype for table in TABLES.values() for dtype in table.dtypes}
    assert {"fp16", "bf16", "e4m3"} <= dtypes
    assert TABLES["flex"].variants == SEVEN
    assert TABLES["flex"].groups == (1, 8)
    flash = {one.problem for one in bench_plan(["flash2"])}
    assert {p.batch * p.query for p in flash} == {16384}
    assert {p.heads * p.head_dim for p in flash} == {2048}


@pytest.mark.parametrize("name", TABLES)
def test_every_table_can_be_planned(name, monkeypatch):
    monkeypatch.setattr("attncheck.bench.tables.check_size", lambda *_: None)  # of this machine
    plan = bench_plan([name])
    assert len({p.problem for p in plan}) == len(plan)
    without = {"flash3-fp8", "tutorial-fp8", "decode", "paged"}
    assert {p.problem.backward for p in plan} == {name not in without}


def test_a_selection_takes_the_place_of_a_tables():
    plan = bench_plan(
        ["main"], dtypes=["fp16"], variants=["alibi"], lengths=[128], dims=[32], backward=False
    )
    (one,) = plan
    assert (one.variant, one.problem.dtype, one.problem.query) == ("alibi", "fp16", 128)
    assert (one.problem.head_dim, one.problem.backward) == (32, False)


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"tables": ["flash4"]}, UnknownName),
        ({"tables": ["main"], "variants": ["casual"]}, UnknownName),
        ({"tables": ["main"], "dtypes": ["fp64"]}, UnknownName),
        ({"tables": [], "shapes": ["1x1x64x8"], "variants": ["softmax"]}, UsageError),
    ],
)
def test_what_cannot_be_is_refused(asked, error):
    with pytest.raises(error):
        bench_plan(**asked)


def test_quick_inputs_are_the_problems(monkeypatch):
    from attncheck.inputs.input_tensors import quick_inputs

    problem = Problem(batch=2, heads=4, kv_heads=2, query=64, head_dim=32, backward=True, seed=3)
    inputs = quick_inputs(problem, "cpu")
    assert torch.equal(inputs.q, quick_inputs(problem, "cpu").q)
    assert not torch.equal(inputs.q, quick_inputs(problem.replace(seed=4), "cpu").q)
    assert 0.9 < float(inputs.dout.double().std()) < 1.1
    scaled = quick_inputs(problem.replace(dtype="e4m3", backward=False), "cpu")
    assert 0.9 < float(scaled.promoted()[0].std()) < 1.1
