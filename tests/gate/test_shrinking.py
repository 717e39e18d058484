"""How a failing Case is shrunk to a smaller one."""

from msgspec.structs import replace

from attncheck.core.mod_spec import Spec
from attncheck.gate.gate_failures import plainer_cases, shrink_case
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.load import load_subject
from attncheck.verify.run_case import new_record

LARGE = Case(
    problem=Problem(
        batch=2,
        heads=6,
        kv_heads=2,
        query=77,
        kv=93,
        head_dim=128,
        dtype="bf16",
        mask=Spec.of("padding", lengths=[93, 40]),
        score=Spec.of("softcap", cap=20.0),
        distribution="outliers",
        seed=7,
    )
)


def ask_failing_where(wrong):
    """An ``ask`` of a kernel that fails where ``wrong`` holds for the Problem."""

    def ask(case):
        record = new_record(load_subject("ideal"), case, device="cpu", variant="", environment="")
        return replace(record, status="error" if wrong(case.problem) else "pass")

    return ask


def shrink(wrong, seconds=60.0, clock=None, case=LARGE):
    ask = ask_failing_where(wrong)
    options = {"seconds": seconds} | ({"clock": clock} if clock else {})
    record = shrink_case(ask(case), ask, lambda _: True, **options)
    return record and Case.from_json(record.case).problem


def test_kernel_that_always_fails_shrinks_to_the_plainest_case():
    problem = shrink(lambda _: True)
    assert str(problem) == "bf16 full B1 H1 Q1 K1 D16 normal seed 0"


def test_shrinking_keeps_only_what_the_failure_needs():
    problem = shrink(lambda problem: problem.kv > 40 and problem.heads > problem.kv_heads)
    assert (problem.heads, problem.kv_heads, problem.query) == (2, 1, 1)
    assert problem.kv == 41
    assert problem.mask == Spec.of("full")


def test_shrinking_adapts_a_mask_that_the_failure_needs():
    problem = shrink(lambda problem: problem.mask.name == "padding" and problem.batch == 2)
    assert (problem.kv, problem.query) == (1, 1)


def test_shrinking_does_not_accept_another_kind_of_failure():
    ask = ask_failing_where(lambda _: True)
    failed = ask(LARGE)

    def crashes(case):
        return replace(ask(case), status="crash")

    assert shrink_case(failed, crashes, lambda _: True, seconds=60.0) is None


def test_shrinking_stops_when_its_time_is_over():
    ticks = iter(range(10_000))
    problem = shrink(lambda _: True, seconds=3, clock=lambda: next(ticks))
    assert problem is not None
    assert str(problem) != "bf16 full B1 H1 Q1 K1 D16 normal seed 0"


def test_plainer_cases_exclude_the_case_itself():
    assert all(each.id != LARGE.id for each in plainer_cases(LARGE))
