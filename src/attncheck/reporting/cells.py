"""A piece of text on a page and how it looks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["STYLES", "Cell", "Look"]

Look = Literal["plain", "dim", "good", "notable", "bad"]

STYLES: dict[Look, str] = {
    "plain": "",
    "dim": "dim",
    "good": "green",
    "notable": "yellow",
    "bad": "red",
}
"""rich's words for each look, on a terminal."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Text of our own making (a number or a mark) and how it looks."""

    text: str
    look: Look = "plain"
