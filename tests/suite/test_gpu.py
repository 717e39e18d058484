"""What a kernel that takes the GPU away is blamed for, and that nobody else is."""

import pytest

from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.ideal import Ideal
from attncheck.suite import under_test
from attncheck.suite.session import Session
from attncheck.suite.under_test import UnderTest

FIRST, LATER = (Case(problem=Problem(query=n, head_dim=8)) for n in (3, 1))


class Misaligned(Ideal):
    name = "misaligned"

    def prepare(self, inputs):
        raise RuntimeError("CUDA error: misaligned address")


@pytest.fixture
def on_a_gpu(monkeypatch):
    kernel = UnderTest("misaligned", Misaligned(), "cpu")
    monkeypatch.setattr(kernel, "device", "cuda")
    answer = UnderTest("misaligned", Misaligned(), "cpu").answer
    monkeypatch.setattr(kernel, "answer", answer)
    return kernel


def failed(kernel: UnderTest, case: Case) -> str:
    with pytest.raises(AssertionError) as found:
        kernel.must_hold(case)
    return str(found.value.record.case_id)


def test_the_first_case_is_blamed_also_for_what_comes_after(on_a_gpu, monkeypatch):
    monkeypatch.setattr(under_test, "lost_gpu", lambda: "an illegal address")
    assert failed(on_a_gpu, FIRST) == FIRST.id
    assert failed(on_a_gpu, LATER) == FIRST.id


def test_an_error_that_leaves_the_gpu_is_its_own(on_a_gpu, monkeypatch):
    monkeypatch.setattr(under_test, "lost_gpu", lambda: "")
    assert failed(on_a_gpu, FIRST) == FIRST.id
    assert failed(on_a_gpu, LATER) == LATER.id


def test_later_tests_of_the_process_are_skipped():
    class Lost:
        lost_by = "test_layouts.py::test_strides"

    with pytest.raises(pytest.skip.Exception, match="lost its GPU in test_layouts"):
        Session.skip_without_gpu(Lost())
