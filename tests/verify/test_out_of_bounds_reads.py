"""What is proven of a kernel that reads what is no input, or takes a layout for another."""

import ctypes
import dataclasses
import itertools

import pytest
import torch
from tests.planted_kernels.outputs_given import spoiled

from attncheck.diagnose.diagnosis import CauseSearch, diagnose_failure, explained_by
from attncheck.diagnose.out_of_bounds_reads import (
    misread_strides,
    out_of_bounds_reads,
    unwritten_memory,
)
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.relations import relation_named
from attncheck.reporting.diagnosis_text import diagnosis_text
from attncheck.subjects.ideal import Ideal
from attncheck.verify.call_conditions import CallConditions, Surroundings, place_among
from attncheck.verify.executor import InProcess
from attncheck.verify.isolated import IsolatedKernel
from attncheck.verify.kernel_messages import from_fields, to_fields
from attncheck.verify.run_case import run_case

PROBLEM = Problem(query=5, kv=7, heads=2, head_dim=17, dtype="bf16")
ROWS = Problem(query=4, kv=4, heads=2, head_dim=16, dtype="bf16")
BACKWARD = Problem(query=4, kv=4, head_dim=16, dtype="bf16", backward=True)


def behind(tensor):
    """The number that lies behind a tensor's memory, as a pointer that goes on reads it."""
    memory = tensor.untyped_storage()
    raw = (ctypes.c_uint8 * 2).from_address(memory.data_ptr() + memory.nbytes())
    return torch.tensor(list(raw), dtype=torch.uint8).view(torch.bfloat16).float()


def off(by=lambda _inputs: 3.0):
    """Wrong by the same for all that it gives."""
    return spoiled(lambda inputs, right: dataclasses.replace(right, out=right.out + by(inputs)))


def reading(of):
    """Wrong by what lies behind some of its inputs."""
    return off(lambda inputs: 3.0 + sum(float(behind(getattr(inputs, name))) for name in of))


def turning(period):
    """Wrong by something else in each of a few calls, in turns."""
    calls = itertools.count()
    return off(lambda _: 3.0 + next(calls) % period)


@off
def forgetful(inputs):
    """Leaves what free memory held in every third column of out."""
    held = torch.empty(1, dtype=torch.uint8).double()
    thirds = torch.arange(inputs.v.shape[-1]) % 3 == 0
    return ((1.0 + held) * thirds).to(inputs.v.dtype)


class Contiguous(Ideal):
    """Takes an input's numbers in the order in which they lie in memory, where it reaches far."""

    name = "contiguous"

    def __init__(self, of, far=0):
        super().__init__()
        self.of, self.far = of, far

    def prepare(self, inputs):
        tensor = getattr(inputs, self.of)
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        if reach >= self.far:
            flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
            changed = {self.of: flat.clone().view(tensor.shape)}
            inputs = dataclasses.replace(inputs, **changed)
        return super().prepare(inputs)


class Untransposed(Ideal):
    """Takes k's last dim for the innermost one."""

    name = "untransposed"

    def prepare(self, inputs):
        k = inputs.k
        if k.stride(3) != 1:
            k = k.as_strided((k.numel(),), (1,)).clone().view(k.shape)
        return super().prepare(inputs.replace(k=k))


def told(subject, case):
    record = run_case(subject, case, device="cpu")
    assert record.status == "fail"
    return diagnose_failure(record, subject, device="cpu")


@pytest.mark.parametrize("contents", ["numbers", "others", "nan"])
@pytest.mark.parametrize("apart", ["", "k"])
def test_surroundings_change_no_number(contents, apart):
    problem = PROBLEM.replace(backward=True)
    (_, inputs) = relation_named("strides_gapped").runs(draw_inputs(problem), {})
    around = place_among(inputs, Surroundings(contents=contents, of="q,k", apart=apart))
    for name, tensor in inputs.tensors().items():
        found = around.tensors()[name]
        assert torch.equal(found, tensor)
        assert (found.stride() == tensor.stride()) == (name != apart)
        assert found.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("name", ["strides_expanded", "strides_packed", "strides_transposed"])
