"""``attncheck faults --pytest`` scores a user's own tests and resumes interrupted runs."""

import json
from pathlib import Path

import msgspec
import pytest

from attncheck.cli.faults import own_tests_header
from attncheck.faults.fault_selection import FaultSelection, select_faults
from attncheck.faults.user_suite import UserSuite
from attncheck.records.fault_scores import OwnTestsScore
from attncheck.workers.journal import Journal
from attncheck.workers.units import UnitResult

FUNCTION = """
import torch

def attention(q, k, v):
    return torch.softmax((q @ k.mT) * q.shape[-1] ** -0.5, -1) @ v
"""
# Each run of pytest appends a line to runs.txt.
TESTS = """
import torch, mine

def test_ragged():
    with open("runs.txt", "a") as file:
        file.write("a run\\n")
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 65, 16)
    right = torch.softmax((q @ k.mT).double() / 4, -1) @ v.double()
    torch.testing.assert_close(mine.attention(q, k, v), right.float())
"""
FAULTS = ("tail-keys-not-masked-exp0", "scale-inverted")
WORDS = [
    *("--pytest", "test_mine.py", "--replace", "mine:attention", "--jobs", "1", "-q"),
    *(word for name in FAULTS for word in ("--fault", name)),
    *("--json", "r.json"),
]


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(FUNCTION)
    (tmp_path / "test_mine.py").write_text(TESTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(attncheck, project):
    def run(*words):
        result = attncheck("faults", *(words or WORDS), cwd=project)
        report = project / "r.json"
        return result, json.loads(report.read_text()) if report.exists() else None

    return run


@pytest.fixture
def interrupted(project):
    """The journal of a run that was interrupted after the first of two faults was scored."""
    suite = UserSuite(command="test_mine.py", replace="mine:attention")
    selection = select_faults(
        hosts=("ideal",), names=FAULTS, categories=(), controls=False, device="cuda", tier=""
    )
    first = OwnTestsScore(
        fault=FAULTS[0], category="x", host="ideal", status="missed", seconds=4321
    )
    path = Path("reports/faults/results.jsonl")
    with Journal.open(path, own_tests_header(suite, selection), resume=False) as journal:
        journal.write_queued(selection.units)
        (unit,) = (each for each in selection.units if each.kernel.startswith(FAULTS[0]))
        journal.write_start(unit)
        journal.write_result(UnitResult(unit=unit.id, facts={"score": msgspec.to_builtins(first)}))
        journal.end("interrupted")


def test_interrupted_run_resumes_without_repeating_faults(run, project, interrupted):
    result, report = run()
    assert result.returncode == 1, result.stderr
    assert "goes on with reports/faults/results.jsonl, 1 of 2 done" in result.stderr
    scores = {score["fault"]: score for score in report["scores"]}
    assert {name: score["status"] for name, score in scores.items()} == {
        FAULTS[0]: "missed",
        FAULTS[1]: "caught",
    }
    assert scores[FAULTS[0]]["seconds"] == 4321  # the finished score is reused
    runs = (project / "runs.txt").read_text().splitlines()
    assert len(runs) == 2  # the correct kernel, and the other fault


def test_unfinished_other_run_is_not_overwritten(run, project, interrupted):
    other = [word.replace("scale-inverted", "scale-hardcoded") for word in WORDS]
    result, report = run(*other)
    assert (result.returncode, report) == (3, None)
    assert "holds another run" in result.stderr
    assert not (project / "runs.txt").exists()


def test_changed_tests_make_a_different_run(project):
    def sources():
        suite = UserSuite(command="test_mine.py", replace="mine:attention")
        return own_tests_header(suite, FaultSelection(units=()))["sources"]

    before = sources()
    assert sources() == before
    (project / "test_mine.py").write_text(f"{TESTS}\n# stricter now")
    assert sources() != before
