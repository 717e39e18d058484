"""Sanitize foreign text for a terminal, Markdown and a spreadsheet."""

from __future__ import annotations

import re
import unicodedata

LONGEST = 2000  # Characters of a reason on a page; the JSON and the CSV have all of it.

# ECMA-48: an OSC, DCS, SOS, PM or APC string with its terminator, a CSI sequence, a short escape.
_ESCAPES = re.compile(
    r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x90\x98\x9c-\x9f]{0,2000}(?:\x07|\x1b\\|\x9c)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|\x1b[ -/]*[0-~]?"
)
_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
_ENTITIES = str.maketrans(
    {c: f"&#{ord(c)};" for c in "\\`|$@"} | {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
)
_BACKSLASHED = re.compile(r"[*\[\]~#!]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
# Characters that start a list or underline a heading at the start of a line.
_OPENING = re.compile(r"^(?:[-+=]|\d+(?=[.)]))")
# GitHub turns bare addresses into links.
_SCHEME = re.compile(r"(?<=[A-Za-z0-9]):(?=//)|(?<=mailto):|(?<=xmpp):", re.IGNORECASE)
_WWW = re.compile(r"\b(www)\.", re.IGNORECASE)


def one_line(text: str) -> str:
    """Return ``text`` in one line, without terminal escapes, control and invisible characters."""
    if text.isascii() and text.isprintable() and "  " not in text:
        return text.strip()
    visible = "".join(_visible(c) for c in _ESCAPES.sub("", text))
    return " ".join(visible.split())


def _visible(character: str) -> str:
    category = unicodedata.category(character)
    if category in {"Zl", "Zp"} or character.isspace():
        return " "
    return "" if category in {"Cc", "Cf", "Cs", "Co"} else character


def shortened(text: str) -> str:
    """Return ``one_line(text)``, cut after ``LONGEST`` characters with a note on the rest."""
    line = one_line(text)
    if len(line) <= LONGEST:
        return line
    return f"{line[:LONGEST]}… ({len(line) - LONGEST} more characters in the JSON)"


def cut_line(text: str, most: int) -> str:
    """Return ``one_line(text)``, cut to at most ``most`` characters."""
    line = one_line(text)
    return line if len(line) <= most else f"{line[: most - 1]}…"


def for_markdown(text: str) -> str:
    """Return ``text`` escaped so that GitHub shows it verbatim, in a table cell or a paragraph."""
    # Entities first, so that nothing is escaped twice.
    entities = shortened(text).translate(_ENTITIES)
    entities = _WWW.sub(r"\1&#46;", _SCHEME.sub("&#58;", entities))
    return _OPENING.sub(_escape_opening, _escape_backslashes(entities))


def _escape_opening(opening: re.Match[str]) -> str:
    mark = opening[0]
    return f"{mark}\\" if mark.isdigit() else f"\\{mark}"


def _escape_backslashes(text: str) -> str:
    # The # of an entity must not be escaped.
    parts = re.split(r"(&(?:#\d+|amp|lt|gt);)", text)
    return "".join(
        part if i % 2 else _BACKSLASHED.sub(r"\\\g<0>", part) for i, part in enumerate(parts)
    )


def markdown_code(text: str) -> str:
    """Return ``text`` as a code span if that is safe, or else escaped."""
    line = one_line(text)
    return f"`{line}`" if re.fullmatch(r"[A-Za-z0-9_.:/+×-]+", line) else for_markdown(line)


def for_spreadsheet(text: str) -> str:
    """Return ``text`` in one line, with an apostrophe before anything that looks like a formula."""
    line = one_line(text)
    return f"'{line}" if line.startswith(_FORMULA) else line
