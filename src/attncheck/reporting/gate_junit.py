"""A gate as JUnit's XML: a suite for each kernel and stage, a test case for each question."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET  # its usual name; it only writes

from attncheck.core.sanitize_text import one_line, shortened
from attncheck.records.problem_summary import problem_of
from attncheck.records.record import FAILED_STATUSES
from attncheck.reporting import gate_content
from attncheck.reporting.diagnosis_text import problem_line
from attncheck.reporting.gate_verdict import Failing, failing_statuses, policy_of, questions
from attncheck.reporting.gradients import gradients_of
from attncheck.reporting.verdicts import footnote

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.records.record import Status
    from attncheck.records.run_reports import Answer, Change, GateReport

__all__ = ["as_junit"]

# What XML 1.0 has no way to say, not even as a reference.
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_COUNTED = {"failure": "failures", "error": "errors", "skipped": "skipped"}


def as_junit(report: GateReport) -> str:
    """``report`` as JUnit's XML, as GitLab, Jenkins and GitHub's actions read it."""
    root = ET.Element("testsuites", {"name": "attncheck gate"})
    for name, cases in _suites(report).items():
        suite = ET.SubElement(root, "testsuite", {"name": _text(name)})
        suite.extend(cases)
        _count(suite)
        suite.set("timestamp", _text(report.started.rstrip("Z")))
    _total(root)
    ET.indent(root)
    body = ET.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{body}\n'


def _suites(report: GateReport) -> dict[str, list[ET.Element]]:
    suites: dict[str, list[ET.Element]] = {}
    wrong = failing_statuses(questions(report), policy_of(report))
    smallest = {(a.record.kernel, a.smallest_of): a for a in report.answers if a.smallest_of}
    for answer in questions(report):
        record = answer.record
        failing = Failing(answer=answer, smallest=smallest.get((record.kernel, record.case_id)))
        case = _case(report, failing, wrong)
        suites.setdefault(f"{record.kernel} · {answer.stage}", []).append(case)
    for change in report.changes:
        case = _changed(report, change)
        suites.setdefault(f"{change.kernel} · baseline", []).append(case)
    itself = list(_itself(report))
    return suites | ({"attncheck": itself} if itself else {})


def _case(report: GateReport, failing: Failing, wrong: frozenset[Status]) -> ET.Element:
    answer, record = failing.answer, failing.answer.record
    question = str(record.case.get("question", ""))
    name = f"{question} {problem_line(problem_of(record))} {record.case_id}"
    case = _element(answer.test or record.kernel, name, answer.seconds)
    properties = ET.SubElement(case, "properties")
    for key, value in _facts(report, answer).items():
        ET.SubElement(properties, "property", {"name": key, "value": _text(value)})
    said = _text(shortened(footnote(record) or record.reason))
    if record.status == "unsupported":
        ET.SubElement(case, "skipped", {"message": said})
    elif record.status in wrong or record.status == "oracle disagrees":
        lost = record.status in FAILED_STATUSES - {"fail"} or record.status == "oracle disagrees"
        rule = record.judgement.rule if record.judgement else ""
        about = {"type": _text(rule or record.status), "message": said}
        element = ET.SubElement(case, "error" if lost else "failure", about)
        element.text = _ILLEGAL.sub("", "\n".join(gate_content.diagnosis_lines(report, failing)))
    elif said:
        ET.SubElement(case, "system-out").text = f"{record.status}: {said}"
    return case


def _facts(report: GateReport, answer: Answer) -> dict[str, str]:
    """Properties of a test case."""
    record, problem = answer.record, problem_of(answer.record)
    environment = report.environments.get(record.environment)
    facts = {
        "problem": problem_line(problem),
        "case_id": record.case_id,
        "seed": str(problem.seed),
        "status": record.status,
        "device": environment.device if environment else "",
        "failure": answer.failure,
        "attempts": str(answer.attempts) if answer.attempts > 1 else "",
    }
    if record.out is not None:
        facts |= {"rmse": repr(record.out.rmse), "max_error": repr(record.out.max_error)}
    if record.lse is not None:
        facts["lse_rmse"] = repr(record.lse.rmse)
    for name, found in gradients_of(record).items():
        facts[f"{name}_rmse"] = repr(found.rmse)
    return {name: value for name, value in facts.items() if value}


def _changed(report: GateReport, change: Change) -> ET.Element:
    case = _element(change.kernel, f"{change.case_id} beside {report.baseline}", 0.0)
    bad = {"worse", "better", "gone"} if policy_of(report).strict_baseline else {"worse"}
    said = _text(shortened(change.reason))
    if change.standing in bad:
        ET.SubElement(case, "failure", {"type": "regression", "message": said}).text = said
    else:
        ET.SubElement(case, "system-out").text = _text(f"{change.standing}: {said}")
    return case


def _itself(report: GateReport) -> Iterator[ET.Element]:
    """What is no kernel's fault, and still leaves the gate without an answer."""
    for i, line in enumerate(report.harness, 1):
        case = _element("attncheck", f"the gate itself {i}", 0.0)
        ET.SubElement(case, "error", {"type": "harness", "message": _text(shortened(line))})
        yield case
    if report.unfinished:
        why = f"{report.unfinished} questions were not asked: {report.unfinished_because}"
        case = _element("attncheck", "every question is asked", 0.0)
        ET.SubElement(case, "error", {"type": "unfinished", "message": _text(shortened(why))})
        yield case


def _element(classname: str, name: str, seconds: float) -> ET.Element:
    about = {"classname": _text(classname), "name": _text(shortened(name))}
    return ET.Element("testcase", about | {"time": f"{seconds:.6f}"})


def _count(suite: ET.Element) -> None:
    cases = suite.findall("testcase")
    suite.set("tests", str(len(cases)))
    for tag, name in _COUNTED.items():
        suite.set(name, str(sum(case.find(tag) is not None for case in cases)))
    suite.set("time", f"{sum(float(case.get('time', '0')) for case in cases):.6f}")


def _total(root: ET.Element) -> None:
    for name in ("tests", *_COUNTED.values()):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    root.set("time", f"{sum(float(suite.get('time', '0')) for suite in root):.6f}")


def _text(text: str) -> str:
    return _ILLEGAL.sub("", one_line(text))
