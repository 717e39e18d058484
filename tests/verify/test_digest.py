"""Equal digests are equal bits, and a kernel that repeats itself has one."""

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


def test_the_same_bits_have_one_digest_whatever_their_strides():
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
        pytest.param(Outputs(OUT, OUT[..., 0]), id="one more"),
        pytest.param(Outputs(torch.nextafter(OUT, OUT + 1)), id="last bit"),
    ],
)
def test_other_bits_have_another(other):
    assert outputs_digest(other) != outputs_digest(Outputs(OUT))


def test_the_payload_of_a_nan_is_a_bit_too():
    quiet, other = (torch.tensor([bits], dtype=torch.int32) for bits in (0x7FC00000, 0x7FC00001))
    assert outputs_digest(Outputs(quiet.view(torch.float32))) != outputs_digest(
        Outputs(other.view(torch.float32))
    )
    assert outputs_digest(Outputs(quiet.view(torch.float32))) == outputs_digest(
        Outputs(quiet.view(torch.float32))
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float64])
def test_of_every_dtype_and_of_nothing(dtype):
    assert outputs_digest(Outputs(OUT.to(dtype))) != outputs_digest(Outputs(OUT.to(torch.float16)))
    assert outputs_digest(Outputs(torch.empty(1, 1, 0, 4, dtype=dtype)))


def measured(runs: int, step: float = 2.0**-12) -> Record:
    """Of a kernel that gives other bits each time, larger errors each time; it promises nothing."""
    numbers = []

    def later(right: Outputs, number: int) -> Outputs:
        numbers.append(number)
        return replace(right, out=right.out + step * number * right.out.abs().max())

    drifting = spoiled(in_turns(later), promises=frozenset())
    record = measure_accuracy(drifting, CASE, device="cpu", runs=runs)
    assert len(numbers) == runs
    return record


def test_a_comparison_carries_its_digest():
    evidence = EvidenceBuilder(CASE, "cpu")
    record = run_case(Ideal(), evidence.case, device=evidence.device, evidence=evidence)
    assert record.digest == outputs_digest(Ideal().run(evidence.inputs))


def test_a_kernel_that_repeats_itself_is_measured_once():
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


def test_of_one_that_does_not_the_largest_error_of_several_runs_counts():
    record, one = measured(runs=3), measured(runs=1)
    assert record.digest is msgspec.UNSET  # it has no one
    assert isinstance(record.accuracy, dict)
    assert isinstance(one.accuracy, dict)
    assert record.accuracy["out"].rmse > one.accuracy["out"].rmse


def test_bits_that_happen_to_be_equal_each_time_have_a_digest():
    record = measured(runs=3, step=0.0)
    assert record.digest == outputs_digest(Ideal().run(EvidenceBuilder(CASE, "cpu").inputs))


def test_what_is_not_taken_is_asked_once():
    """Said only as it is called."""

    def refuse(*_: object) -> Outputs:
        raise Refused("not today")

    record = measure_accuracy(spoiled(refuse, promises=frozenset()), CASE, device="cpu")
    assert record.status == "unsupported"
    assert record.accuracy is msgspec.UNSET
