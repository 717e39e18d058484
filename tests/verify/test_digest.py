"""Digests of outputs (equal digests mean equal bits), and how often a kernel is measured."""

from dataclasses import replace

import msgspec
import pytest
import torch
from tests.planted_kernels.outputs_given import in_turns, spoiled

from attncheck.core.outputs import Outputs
from attncheck.inputs.problem import Case, Problem
from attncheck.records.record import Record
from attncheck.subjects.capabilities.subject import Refused
from attncheck.subjects.ideal import Ideal
from attncheck.verify import accuracy
from attncheck.verify.accuracy import measure_accuracy
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.obligations import DIGITS, outputs_digest
from attncheck.verify.run_case import run_case

OUT = torch.tensor([[[[1.0, -2.0], [0.0, 4.0]]]])
CASE = Case(problem=Problem(query=24, head_dim=16, dtype="bf16"))


def test_digest_does_not_depend_on_strides():
    other = OUT.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert other.stride() != OUT.stride()
    assert outputs_digest(Outputs(OUT)) == outputs_digest(Outputs(other))
    assert len(outputs_digest(Outputs(OUT))) == DIGITS


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(Outputs(torch.where(OUT == 0, -0.0, OUT)), id="negative zero"),
        pytest.param(Outputs(OUT.view(1, 1, 4, 1)), id="shape"),
        pytest.param(Outputs(OUT.view(torch.int32)), id="dtype"),
        pytest.param(Outputs(OUT, OUT[..., 0]), id="additional tensor"),
        pytest.param(Outputs(torch.nextafter(OUT, OUT + 1)), id="last bit"),
    ],
)
def test_any_other_bit_shape_dtype_or_tensor_changes_the_digest(other):
    assert outputs_digest(other) != outputs_digest(Outputs(OUT))


def test_digest_includes_nan_payload():
    quiet, other = (torch.tensor([bits], dtype=torch.int32) for bits in (0x7FC00000, 0x7FC00001))
    assert outputs_digest(Outputs(quiet.view(torch.float32))) != outputs_digest(
        Outputs(other.view(torch.float32))
    )
    assert outputs_digest(Outputs(quiet.view(torch.float32))) == outputs_digest(
        Outputs(quiet.view(torch.float32))
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float64])
def test_digest_supports_every_dtype_and_empty_tensors(dtype):
    assert outputs_digest(Outputs(OUT.to(dtype))) != outputs_digest(Outputs(OUT.to(torch.float16)))
    assert outputs_digest(Outputs(torch.empty(1, 1, 0, 4, dtype=dtype)))


def measured(runs: int, step: float = 2.0**-12) -> Record:
    """The accuracy of a kernel that promises nothing and whose error grows with every call."""
    numbers = []

    def add_error(right: Outputs, number: int) -> Outputs:
        numbers.append(number)
        return replace(right, out=right.out + step * number * right.out.abs().max())

    drifting = spoiled(in_turns(add_error), promises=frozenset())
    record = measure_accuracy(drifting, CASE, device="cpu", runs=runs)
    assert len(numbers) == runs
    return record


def test_compare_record_has_the_digest_of_its_outputs():
    evidence = EvidenceBuilder(CASE, "cpu")
    record = run_case(Ideal(), evidence.case, device=evidence.device, evidence=evidence)
    assert record.digest == outputs_digest(Ideal().run(evidence.inputs))


def test_repeatable_kernel_has_digest_and_accuracy():
    record = measure_accuracy(Ideal(), CASE, device="cpu")
    assert record.status == "pass"
    assert isinstance(record.digest, str)
    assert isinstance(record.accuracy, dict)
    assert set(record.accuracy) == {"out", "lse"}
    out = record.accuracy["out"]
    assert record.out is not None
    assert out.rmse == record.out.rmse
    assert out.relative == pytest.approx(1.0, rel=0.2)  # an ideal kernel among ideal kernels
    assert len(out.ensemble) == len(accuracy.accuracy_tilings(CASE.problem)) == 5
    assert 1 <= out.freedom <= record.out.elements


def test_unrepeatable_kernel_has_no_digest_and_its_largest_error_counts():
    record, one = measured(runs=3), measured(runs=1)
    assert record.digest is msgspec.UNSET
    assert isinstance(record.accuracy, dict)
    assert isinstance(one.accuracy, dict)
    assert record.accuracy["out"].rmse > one.accuracy["out"].rmse


def test_equal_bits_in_every_run_have_a_digest_without_a_promise():
    record = measured(runs=3, step=0.0)
    assert record.digest == outputs_digest(Ideal().run(EvidenceBuilder(CASE, "cpu").inputs))


def test_kernel_that_refuses_is_unsupported_after_one_call():
    calls = []

    def refuse(*_: object) -> Outputs:
        calls.append(1)
        raise Refused("not today")

    record = measure_accuracy(spoiled(refuse, promises=frozenset()), CASE, device="cpu")
    assert record.status == "unsupported"
    assert record.accuracy is msgspec.UNSET
    assert len(calls) == 1
