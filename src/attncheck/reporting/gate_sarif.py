"""A gate as SARIF 2.1.0, which code scanning reads."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from attncheck.core.sanitize_text import one_line, shortened
from attncheck.reporting import gate_content
from attncheck.reporting.gate_terms import RULES, STATUSES, rule_id, rule_text
from attncheck.reporting.gate_verdict import (
    Failing,
    exit_code,
    failing_statuses,
    policy_of,
    questions,
)
from attncheck.reporting.source_lines import locate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attncheck.records.record import Record, Status
    from attncheck.records.run_reports import Answer, Change, GateReport

__all__ = ["MOST", "as_sarif"]

MOST = 5000
"""Results of one run that GitHub keeps."""
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
# Code scanning takes no result without a file, and a kernel may be in none of the repository.
_NOWHERE = "pyproject.toml"
_SILENT = frozenset({"pass", "unsupported"})


def as_sarif(report: GateReport) -> str:
    """``report`` as SARIF: its rules, and a result for each answer that fails or is odd."""
    rules: dict[str, dict[str, Any]] = {}
    policy = policy_of(report)
    wrong = failing_statuses(questions(report), policy)
    results = [
        _result(report, answer, rules, "error" if answer.record.status in wrong else "warning")
        for answer in _told(report, wrong)
    ]
    results += [_changed(change, rules) for change in report.changes if change.standing == "worse"]
    code = exit_code(
        report, strict=policy.strict, strict_baseline=policy.strict_baseline, flaky=policy.flaky
    )
    index = {name: i for i, name in enumerate(rules)}
    run = {
        "tool": {"driver": _driver(report) | {"rules": list(rules.values())}},
        "columnKind": "unicodeCodePoints",
        "invocations": [_invocation(report, code)],
        "results": [one | {"ruleIndex": index[one["ruleId"]]} for one in results[:MOST]],
    }
    data = {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}
    return msgspec.json.format(msgspec.json.encode(data), indent=2).decode() + "\n"


def _told(report: GateReport, wrong: frozenset[Status]) -> list[Answer]:
    """What fails, then what is odd, as many as are kept."""
    told = [answer for answer in questions(report) if answer.record.status not in _SILENT]
    return sorted(told, key=lambda answer: answer.record.status not in wrong)[:MOST]


def _driver(report: GateReport) -> dict[str, Any]:
    versions = {environment.attncheck for environment in report.environments.values()}
    version = {"version": one_line(next(iter(versions)))} if len(versions) == 1 else {}
    return {"name": "attncheck", "fullName": "attncheck gate"} | version


def _invocation(report: GateReport, code: int) -> dict[str, Any]:
    notes = [
        {"level": "note", "message": {"text": shortened(line) or "nothing said"}}
        for line in gate_content.missing(report)
    ]
    return {
        "commandLine": shortened(report.command),
        "exitCode": code,
        "executionSuccessful": not (report.harness or report.unfinished),
        "toolExecutionNotifications": notes,
    }


def _result(
    report: GateReport, answer: Answer, rules: dict[str, dict[str, Any]], level: str
) -> dict[str, Any]:
    record = answer.record
    _know(rules, record, level)
    lines = gate_content.diagnosis_lines(report, Failing(answer=answer))
    result = _at(record.kernel, record.case_id) | {
        "ruleId": rule_id(record),
        "level": level,
        "message": {"text": "\n".join(lines)},
        "properties": {
            "stage": answer.stage,
            "case_id": one_line(record.case_id),
            "failure": one_line(answer.failure),
        },
    }
    if record.out is not None:
        result["properties"]["rmse"] = _number(record.out.rmse)
    return result


def _changed(change: Change, rules: dict[str, dict[str, Any]]) -> dict[str, Any]:
    name = "fail/regression"
    rules.setdefault(name, _rule(name, RULES["regression"], "error"))
    said = shortened(change.reason) or "worse than the baseline"
    return _at(change.kernel, change.case_id) | {
        "ruleId": name,
        "level": "error",
        "message": {"text": f"{one_line(change.kernel)} on {one_line(change.case_id)}: {said}"},
    }


def _know(rules: dict[str, dict[str, Any]], record: Record, level: str) -> None:
    name = rule_id(record)
    rules.setdefault(name, _rule(name, rule_text(record), level))


def _rule(name: str, text: str, level: str) -> dict[str, Any]:
    status = name.partition("/")[0].replace("-", " ")
    meaning: Mapping[Any, str] = STATUSES
    help_ = f"{text} {meaning[status]} See it again with attncheck repro ID."
    return {
        "id": name,
        "name": "".join(word.capitalize() for word in name.replace("/", "-").split("-")),
        "shortDescription": {"text": text},
        "fullDescription": {"text": help_},
        "help": {"text": help_},
        "defaultConfiguration": {"level": level},
        "properties": {"tags": ["attention", "correctness"]},
    }


def _at(kernel: str, case_id: str) -> dict[str, Any]:
    """Where a result is, and how it is known again."""
    place = locate(kernel)
    print_ = hashlib.sha256(f"{kernel}\0{case_id}".encode(errors="backslashreplace")).hexdigest()
    return {
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


def _number(number: float) -> float | str:
    return number if number - number == 0 else str(number)
