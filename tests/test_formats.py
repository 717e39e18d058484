"""Number formats: the table against torch's, and rounding against torch's casts and Fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.messages import one_line

from attncheck.core.draws import Draws
from attncheck.core.errors import UnknownName
from attncheck.core.formats import DTYPES, FORMATS, Format, dtype_named, fp32, round_to

CAST = ["fp16", "bf16", "e4m3", "e5m2"]  # torch casts float32 to these in one rounding
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(BITS[values.element_size()])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether all bits agree, also the sign of zero; any NaN equals any other."""
    number = ~torch.isnan(a.double())
    agree = torch.isnan(a.double()) == torch.isnan(b.double())
    return bool(agree.all() and (bits(a)[number] == bits(b)[number]).all())


def random_float32(count: int = 1 << 18) -> torch.Tensor:
    """Return random bit patterns: every exponent, subnormals, infinities and NaNs."""
    pattern = Draws(0).integers("patterns", (count,), 2**32 - 1).astype(np.uint32)
    specials = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], np.float32)
    return torch.from_numpy(np.concatenate([pattern.view(np.float32), specials]))


def ties_of(fmt: Format) -> torch.Tensor:
    """Return float32 numbers around the ties of ``fmt``: all quarters of a step in its range."""
    step = torch.arange(-(2**14), 2**14) / 4.0
    exponents = torch.arange(max(fmt.min_exponent - fmt.significand - 3, -140), 12)
    numbers = step[:, None].double() * 2.0 ** exponents.double()
    return numbers.flatten().float()


def rounded(x: float, fmt: Format) -> float:
    return float(round_to(torch.tensor([x], dtype=torch.float64), fmt)[0])


def nearest(x: float, fmt: Format) -> float:
    """Round ``x`` to nearest, ties to even, in rational arithmetic."""
    exponent = max(math.frexp(x)[1] - fmt.significand, fmt.min_exponent - fmt.significand + 1)
    spacing = Fraction(2) ** exponent
    number = round(Fraction(x) / spacing) * spacing  # Python rounds half to even
    if abs(number) > Fraction(fmt.max):
        return math.copysign(fmt.max if fmt.saturates else math.inf, x)
    return math.copysign(float(number), x)


def agrees_with_cast(rounding, fmt: Format, values: torch.Tensor) -> bool:
    dtype = fmt.torch_dtype
    return same(rounding(values.double(), fmt).to(dtype), values.to(dtype))


def truncated(values: torch.Tensor, fmt: Format) -> torch.Tensor:
    up = round_to(values, fmt)
    return torch.where(up.abs() > values.abs(), 2 * values - up, up)


def cast_range(values: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Keep values that torch casts as a GPU does: beyond ``max`` a GPU's fp8 saturates."""
    return values[values.abs() <= fmt.max] if fmt.saturates else values


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"tf32"}))  # torch has no storage for it
def test_format_table_agrees_with_torch(name):
    fmt = FORMATS[name]
    info = torch.finfo(fmt.torch_dtype)
    assert fmt.max == info.max
    assert 2.0**fmt.min_exponent == info.tiny
    assert 2 * fmt.unit_roundoff == info.eps
    smallest = bits(torch.zeros(1, dtype=fmt.torch_dtype)) + 1
    assert fmt.subnormal_spacing == float(smallest.view(fmt.torch_dtype).double())


@pytest.mark.parametrize("name", CAST)
@pytest.mark.parametrize("numbers", ["patterns", "ties"])
def test_round_to_has_the_bits_of_torchs_cast(name, numbers):
    fmt = FORMATS[name]
    values = random_float32() if numbers == "patterns" else ties_of(fmt)
    assert agrees_with_cast(round_to, fmt, cast_range(values, fmt))


@pytest.mark.parametrize("name", CAST)
def test_comparison_with_the_cast_detects_truncation(name):
    fmt = FORMATS[name]
    assert not agrees_with_cast(truncated, fmt, cast_range(ties_of(fmt), fmt))


