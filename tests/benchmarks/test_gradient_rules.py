"""The benchmark of rules for gradients: judged as everywhere, and the page says what was found."""

import gradient_rules
import gradient_rules_page
import pytest
import torch
from gradient_rules import Remembered, Task, tasks, work
from peers import GRADIENT_PEERS as PEERS
from planted_gradients import FAULTS
from spread import difference

from attncheck.core.outputs import Outputs
from attncheck.inputs.problem import Case
from attncheck.subjects.ideal import Ideal
from attncheck.verify.allowances import gradient_allowance
from attncheck.verify.evidence_builder import EvidenceBuilder

TASK = Task("cpu", "fp16", 70, 0, "causal")


@pytest.fixture(scope="module")
def rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gradient_rules.OTHERS, "cpu", ("sdpa-math",))  # interpreted ones take long
        return work(TASK)


def test_right_kernels_pass_and_faults_of_the_mask_fail(rows):
    right = {row["name"]: row["status"] for row in rows if row["what"] == "right"}
    assert set(right) == {*gradient_rules.TILINGS, "sdpa-math"}
    assert set(right.values()) == {"pass"}
    wrong = {row["name"]: row for row in rows if row["what"] == "fault"}
    assert set(wrong) == {fault.name for fault in FAULTS if fault.kind == "causal"}
    assert {row["status"] for row in wrong.values()} == {"fail"}
    assert all(row["effect"] > 1 for row in wrong.values())
    assert all(set(row["peers"]) == set(PEERS) for row in rows)
    assert all(set(row["shares"]) == {"dq", "dk", "dv"} for row in rows)


class Asked:
    device, lengths, seeds = "cpu", [64, 32], 2
    dtypes = ("fp32", "bf16")


def test_every_fault_has_a_task_in_each_of_its_dtypes():
    asked = tasks(Asked())
    for fault in FAULTS:
        for dtype in set(fault.dtypes) & set(Asked.dtypes):
            assert any(fault in task.faults for task in asked if task.dtype == dtype)
    assert len(set(asked)) == len(asked) == 2 * 2 * 2 * len({fault.kind for fault in FAULTS})


ABOUT = {"environments": [{"device": "cpu", "torch": "2", "triton": "", "python": "3"}]}
ABOUT |= {"done": 1, "of": 2}


def line(page, name):
    return next(text for text in page.splitlines() if text.startswith(f"| {name} |"))


def test_the_page_counts_by_fault_and_dtype(rows):
    shown = gradient_rules_page.page(ABOUT | {"rows": rows})
    assert "## Right kernels that attncheck fails: 0\n\nNone." in shown
    assert "## Visible and not caught: 0\n\nNone." in shown
    assert "## Never caught by attncheck\n\nNone." in shown
    assert line(shown, "causal +1").startswith("| causal +1 | – | – | 1 of 1 | – | 100 |")
    assert "## In fp16" in shown
    assert "delta missing | – | – | – | – | – |" in shown


def test_the_page_lists_what_is_missed_and_whom_it_wrongs(rows):
    quiet = [row | {"status": "pass"} for row in rows if row["name"] == "causal +1"]
    alarm = [row | {"status": "fail", "case": {"problem": 1}} for row in rows[:1]]
    shown = gradient_rules_page.page(ABOUT | {"rows": [*quiet, *alarm]})
    assert "## Visible and not caught: 1" in shown
    assert "* causal +1: fp16" in shown
    assert line(shown, "causal +1").startswith("| causal +1 | – | – | 0 of 1 | – | 0 |")
    assert f"* {rows[0]['name']}" in shown
    assert '{"problem": 1}' in shown


def test_a_rule_that_refuses_right_kernels_tells_nothing(rows):
    strict = dict.fromkeys(PEERS, False)
    shown = gradient_rules_page.page(ABOUT | {"rows": [row | {"peers": strict} for row in rows]})
    count = sum(row["what"] == "fault" for row in rows)
    assert f"| fp16: faults caught % | {count} | 100 | 100 | 100 | 100 | 100 |" in shown
    assert f"| fp16: faults told % | {count} | 100 | 0 | 0 | 0 | 0 |" in shown


def test_the_judge_is_asked_once_for_a_forward():
    evidence = EvidenceBuilder(Case(problem=TASK.problem), "cpu").evidence
    outputs, remembered = Ideal().run(evidence.inputs), Remembered()
    arithmetic = Ideal().arithmetic(TASK.problem, "cpu")
    first = remembered(evidence, arithmetic, outputs)
    real = gradient_allowance(evidence, arithmetic, outputs)
    assert all(torch.equal(first.bounds[name], bound) for name, bound in real.bounds.items())
    again = Outputs(outputs.out.clone(), outputs.lse.clone())
    assert remembered(evidence, arithmetic, again) is first
    other = Outputs(outputs.out + 1, outputs.lse)
    assert remembered(evidence, arithmetic, other) is not first
    assert remembered(evidence, arithmetic, Outputs(outputs.out, None)) is not first


def test_gradients_count_in_the_spread():
    out, gradient = torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2, 2)
    one = Outputs(out, None, gradient, gradient, gradient, torch.zeros(1))
    other = Outputs(out, None, gradient, gradient + 3, gradient, torch.ones(1))
    assert difference(one, other) == [0, 0, 0, 0, 0, 0, 3, 3, 0, 0, 1, 1]
