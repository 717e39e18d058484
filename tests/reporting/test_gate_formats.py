"""What machines read of a gate: JSON, CSV, JUnit, SARIF, GitHub's commands."""

import csv
import io
import json
import math
import re
from xml.etree import ElementTree as ET

import pytest
from tests.reporting import gate_reports as made

from attncheck.core.errors import UsageError
from attncheck.records.json_reports import load_report
from attncheck.records.run_reports import GateReport
from attncheck.reporting.ci_formats import MOST_ANNOTATIONS
from attncheck.reporting.rendering import render


@pytest.fixture(scope="module")
def sample():
    return made.sample()


# JSON


def test_numbers_that_json_has_no_word_for_come_back():
    wrong = made.wrong(share=math.inf)
    change = made.Change(kernel="k", case_id="c", standing="worse", before=0.0, after=math.inf)
    report = made.report(made.answer(wrong), changes=(change,))
    text = render(report, "json")
    json.loads(text, parse_constant=pytest.fail)
    assert load_report(text, GateReport) == report


@pytest.mark.parametrize(
    ("changes", "fact"),
    [({"environment": "gone"}, "no environment"), ({"case": {}}, "holds no problem")],
)
def test_an_answer_without_its_facts_is_refused(changes, fact):
    report = made.report(made.answer(made.record(**changes)))
    with pytest.raises(UsageError, match=fact):
        load_report(render(report, "json"), GateReport)


@pytest.mark.parametrize("format_", ["table", "md", "github"])
def test_changes_of_one_reason_are_told_once(format_):
    changes = [
        made.Change(kernel="k", case_id=case, standing="worse", reason="pass before, fail now")
        for case in ("aaaa", "bbbb", "cccc", "dddd")
    ]
    other = made.Change(kernel="k", case_id="eeee", standing="worse", reason="larger")
    report = made.report(made.answer(made.wrong()), changes=(*changes, other), baseline="b.json")
    text = render(report, format_)
    assert text.count("pass before, fail now") == 1
    aaaa = text.index("4 cases of k (aaaa")
    assert "dddd" not in text[aaaa:].splitlines()[0], "so many are named, and no more"
    assert "k eeee" in text


# CSV


def test_csv_has_a_row_an_answer(sample):
    rows = list(csv.DictReader(io.StringIO(render(sample, "csv"))))
    assert [row["unit"] for row in rows] == [answer.unit for answer in sample.answers]
    assert {row["stage"] for row in rows} == {answer.stage for answer in sample.answers}
    worst = next(row for row in rows if row["status"] == "fail" and row["out_rmse"])
    assert float(worst["out_over_bound"]) > 1


# JUnit


def suites(report):
    return ET.fromstring(render(report, "junit"))  # noqa: S314  # our own


def test_junit_counts_what_is_in_it(sample):
    root = suites(sample)
    cases = root.findall("testsuite/testcase")
    assert int(root.get("tests")) == len(cases)
    for tag, name in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        assert int(root.get(name)) == sum(case.find(tag) is not None for case in cases) > 0
        for suite in root:
            found = suite.findall(f"testcase/{tag}")
            assert int(suite.get(name)) == len(found)
    questions = [answer for answer in sample.answers if not answer.smallest_of]
    assert len(cases) == len(questions) + len(sample.changes) + 1  # the unfinished


def test_junit_properties_carry_what_finds_a_failure_again(sample):
    root = suites(sample)
    failure = root.find("testsuite[@name='myfa.py::forward · bounds']/testcase/failure/..")
    told = {p.get("name"): p.get("value") for p in failure.findall("properties/property")}
    assert told.keys() >= {"rmse", "seed", "problem", "case_id", "device", "failure"}
    assert told["device"] == "NVIDIA H200"
    assert told["failure"] in {answer.failure for answer in sample.answers}


@pytest.mark.parametrize(
    ("status", "tag"),
    [
        ("fail", "failure"),
        ("flaky", "failure"),
        *((status, "error") for status in ("error", "crash", "timeout", "oom")),
        ("oracle disagrees", "error"),
        ("unsupported", "skipped"),
    ],
)
def test_junit_has_a_word_for_each_status(status, tag):
    report = made.report(made.answer(made.record(status=status, reason="why")))
    case = suites(report).find("testsuite/testcase")
    assert [child.tag for child in case if child.tag != "properties"] == [tag]
    assert case.find(tag).get("message") == "why"


