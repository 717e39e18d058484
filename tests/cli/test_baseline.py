"""``attncheck baseline``: a file is made, compared with, and changed with a reason."""

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
    one = Accuracy(rmse=relative / 1000, relative=relative, freedom=1e4, ensemble=(0.99, 1.01))
    found = Record(
        case_id=case.id,
        case=case.to_json(),
        kernel="mine.py::fwd",
        variant="full",
        heads="MHA",
        status="pass",
        judgement=Judgement(status="pass"),
        environment="here",
        digest=f"{round(relative * 1000):032x}",
        accuracy={"out": one},
    )
    return replace(found, **changes)


def gate(path: Path, *records: Record, **changes: Any) -> str:
    answers = tuple(Answer(unit="unit", stage="baseline", record=one) for one in records)
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
    """The verb in this process; what it raises is what the command line says in one line."""
    runner = CliRunner()
    return runner.invoke(attncheck, ["baseline", *words], standalone_mode=False)


def code(*words: str) -> int:
    result = call(*words)
    if result.exception is not None:
        raise result.exception
    return int(result.return_value or 0)


@pytest.fixture
def kept(folder):
    assert code("write", gate(folder / "gate.json", record(0), record(1))) == 0
    return folder / BASELINE_FILE


def test_write_makes_the_file_and_replaces_none(kept, folder):
    baseline = read_baseline(kept)
    assert [entry.case for entry in baseline.entries] == sorted(case.id for case in CASES)
    with pytest.raises(UsageError, match=r"attncheck-baseline\.json is there"):
        code("write", str(folder / "gate.json"))
    assert code("write", str(folder / "gate.json"), "--force") == 0
    assert read_baseline(kept) == baseline


def test_write_goes_beside_the_configuration(folder, monkeypatch):
    (folder / "attncheck.toml").write_text("")
    (folder / "below").mkdir()
    monkeypatch.chdir(folder / "below")
    assert code("write", gate(folder / "gate.json", record(0))) == 0
    assert (folder / BASELINE_FILE).is_file()


@pytest.mark.parametrize("status", ["fail", "error", "crash", "timeout", "oom", "flaky"])
def test_a_wrong_answer_cannot_be_kept(folder, status):
    wrong = record(1, status=status, judgement=None)
    result = call("write", gate(folder / "gate.json", record(0), wrong))
    assert result.return_value == 1
    assert "cannot be kept in a baseline" in result.stderr
    assert not (folder / BASELINE_FILE).exists()


def test_nor_of_a_kernel_that_fails_elsewhere(folder):
    path = folder / "gate.json"
    gate(path, record(0), record(1, status="fail"))
    data = json.loads(path.read_text())
    data["answers"][1]["stage"] = "memory"
    path.write_text(json.dumps(data))
    assert call("write", str(path)).return_value == 1


def test_nor_can_it_be_accepted(kept, folder):
    before = kept.read_bytes()
    wrong = gate(folder / "now.json", record(0), record(1, status="fail"))
    result = call("accept", wrong, "--reason", "it is faster")
    assert result.return_value == 1
    assert kept.read_bytes() == before


def test_diff_says_what_has_become_of_it(kept, folder, monkeypatch):
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


def test_what_is_worse_is_accepted_with_a_reason_that_stays(kept, folder):
    now = gate(folder / "now.json", record(0, 1.5), record(1, 1.005))
    with pytest.raises(UsageError, match="say why"):
        code("accept", now)
    assert code("accept", now, "--reason", "twice as fast") == 0
    first, second = (
        next(e for e in read_baseline(kept).entries if e.case == case.id) for case in CASES
    )
    assert first.reason == "twice as fast"
    assert first.tensors["out"].relative == 1.5
    # Within rounding nothing is taken over, so that it does not creep.
    assert second.tensors["out"].relative == 1.0
    assert second.reason == ""
    assert code("diff", now) == 0


def test_only_what_is_named_is_accepted(kept, folder):
    now = gate(folder / "now.json", record(0, 0.5), record(1, 0.5))
    assert code("accept", now, "--case", CASES[1].id) == 0
    held = {entry.case: entry.tensors["out"].relative for entry in read_baseline(kept).entries}
    assert held == {CASES[0].id: 1.0, CASES[1].id: 0.5}


def test_what_is_gone_is_forgotten_where_all_was_asked(kept, folder):
    part = gate(folder / "now.json", record(0), unfinished=1)
    assert code("accept", part) == 0
    assert len(read_baseline(kept).entries) == 2
    assert code("accept", gate(folder / "now.json", record(0))) == 0
    assert len(read_baseline(kept).entries) == 1


def test_a_damaged_baseline_is_never_no_regression(kept, folder):
    kept.write_text(kept.read_text().replace("0.001", "0.009"))
    for verb in ("diff", "accept"):
        with pytest.raises(UsageError, match=r"^baseline invalid: "):
            code(verb, str(folder / "gate.json"))


def test_names_that_there_are_not(kept, folder):
    for option in ("--kernel", "--case", "--format"):
        with pytest.raises(UsageError, match="nowhere"):
            code("diff", str(folder / "gate.json"), option, "nowhere")


def test_a_source_without_accuracies_is_refused(folder):
    import msgspec

    without = gate(folder / "gate.json", record(0, accuracy=msgspec.UNSET))
    with pytest.raises(UsageError, match="nothing for a baseline: none of its records"):
        code("write", without)
    with pytest.raises(UsageError, match="nothing for a baseline: no answer"):
        code("write", gate(folder / "gate.json"))
    (folder / "no.json").write_text("{}")
    with pytest.raises(UsageError, match="no report of attncheck"):
        code("write", str(folder / "no.json"))
