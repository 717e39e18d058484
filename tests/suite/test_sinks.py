"""Properties of sinks are tests of the kernels that take sinks, and of no other."""

import importlib.util
from pathlib import Path

import pytest

from attncheck.cases.mask_samples import ProblemKind, sample_problems
from attncheck.subjects.conventions.declarations import make_subject
from attncheck.subjects.ideal import Ideal
from attncheck.suite.kernel_support import NOT_APPLICABLE, KernelSupport
from attncheck.suite.property_spec import PropertySpec
from attncheck.suite.pytest_options import MARK

PROPERTIES = Path(__file__).parents[2] / "properties" / "test_sink.py"


def sink_property_specs() -> list[PropertySpec]:
    spec = importlib.util.spec_from_file_location("of_the_suite_sink", PROPERTIES)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tests = [test for name, test in vars(module).items() if name.startswith("test_")]
    return [m.args[0] for test in tests for m in test.pytestmark if m.name == MARK]


def plain(q, k, v, is_causal=False, scale=None, *, enable_gqa=False):
    raise AssertionError("asked")


def with_sinks(q, k, v, is_causal=False, scale=None, sinks=None, *, enable_gqa=False):
    raise AssertionError("asked")


def test_every_sink_property_declares_a_sink():
    specs = sink_property_specs()
    assert specs
    assert all(each.kind.sink for each in specs)


@pytest.mark.parametrize("family", ["full", "causal", "padding"])
def test_sink_samples_have_a_sink_and_others_do_not(family):
    assert all(problem.sink for problem in sample_problems(family, "bf16", ProblemKind(sink=True)))
    assert not any(problem.sink for problem in sample_problems(family, "bf16"))
    assert not sample_problems("softmax", "bf16", ProblemKind(sink=True))


def test_sink_properties_do_not_apply_to_kernels_without_sinks():
    for subject, takes in (
        (make_subject(plain, "plain"), False),
        (make_subject(with_sinks, "with"), True),
    ):
        reason = KernelSupport(subject, "cpu").refusal("causal", "bf16", ProblemKind(sink=True))
        assert reason == ("" if takes else NOT_APPLICABLE)
        assert not KernelSupport(subject, "cpu").refusal("causal", "bf16")
    assert not KernelSupport(Ideal(), "cpu").refusal("causal", "bf16", ProblemKind(sink=True))
