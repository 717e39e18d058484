"""Traced derivatives of score mods match torch's autograd of the callable, at kinks too."""

import math
from pathlib import Path
from types import ModuleType

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from tests.messages import one_line
from tests.mods.sample_mods import LIBRARY_SCORES, any_score, replace_operation

from attncheck.core.balls import balls_of
from attncheck.core.draws import Draws
from attncheck.core.errors import TraceError
from attncheck.core.mod_spec import Dimensions, Spec
from attncheck.mods import torch_tracer
from attncheck.mods import trace as trace_module
from attncheck.mods.ball_algebra import to_ball
from attncheck.mods.expression import expression_from_json, expression_to_json
from attncheck.mods.library import build_score
from attncheck.mods.mpmath_algebra import to_mpmath
from attncheck.mods.running_error import RunningError
from attncheck.mods.to_triton import to_triton
from attncheck.mods.trace import trace_derivative, trace_score

DIMENSIONS = Dimensions(batch=2, heads=3, query=37, kv=50)
KINKS = (-2.5, -2.0, -1.0, -0.5, -0.0, 0.0, 0.3, 0.5, 1.0, 2.0, 2.5)
FAR = (-math.inf, -30.0, -1e-300, 1e-300, 30.0, math.inf, math.nan)
UNITS = 8  # roundings by which formula and autograd may differ, for every mod here


def points(values=KINKS + FAR):
    """``values`` and a hundred drawn scores, each at a few indices."""
    draws = Draws(0)
    scores = torch.cat(
        [torch.tensor(values).double(), torch.from_numpy(3.0 * draws.normal("score", (100,)))]
    )
    sizes = (DIMENSIONS.batch, DIMENSIONS.heads, DIMENSIONS.query, DIMENSIONS.kv)
    axes = [
        torch.from_numpy(draws.integers(f"axis{i}", (5, 1), size)) for i, size in enumerate(sizes)
    ]
    return [x.reshape(-1) for x in torch.broadcast_tensors(scores, *axes)]


def autograd(mod, score, *indices):
    variable = score.clone().requires_grad_()
    values = mod(variable, *indices).expand(score.shape)
    if not values.requires_grad:
        return torch.zeros_like(score)
    ones = torch.ones_like(values)
    return torch.autograd.grad(values, variable, ones, allow_unused=True, materialize_grads=True)[0]


def mismatches(expression, mod, at):
    """The scores at which ``expression`` and autograd differ by more than rounding."""
    expected = autograd(mod, *at)
    actual = expression.evaluate(*at).expand(expected.shape)
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    # 1 − tanh² of the callable: relative to 1, not to what is left of it.
    near = (actual - expected).abs() <= UNITS * 2.0**-53 * expected.abs().clamp(min=1.0)
    return at[0][~(same | near)]


@pytest.mark.parametrize("spec", LIBRARY_SCORES, ids=str)
def test_library_score_mod_matches_autograd(spec):
    mod = build_score(spec, DIMENSIONS)
    assert not mismatches(trace_derivative(mod), mod, points()).numel()


@given(spec=any_score)
@settings(max_examples=15, deadline=None)
def test_drawn_composition_matches_autograd(spec):
    mod = build_score(spec, DIMENSIONS)
    assert not mismatches(trace_derivative(mod), mod, points(KINKS)).numel()


PARAMETER = torch.nn.Parameter(torch.arange(4.0))
TABLE = torch.arange(40.0) / 7


class TwiceForThrice(torch.autograd.Function):
    """Its backward is custom and disagrees with its forward."""

    @staticmethod
    def forward(_context, score):
        return score * 2

    @staticmethod
    def backward(_context, gradient):
        return gradient * 3


def constant_inside(s, b, h, q, k):
    with torch.no_grad():
        largest = s * 2
    return s * largest


