"""Certificates: proven errors of float64 results hold, and nothing unknown counts as proven."""

import dataclasses
import math
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("flint", reason="python-flint is an optional extra")
import flint
from tests.oracles.conftest import SHAPES, draw_variant

from attncheck import oracles
from attncheck.cases.variants import VARIANTS
from attncheck.core.balls import error_bound, is_known
from attncheck.core.conditions import Rows
from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.mods.ball_algebra import BALLS
from attncheck.oracles.ball_numbers import Ball, enclose_rows, proven_error
from attncheck.oracles.float64_numbers import Float64
from attncheck.oracles.forward_recurrences import flash2_forward, one_head

IN_DTYPES = [
    (name, dtype)
    for dtype in ("fp32", "e4m3")
    for name, variant in VARIANTS.items()
    if variant.exists(dtype, "normal")  # softmax has no fp8
]


def all_rows(problem):
    return Rows(range(problem.batch * problem.heads), torch.arange(problem.query))


@pytest.mark.parametrize(("name", "dtype"), IN_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_proven_errors_of_float64_oracles_are_within_their_bounds(name, shape, dtype, allowance):
    inputs = draw_variant(name, shape, dtype=dtype)
    rows, bound = all_rows(inputs.problem), allowance(inputs)
    exact = enclose_rows(Ball(evaluate=BALLS.score), inputs, rows)
    softmax = inputs.problem.operation == "softmax"
    every = dict(oracles.SOFTMAXES if softmax else oracles.ORACLES) | {"truth": oracles.truth}
    for oracle in every.values():
        outputs = oracle(inputs)
        proven = proven_error(outputs, exact, rows)
        spread = bound.spread.flatten(0, 1)
        # One unit more, as a proven error is rounded up.
        assert (proven.out <= 2.0**-53 * (bound.out + 1) * spread).all()
        lse = outputs.lse.flatten(0, 1)
        allowed = 2.0**-53 * (bound.weight + bound.kv + 3 + 2 * lse.abs())
        assert (proven.lse <= allowed.nan_to_num(posinf=0.0)).all()


@pytest.mark.parametrize("shift", [1e-12, -1e-15])
def test_proven_error_of_a_shifted_result_covers_the_shift(shift):
    inputs = draw_variant("alibi", "1x2x6x4", dtype="fp32")
    rows, numbers = all_rows(inputs.problem), Ball(evaluate=BALLS.score)
    exact = enclose_rows(numbers, inputs, rows)
    right = oracles.truth(inputs)
    before = proven_error(right, exact, rows)
    out, lse = right.out.clone(), right.lse.clone()
    out[0, 1, 3, 2] += shift
    lse[0, 0, 5] += shift
    after = proven_error(Outputs(out, lse), exact, rows)
    moved = abs(out[0, 1, 3, 2] - right.out[0, 1, 3, 2]), abs(lse[0, 0, 5] - right.lse[0, 0, 5])
    assert moved[0] - before.out[1, 3, 2] <= after.out[1, 3, 2]
    assert moved[1] - before.lse[0, 5] <= after.lse[0, 5]
    after.out[1, 3, 2], after.lse[0, 5] = before.out[1, 3, 2], before.lse[0, 5]
    assert torch.equal(after.out, before.out)
    assert torch.equal(after.lse, before.lse)


@pytest.mark.parametrize(
    ("part", "index", "value"),
    [
        ("out", (0, 0, 1, 0), math.nan),
        ("out", (0, 0, 1, 0), math.inf),
        ("lse", (0, 0, 1), -math.inf),
        ("lse", (0, 0, 1), math.nan),
        ("lse", (0, 0, 8), 0.0),
        ("lse", (0, 0, 8), math.inf),
    ],
)
def test_wrong_infinite_or_nan_result_is_not_proven(part, index, value):
    """Row 8 sees no key: only an LSE of −∞ is right there."""
    inputs = draw_variant("sliding_window", SHAPES[1])
    rows = all_rows(inputs.problem)
    exact = enclose_rows(Ball(), inputs, rows)
    outputs = oracles.truth(inputs)
    right = proven_error(outputs, exact, rows)
    assert right.out.isfinite().all()
    assert right.lse.isfinite().all()
    assert right.out[0, 8].tolist() == [0.0] * 5
    assert right.lse[0, 8] == 0
    getattr(outputs, part)[index] = value
    wrong = getattr(proven_error(outputs, exact, rows), part)
    assert wrong[index[1:]] == math.inf
    assert wrong.isinf().sum() == 1


def test_enclosing_some_rows_gives_the_balls_of_the_whole(monkeypatch):
    """Three rows of heads 3 to 5, in blocks of two keys."""
    inputs = draw_variant("softcap", "2x4/2x9/7x4/3", dtype="e5m2")
    numbers = Ball(evaluate=BALLS.score)
    whole = enclose_rows(numbers, inputs, all_rows(inputs.problem))
    monkeypatch.setattr("attncheck.oracles.forward_recurrences._SCORES", 6)
    rows = Rows(range(3, 6), torch.tensor([0, 4, 8]))
    some = enclose_rows(numbers, inputs, rows)
    assert some.out.array.shape == (1, 3, 3, 3)
    assert some.lse.array.shape == (1, 3, 3, 1)
    for part in ("out", "lse"):
        expected = getattr(whole, part).array[:, 3:6][:, :, [0, 4, 8]]
        for ball, other in zip(getattr(some, part).array.flat, expected.flat, strict=True):
            assert ball.overlaps(other)
    with pytest.raises(AssertionError):  # the comparison does tell rows apart
        assert all(
            ball.overlaps(other)
            for ball, other in zip(
                some.out.array.flat, whole.out.array[:, 3:6, :3].flat, strict=True
            )
        )


def test_one_head_equals_the_whole_forward_in_float64():
    inputs = draw_variant("alibi", "2x4/2x9/7x4/3")
    blocks = {"block_query": 9, "block_kv": 7}
    whole = flash2_forward(Float64(), inputs, **blocks)
    for head in range(8):
        alone = one_head(Float64(), inputs, head, torch.arange(9))
        assert torch.equal(alone.out[0, 0], whole.out.flatten(0, 1)[head])
        assert torch.equal(alone.lse[0, 0], whole.lse.flatten(0, 1)[head])


def test_nan_value_makes_only_rows_that_attend_to_it_unknown():
    inputs = draw_variant("causal", "1x1x5x4", dtype="fp32")
    v = inputs.v.clone()
    v[0, 0, 2, 1], v[0, 0, 4, 0] = math.nan, math.inf
    exact = enclose_rows(Ball(), inputs.replace(v=v), all_rows(inputs.problem))
    known = np.vectorize(is_known, otypes=[bool])(exact.out.array)[0, 0]
    expected = np.ones((5, 4), dtype=bool)
    expected[2:, 1] = False
    assert (known == expected).all()
    assert exact.out.array[0, 0, 4, 0] == flint.arb.pos_inf()
    proven = proven_error(oracles.truth(inputs.replace(v=v)), exact, all_rows(inputs.problem))
    assert (proven.out[0].isinf().numpy() == ~expected).all()


def test_unknown_score_makes_only_its_row_unknown():
    problem = Problem(query=4, head_dim=2, mask=Spec.of("causal"), dtype="fp32")
    inputs = draw_inputs(problem)

    def evaluate(score_mod, bits):
        def unknown(scores, b, h, q_idx, kv_idx):
            return np.where((q_idx == 2) & (kv_idx == 1), flint.arb.nan(), scores)

        return unknown

    changed = dataclasses.replace(problem, score=Spec.of("temperature", temperature=2.0))
    exact = enclose_rows(
        Ball(evaluate=evaluate), inputs.replace(problem=changed), all_rows(problem)
    )
    known = np.vectorize(is_known, otypes=[bool])
    assert known(exact.out.array)[0, 0].all(axis=-1).tolist() == [True, True, False, True]
    assert known(exact.lse.array)[0, 0, :, 0].tolist() == [True, True, False, True]


def test_certificate_reveals_a_score_mod_that_computes_in_fp32(monkeypatch, allowance):
    """torch multiplies an fp32 table by an index in fp32, so the oracle exceeds its bounds."""
    slopes = torch.tensor([0.1], dtype=torch.float32)

    def rounds(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    def does_not(score, b, h, q_idx, kv_idx):
        return score + slopes[h].to(score.dtype) * (kv_idx - q_idx)

    inputs = draw_inputs(Problem(query=6, head_dim=4, dtype="fp32", score=Spec.of("alibi")))
    rows, within = all_rows(inputs.problem), []
    for mod in (rounds, does_not):
        monkeypatch.setattr(Problem, "score_mod", lambda self, device, mod=mod: mod)
        bound = allowance(inputs)
        exact = enclose_rows(Ball(evaluate=BALLS.score), inputs, rows)
        proven = proven_error(oracles.truth(inputs), exact, rows)
        most = 2.0**-53 * (bound.out + 1) * bound.spread.flatten(0, 1)
        within.append(bool((proven.out <= most).all()))
    assert within == [False, True]


@pytest.mark.parametrize("value", [0.1, -5e-324, 2.0**-1022, sys.float_info.max, 0.0])
def test_error_bound_is_rounded_up(value):
    third = flint.arb(1) / 3
    bound = error_bound(value, third)
    with flint.ctx.workprec(2000):
        assert flint.arb(bound) >= abs(flint.arb(value) - third)
    assert error_bound(value, flint.arb(value)) == 0
    assert error_bound(value, flint.arb.nan()) == math.inf
