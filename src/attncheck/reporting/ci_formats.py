"""Gate reports for other programs: JUnit XML, SARIF, and GitHub workflow commands."""

from __future__ import annotations

import ast
import hashlib
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote
from xml.etree import ElementTree as ET  # the usual name; only used for writing

import msgspec

from attncheck.core.sanitize_text import one_line, shortened
from attncheck.records.problem_summary import problem_of
from attncheck.records.record import FAILED_STATUSES, Status, gradients_of
from attncheck.records.run_reports import Answer, GateReport
from attncheck.reporting.diagnosis_text import failure_heading
from attncheck.reporting.document import card_text
from attncheck.reporting.gate_document import failure_card, not_covered
from attncheck.reporting.gate_verdict import (
    DOUBTFUL,
    FailureGroup,
    failing_changes,
    failure_groups,
    gate_exit_code,
    gate_verdict,
    group_changes,
    policy_of,
    questions,
    status_sides,
)
from attncheck.reporting.record_text import (
    RULES,
    STATUSES,
    footnote,
    rule_id,
    rule_text,
)


def _failure_lines(report: GateReport, group: FailureGroup) -> list[str]:
    return [failure_heading(group.shown.record), *card_text(failure_card(report, group))]


# JUnit

# Characters that XML 1.0 cannot hold, not even as character references.
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_COUNTED = {"failure": "failures", "error": "errors", "skipped": "skipped"}


def junit_text(report: GateReport) -> str:
    """Return ``report`` as JUnit XML, as GitLab, Jenkins and GitHub's actions read it.

    There is a suite for each kernel and stage, with a test case for each question, and one for each
    kernel's comparison with a baseline, with a test case for each of its cases.
    """
    root = ET.Element("testsuites", {"name": "attncheck gate"})
    for name, cases in _suites(report).items():
        suite = ET.SubElement(root, "testsuite", {"name": _xml(name)})
        suite.extend(cases)
        suite.set("tests", str(len(cases)))
        for tag, counted in _COUNTED.items():
            suite.set(counted, str(sum(case.find(tag) is not None for case in cases)))
        suite.set("time", f"{sum(float(case.get('time', '0')) for case in cases):.6f}")
        suite.set("timestamp", _xml(report.started.rstrip("Z")))
    for name in ("tests", *_COUNTED.values()):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    root.set("time", f"{sum(float(suite.get('time', '0')) for suite in root):.6f}")
    ET.indent(root)
    body = ET.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{body}\n'


def _suites(report: GateReport) -> dict[str, list[ET.Element]]:
    suites: dict[str, list[ET.Element]] = {}
    failing, _ = status_sides(report)
    smallest = {(a.record.kernel, a.smallest_of): a for a in report.answers if a.smallest_of}
    # Questions that passed are test cases too, since dashboards count them.
    for answer in questions(report):
        record = answer.record
        group = FailureGroup(answer=answer, smallest=smallest.get((record.kernel, record.case_id)))
        case = _question_case(report, group, failing)
        suites.setdefault(f"{record.kernel} · {answer.stage}", []).append(case)
    worse = failing_changes(report, policy_of(report))
    for change in report.changes:
        case = _case(change.kernel, f"{change.case_id} compared with {report.baseline}")
        text = _xml(shortened(change.reason))
        if change in worse:
            ET.SubElement(case, "failure", {"type": "regression", "message": text}).text = text
        else:
            ET.SubElement(case, "system-out").text = _xml(f"{change.standing}: {text}")
        # A suite of its own, since the stage baseline counts questions.
        suites.setdefault(f"{change.kernel} · compared with {report.baseline}", []).append(case)
    # Errors that are no kernel's fault, but leave the gate without an answer.
    errors = [(f"the gate itself {i}", "harness", line) for i, line in enumerate(report.harness, 1)]
    if report.unfinished:
        why = f"{report.unfinished} questions were not asked: {report.unfinished_because}"
        errors.append(("every question is asked", "unfinished", why))
    for name, kind, line in errors:
        case = _case("attncheck", name)
        ET.SubElement(case, "error", {"type": kind, "message": _xml(shortened(line))})
        suites.setdefault("attncheck", []).append(case)
    return suites


