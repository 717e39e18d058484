"""Which tests a property becomes, of which kernels."""

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
    """Takes head_dim 128 in whole tiles, in fp16 and, unmasked, in bf16."""

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


def asked(*families: str, **more: object) -> PropertySpec:
    @asks("compare", families=families, **more)
    def test_it(kernel, case): ...

    (mark,) = test_it.pytestmark
    assert mark.name == MARK
    return mark.args[0]


def session(*subjects: Ideal, **options: object) -> Session:
    found = Session(options=Options(device="cpu", **options))
    found.kernels = tuple(Kernel(name=s.name, subject=s) for s in subjects)
    return found


def test_a_test_for_each_kernel_dtype_and_family_in_that_order():
    params = session(Ideal(), Narrow()).params(asked("full", "causal"))
    ids = [param.id for param in params]
    assert ids[:3] == ["ideal-fp32-full", "ideal-fp32-causal", "ideal-tf32-full"]
    assert ids[-4:] == [
        *["narrow-fp16-full", "narrow-fp16-causal", "narrow-bf16-full", "narrow-bf16-causal"]
    ]


def test_a_family_that_is_not_taken_says_why():
    params = session(Narrow(), dtypes=("bf16",)).params(asked("full", "causal"))
    assert [param.refused for param in params] == ["", "bf16 has no mask"]


def test_a_dtype_that_is_not_taken_is_said_once():
    found = session(Narrow())
    found.params(asked("full"))
    assert set(found.untaken["narrow"]) == {"fp32", "tf32"}  # fp8 does not concern it
    assert not session(Narrow()).params(asked(SOFTMAX))


def test_what_was_asked_for_by_name_and_does_not_concern_it_is_said():
    found = session(Narrow(), kernels=("narrow",), dtypes=("e4m3",))
    assert not found.params(asked("full"))
    assert found.untaken == {"narrow": {"e4m3": NOT_APPLICABLE}}


def test_a_property_of_some_dtypes_is_asked_of_these():
    params = session(Ideal()).params(asked("full", dtypes=("e4m3", "e5m2")))
    assert [param.dtype for param in params] == ["e4m3", "e5m2"]


def test_a_kernel_that_raises_when_it_is_asked_is_tested():
    assert not KernelSupport(Raising(), "cpu").refusal("causal", "bf16")


@pytest.mark.parametrize("family", [*MASK_FAMILIES, SOFTMAX])
def test_every_family_has_samples(family):
    found = sample_problems(family, "bf16")
    assert found
    assert not KernelSupport(Ideal(), "cpu").refusal(family, "bf16")
    named = {"packed": "documents"}.get(family, family)  # documents alike
    assert all(each.mask.name == named for each in found) or family in {"composition", SOFTMAX}


def test_a_kernel_is_under_test_with_what_its_id_says():
    found = session(Ideal())
    (param,) = found.params(asked("causal", dtypes=("bf16",)))
    kernel = found.under_test(param)
    assert (kernel.name, kernel.dtype, kernel.family) == ("ideal", "bf16", "causal")


class OfPages(Ideal):
    """Takes keys in pages of 64 alone."""

    name = "of-pages"

    def concerns(self, problem: Problem) -> bool:
        return problem.paging is not None

    def unsupported(self, problem: Problem, device: str) -> str | None:
        return None if problem.paging.size == 64 else "pages of 64"


def test_properties_of_pages_are_asked_of_kernels_of_pages():
    class Plain(Ideal):
        name = "plain"

        def concerns(self, problem: Problem) -> bool:
            return problem.operation == "attention" and problem.paging is None

    both = {"dtypes": ("bf16",)}
    plain, paged = asked("full", **both), asked("full", **both, pagings=pagings())
    found = session(Plain(), OfPages())
    assert [param.id for param in found.params(plain)] == ["plain-bf16-full"]
    assert [param.id for param in found.params(paged)] == ["of-pages-bf16-full"]
    assert not found.untaken


@pytest.mark.parametrize("family", MASK_FAMILIES)
def test_every_family_has_samples_in_pages(family):
    assert all(each.paging for each in sample_problems(family, "bf16", ProblemKind(paged=True)))
    assert not KernelSupport(OfPages(), "cpu").refusal(family, "bf16", ProblemKind(paged=True))
    assert KernelSupport(OfPages(), "cpu").refusal(family, "bf16") == NOT_APPLICABLE


def test_a_softmax_has_no_pages():
    assert not sample_problems(SOFTMAX, "bf16", ProblemKind(paged=True))


@pytest.mark.parametrize("family", MASK_FAMILIES)
def test_every_family_has_samples_with_a_backward(family):
    assert all(
        each.backward for each in sample_problems(family, "bf16", ProblemKind(backward=True))
    )
    assert not KernelSupport(Ideal(), "cpu").refusal(family, "bf16", ProblemKind(backward=True))
    assert not sample_problems(family, "e4m3", ProblemKind(backward=True))


@pytest.mark.parametrize("family", MASK_FAMILIES)
def test_every_family_has_samples_of_what_score_mods_read(family):
    kind = ProblemKind(backward=True, captured=True)
    assert all(each.dcaptured for each in sample_problems(family, "bf16", kind))
    assert not KernelSupport(Ideal(), "cpu").refusal(family, "bf16", kind)
    without = Ideal()
    without.captured = False
    reason = "it gives no gradients of the tensors that a score mod reads"
    assert KernelSupport(without, "cpu").refusal(family, "bf16", kind) == reason


def test_a_kernel_of_gradients_alone_is_asked_for_them():
    class Alone(Ideal):
        name = "alone"

        def concerns(self, problem: Problem) -> bool:
            return problem.operation == "attention" and problem.backward

    both = {"dtypes": ("bf16",)}
    found = session(Alone())
    assert [p.id for p in found.params(asked("full", **both, backward=True))] == ["alone-bf16-full"]
    assert not found.untaken


def parts(properties: int, *subjects: Ideal, families: tuple[str, ...] = tuple(MASK_FAMILIES)):
    """``{test: (property, part)}`` of the tests that draw."""
    params = session(*subjects).params(asked(*families))
    return {
        (name, each.id): (name, each)
        for name in map(str, range(properties))
        for each in params
        if not each.refused
    }


def test_a_covering_has_all_but_the_triples():
    every = parts(9, Ideal(), Narrow())

    def asked_of(tests):
        found = [(name, p.kernel.name, p.dtype, p.family) for name, p in map(every.get, tests)]
        return {
            kind: {tuple(row[axis] for axis in kind) for row in found}
            for kind in [(0, 1), (0, 2), (0, 3), (1, 2, 3)]
        }

    few = covering(every)
    assert asked_of(few) == asked_of(every)
    assert len(few) < len(every) / 4
    assert few == covering(dict(reversed(every.items())))  # whoever collected them


def test_of_one_property_nothing_is_left_out():
    every = parts(1, Ideal(), Narrow(), families=("full", "causal"))
    assert covering(every) == set(every)
