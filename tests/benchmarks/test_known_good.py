"""False alarms are counted: a right kernel has none, and a wrong one shows that they are seen."""

import argparse
import json
import time
from pathlib import Path

import known_good
from known_good import Task, tasks, work
from known_good_page import page, summary

PLANTED = Path(__file__).parents[1] / "gate" / "planted_kernels.py"


def done(name, *, each=2, seconds=60.0):
    task = Task(
        kernel=f"{PLANTED}::{name}",
        seed=1,
        device="cpu",
        tier="smoke",
        stages=("contract",),
        isolated=False,
        each=each,
        until=time.time() + seconds,
    )
    return work(task) | {"environment": {"device": "cpu", "torch": "2"}, "tier": "smoke"}


def test_each_question_is_asked_with_other_numbers_and_only_what_fails_is_an_alarm():
    right = done("right")
    assert right["alarms"] == right["harness"] == []
    seeds = {row[0] for row in right["rows"]}
    assert len(seeds) == len(right["rows"]) > 10
    assert {row[3] for row in right["rows"]} <= {"pass", "warn", "unsupported"}

    wrong = done("of_another_dtype", each=1)
    assert wrong["alarms"]
    told = summary([right, wrong, right])
    taken = [row for row in (*right["rows"], *wrong["rows"]) if row[3] != "unsupported"]
    assert told["cases"] == len(taken)  # what is asked again is one
    assert len(told["alarms"]) == len(wrong["alarms"])
    text = page(json.loads(json.dumps(told)))
    assert f"{told['cases']:,} cases, {len(wrong['alarms'])} alarms" in text
    assert "(contract): out.dtype=torch.float64, but should be torch." in text
    assert "So fewer than one in" in page(summary([right]))


def test_nothing_is_asked_when_the_time_is_over():
    assert done("right", seconds=-1.0)["rows"] == []


def test_what_is_gone_on_with_has_other_seeds(monkeypatch):
    monkeypatch.setattr(known_good, "_SEEDS", 8)
    given = argparse.Namespace(
        **dict.fromkeys(("kernels", "stages")),
        device="cpu",
        tier="smoke",
        seconds=1.0,
        in_process=False,
        each=8,
    )
    found = [(task.kernel, task.seed) for task in tasks(given, {"ideal": 3})]
    assert len(found) == len(set(found))
    assert [seed for name, seed in found if name == "ideal"] == list(range(3, 11))
    assert [seed for name, seed in found if name == "triton-flash2"] == [0, 1]
