"""``attncheck report`` shows a stored report again without running any kernel."""

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest
from tests.reporting import gate_reports as gates

from attncheck.records.json_reports import load_report
from attncheck.records.record import Report
from attncheck.records.run_reports import GateReport
from attncheck.reporting.rendering import GATE_FORMATS, render, write_gate


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where kernels' definitions are looked up
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it in its processes
    (tmp_path / "evil.py").write_text("open('imported', 'w')\ndef forward(q, k, v): pass\n")
    answers = [gates.answer(gates.wrong("evil.py::forward")), gates.answer(gates.measured("k"))]
    report = gates.report(*answers)
    write_gate(report, tmp_path / "gate", {answers[0].failure: "print('asked')\n"})
    records = tuple(answer.record for answer in report.answers)
    rmse = Report(
        command="attncheck rmse",
        environments=report.environments,
        kernels=report.kernels,
        absent={},
        records=records,
    )
    (tmp_path / "rmse.json").write_text(render(rmse, "json"))
    return tmp_path


@pytest.fixture
def run(run_in_process, folder):
    """``run(word, …)``: stdout, or for a nonzero ``code`` the one line on stderr."""

    def run(*words, code=0):
        exit_code, out, err = run_in_process("report", *words)
        assert (exit_code, err.count("\n")) == (code, bool(code)), err
        assert not (code and out)
        assert not (folder / "imported").exists()
        return err or out

    return run


@pytest.mark.parametrize("fmt", GATE_FORMATS)
def test_gate_is_shown_in_every_format(run, folder, fmt):
    report = load_report(folder / "gate" / "gate.json", GateReport)
    assert run("gate/gate.json", "--format", fmt) == render(report, fmt)


def test_out_writes_the_same_files_and_scripts(run, folder):
    run("gate/gate.json", "--out", "again")
    old, new = (
        {p.relative_to(folder / name): p.read_bytes() for p in (folder / name).rglob("*.*")}
        for name in ("gate", "again")
    )
    assert {path.name for path in new} >= {"report.html", "junit.xml", "results.sarif"}
    assert new == old
    assert b"print(&#39;asked&#39;)" in new[Path("report.html")]


@pytest.mark.parametrize("fmt", ["table", "json", "csv", "md"])
def test_measurement_report_is_shown(run, fmt):
    assert "evil.py::forward" in run("rmse.json", "--format", fmt)


def test_unsupported_format_error_lists_formats(run):
    assert "csv, html, json, md, table" in run("rmse.json", "--format", "junit", code=2)
    assert "junit" in run("gate/gate.json", "--format", "yaml", code=2)


@pytest.mark.parametrize(
    ("name", "content", "fact"),
    [
        ("gone.json", None, "cannot be read"),
        ("a.json", b"{", "no report"),
        ("a.json", b"\xff\xfe\x00", "no report"),
        ("a.json", b"[1]", "neither records nor"),
        ("a.json", b'{"tier": 1, "started": 2}', "schema is None"),
        ("a.json", b'{"records": []}', "schema is None"),
        ("a.jsonl", b"no journal", "line 1"),
    ],
)
def test_invalid_report_is_a_one_line_error(run, folder, name, content, fact):
    if content is not None:
        (folder / name).write_bytes(content)
    assert fact in run(name, code=2)


def test_unwritable_out_shows_nothing(run, folder):
    (folder / "file").write_text("")
    assert "cannot be written" in run("gate/gate.json", "--out", "file/below", code=2)


def test_machine_formats_are_alone_on_stdout(run):
    json.loads(run("gate/gate.json", "--format", "sarif"))
    ET.fromstring(run("gate/gate.json", "--format", "junit"))  # noqa: S314  # our own


def test_journal_is_shown_as_report(run, folder):
    from attncheck.workers.journal import Journal
    from attncheck.workers.units import Unit, UnitResult

    head = {"kernels": ["k"], "device": "cpu", "tier": "smoke", "stages": "bounds"}
    head["started"] = "2026-11-22T17:30:00Z"
    units = [
        Unit(kind=kind, stage="bounds", kernel="k", device="cpu") for kind in ("describe", "ask")
    ]
    record = gates.record("k", environment=gates.GPU.id)
    answer = gates.answer(record, unit=units[1].id)
    facts = {"name": "k", "summary": "s", "environment": msgspec.to_builtins(gates.GPU)}
    with Journal.open(folder / "results.jsonl", head, resume=False) as journal:
        journal.write_queued(units)
        for unit, result in zip(units, ({"facts": facts}, {"answers": (answer,)}), strict=True):
            journal.write_start(unit)
            journal.write_result(UnitResult(unit=unit.id, **result))
    report = load_report(run("results.jsonl", "--format", "json"), GateReport)
    assert report.answers == (answer,)
    assert report.kernels == {"k": "s"}
    assert report.unfinished == 0