HANDWRITTEN = {
    "relu": lambda s, b, h, q, k: torch.relu(s),
    "abs": lambda s, b, h, q, k: s.abs(),
    "clamp": lambda s, b, h, q, k: s.clamp(-1, 1),
    "clamp below": lambda s, b, h, q, k: s.clamp(min=0.3),
    "clamp to an index": lambda s, b, h, q, k: torch.clamp(s, max=q.to(s.dtype)),
    "where": lambda s, b, h, q, k: torch.where(s > 0.5, s * 2, s / 3),
    "where, of indices": lambda s, b, h, q, k: torch.where(q >= k, s, s * 0.5),
    "minus infinity": lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf),
    "minus infinity, filled": lambda s, b, h, q, k: s.masked_fill(q < k, -math.inf),
    "tanh": lambda s, b, h, q, k: torch.tanh(s),
    "sigmoid": lambda s, b, h, q, k: torch.sigmoid(s),
    "exp": lambda s, b, h, q, k: torch.exp(s),
    "exp2": lambda s, b, h, q, k: torch.exp2(s),
    "log": lambda s, b, h, q, k: torch.log(s),
    "log2": lambda s, b, h, q, k: torch.log2(s),
    "sqrt": lambda s, b, h, q, k: torch.sqrt(s),
    "rsqrt": lambda s, b, h, q, k: torch.rsqrt(s),
    "sin": lambda s, b, h, q, k: torch.sin(s),
    "cos": lambda s, b, h, q, k: torch.cos(s),
    "square": lambda s, b, h, q, k: s**2,
    "cube": lambda s, b, h, q, k: s**3,
    "power 1": lambda s, b, h, q, k: s**1,
    "power -1": lambda s, b, h, q, k: s**-1,
    "power -2": lambda s, b, h, q, k: s**-2,
    "power 0.5": lambda s, b, h, q, k: s**0.5,
    "power -0.5": lambda s, b, h, q, k: s.abs() ** -0.5,  # torch's (−∞)^−0.5 is 0, rsqrt's NaN
    "maximum": lambda s, b, h, q, k: torch.maximum(s, s * 0.5 + q),
    "minimum": lambda s, b, h, q, k: torch.minimum(s, s * 0.5),
    "division": lambda s, b, h, q, k: 1 / s + s / (q + 1),
    "floor": lambda s, b, h, q, k: torch.floor(s) + s,
    "sign": lambda s, b, h, q, k: torch.sign(s) * s,
    "remainder": lambda s, b, h, q, k: s % 2.5,
    "fmod": lambda s, b, h, q, k: torch.fmod(s, 2.5),
    "frac": lambda s, b, h, q, k: torch.frac(s),
    "1 - s": lambda s, b, h, q, k: 1 - s,
    "not of the score": lambda s, b, h, q, k: q.to(s.dtype),
    "through fp32": lambda s, b, h, q, k: s.float().double() * 2,
    "not a number": lambda s, b, h, q, k: torch.where(torch.isnan(s), 0.0, s),
    "detached": lambda s, b, h, q, k: s * s.detach(),
    "without a gradient": constant_inside,
    "own backward": lambda s, b, h, q, k: TwiceForThrice.apply(s),
    "a parameter": lambda s, b, h, q, k: s * PARAMETER[h],
    "a parameter alone": lambda s, b, h, q, k: PARAMETER[h].double(),
    "table": lambda s, b, h, q, k: s * TABLE[q] + TABLE[h],
    "value of a table": lambda s, b, h, q, k: s * TABLE.max().item(),
    "shapes": lambda s, b, h, q, k: s.unsqueeze(-1).mul(2).squeeze(-1),
}


@pytest.mark.parametrize("mod", HANDWRITTEN.values(), ids=HANDWRITTEN)
def test_handwritten_score_mod_matches_autograd(mod):
    assert not mismatches(trace_derivative(mod), mod, points()).numel()


def test_derivative_prints_as_readable_formula():
    relu, softcap = HANDWRITTEN["relu"], build_score(Spec.of("softcap", cap=30.0), DIMENSIONS)
    assert str(trace_derivative(relu)) == "where(maximum(score, 0) <= 0, 0.0, 1.0)"
    capped = "30.0 * (1 - (tanh(score / 30.0) * tanh(score / 30.0)))"
    assert str(trace_derivative(softcap)) == f"({capped}) / 30.0"
    assert str(trace_derivative(build_score(Spec.of("alibi"), DIMENSIONS))) == "1.0"
    assert trace_derivative(relu).structure.inputs == ("score", "b", "h", "q_idx", "kv_idx")


