"""The calibration: what it keeps of a judgement, what it goes on with, and what its page says."""

import argparse
import json
import math

import calibration
import profiles
import pytest
from calibration_page import page
from calibration_summary import merged, summary
from random_problems import problem

from attncheck.core.declared_arithmetic import HOPPER_FP8
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.ideal import Ideal
from attncheck.verify.evidence_builder import EvidenceBuilder


def asked(tmp_path, **changes):
    given = {"device": "cpu", "problems": (26, 29), "kernels": ["ideal"], "longest": 64}
    given |= {"processes": 1, "seconds": math.inf, "json": tmp_path / "found.json"}
    given |= {"backward": False}
    return argparse.Namespace(**(given | changes))


def test_a_run_is_gone_on_with(tmp_path):
    first = calibration.measure(asked(tmp_path))
    calibration.write_json(tmp_path / "found.json", first)
    more = calibration.measure(asked(tmp_path, problems=(26, 30)))
    rows = more["runs"][0]["rows"]
    assert [row["n"] for row in rows] == [26, 27, 28, 29]
    assert rows[:3] == first["runs"][0]["rows"]
    assert {row["status"] for row in rows} <= {"pass", "warn"}


def test_tasks_are_of_one_structure_and_leave_out_what_is_done(tmp_path):
    each = calibration.PER_STRUCTURE["cpu"]
    first, end = each - 2, 2 * each + 1
    found = calibration.tasks(asked(tmp_path, problems=(first, end)), {each})
    assert [len(task.numbers) for task in found] == [2, each - 1, 1]
    assert all(len({n // each for n in task.numbers}) == 1 for task in found)


def test_every_kernel_has_its_turn_on_a_gpu(tmp_path):
    (task,) = calibration.tasks(asked(tmp_path, device="cuda", problems=(0, 60)), set())
    for name in calibration.KERNELS["cuda"]:
        turns = [n for n in task.numbers if calibration.due(name, n, task)]
        assert len(turns) >= len(task.numbers) / 5, name
    later = [n + calibration.PER_STRUCTURE["cuda"] for n in task.numbers]
    assert not any(calibration.due("flex", n, task) for n in later)


def test_every_kernel_of_gradients_has_its_turn(tmp_path):
    for device, kernels in calibration.BACKWARD.items():
        given = asked(tmp_path, device=device, problems=(0, 10), kernels=None, backward=True)
        (task,) = calibration.tasks(given, set())
        assert task.kernels == kernels
        for name in kernels:
            assert any(calibration.due(name, n, task) for n in task.numbers), name
            assert calibration.made(name, 0).name == name
            assert calibration.made(name, 0).backward, name


def test_gradients_are_judged_beside_the_forward(tmp_path):
    given = asked(tmp_path, backward=True, problems=(0, 2), kernels=["ideal", "sdpa-flash", "flex"])
    run = calibration.measure(given)["runs"][0]
    by_kernel = {name: [r for r in run["rows"] if r["kernel"] == name] for name in given.kernels}
    assert {row["status"] for row in by_kernel["ideal"]} == {"pass"}
    for row in by_kernel["ideal"]:
        assert all(0 <= row[f"{name}_over_bound"] <= 1 for name in ("dq", "dk", "dv"))
    assert {row["status"] for row in by_kernel["flex"]} == {"unsupported"}
    told = summary(run)
    assert (told["problems"], told["judgements"]) == (2, sum(map(taken, run["rows"])))
    assert ("flex: torch: FlexAttention does not support backward on CPU", 2) in told["refused"]
    shown = page([told])
    assert "| dtype | kernel | dQ ÷ bound | dK ÷ bound | dV ÷ bound | dsink ÷ bound |" in shown
    assert "### Not taken" in shown


def taken(row):
    return row["status"] != "unsupported"


class Unscaled(Ideal):
    def scaled(self, total, scale):
        return total


def test_a_wrong_gradient_is_an_alarm(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "made", lambda name, number: Unscaled())
    found = calibration.measure(asked(tmp_path, backward=True, problems=(0, 1)))
    (row,) = found["runs"][0]["rows"]
    assert (row["status"], row["rule"]) == ("fail", "bound")
    assert row["out_over_bound"] <= 1 < row["dq_over_bound"]
    assert Problem.from_json(row["case"]["problem"]).backward
    assert summary(found["runs"][0])["alarms"] == 1


def test_what_was_not_judged_is_said():
    row = {"n": 1, "kernel": "ideal", "dtype": "bf16", "status": "pass", "seconds": 1.0}
    row |= {"distribution": "normal", "mask": "full", "score": "none"}
    row |= {"warnings": ["not judged: 3 of 9 elements of dq have no finite bound"]}
    told = summary({"environment": {}, "rows": [row]})
    assert told["quiet"] == [
        ("ideal bf16 pass: not judged: … of … elements of dq have no finite bound", 1)
    ]


@pytest.mark.parametrize(("backward", "stem"), [(False, "cal"), (True, "gradients-cal")])
def test_files_of_gradients_have_names_of_their_own(tmp_path, backward, stem):
    given = argparse.Namespace(backward=backward, json=tmp_path / "a.json", summary=None, md=None)
    calibration.named(given)
    assert given.json == tmp_path / "a.json"
    assert given.md.name == f"{stem}ibration.md"


class HalfAsLarge(Ideal):
    def normalised(self, out, total):
        return super().normalised(out, total) / 2


def test_a_wrong_kernel_is_listed_with_its_case(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "made", lambda name, number: HalfAsLarge())
    found = calibration.measure(asked(tmp_path, problems=(26, 27)))
    (row,) = found["runs"][0]["rows"]
    assert (row["status"], row["rule"]) == ("fail", "bound")
    assert row["out_over_bound"] > 1
    assert Problem.from_json(row["case"]["problem"]) == problem(
        26, longest=64, most_scores=2**17, per_structure=calibration.PER_STRUCTURE["cpu"]
    )
    shown = page([summary(run) for run in found["runs"]])
    assert "### Fails and errors: 1" in shown
    assert json.dumps(row["case"]) in shown


def test_the_page_shows_largest_percentile_and_median():
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
    shown = page([summary({"environment": env, "rows": rows})])
    assert "| bf16 | ideal | 1 / 0.99 / 0.5 |" in shown
    assert "200 problems, 200 judgements; 10 ms a problem" in shown
    assert "| bf16 | ideal | 200 | 200 | 0 | 0 | 0 | 0 | 800 | 0 | 0 |" in shown


def test_runs_of_one_machine_are_one_and_no_judgement_counts_twice():
    def run(device, *rows):
        named = [{"n": n, "kernel": kernel} for n, kernel in rows]
        return {"environment": {"device": device}, "rows": named}

    found = merged([run("a", (1, "x"), (2, "x")), run("b", (1, "x")), run("a", (2, "x"), (2, "y"))])
    assert [len(one["rows"]) for one in found] == [3, 1]


@pytest.mark.parametrize("dtype", ["tf32", "e4m3"])
def test_a_kernel_is_judged_by_each_profile(dtype):
    asked = Problem(query=40, head_dim=16, dtype=dtype)
    rows = profiles.judged("ideal", EvidenceBuilder(Case(problem=asked), "cpu"))
    assert [row["profile"] for row in rows] == ["its own", *profiles.CHANGES[dtype]]
    tight, loose = ("to nearest", "truncated") if dtype == "tf32" else ("fp32 sums", "13-bit sums")
    shares = {row["profile"]: row["out_over_bound"] for row in rows}
    assert shares["its own"] == shares[tight] > shares[loose] > 0
    env = {"device": "cpu", "torch": "2", "triton": ""}
    shown = profiles.page({"environment": env, "rows": rows})
    assert f"| {dtype} | ideal | {loose} | 1 | 0 | 0 |" in shown


def test_a_profile_is_declared_of_one_kernel_alone():
    asked = Problem(query=8, dtype="e4m3")
    changed = profiles.declaring(Ideal(), profiles.CHANGES["e4m3"]["13-bit sums"])
    assert changed.arithmetic(asked, "cpu").values == HOPPER_FP8
    assert Ideal().arithmetic(asked, "cpu").values != HOPPER_FP8
