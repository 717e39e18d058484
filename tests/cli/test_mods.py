"""``attncheck mods`` compares what backends make of the masks and score mods of a file."""

import json
import os

import pytest

from attncheck.records.json_reports import load_report
from attncheck.records.survey_reports import ModReport

FAST = ("--shape", "1x2x5/6", "--device", "cpu", "-q")

GOOD = """
import torch

LIMITS = torch.tensor([3, 4, 5])

def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx

def limited(b, h, q_idx, kv_idx):
    return kv_idx < LIMITS[h]

def softcap(score, b, h, q_idx, kv_idx):
    return 2.0 * torch.tanh(score / 2.0)
"""

# The tracer calls it with one element, other backends with many.
TRACED_DIFFERENTLY = """
def fickle(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx if q_idx.numel() == 1 else q_idx > kv_idx
"""

KERNELS = """
from dataclasses import replace
from attncheck.core.mod_spec import FULL, NONE
from attncheck.core.outputs import Outputs
from attncheck.subjects.ideal import Ideal

class Blind(Ideal):
    name, summary = "blind", "sees every key"
    def prepare(self, inputs):
        return super().prepare(inputs.replace(problem=inputs.problem.replace(mask=FULL)))

class Deaf(Ideal):
    name, summary = "deaf", "applies no score mod"
    def prepare(self, inputs):
        return super().prepare(inputs.replace(problem=inputs.problem.replace(score=NONE)))

class Silent(Ideal):
    name, summary = "silent", "gives no LSE"
    def prepare(self, inputs):
        call = super().prepare(inputs)
        return lambda: Outputs(call().out)
"""


NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def mods(attncheck):
    return lambda *words, cwd: attncheck("mods", *words, cwd=cwd, env=os.environ | NO_GPU)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mods")
    (folder / "good.py").write_text(GOOD)
    (folder / "fickle.py").write_text(GOOD + TRACED_DIFFERENTLY)
    (folder / "kernels.py").write_text(KERNELS)
    return folder


def test_all_backends_agree_on_correct_mods(folder, run_fresh):
    run = run_fresh("mods", "good.py", *FAST, "--format", "json", cwd=folder, **NO_GPU)
    assert (run.returncode, run.stderr) == (0, "")
    report = load_report(run.stdout, ModReport)
    assert report.command == f"attncheck mods good.py {' '.join(FAST)} --format json"
    assert (report.file, report.shape) == ("good.py", "B1 H2 Q5 K6")
    assert [(r.name, r.kind) for r in report.records] == [
        ("causal", "mask"),
        ("limited", "mask"),
        ("softcap", "score mod"),
    ]
    assert {"mpmath", "triton-flash2", "ideal", "flex"} <= set(report.backends)
    assert not [name for name in report.backends if name.startswith("sdpa")]
    for record in report.records:
        assert {answer.status for answer in record.answers.values()} == {"equal"}
        assert GOOD.splitlines()[record.line - 1].startswith(f"def {record.name}(")
    assert report.records[0].expression == "q_idx >= kv_idx"


def test_mod_that_traces_differently_exits_1(mods, folder):
    run = mods("fickle.py::fickle", *FAST, "--kernel", "ideal", cwd=folder)
    assert (run.returncode, run.stderr) == (1, "")
    place = "first (b, h, q_idx, kv_idx) = (0, 0, 0, 0): 0.0, but should be 1.0"
    assert f"mpmath: 10 of 60 places, {place}" in " ".join(run.stdout.split())
    assert "1 mod: 2 different." in run.stdout


def test_kernels_with_planted_faults_differ(mods, folder):
    kernels = [f"--kernel=kernels.py::{name}" for name in ("Blind", "Deaf", "Silent")]
    run = mods("good.py", *FAST, *kernels, "--format", "json", cwd=folder)
    assert run.returncode == 1
    answers = {record["name"]: record["answers"] for record in json.loads(run.stdout)["records"]}
    different = {"blind": "different", "deaf": "different", "silent": "unsupported"}
    equal = dict.fromkeys(different, "equal") | {"mpmath": "equal"}
    expected = {
        "causal": equal | {"blind": "different"},
        "limited": equal | {"blind": "different"},
        "softcap": equal | different,
    }
    for name, statuses in expected.items():
        assert {k: answer["status"] for k, answer in answers[name].items()} == statuses


def test_reported_command_contains_no_folder(mods, folder, tmp_path):
    run = mods(
        f"{folder}/good.py::causal",
        *FAST,
        "--kernel",
        f"{folder}/kernels.py::Silent",
        f"--kernel={folder}/kernels.py::Deaf",
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr
    assert str(folder) not in run.stdout
    options = " ".join(FAST)
    kernels = "--kernel kernels.py::Silent --kernel=kernels.py::Deaf"
    page = " ".join(run.stdout.split())  # a narrow terminal breaks the line
    assert page.startswith(f"attncheck mods good.py::causal {options} {kernels} cpu ")