def _question_case(
    report: GateReport, group: FailureGroup, failing: frozenset[Status]
) -> ET.Element:
    answer, record = group.answer, group.answer.record
    question = str(record.case.get("question", ""))
    name = f"{question} {problem_of(record).full_line} {record.case_id}"
    case = _case(answer.test or record.kernel, name, answer.seconds)
    properties = ET.SubElement(case, "properties")
    for key, value in _properties(report, answer).items():
        ET.SubElement(properties, "property", {"name": key, "value": _xml(value)})
    message = _xml(shortened(footnote(record) or record.reason))
    if record.status == "unsupported":
        ET.SubElement(case, "skipped", {"message": message})
    elif record.status in failing or record.status == "oracle disagrees":
        # A missing answer is an error in JUnit's terms; a wrong one is a failure.
        missing = FAILED_STATUSES - {"fail"} | {"oracle disagrees"}
        rule = record.judgement.rule if record.judgement else ""
        about = {"type": _xml(rule or record.status), "message": message}
        element = ET.SubElement(case, "error" if record.status in missing else "failure", about)
        element.text = _ILLEGAL.sub("", "\n".join(_failure_lines(report, group)))
    elif message:
        ET.SubElement(case, "system-out").text = f"{record.status}: {message}"
    return case


def _properties(report: GateReport, answer: Answer) -> dict[str, str]:
    record, problem = answer.record, problem_of(answer.record)
    environment = report.environments.get(record.environment)
    facts = {
        "problem": problem.full_line,
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
    for name, errors in gradients_of(record).items():
        facts[f"{name}_rmse"] = repr(errors.rmse)
    return {name: value for name, value in facts.items() if value}


def _case(classname: str, name: str, seconds: float = 0.0) -> ET.Element:
    about = {"classname": _xml(classname), "name": _xml(shortened(name))}
    return ET.Element("testcase", about | {"time": f"{seconds:.6f}"})


def _xml(text: str) -> str:
    return _ILLEGAL.sub("", one_line(text))


# SARIF

MOST_RESULTS = 5000  # results of one run that GitHub keeps

_SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
# Code scanning requires a file for each result; this one stands in if the kernel's is not found.
_NOWHERE = "pyproject.toml"


def sarif_text(report: GateReport) -> str:
    """Return ``report`` as SARIF 2.1.0: a result for each failing or odd answer, and its rules."""
    rules: dict[str, dict[str, Any]] = {}
    failing, _ = status_sides(report)
    answers = [a for a in questions(report) if a.record.status not in {"pass", "unsupported"}]
    answers.sort(key=lambda answer: answer.record.status not in failing)
    results = []
    for answer in answers[:MOST_RESULTS]:
        record = answer.record
        level = "error" if record.status in failing else "warning"
        rules.setdefault(rule_id(record), _rule(rule_id(record), rule_text(record), level))
        lines = _failure_lines(report, FailureGroup(answer=answer))
        facts: dict[str, Any] = {
            "stage": answer.stage,
            "case_id": one_line(record.case_id),
            "failure": one_line(answer.failure),
        }
        if record.out is not None:
            rmse = record.out.rmse
            facts["rmse"] = rmse if rmse - rmse == 0 else str(rmse)  # JSON has no NaN
        results.append(
            _result(rule_id(record), level, "\n".join(lines), record.kernel, record.case_id)
            | {"properties": facts}
        )
    for change in report.changes:
        if change.standing == "worse":
            name = "fail/regression"
            rules.setdefault(name, _rule(name, RULES["regression"], "error"))
            reason = shortened(change.reason) or "worse than the baseline"
            text = f"{one_line(change.kernel)} on {one_line(change.case_id)}: {reason}"
            results.append(_result(name, "error", text, change.kernel, change.case_id))
    index = {name: i for i, name in enumerate(rules)}
    run = {
        "tool": {"driver": _driver(report) | {"rules": list(rules.values())}},
        "columnKind": "unicodeCodePoints",
        "invocations": [_invocation(report)],
        "results": [one | {"ruleIndex": index[one["ruleId"]]} for one in results[:MOST_RESULTS]],
    }
    data = {"$schema": _SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}
    return msgspec.json.format(msgspec.json.encode(data), indent=2).decode() + "\n"


def _driver(report: GateReport) -> dict[str, Any]:
    versions = {environment.attncheck for environment in report.environments.values()}
    version = {"version": one_line(next(iter(versions)))} if len(versions) == 1 else {}
    return {"name": "attncheck", "fullName": "attncheck gate"} | version


def _invocation(report: GateReport) -> dict[str, Any]:
    notes = [
        {"level": "note", "message": {"text": shortened(line) or "nothing said"}}
        for line in not_covered(report)
    ]
    return {
        "commandLine": shortened(report.command),
        "exitCode": gate_exit_code(report),
        "executionSuccessful": not (report.harness or report.unfinished),
        "toolExecutionNotifications": notes,
    }


def _rule(name: str, text: str, level: str) -> dict[str, Any]:
    meanings: Mapping[Any, str] = STATUSES
    meaning = meanings[name.partition("/")[0].replace("-", " ")]
    help_ = f"{text} {meaning} See it again with attncheck repro ID."
    return {
        "id": name,
        "name": "".join(word.capitalize() for word in name.replace("/", "-").split("-")),
        "shortDescription": {"text": text},
        "fullDescription": {"text": help_},
        "help": {"text": help_},
        "defaultConfiguration": {"level": level},
        "properties": {"tags": ["attention", "correctness"]},
    }


def _result(rule: str, level: str, text: str, kernel: str, case_id: str) -> dict[str, Any]:
    """Return a SARIF result with its location and its fingerprint."""
    place = locate(kernel)
    # Hash only kernel and Case, no numbers, so that the next run's failure is the same alert.
    print_ = hashlib.sha256(f"{kernel}\0{case_id}".encode(errors="backslashreplace")).hexdigest()
    return {
        "ruleId": rule,
        "level": level,
        "message": {"text": text},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": quote(place.path or _NOWHERE)},
                    "region": {"startLine": place.line},
                },
                "logicalLocations": [{"fullyQualifiedName": one_line(kernel)}],
            }
        ],
        "partialFingerprints": {"kernelAndCase/v1": print_},
    }