def test_any_layout_stays(name):
    inputs = relation_named(name).runs(draw_inputs(PROBLEM.replace(batch=2, heads=2)), {})[-1]
    around = place_among(inputs, Surroundings())
    for one, tensor in zip(around.tensors().values(), inputs.tensors().values(), strict=True):
        assert torch.equal(one, tensor)
        assert one.stride() == tensor.stride()


@pytest.mark.parametrize(
    "problem",
    [
        ROWS.replace(dtype="e4m3"),
        BACKWARD.replace(sink=True, dlse=True),
        Problem(operation="softmax", query=3, kv=5, dtype="fp32"),
    ],
    ids=["fp8", "dlse", "softmax"],
)
def test_every_input_has_surroundings(problem):
    inputs = draw_inputs(problem)
    around = place_among(inputs, Surroundings(contents="others"))
    for name, tensor in inputs.tensors().items():
        as_bytes = (x.contiguous().view(torch.uint8) for x in (tensor, around.tensors()[name]))
        assert torch.equal(*as_bytes)


def test_another_process_has_the_same_surroundings():
    under = CallConditions(
        fill="pattern", surroundings=Surroundings(contents="nan", of="k", apart="q")
    )
    assert from_fields(CallConditions, to_fields(under)) == under
    with IsolatedKernel("ideal") as host:
        assert out_of_bounds_reads(Case(problem=ROWS), host.subject, "cpu", host.executor) == ""
        found = misread_strides(Case(problem=ROWS), host.subject, "cpu", host.executor)
    assert found == (True, "")


def test_of_the_inputs_that_are_named_the_memory_beside_is_another():
    inputs = draw_inputs(PROBLEM)
    usual, other = (
        place_among(inputs, by) for by in (Surroundings(), Surroundings(contents="nan", of="k"))
    )
    assert torch.equal(behind(usual.q), behind(other.q))
    assert behind(usual.k).isfinite()
    assert behind(other.k).isnan()


class Writing(Ideal):
    """Right, and writes a byte beside one of its inputs."""

    def __init__(self, name, at):
        self.beside, self.at = name, at
        super().__init__()

    def prepare(self, inputs):
        tensor = getattr(inputs, self.beside)
        place = tensor.data_ptr() + (tensor.nbytes if self.at == "after" else -1)
        right = super().prepare(inputs)

        def call():
            ctypes.memset(place, 1, 1)
            return right()

        return call


@pytest.mark.parametrize("name", ["q", "v"])
@pytest.mark.parametrize("at", ["before", "after"])
@pytest.mark.parametrize("question", ["compare", "ones"])
def test_a_write_beside_an_input_fails_every_judged_call(name, at, question):
    record = run_case(Writing(name, at), Case(problem=PROBLEM, question=question), device="cpu")
    assert (record.status, record.judgement.rule) == ("fail", "memory")
    assert record.judgement.reason == f"out-of-bounds write: 1 byte {at} its input {name}"


@pytest.mark.parametrize(("of", "names"), [("v", "v"), ("qk", "q, k"), ("", "")])
def test_beside_which_input_a_kernel_reads(of, names):
    assert out_of_bounds_reads(Case(problem=PROBLEM), reading(of), "cpu", InProcess()) == names


@pytest.mark.parametrize("period", [2, 3, 4, 7, 8])
def test_of_what_changes_by_itself_nothing_is_said(period):
    assert out_of_bounds_reads(Case(problem=PROBLEM), turning(period), "cpu", InProcess()) == ""


@pytest.mark.parametrize("question", ["compare", "strides_gapped", "mean"])
def test_a_right_kernel_reads_nothing_beside(question):
    case = Case(problem=ROWS, question=question)
    assert out_of_bounds_reads(case, Ideal(), "cpu", InProcess()) == ""
    assert unwritten_memory(case, Ideal(), "cpu", InProcess()) == ""


