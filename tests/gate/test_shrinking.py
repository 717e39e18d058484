"""What a failing Case becomes."""

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


def fails_where(wrong):
    """``ask`` of a kernel that fails where ``wrong`` of its Problem."""

    def ask(case):
        record = new_record(load_subject("ideal"), case, device="cpu", variant="", environment="")
        import msgspec

        return msgspec.structs.replace(record, status="error" if wrong(case.problem) else "pass")

    return ask


def shrunk(wrong, seconds=60.0, clock=None, case=LARGE):
    ask = fails_where(wrong)
    how = {"seconds": seconds} | ({"clock": clock} if clock else {})
    found = shrink_case(ask(case), ask, lambda _: True, **how)
    return found and Case.from_json(found.case).problem


def test_a_kernel_that_always_fails_has_the_plainest_case():
    found = shrunk(lambda _: True)
    assert str(found) == "bf16 full B1 H1 Q1 K1 D16 normal seed 0"


def test_what_matters_stays_and_the_rest_goes():
    found = shrunk(lambda problem: problem.kv > 40 and problem.heads > problem.kv_heads)
    assert (found.heads, found.kv_heads, found.query) == (2, 1, 1)
    assert found.kv == 41
    assert found.mask == Spec.of("full")


def test_a_mask_that_matters_is_made_to_fit():
    found = shrunk(lambda problem: problem.mask.name == "padding" and problem.batch == 2)
    assert (found.kv, found.query) == (1, 1)


def test_a_failure_of_another_kind_is_not_the_same():
    ask = fails_where(lambda _: True)
    failed = ask(LARGE)

    def crashes(case):
        import msgspec

        return msgspec.structs.replace(ask(case), status="crash")

    assert shrink_case(failed, crashes, lambda _: True, seconds=60.0) is None


def test_it_ends_when_its_time_is_up():
    ticks = iter(range(10_000))
    found = shrunk(lambda _: True, seconds=3, clock=lambda: next(ticks))
    assert found is not None
    assert str(found) != "bf16 full B1 H1 Q1 K1 D16 normal seed 0"


def test_no_step_is_the_case_itself():
    assert all(each.id != LARGE.id for each in plainer_cases(LARGE))
