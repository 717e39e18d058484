"""Stored failures, and lookup of what to reproduce by id, by Case or by file."""

import json
import math
import os
import re

import pytest
from msgspec.structs import replace
from tests.messages import one_line
from tests.reporting import gate_reports

from attncheck.core.errors import UsageError
from attncheck.records import failures
from attncheck.records.failures import (
    Reproduction,
    StoredFailure,
    find_reproduction,
    is_id,
    keep_failure,
    load_failure,
)
from attncheck.records.json_reports import report_json


@pytest.fixture
def failed(make):
    record = make.judged(status="fail", rule="bound", worst=make.worst(got=math.nan))
    record = replace(record, reason="nan", case_id="casecasexx")
    return StoredFailure(
        id="abcdefgh27",
        kernel="mine.py::kernel",
        convention="sdpa",
        device="cpu",
        test="test_it",
        record=record,
        environment=make.environment(),
    )


@pytest.fixture
def reports(tmp_path):
    return tmp_path / "reports"


def test_stored_failure_round_trips(failed, reports):
    path = keep_failure(failed, reports / "failures")
    assert path == reports / "failures" / "abcdefgh27.json"
    again = load_failure(path)
    assert math.isnan(again.record.judgement.worst.got)
    assert again.record.reason == "nan"
    assert str(again) == str(failed)
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no temporary file is left


@pytest.mark.parametrize("wanted", ["abcdefgh27", "casecasexx"], ids=["failure", "case"])
def test_lookup_by_failure_id_or_case_id(failed, reports, wanted):
    keep_failure(failed, reports / "failures")
    reproduction = find_reproduction(wanted, reports)
    assert (reproduction.kernel, reproduction.convention, reproduction.device) == (
        "mine.py::kernel",
        "sdpa",
        "cpu",
    )
    assert (reproduction.case, reproduction.test) == (failed.record.case, "test_it")


def test_lookup_in_measurement_report(make, reports):
    case, command = "abcdefghij", "attncheck check mine.py::f --convention=flash_attn"
    records = [make.record("mine.py::f"), make.record("other", case_id="othercasex")]
    (reports / "h200").mkdir(parents=True)
    (reports / "h200" / "check.json").write_text(
        report_json(make.report(*records, command=command))
    )
    (reports / "other.json").write_text(f'{{"id": "{case}"}}')
    reproduction = find_reproduction(case, reports)
    assert (reproduction.kernel, reproduction.convention, reproduction.device) == (
        "mine.py::f",
        "flash_attn",
        "cpu",
    )


@pytest.mark.parametrize("of", ["failure", "case"])
def test_lookup_in_gate_report(reports, of):
    record = gate_reports.record("mine.py::f", status="fail")
    answer = gate_reports.answer(record)
    report = gate_reports.report(answer, command="attncheck gate mine.py::f --convention sdpa")
    reports.mkdir()
    (reports / "gate.json").write_text(report_json(report))
    reproduction = find_reproduction(answer.failure if of == "failure" else record.case_id, reports)
    assert (reproduction.kernel, reproduction.convention, reproduction.case) == (
        "mine.py::f",
        "sdpa",
        record.case,
    )


def test_stored_failure_precedes_report(failed, reports):
    """Only the stored failure records the folder of the kernel's file."""
    stored = replace(failed, kernel="../kernels/mine.py::kernel")
    keep_failure(stored, reports / "failures")
    record = replace(failed.record, kernel="mine.py::kernel", environment="here")
    answer = gate_reports.answer(record, failure=failed.id)
    (reports / "a.json").write_text(report_json(gate_reports.report(answer)))
    for wanted in (failed.id, record.case_id):
        assert find_reproduction(wanted, reports).kernel == stored.kernel


def test_report_without_kernels_counts_as_other_json(reports):
    reports.mkdir()
    (reports / "oracles.json").write_text('{"schema": 1, "records": [{"case_id": "abcdefghij"}]}')
    with pytest.raises(UsageError, match=r"1 other JSON files\. Name another folder"):
        find_reproduction("abcdefghij", reports)


