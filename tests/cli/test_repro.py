"""``attncheck repro``: a failure, asked again."""

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
def kept(tmp_path):
    record = run_again(load_subject(WRONG), CASE, device="cpu")
    one = new_failure(record, kernel=WRONG, device="cpu", test="test_causal.py::test_it")
    keep_failure(one, tmp_path / "reports" / "failures")
    return one


def written(data, name="given.json"):
    Path(name).write_text(data if isinstance(data, str) else json.dumps(data))
    return name


def test_a_failure_is_asked_again(repro, kept):
    code, said = repro(kept.id)
    assert code == 1
    assert f"{said}Reproduce: attncheck repro {kept.id}" == kept_failure_text(kept)
    assert said.startswith("FAIL bound compare: out[")
    assert "  test       test_causal.py::test_it\n" in said


def test_another_kernel_is_asked_the_same(repro, kept):
    code, said = repro(kept.id, "--kernel", "ideal")
    assert code == 0
    assert said.startswith("PASS compare\n  kernel     ideal on cpu\n")
    assert "when it was kept" not in said


def test_what_holds_now_failed_when_it_was_kept(repro, kept):
    mended = new_failure(kept.record, kernel="ideal", device="cpu", test="test_causal.py::test_it")
    keep_failure(mended)
    code, said = repro(mended.id)
    assert code == 0
    assert "It failed when it was kept: the kernel has been mended since" in said


def test_two_kernels_have_two_ids(kept):
    other = new_failure(kept.record, kernel="ideal", device="cpu")
    third = new_failure(kept.record, kernel=WRONG, device="cpu", convention="sdpa")
    assert len({kept.id, other.id, third.id}) == 3
    assert new_failure(kept.record, kernel=WRONG, device="cpu").id == kept.id


def test_a_case_and_a_problem_are_files(repro):
    for data in (CASE.to_json(), CASE.problem.to_json()):
        assert repro(written(data), "--kernel", WRONG)[0] == 1


def test_what_is_not_taken_has_its_own_code(repro):
    problem = CASE.problem.replace(score=Spec.of("softcap", cap=2.0)).to_json()
    code, said = repro(written(problem), "--kernel", "sdpa-math", "--script", "script.py")
    assert code == 5
    assert said.startswith("NOT SUPPORTED compare: SDPA takes no score mod")
    assert not Path("script.py").exists()


def test_a_script_is_written(repro, kept):
    code, _ = repro(kept.id, "--script", "folder/script.py")
    assert code == 1
    text = Path("folder/script.py").read_text()
    assert "import attncheck" not in text
    assert "from attncheck" not in text
    assert "planted_kernels.py', 'sees_the_next_key')" in text


@pytest.mark.parametrize(
    ("data", "words", "says"),
    [
        ({"query": 3}, (), "given.json names no kernel: add --kernel SPEC."),
        ({"query": 0}, ("--kernel", "ideal"), "given.json: query=0 must be a whole number"),
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
        ({"query": 3}, ("--kernel", "ideal", "--script", "given.json/s.py"), "the script cannot"),
        ('{"query"', (), "given.json is no failure, case or problem of attncheck"),
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
def test_what_cannot_be_is_a_line(repro, data, words, says):
    Path("given.json").write_text(data if isinstance(data, str) else json.dumps(data))
    with one_line(UsageError, says):
        repro("given.json", *words)


def test_a_kernel_that_is_gone_is_a_line(repro, kept):
    gone = new_failure(kept.record, kernel="gone.py::f", device="cpu")
    keep_failure(gone, "reports/failures")
    with pytest.raises(UsageError, match=r"there is no file gone\.py; if it is elsewhere now"):
        repro(gone.id)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is here")
def test_a_device_that_is_not_here_is_a_line(repro, kept):
    on_a_gpu = new_failure(kept.record, kernel=WRONG, device="cpu")
    keep_failure(replace(on_a_gpu, id="gpugpugpug", device="cuda"), "reports/failures")
    with pytest.raises(UsageError, match=r"it was asked on 'cuda': .*; add --device cpu\.$"):
        repro("gpugpugpug", device=None)
    assert repro("gpugpugpug")[0] == 1


def test_an_unknown_id_is_a_line(repro):
    with pytest.raises(UsageError, match="nothing is known of 'zzzzzzzzzz'"):
        repro("zzzzzzzzzz")


def test_another_folder_of_reports(repro, kept):
    Path("reports").rename("elsewhere")
    assert repro(kept.id, "--reports", "elsewhere")[0] == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_scores_that_nobody_holds_are_no_reason_to_refuse(device):
    """A fused kernel and the oracle hold a tile: 64 GiB of scores in each head are only work."""
    long = Problem(query=131072, kv=131072, head_dim=128, dtype="bf16")
    check_size(long, device)
    with pytest.raises(ProblemError, match="whose exact result would take"):
        check_size(long.replace(query=10**8, kv=10**8, head_dim=1, value_dim=1), device)
