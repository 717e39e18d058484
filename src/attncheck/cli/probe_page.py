"""What a probe found, for a reader: a line an aspect and verdict, then the proposed table."""

from __future__ import annotations

import itertools
import sys
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.text import Text

    from attncheck.surveys.capability_detection import DetectedCapabilities, TrialResult

__all__ = ["show", "show_table"]

_ASPECT, _VERDICT, _NARROWEST = 12, 9, 30  # columns
_OF_PROMISES = {"takes": "keeps", "wrong": "breaks"}
_STYLES = {"takes": "green", "refuses": "dim", "raises": "yellow", "wrong": "red"}


def show(name: str, probed: DetectedCapabilities, device: str) -> None:
    """Write to standard output what was tried of the kernel called ``name``."""
    from attncheck.reporting import screen

    def lines(width: int) -> Iterator[Text]:
        known = f" · {probed.convention} convention" if probed.base is not None else ""
        head = f"{name} · {device}{known}"
        yield from screen.wrapped(head, width, style="bold")
        if probed.base is not None:
            yield from screen.wrapped(f"changes of {probed.base}", width, style="dim")
        aspect = ""
        for group in _groups(probed.tried):
            said = group[0].aspect if group[0].aspect != aspect else ""
            aspect = group[0].aspect
            verdict = group[0].verdict
            word = _OF_PROMISES.get(verdict, verdict) if aspect == "promises" else verdict
            first = f"  {said:<{_ASPECT}}{word:<{_VERDICT}}"
            yield from _hanging(first, _what(group), width, style=_STYLES[verdict])
        yield from screen.wrapped(_sentence(probed), width, style="bold")

    sys.stdout.flush()
    screen.put(screen.drawn(lines, sys.stdout), sys.stdout)


def show_table(table: str) -> None:
    """Write a table as it stands in a file, without colours."""
    from attncheck.reporting import screen

    screen.put(f"\n{table}", sys.stdout)


def _hanging(first: str, text: str, width: int, *, style: str) -> list[Text]:
    """``first`` and ``text`` in lines of which all but the first stand below ``text``."""
    from rich.text import Text

    from attncheck.core.sanitize_text import one_line

    lines = textwrap.wrap(one_line(text), max(width - len(first), _NARROWEST)) or [""]
    indent = " " * len(first)
    return [Text((indent if i else first) + line, style=style) for i, line in enumerate(lines)]


def _groups(tried: Iterable[TrialResult]) -> Iterator[list[TrialResult]]:
    """By aspect, and within one as ``proposal.grouped``."""
    from attncheck.surveys.capability_detection import group_results

    for _, several in itertools.groupby(tried, key=lambda one: one.aspect):
        yield from group_results(several)


def _what(group: list[TrialResult]) -> str:
    names = ", ".join(dict.fromkeys(one.what for one in group))
    return ": ".join(part for part in (names, group[0].reason) if part)


def _sentence(probed: DetectedCapabilities) -> str:
    from attncheck.surveys.capability_detection import is_capability

    if probed.base is None:
        return "It takes nothing that was tried."
    verdicts = [one.verdict for one in filter(is_capability, probed.tried)]
    taken, wrong = verdicts.count("takes"), verdicts.count("wrong")
    said = f"{taken} taken, {wrong} wrong"
    if not wrong:
        return f"{said}."
    return (
        f"{said}: what is wrong stays in the table, so that checks fail until the kernel is "
        "mended, refuses it with a ValueError, or you take it out."
    )
