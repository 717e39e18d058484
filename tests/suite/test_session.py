"""The tests that a property becomes: for which kernels, dtypes and mask families."""

import pytest

from attncheck.cases.mask_samples import SOFTMAX, ProblemKind, sample_problems
from attncheck.cases.strategies import MASK_FAMILIES
from attncheck.cases.strategies.sizes import pagings
from attncheck.inputs.problem import Problem
from attncheck.subjects.ideal import Ideal
from attncheck.suite.kernel_support import NOT_APPLICABLE, KernelSupport
from attncheck.suite.property_spec import PropertySpec, asks
from attncheck.suite.pytest_options import MARK, Options
from attncheck.suite.session import Kernel, Session, covering


class Narrow(Ideal):
    """Takes head_dim 128 in whole tiles, in fp16 and, without a mask, in bf16."""

    name = "narrow"

    def concerns(self, problem: Problem) -> bool:
        return problem.operation == "attention" and not problem.formats.scaled

    def unsupported(self, problem: Problem, device: str) -> str | None:
        if problem.head_dim != 128 or problem.query % 64 or problem.kv % 64:
            return "head_dim must be 128"
        if problem.dtype == "bf16" and problem.mask.name != "full":
            return "bf16 has no mask"
        return None if problem.dtype in {"fp16", "bf16"} else f"{problem.dtype} is not compiled in"


class Raising(Ideal):
    name = "raising"

    def unsupported(self, problem: Problem, device: str) -> str | None:
        raise RuntimeError("no driver")


def spec_of(*families: str, **more: object) -> PropertySpec:
    @asks("compare", families=families, **more)
    def test_it(kernel, case): ...

    (mark,) = test_it.pytestmark
    assert mark.name == MARK
    return mark.args[0]


def session(*subjects: Ideal, **options: object) -> Session:
    test_session = Session(options=Options(device="cpu", **options))
    test_session.kernels = tuple(Kernel(name=s.name, subject=s) for s in subjects)
    return test_session


def test_params_are_ordered_by_kernel_dtype_and_family():
    params = session(Ideal(), Narrow()).params(spec_of("full", "causal"))
    ids = [param.id for param in params]
    assert ids[:3] == ["ideal-fp32-full", "ideal-fp32-causal", "ideal-tf32-full"]
    assert ids[-4:] == [
        *["narrow-fp16-full", "narrow-fp16-causal", "narrow-bf16-full", "narrow-bf16-causal"]
    ]


def test_param_of_a_refused_family_has_the_reason():
    params = session(Narrow(), dtypes=("bf16",)).params(spec_of("full", "causal"))
    assert [param.refused for param in params] == ["", "bf16 has no mask"]


def test_refused_dtype_has_no_params_and_is_listed():
    result = session(Narrow())
    result.params(spec_of("full"))
    assert set(result.untaken["narrow"]) == {"fp32", "tf32"}  # fp8 is not applicable to it
    assert not session(Narrow()).params(spec_of(SOFTMAX))


def test_dtype_requested_but_not_applicable_is_listed():
    result = session(Narrow(), kernels=("narrow",), dtypes=("e4m3",))
    assert not result.params(spec_of("full"))
    assert result.untaken == {"narrow": {"e4m3": NOT_APPLICABLE}}


def test_property_restricted_to_dtypes_has_params_of_these_alone():
    params = session(Ideal()).params(spec_of("full", dtypes=("e4m3", "e5m2")))
    assert [param.dtype for param in params] == ["e4m3", "e5m2"]


def test_kernel_whose_support_query_raises_is_tested():
    assert not KernelSupport(Raising(), "cpu").refusal("causal", "bf16")


@pytest.mark.parametrize("family", [*MASK_FAMILIES, SOFTMAX])
def test_every_family_has_samples(family):
    result = sample_problems(family, "bf16")
    assert result
    assert not KernelSupport(Ideal(), "cpu").refusal(family, "bf16")
    mask_name = {"packed": "documents"}.get(family, family)  # documents alike
    assert all(each.mask.name == mask_name for each in result) or family in {"composition", SOFTMAX}


def test_under_test_has_the_kernel_dtype_and_family_of_its_param():
    result = session(Ideal())
    (param,) = result.params(spec_of("causal", dtypes=("bf16",)))
    kernel = result.under_test(param)
    assert (kernel.name, kernel.dtype, kernel.family) == ("ideal", "bf16", "causal")