# GitHub's workflow commands

MOST_ANNOTATIONS = 10  # annotations of each level that GitHub shows of one step
_LONGEST_TITLE = 200  # characters of an annotation's title

Level = Literal["error", "warning", "notice"]


def github_text(report: GateReport) -> str:
    """Return ``report`` as workflow commands, which become annotations of the pull request.

    There are at most ``MOST_ANNOTATIONS`` of each level; the last notice counts the others.
    """
    errors, warned = list(_errors(report)), list(_warnings(report))
    notices = [_annotation("notice", text, "not covered") for text in not_covered(report)]
    most = MOST_ANNOTATIONS
    more = [
        f"{len(lines) - shown:,} more {what}"
        for lines, shown, what in (
            (errors, most, "failures"),
            (warned, most, "warnings"),
            (notices, most - 1, "notices"),
        )
        if len(lines) > shown
    ]
    verdict = gate_verdict(report)
    text = f"{verdict.word}  {verdict.text}" + (f" (not shown: {', '.join(more)})" if more else "")
    # GitHub silently drops annotations beyond its limit, so the last notice counts them.
    last = _annotation("notice", text, "attncheck gate")
    return "".join(
        f"{line}\n" for line in [*errors[:most], *warned[:most], *notices[: most - 1], last]
    )


