"""A gate as commands of a GitHub workflow, which become annotations of the pull request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from attncheck.core.sanitize_text import one_line, shortened
from attncheck.reporting import gate_content
from attncheck.reporting.gate_verdict import ODD, failing, policy_of, questions, sides
from attncheck.reporting.source_lines import locate
from attncheck.reporting.verdicts import footnote

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.records.run_reports import GateReport

__all__ = ["MOST", "as_github"]

MOST = 10
"""Annotations of each level that GitHub shows of one step."""
_LONGEST_TITLE = 200

Level = Literal["error", "warning", "notice"]


def as_github(report: GateReport) -> str:
    """``report`` as workflow commands, a line each: at most ``MOST`` of each level.

    What is more is counted in the last notice.
    """
    errors, warnings = list(_errors(report)), list(_warnings(report))
    notices = [_command("notice", text, "not looked at") for text in gate_content.missing(report)]
    more = [
        f"{len(lines) - most:,} more {what}"
        for lines, most, what in (
            (errors, MOST, "failures"),
            (warnings, MOST, "warnings"),
            (notices, MOST - 1, "notices"),
        )
        if len(lines) > most
    ]
    said = ", ".join(more)
    verdict = gate_content.title(report)
    last = _command(
        "notice", f"{verdict} (not shown: {said})" if said else verdict, "attncheck gate"
    )
    lines = [*errors[:MOST], *warnings[:MOST], *notices[: MOST - 1], last]
    return "".join(f"{line}\n" for line in lines)


def _errors(report: GateReport) -> Iterator[str]:
    for line in report.harness:
        yield _command("error", line, "the gate itself")
    policy = policy_of(report)
    for one in failing(report, policy):
        first, *rest = gate_content.diagnosis_lines(report, one)
        kernel = one.shown.record.kernel
        yield _command("error", "\n".join([first, *rest]), f"{kernel}: {first}", kernel)
    bad = {"worse", "better", "gone"} if policy.strict_baseline else {"worse"}
    for change in report.changes:
        if change.standing in bad:
            said = f"{change.standing} than the baseline: {change.reason}"
            title = f"{change.kernel} {change.case_id}"
            yield _command("error", said, title, change.kernel)


def _warnings(report: GateReport) -> Iterator[str]:
    asked = questions(report)
    _, odd = sides(report)
    groups: dict[tuple[str, str], list[str]] = {}
    for status in (status for status in ODD if status in odd):
        for answer in asked:
            if answer.record.status == status:
                said = groups.setdefault((answer.record.kernel, status), [])
                said.append(f"{footnote(answer.record)} ({answer.record.case_id})")
    for (kernel, kind), said in groups.items():
        more = f"\nand {len(said) - 1:,} more" if len(said) > 1 else ""
        yield _command("warning", f"{said[0]}{more}", f"{kernel}: {kind}", kernel)


def _command(level: Level, text: str, title: str, kernel: str = "") -> str:
    """``::error file=kernel.py,line=3,title=…::text``, with GitHub's escapes."""
    place = locate(kernel)
    facts = {"file": place.path, "line": str(place.line)} if place.path else {}
    facts["title"] = one_line(title)[:_LONGEST_TITLE]
    said = ",".join(f"{name}={_property(value)}" for name, value in facts.items())
    lines = (line[: len(line) - len(line.lstrip())] + shortened(line) for line in text.split("\n"))
    message = _escaped("\n".join(lines))
    return f"::{level} {said}::{message}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")
