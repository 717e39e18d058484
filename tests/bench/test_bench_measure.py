"""Counted work of attention (pairs, FLOPs, bytes) against brute force, and the bench tables."""

import pytest
import torch

from attncheck.bench.measure import count_work, visible_pairs
from attncheck.bench.tables import TABLES, bench_plan
from attncheck.core.errors import UnknownName, UsageError
from attncheck.inputs.problem import Problem
from attncheck.oracles.mod_calls import Indices, call_mask

FLEX_VARIANTS = ("full", "causal", "alibi", "sliding_window", "prefix_lm", "softcap", "document")


@pytest.mark.parametrize(
    "variant", [*FLEX_VARIANTS, "neighborhood", "varlen", "decode", "paged_decode"]
)
@pytest.mark.parametrize("shape", ["2x4/2x48x16", "1x2x24/40x8"])
def test_visible_pairs_match_the_mask_by_brute_force(variant, shape, monkeypatch):
    monkeypatch.setattr("attncheck.bench.measure._PAIRS", {"cpu": 500})  # in several pieces
    (planned,) = bench_plan((), shapes=[shape], variants=[variant], backward=False)
    problem = planned.problem
    sizes = problem.batch, problem.heads, problem.query, problem.kv
    visible = call_mask(problem.mask_mod(), Indices.of(*map(range, sizes), "cpu")).expand(sizes)
    visible_pairs.cache_clear()
    assert visible_pairs(problem, "cpu") == int(visible.sum())


def test_count_work_gives_flops_and_bytes():
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 8, "kv": 16, "head_dim": 32}
    work = count_work(Problem(**sizes, dtype="bf16", backward=True), "cpu")
    pairs = 2 * 4 * 8 * 16
    assert work.pairs == pairs
    assert work.forward_flops == 4 * pairs * 32
    assert work.backward_flops == 2.5 * work.forward_flops
    assert work.cache_bytes == 2 * (2 * 2 * 16 * 32) * 2
    assert work.forward_bytes == work.cache_bytes + 2 * (2 * 4 * 8 * 32) * 2
    # Each pair costs the inner dimensions of 2 forward and 5 backward products.
    other = count_work(Problem(**sizes, value_dim=8, backward=True), "cpu")
    assert other.forward_flops == 2 * pairs * (32 + 8)
    assert other.backward_flops == 2 * pairs * (3 * 32 + 2 * 8)
    assert count_work(Problem(**sizes), "cpu").backward_flops == 0


def test_decode_table_counts_as_decoding():
    for plan in bench_plan(["decode"], lengths=[64], dims=[8]):
        assert count_work(plan.problem, "cpu").decoding
    (prefill,) = bench_plan((), shapes=["1x1x64x8"], variants=["full"])
    assert not count_work(prefill.problem, "cpu").decoding


def test_tables_cover_the_sizes_of_the_papers():
    lengths = {length for table in TABLES.values() for length in table.lengths}
    assert {512 * 2**i for i in range(7)} <= lengths
    assert {dim for table in TABLES.values() for dim in table.dims} == {64, 128, 256}
    dtypes = {dtype for table in TABLES.values() for dtype in table.dtypes}
    assert {"fp16", "bf16", "e4m3"} <= dtypes
    assert TABLES["flex"].variants == FLEX_VARIANTS
    assert TABLES["flex"].groups == (1, 8)
    flash = {one.problem for one in bench_plan(["flash2"])}
    assert {p.batch * p.query for p in flash} == {16384}
    assert {p.heads * p.head_dim for p in flash} == {2048}


@pytest.mark.parametrize("name", TABLES)
def test_every_table_plans_distinct_problems(name, monkeypatch):
    monkeypatch.setattr(
        "attncheck.bench.tables.check_size", lambda *_: None
    )  # its limits depend on the machine
    plan = bench_plan([name])
    assert len({p.problem for p in plan}) == len(plan)
    forward_only = {"flash3-fp8", "tutorial-fp8", "decode", "paged"}
    assert {p.problem.backward for p in plan} == {name not in forward_only}


def test_options_replace_the_values_of_a_table():
    plan = bench_plan(
        ["main"], dtypes=["fp16"], variants=["alibi"], lengths=[128], dims=[32], backward=False
    )
    (one,) = plan
    assert (one.variant, one.problem.dtype, one.problem.query) == ("alibi", "fp16", 128)
    assert (one.problem.head_dim, one.problem.backward) == (32, False)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"tables": ["flash4"]}, UnknownName),
        ({"tables": ["main"], "variants": ["casual"]}, UnknownName),
        ({"tables": ["main"], "dtypes": ["fp64"]}, UnknownName),
        ({"tables": [], "shapes": ["1x1x64x8"], "variants": ["softmax"]}, UsageError),
    ],
)
def test_invalid_plan_is_refused(options, error):
    with pytest.raises(error):
        bench_plan(**options)


def test_quick_inputs_depend_on_the_seed_and_have_unit_variance():
    from attncheck.inputs.input_tensors import quick_inputs

    problem = Problem(batch=2, heads=4, kv_heads=2, query=64, head_dim=32, backward=True, seed=3)
    inputs = quick_inputs(problem, "cpu")
    assert torch.equal(inputs.q, quick_inputs(problem, "cpu").q)
    assert not torch.equal(inputs.q, quick_inputs(problem.replace(seed=4), "cpu").q)
    assert 0.9 < float(inputs.dout.double().std()) < 1.1
    scaled = quick_inputs(problem.replace(dtype="e4m3", backward=False), "cpu")
    assert 0.9 < float(scaled.promoted()[0].std()) < 1.1
