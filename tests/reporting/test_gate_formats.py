"""Machine-readable formats of a gate report: JSON, CSV, JUnit, SARIF, GitHub commands."""

import csv
import io
import json
import math
import re
from xml.etree import ElementTree as ET

import pytest
from tests.reporting import gate_reports as gates

from attncheck.core.errors import UsageError
from attncheck.records.json_reports import load_report
from attncheck.records.run_reports import GateReport
from attncheck.reporting.ci_formats import MOST_ANNOTATIONS
from attncheck.reporting.rendering import render


@pytest.fixture(scope="module")
def sample():
    return gates.sample()


# JSON


def test_infinity_round_trips_through_json():
    wrong = gates.wrong(share=math.inf)
    change = gates.Change(kernel="k", case_id="c", standing="worse", before=0.0, after=math.inf)
    report = gates.report(gates.answer(wrong), changes=(change,))
    text = render(report, "json")
    json.loads(text, parse_constant=pytest.fail)
    assert load_report(text, GateReport) == report


@pytest.mark.parametrize(
    ("changes", "fact"),
    [({"environment": "gone"}, "no environment"), ({"case": {}}, "holds no problem")],
)
def test_answer_without_environment_or_problem_is_rejected(changes, fact):
    report = gates.report(gates.answer(gates.record(**changes)))
    with pytest.raises(UsageError, match=fact):
        load_report(render(report, "json"), GateReport)


@pytest.mark.parametrize("format_", ["table", "md", "github"])
def test_changes_with_the_same_reason_are_grouped(format_):
    changes = [
        gates.Change(kernel="k", case_id=case, standing="worse", reason="pass before, fail now")
        for case in ("aaaa", "bbbb", "cccc", "dddd")
    ]
    other = gates.Change(kernel="k", case_id="eeee", standing="worse", reason="larger")
    report = gates.report(gates.answer(gates.wrong()), changes=(*changes, other), baseline="b.json")
    text = render(report, format_)
    assert text.count("pass before, fail now") == 1
    aaaa = text.index("4 cases of k (aaaa")
    assert "dddd" not in text[aaaa:].splitlines()[0], "only the first few cases are named"
    assert "k eeee" in text


# CSV


def test_csv_has_one_row_per_answer(sample):
    rows = list(csv.DictReader(io.StringIO(render(sample, "csv"))))
    assert [row["unit"] for row in rows] == [answer.unit for answer in sample.answers]
    assert {row["stage"] for row in rows} == {answer.stage for answer in sample.answers}
    worst = next(row for row in rows if row["status"] == "fail" and row["out_rmse"])
    assert float(worst["out_over_bound"]) > 1


# JUnit


def suites(report):
    return ET.fromstring(render(report, "junit"))  # noqa: S314  # our own


def test_junit_totals_match_its_cases(sample):
    root = suites(sample)
    cases = root.findall("testsuite/testcase")
    assert int(root.get("tests")) == len(cases)
    for tag, name in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        assert int(root.get(name)) == sum(case.find(tag) is not None for case in cases) > 0
        for suite in root:
            assert int(suite.get(name)) == len(suite.findall(f"testcase/{tag}"))
    questions = [answer for answer in sample.answers if not answer.smallest_of]
    assert len(cases) == len(questions) + len(sample.changes) + 1  # the unfinished


def test_junit_counts_comparisons_with_a_baseline_apart():
    answers = [gates.answer(gates.wrong("mine")), gates.answer(gates.record("mine"))]
    change = gates.Change(kernel="mine", case_id="abcdefghij", standing="worse", reason="larger")
    root = suites(gates.report(*answers, changes=(change,), baseline="b.json"))
    failures = {suite.get("name"): suite.get("failures") for suite in root}
    assert failures == {"mine · bounds": "1", "mine · compared with b.json": "1"}


def test_summary_shows_failures_before_tables(sample):
    page = render(sample, "md")
    titles = re.findall("^## (.*)", page, re.MULTILINE)
    assert titles[1:] == [
        *("failures, worst first", "compared with the baseline baseline.json"),
        *("by kernel and stage", "warnings", "not covered"),
    ]


