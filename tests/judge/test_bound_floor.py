"""The floor of the deterministic bound is never above it, and near enough to rank rows."""

import dataclasses

import pytest
import torch
from tests.judge import small_conditions as make

from attncheck.core.conditions import WeightedRows
from attncheck.core.declared_arithmetic import AMPERE, VOLTA, Accumulator, default_arithmetic
from attncheck.core.formats import DTYPES, FORMATS
from attncheck.judge.bound_floor import bound_floor, row_totals
from attncheck.judge.deterministic_bound import deterministic_bound
from attncheck.judge.score_errors import score_error

DTYPE_NAMES = ("fp64", "fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2")

VARIANTS = {
    "usual": {},
    "Volta": {"scores": VOLTA, "values": VOLTA},
    "Ampere, rounded P summed": {"values": AMPERE, "sums_rounded_weights": True},
    "divided before": {"normalised_weights": True},
    "divided after every tile": {"divides_each_step": True},
    "rounded P summed": {"sums_rounded_weights": True},
    "parts": {"splits": 4, "exp2_ulps": 64.0},
    "long tiles": {"block_kv": 128},
    "sums in fp16": {"values": Accumulator(name="fp16", result=11, format=FORMATS["fp16"])},
}


def arithmetic_variants(dtype):
    usual = default_arithmetic(DTYPES[dtype])
    yield from (dataclasses.replace(usual, **other) for other in VARIANTS.values())
    yield default_arithmetic(DTYPES[dtype], (9, 0))
    if not usual.weights.saturates:
        yield dataclasses.replace(usual, lazy_rescale=8.0)
        yield dataclasses.replace(usual, scaled_query=FORMATS["fp16"])


def row_conditions(*, size=1.0, constant=False, causal=True, dims=16, keys=96):
    """Conditions of two heads of 48 rows; if causal, one row sees one key and one sees none."""
    q, k = size * make.normal(2, 48, dims, seed=1), make.normal(2, keys, dims, seed=2)
    v = torch.full((2, keys, 5), 1 / 3) if constant else make.normal(2, keys, 5, seed=3)
    seen = torch.ones(2, 48, keys, dtype=torch.bool)
    if causal:
        seen = seen.tril_()
        seen[:, 7] = False
        seen[:, 8, 1:] = False
    return make.attention(q, k, v.double(), seen=seen)


def weighted_rows(known):
    """The WeightedRows of the same call."""
    shared = ("q", "k", "v", "scale", "count", "maximum", "total", "out", "lse")
    weights = torch.exp(known.scores - known.maximum[..., None])
    return WeightedRows(
        **{name: getattr(known, name) for name in shared},
        weights=torch.where(known.seen, weights, 0.0),
        hidden=None if bool(known.seen.all()) else ~known.seen,
    )


INPUTS = {
    "normal": {},
    "every key": {"causal": False},
    "one key has all": {"size": 30.0},
    "scores in the thousands": {"size": 1000.0},
    "scores beyond fp32": {"size": 1e37},
    "equal values": {"constant": True},
    "tiny scores": {"size": 1e-30},
    "long": {"keys": 700, "causal": False},
}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_floor_is_never_above_the_bound(dtype, inputs):
    """A floor may be NaN (unknown), and is unknown wherever the bound is infinite."""
    known = row_conditions(**INPUTS[inputs])
    totals = row_totals(weighted_rows(known))
    for arithmetic in arithmetic_variants(dtype):
        bound = deterministic_bound(known, arithmetic, score_error(known, arithmetic))
        for floor, whole in zip(
            bound_floor(totals, arithmetic), (bound.out, bound.lse), strict=True
        ):
            defined = ~floor.isnan()
            assert bool((floor[defined] <= whole[defined]).all()), arithmetic
            assert bool(whole[defined].isfinite().all()), arithmetic
            empty = ~known.seen.any(-1)
            assert bool((floor[empty] == 0).all())


@pytest.mark.parametrize(
    ("dtype", "least_share"),
    [("fp32", 0.4), ("tf32", 0.1), ("fp16", 0.9), ("bf16", 0.95), ("e5m2", 0.95)],
)
def test_floor_is_near_its_bound(dtype, least_share):
    """Nearness is what ranks rows, and without it the test above could pass with floors of 0."""
    known = row_conditions(keys=256, causal=False)
    arithmetic = default_arithmetic(DTYPES[dtype])
    bound = deterministic_bound(known, arithmetic, score_error(known, arithmetic))
    out_floor, lse_floor = bound_floor(row_totals(weighted_rows(known)), arithmetic)
    assert bool((out_floor >= least_share * bound.out).all())
    assert bool((lse_floor >= 0.85 * bound.lse).all())
