"""A gate as one self-contained page of HTML: it works offline, and asks nobody for anything."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup, escape

from attncheck.core.sanitize_text import shortened
from attncheck.reporting import figures, gate_content, gate_curves, gate_maps
from attncheck.reporting.diagnosis_text import repro_command
from attncheck.reporting.gate_matrix import matrix
from attncheck.reporting.gate_terms import rule_text
from attncheck.reporting.gate_verdict import (
    FAILED,
    INCOMPLETE,
    PASSED,
    UNTESTED,
    exit_code,
    failing,
    policy_of,
    sides,
    verdict,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attncheck.records.run_reports import Change, GateReport
    from attncheck.reporting.gate_verdict import Failing

__all__ = ["MOST", "as_html"]

MOST = 50
"""Failures that the page shows."""
_MOST_IDS = 200
_LARGEST_SCRIPT = 2**18  # characters of one that is shown; a larger one lies beside the page
_LARGEST_SCRIPTS = 2**22  # of all together
_TEMPLATES = Path(__file__).with_name("templates")
_VERDICTS = {
    PASSED: ("good", "✓"),
    FAILED: ("bad", "✗"),
    INCOMPLETE: ("odd", "!"),
    UNTESTED: ("odd", "–"),
}
_FACT = re.compile(r"  (\S.*?)  +(.*)")


def as_html(report: GateReport, scripts: Mapping[str, str] | None = None) -> str:
    """``report`` as HTML.

    Args:
        report: What was found.
        scripts: The text of a standalone script by the id of its failure.
    """
    css, script = (Markup(_text(name)) for name in ("gate.css", "gate.js"))  # noqa: S704  # ours
    page = _environment().get_template("gate.html.j2")
    return page.render(
        **_facts(report, scripts or {}), css=css, script=script, policy=_policy(css, script)
    )


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_harmless,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _harmless(value: Any) -> Any:
    """What an expression shows: text in one line; what is markup already is our own."""
    return shortened(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _text(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _policy(css: str, script: str) -> Markup:
    """Nothing is loaded, and of styles and scripts those of this page alone."""
    style, code = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (css, script)
    )
    return Markup(  # noqa: S704  # base64
        f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{code}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _facts(report: GateReport, scripts: Mapping[str, str]) -> dict[str, Any]:
    policy = policy_of(report)
    code = exit_code(
        report, strict=policy.strict, strict_baseline=policy.strict_baseline, flaky=policy.flaky
    )
    look, sign = _VERDICTS[code]
    found = failing(report, policy)
    changes, more_changes = gate_content.changes_shown(report)
    return {
        "report": report,
        "look": look,
        "sign": sign,
        "word": verdict(report, code),
        "tiles": list(_tiles(report)),
        "took": figures.duration(report.seconds).strip(),
        "kernels": list(_kernels(report)),
        "failures": list(_failures(report, found[:MOST], scripts)),
        "more": len(found[MOST:]),
        "counts": list(_counts(report)),
        "baseline": gate_content.baseline_sheet(report),
        "changes": [_change(change) for change in changes],
        "more_changes": more_changes,
        "missing": list(gate_content.missing(report)),
        "environments": list(gate_content.environment_lines(report)),
        "profiles": list(_profiles(report)),
        "levels": gate_maps.LEVELS,
        "left": gate_curves.LEFT,
        "right": gate_curves.RIGHT,
        "bottom": gate_curves.BOTTOM,
    }


def _tiles(report: GateReport) -> Iterator[tuple[str, int, str]]:
    """Name, number and look of what the page begins with; what there is none of is left out."""
    counts = gate_content.stage_counts(report)
    wrong, odd = sides(report)
    worse = sum(change.standing == "worse" for change in report.changes)
    yield "asked", sum(count.asked for count in counts), "plain"
    tiles = (
        ("failed", sum(count.of(wrong) for count in counts), "bad"),
        ("odd", sum(count.of(odd) for count in counts), "odd"),
        ("passed", sum(count.status["pass"] for count in counts), "good"),
        ("regressed", worse, "bad"),
        ("not taken", sum(count.status["unsupported"] for count in counts), "plain"),
        ("left to ask", report.unfinished, "odd"),
        ("harness errors", len(report.harness), "bad"),
    )
    yield from (tile for tile in tiles if tile[1])


def _kernels(report: GateReport) -> Iterator[dict[str, Any]]:
    answered = (answer.record.kernel for answer in report.answers)
    for i, name in enumerate(dict.fromkeys([*report.kernels, *answered])):
        yield {
            "name": name,
            "anchor": f"kernel{i}",
            "summary": report.kernels.get(name, ""),
            "matrix": matrix(report, name),
            "curves": gate_curves.curves(report, name),
        }


def _counts(report: GateReport) -> Iterator[dict[str, Any]]:
    wrong, odd = sides(report)
    for count in gate_content.stage_counts(report):
        yield {
            "kernel": count.kernel,
            "stage": count.stage,
            "asked": count.asked,
            "passed": count.status["pass"],
            "failed": count.of(wrong),
            "odd": count.of(odd),
            "untaken": count.status["unsupported"],
            "work": figures.duration(count.seconds).strip(),
        }


def _failures(
    report: GateReport, found: tuple[Failing, ...], scripts: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    left = _LARGEST_SCRIPTS
    for i, one in enumerate(found):
        first, *lines = gate_content.diagnosis_lines(report, one)
        text = scripts.get(one.id, "")
        fits = len(text) <= min(left, _LARGEST_SCRIPT)
        left -= len(text) if fits else 0
        record = one.shown.record
        own = gate_maps.drawing(record)
        kind, _, title = first.partition(": ")
        others = [other.failure or other.record.case_id for other in one.others]
        yield {
            "anchor": f"failure{i}",
            "kernel": record.kernel,
            "kind": kind,
            "title": title or kind,
            "meaning": rule_text(record),
            "facts": [
                match.groups()
                for line in lines
                if (match := _FACT.fullmatch(line)) and match[1] != "where"
            ],
            "map": own or gate_maps.drawing(one.answer.record),
            "map_before": own is None,
            "command": repro_command(one.id),
            "script": _block(text) if fits else "",
            "script_file": f"repro/{one.id}.py" if text else "",
            "others": ", ".join(others[:_MOST_IDS]) + (", …" if others[_MOST_IDS:] else ""),
            "other_count": len(others),
        }


def _block(text: str) -> Markup:
    """Several lines, as they are but for what is not seen."""
    return escape("".join(c for c in text if c in "\n\t" or c.isprintable()))


def _change(change: Change) -> dict[str, str]:
    numbers = {
        name: figures.NOTHING if value is None else figures.scientific(value)
        for name, value in (("before", change.before), ("after", change.after))
    }
    return numbers | {
        "kernel": change.kernel,
        "case_id": change.case_id,
        "standing": change.standing,
        "reason": change.reason,
    }


def _profiles(report: GateReport) -> Iterator[str]:
    """Every arithmetic that was assumed, once."""
    found = (a.record.judgement.arithmetic for a in report.answers if a.record.judgement)
    yield from (profile for profile in dict.fromkeys(found) if profile)