def test_what_nothing_has_written_is_told():
    case = Case(problem=PROBLEM)
    assert unwritten_memory(case, forgetful, "cpu", InProcess()) == "out"
    first = told(forgetful, case).diagnosis.ranked[0]
    assert (first.model, first.parameters) == ("free-memory-read", {"of": "out"})


@pytest.mark.parametrize(
    ("kernel", "sign", "of"),
    [(forgetful, "free-memory-read", "out"), (reading("v"), "reads-beside-an-input", "v")],
)
def test_a_sign_that_one_failure_proves_is_tried_on_the_next(kernel, sign, of):
    search = CauseSearch(most=1)  # failures that may be looked into from the beginning
    cases = [Case(problem=PROBLEM.replace(seed=seed)) for seed in range(3)]
    records = [run_case(kernel, case, device="cpu") for case in cases]
    for record in records:
        diagnosis = search.diagnose(record, kernel, device="cpu").diagnosis
        assert [(one.model, one.parameters) for one in diagnosis.ranked] == [(sign, {"of": of})]
    assert explained_by(records[0], [sign], off(), device="cpu") is None, "it reads no memory"


@pytest.mark.parametrize("period", [2, 3, 4, 7, 8])
def test_of_what_changes_by_itself_no_memory_is_told(period):
    assert unwritten_memory(Case(problem=PROBLEM), turning(period), "cpu", InProcess()) == ""


def test_what_is_read_beside_is_told_before_what_explains_a_part():
    record = told(reading("v"), Case(problem=PROBLEM))
    first = record.diagnosis.ranked[0]
    assert (first.model, first.parameters) == ("reads-beside-an-input", {"of": "v"})
    assert "and is no part of it [of v]" in " ".join(diagnosis_text(record, kernel="mine").split())


@pytest.mark.parametrize(("question", "weight"), [("compare", 0.0), ("mean", 2.0**-120)])
def test_what_is_read_beside_with_next_to_no_weight_is_found(question, weight):
    """NaN lies behind the inputs of a comparison, and huge numbers behind those of a probe."""

    case = Case(problem=ROWS, question=question)
    weighing = off(lambda inputs: weight * behind(inputs.v))
    assert run_case(weighing, case, device="cpu").status == "fail"
    assert run_case(Ideal(), case, device="cpu").status == "pass"


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_which_input_is_taken_for_contiguous(name):
    case = Case(problem=BACKWARD)
    assert misread_strides(case, Contiguous(name), "cpu", InProcess()) == (True, name)


def test_a_right_kernel_takes_every_layout():
    assert misread_strides(Case(problem=BACKWARD), Ideal(), "cpu", InProcess()) == (True, "")


def test_a_kernel_that_is_wrong_anyway_is_not_blamed_for_layouts():
    case = Case(problem=ROWS)
    assert misread_strides(case, off(), "cpu", InProcess()) == (False, "")


def test_strides_that_are_not_taken_are_told_before_all():
    record = told(Contiguous("q"), Case(problem=ROWS, question="strides_heads_last"))
    first = record.diagnosis.ranked[0]
    assert (first.model, first.parameters) == ("strides-not-taken", {"of": "q"})
    assert "contiguous-assumed" in [one.model for one in record.diagnosis.ranked]


def test_a_layout_that_no_other_call_has_is_told_with_its_question():
    record = told(Untransposed(), Case(problem=ROWS, question="strides_transposed"))
    first = record.diagnosis.ranked[0]
    assert (first.model, first.parameters) == ("strides-not-taken", {"of": "k"})


@pytest.mark.parametrize(("far", "name"), [(2**31, "far-offsets-wrap"), (0, "strides-not-taken")])
def test_rows_far_apart_are_told_from_others(far, name):
    case = Case(problem=ROWS, question="strides_far", parameters={"tensor": 2})
    first = told(Contiguous("v", far), case).diagnosis.ranked[0]
    assert (first.model, first.parameters) == (name, {"of": "v"})
