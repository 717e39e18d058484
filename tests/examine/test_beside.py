"""What is proven of a kernel that reads what is no input, or takes a layout for another."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools

import pytest
import torch

from attncheck.examine.answer import answered
from attncheck.examine.beside import read_beside, taken_otherwise
from attncheck.examine.circumstances import Circumstances
from attncheck.examine.diagnosis import diagnosed
from attncheck.examine.executor import InProcess
from attncheck.examine.isolated import Host
from attncheck.examine.spelled import read, spelled
from attncheck.examine.surroundings import Surroundings, surrounded
from attncheck.inputs import draw
from attncheck.problem import Case, Problem
from attncheck.relations import relation_named
from attncheck.reporting.diagnosis import diagnosis
from attncheck.subjects.ideal import Ideal

PROBLEM = Problem(query=5, kv=7, heads=2, head_dim=17, dtype="bf16")
ROWS = Problem(query=4, kv=4, heads=2, head_dim=16, dtype="bf16")
BACKWARD = Problem(query=4, kv=4, head_dim=16, dtype="bf16", backward=True)


def behind(tensor):
    """The number that lies behind a tensor's memory, as a pointer that goes on reads it."""
    memory = tensor.untyped_storage()
    raw = (ctypes.c_uint8 * 2).from_address(memory.data_ptr() + memory.nbytes())
    return torch.tensor(list(raw), dtype=torch.uint8).view(torch.bfloat16).float()


class Off(Ideal):
    """Wrong by the same for all that it gives."""

    name = "off"

    def by(self, inputs):
        del inputs
        return 3.0

    def prepare(self, inputs):
        call = super().prepare(inputs)

        def wrong():
            found = call()
            return dataclasses.replace(found, out=found.out + self.by(inputs))

        return wrong


class Reading(Off):
    """Wrong by what lies behind some of its inputs."""

    name = "reading"

    def __init__(self, of):
        super().__init__()
        self.of = of

    def by(self, inputs):
        return 3.0 + sum(float(behind(getattr(inputs, name))) for name in self.of)


class Turning(Off):
    """Wrong by something else in each of a few calls, in turns."""

    name = "turning"

    def __init__(self, period):
        super().__init__()
        self.calls, self.period = itertools.count(), period

    def by(self, inputs):
        return 3.0 + next(self.calls) % self.period


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
    record = answered(subject, case, device="cpu")
    assert record.status == "fail"
    return diagnosed(record, subject, device="cpu")


@pytest.mark.parametrize("contents", ["numbers", "others", "nan"])
@pytest.mark.parametrize("apart", ["", "k"])
def test_surroundings_change_no_number(contents, apart):
    problem = PROBLEM.replace(backward=True)
    (_, inputs) = relation_named("strides_gapped").runs(draw(problem), {})
    around = surrounded(inputs, Surroundings(contents=contents, of="q,k", apart=apart))
    for name, tensor in inputs.tensors().items():
        found = around.tensors()[name]
        assert torch.equal(found, tensor)
        assert (found.stride() == tensor.stride()) == (name != apart)
        assert found.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("name", ["strides_expanded", "strides_packed", "strides_transposed"])
def test_any_layout_stays(name):
    inputs = relation_named(name).runs(draw(PROBLEM.replace(batch=2, heads=2)), {})[-1]
    around = surrounded(inputs, Surroundings())
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
    inputs = draw(problem)
    around = surrounded(inputs, Surroundings(contents="others"))
    for name, tensor in inputs.tensors().items():
        as_bytes = (x.contiguous().view(torch.uint8) for x in (tensor, around.tensors()[name]))
        assert torch.equal(*as_bytes)


def test_another_process_has_the_same_surroundings():
    under = Circumstances(fill="pattern", beside=Surroundings(contents="nan", of="k", apart="q"))
    assert read(Circumstances, spelled(under)) == under
    with Host("ideal") as host:
        assert read_beside(Case(problem=ROWS), host.subject, "cpu", host.executor) == ""
        found = taken_otherwise(Case(problem=ROWS), host.subject, "cpu", host.executor)
    assert found == (True, "")


def test_of_the_inputs_that_are_named_the_memory_beside_is_another():
    inputs = draw(PROBLEM)
    usual, other = (
        surrounded(inputs, by) for by in (Surroundings(), Surroundings(contents="nan", of="k"))
    )
    assert torch.equal(behind(usual.q), behind(other.q))
    assert behind(usual.k).isfinite()
    assert behind(other.k).isnan()


@pytest.mark.parametrize(("of", "names"), [("v", "v"), ("qk", "q, k"), ("", "")])
def test_beside_which_input_a_kernel_reads(of, names):
    assert read_beside(Case(problem=PROBLEM), Reading(of), "cpu", InProcess()) == names


@pytest.mark.parametrize("period", [2, 3, 4, 7, 8])
def test_of_what_changes_by_itself_nothing_is_said(period):
    assert read_beside(Case(problem=PROBLEM), Turning(period), "cpu", InProcess()) == ""


@pytest.mark.parametrize("question", ["compare", "strides_gapped", "mean"])
def test_a_right_kernel_reads_nothing_beside(question):
    case = Case(problem=ROWS, question=question)
    assert read_beside(case, Ideal(), "cpu", InProcess()) == ""


def test_what_is_read_beside_is_told_before_what_explains_a_part():
    record = told(Reading("v"), Case(problem=PROBLEM))
    first = record.diagnosis.ranked[0]
    assert (first.model, first.parameters) == ("reads-beside-an-input", {"of": "v"})
    assert "and is no part of it [of v]" in " ".join(diagnosis(record, kernel="mine").split())


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_which_input_is_taken_for_contiguous(name):
    case = Case(problem=BACKWARD)
    assert taken_otherwise(case, Contiguous(name), "cpu", InProcess()) == (True, name)


def test_a_right_kernel_takes_every_layout():
    assert taken_otherwise(Case(problem=BACKWARD), Ideal(), "cpu", InProcess()) == (True, "")


def test_a_kernel_that_is_wrong_anyway_is_not_blamed_for_layouts():
    case = Case(problem=ROWS)
    assert taken_otherwise(case, Off(), "cpu", InProcess()) == (False, "")


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
