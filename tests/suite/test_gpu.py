"""A kernel that makes the GPU unusable is blamed for what follows, and no other kernel is."""

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
def gpu_kernel(monkeypatch):
    kernel = UnderTest("misaligned", Misaligned(), "cpu")
    monkeypatch.setattr(kernel, "device", "cuda")
    answer = UnderTest("misaligned", Misaligned(), "cpu").answer
    monkeypatch.setattr(kernel, "answer", answer)
    return kernel


def failing_case_id(kernel: UnderTest, case: Case) -> str:
    with pytest.raises(AssertionError) as failure:
        kernel.must_hold(case)
    return str(failure.value.record.case_id)


@pytest.mark.parametrize(("lost", "blamed"), [("an illegal address", FIRST), ("", LATER)])
def test_later_failure_is_blamed_on_the_case_that_lost_the_gpu(
    gpu_kernel, monkeypatch, lost, blamed
):
    monkeypatch.setattr(under_test, "lost_gpu", lambda: lost)
    assert failing_case_id(gpu_kernel, FIRST) == FIRST.id
    assert failing_case_id(gpu_kernel, LATER) == blamed.id


def test_later_tests_are_skipped_once_the_gpu_is_lost():
    class Lost:
        lost_by = "test_layouts.py::test_strides"

    with pytest.raises(pytest.skip.Exception, match="lost its GPU in test_layouts"):
        Session.skip_without_gpu(Lost())