class PagedOnly(Ideal):
    """Takes only keys in pages of 64."""

    name = "of-pages"

    def concerns(self, problem: Problem) -> bool:
        return problem.paging is not None

    def unsupported(self, problem: Problem, device: str) -> str | None:
        return None if problem.paging.size == 64 else "pages of 64"


def test_paged_properties_are_asked_of_paged_kernels_alone():
    class Plain(Ideal):
        name = "plain"

        def concerns(self, problem: Problem) -> bool:
            return problem.operation == "attention" and problem.paging is None

    options = {"dtypes": ("bf16",)}
    plain, paged = spec_of("full", **options), spec_of("full", **options, pagings=pagings())
    result = session(Plain(), PagedOnly())
    assert [param.id for param in result.params(plain)] == ["plain-bf16-full"]
    assert [param.id for param in result.params(paged)] == ["of-pages-bf16-full"]
    assert not result.untaken


@pytest.mark.parametrize("family", MASK_FAMILIES)
def test_every_family_has_paged_samples(family):
    assert all(each.paging for each in sample_problems(family, "bf16", ProblemKind(paged=True)))
    assert not KernelSupport(PagedOnly(), "cpu").refusal(family, "bf16", ProblemKind(paged=True))
    assert KernelSupport(PagedOnly(), "cpu").refusal(family, "bf16") == NOT_APPLICABLE


def test_softmax_has_no_paged_samples():
    assert not sample_problems(SOFTMAX, "bf16", ProblemKind(paged=True))


@pytest.mark.parametrize("family", MASK_FAMILIES)
def test_every_family_has_backward_samples(family):
    assert all(
        each.backward for each in sample_problems(family, "bf16", ProblemKind(backward=True))
    )
    assert not KernelSupport(Ideal(), "cpu").refusal(family, "bf16", ProblemKind(backward=True))
    assert not sample_problems(family, "e4m3", ProblemKind(backward=True))


@pytest.mark.parametrize("family", MASK_FAMILIES)
def test_every_family_has_samples_with_captured_tensors(family):
    kind = ProblemKind(backward=True, captured=True)
    assert all(each.dcaptured for each in sample_problems(family, "bf16", kind))
    assert not KernelSupport(Ideal(), "cpu").refusal(family, "bf16", kind)
    without = Ideal()
    without.captured = False
    reason = "it gives no gradients of the tensors that a score mod reads"
    assert KernelSupport(without, "cpu").refusal(family, "bf16", kind) == reason


def test_backward_only_kernel_is_asked_backward_properties():
    class BackwardOnly(Ideal):
        name = "alone"

        def concerns(self, problem: Problem) -> bool:
            return problem.operation == "attention" and problem.backward

    options = {"dtypes": ("bf16",)}
    result = session(BackwardOnly())
    assert [p.id for p in result.params(spec_of("full", **options, backward=True))] == [
        "alone-bf16-full"
    ]
    assert not result.untaken


def params_by_test(
    properties: int, *subjects: Ideal, families: tuple[str, ...] = tuple(MASK_FAMILIES)
):
    """``{test: (property, param)}`` of all tests that draw."""
    params = session(*subjects).params(spec_of(*families))
    return {
        (name, each.id): (name, each)
        for name in map(str, range(properties))
        for each in params
        if not each.refused
    }


def test_covering_keeps_every_pair_and_every_param_with_far_fewer_tests():
    every = params_by_test(9, Ideal(), Narrow())

    def combinations(tests):
        result = [(name, p.kernel.name, p.dtype, p.family) for name, p in map(every.get, tests)]
        return {
            kind: {tuple(row[axis] for axis in kind) for row in result}
            for kind in [(0, 1), (0, 2), (0, 3), (1, 2, 3)]
        }

    chosen = covering(every)
    assert combinations(chosen) == combinations(every)
    assert len(chosen) < len(every) / 4
    assert chosen == covering(dict(reversed(every.items())))  # in any order of collection


def test_covering_of_one_property_keeps_every_test():
    every = params_by_test(1, Ideal(), Narrow(), families=("full", "causal"))
    assert covering(every) == set(every)