@pytest.mark.parametrize(
    ("name", "op", "other"),
    [("relu", "le", "lt"), ("clamp", "ge", "gt"), ("maximum", "gt", "ge"), ("cos", "sin", "cos")],
)
def test_wrong_operation_is_detected(name, op, other):
    mod = HANDWRITTEN[name]
    assert mismatches(replace_operation(trace_derivative(mod), op, other), mod, points()).numel()


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("power -2", "torch.reciprocal(x * x * x)", "torch.reciprocal(x * x)"),
        ("power 1", "0: torch.ones_like", "0: torch.zeros_like"),
        ("maximum", "values[1].to(values[0]", "values[0].to(values[0]"),
        ("detached", "return self.env[other]", "return super().run_node(n) * 2"),
    ],
)
def test_fault_planted_in_tracer_is_detected(name, right, wrong, monkeypatch):
    source = Path(torch_tracer.__file__).read_text(encoding="utf-8")
    assert source.count(right) == 1, right
    faulty = ModuleType(torch_tracer.__name__)
    faulty.__file__ = torch_tracer.__file__
    exec(compile(source.replace(right, wrong), "planted", "exec"), faulty.__dict__)  # noqa: S102  # our own source
    monkeypatch.setattr(trace_module, "VocabularyInterpreter", faulty.VocabularyInterpreter)
    mod = HANDWRITTEN[name]
    assert mismatches(trace_derivative(mod), mod, points()).numel()


# Not exp2 and log2: the ln 2 of their derivatives is a float64 number.
SMOOTH = ["tanh", "sigmoid", "exp", "sin", "cos", "square", "cube", "power -2", "division"]


@pytest.mark.parametrize("name", SMOOTH)
def test_derivative_matches_difference_quotient_in_50_digits(name):
    """The quotient is of the score mod's own expression, without any autograd."""
    mod, context = HANDWRITTEN[name], mpmath.MPContext()
    context.dps = 50
    function, slope = (to_mpmath(e, context) for e in (trace_score(mod), trace_derivative(mod)))
    indices = [np.full((), i) for i in (1, 2, 3, 4)]
    step = context.mpf(10) ** -15
    for at in (-1.75, 0.375, 2.5):
        here = context.mpf(at)
        ends = [
            function(np.array(here + sign * step, dtype=object), *indices).item()
            for sign in (1, -1)
        ]
        quotient = (ends[0] - ends[1]) / (2 * step)
        derivative = slope(np.array(here, dtype=object), *indices).item()
        # Off by h²/6 of the third derivative, and by 2·10^-50 / 2h.
        assert abs(derivative - quotient) <= context.mpf(10) ** -27 * max(1, abs(quotient))


@pytest.mark.parametrize("mod", HANDWRITTEN.values(), ids=HANDWRITTEN)
def test_derivative_works_in_triton_json_and_error_analysis(mod):
    expression = trace_derivative(mod)
    assert to_triton(expression).function is not None
    read_back = expression_from_json(expression_to_json(expression))
    assert read_back.structure == expression.structure
    score, *indices = points(KINKS)
    error = RunningError(expression).at(
        score[None, :, None],
        torch.zeros_like(score)[None, :, None],
        *(i[None, :, None] for i in indices),
    )
    assert error.radius.shape == (1, len(score), 1)


def test_ball_midpoint_is_close_to_mpmath():
    pytest.importorskip("flint")
    for name in SMOOTH:
        mod = HANDWRITTEN[name]
        expression = trace_derivative(mod)
        score, *indices = points((0.3, -1.75))
        balls = to_ball(expression, 128)(balls_of(score.numpy()), *(i.numpy() for i in indices))
        context = mpmath.MPContext()
        context.dps = 60
        many = to_mpmath(expression, context)(score.numpy(), *(i.numpy() for i in indices))
        pairs = zip(
            np.broadcast_to(balls, score.shape), np.broadcast_to(many, score.shape), strict=True
        )
        for ball, number in pairs:
            assert abs(float(ball.mid()) - float(number)) <= abs(float(number)) * UNITS * 2.0**-53


REFUSED = {
    "// of the score": (lambda s, b, h, q, k: s // 2.5, "floor_divide is not implemented"),
    "% by the score": (lambda s, b, h, q, k: 2.5 % s, "remainder is not implemented"),
    "silu": (lambda s, b, h, q, k: torch.nn.functional.silu(s), "aten.silu is not supported"),
    "decides": (lambda s, b, h, q, k: s if s > 0 else -s, "decides on a tensor's value"),
}


@pytest.mark.parametrize(("mod", "reason"), REFUSED.values(), ids=REFUSED)
def test_unsupported_derivative_is_refused_with_reason(mod, reason):
    with one_line(TraceError, "'<lambda>'", match=reason):
        trace_derivative(mod)
