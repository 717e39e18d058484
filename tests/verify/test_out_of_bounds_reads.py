"""Diagnosis of kernels that read outside their inputs, read unwritten memory or ignore strides."""

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


def number_after(tensor):
    """The number just after a tensor's memory, which an overrunning pointer would read."""
    memory = tensor.untyped_storage()
    raw = (ctypes.c_uint8 * 2).from_address(memory.data_ptr() + memory.nbytes())
    return torch.tensor(list(raw), dtype=torch.uint8).view(torch.bfloat16).float()


def off_by(error=lambda _inputs: 3.0):
    """A kernel whose out is wrong by ``error(inputs)``."""
    return spoiled(lambda inputs, right: dataclasses.replace(right, out=right.out + error(inputs)))


def reads_after(names):
    """A kernel that is wrong by the numbers just after these inputs."""
    return off_by(
        lambda inputs: 3.0 + sum(float(number_after(getattr(inputs, name))) for name in names)
    )


def periodic(period):
    """A kernel whose error changes from call to call, with this period."""
    calls = itertools.count()
    return off_by(lambda _: 3.0 + next(calls) % period)


@off_by
def reads_free_memory(inputs):
    """Adds the contents of free memory to every third column of out."""
    held = torch.empty(1, dtype=torch.uint8).double()
    thirds = torch.arange(inputs.v.shape[-1]) % 3 == 0
    return ((1.0 + held) * thirds).to(inputs.v.dtype)


class Contiguous(Ideal):
    """Ignores the strides of one input if its elements span at least ``far``."""

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
    """Assumes that the last dimension of k is contiguous."""

    name = "untransposed"

    def prepare(self, inputs):
        k = inputs.k
        if k.stride(3) != 1:
            k = k.as_strided((k.numel(),), (1,)).clone().view(k.shape)
        return super().prepare(inputs.replace(k=k))


def diagnosed(subject, case):
    record = run_case(subject, case, device="cpu")
    assert record.status == "fail"
    return diagnose_failure(record, subject, device="cpu")


@pytest.mark.parametrize("contents", ["numbers", "others", "nan"])
@pytest.mark.parametrize("apart", ["", "k"])
def test_surroundings_keep_the_values_of_inputs(contents, apart):
    problem = PROBLEM.replace(backward=True)
    (_, inputs) = relation_named("strides_gapped").runs(draw_inputs(problem), {})
    around = place_among(inputs, Surroundings(contents=contents, of="q,k", apart=apart))
    for name, tensor in inputs.tensors().items():
        moved = around.tensors()[name]
        assert torch.equal(moved, tensor)
        assert (moved.stride() == tensor.stride()) == (name != apart)
        assert moved.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("name", ["strides_expanded", "strides_packed", "strides_transposed"])
def test_surroundings_keep_any_layout(name):
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
def test_surroundings_support_every_kind_of_input(problem):
    inputs = draw_inputs(problem)
    around = place_among(inputs, Surroundings(contents="others"))
    for name, tensor in inputs.tensors().items():
        as_bytes = (x.contiguous().view(torch.uint8) for x in (tensor, around.tensors()[name]))
        assert torch.equal(*as_bytes)


def test_surroundings_work_in_an_isolated_process():
    under = CallConditions(
        fill="pattern", surroundings=Surroundings(contents="nan", of="k", apart="q")
    )
    assert from_fields(CallConditions, to_fields(under)) == under
    with IsolatedKernel("ideal") as host:
        assert out_of_bounds_reads(Case(problem=ROWS), host.subject, "cpu", host.executor) == ""
        result = misread_strides(Case(problem=ROWS), host.subject, "cpu", host.executor)
    assert result == (True, "")


def test_surroundings_change_the_memory_around_named_inputs_only():
    inputs = draw_inputs(PROBLEM)
    usual, other = (
        place_among(inputs, by) for by in (Surroundings(), Surroundings(contents="nan", of="k"))
    )
    assert torch.equal(number_after(usual.q), number_after(other.q))
    assert number_after(usual.k).isfinite()
    assert number_after(other.k).isnan()


class Writing(Ideal):
    """Right, but writes a byte before or after one of its inputs."""

    def __init__(self, name, at):
        self.neighbour, self.at = name, at
        super().__init__()

    def prepare(self, inputs):
        tensor = getattr(inputs, self.neighbour)
        place = tensor.data_ptr() + (tensor.nbytes if self.at == "after" else -1)
        right = super().prepare(inputs)

        def call():
            ctypes.memset(place, 1, 1)
            return right()

        return call


@pytest.mark.parametrize("name", ["q", "v"])
@pytest.mark.parametrize("at", ["before", "after"])
@pytest.mark.parametrize("question", ["compare", "ones"])
def test_write_next_to_an_input_fails_compare_and_probes(name, at, question):
    record = run_case(Writing(name, at), Case(problem=PROBLEM, question=question), device="cpu")
    assert (record.status, record.judgement.rule) == ("fail", "memory")
    assert record.judgement.reason == f"out-of-bounds write: 1 byte {at} its input {name}"


