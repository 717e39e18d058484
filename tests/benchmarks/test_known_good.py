"""The benchmark that counts false alarms on known-good kernels."""

import argparse
import json
import time
from pathlib import Path

import known_good
from known_good import Task, tasks, work
from known_good_page import page, summary

PLANTED = Path(__file__).parents[1] / "gate" / "planted_kernels.py"


def run_kernel(name, *, each=2, seconds=60.0):
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


def test_each_row_has_its_own_seed_and_only_failures_are_alarms():
    """A right kernel raises no alarm; a wrong one does, and so shows that alarms are counted."""
    right = run_kernel("right")
    assert right["alarms"] == right["harness"] == []
    seeds = {row[0] for row in right["rows"]}
    assert len(seeds) == len(right["rows"]) > 10
    assert {row[3] for row in right["rows"]} <= {"pass", "warn", "unsupported"}

    wrong = run_kernel("of_another_dtype", each=1)
    assert wrong["alarms"]
    totals = summary([right, wrong, right])
    supported = [row for row in (*right["rows"], *wrong["rows"]) if row[3] != "unsupported"]
    assert totals["cases"] == len(supported)  # a repeated run counts once
    assert len(totals["alarms"]) == len(wrong["alarms"])
    text = page(json.loads(json.dumps(totals)))
    assert f"{totals['cases']:,} cases, {len(wrong['alarms'])} alarms" in text
    assert "(contract): out.dtype=torch.float64, but should be torch." in text
    assert "So fewer than one in" in page(summary([right]))


def test_no_question_is_asked_after_the_time_limit():
    assert run_kernel("right", seconds=-1.0)["rows"] == []


def test_resumed_run_uses_new_seeds(monkeypatch):
    monkeypatch.setattr(known_good, "_SEEDS", 8)
    options = argparse.Namespace(
        **dict.fromkeys(("kernels", "stages")),
        device="cpu",
        tier="smoke",
        seconds=1.0,
        in_process=False,
        each=8,
    )
    seeds = [(task.kernel, task.seed) for task in tasks(options, {"ideal": 3})]
    assert len(seeds) == len(set(seeds))
    assert [seed for name, seed in seeds if name == "ideal"] == list(range(3, 11))
    assert [seed for name, seed in seeds if name == "triton-flash2"] == [0, 1]