def test_case_of_several_kernels_requires_a_choice(make, reports):
    kernels = ["one", "two", "three"]
    records = [make.record(kernel, status="fail") for kernel in kernels[:2]]
    report = make.report(*records, make.record("three"))
    reports.mkdir()
    (reports / "rmse.json").write_text(report_json(report))
    with pytest.raises(UsageError, match=r"abcdefghij was asked of one, two: choose .* --kernel"):
        find_reproduction("abcdefghij", reports)
    assert find_reproduction("abcdefghij", reports, "two").kernel == "two"
    assert find_reproduction("abcdefghij", reports, "mine.py::new").case == records[0].case


def test_oldest_failures_are_removed_beyond_the_limit(failed, reports, monkeypatch):
    monkeypatch.setattr(failures, "MAX_STORED", 2)
    for age, name in enumerate("abc"):
        path = keep_failure(replace(failed, id=name * 10), reports)
        os.utime(path, (1000 + age, 1000 + age))
    keep_failure(replace(failed, id="d" * 10), reports)
    assert sorted(path.stem[0] for path in reports.iterdir()) == ["c", "d"]


@pytest.mark.parametrize("text", ["../x", "abcdefgh", "ABCDEFGHIJ", "abcdefgh/j", "abcdefghij0"])
def test_malformed_ids_are_rejected(failed, reports, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not is_id(text)
    with pytest.raises(UsageError, match="is no id"):
        keep_failure(replace(failed, id=text), reports)
    assert not reports.exists()
    unread, unknown = f"{text} cannot be read: No such file", f"nothing is known of '{text}'"
    with pytest.raises(UsageError, match=f"^{re.escape(unread if '/' in text else unknown)}"):
        find_reproduction(text, reports)


def test_folder_is_rejected(tmp_path):
    with pytest.raises(UsageError, match="is a folder: name a file in it, or an id"):
        find_reproduction(str(tmp_path))


def test_unknown_id_error_counts_searched_files(failed, reports):
    with pytest.raises(UsageError, match="there is no folder"):
        find_reproduction("zzzzzzzzzz", reports)
    keep_failure(failed, reports / "failures")
    (reports / "rmse.json").write_text("{}")
    message = "nothing is known of 'zzzzzzzzzz': .*1 kept failures and 1 other JSON files"
    with pytest.raises(UsageError, match=message):
        find_reproduction("zzzzzzzzzz", reports)


def test_broken_failure_file_is_named(failed, reports):
    path = keep_failure(failed, reports / "failures")
    path.write_text(path.read_text()[:-20])
    with pytest.raises(UsageError, match=r"abcdefgh27\.json is no failure of attncheck: Input"):
        find_reproduction("abcdefgh27", reports)


def test_unwritable_folder_is_a_usage_error(failed, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"failures cannot be written to .*choose another folder"):
        keep_failure(failed, tmp_path / "file")


def write_file(folder, data):
    path = folder / "file.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(path)


def test_file_may_hold_failure_case_or_problem(failed, tmp_path):
    case, problem = {"problem": {"query": 3}, "question": "repeat"}, {"query": 3}
    assert find_reproduction(str(keep_failure(failed, tmp_path))).kernel == failed.kernel
    assert find_reproduction(write_file(tmp_path, case)).case == case
    reproduction = find_reproduction(write_file(tmp_path, problem))
    assert reproduction == Reproduction(case={"problem": problem}, source=reproduction.source)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ('{"query": 3', "is no failure, case or problem of attncheck: Input data was truncated"),
        ("[]", "it has neither a record, nor a problem, nor a query length"),
        ({"records": []}, "is a report: give the id of one of its records"),
        ({"record": {}, "schema": 99}, "schema is 99, this version reads 1"),
        ({"record": {}, "schema": True}, "schema is True"),
        ({"record": {}, "schema": 1}, "is no failure of attncheck: Object missing required field"),
        ("[" * 10000, "is no failure, case or problem"),
    ],
    ids=["truncated", "a list", "a report", "schema", "no schema", "fields", "deep"],
)
def test_invalid_file_is_a_one_line_error(tmp_path, data, message):
    with one_line(UsageError, message):
        find_reproduction(write_file(tmp_path, data))


def test_oversized_file_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(failures, "_LARGEST", 8)
    with pytest.raises(UsageError, match="is larger than 8 bytes"):
        find_reproduction(write_file(tmp_path, {"query": 3}))
