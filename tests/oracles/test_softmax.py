"""The three softmaxes of rows of scores: exact within bounds, and visibly wrong on overflow."""

import dataclasses
import math
import sys

import mpmath
import pytest
import torch
from tests.oracles.conftest import CoarseExp
from torch.utils._python_dispatch import TorchDispatchMode

from attncheck import oracles
from attncheck.core.outputs import Outputs
from attncheck.inputs.distributions import DISTRIBUTIONS
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.oracles.float64_numbers import Float64
from attncheck.oracles.recurrence_steps import SOFTMAXES
from attncheck.oracles.streaming_forward import softmax_by_rows

LARGEST_EXPONENT = math.log(sys.float_info.max)  # 709.78
ORACLES = oracles.SOFTMAXES | {
    "truth": oracles.truth,
    "truth, row by row": lambda inputs: softmax_by_rows(inputs, block_scores=1),
    "truth, four rows at a time": lambda inputs: softmax_by_rows(inputs, block_scores=4 * 11 + 3),
}
every_oracle = pytest.mark.parametrize("oracle", ORACLES.values(), ids=ORACLES.keys())
every_softmax = pytest.mark.parametrize("softmax", SOFTMAXES.values(), ids=SOFTMAXES.keys())


def _problem(**changes):
    sizes = {"batch": 2, "heads": 3, "query": 5, "kv": 11, "dtype": "fp32"}
    return Problem(operation="softmax", **(sizes | changes))


def _exact(inputs):
    """Softmax in 160 bits, row by row."""
    x = inputs.scores()
    out, lse = torch.zeros_like(x), torch.full(x.shape[:-1], -math.inf, dtype=torch.float64)
    with mpmath.workprec(160):
        for index in torch.cartesian_prod(*(torch.arange(n) for n in x.shape[:-1])).tolist():
            row = tuple(index)
            weights = [mpmath.exp(score) for score in x[row].tolist()]
            total = mpmath.fsum(weights)
            if total:
                lse[row] = float(mpmath.log(total))
                out[row] = torch.tensor([float(w / total) for w in weights], dtype=torch.float64)
    return Outputs(out, lse)


def _softmax(softmax, *scores):
    row = torch.tensor(scores, dtype=torch.float64).view(1, 1, 1, -1)
    weights, lse = softmax(Float64(), row, row != -math.inf)
    return weights.flatten().tolist(), lse.item()


@every_oracle
def test_softmax_equals_the_definition(oracle, allowance):
    inputs = draw_inputs(_problem())
    assert not allowance(inputs).misses(oracle(inputs), _exact(inputs), sides=1)


@pytest.mark.parametrize("distribution", [n for n, d in DISTRIBUTIONS.items() if d.scores])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "fp64"])
def test_softmax_equals_the_definition_for_every_distribution(distribution, dtype, allowance):
    inputs = draw_inputs(_problem(distribution=distribution, dtype=dtype, kv=40))
    bound, truth, exact = allowance(inputs), oracles.truth(inputs), _exact(inputs)
    assert not bound.misses(truth, exact, sides=1)
    assert not bound.misses(oracles.SOFTMAXES["online"](inputs), exact, sides=1)
    # The naive one is right exactly in rows whose sum is a normal number.
    naive = oracles.SOFTMAXES["naive"](inputs)
    kept = exact.lse.abs() < 708
    assert torch.equal(kept, naive.lse.abs() < 708)
    rows = dataclasses.replace(bound, spread=bound.spread[kept])
    one, other = (Outputs(part.out[kept], part.lse[kept]) for part in (naive, exact))
    assert not rows.misses(one, other, sides=1)


@every_oracle
def test_shapes_and_rows_of_minus_infinity_and_nan(oracle):
    inputs = draw_inputs(_problem())
    x = inputs.x.clone()
    x[0, 0] = -math.inf  # rows that attend to nothing
    x[0, 1, :, ::2] = -math.inf
    x[1, 2, 3, 4], x[1, 2, 4, 5] = math.nan, math.inf
    outputs = oracle(inputs.replace(x=x))
    assert outputs.out.shape == (2, 3, 5, 11)
    assert outputs.lse.shape == (2, 3, 5)
    assert outputs.out.dtype == outputs.lse.dtype == torch.float64
    assert (outputs.out[0, 0] == 0).all()
    assert (outputs.lse[0, 0] == -math.inf).all()
    assert (outputs.out[0, 1, :, ::2] == 0).all()
    assert outputs.out[1, 2, 3].isnan().all()
    assert outputs.out[1, 2, 4].isnan().any()
    rest = [(b, h) for b in range(2) for h in range(3) if (b, h) not in {(0, 0), (1, 2)}]
    ones = torch.stack([outputs.out[place].sum(-1) for place in rest])
    units = (ones - 1).abs().max().item() / 2.0**-53
    assert units <= 2 * 11  # a division for each weight, and the additions of this sum
    assert outputs.lse[1, 2, :3].isfinite().all()


