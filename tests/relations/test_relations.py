"""How relations are checked: findings, failures, comparisons of bits and values, merged parts."""

import math

import pytest
import torch
from tests.planted_kernels import kernel

from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case
from attncheck.records.failure_causes import without_place
from attncheck.relations import relation_named
from attncheck.relations.parts import merge_error, merge_parts
from attncheck.relations.relation import Finding, compare_bits, compare_values
from attncheck.verify.executor import Failure
from attncheck.verify.relation_runs import check_relation

FUTURE_KEYS = ("future_keys", "future_keys_nan", "future_keys_huge")


@pytest.fixture
def find(small):
    """``find(fault, question, **changes)``: the Finding or Failure of a planted kernel, or None."""

    def check(fault, question, **changes):
        sizes = {"heads": 6, "head_dim": 3, "value_dim": 4, "mask": Spec.of("causal")}
        problem = small(**(sizes | changes))
        allowed = relation_named(question).allowed(problem)
        parameters = {name: values[len(values) // 2] for name, values in allowed.items()}
        case = Case(problem=problem, question=question, parameters=parameters)
        return check_relation(kernel(fault), case)

    return check


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("fault", "question"),
    [
        *(("RowBelow", question) for question in FUTURE_KEYS),
        ("RowBelow", "first_row"),
        ("DiagonalDropped", "first_row"),
        ("HiddenTimesZero", "future_keys_nan"),
        ("LargestKeyInLse", "future_keys"),
        ("LargestKeyInLse", "future_keys_huge"),
        ("Interleaved", "first_row"),
        ("Biased", "zero_values"),
        ("Unsteady", "repeat"),
        ("OneBuffer", "repeat"),
    ],
)
def test_planted_fault_is_found(fault, question, dtype, find):
    assert isinstance(find(fault, question, dtype=dtype), Finding)


@pytest.mark.parametrize("question", [*FUTURE_KEYS, "repeat", "zero_values"])
def test_relation_ignores_fault_that_it_is_not_about(question, find):
    assert find("DiagonalDropped", question) is None


def test_kernel_that_raises_fails_with_its_message(find):
    failure = find("Raising", "repeat")
    assert isinstance(failure, Failure)
    assert without_place(failure.message) == "RuntimeError: illegal memory access"


def test_finding_message_gives_place_values_and_count(find, small):
    finding = find("DiagonalDropped", "first_row")
    v = draw_inputs(small(Spec.of("causal"), heads=6, head_dim=3, value_dim=4)).v
    assert finding.message == (
        f"out[0, 0, 0, 0] = 0, but should be {v[0, 0, 0, 0].item():.9g} bit for bit "
        "(48 of 48 elements differ)"
    )


def test_compare_bits_finds_any_different_bit():
    zero, nan = torch.zeros(2), torch.tensor([torch.nan, 1.0])
    assert compare_bits("out", zero, zero) is None
    assert compare_bits("out", -zero, zero) is not None
    assert compare_bits("out", nan, nan.clone()) is None
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        one = torch.ones(2, 3, dtype=dtype)
        bits = one.clone().view(torch.int16 if dtype.itemsize == 2 else torch.int32)
        bits[1, 2] += 1
        finding = compare_bits("lse", bits.view(dtype), one)
        assert (finding.place, finding.count, finding.compared) == ((1, 2), 1, 6)
        assert finding.value != finding.expected


def test_compare_values_ignores_only_sign_of_zero():
    zero, nan = torch.zeros(2), torch.tensor([0.0, torch.nan])
    assert compare_values("out", -zero, zero) is None
    assert compare_values("out", nan, zero) is not None
    assert compare_values("out", torch.tensor([0.0, 1e-45]), 0.0) is not None
    assert compare_values("out", nan, 0.0, torch.tensor([True, False])) is None
    assert compare_values("out", nan, 0.0, torch.tensor([False, True])).compared == 1


# ------------------------------------------------------------------ merged parts


def _part(out, lse):
    out, lse = (torch.tensor(x, dtype=torch.float64) for x in (out, lse))
    return Outputs(out.view(1, 1, 1, 1), lse.view(1, 1, 1))


def test_parts_are_merged_by_their_weights():
    merged = merge_parts(_part(1.0, math.log(3.0)), _part(5.0, 0.0))
    torch.testing.assert_close(merged.out.item(), 2.0)
    torch.testing.assert_close(merged.lse.item(), math.log(4.0))


@pytest.mark.parametrize("out", [0.0, math.nan, math.inf])
def test_part_without_visible_keys_does_not_count(out):
    empty, errors = _part(out, -math.inf), _part(math.inf, math.inf)
    merged = merge_parts(empty, _part(5.0, 2.0))
    assert (merged.out.item(), merged.lse.item()) == (5.0, 2.0)
    allowed = merge_error([empty, _part(5.0, 2.0)], [errors, _part(0.5, 0.25)])
    # Only the merge's own float64 roundings are added, and nothing of the other part.
    assert 0.5 <= allowed.out.item() <= 0.5 * (1 + torch.finfo(torch.float32).eps)
    assert 0.25 <= allowed.lse.item() <= 0.25 * (1 + torch.finfo(torch.float32).eps)
    none = merge_parts(empty, empty)
    assert (none.out.item(), none.lse.item()) == (0.0, -math.inf)


def test_merge_error_bounds_errors_of_parts():
    numbers = torch.Generator().manual_seed(0)

    def parts(out, lse):
        return [_part(*pair) for pair in zip(out.tolist(), lse.tolist(), strict=True)]

    for _ in range(100):
        out, lse = torch.randn(2, 2, generator=numbers) * torch.tensor([[1.0], [4.0]])
        out_error, lse_error = torch.rand(2, 2, generator=numbers) * torch.tensor([[1.0], [3.0]])
        signs = torch.randint(0, 2, (2, 2), generator=numbers) * 2 - 1
        perturbed = parts(out + signs[0] * out_error, lse + signs[1] * lse_error)
        exact, merged = merge_parts(*parts(out, lse)), merge_parts(*perturbed)
        allowed = merge_error(perturbed, parts(out_error, lse_error))
        # The perturbed sums are themselves rounded to fp32.
        slack = 1 + 16 * torch.finfo(torch.float32).eps
        assert (merged.out - exact.out).abs() <= allowed.out * slack
        assert (merged.lse - exact.lse).abs() <= allowed.lse * slack
