"""Patches: changes to sources that are found by their text, and fail loudly if it is not there.

A patch consists of hunks, separated by empty lines. Each line of a hunk begins with a mark:

* Lines with ``-`` are removed, those with ``+`` inserted, and those with a space stay. Lines with
  ``-`` or a space must be consecutive in exactly one place of exactly one source, disregarding
  indentation, comments and empty lines; inserted lines get the indentation of that place.
* A hunk of only ``+`` is appended to the source that the first hunk of all patches changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from attncheck.core.errors import AttncheckError

# A comment; text with quotes may be a string with # in it, and does not match.
_COMMENT = re.compile(r"\s+# [^\"]*$")


class NotPlanted(AttncheckError):
    """Raised where a fault cannot be planted, because the source does not match its patch."""


class _Line(NamedTuple):
    """A line of code: its number, and its text without indentation and comment."""

    number: int
    indent: int
    code: str


class _Hunk:
    """A hunk's lines, each as (mark, text)."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = [(line[0], line[1:]) for line in lines]
        self.old = [line.strip() for mark, line in self.lines if mark != "+"]


def apply_patches(sources: Mapping[str, str], patches: Iterable[str]) -> dict[str, str]:
    """Return ``sources`` (text by name) with ``patches`` applied one after the other.

    Raises:
        NotPlanted: where the text of a hunk is not found exactly once.
    """
    texts, appended, last = dict(sources), list[str](), ""
    for patch in patches:
        code = {name: list(_code_lines(text)) for name, text in texts.items()}
        places = []
        for hunk in _hunks(patch):
            if not hunk.old:
                appended.append("\n".join(line for _, line in hunk.lines))
                continue
            name, lines = _find_hunk(hunk, code)
            places.append((name, lines, hunk))
            last = last or name
        # Backwards from the end of a source, so that line numbers above stay valid.
        for name, lines, hunk in sorted(places, key=lambda one: -one[1][0].number):
            texts[name] = _apply_hunk(texts[name], lines, hunk)
        if last and appended:
            texts[last] = "\n\n".join([texts[last].rstrip("\n"), *appended]) + "\n"
            appended = []
    if appended:
        raise NotPlanted(f"a patch only appends, and says to nothing what: {appended[0]!r}.")
    return texts


def _hunks(patch: str) -> Iterator[_Hunk]:
    """Yield the hunks of a text that is indented as a whole."""
    lines = patch.strip("\n").split("\n")
    # A patch may be indented in its file: the leftmost mark is its left edge.
    marked = min(
        len(line) - len(line.lstrip()) for line in lines if line.lstrip()[:1] in {"+", "-"}
    )
    for block in re.split(r"\n\s*\n", "\n".join(line[marked:] for line in lines)):
        of_block = [line for line in block.split("\n") if line.strip()]
        if of_block:
            yield _Hunk(of_block)


def _code_lines(text: str) -> Iterator[_Line]:
    for number, line in enumerate(text.split("\n")):
        code = _COMMENT.sub("", line).strip()
        if code and not code.startswith("#"):
            yield _Line(number, len(line) - len(line.lstrip()), code)


def _find_hunk(hunk: _Hunk, code: Mapping[str, list[_Line]]) -> tuple[str, list[_Line]]:
    old = hunk.old
    places = [
        (name, lines[start : start + len(old)])
        for name, lines in code.items()
        for start in range(len(lines) - len(old) + 1)
        if all(line.code == text for line, text in zip(lines[start:], old, strict=False))
    ]
    # A text found twice is an error, too: the wrong place might be changed.
    if len(places) != 1:
        raise NotPlanted(f"{old[0]!r} and what follows is there {len(places)} times, not once.")
    return places[0]


def _apply_hunk(text: str, lines: list[_Line], hunk: _Hunk) -> str:
    all_lines = text.split("\n")
    first = next(line for mark, line in hunk.lines if mark != "+")
    # Code may move into other blocks: inserted lines shift with the lines around them.
    shift = lines[0].indent - (len(first) - len(first.lstrip()))
    changed, old, at = [], iter(lines), lines[0].number
    for mark, line in hunk.lines:
        if mark == "+":
            indent = shift + len(line) - len(line.lstrip())
            changed.append(" " * indent + line.lstrip())
            continue
        number = next(old).number
        changed += all_lines[at:number]  # comments between
        if mark == " ":
            changed.append(all_lines[number])
        at = number + 1
    all_lines[lines[0].number : lines[-1].number + 1] = changed
    return "\n".join(all_lines)
