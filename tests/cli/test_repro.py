"""``attncheck repro`` runs a stored failure, case or problem again."""

import json
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from tests.messages import one_line

from attncheck.cli import attncheck
from attncheck.core.errors import ProblemError, UsageError
from attncheck.core.mod_spec import Spec
from attncheck.diagnose.reproduce import new_failure, run_again
from attncheck.inputs.problem import Case, Problem, check_size
from attncheck.records.failures import keep_failure
from attncheck.reporting.diagnosis_text import kept_failure_text
from attncheck.subjects.load import load_subject

KERNELS = Path(__file__).parents[1] / "cases" / "planted_kernels.py"
WRONG = f"{KERNELS}::sees_the_next_key"
CASE = Case(problem=Problem(query=3, kv=5, head_dim=8, mask=Spec.of("causal")))


@pytest.fixture
def repro(tmp_path, monkeypatch, capsys):
    """``repro(*words)``: the exit code and standard output, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")

    def run(*words, device="cpu"):
        arguments = ["repro", *words, *(["--device", device] if device else [])]
        with attncheck.make_context("attncheck", arguments) as context:
            code = attncheck.invoke(context)
        return code, capsys.readouterr().out

    return run


@pytest.fixture
def stored(tmp_path):
    record = run_again(load_subject(WRONG), CASE, device="cpu")
    failure = new_failure(record, kernel=WRONG, device="cpu", test="test_causal.py::test_it")
    keep_failure(failure, tmp_path / "reports" / "failures")
    return failure


def write_file(data):
    Path("input.json").write_text(data if isinstance(data, str) else json.dumps(data))
    return "input.json"


def test_failure_is_reproduced(repro, stored):
    code, out = repro(stored.id)
    assert code == 1
    assert f"{out}Reproduce: attncheck repro {stored.id}" == kept_failure_text(stored)
    assert out.startswith("FAIL bound compare: out[")
    assert "  test       test_causal.py::test_it\n" in out


def test_failure_can_be_run_on_another_kernel(repro, stored):
    code, out = repro(stored.id, "--kernel", "ideal")
    assert code == 0
    assert out.startswith("PASS compare\n  kernel     ideal on cpu\n")
    assert "when it was kept" not in out


def test_passing_failure_is_reported_as_fixed(repro, stored):
    fixed = new_failure(stored.record, kernel="ideal", device="cpu", test="test_causal.py::test_it")
    keep_failure(fixed)
    code, out = repro(fixed.id)
    assert code == 0
    assert "It failed when it was kept: the kernel has been mended since" in out


def test_failure_id_depends_on_kernel_and_convention(stored):
    other = new_failure(stored.record, kernel="ideal", device="cpu")
    third = new_failure(stored.record, kernel=WRONG, device="cpu", convention="sdpa")
    assert len({stored.id, other.id, third.id}) == 3
    assert new_failure(stored.record, kernel=WRONG, device="cpu").id == stored.id


def test_case_and_problem_files_are_accepted(repro):
    for data in (CASE.to_json(), CASE.problem.to_json()):
        assert repro(write_file(data), "--kernel", WRONG)[0] == 1


def test_unsupported_problem_exits_5_without_a_script(repro):
    problem = CASE.problem.replace(score=Spec.of("softcap", cap=2.0)).to_json()
    code, out = repro(write_file(problem), "--kernel", "sdpa-math", "--script", "script.py")
    assert code == 5
    assert out.startswith("NOT SUPPORTED compare: SDPA takes no score mod")
    assert not Path("script.py").exists()


def test_script_option_writes_a_standalone_script(repro, stored):
    code, _ = repro(stored.id, "--script", "folder/script.py")
    assert code == 1
    text = Path("folder/script.py").read_text()
    assert "import attncheck" not in text
    assert "from attncheck" not in text
    assert "planted_kernels.py', 'sees_the_next_key')" in text


@pytest.mark.parametrize(
    ("data", "words", "message"),
    [
        ({"query": 3}, (), "input.json names no kernel: add --kernel SPEC."),
        ({"query": 0}, ("--kernel", "ideal"), "input.json: query=0 must be a whole number"),
        ({"query": 3, "mask": {"name": "no"}}, ("--kernel", "ideal"), "mask 'no' is not known"),
        ({"problem": {"query": 3}, "question": "no"}, (), "question 'no' is not known"),
        ({"problem": {"query": 3}, "generator": 0}, (), "the case was drawn by generator 0"),
        (
            {"problem": {"query": 3}, "question": "first_row"},
            ("--kernel", "ideal"),
            "first_row says nothing of",
        ),
        (
            {"query": 10**6, "kv": 10**6},
            ("--kernel", "ideal"),
            "1.0e+12 pairs of a row and a key, whose exact result would take some 7 h on this CPU",
        ),
        (
            {"query": 10**6, "batch": 10**5},
            ("--kernel", "ideal"),
            "GiB for inputs and outputs in float64; this machine has ",
        ),
        ({"query": 3}, ("--kernel", "gone.py::f"), "there is no file gone.py."),
        ({"query": 3}, ("--kernel", "ideal", "--script", "input.json/s.py"), "the script cannot"),
        ('{"query"', (), "input.json is no failure, case or problem of attncheck"),
    ],
    ids=[
        "no kernel",
        "size",
        "mask",
        "question",
        "generator",
        "unfit",
        "scores",
        "inputs",
        "kernel",
        "script",
        "truncated",
    ],
)
def test_bad_input_is_a_one_line_error(repro, data, words, message):
    with one_line(UsageError, message):
        repro(write_file(data), *words)


def test_missing_kernel_file_is_an_error(repro, stored):
    missing = new_failure(stored.record, kernel="gone.py::f", device="cpu")
    keep_failure(missing, "reports/failures")
    with pytest.raises(UsageError, match=r"there is no file gone\.py; if it is elsewhere now"):
        repro(missing.id)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is here")
def test_missing_device_error_suggests_cpu(repro, stored):
    on_a_gpu = new_failure(stored.record, kernel=WRONG, device="cpu")
    keep_failure(replace(on_a_gpu, id="gpugpugpug", device="cuda"), "reports/failures")
    with pytest.raises(UsageError, match=r"it was asked on 'cuda': .*; add --device cpu\.$"):
        repro("gpugpugpug", device=None)
    assert repro("gpugpugpug")[0] == 1


def test_reports_option_names_another_folder(repro, stored):
    Path("reports").rename("elsewhere")
    assert repro(stored.id, "--reports", "elsewhere")[0] == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_size_check_ignores_scores_that_are_never_stored(device):
    """A fused kernel and the oracle hold one tile, so 64 GiB of scores per head cost only time."""
    long = Problem(query=131072, kv=131072, head_dim=128, dtype="bf16")
    check_size(long, device)
    with pytest.raises(ProblemError, match="whose exact result would take"):
        check_size(long.replace(query=10**8, kv=10**8, head_dim=1, value_dim=1), device)