def test_junit_fails_in_doubt_where_the_gate_does():
    answer = made.answer(made.record(status="warn", reason="why"))
    lax = suites(made.report(answer))
    strict = made.report(answer, command="attncheck gate k --strict")
    assert lax.get("failures") == "0"
    assert suites(strict).get("failures") == "1"


def test_junit_is_not_green_where_the_gate_is_not():
    report = made.report(harness=("no space left on device",))
    assert suites(report).get("errors") == "1"


# SARIF: the essentials of its schema, and what code scanning asks for.


def assert_sarif(data):
    assert data["version"] == "2.1.0"
    assert data["$schema"].endswith("sarif-2.1.0.json")
    (run,) = data["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "attncheck"
    ids = [rule["id"] for rule in driver["rules"]]
    assert len(ids) == len(set(ids))
    for rule in driver["rules"]:
        for name in ("shortDescription", "fullDescription", "help"):
            assert rule[name]["text"]
        assert rule["defaultConfiguration"]["level"] in {"error", "warning", "note"}
    for result in run["results"]:
        assert ids[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] in {"error", "warning"}
        assert result["message"]["text"]
        (location,) = result["locations"]
        place = location["physicalLocation"]
        assert re.fullmatch(r"[^\s\\]+", place["artifactLocation"]["uri"])
        assert place["region"]["startLine"] >= 1
        assert all(re.fullmatch("[0-9a-f]{64}", p) for p in result["partialFingerprints"].values())
    for invocation in run["invocations"]:
        assert isinstance(invocation["executionSuccessful"], bool)
        for note in invocation["toolExecutionNotifications"]:
            assert note["message"]["text"]


def test_sarif_has_what_its_schema_asks_for(sample):
    data = json.loads(render(sample, "sarif"))
    assert_sarif(data)
    levels = [result["level"] for result in data["runs"][0]["results"]]
    assert levels.count("error") == 22 + 1  # failures, and one that is worse than the baseline
    assert levels.count("warning") == 13


def test_sarif_knows_a_result_again_by_kernel_and_case():
    def prints(seed, kernel="k"):
        report = made.report(made.answer(made.wrong(kernel, asked={"seed": seed})), seconds=seed)
        (result,) = json.loads(render(report, "sarif"))["runs"][0]["results"]
        return result["partialFingerprints"]

    assert prints(1) == prints(1)
    assert prints(1) != prints(2)
    assert prints(1) != prints(1, "other")


def test_a_passing_sarif_has_no_result():
    report = made.report(made.answer(made.record()))
    data = json.loads(render(report, "sarif"))
    assert_sarif(data)
    assert data["runs"][0]["results"] == []


# GitHub


COMMAND = re.compile(r"::(error|warning|notice) ((?:\w+=[^,:\r\n]*,?)+)::([^\r\n]*)")


def commands(report):
    lines = render(report, "github").splitlines()
    return [COMMAND.fullmatch(line).groups() for line in lines]


def test_every_line_is_a_command(sample):
    levels = [level for level, _, _ in commands(sample)]
    assert levels == ["error"] * 6 + ["warning"] + ["notice"] * 5


def test_github_shows_ten_of_each_level_and_counts_the_rest():
    kernels = [f"kernel{i}" for i in range(25)]
    answers = [made.answer(made.wrong(name)) for name in kernels]
    answers += [made.answer(made.record(name, status="warn", reason="odd")) for name in kernels]
    absent = dict.fromkeys(kernels, "not here")
    found = commands(made.report(*answers, absent=absent))
    levels = [level for level, _, _ in found]
    assert {level: levels.count(level) for level in levels} == dict.fromkeys(
        ("error", "warning", "notice"), MOST_ANNOTATIONS
    )
    assert "15 more failures, 15 more warnings, 16 more notices" in found[-1][2]


def test_github_annotates_the_line_of_the_kernel(tmp_path, monkeypatch):
    (tmp_path / "my,fa.py").write_text("import torch\n\n\ndef forward(q, k, v):\n    return q\n")
    monkeypatch.chdir(tmp_path)
    report = made.report(made.answer(made.wrong("my,fa.py::forward")))
    (_, properties, text), _ = commands(report)
    assert properties.startswith("file=my%2Cfa.py,line=4,title=my%2Cfa.py%3A%3Aforward")
    assert "%0AReproduce: attncheck repro " in text


def test_a_percent_sign_is_no_escape():
    report = made.report(made.answer(made.record(status="error", reason="50%0A::error::no")))
    (_, _, text), _ = commands(report)
    assert "50%250A::error::no" in text
