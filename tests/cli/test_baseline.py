"""``attncheck baseline``: a baseline is written, compared with, and updated with a reason."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace
from tests.baseline.planted_losses import ENVIRONMENT

from attncheck.cli import attncheck
from attncheck.core import json_numbers
from attncheck.core.errors import UsageError
from attncheck.core.judgement import Judgement
from attncheck.inputs.problem import Case, Problem
from attncheck.records.baseline_entries import BASELINE_FILE, read_baseline
from attncheck.records.record import Accuracy, Record
from attncheck.records.run_reports import Answer, GateReport

CASES = tuple(Case(problem=Problem(query=query)) for query in (16, 32))


def record(number: int, relative: float = 1.0, **changes: Any) -> Record:
    case = CASES[number]
    accuracy = Accuracy(rmse=relative / 1000, relative=relative, freedom=1e4, ensemble=(0.99, 1.01))
    base = Record(
        case_id=case.id,
        case=case.to_json(),
        kernel="mine.py::fwd",
        variant="full",
        heads="MHA",
        status="pass",
        judgement=Judgement(status="pass"),
        environment="here",
        digest=f"{round(relative * 1000):032x}",
        accuracy={"out": accuracy},
    )
    return replace(base, **changes)


def gate(path: Path, *records: Record, **changes: Any) -> str:
    answers = tuple(Answer(unit="unit", stage="baseline", record=each) for each in records)
    report = GateReport(
        command="attncheck gate mine.py::fwd",
        tier="smoke",
        started="2026-01-01T00:00:00Z",
        seconds=1.0,
        environments={"here": ENVIRONMENT},
        kernels={"mine.py::fwd": "a kernel"},
        answers=answers,
    )
    path.write_text(json_numbers.to_json_text(replace(report, **changes)))
    return str(path)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*words: str) -> Result:
    """Run the verb in this process; what it raises is the line that the command would print."""
    runner = CliRunner()
    return runner.invoke(attncheck, ["baseline", *words], standalone_mode=False)


def code(*words: str) -> int:
    result = call(*words)
    if result.exception is not None:
        raise result.exception
    return int(result.return_value or 0)


@pytest.fixture
def baseline_file(folder):
    assert code("write", gate(folder / "gate.json", record(0), record(1))) == 0
    return folder / BASELINE_FILE


def test_write_creates_the_file_and_overwrites_only_with_force(baseline_file, folder):
    baseline = read_baseline(baseline_file)
    assert [entry.case for entry in baseline.entries] == sorted(case.id for case in CASES)
    with pytest.raises(UsageError, match=r"attncheck-baseline\.json is there"):
        code("write", str(folder / "gate.json"))
    assert code("write", str(folder / "gate.json"), "--force") == 0
    assert read_baseline(baseline_file) == baseline


def test_write_puts_the_file_beside_the_configuration(folder, monkeypatch):
    (folder / "attncheck.toml").write_text("")
    (folder / "below").mkdir()
    monkeypatch.chdir(folder / "below")
    assert code("write", gate(folder / "gate.json", record(0))) == 0
    assert (folder / BASELINE_FILE).is_file()


@pytest.mark.parametrize("status", ["fail", "error", "crash", "timeout", "oom", "flaky"])
def test_write_rejects_wrong_answers(folder, status):
    wrong = record(1, status=status, judgement=None)
    result = call("write", gate(folder / "gate.json", record(0), wrong))
    assert result.return_value == 1
    assert "cannot be kept in a baseline" in result.stderr
    assert not (folder / BASELINE_FILE).exists()


def test_write_rejects_kernels_that_fail_another_stage(folder):
    path = folder / "gate.json"
    gate(path, record(0), record(1, status="fail"))
    data = json.loads(path.read_text())
    data["answers"][1]["stage"] = "memory"
    path.write_text(json.dumps(data))
    assert call("write", str(path)).return_value == 1


def test_accept_rejects_wrong_answers(baseline_file, folder):
    before = baseline_file.read_bytes()
    wrong = gate(folder / "now.json", record(0), record(1, status="fail"))
    result = call("accept", wrong, "--reason", "it is faster")
    assert result.return_value == 1
    assert baseline_file.read_bytes() == before


def test_diff_reports_identical_worse_and_better_cases(baseline_file, folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")  # pytest-xdist sets another in its processes
    same = call("diff", str(folder / "gate.json"))
    assert same.return_value == 0
    assert "2 identical" in same.stdout
    worse = call("diff", gate(folder / "now.json", record(0, 1.5), record(1, 0.6)))
    assert worse.return_value == 1
    assert "1 worse, 1 better" in worse.stdout
    assert "out's error is 1.5 × what it was" in worse.stdout
    assert "bf16 full B1 H1 Q16 K16 D64" in worse.stdout
    better = gate(folder / "now.json", record(0), record(1, 0.6))
    assert code("diff", better) == 0
    assert code("diff", better, "--strict-baseline") == 1
    data = json.loads(call("diff", better, "--format", "json").stdout)
    assert [change["standing"] for change in data["changes"]] == ["better", "identical"]
    assert code("diff", str(folder / "now.json"), "--case", CASES[0].id) == 0


def test_accept_records_the_reason_of_a_regression(baseline_file, folder):
    now = gate(folder / "now.json", record(0, 1.5), record(1, 1.005))
    with pytest.raises(UsageError, match="say why"):
        code("accept", now)
    assert code("accept", now, "--reason", "twice as fast") == 0
    first, second = (
        next(e for e in read_baseline(baseline_file).entries if e.case == case.id) for case in CASES
    )
    assert first.reason == "twice as fast"
    assert first.tensors["out"].relative == 1.5
    # Within rounding the old value stays, so that the baseline does not creep.
    assert second.tensors["out"].relative == 1.0
    assert second.reason == ""
    assert code("diff", now) == 0


def test_accept_can_be_limited_to_a_case(baseline_file, folder):
    now = gate(folder / "now.json", record(0, 0.5), record(1, 0.5))
    assert code("accept", now, "--case", CASES[1].id) == 0
    relative = {
        entry.case: entry.tensors["out"].relative for entry in read_baseline(baseline_file).entries
    }
    assert relative == {CASES[0].id: 1.0, CASES[1].id: 0.5}


def test_accept_drops_missing_cases_only_after_a_complete_run(baseline_file, folder):
    part = gate(folder / "now.json", record(0), unfinished=1)
    assert code("accept", part) == 0
    assert len(read_baseline(baseline_file).entries) == 2
    assert code("accept", gate(folder / "now.json", record(0))) == 0
    assert len(read_baseline(baseline_file).entries) == 1


def test_accept_retains_cases_of_dtypes_that_were_not_chosen(baseline_file, folder):
    command = "attncheck gate mine.py::fwd --dtype"
    other = gate(folder / "now.json", record(0), command=f"{command} fp16")
    assert call("diff", other).return_value == 0
    # Both cases are in the default dtype, and only the first was asked.
    assert code("accept", other) == 0
    assert len(read_baseline(baseline_file).entries) == 2
    dtype = CASES[0].problem.dtype
    same = gate(folder / "same.json", record(0), command=f"{command}={dtype}")
    assert code("accept", other, same) == 0
    assert len(read_baseline(baseline_file).entries) == 1


def test_damaged_baseline_is_rejected(baseline_file, folder):
    baseline_file.write_text(baseline_file.read_text().replace("0.001", "0.009"))
    for verb in ("diff", "accept"):
        with pytest.raises(UsageError, match=r"^baseline invalid: "):
            code(verb, str(folder / "gate.json"))


def test_diff_rejects_unknown_names(baseline_file, folder):
    for option in ("--kernel", "--case", "--format"):
        with pytest.raises(UsageError, match="nowhere"):
            code("diff", str(folder / "gate.json"), option, "nowhere")


def test_write_rejects_reports_without_accuracies(folder):
    import msgspec

    without = gate(folder / "gate.json", record(0, accuracy=msgspec.UNSET))
    with pytest.raises(UsageError, match="nothing for a baseline: none of its records"):
        code("write", without)
    with pytest.raises(UsageError, match="nothing for a baseline: no answer"):
        code("write", gate(folder / "gate.json"))
    (folder / "no.json").write_text("{}")
    with pytest.raises(UsageError, match="no report of attncheck"):
        code("write", str(folder / "no.json"))
