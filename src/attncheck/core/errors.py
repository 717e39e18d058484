"""Errors that attncheck raises on purpose."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")

_NEAR = 0.8  # of the letters of two names are the same in order, so that one is the other misspelt


class AttncheckError(Exception):
    """Base of every error that attncheck raises on purpose; its text is one line."""


class UsageError(AttncheckError):
    """The caller asked for something that cannot be; the command line exits with 2."""


class UnknownName(UsageError):
    """A name that is not in a closed list; the message lists the valid ones, the nearest first."""

    def __init__(self, kind: str, name: object, valid: Iterable[object]) -> None:
        names = sorted(str(v) for v in valid)
        near = did_you_mean(name, names)
        choose = f"{near} Choose" if near else "choose"
        super().__init__(f"{kind} {name!r} is not known: {choose} from {', '.join(names)}.")


class HostError(AttncheckError):
    """A worker cannot be had, or does not answer as ours does."""


def require_known(kind: str, names: Iterable[object], valid: Collection[object]) -> None:
    """Raise UnknownName for the first of ``names`` that is not ``valid``."""
    for name in names:
        if name not in valid:
            raise UnknownName(kind, name, valid)


def look_up(kind: str, name: str, table: Mapping[str, T]) -> T:
    """Return the entry of ``table`` called ``name``; raise UnknownName with the valid names."""
    require_known(kind, [name], table)
    return table[name]


def did_you_mean(name: object, valid: Iterable[str]) -> str:
    """Return ``did you mean 'causal'?`` of ``casual``; empty where no valid name is near."""
    from difflib import SequenceMatcher  # of no use to a run without mistakes

    def nearness(other: str) -> float:
        # Of a key in a table and of a cell (override[0].when.dtyp) the last parts are compared.
        ends = "/" if other.endswith(".py") else "[./]"  # of a file the whole name
        a, b = (re.split(ends, text.lower())[-1] for text in (str(name), other))
        if sorted(a) == sorted(b):  # bf61
            return 1.0
        # Who writes fp64 means another number than 16.
        numbers_differ = re.sub(r"\d", "", a) == re.sub(r"\d", "", b)
        return 0.0 if numbers_differ else SequenceMatcher(None, a, b).ratio()

    near = max(valid, key=nearness, default="")
    return f"did you mean {near!r}?" if near and nearness(near) >= _NEAR else ""


class ProblemError(UsageError):
    """A Problem that cannot exist: a shape, a number or a mod that does not fit."""


class TraceError(UsageError):
    """A mask or score mod that cannot be turned into an expression."""


class InterpreterUnavailable(AttncheckError):
    """Triton's CPU interpreter, or one of its repairs, cannot be switched on here."""


class OraclesDisagree(AttncheckError):
    """Two ways to the exact result differ by more than they may: attncheck can judge nobody."""


# File, call, and the digest of its bytes.
_RECORDED = re.compile(r"(.+?):.+@[0-9a-f]{8}", re.DOTALL)


def refuse_recorded(kind: str, name: str) -> None:
    """Raise ProblemError, with the file to give, for a name of a recording that is not loaded."""
    # Only a name of this form can be cured by a file: others are misspelt.
    if file := recorded_file(name):
        raise ProblemError(
            f"{kind} {name!r} is of a recording: give its file {file} with --inputs."
        )


def recorded_file(name: str) -> str | None:
    """Return the file of the recording that a name is of; None of any other name."""
    recorded = _RECORDED.fullmatch(name)
    return recorded[1] if recorded else None


def without_recorded(names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that are no recording's: the ones to choose from."""
    return [name for name in names if not _RECORDED.fullmatch(name)]


_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)\s*([smh]?)", re.ASCII)


def parse_seconds(text: str | None, option: str) -> float | None:
    """Seconds of ``90``, ``90s``, ``10m`` or ``2h``; raises UsageError for anything else."""
    if text is None:
        return None
    match = _DURATION.fullmatch(text.strip().lower())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if seconds <= 0:
        raise UsageError(f"{option} {text!r} must be a time above 0, such as 90s, 10m or 2h.")
    return seconds
