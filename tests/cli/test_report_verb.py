"""``attncheck report``: what was found is shown again, and nobody's code is run."""

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest
from tests.reporting import gate_reports as made

from attncheck.records.json_reports import load_report
from attncheck.records.record import Report
from attncheck.records.run_reports import GateReport
from attncheck.reporting.rendering import GATE_FORMATS, render, write_gate


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the lines of kernels are looked up
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it in its processes
    (tmp_path / "evil.py").write_text("open('imported', 'w')\ndef forward(q, k, v): pass\n")
    answers = [made.answer(made.wrong("evil.py::forward")), made.answer(made.measured("k"))]
    report = made.report(*answers)
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


def run(attncheck, folder, *words, code=0):
    done = attncheck("report", *words, cwd=folder)
    assert done.returncode == code, done.stderr
    assert not (folder / "imported").exists()
    return done


@pytest.mark.parametrize("fmt", GATE_FORMATS)
def test_a_gate_is_shown_in_every_format(attncheck, folder, fmt):
    shown = run(attncheck, folder, "gate/gate.json", "--format", fmt).stdout
    report = load_report(folder / "gate" / "gate.json", GateReport)
    assert shown == render(report, fmt)


def test_its_files_are_written_with_the_scripts_beside_it(attncheck, folder):
    run(attncheck, folder, "gate/gate.json", "--out", "again")
    old, new = (
        {p.relative_to(folder / name): p.read_bytes() for p in (folder / name).rglob("*.*")}
        for name in ("gate", "again")
    )
    assert {path.name for path in new} >= {"report.html", "junit.xml", "results.sarif"}
    assert new == old
    assert b"print(&#39;asked&#39;)" in new[Path("report.html")]


@pytest.mark.parametrize("fmt", ["table", "json", "csv", "md"])
def test_another_report_is_shown_as_it_was(attncheck, folder, fmt):
    shown = run(attncheck, folder, "rmse.json", "--format", fmt).stdout
    assert "evil.py::forward" in shown


def test_a_format_that_it_has_not_names_those_it_has(attncheck, folder):
    said = run(attncheck, folder, "rmse.json", "--format", "junit", code=2).stderr
    assert "csv, html, json, md, table" in said
    said = run(attncheck, folder, "gate/gate.json", "--format", "yaml", code=2).stderr
    assert "junit" in said


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
def test_a_file_that_is_no_report_is_refused_in_one_line(attncheck, folder, name, content, fact):
    if content is not None:
        (folder / name).write_bytes(content)
    done = run(attncheck, folder, name, code=2)
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert fact in done.stderr


def test_nothing_is_shown_where_nothing_can_be_written(attncheck, folder):
    (folder / "file").write_text("")
    done = run(attncheck, folder, "gate/gate.json", "--out", "file/below", code=2)
    assert "cannot be written" in done.stderr
    assert done.stdout == ""


def test_formats_for_machines_are_alone_on_standard_output(attncheck, folder):
    json.loads(run(attncheck, folder, "gate/gate.json", "--format", "sarif").stdout)
    told = run(attncheck, folder, "gate/gate.json", "--format", "junit").stdout
    ET.fromstring(told)  # noqa: S314  # our own


def test_a_journal_is_read(attncheck, folder):
    from attncheck.gate.gate_report import journal_header
    from attncheck.verify.environment import fingerprint
    from attncheck.workers.journal import Journal
    from attncheck.workers.units import Done, Unit

    plan = {"tier": "smoke", "stages": "bounds"}
    head = journal_header(
        ("k",), device="cpu", convention="", started="2026-11-22T17:30:00Z", plan=plan
    )
    units = [
        Unit(kind=kind, stage="bounds", kernel="k", device="cpu") for kind in ("describe", "ask")
    ]
    record = made.record("k", environment=fingerprint(made.GPU))
    answer = made.answer(record, unit=units[1].id)
    facts = {"name": "k", "summary": "s", "environment": msgspec.to_builtins(made.GPU)}
    with Journal.open(folder / "results.jsonl", head, resume=False) as journal:
        journal.queued(units)
        for unit, told in zip(units, ({"facts": facts}, {"answers": (answer,)}), strict=True):
            journal.begun(unit)
            journal.done(Done(unit=unit.id, **told))
    shown = run(attncheck, folder, "results.jsonl", "--format", "json").stdout
    found = load_report(shown, GateReport)
    assert found.answers == (answer,)
    assert found.kernels == {"k": "s"}
    assert found.unfinished == 0
