"""``attncheck faults --pytest``: somebody's own tests, and a run of them that goes on."""

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
# Each run of pytest leaves a line behind.
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
        done = attncheck("faults", *(words or WORDS), cwd=project)
        report = project / "r.json"
        return done, json.loads(report.read_text()) if report.exists() else None

    return run


@pytest.fixture
def interrupted(project):
    """A run that was interrupted when the first of two faults had its score."""
    suite = UserSuite(command="test_mine.py", replace="mine:attention")
    these = select_faults(
        hosts=("ideal",), names=FAULTS, categories=(), controls=False, device="cuda", tier=""
    )
    first = OwnTestsScore(
        fault=FAULTS[0], category="x", host="ideal", status="missed", seconds=4321
    )
    path = Path("reports/faults/results.jsonl")
    with Journal.open(path, own_tests_header(suite, these), resume=False) as journal:
        journal.queued(these.units)
        (unit,) = (each for each in these.units if each.kernel.startswith(FAULTS[0]))
        journal.begun(unit)
        journal.done(UnitResult(unit=unit.id, facts={"score": msgspec.to_builtins(first)}))
        journal.end("interrupted")


def runs(project):
    return len((project / "runs.txt").read_text().splitlines())


def test_a_run_goes_on_where_it_was_and_asks_no_fault_again(run, project, interrupted):
    done, report = run()
    assert done.returncode == 1, done.stderr
    assert "goes on with reports/faults/results.jsonl, 1 of 2 done" in done.stderr
    scores = {score["fault"]: score for score in report["scores"]}
    assert {name: score["status"] for name, score in scores.items()} == {
        FAULTS[0]: "missed",
        FAULTS[1]: "caught",
    }
    assert scores[FAULTS[0]]["seconds"] == 4321  # what was done is not done again
    assert runs(project) == 2  # the right kernel, and the other fault


def test_another_run_that_is_not_finished_is_left_alone(run, project, interrupted):
    other = [word.replace("scale-inverted", "scale-hardcoded") for word in WORDS]
    done, report = run(*other)
    assert (done.returncode, report) == (3, None)
    assert "holds another run" in done.stderr
    assert not (project / "runs.txt").exists()


def test_a_run_is_of_the_tests_as_they_are(project):
    def sources():
        suite = UserSuite(command="test_mine.py", replace="mine:attention")
        return own_tests_header(suite, FaultSelection(units=()))["sources"]

    before = sources()
    assert sources() == before
    (project / "test_mine.py").write_text(f"{TESTS}\n# stricter now")
    assert sources() != before
