"""Inputs in fp8: stored numbers, by rational arithmetic, and descales."""

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
    """Return the descale of each head, ``(batch, heads of that tensor)``."""
    tensor, scale = getattr(drawn, name), getattr(drawn.descale, name)
    rows = []
    for b in range(tensor.shape[0]):
        group = tensor.shape[1] // scale.shape[1]
        rows.append([float(scale[b, h // group]) for h in range(tensor.shape[1])])
    return torch.tensor(rows, dtype=torch.float64)


def nearest(x: Fraction, fmt: Format) -> Fraction:
    """Round ``x`` to nearest, ties to even, clamped to the largest; in rational arithmetic."""
    exponent = fmt.min_exponent
    while abs(x) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    spacing = Fraction(2) ** (exponent - fmt.significand + 1)
    number = round(x / spacing) * spacing  # Python rounds half to even
    return max(-Fraction(fmt.max), min(Fraction(fmt.max), number))


def elements(drawn: Inputs, name: str):
    """Yield the index, stored number and head's descale of every element, as Fractions."""
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
def test_stored_numbers_are_quotients_by_the_descale_rounded_once(dtype, distribution):
    problem = fp8(dtype, distribution=distribution, seed=4)
    assert is_rounded_quotient(
        input_tensors.draw_inputs(problem), input_tensors.unrounded_inputs(problem)
    )


def test_quotient_check_detects_numbers_rounded_twice():
    problem = fp8(kv=200, head_dim=64)
    drawn, exact = input_tensors.draw_inputs(problem), input_tensors.unrounded_inputs(problem)
    quotient = exact.k / descale_of(drawn, "k")[..., None, None]
    twice = drawn.replace(k=quotient.half().to(drawn.k.dtype))
    assert not torch.equal(twice.k.view(torch.uint8), drawn.k.view(torch.uint8))
    assert not is_rounded_quotient(twice, exact)


def test_quotient_just_above_a_tie_is_not_rounded_to_fp32_first():
    problem = fp8()
    exact = input_tensors.unrounded_inputs(problem)
    # The descale is 1, and 17 is half way between the neighbours 16 and 18.
    q = torch.full_like(exact.q, FORMATS["e4m3"].max)
    q[0, 0, 0, :2] = torch.tensor([17.0, 17.0 + 2.0**-30], dtype=torch.float64)
    stored = input_tensors.round_inputs(exact.replace(q=q), problem)
    assert torch.equal(stored.descale.q, torch.ones(2, 2))
    assert stored.q[0, 0, 0, :2].double().tolist() == [16.0, 18.0]


@pytest.mark.parametrize("dtype", FP8)
def test_promotion_multiplies_by_the_descale_exactly(dtype):
    drawn = input_tensors.draw_inputs(fp8(dtype, distribution="outliers"))
    for name, promoted in zip(("q", "k", "v"), drawn.promoted(), strict=True):
        assert promoted.dtype == torch.float64
        for index, stored, descale in elements(drawn, name):
            assert Fraction(float(promoted[index])) == stored * descale


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("distribution", ["normal", "outliers", "sink", "uniform"])
def test_largest_number_of_each_key_head_is_stored_as_the_formats_largest(dtype, distribution):
    problem = fp8(dtype, distribution=distribution)
    drawn, exact = input_tensors.draw_inputs(problem), input_tensors.unrounded_inputs(problem)
    for name in ("q", "k", "v"):
        stored, original = (getattr(i, name).double() for i in (drawn, exact))
        by_key_head = stored.reshape(2, 2, -1).abs().amax(-1)
        assert torch.equal(by_key_head, torch.full((2, 2), FORMATS[dtype].max).double())
        # By definition, a key head's descale is fp32(its largest / format's largest).
        largest = original.reshape(2, 2, -1).abs().amax(-1)
        assert torch.equal(getattr(drawn.descale, name), (largest / FORMATS[dtype].max).float())


def test_query_heads_of_a_group_share_a_descale():
    """The larger query head decides the descale of both, and that of no other group."""
    problem = fp8()
    exact = input_tensors.unrounded_inputs(problem)
    enlarged = exact.q.clone()
    enlarged[0, 1] *= 64
    before, after = (
        input_tensors.round_inputs(exact.replace(q=q), problem) for q in (exact.q, enlarged)
    )
    changed = before.descale.q != after.descale.q
    assert changed.tolist() == [[True, False], [False, False]]
    assert torch.equal(after.q[:, 2:].double(), before.q[:, 2:].double())
    assert after.q[0, 0].double().abs().max() < FORMATS["e4m3"].max / 8
    for name in ("k", "v"):
        assert torch.equal(getattr(before.descale, name), getattr(after.descale, name))


@pytest.mark.parametrize("dtype", FP8)
def test_tensor_of_zeros_has_descale_1(dtype):
    drawn = input_tensors.draw_inputs(fp8(dtype, distribution="zero_q"))
    assert torch.equal(drawn.descale.q, torch.ones(2, 2))
    assert not drawn.q.double().any()
    assert not drawn.promoted()[0].any()


def test_head_of_zeros_among_others_has_descale_1():
    problem = fp8()
    exact = input_tensors.unrounded_inputs(problem)
    k = exact.k.clone()
    k[1, 0] = 0
    drawn = input_tensors.round_inputs(exact.replace(k=k), problem)
    assert (drawn.descale.k == 1).tolist() == [[False, False], [True, False]]


@pytest.mark.parametrize("dtype", MEASURED_DTYPES)
@pytest.mark.parametrize("distribution", ["normal", "outliers", "zero_q"])
def test_rounding_unrounded_inputs_gives_the_drawn_inputs(dtype, distribution):
    problem = fp8(dtype, distribution=distribution, seed=9)
    drawn = input_tensors.draw_inputs(problem).tensors()
    rounded = input_tensors.round_inputs(input_tensors.unrounded_inputs(problem), problem).tensors()
    assert drawn.keys() == rounded.keys()
    for name, tensor in drawn.items():
        assert tensor.dtype == rounded[name].dtype
        assert torch.equal(tensor.double(), rounded[name].double())


def test_unrounded_inputs_are_the_same_in_every_dtype():
    unrounded = [
        input_tensors.unrounded_inputs(fp8(dtype, seed=3))
        for dtype in ("e5m2", "bf16", "fp32", "fp64")
    ]
    first = unrounded[0]
    for inputs in unrounded:
        assert inputs.problem == fp8("fp64", seed=3)
        assert inputs.descale is None
        assert torch.equal(inputs.q, first.q)
    assert torch.equal(input_tensors.draw_inputs(fp8("fp64", seed=3)).q, first.q)
    assert torch.equal(first.promoted()[0], first.q)


def test_fp8_inputs_have_the_golden_bits():
    drawn = input_tensors.draw_inputs(fp8("e4m3", seed=2026))
    assert [x.hex() for x in drawn.descale.k[0].tolist()] == [
        "0x1.1ef6040000000p-8",
        "0x1.a80c2a0000000p-8",
    ]
    assert drawn.k[0, 1, 2].view(torch.uint8).tolist() == [76, 121, 249, 119, 121, 121]


def test_tensors_include_the_descales_by_name():
    drawn = input_tensors.draw_inputs(fp8())
    names = ["q", "k", "v", "q_descale", "k_descale", "v_descale"]
    assert list(drawn.tensors()) == names
    assert drawn.tensors()["k_descale"] is drawn.descale.k
    assert list(input_tensors.draw_inputs(fp8("bf16")).tensors()) == names[:3]


def test_clone_has_its_own_memory_and_to_moves_all_tensors():
    drawn = input_tensors.draw_inputs(fp8())
    copy = drawn.clone()
    for name, tensor in drawn.tensors().items():
        copied = copy.tensors()[name]
        assert copied.data_ptr() != tensor.data_ptr()
        assert torch.equal(copied.double(), tensor.double())
    copy.descale.v.zero_()
    assert drawn.descale.v.all()
    moved = drawn.to("meta")
    assert {tensor.device.type for tensor in moved.tensors().values()} == {"meta"}
    assert moved.device.type == "meta"
    assert (moved.problem, drawn.device.type) == (drawn.problem, "cpu")


def test_replace_keeps_the_descale_unless_it_is_given():
    drawn = input_tensors.draw_inputs(fp8())
    assert drawn.replace(v=drawn.v.clone()).descale is drawn.descale
    ones = Descale(**{name: torch.ones(2, 2) for name in ("q", "k", "v")})
    assert drawn.replace(descale=ones).descale is ones


def with_descale(**changes: torch.Tensor) -> Inputs:
    drawn = input_tensors.draw_inputs(fp8())
    descales = {name: getattr(drawn.descale, name) for name in ("q", "k", "v")}
    return drawn.replace(descale=Descale(**descales | changes))


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
def test_tensors_that_do_not_fit_the_problem_are_rejected(make, message):
    with one_line(ProblemError, whole=message):
        make()


def qkv(drawn: Inputs) -> dict[str, torch.Tensor]:
    return {name: getattr(drawn, name) for name in ("q", "k", "v")}


def test_descale_of_tiny_numbers_is_the_smallest_normal_number():
    """A GPU may flush a subnormal descale to 0."""
    exact = input_tensors.unrounded_inputs(Problem(query=2, head_dim=4, dtype="e4m3"))
    tiny = exact.replace(q=torch.full_like(exact.q, 2.0**-140))
    fp8 = input_tensors.round_inputs(tiny, Problem(query=2, head_dim=4, dtype="e4m3"))
    assert fp8.descale.q.tolist() == [[2.0**-126]]
    assert (fp8.q.double() == 0).all()  # 2^-14, half of e4m3's smallest number 2^-9, and less


@pytest.mark.parametrize("number", [1e60, math.inf, math.nan])
def test_numbers_too_large_for_any_descale_are_rejected(number):
    exact = input_tensors.unrounded_inputs(Problem(query=2, head_dim=4, dtype="e4m3"))
    exact.k[0, 0, 1, 2] = number
    with pytest.raises(ProblemError, match="the inputs are too large for e4m3: a descale is an"):
        input_tensors.round_inputs(exact, Problem(query=2, head_dim=4, dtype="e4m3"))