def test_junit_properties_identify_the_failure(sample):
    root = suites(sample)
    failure = root.find("testsuite[@name='myfa.py::forward · bounds']/testcase/failure/..")
    values = {p.get("name"): p.get("value") for p in failure.findall("properties/property")}
    assert values.keys() >= {"rmse", "seed", "problem", "case_id", "device", "failure"}
    assert values["device"] == "NVIDIA H200"
    assert values["failure"] in {answer.failure for answer in sample.answers}


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
def test_junit_maps_each_status_to_a_tag(status, tag):
    report = gates.report(gates.answer(gates.record(status=status, reason="why")))
    case = suites(report).find("testsuite/testcase")
    assert [child.tag for child in case if child.tag != "properties"] == [tag]
    assert case.find(tag).get("message") == "why"


def test_junit_counts_warnings_as_failures_when_strict():
    answer = gates.answer(gates.record(status="warn", reason="why"))
    lax = suites(gates.report(answer))
    strict = gates.report(answer, command="attncheck gate k --strict")
    assert lax.get("failures") == "0"
    assert suites(strict).get("failures") == "1"


def test_junit_reports_errors_of_the_gate_itself():
    report = gates.report(harness=("no space left on device",))
    assert suites(report).get("errors") == "1"


# SARIF: the essentials of its schema, and what GitHub's code scanning requires.


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


def test_sarif_has_required_fields(sample):
    data = json.loads(render(sample, "sarif"))
    assert_sarif(data)
    levels = [result["level"] for result in data["runs"][0]["results"]]
    assert levels.count("error") == 22 + 1  # failures, and one that is worse than the baseline
    assert levels.count("warning") == 13


def test_sarif_fingerprint_depends_on_kernel_and_case():
    def fingerprints(seed, kernel="k"):
        report = gates.report(
            gates.answer(gates.wrong(kernel, problem={"seed": seed})), seconds=seed
        )
        (result,) = json.loads(render(report, "sarif"))["runs"][0]["results"]
        return result["partialFingerprints"]

    assert fingerprints(1) == fingerprints(1)
    assert fingerprints(1) != fingerprints(2)
    assert fingerprints(1) != fingerprints(1, "other")


def test_sarif_of_passing_gate_has_no_results():
    report = gates.report(gates.answer(gates.record()))
    data = json.loads(render(report, "sarif"))
    assert_sarif(data)
    assert data["runs"][0]["results"] == []


# GitHub


COMMAND = re.compile(r"::(error|warning|notice) ((?:\w+=[^,:\r\n]*,?)+)::([^\r\n]*)")


def commands(report):
    lines = render(report, "github").splitlines()
    return [COMMAND.fullmatch(line).groups() for line in lines]


def test_every_github_line_is_a_command(sample):
    levels = [level for level, _, _ in commands(sample)]
    assert levels == ["error"] * 6 + ["warning"] + ["notice"] * 5


def test_github_limits_annotations_per_level_and_counts_the_rest():
    kernels = [f"kernel{i}" for i in range(25)]
    answers = [gates.answer(gates.wrong(name)) for name in kernels]
    answers += [gates.answer(gates.record(name, status="warn", reason="odd")) for name in kernels]
    absent = dict.fromkeys(kernels, "not here")
    annotations = commands(gates.report(*answers, absent=absent))
    levels = [level for level, _, _ in annotations]
    assert {level: levels.count(level) for level in levels} == dict.fromkeys(
        ("error", "warning", "notice"), MOST_ANNOTATIONS
    )
    assert "15 more failures, 15 more warnings, 16 more notices" in annotations[-1][2]


def test_github_annotates_the_kernels_definition(tmp_path, monkeypatch):
    (tmp_path / "my,fa.py").write_text("import torch\n\n\ndef forward(q, k, v):\n    return q\n")
    monkeypatch.chdir(tmp_path)
    report = gates.report(gates.answer(gates.wrong("my,fa.py::forward")))
    (_, properties, text), _ = commands(report)
    assert properties.startswith("file=my%2Cfa.py,line=4,title=my%2Cfa.py%3A%3Aforward")
    assert properties.endswith("forward%3A bounds compare")
    assert "%0AReproduce: attncheck repro " in text


def test_github_escapes_percent_signs():
    report = gates.report(gates.answer(gates.record(status="error", reason="50%0A::error::no")))
    (_, _, text), _ = commands(report)
    assert "50%250A::error::no" in text
