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

# The tracer calls it with one element, everybody else with many.
FICKLE = """
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
    (folder / "fickle.py").write_text(GOOD + FICKLE)
    (folder / "kernels.py").write_text(KERNELS)
    return folder


def test_all_worlds_say_the_same_of_good_mods(folder, fresh):
    run = fresh("mods", "good.py", *FAST, "--format", "json", cwd=folder, **NO_GPU)
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


def test_a_mod_that_the_tracer_reads_otherwise_is_exit_code_1(mods, folder):
    run = mods("fickle.py::fickle", *FAST, "--kernel", "ideal", cwd=folder)
    assert (run.returncode, run.stderr) == (1, "")
    place = "first (b, h, q_idx, kv_idx) = (0, 0, 0, 0): 0.0, but should be 1.0"
    assert f"mpmath: 10 of 60 places, {place}" in " ".join(run.stdout.split())
    assert "1 mod: 2 different." in run.stdout


@pytest.mark.parametrize(
    ("kernel", "mod", "status"),
    [
        ("Blind", "causal", "different"),
        ("Blind", "softcap", "different"),
        ("Deaf", "softcap", "different"),
        ("Deaf", "causal", "equal"),
        ("Silent", "causal", "equal"),
        ("Silent", "softcap", "unsupported"),
    ],
)
def test_a_kernel_with_a_planted_fault_differs(mods, folder, kernel, mod, status):
    given = (f"good.py::{mod}", *FAST, "--kernel", f"kernels.py::{kernel}", "--format", "json")
    run = mods(*given, cwd=folder)
    (record,) = json.loads(run.stdout)["records"]
    answer = record["answers"][kernel.lower()]
    assert answer["status"] == status
    assert run.returncode == (status == "different")
    assert record["answers"]["mpmath"]["status"] == "equal"


BAD = """
import torch
table = torch.arange(4)

def decides(b, h, q_idx, kv_idx):
    if q_idx > 3:
        return kv_idx > 2
    return kv_idx < 2

def whole(b, h, q_idx, kv_idx):
    return q_idx - kv_idx

def two(b, h, q_idx, kv_idx):
    return torch.stack([q_idx, kv_idx]) > 0

def outside(b, h, q_idx, kv_idx):
    return table[q_idx] > 0

def unknown(score, b, h, q_idx, kv_idx):
    return torch.erf(score)

def truth(score, b, h, q_idx, kv_idx):
    return score > 0
"""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("decides", "bad.py:5: decides: mask 'decides' cannot be traced: it decides on"),
        ("whole", "bad.py:10: whole: mask 'whole' cannot be traced: it gives dtype int64"),
        ("two", "bad.py:13: two: mask 'two' cannot be traced: "),
        (
            "outside",
            "bad.py:16: outside: mask 'outside' indexes axis 0 of its tensor of shape (4,)",
        ),
        ("unknown", "bad.py:19: unknown: score mod 'unknown' cannot be traced: "),
        ("truth", "bad.py:22: truth: score mod 'truth' cannot be traced: it gives dtype bool"),
    ],
)
def test_a_mod_that_cannot_be_is_one_line_with_its_name_and_line(mods, tmp_path, name, says):
    (tmp_path / "bad.py").write_text(BAD)
    run = mods(f"bad.py::{name}", *FAST, cwd=tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith(f"attncheck: {says}")
    assert run.stderr.count("\n") == 1


def test_every_mod_that_cannot_be_has_its_line(mods, tmp_path):
    (tmp_path / "bad.py").write_text(BAD)
    run = mods("bad.py", *FAST, cwd=tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    lines = run.stderr.splitlines()
    names = ["decides", "whole", "two", "outside", "unknown", "truth"]
    assert [line.split(": ")[2] for line in lines] == names


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("gone.py",), "there is no file gone.py"),
        (("raising.py",), "importing raising.py raised ValueError: planted at raising.py:3."),
        (("none.py",), "there are none: a mod is a public name"),
        (("none.py::x",), "'x' is no mod: it does not take"),
        (("none.py::y",), "none.py has no 'y'"),
        (("good.py", "--shape", "1x2"), "shape '1x2' is not BATCHxHEADSxLENGTH"),
        (("good.py", "--shape", "8x8x256"), "4194304 places"),
        (("good.py", "--kernel", "flash9"), "kernel 'flash9' is not known"),
        (("good.py", "--kernel", "gone.py::x"), "there is no file gone.py"),
        (("good.py", "--format", "xml"), "format 'xml' is not known"),
        (("good.py", "--device", "cuda"), "device 'cuda' is not here"),
        ((), "FILE.py"),
    ],
)
def test_bad_input_is_one_line(mods, tmp_path, arguments, says):
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "none.py").write_text("x = 1")
    (tmp_path / "raising.py").write_text("x = 1\n\nraise ValueError('planted')")
    run = mods(*arguments, cwd=tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    assert says in run.stderr
    assert run.stderr.count("\n") == 1


def test_the_command_of_a_report_holds_no_folder(mods, folder, tmp_path):
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
    given = " ".join(FAST)
    kernels = "--kernel kernels.py::Silent --kernel=kernels.py::Deaf"
    said = " ".join(run.stdout.split())  # a narrow terminal breaks the line
    assert said.startswith(f"attncheck mods good.py::causal {given} {kernels} cpu ")
