"""The calibration benchmark: its tasks and rows, resuming a run, and its page."""

import argparse
import json
import math

import calibration
import profiles
import pytest
from calibration_page import page
from calibration_summary import merged, summary
from random_problems import problem as random_problem

from attncheck.core.declared_arithmetic import HOPPER_FP8
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.ideal import Ideal
from attncheck.verify.evidence_builder import EvidenceBuilder


@pytest.fixture
def options(tmp_path):
    """``options(**changes)``: the options of a short run."""
    defaults = {"device": "cpu", "problems": (26, 29), "kernels": ["ideal"], "longest": 64}
    defaults |= {"processes": 1, "seconds": math.inf, "json": tmp_path / "runs.json"}
    defaults |= {"backward": False}
    return lambda **changes: argparse.Namespace(**(defaults | changes))


def test_run_is_resumed_from_its_json(options):
    first = calibration.measure(options())
    calibration.write_json(options().json, first)
    resumed = calibration.measure(options(problems=(26, 30)))
    rows = resumed["runs"][0]["rows"]
    assert [row["n"] for row in rows] == [26, 27, 28, 29]
    assert rows[:3] == first["runs"][0]["rows"]
    assert {row["status"] for row in rows} <= {"pass", "warn"}


def test_tasks_have_one_structure_each_and_leave_out_finished_problems(options):
    each = calibration.PER_STRUCTURE["cpu"]
    first, end = each - 2, 2 * each + 1
    tasks = calibration.tasks(options(problems=(first, end)), {each})
    assert [len(task.numbers) for task in tasks] == [2, each - 1, 1]
    assert all(len({n // each for n in task.numbers}) == 1 for task in tasks)


def test_every_kernel_gets_a_fifth_of_a_gpus_problems_and_flex_those_of_one_shape(options):
    (task,) = calibration.tasks(options(device="cuda", problems=(0, 60)), set())
    for name in calibration.KERNELS["cuda"]:
        turns = [n for n in task.numbers if calibration.is_due(name, n, task)]
        assert len(turns) >= len(task.numbers) / 5, name
    later = [n + calibration.PER_STRUCTURE["cuda"] for n in task.numbers]
    assert not any(calibration.is_due("flex", n, task) for n in later)


@pytest.mark.parametrize("device", calibration.BACKWARD)
def test_every_kernel_with_gradients_gets_problems(options, device):
    backward = options(device=device, problems=(0, 10), kernels=None, backward=True)
    (task,) = calibration.tasks(backward, set())
    assert task.kernels == calibration.BACKWARD[device]
    for name in task.kernels:
        assert any(calibration.is_due(name, n, task) for n in task.numbers), name
        assert calibration.make_kernel(name, 0).name == name
        assert calibration.make_kernel(name, 0).backward, name


def test_gradients_are_judged_beside_the_forward(options):
    kernels = ["ideal", "sdpa-flash", "flex"]
    run = calibration.measure(options(backward=True, problems=(0, 2), kernels=kernels))["runs"][0]
    by_kernel = {name: [r for r in run["rows"] if r["kernel"] == name] for name in kernels}
    assert {row["status"] for row in by_kernel["ideal"]} == {"pass"}
    for row in by_kernel["ideal"]:
        assert all(0 <= row[f"{name}_over_bound"] <= 1 for name in ("dq", "dk", "dv"))
    assert {row["status"] for row in by_kernel["flex"]} == {"unsupported"}
    totals = summary(run)
    judgements = sum(row["status"] != "unsupported" for row in run["rows"])
    assert (totals["problems"], totals["judgements"]) == (2, judgements)
    assert ("flex: torch: FlexAttention does not support backward on CPU", 2) in totals["refused"]
    text = page([totals])
    assert "| dtype | kernel | dQ ÷ bound | dK ÷ bound | dV ÷ bound | dsink ÷ bound |" in text
    assert "### Not taken" in text


class Unscaled(Ideal):
    """Does not multiply gradients by the scale."""

    def scaled(self, total, scale):
        return total


def test_wrong_gradient_is_an_alarm(options, monkeypatch):
    monkeypatch.setattr(calibration, "make_kernel", lambda name, number: Unscaled())
    runs = calibration.measure(options(backward=True, problems=(0, 1)))["runs"]
    (row,) = runs[0]["rows"]
    assert (row["status"], row["rule"]) == ("fail", "bound")
    assert row["out_over_bound"] <= 1 < row["dq_over_bound"]
    assert Problem.from_json(row["case"]["problem"]).backward
    assert summary(runs[0])["alarms"] == 1


def test_summary_has_the_warning_of_elements_that_were_not_judged():
    row = {"n": 1, "kernel": "ideal", "dtype": "bf16", "status": "pass", "seconds": 1.0}
    row |= {"distribution": "normal", "mask": "full", "score": "none"}
    row |= {"warnings": ["not judged: 3 of 9 elements of dq have no finite bound"]}
    assert summary({"environment": {}, "rows": [row]})["quiet"] == [
        ("ideal bf16 pass: not judged: … of … elements of dq have no finite bound", 1)
    ]


@pytest.mark.parametrize(("backward", "stem"), [(False, "cal"), (True, "gradients-cal")])
def test_default_file_names_differ_for_gradients(tmp_path, backward, stem):
    files = argparse.Namespace(backward=backward, json=tmp_path / "a.json", summary=None, md=None)
    calibration.set_default_paths(files)
    assert files.json == tmp_path / "a.json"
    assert files.md.name == f"{stem}ibration.md"


class HalfAsLarge(Ideal):
    def normalised(self, out, total):
        return super().normalised(out, total) / 2


def test_failing_kernel_is_listed_with_its_case(options, monkeypatch):
    monkeypatch.setattr(calibration, "make_kernel", lambda name, number: HalfAsLarge())
    runs = calibration.measure(options(problems=(26, 27)))["runs"]
    (row,) = runs[0]["rows"]
    assert (row["status"], row["rule"]) == ("fail", "bound")
    assert row["out_over_bound"] > 1
    assert Problem.from_json(row["case"]["problem"]) == random_problem(
        26, longest=64, most_scores=2**17, per_structure=calibration.PER_STRUCTURE["cpu"]
    )
    text = page([summary(run) for run in runs])
    assert "### Fails and errors: 1" in text
    assert json.dumps(row["case"]) in text


def test_page_shows_largest_percentile_and_median():
    rows = [
        {
            "n": n,
            "kernel": "ideal",
            "dtype": "bf16",
            "status": "pass",
            "rows": 4,
            "rows_unbounded": 0,
            "jumps": 0,
            "out_over_bound": n / 200,
            "seconds": 0.01,
            "distribution": "normal",
            "mask": "full",
            "score": "none",
        }
        for n in range(1, 201)
    ]
    env = {"device": "cpu", "torch": "2", "triton": "", "python": "3"}
    text = page([summary({"environment": env, "rows": rows})])
    assert "| bf16 | ideal | 1 / 0.99 / 0.5 |" in text
    assert "200 problems, 200 judgements; 10 ms a problem" in text
    assert "| bf16 | ideal | 200 | 200 | 0 | 0 | 0 | 0 | 800 | 0 | 0 |" in text


def test_runs_of_one_machine_are_merged_and_no_judgement_counts_twice():
    def run(device, *rows):
        return {
            "environment": {"device": device},
            "rows": [{"n": n, "kernel": kernel} for n, kernel in rows],
        }

    runs = merged([run("a", (1, "x"), (2, "x")), run("b", (1, "x")), run("a", (2, "x"), (2, "y"))])
    assert [len(one["rows"]) for one in runs] == [3, 1]


@pytest.mark.parametrize("dtype", ["tf32", "e4m3"])
def test_kernel_is_judged_by_each_profile(dtype):
    """The tight profile is the kernel's own; the loose one has larger bounds."""
    case = Case(problem=Problem(query=40, head_dim=16, dtype=dtype))
    rows = profiles.judged("ideal", EvidenceBuilder(case, "cpu"))
    assert [row["profile"] for row in rows] == ["its own", *profiles.CHANGES[dtype]]
    tight, loose = ("to nearest", "truncated") if dtype == "tf32" else ("fp32 sums", "13-bit sums")
    shares = {row["profile"]: row["out_over_bound"] for row in rows}
    assert shares["its own"] == shares[tight] > shares[loose] > 0
    env = {"device": "cpu", "torch": "2", "triton": ""}
    text = profiles.page({"environment": env, "rows": rows})
    assert f"| {dtype} | ideal | {loose} | 1 | 0 | 0 |" in text


def test_declaring_a_profile_changes_one_kernel_only():
    problem = Problem(query=8, dtype="e4m3")
    changed = profiles.declaring(Ideal(), profiles.CHANGES["e4m3"]["13-bit sums"])
    assert changed.arithmetic(problem, "cpu").values == HOPPER_FP8
    assert Ideal().arithmetic(problem, "cpu").values != HOPPER_FP8
