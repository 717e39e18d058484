"""NaN and infinity in K and V reach only the rows that attend to them, in every oracle."""

import math

import pytest
import torch

from attncheck import oracles
from attncheck.core.mod_spec import Spec
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.oracles.float64_numbers import Float64, nonfinite_sums
from attncheck.oracles.forward_recurrences import flash2_forward
from attncheck.oracles.mp_numbers import Mp
from attncheck.oracles.streaming_forward import Blocks

N, FIRST = 24, 13  # keys from FIRST on are spoilt
MP = Mp(20)
ORACLES = {
    "naive": oracles.ORACLES["naive"],
    "dense": oracles.dense,
    "online": oracles.ORACLES["online"],
    "flash1": lambda inputs: oracles.flash1(inputs, block_query=5, block_kv=4),
    "flash1 in 20 digits": lambda inputs: oracles.RECURRENCES["flash1"](MP, inputs).rounded(MP),
    "flash2": lambda inputs: oracles.flash2(inputs, block_query=5, block_kv=4),
    "split": lambda inputs: oracles.split(inputs, splits=5),
    "streaming": lambda inputs: oracles.streaming(
        inputs, blocks=Blocks(rows=64, query=8, query_most=8, kv=8, cell=4)
    ),
}
every_oracle = pytest.mark.parametrize("oracle", ORACLES.values(), ids=ORACLES.keys())


def _causal():
    return draw_inputs(Problem(heads=4, kv_heads=2, query=N, head_dim=8, mask=Spec.of("causal")))


def _spoilt(inputs, name, value, column=slice(None)):
    tensor = getattr(inputs, name).clone()
    tensor[:, :, FIRST:, column] = value
    return inputs.replace(**{name: tensor})


@every_oracle
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_rows_that_do_not_see_spoilt_keys_are_unchanged(oracle, name, value, allowance):
    inputs = _causal()
    spoilt, clean = oracle(_spoilt(inputs, name, value)), oracle(inputs)
    bound = allowance(inputs)
    for part in (spoilt, clean):
        part.out[:, :, FIRST:], part.lse[:, :, FIRST:] = 0, 0
    assert not bound.misses(clean, spoilt)


@every_oracle
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_spoilt_value_stays_in_its_column(oracle, value):
    outputs = oracle(_spoilt(_causal(), "v", value, column=2))
    column = outputs.out[:, :, FIRST:, 2]
    assert (column.isnan() if math.isnan(value) else column == value).all()
    others = outputs.out[..., [0, 1, 3, 4, 5, 6, 7]]
    assert others.isfinite().all()
    assert outputs.lse.isfinite().all()


@every_oracle
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_rows_without_keys_stay_zero_despite_nan(oracle, name):
    problem = Problem(batch=2, query=N, head_dim=8, mask=Spec.of("padding", lengths=[0, FIRST]))
    inputs = _spoilt(draw_inputs(problem), name, math.nan)
    outputs = oracle(
        inputs.replace(**{name: getattr(inputs, name).index_fill(0, torch.tensor(0), math.nan)})
    )
    assert (outputs.out[0] == 0).all()
    assert (outputs.lse[0] == -math.inf).all()
    if name != "q":
        assert outputs.out[1].isfinite().all()


@every_oracle
def test_opposite_infinities_give_nan(oracle):
    inputs = _causal()
    v = inputs.v.clone()
    v[:, :, 3], v[:, :, 9] = math.inf, -math.inf
    outputs = oracle(inputs.replace(v=v))
    assert (outputs.out[:, :, 3:9] == math.inf).all()
    assert outputs.out[:, :, 9:].isnan().all()


def test_sums_of_counted_infinities_and_nan():
    counts = torch.tensor([[0.0, 0, 0], [2, 1, 0], [0, 1, 0], [0, 0, 3], [0, 1, 1]])
    assert nonfinite_sums(counts).flatten().tolist()[0] == 0
    assert nonfinite_sums(counts)[[1, 4]].isnan().all()
    assert nonfinite_sums(counts)[[2, 3]].flatten().tolist() == [math.inf, -math.inf]


class _PlainProduct(Float64):
    def weigh(self, weights, values, attended):
        return weights @ values


def test_plain_product_spreads_nan_to_rows_that_do_not_see_it():
    """The planted fault: a weight of 0 is not enough, as 0·NaN is NaN."""
    inputs = _spoilt(_causal(), "v", math.nan)
    outputs = flash2_forward(_PlainProduct(), inputs, block_query=5, block_kv=4)
    assert outputs.out[:, :, :FIRST].isnan().any()
