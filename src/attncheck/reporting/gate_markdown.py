"""A gate as GitHub-flavoured Markdown, within what GitHub takes as the summary of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.core.sanitize_text import for_markdown, markdown_code, shortened
from attncheck.reporting import gate_content
from attncheck.reporting.gate_verdict import failing, policy_of
from attncheck.reporting.sheet import markdown_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from attncheck.records.run_reports import GateReport
    from attncheck.reporting.gate_verdict import Failing

__all__ = ["LARGEST", "as_markdown"]

LARGEST = 2**20
"""Bytes of a step's summary: GitHub shows nothing of a larger one."""
_LEFT_OVER = 2**10  # of these, for what is said last
_MOST = 100
_LONGEST_LINE = 2000


def as_markdown(report: GateReport, *, largest: int = LARGEST) -> str:
    """``report`` as Markdown of at most ``largest`` bytes: failures are cut, with a count."""
    above = _joined(_above(report))
    below = _joined(_below(report))
    left = largest - _size(above) - _size(below) - _LEFT_OVER
    return _cut(above + _failures(report, left) + below, largest)


def _above(report: GateReport) -> Iterator[str]:
    yield f"# {for_markdown(gate_content.title(report))}"
    yield ""
    first, *facts = gate_content.above(report)
    command = shortened(first).replace("`", "'")
    yield from ([f"`{command}`", ""] if command else [])
    yield from (f"- {for_markdown(fact)}" for fact in facts)
    for sheet in (gate_content.stage_sheet(report), gate_content.baseline_sheet(report)):
        if sheet is not None and sheet.lines:
            yield ""
            yield from markdown_lines(sheet)
    yield from _changes(report)


def _changes(report: GateReport) -> Iterator[str]:
    shown, more = gate_content.changes_shown(report)
    if shown:
        yield ""
    for change in shown:
        who = f"{markdown_code(change.kernel)} {markdown_code(change.case_id)}"
        yield f"- {change.standing}: {who}: {for_markdown(change.reason)}"
    if more:
        yield f"- and {more:,} more"


def _failures(report: GateReport, left: int) -> str:
    """Those that ``left`` bytes hold, and how many more there are."""
    found = failing(report, policy_of(report))
    if not found:
        return ""
    parts = ["\n## failures, worst first\n"]
    left -= _size(parts[0])
    for one in found[:_MOST]:
        part = _joined(_failure(report, one))
        left -= _size(part)
        if left < 0:
            break
        parts.append(part)
    more = len(found) - (len(parts) - 1)
    if more:
        parts.append(f"\nand {more:,} more kinds of failure: gate.json has all of them.\n")
    return "".join(parts)


def _failure(report: GateReport, one: Failing) -> Iterator[str]:
    first, *rest = gate_content.diagnosis_lines(report, one)
    yield ""
    yield f"### {markdown_code(one.shown.record.kernel)}: {for_markdown(first)}"
    yield ""
    # Fenced by more than the text holds: nothing in it can end the block.
    lines = [line[:_LONGEST_LINE] for line in rest]
    fence = "`" * max(3, 1 + _longest_run(lines))
    yield from (f"{fence}text", *lines, fence)


def _longest_run(lines: Iterable[str]) -> int:
    longest = 0
    for line in lines:
        run = 0
        for character in line:
            run = run + 1 if character == "`" else 0
            longest = max(longest, run)
    return longest


def _below(report: GateReport) -> Iterator[str]:
    lines = list(gate_content.missing(report))
    if lines:
        yield from ("", "## not looked at", "")
    yield from (f"- {for_markdown(line)}" for line in lines)


def _joined(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _size(text: str) -> int:
    return len(text.encode(errors="backslashreplace"))


def _cut(text: str, largest: int) -> str:
    """What ``largest`` bytes hold: of hundreds of kernels not even the head does."""
    raw = text.encode(errors="backslashreplace")
    if len(raw) <= largest:
        return text
    end = f"\n\ncut after {largest:,} bytes: gate.json has everything.\n"
    kept = raw[: largest - len(end.encode())].decode(errors="ignore")
    return kept.rpartition("\n")[0] + end
