"""``attncheck.check`` and ``@attncheck.given`` as used in a kernel author's test file."""

import re

import pytest
import torch
from hypothesis import seed, settings
from hypothesis import strategies as st
from tests.messages import one_line
from torch.nn.functional import scaled_dot_product_attention

import attncheck
from attncheck.cases.strategies.sizes import shapes
from attncheck.core.errors import UsageError
from attncheck.core.mod_spec import Spec
from attncheck.diagnose import diagnosis
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.ideal import Ideal

CAUSAL = Problem(query=5, kv=7, head_dim=8, dtype="fp32", mask=Spec.of("causal"))
DOCUMENT = CAUSAL.replace(mask=Spec.of("document", lengths=[3, 4]))


def right(query, key, value, is_causal=False, scale=None, enable_gqa=False):
    return scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


def bottom_right(query, key, value, is_causal=False, scale=None):
    rows, keys = query.shape[-2], key.shape[-2]
    mask = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows) if is_causal else None
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def raising(query, key, value, is_causal=False, scale=None):
    raise RuntimeError("illegal memory access")


def test_check_returns_the_records_of_a_right_function():
    (record,) = attncheck.check(right, CAUSAL, device="cpu")
    assert record.status == "pass"


def test_check_of_a_wrong_function_raises_its_diagnosis():
    with pytest.raises(AssertionError, match="FAIL bound compare: out") as raised:
        attncheck.check(bottom_right, CAUSAL, device="cpu")
    assert "test_check.py::bottom_right on cpu" in str(raised.value)


def test_check_of_a_raising_function_reports_its_error():
    with pytest.raises(AssertionError, match="RuntimeError: illegal memory access"):
        attncheck.check(raising, CAUSAL, device="cpu")


def test_check_asks_any_question():
    case = Case(problem=CAUSAL, question="future_keys", parameters={"row": 0})
    for problem, question in ((CAUSAL, "zero_values"), (case, "compare")):
        (record,) = attncheck.check(Ideal(), problem, question=question, device="cpu")
        assert record.status == "pass"
        assert record.case["question"] != "compare"


def test_check_of_an_unsupported_problem_does_not_fail():
    (record,) = attncheck.check("sdpa-math", CAUSAL.replace(dtype="e4m3"), device="cpu")
    assert record.status == "unsupported"


def test_check_reports_every_wrong_answer_at_once(monkeypatch):
    from attncheck.suite import python_api

    check_cases = python_api.check_cases("bf16")
    monkeypatch.setattr(
        python_api,
        "check_cases",
        lambda _: [case for case in check_cases if case.name.startswith("causal")],
    )
    monkeypatch.setattr(python_api, "find_claims", lambda *_, **__: None)
    searches = []
    search = diagnosis.diagnose_failure
    monkeypatch.setattr(
        diagnosis, "diagnose_failure", lambda *a, **k: searches.append(a) or search(*a, **k)
    )
    with pytest.raises(AssertionError) as raised:
        attncheck.check(bottom_right, device="cpu")
    # A page as of the command, which names the cause of both once, and without maps.
    first, *page = str(raised.value).splitlines()
    assert first.startswith("FAIL ")
    assert "bottom_right: 3 of 5 questions failed" in first
    assert "1 cause explains 3 of 3 failures" in page
    assert sum(line.startswith("  cause ") for line in page) == 1
    assert len(page) < 10
    assert len(searches) == 1
    # Nothing to repeat until a test has kept the failures.
    assert "Reproduce" not in str(raised.value)
    text, _ = raised.value.keep("test")
    assert re.search(r"Reproduce: attncheck repro \w+$", text)


def test_check_of_a_function_that_gives_no_out_ends_after_a_dozen_answers():
    def nothing(query, key, value, is_causal=False, scale=None): ...

    with pytest.raises(AssertionError, match=r"12 of 12 questions failed, .* more were not asked"):
        attncheck.check(nothing, device="cpu")


def test_check_that_tested_nothing_fails(monkeypatch):
    from attncheck.suite import python_api

    question = type("One", (), {"name": "fp8", "case": FP8})
    monkeypatch.setattr(python_api, "check_cases", lambda _: [question])
    with pytest.raises(AssertionError, match="nothing was tested: sdpa-math takes none of 1"):
        attncheck.check("sdpa-math", device="cpu", dtypes="e4m3")


FP8 = Case(problem=CAUSAL.replace(dtype="e4m3"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kernel": 3}, "kernel 'int' is int, and must be "),
        ({"kernel": right, "problem": 3}, "problem is int: it must be a Problem or a Case."),
        ({"kernel": right, "dtypes": ()}, "dtypes is empty"),
        ({"kernel": right, "device": "tpu"}, "device 'tpu' is not known: choose from cpu, cuda."),
        ({"kernel": "flash9"}, "kernel 'flash9' is not known"),
        ({"kernel": right, "problem": CAUSAL, "question": "why"}, "question 'why' is not known"),
        ({"kernel": right, "dtype": "bf16"}, "argument 'dtype' is not known: did you mean"),
    ],
    ids=["kernel", "problem", "dtypes", "device", "name", "question", "argument"],
)
def test_check_rejects_bad_arguments_in_one_line(arguments, message):
    with one_line(UsageError, message):
        attncheck.check(**({"device": "cpu"} | arguments))


SMALL = {"shapes": shapes(longest=9, most_heads=2, head_dims=(8,)), "dtypes": ("fp32",)}


def causal(*, dimensions):
    return st.just(Spec.of("causal"))


def test_given_draws_problems_without_a_deadline_until_one_fails():
    @seed(0)
    @attncheck.given(attncheck.problems(**SMALL, masks=causal))
    def holds(problem: Problem) -> None:
        attncheck.check(bottom_right, problem, device="cpu")

    assert holds._hypothesis_internal_use_settings.deadline is None
    with pytest.raises(AssertionError, match="fp32 causal B1 H1 Q1 K2 D8"):
        holds()


def test_given_respects_the_users_settings():
    examples = []

    @attncheck.given(problem=attncheck.problems(**SMALL))
    @settings(max_examples=3, database=None)
    def holds(problem: Problem) -> None:
        examples.append(problem)

    holds()
    assert len(examples) == 3


def test_given_redraws_unsupported_problems():
    records = []

    @attncheck.given(attncheck.problems(**(SMALL | {"dtypes": ("fp32", "e4m3")})))
    @settings(max_examples=5, database=None, derandomize=True, deadline=None)
    def holds(problem: Problem) -> None:
        records.extend(attncheck.check("sdpa-math", problem, device="cpu"))

    holds()
    assert {record.status for record in records} == {"pass"}


def heads_inside(q, k, v, window_size=(-1, -1)):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if q.shape[-1] != 64 or window_size != (-1, -1):
        raise NotImplementedError("64 alone, and no window")
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def test_check_stays_within_the_detected_capabilities():
    """Outside the detected convention and head_dim the function raises, which is no failure."""
    records = attncheck.check(heads_inside, device="cpu")
    passed = [record for record in records if record.status != "unsupported"]
    problems = [Case.from_json(record.case).problem for record in passed]
    assert problems
    assert {problem.head_dim for problem in problems} == {64}