@pytest.mark.parametrize("name", CAST)
def test_rounding_keeps_every_number_of_the_format(name):
    fmt = FORMATS[name]
    width = 8 * torch.empty(0, dtype=fmt.torch_dtype).element_size()
    stored = torch.arange(2**width).to(BITS[width // 8]).view(fmt.torch_dtype)
    stored = stored[torch.isfinite(stored.double())]
    assert same(round_to(stored.double(), fmt).to(fmt.torch_dtype), stored)


def test_round_to_fp32_is_torchs_cast_from_float64():
    high, low = (Draws(1).integers(s, (1 << 18,), 2**32 - 1) for s in ("high", "low"))
    wild = torch.from_numpy((high << 32 | low).view(np.float64))
    near = random_float32(1 << 17).double() * torch.from_numpy(
        1 + 2.0**-24 * Draws(1).integers("quarters", ((1 << 17) + 5,), 9) / 4
    )
    for values in (wild, near):
        assert same(round_to(values, FORMATS["fp32"]).float(), values.float())


def test_round_to_tf32_rounds_the_upper_19_bits_of_fp32():
    values = torch.cat([random_float32(), ties_of(FORMATS["tf32"])])
    values = values[torch.isfinite(values)]
    pattern = bits(values).to(torch.int64) & 0xFFFFFFFF
    upper = (pattern + 0xFFF + (pattern >> 13 & 1)) & ~0x1FFF
    expected = torch.from_numpy(upper.numpy().astype(np.uint32).view(np.float32))
    assert same(round_to(values.double(), FORMATS["tf32"]).float(), expected)


@given(x=st.floats(allow_nan=False, allow_infinity=False), name=st.sampled_from(list(FORMATS)))
@example(x=2.0**-149 * 1.5, name="fp32")
@example(x=-(2.0**-150), name="fp32")
@example(x=math.nextafter(2.0**-134, 1), name="bf16")
@example(x=5e-324, name="bf16")
@example(x=1.7976931348623157e308, name="fp16")
@example(x=1e300, name="e4m3")
def test_round_to_is_the_nearest_number_in_rational_arithmetic(x, name):
    number, expected = rounded(x, FORMATS[name]), nearest(x, FORMATS[name])
    assert (number, math.copysign(1, number)) == (expected, math.copysign(1, expected))


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"fp64"}))  # inputs are float64 already
def test_round_to_handles_ties_subnormals_and_the_edge_of_the_range(name):
    fmt = FORMATS[name]
    u, smallest = fmt.unit_roundoff, fmt.subnormal_spacing
    assert rounded(1 + u, fmt) == 1
    assert rounded(1 + 3 * u, fmt) == 1 + 4 * u
    assert rounded(1 + u + 2.0**-52, fmt) == 1 + 2 * u
    assert rounded(smallest / 2, fmt) == 0
    assert rounded(smallest * (0.5 + 2.0**-50), fmt) == smallest
    assert rounded(smallest * 1.5, fmt) == 2 * smallest
    beyond = fmt.max if fmt.saturates else math.inf
    step = 2.0 ** (math.frexp(fmt.max)[1] - fmt.significand)
    assert rounded(math.nextafter(fmt.max + step / 2, 0), fmt) == fmt.max
    assert rounded(-(fmt.max + step * 0.75), fmt) == -beyond
    assert rounded(math.inf, fmt) == beyond
    assert math.isnan(rounded(math.nan, fmt))


def test_round_to_rounds_once_where_a_cast_through_float32_rounds_twice():
    x = 1 + 2.0**-8 + 2.0**-30  # just above a tie of bf16; float32 rounds it onto the tie
    assert rounded(x, FORMATS["bf16"]) == 1 + 2.0**-7
    assert float(torch.tensor(x, dtype=torch.float64).float().to(torch.bfloat16)) == 1


def test_round_to_does_not_change_its_argument():
    for fmt in FORMATS.values():
        values = torch.tensor([1 / 3, -2 / 3], dtype=torch.float64)
        round_to(values, fmt).zero_()
        assert values.tolist() == [1 / 3, -2 / 3]


@given(st.floats(allow_nan=False))
def test_fp32_is_numpys_cast(x):
    with np.errstate(all="ignore"):
        assert fp32(x) == float(np.float64(x).astype(np.float32))


def test_measured_and_scaled_dtypes():
    assert dtype_named("tf32").storage.name == "fp32"
    assert dtype_named("tf32").products.name == "tf32"
    measured = [d.name for d in DTYPES.values() if d.measured]
    assert measured == ["fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2"]
    assert set(DTYPES) - set(measured) == {"fp64"}
    assert [d.name for d in DTYPES.values() if d.scaled] == ["e4m3", "e5m2"]


def test_formats_of_storage_products_weights_and_output_of_each_dtype():
    places = {
        name: (d.storage.name, d.products.name, d.weights.name, d.output.name)
        for name, d in DTYPES.items()
    }
    assert places == {
        "fp32": ("fp32", "fp32", "fp32", "fp32"),
        "tf32": ("fp32", "tf32", "tf32", "fp32"),
        "fp16": ("fp16", "fp16", "fp16", "fp16"),
        "bf16": ("bf16", "bf16", "bf16", "bf16"),
        "e4m3": ("e4m3", "e4m3", "e4m3", "bf16"),
        "e5m2": ("e5m2", "e5m2", "e5m2", "bf16"),
        "fp64": ("fp64", "fp64", "fp64", "fp64"),
    }


def test_fp8_weights_are_scaled_by_the_largest_power_of_two_in_range():
    scales = {name: d.weights_scale for name, d in DTYPES.items() if d.weights_scale != 1}
    assert scales == {"e4m3": 256.0, "e5m2": 32768.0}
    for name, scale in scales.items():
        weights = DTYPES[name].weights
        assert math.frexp(scale)[0] == 0.5
        assert scale <= weights.max < 2 * scale


@pytest.mark.parametrize("name", ["fp12", "", None, []])
def test_unknown_dtype_lists_the_valid_ones(name):
    with one_line(
        UnknownName,
        whole=f"dtype {name!r} is not known: choose from bf16, e4m3, e5m2, fp16, fp32, fp64, tf32.",
    ):
        dtype_named(name)
