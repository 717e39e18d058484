"""``attncheck rmse --backward`` measures, judges and shows gradients."""

import json
from pathlib import Path

import pytest

from attncheck.core.judgement import share_text
from attncheck.inputs.problem import Problem
from attncheck.subjects.capabilities import named_kernels
from attncheck.subjects.load import load_subject

KERNELS = """
from attncheck.subjects.capabilities.subject import Subject
from attncheck.subjects.ideal import Ideal

class Unscaled(Ideal):
    name, summary = "unscaled", "dk without the scale"

    def prepare(self, inputs):
        call = super().prepare(inputs)

        def unscaled():
            outputs = call()
            outputs.dk.div_(inputs.problem.scale)
            return outputs

        return unscaled

class Forward(Ideal):
    name, summary, backward = "forward", "gives no gradients", False
    concerns = Subject.concerns
"""
OPTIONS = ("--backward", "--variant", "causal", "--shape", "1x2/2x24x8", "-q")
LEARNED = ("relative_bias", "pass")
RECORDING = Path(__file__).parents[1] / "data" / "trained.safetensors"


@pytest.fixture
def attncheck(tmp_path, monkeypatch, run_in_process):
    (tmp_path / "mine.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    return lambda *words, options=OPTIONS: run_in_process("rmse", *options, *words)


def records(folder):
    return json.loads((folder / "reports" / "rmse.json").read_text())["records"]


def test_correct_kernels_pass_with_gradients_in_every_file(attncheck, tmp_path):
    kernels = [part for name in ("ideal", "sdpa-math") for part in ("--kernel", name)]
    code, out, err = attncheck(*kernels, "--dtype", "fp16", "--dtype", "fp32")
    assert (code, err) == (0, "")
    assert "seed 0 · backward\n" in out
    assert "dQ RMSE" in out
    assert "4 cells: 4 pass.\n" in out
    for record in records(tmp_path):
        assert record["case"]["problem"]["backward"] is True
        assert set(record["gradients"]) == {"dq", "dk", "dv"}
        assert max(record["judgement"]["gradients_over_bound"].values()) <= 1
    assert "dk_over_ideal" in (tmp_path / "reports" / "rmse.csv").read_text()
    assert "| dK ×ideal |" in (tmp_path / "reports" / "rmse.md").read_text()


def test_gradient_of_a_learned_bias_has_columns(attncheck, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    kernels = [part for name in ("ideal", "sdpa-math") for part in ("--kernel", name)]
    code, out, err = attncheck(*kernels, "--variant", "relative_bias")
    assert (code, err) == (0, "")
    heads = next(line for line in out.splitlines() if line.startswith("  kernel "))
    assert "dcaptured RMSE" in heads
    assert ": it gives no gradients of the tensors that a score mod reads\n" in out
    (record,) = [r for r in records(tmp_path) if (r["variant"], r["status"]) == LEARNED]
    assert set(record["gradients"]) == {"dq", "dk", "dv", "dcaptured"}
    assert record["judgement"]["gradients_over_bound"]["dcaptured"] <= 1
    assert "dcaptured_over_bound" in (tmp_path / "reports" / "rmse.csv").read_text()


def test_planted_gradient_fault_fails_with_its_share(attncheck, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    code, out, err = attncheck("--kernel", "mine.py::Unscaled", "--kernel", "ideal")
    assert (code, err) == (1, "")
    assert "¹ fail: bound: dk[" in out
    assert "2 cells: 1 pass, 1 fail.\n" in out
    wrong, right = records(tmp_path)
    shares = wrong["judgement"]["gradients_over_bound"]
    assert shares["dk"] > 1 >= max(shares["dq"], shares["dv"])
    heads = next(line for line in out.splitlines() if line.startswith("  kernel "))
    row = next(line for line in out.splitlines() if line.startswith("  unscaled "))
    end = heads.index("dK/bound") + len("dK/bound")
    assert row[:end].split()[-1] == share_text(shares["dk"])
    assert {n for n in shares if wrong["gradients"][n] != right["gradients"][n]} == {"dk"}


def test_explain_shows_gradients(attncheck):
    code, out, _ = attncheck("--kernel", "mine.py::Unscaled", "--explain", "unscaled")
    assert code == 1
    assert out.splitlines()[0].endswith(" · backward")
    assert "the element that shows it: dk[" in out
    assert "\ngradients\n" in out


def test_named_kernel_without_gradients_is_rejected(attncheck, tmp_path):
    code, out, err = attncheck("--kernel", "mine.py::Forward")
    assert (code, out) == (2, "")
    assert err == "attncheck: kernel 'forward' gives no gradients: see attncheck list.\n"
    assert attncheck("--kernel", "mine.py::Forward", options=OPTIONS[1:])[0] == 0


def test_built_in_kernels_without_gradients_are_skipped_with_a_note(attncheck, monkeypatch):
    known = ("ideal", "triton-flash1", "triton-decode", "triton-paged", "torch-softmax")
    monkeypatch.setattr(named_kernels, "builtin_names", lambda: known)
    code, out, err = attncheck()
    assert code == 0
    assert (
        err == "attncheck: without gradients, and so without a row: triton-flash1, triton-decode.\n"
    )
    assert "1 cell: 1 pass.\n" in out
    assert "triton-flash1" not in out
    problem = Problem(query=24, head_dim=8, backward=True)
    assert [name for name in known if load_subject(name).concerns(problem)] == ["ideal"]


@pytest.mark.usefixtures("library_as_before")
def test_recorded_inputs_have_gradients(attncheck, tmp_path):
    inputs = ("--inputs", str(RECORDING), "--dtype", "bf16")
    code, _, _ = attncheck(options=("--backward", *inputs, "--kernel", "ideal", "-q"))
    assert code == 0
    gradients = [set(record["gradients"]) for record in records(tmp_path)]
    assert gradients
    assert all(names == {"dq", "dk", "dv"} for names in gradients)


def test_gradient_reports_are_shown_again_and_joined(attncheck):
    code, out, _ = attncheck("--kernel", "ideal", "--out", "backward")
    _, forward, _ = attncheck("--kernel", "ideal", "--out", "forward", options=OPTIONS[1:])
    assert attncheck("--from", "backward/rmse.json", options=()) == (code, out, "")
    both = ("--from", "backward/rmse.json", "--from", "forward/rmse.json")
    code, joined, _ = attncheck(*both, options=())
    assert (code, "dQ" in forward) == (0, False)
    assert joined.count(" · normal · seed 0") == 2
    assert "2 cells: 2 pass.\n" in joined
