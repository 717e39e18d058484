"""Each printed operation on fp32 is within its ``TRITON_ULP`` of float64."""

# ruff: noqa: N803  # Triton: constexprs in capitals

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from attncheck.mods.expression import OPERATIONS
from attncheck.mods.operation_errors import TRITON_ULP
from attncheck.mods.to_triton import to_triton
from attncheck.mods.trace import trace_score

COUNT = 2**15


@triton.jit
def pair_kernel(x, y, out, COUNT: tl.constexpr, SCORE: tl.constexpr, captured):
    """The second operand is read from a captured tensor, at kv_idx."""
    place = tl.arange(0, COUNT)
    value = SCORE(tl.load(x + place), 0, 0, 0, place, captured)
    tl.static_assert(value.dtype == tl.float32)
    tl.store(out + place, value)


def run_printed(mod, x):
    """The values of the printed function at the scores ``x`` (COUNT,)."""
    function = to_triton(trace_score(mod))
    out = torch.empty_like(x)
    pair_kernel[(1,)](x, x, out, COUNT, function.function, function.captured)
    return out


def numbers(low, high, *, exponents=(-126, 126)):
    """COUNT fp32 numbers of [low, high]: half evenly spread, half over the exponents."""
    draw = np.random.default_rng(0)
    even = draw.uniform(low, high, COUNT // 2)
    sign = np.where(draw.random(COUNT // 2) < 0.5, -1.0, 1.0)
    wide = sign * draw.uniform(1, 2, COUNT // 2) * 2.0 ** draw.integers(*exponents, COUNT // 2)
    every = np.concatenate([even, wide])
    return torch.from_numpy(np.clip(every, low, high).astype(np.float32))


def error_in_ulp(result, exact):
    """The distance of ``result`` from ``exact`` in fp32's units in the last place at ``exact``."""
    _, exponent = torch.frexp(exact)
    ulp = torch.ldexp(torch.ones_like(exact), exponent.clamp(min=-125) - 24)
    return ((result.double() - exact) / ulp).abs()


UNARY = {
    "tanh": (-20, 20),
    "sigmoid": (-87, 20),
    "exp": (-87, 88.5),
    "exp2": (-126, 127.5),
    "log": (2.0**-126, 1e38),
    "log2": (2.0**-126, 1e38),
    "sqrt": (0, 1e38),
    "rsqrt": (2.0**-126, 1e38),
    "sin": (-1000, 1000),
    "cos": (-1000, 1000),
    "floor": (-1e9, 1e9),
    "ceil": (-1e9, 1e9),
    "sign": (-1, 1),
    "abs": (-1e38, 1e38),
    "neg": (-1e38, 1e38),
}


@pytest.mark.parametrize("op", UNARY)
def test_unary_function_stays_within_its_ulp(op):
    function = getattr(torch, op)
    x = numbers(*UNARY[op])
    if op.startswith("log"):
        x[: COUNT // 4] = numbers(0.5, 2.0)[: COUNT // 4]  # where the result is near 0
    result = run_printed(lambda s, b, h, q, k: function(s), x)
    error = error_in_ulp(result, function(x.double()))
    assert (error <= TRITON_ULP.get(op, 0)).all(), error.max()


SECOND = numbers(-100, 100, exponents=(-10, 10)).flip(0).contiguous()
BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "floor_divide": torch.floor_divide,
    "remainder": torch.remainder,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
}


@pytest.mark.parametrize("op", BINARY)
def test_binary_operation_stays_within_its_ulp(op):
    function, x = BINARY[op], numbers(-1e6, 1e6, exponents=(-15, 20))
    result = run_printed(lambda s, b, h, q, k: function(s, SECOND[k]), x)
    exact = function(x.double(), SECOND.double())
    error = error_in_ulp(result, exact)
    assert (error <= TRITON_ULP.get(op, 0)).all(), error.max()


def test_every_declared_ulp_is_tested():
    assert set(TRITON_ULP) - {"number"} <= set(OPERATIONS)
    assert set(TRITON_ULP) <= set(UNARY) | set(BINARY) | {"number", "cast"}


@pytest.mark.parametrize("op", ["floor_divide", "remainder"])
def test_floor_division_and_remainder_have_bits_of_torch(op):
    """Quotients next to whole numbers, up to 2^40, of both signs, and at the ends."""
    function = BINARY[op]
    inf, nan = float("inf"), float("nan")
    near = SECOND * torch.arange(COUNT).remainder(31).sub(15)
    ends = torch.tensor([0.0, -0.0, inf, -inf, nan, 3.0, -3.0, 1e-30])
    x = torch.cat([near[: COUNT // 2], numbers(-1e9, 1e9)[: COUNT // 2]])
    x[: COUNT // 8] = torch.nextafter(x[: COUNT // 8], torch.tensor(inf))
    x[-64:] = ends.repeat(8)
    y = SECOND.clone()
    y[-64:] = torch.tensor([2.0, -2.0, inf, -inf, nan, 0.0, 1e10, -1e10]).repeat_interleave(8)
    result, expected = run_printed(lambda s, b, h, q, k: function(s, y[k]), x), function(x, y)
    assert ((result == expected) | (result.isnan() & expected.isnan())).all()


def test_remainder_by_rounded_quotient_exceeds_ulp():
    """What Triton's own % compiles to: a − trunc(a / b)·b, wrong from quotients of 2^24 on."""
    x, y = numbers(-1e9, 1e9), SECOND
    q = (x / y).trunc()
    one_step = (x.double() - q.double() * y.double()).float()
    exact = torch.fmod(x.double(), y.double())
    assert (error_in_ulp(one_step, exact) > TRITON_ULP["remainder"]).any()
    result = run_printed(lambda s, b, h, q, k: torch.fmod(s, y[k]), x)
    assert (error_in_ulp(result, exact) == 0).all()


def test_exp_by_rounded_product_exceeds_ulp():
    x = numbers(*UNARY["exp"])
    product = torch.exp2((x * 1.4426950408889634).double())
    assert (error_in_ulp(product.float(), torch.exp(x.double())) > TRITON_ULP["exp"]).any()


@pytest.mark.parametrize(
    ("op", "values"),
    [
        ("exp", {"inf": "inf", "-inf": "0.0", "nan": "nan", "89": "inf", "-104": "0.0"}),
        ("exp2", {"inf": "inf", "-inf": "0.0", "nan": "nan", "-140": str(2.0**-140), "128": "inf"}),
        ("sigmoid", {"inf": "1.0", "-inf": "0.0", "nan": "nan", "0": "0.5", "-1e30": "0.0"}),
        ("tanh", {"inf": "1.0", "-inf": "-1.0", "nan": "nan", "0": "0.0"}),
        ("log", {"inf": "inf", "0": "-inf", "-1": "nan", "nan": "nan", "1": "0.0"}),
        ("log2", {"inf": "inf", "0": "-inf", "-1": "nan", "8": "3.0"}),
        ("sqrt", {"inf": "inf", "0": "0.0", "-1": "nan", "nan": "nan"}),
        ("rsqrt", {"inf": "0.0", "0": "inf", "-1": "nan", "nan": "nan"}),
        ("sin", {"0": "0.0", "inf": "nan", "nan": "nan"}),
        ("cos", {"0": "1.0", "inf": "nan", "nan": "nan"}),
        ("sign", {"inf": "1.0", "-inf": "-1.0", "nan": "0.0", "0": "0.0"}),
        ("floor", {"inf": "inf", "-inf": "-inf", "nan": "nan", "-0.5": "-1.0"}),
        ("ceil", {"inf": "inf", "-inf": "-inf", "nan": "nan", "0.5": "1.0"}),
        ("trunc", {"inf": "inf", "-inf": "-inf", "nan": "nan", "-1.5": "-1.0", "1.5": "1.0"}),
        ("relu", {"inf": "inf", "-inf": "0.0", "nan": "nan", "-1": "0.0"}),
    ],
)
def test_function_at_special_values(op, values):
    x = torch.zeros(COUNT)
    x[: len(values)] = torch.tensor([float(text) for text in values])
    result = run_printed(lambda s, b, h, q, k: getattr(torch, op)(s), x)[: len(values)]
    assert [str(value) for value in result.tolist()] == list(values.values())