@every_softmax
def test_spoilt_rows_do_not_affect_others(softmax):
    scores = torch.randn(1, 2, 4, 9, dtype=torch.float64)
    spoilt = scores.clone()
    spoilt[0, 0, 1], spoilt[0, 1, 3, 5] = -math.inf, math.nan
    one, other = (softmax(Float64(), s, s != -math.inf)[0] for s in (scores, spoilt))
    differ = ~((one == other).all(-1)).flatten()
    assert differ.tolist() == [False, True, False, False, False, False, False, True]


@pytest.mark.parametrize("keys", [1, 4, 100])
def test_naive_softmax_overflows_at_the_largest_exponent(keys):
    at = LARGEST_EXPONENT - math.log(keys)
    weights, lse = _softmax(SOFTMAXES["naive"], *[at - 1e-9] * keys)
    assert all(map(math.isfinite, weights))
    assert math.isfinite(lse)
    _, lse = _softmax(SOFTMAXES["naive"], *[at + 1e-9] * keys)
    assert lse == math.inf
    weights, lse = _softmax(SOFTMAXES["naive"], 710.0, *[0.0] * keys)
    assert math.isnan(weights[0])
    assert lse == math.inf


def test_naive_softmax_is_nan_where_all_exponentials_underflow():
    weights, lse = _softmax(SOFTMAXES["naive"], -745.0, -745.0)
    assert weights == [0.5, 0.5]
    assert math.isfinite(lse)
    weights, lse = _softmax(SOFTMAXES["naive"], -746.0, -746.0)
    assert all(map(math.isnan, weights))
    assert lse == -math.inf


@pytest.mark.parametrize("name", ["safe", "online"])
@pytest.mark.parametrize("at", [-1e300, -746.0, 710.0, 1e300])
def test_safe_and_online_softmax_handle_extreme_scores(name, at):
    weights, lse = _softmax(SOFTMAXES[name], at, at, -math.inf)
    assert weights == [0.5, 0.5, 0.0]
    assert lse == at + math.log(2)


@pytest.mark.parametrize("name", ["safe", "online"])
def test_safe_and_online_softmax_are_exact_wherever_the_maximum_is(name):
    """All exponentials are 0 or 1 here; the maximum is first, last or in the middle."""
    for scores in ([800.0, 0.0, -800.0], [-800.0, 0.0, 800.0], [0.0, 800.0, -800.0]):
        weights, lse = _softmax(SOFTMAXES[name], *scores)
        assert weights == [float(score == 800.0) for score in scores]
        assert lse == 800.0


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor an operation creates, ignoring tensors of ``result`` bytes."""

    def __init__(self, result):
        super().__init__()
        self.result, self.elements = result, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensor = func(*args, **(kwargs or {}))
        if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() != self.result:
            elements = tensor.untyped_storage().nbytes() // tensor.element_size()
            self.elements = max(self.elements, elements)
        return tensor


def test_softmax_by_rows_needs_little_more_memory_than_its_result():
    inputs = draw_inputs(_problem(query=64, kv=33, dtype="fp16"))
    count = inputs.x.numel()
    with _Largest(8 * count) as mode:
        softmax_by_rows(inputs, block_scores=330)
    # ``count`` for the input, which has as many elements in a smaller dtype.
    assert mode.elements in {330, count}
    with _Largest(8 * count) as mode:
        oracles.SOFTMAXES["safe"](inputs)
    assert mode.elements == count


def test_truth_of_attention_is_the_streaming_oracle():
    attention = draw_inputs(Problem(query=3, head_dim=4))
    truth, streamed = oracles.truth(attention), oracles.streaming(attention)
    assert torch.equal(truth.out, streamed.out)
    assert torch.equal(truth.lse, streamed.lse)


@pytest.mark.parametrize("name", oracles.SOFTMAX_RECURRENCES)
def test_exponentials_in_fp32_exceed_the_bounds(name, allowance):
    inputs, numbers = draw_inputs(_problem()), CoarseExp()
    outputs = oracles.SOFTMAX_RECURRENCES[name](numbers, inputs).rounded(numbers)
    assert allowance(inputs).misses(outputs, oracles.truth(inputs))