def _errors(report: GateReport) -> Iterator[str]:
    for line in report.harness:
        yield _annotation("error", line, "the gate itself")
    for group in failure_groups(report):
        lines, kernel = _failure_lines(report, group), group.shown.record.kernel
        # The first line of the text says what is wrong; a title that repeats it is cut by GitHub.
        question = str(group.shown.record.case.get("question", ""))
        title = f"{kernel}: {group.answer.stage} {question}".rstrip()
        yield _annotation("error", "\n".join(lines), title, kernel)
    for change, cases in group_changes(failing_changes(report, policy_of(report))):
        text = f"{change.standing} than the baseline: {change.reason}"
        yield _annotation("error", text, cases, change.kernel)


def _warnings(report: GateReport) -> Iterator[str]:
    _, doubtful = status_sides(report)
    groups: dict[tuple[str, str], list[str]] = {}
    for status in (status for status in DOUBTFUL if status in doubtful):
        for record in (answer.record for answer in questions(report)):
            if record.status == status:
                lines = groups.setdefault((record.kernel, status), [])
                lines.append(f"{footnote(record)} ({record.case_id})")
    for (kernel, word), lines in groups.items():
        more = f"\nand {len(lines) - 1:,} more" if len(lines) > 1 else ""
        yield _annotation("warning", f"{lines[0]}{more}", f"{kernel}: {word}", kernel)


def _annotation(level: Level, text: str, title: str, kernel: str = "") -> str:
    """Return ``::error file=kernel.py,line=3,title=…::text``, with GitHub's escapes."""
    place = locate(kernel)
    facts = {"file": place.path, "line": str(place.line)} if place.path else {}
    facts["title"] = one_line(title)[:_LONGEST_TITLE]
    properties = ",".join(
        f"{name}={_escape(value).replace(':', '%3A').replace(',', '%2C')}"
        for name, value in facts.items()
    )
    lines = (line[: len(line) - len(line.lstrip())] + shortened(line) for line in text.split("\n"))
    message = _escape("\n".join(lines))
    return f"::{level} {properties}::{message}"


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


# Location of a kernel's definition, found by parsing and without importing anything

_LARGEST_SOURCE = 2**20  # bytes of a source file that is parsed
_ENDS = (".py", "/__init__.py")


@dataclass(frozen=True, slots=True)
class Location:
    """A line of a file of the working directory."""

    path: str  # relative to that directory, with ``/``; empty if no file is known
    line: int = 1  # from 1


def locate(kernel: str, root: Path | None = None) -> Location:
    """Return the line on which ``file.py::name`` or ``package.module:name`` is defined.

    Files outside ``root`` (default: the working directory) are not read, since a report's names
    are not trusted. The path is empty if there is no such file; the line is 1 if the file does not
    define the name.
    """
    return _locate(kernel, (Path.cwd() if root is None else root).resolve())


@lru_cache(maxsize=64)
def _locate(kernel: str, root: Path) -> Location:
    file, double, name = kernel.partition("::")
    if double:
        paths = [file]
    else:
        module, colon, name = kernel.partition(":")
        parts = module.split(".")
        if not colon or not all(part.isidentifier() for part in parts):
            return Location("")
        paths = [f"{folder}{'/'.join(parts)}{end}" for folder in ("", "src/") for end in _ENDS]
    for path in paths:
        inside = _inside(path, root)
        if inside is not None:
            return Location(inside.relative_to(root).as_posix(), _line(inside, name))
    return Location("")


def _inside(path: str, root: Path) -> Path | None:
    """Return the resolved ``path`` if it is a Python file below ``root``, else None."""
    try:
        file = (root / path).resolve()
        below = file.is_relative_to(root)
        return file if below and file.suffix == ".py" and file.is_file() else None
    except (OSError, ValueError, RuntimeError):  # a name that no file can have, a loop of links
        return None


def _line(path: Path, name: str) -> int:
    """Return the line of the outermost definition of ``name``; 1 if there is none."""
    try:
        with path.open("rb") as file:
            source = file.read(_LARGEST_SOURCE + 1)
        if len(source) > _LARGEST_SOURCE:
            return 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the file's string literals
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return 1
    for node in ast.walk(tree):
        if _defines(node, name):
            return int(node.lineno)  # type: ignore[attr-defined]  # definitions have a line
    return 1


def _defines(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name == name
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)