@pytest.mark.parametrize(("of", "names"), [("v", "v"), ("qk", "q, k"), ("", "")])
def test_out_of_bounds_reads_names_the_inputs_read_beyond(of, names):
    assert out_of_bounds_reads(Case(problem=PROBLEM), reads_after(of), "cpu", InProcess()) == names


@pytest.mark.parametrize("period", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("search", [out_of_bounds_reads, unwritten_memory])
def test_unrepeatable_kernel_is_not_said_to_read_memory(search, period):
    """Its outputs change with every call, and not because the memory around them did."""
    assert search(Case(problem=PROBLEM), periodic(period), "cpu", InProcess()) == ""


@pytest.mark.parametrize("question", ["compare", "strides_gapped", "mean"])
def test_correct_kernel_reads_no_foreign_memory(question):
    case = Case(problem=ROWS, question=question)
    assert out_of_bounds_reads(case, Ideal(), "cpu", InProcess()) == ""
    assert unwritten_memory(case, Ideal(), "cpu", InProcess()) == ""


def test_read_of_free_memory_is_diagnosed():
    case = Case(problem=PROBLEM)
    assert unwritten_memory(case, reads_free_memory, "cpu", InProcess()) == "out"
    first = diagnosed(reads_free_memory, case).diagnosis.ranked[0]
    assert (first.model, first.parameters) == ("free-memory-read", {"of": "out"})


@pytest.mark.parametrize(
    ("kernel", "cause", "of"),
    [
        (reads_free_memory, "free-memory-read", "out"),
        (reads_after("v"), "reads-beside-an-input", "v"),
    ],
)
def test_cause_proven_for_one_failure_is_tried_first_on_the_next(kernel, cause, of):
    """Only one failure may be searched in full here; the others have only the proven cause."""
    search = CauseSearch(most=1)
    cases = [Case(problem=PROBLEM.replace(seed=seed)) for seed in range(3)]
    records = [run_case(kernel, case, device="cpu") for case in cases]
    for record in records:
        diagnosis = search.diagnose(record, kernel, device="cpu").diagnosis
        assert [(one.model, one.parameters) for one in diagnosis.ranked] == [(cause, {"of": of})]
    assert explained_by(records[0], [cause], off_by(), device="cpu") is None, "it reads no memory"


def test_out_of_bounds_read_ranks_above_partial_explanations():
    record = diagnosed(reads_after("v"), Case(problem=PROBLEM))
    first = record.diagnosis.ranked[0]
    assert (first.model, first.parameters) == ("reads-beside-an-input", {"of": "v"})
    assert "and is no part of it [of v]" in " ".join(diagnosis_text(record, kernel="mine").split())


@pytest.mark.parametrize(("question", "weight"), [("compare", 0.0), ("mean", 2.0**-120)])
def test_out_of_bounds_read_with_tiny_weight_fails(question, weight):
    """NaN surrounds the inputs of a comparison, and huge numbers surround those of a probe."""
    case = Case(problem=ROWS, question=question)
    kernel = off_by(lambda inputs: weight * number_after(inputs.v))
    assert run_case(kernel, case, device="cpu").status == "fail"
    assert run_case(Ideal(), case, device="cpu").status == "pass"


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_misread_strides_names_the_input(name):
    case = Case(problem=BACKWARD)
    assert misread_strides(case, Contiguous(name), "cpu", InProcess()) == (True, name)


def test_correct_kernel_misreads_no_strides():
    assert misread_strides(Case(problem=BACKWARD), Ideal(), "cpu", InProcess()) == (True, "")


def test_kernel_wrong_in_any_layout_is_not_said_to_misread_strides():
    case = Case(problem=ROWS)
    assert misread_strides(case, off_by(), "cpu", InProcess()) == (False, "")


def test_misread_strides_rank_above_other_causes():
    record = diagnosed(Contiguous("q"), Case(problem=ROWS, question="strides_heads_last"))
    first = record.diagnosis.ranked[0]
    assert (first.model, first.parameters) == ("strides-not-taken", {"of": "q"})
    assert "contiguous-assumed" in [one.model for one in record.diagnosis.ranked]


def test_misread_strides_are_found_in_the_layout_of_the_failed_question():
    record = diagnosed(Untransposed(), Case(problem=ROWS, question="strides_transposed"))
    first = record.diagnosis.ranked[0]
    assert (first.model, first.parameters) == ("strides-not-taken", {"of": "k"})


@pytest.mark.parametrize(("far", "name"), [(2**31, "far-offsets-wrap"), (0, "strides-not-taken")])
def test_wrapped_far_offsets_are_distinguished_from_misread_strides(far, name):
    case = Case(problem=ROWS, question="strides_far", parameters={"tensor": 2})
    first = diagnosed(Contiguous("v", far), case).diagnosis.ranked[0]
    assert (first.model, first.parameters) == (name, {"of": "v"})
