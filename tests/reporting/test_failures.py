"""Failures that are kept, and found again."""

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


def test_what_is_kept_comes_back(failed, reports):
    path = keep_failure(failed, reports / "failures")
    assert path == reports / "failures" / "abcdefgh27.json"
    again = load_failure(path)
    assert math.isnan(again.record.judgement.worst.got)
    assert again.record.reason == "nan"
    assert str(again) == str(failed)
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no draft is left


@pytest.mark.parametrize("wanted", ["abcdefgh27", "casecasexx"], ids=["its id", "its Case's"])
def test_an_id_is_looked_up(failed, reports, wanted):
    keep_failure(failed, reports / "failures")
    found = find_reproduction(wanted, reports)
    assert (found.kernel, found.convention, found.device) == ("mine.py::kernel", "sdpa", "cpu")
    assert (found.case, found.test) == (failed.record.case, "test_it")


def test_an_id_is_looked_up_in_reports(make, reports):
    case, asked = "abcdefghij", "attncheck check mine.py::f --convention=flash_attn"
    records = [make.record("mine.py::f"), make.record("other", case_id="othercasex")]
    (reports / "h200").mkdir(parents=True)
    (reports / "h200" / "check.json").write_text(report_json(make.report(*records, command=asked)))
    (reports / "other.json").write_text(f'{{"id": "{case}"}}')
    found = find_reproduction(case, reports)
    assert (found.kernel, found.convention, found.device) == ("mine.py::f", "flash_attn", "cpu")


@pytest.mark.parametrize("of", ["the failure", "the Case"])
def test_an_id_is_looked_up_in_a_gate(reports, of):
    record = gate_reports.record("mine.py::f", status="fail")
    answer = gate_reports.answer(record)
    report = gate_reports.report(answer, command="attncheck gate mine.py::f --convention sdpa")
    reports.mkdir()
    (reports / "gate.json").write_text(report_json(report))
    found = find_reproduction(answer.failure if of == "the failure" else record.case_id, reports)
    assert (found.kernel, found.convention, found.case) == ("mine.py::f", "sdpa", record.case)


def test_a_kept_failure_precedes_a_report_of_it(failed, reports):
    """Only the failure has the folder of the kernel's file."""
    kept = replace(failed, kernel="../kernels/mine.py::kernel")
    keep_failure(kept, reports / "failures")
    record = replace(failed.record, kernel="mine.py::kernel", environment="here")
    answer = gate_reports.answer(record, failure=failed.id)
    (reports / "a.json").write_text(report_json(gate_reports.report(answer)))
    for wanted in (failed.id, record.case_id):
        assert find_reproduction(wanted, reports).kernel == kept.kernel


def test_a_report_of_no_kernels_is_no_broken_one(reports):
    reports.mkdir()
    (reports / "oracles.json").write_text('{"schema": 1, "records": [{"case_id": "abcdefghij"}]}')
    with pytest.raises(UsageError, match=r"1 other JSON files\. Name another folder"):
        find_reproduction("abcdefghij", reports)


def test_of_several_kernels_one_is_chosen(make, reports):
    kernels = ["one", "two", "three"]
    records = [make.record(kernel, status="fail") for kernel in kernels[:2]]
    report = make.report(*records, make.record("three"))
    reports.mkdir()
    (reports / "rmse.json").write_text(report_json(report))
    with pytest.raises(UsageError, match=r"abcdefghij was asked of one, two: choose .* --kernel"):
        find_reproduction("abcdefghij", reports)
    assert find_reproduction("abcdefghij", reports, "two").kernel == "two"
    assert find_reproduction("abcdefghij", reports, "mine.py::new").case == records[0].case


def test_the_oldest_goes(failed, reports, monkeypatch):
    monkeypatch.setattr(failures, "MAX_STORED", 2)
    for age, name in enumerate("abc"):
        path = keep_failure(replace(failed, id=name * 10), reports)
        os.utime(path, (1000 + age, 1000 + age))
    keep_failure(replace(failed, id="d" * 10), reports)
    assert sorted(path.stem[0] for path in reports.iterdir()) == ["c", "d"]


@pytest.mark.parametrize("text", ["../x", "abcdefgh", "ABCDEFGHIJ", "abcdefgh/j", "abcdefghij0"])
def test_what_is_no_id(failed, reports, text):
    assert not is_id(text)
    with pytest.raises(UsageError, match="is no id"):
        keep_failure(replace(failed, id=text), reports)
    assert not reports.exists()
    unread, unknown = f"{text} cannot be read: No such file", f"nothing is known of '{text}'"
    with pytest.raises(UsageError, match=f"^{re.escape(unread if '/' in text else unknown)}"):
        find_reproduction(text, reports)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(UsageError, match="is a folder: name a file in it, or an id"):
        find_reproduction(str(tmp_path))


def test_an_unknown_id_says_where_it_was_looked_for(failed, reports):
    with pytest.raises(UsageError, match="there is no folder"):
        find_reproduction("zzzzzzzzzz", reports)
    keep_failure(failed, reports / "failures")
    (reports / "rmse.json").write_text("{}")
    said = "nothing is known of 'zzzzzzzzzz': .*1 kept failures and 1 other JSON files"
    with pytest.raises(UsageError, match=said):
        find_reproduction("zzzzzzzzzz", reports)


def test_a_broken_file_is_named(failed, reports):
    path = keep_failure(failed, reports / "failures")
    path.write_text(path.read_text()[:-20])
    with pytest.raises(UsageError, match=r"abcdefgh27\.json is no failure of attncheck: Input"):
        find_reproduction("abcdefgh27", reports)


def test_what_is_not_written_is_a_line(failed, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"failures cannot be written to .*choose another folder"):
        keep_failure(failed, tmp_path / "file")


def written(folder, data):
    path = folder / "given.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(path)


def test_a_file_is_what_is_in_it(failed, tmp_path):
    case, problem = {"problem": {"query": 3}, "question": "repeat"}, {"query": 3}
    assert find_reproduction(str(keep_failure(failed, tmp_path))).kernel == failed.kernel
    assert find_reproduction(written(tmp_path, case)).case == case
    found = find_reproduction(written(tmp_path, problem))
    assert found == Reproduction(case={"problem": problem}, source=found.source)


@pytest.mark.parametrize(
    ("data", "says"),
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
def test_a_file_that_cannot_be_is_a_line(tmp_path, data, says):
    with one_line(UsageError, says):
        find_reproduction(written(tmp_path, data))


def test_a_file_that_is_too_large_is_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(failures, "_LARGEST", 8)
    with pytest.raises(UsageError, match="is larger than 8 bytes"):
        find_reproduction(written(tmp_path, {"query": 3}))
