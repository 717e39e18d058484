"""Checks of what a Spec is given: each raises ProblemError with the value and what is allowed."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, TypeAlias, cast

from attncheck.errors import ProblemError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Literal

    from attncheck.mods.spec import Argument, Dimensions

__all__ = [
    "Check",
    "as_many_lengths",
    "canvas",
    "cells",
    "document_lengths",
    "later_rows",
    "lengths_of",
    "padding_lengths",
    "positive",
    "text",
    "whole",
    "within_the_canvas",
]

Check: TypeAlias = "Callable[[str, Argument, Dimensions], None]"
"""``check(label, value, dimensions)``; the label is ``mod.argument``."""


def whole(low: int, high: int) -> Check:
    """The argument is a whole number from ``low`` to ``high``."""

    def check(label: str, value: Argument, _: Dimensions) -> None:
        if not _is_whole(value, low, high):
            raise ProblemError(f"{label}={value!r} must be a whole number from {low} to {high}.")

    return check


def positive(label: str, value: Argument, _: Dimensions) -> None:
    """The argument is a positive number that fp32 can hold."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not _FP32_SMALLEST <= cast("float", value) <= _FP32_LARGEST:
        raise ProblemError(f"{label}={value!r} must be a positive number in the range of fp32.")


def document_lengths(label: str, value: Argument, dimensions: Dimensions) -> None:
    """The argument has lengths that cover every position of the longer of query and kv."""
    total = sum(_lengths(label, value))
    needed = max(dimensions.query, dimensions.kv)
    if total < needed:
        raise ProblemError(
            f"{label} cover {total} positions: they must cover max(query, kv)={needed}."
        )


def lengths_of(which: Literal["query", "kv"]) -> Check:
    """The argument has lengths that cover every position of query, or of kv."""

    def check(label: str, value: Argument, dimensions: Dimensions) -> None:
        total, needed = sum(_lengths(label, value)), getattr(dimensions, which)
        if total < needed:
            raise ProblemError(
                f"{label} cover {total} positions: they must cover {which}={needed}."
            )

    return check


def as_many_lengths(name: str, values: Mapping[str, Argument], _: Dimensions) -> None:
    """``query_lengths`` and ``kv_lengths`` are of the same documents."""
    query, kv = (len(cast("tuple[int, ...]", values[f"{of}_lengths"])) for of in ("query", "kv"))
    if query != kv:
        raise ProblemError(
            f"{name} has {query} query_lengths and {kv} kv_lengths: each document has one of each."
        )


def padding_lengths(label: str, value: Argument, dimensions: Dimensions) -> None:
    """The argument has one length for each sequence of the batch, none longer than kv."""
    lengths = _lengths(label, value)
    batch, kv = dimensions.batch, dimensions.kv
    if len(lengths) != batch:
        raise ProblemError(
            f"{label} has {len(lengths)} lengths: it needs one for each of the batch={batch}."
        )
    if max(lengths) > kv:
        raise ProblemError(f"{label} has a length {max(lengths)}: none may exceed kv={kv}.")


def canvas(label: str, value: Argument, _: Dimensions) -> None:
    """The argument is the rows and columns of a canvas."""
    rows, columns = _pair(label, value)
    if rows * columns > _MOST_CELLS:
        raise ProblemError(f"{label}={[rows, columns]} has more than {_MOST_CELLS} cells.")


def cells(label: str, value: Argument, _: Dimensions) -> None:
    """The argument is the rows and columns of a part of a canvas."""
    _pair(label, value)


def within_the_canvas(name: str, values: Mapping[str, Argument], _: Dimensions) -> None:
    """No other part of the canvas is larger than ``canvas``."""
    whole_canvas = cast("tuple[int, int]", values["canvas"])
    for part, value in values.items():
        sides = cast("tuple[int, int]", value)
        if any(side > length for side, length in zip(sides, whole_canvas, strict=True)):
            raise ProblemError(
                f"{name}.{part}={list(sides)} is larger than the canvas {list(whole_canvas)}."
            )


def later_rows(label: str, value: Argument, dimensions: Dimensions) -> None:
    """The argument is how much later rows are: their indices fit in 32 bits."""
    whole(0, _INT32_LARGEST - dimensions.query)(label, value, dimensions)


def text(read: Callable[[str, Dimensions], object]) -> Check:
    """The argument is a line that ``read`` reads; what it raises is said of the argument."""

    def check(label: str, value: Argument, dimensions: Dimensions) -> None:
        if not isinstance(value, str) or not _LINE.fullmatch(value):
            shown = repr(value)
            shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}…"
            raise ProblemError(
                f"{label}={shown} must be one line of at most {_LONGEST} ASCII characters, with "
                "no space before or after."
            )
        try:
            read(value, dimensions)
        except ProblemError as error:
            raise ProblemError(f"{label}={value!r}: {error}") from None

    return check


_LONGEST = 200
_LINE = re.compile(rf"(?=.{{1,{_LONGEST}}}\Z)[!-~]([ -~]*[!-~])?")
_FP32_SMALLEST = 2.0**-149
_FP32_LARGEST = math.ldexp(2 - 2.0**-23, 127)
_INT32_LARGEST = 2**31 - 1
_MOST_CELLS = 2**24  # more than any length that a kernel is asked for


def _is_whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _lengths(label: str, value: Argument) -> tuple[int, ...]:
    if isinstance(value, tuple) and value and all(_is_whole(v, 0, _INT32_LARGEST) for v in value):
        return value
    shown = list(value) if isinstance(value, tuple) else value
    raise ProblemError(
        f"{label}={shown!r} must be a list of whole numbers from 0 to {_INT32_LARGEST}."
    )


def _pair(label: str, value: Argument) -> tuple[int, int]:
    pair = isinstance(value, tuple) and len(value) == 2
    if pair and all(_is_whole(v, 1, _MOST_CELLS) for v in cast("tuple[int, int]", value)):
        return cast("tuple[int, int]", value)
    shown = list(value) if isinstance(value, tuple) else value
    raise ProblemError(
        f"{label}={shown!r} must be two whole numbers from 1 to {_MOST_CELLS}: rows, columns."
    )
