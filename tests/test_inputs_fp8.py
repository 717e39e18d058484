"""Inputs in fp8: every stored number by rational arithmetic, and the descales it is stored by."""

import math
from fractions import Fraction

import pytest
import torch
from tests.messages import one_line

from attncheck.core.errors import ProblemError
from attncheck.core.formats import FORMATS, MEASURED_DTYPES, Format
from attncheck.inputs import input_tensors
from attncheck.inputs.distributions import DISTRIBUTIONS
from attncheck.inputs.input_tensors import Descale, Inputs
from attncheck.inputs.problem import Problem

FP8 = ["e4m3", "e5m2"]
SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 5, "kv": 7, "head_dim": 6, "value_dim": 3}


def fp8(dtype: str = "e4m3", **changes: object) -> Problem:
    return Problem(**SIZES | {"dtype": dtype} | changes)


def descale_of(drawn: Inputs, name: str) -> torch.Tensor:
    """``(batch, heads of that tensor)``: each head's own."""
    tensor, scale = getattr(drawn, name), getattr(drawn.descale, name)
    rows = []
    for b in range(tensor.shape[0]):
        group = tensor.shape[1] // scale.shape[1]
        rows.append([float(scale[b, h // group]) for h in range(tensor.shape[1])])
    return torch.tensor(rows, dtype=torch.float64)


def nearest(x: Fraction, fmt: Format) -> Fraction:
    """``x`` to nearest, ties to even, clamped to the largest; in rational arithmetic alone."""
    exponent = fmt.min_exponent
    while abs(x) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    spacing = Fraction(2) ** (exponent - fmt.significand + 1)
    number = round(x / spacing) * spacing  # Python rounds half to even
    return max(-Fraction(fmt.max), min(Fraction(fmt.max), number))


def elements(drawn: Inputs, name: str):
    """(index, stored, its head's descale) of every element, as Fractions."""
    stored, scale = getattr(drawn, name).double(), descale_of(drawn, name)
    for index in torch.cartesian_prod(*map(torch.arange, stored.shape)).tolist():
        number = Fraction(float(stored[tuple(index)]))
        yield tuple(index), number, Fraction(float(scale[index[0], index[1]]))


def is_rounded_quotient(drawn: Inputs, exact: Inputs) -> bool:
    fmt = drawn.problem.formats.storage
    return all(
        stored == nearest(Fraction(float(getattr(exact, name)[index])) / descale, fmt)
        for name in ("q", "k", "v")
        for index, stored, descale in elements(drawn, name)
    )


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_each_stored_number_is_the_rounded_quotient(dtype, distribution):
    problem = fp8(dtype, distribution=distribution, seed=4)
    assert is_rounded_quotient(
        input_tensors.draw_inputs(problem), input_tensors.unrounded_inputs(problem)
    )


def test_the_quotient_test_notices_a_number_rounded_twice():
    problem = fp8(kv=200, head_dim=64)
    drawn, exact = input_tensors.draw_inputs(problem), input_tensors.unrounded_inputs(problem)
    quotient = exact.k / descale_of(drawn, "k")[..., None, None]
    twice = drawn.replace(k=quotient.half().to(drawn.k.dtype))
    assert not torch.equal(twice.k.view(torch.uint8), drawn.k.view(torch.uint8))
    assert not is_rounded_quotient(twice, exact)


def test_a_quotient_just_above_a_tie_is_not_rounded_to_fp32_first():
    problem = fp8()
    exact = input_tensors.unrounded_inputs(problem)
    # Descale 1, and 17 is half way between the neighbours 16 and 18.
    q = torch.full_like(exact.q, FORMATS["e4m3"].max)
    q[0, 0, 0, :2] = torch.tensor([17.0, 17.0 + 2.0**-30], dtype=torch.float64)
    stored = input_tensors.round_inputs(exact.replace(q=q), problem)
    assert torch.equal(stored.descale.q, torch.ones(2, 2))
    assert stored.q[0, 0, 0, :2].double().tolist() == [16.0, 18.0]


@pytest.mark.parametrize("dtype", FP8)
def test_promoted_is_the_stored_number_times_its_descale_exactly(dtype):
    drawn = input_tensors.draw_inputs(fp8(dtype, distribution="outliers"))
    for name, promoted in zip(("q", "k", "v"), drawn.promoted(), strict=True):
        assert promoted.dtype == torch.float64
        for index, stored, descale in elements(drawn, name):
            assert Fraction(float(promoted[index])) == stored * descale


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("distribution", ["normal", "outliers", "sink", "uniform"])
def test_the_largest_of_every_key_head_reaches_the_formats_largest(dtype, distribution):
    problem = fp8(dtype, distribution=distribution)
    drawn, exact = input_tensors.draw_inputs(problem), input_tensors.unrounded_inputs(problem)
    for name in ("q", "k", "v"):
        stored, original = (getattr(i, name).double() for i in (drawn, exact))
        by_key_head = stored.reshape(2, 2, -1).abs().amax(-1)
        assert torch.equal(by_key_head, torch.full((2, 2), FORMATS[dtype].max).double())
        # One descale a key head: fp32(largest / format's largest), by definition.
        largest = original.reshape(2, 2, -1).abs().amax(-1)
        assert torch.equal(getattr(drawn.descale, name), (largest / FORMATS[dtype].max).float())


def test_query_heads_of_a_group_share_the_key_heads_descale():
    """The larger query head decides for both; the other group is not touched."""
    problem = fp8()
    exact = input_tensors.unrounded_inputs(problem)
    loud = exact.q.clone()
    loud[0, 1] *= 64
    before, after = (
        input_tensors.round_inputs(exact.replace(q=q), problem) for q in (exact.q, loud)
    )
    changed = before.descale.q != after.descale.q
    assert changed.tolist() == [[True, False], [False, False]]
    assert torch.equal(after.q[:, 2:].double(), before.q[:, 2:].double())
    assert after.q[0, 0].double().abs().max() < FORMATS["e4m3"].max / 8
    for same in ("k", "v"):
        assert torch.equal(getattr(before.descale, same), getattr(after.descale, same))


@pytest.mark.parametrize("dtype", FP8)
def test_a_tensor_of_zeros_has_descale_one(dtype):
    drawn = input_tensors.draw_inputs(fp8(dtype, distribution="zero_q"))
    assert torch.equal(drawn.descale.q, torch.ones(2, 2))
    assert not drawn.q.double().any()
    assert not drawn.promoted()[0].any()


def test_one_head_of_zeros_among_others():
    problem = fp8()
    exact = input_tensors.unrounded_inputs(problem)
    k = exact.k.clone()
    k[1, 0] = 0
    drawn = input_tensors.round_inputs(exact.replace(k=k), problem)
    assert (drawn.descale.k == 1).tolist() == [[False, False], [True, False]]


@pytest.mark.parametrize("dtype", MEASURED_DTYPES)
@pytest.mark.parametrize("distribution", ["normal", "outliers", "zero_q"])
def test_rounding_the_originals_is_drawing(dtype, distribution):
    problem = fp8(dtype, distribution=distribution, seed=9)
    once, twice = (
        input_tensors.draw_inputs(problem),
        input_tensors.round_inputs(input_tensors.unrounded_inputs(problem), problem),
    )
    assert once.tensors().keys() == twice.tensors().keys()
    for name, tensor in once.tensors().items():
        assert tensor.dtype == twice.tensors()[name].dtype
        assert torch.equal(tensor.double(), twice.tensors()[name].double())


def test_originals_are_the_same_whatever_the_dtype():
    wide = [
        input_tensors.unrounded_inputs(fp8(dtype, seed=3))
        for dtype in ("e5m2", "bf16", "fp32", "fp64")
    ]
    for other in wide:
        assert other.problem == fp8("fp64", seed=3)
        assert other.descale is None
        assert torch.equal(other.q, wide[0].q)
    assert torch.equal(input_tensors.draw_inputs(fp8("fp64", seed=3)).q, wide[0].q)
    assert torch.equal(wide[0].promoted()[0], wide[0].q)


def test_golden_bits():
    drawn = input_tensors.draw_inputs(fp8("e4m3", seed=2026))
    assert [x.hex() for x in drawn.descale.k[0].tolist()] == [
        "0x1.1ef6040000000p-8",
        "0x1.a80c2a0000000p-8",
    ]
    assert drawn.k[0, 1, 2].view(torch.uint8).tolist() == [76, 121, 249, 119, 121, 121]


def test_tensors_names_everything():
    drawn = input_tensors.draw_inputs(fp8())
    names = ["q", "k", "v", "q_descale", "k_descale", "v_descale"]
    assert list(drawn.tensors()) == names
    assert drawn.tensors()["k_descale"] is drawn.descale.k
    assert list(input_tensors.draw_inputs(fp8("bf16")).tensors()) == names[:3]


def test_clone_is_memory_of_its_own_and_to_takes_everything_along():
    drawn = input_tensors.draw_inputs(fp8())
    copy = drawn.clone()
    for name, tensor in drawn.tensors().items():
        other = copy.tensors()[name]
        assert other.data_ptr() != tensor.data_ptr()
        assert torch.equal(other.double(), tensor.double())
    copy.descale.v.zero_()
    assert drawn.descale.v.all()
    there = drawn.to("meta")
    assert {tensor.device.type for tensor in there.tensors().values()} == {"meta"}
    assert there.device.type == "meta"
    assert (there.problem, drawn.device.type) == (drawn.problem, "cpu")


def test_replace_keeps_or_takes_a_descale():
    drawn = input_tensors.draw_inputs(fp8())
    assert drawn.replace(v=drawn.v.clone()).descale is drawn.descale
    ones = Descale(**{name: torch.ones(2, 2) for name in ("q", "k", "v")})
    assert drawn.replace(descale=ones).descale is ones


def with_descale(**changes: torch.Tensor) -> Inputs:
    drawn = input_tensors.draw_inputs(fp8())
    named = {name: getattr(drawn.descale, name) for name in ("q", "k", "v")}
    return drawn.replace(descale=Descale(**named | changes))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Inputs(problem=fp8(), **qkv(input_tensors.draw_inputs(fp8()))),
            "attention in e4m3 needs its descale.",
        ),
        (
            lambda: input_tensors.draw_inputs(fp8("fp16")).replace(
                descale=input_tensors.draw_inputs(fp8()).descale
            ),
            "attention in fp16 has no descale.",
        ),
        (
            lambda: input_tensors.draw_inputs(fp8()).replace(x=torch.zeros(2, 4, 5, 7)),
            "attention in e4m3 has no x.",
        ),
        (lambda: with_descale(k=torch.ones(2, 4)), "k_descale.shape=(2, 4), but should be (2, 2)."),
        (lambda: with_descale(q=torch.ones(2, 4)), "q_descale.shape=(2, 4), but should be (2, 2)."),
        (
            lambda: with_descale(v=torch.ones(2, 2, dtype=torch.float64)),
            "v_descale.dtype=torch.float64, but should be torch.float32.",
        ),
        (
            lambda: input_tensors.draw_inputs(fp8()).replace(
                q=input_tensors.draw_inputs(fp8("e5m2")).q
            ),
            "q.dtype=torch.float8_e5m2, but should be torch.float8_e4m3fn.",
        ),
    ],
)
def test_what_does_not_fit_the_problem_is_refused(make, message):
    with one_line(ProblemError, whole=message):
        make()


def qkv(drawn: Inputs) -> dict[str, torch.Tensor]:
    return {name: getattr(drawn, name) for name in ("q", "k", "v")}


def test_tiny_numbers_have_the_smallest_normal_descale():
    """A GPU may take a subnormal number for 0."""
    exact = input_tensors.unrounded_inputs(Problem(query=2, head_dim=4, dtype="e4m3"))
    tiny = exact.replace(q=torch.full_like(exact.q, 2.0**-140))
    fp8 = input_tensors.round_inputs(tiny, Problem(query=2, head_dim=4, dtype="e4m3"))
    assert fp8.descale.q.tolist() == [[2.0**-126]]
    assert (fp8.q.double() == 0).all()  # 2^-14, half of e4m3's smallest number 2^-9, and less


@pytest.mark.parametrize("number", [1e60, math.inf, math.nan])
def test_numbers_beyond_every_descale_are_refused(number):
    exact = input_tensors.unrounded_inputs(Problem(query=2, head_dim=4, dtype="e4m3"))
    exact.k[0, 0, 1, 2] = number
    with pytest.raises(ProblemError, match="the inputs are too large for e4m3: a descale is an"):
        input_tensors.round_inputs(exact, Problem(query=2, head_dim=4, dtype="e4m3"))
