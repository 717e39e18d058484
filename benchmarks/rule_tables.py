"""What the pages of ``rules.py`` and ``gradient_rules.py`` have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Row", "measured", "percent", "refused", "table"]

Row = dict[str, Any]


def measured(found: dict[str, Any]) -> str:
    """Where, how much and at which lengths."""
    lines = [
        f"{env['device']}: torch {env['torch']}, triton {env['triton'] or '–'}, "
        f"Python {env['python']}."
        for env in found["environments"]
    ]
    done = f"{found['done']} of {found['of']} problems, {len(found['rows'])} judgements."
    lengths = sorted({row["length"] for row in found["rows"]})
    return "\n".join([*lines, done, f"Lengths {', '.join(map(str, lengths))}."])


def refused(row: Row, rule: str) -> bool:
    """Whether attncheck fails what the row is of, or one of its peers refuses it."""
    if rule == "attncheck":
        return bool(row["status"] == "fail")
    return not row["peers"][rule]


def percent(share: float | None) -> str:
    """In whole percent; with a digit more where that would say none or all of what is neither."""
    if share is None:
        return "–"
    text = f"{100 * share:.0f}"
    return text if text not in {"0", "100"} or share in {0.0, 1.0} else f"{100 * share:.1f}"


def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """As Markdown: words to the left, figures to the right."""
    head = list(head)
    rule = ["---", *["--:"] * (len(head) - 1)]
    cells = [
        [cell.replace("|", "\\|") for cell in line] for line in [head, rule, *map(list, lines)]
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
