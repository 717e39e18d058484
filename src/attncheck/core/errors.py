"""Errors that attncheck raises on purpose."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")

_NEAR = 0.8  # Similarity, 0–1, from which one name counts as a misspelling of the other.

_TORCH_NAMES = {
    "float64": "fp64",
    "double": "fp64",
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}
"""What torch calls the dtypes of attncheck."""


class AttncheckError(Exception):
    """Base of every error that attncheck raises on purpose; its text is one line."""


class UsageError(AttncheckError):
    """The caller asked for something invalid; the command line exits with 2."""


class UnknownName(UsageError):
    """A name that is not in a closed list; the message lists the valid ones.

    It begins with ``near``, by default ``did_you_mean`` of the valid ones.
    """

    def __init__(self, kind: str, name: object, valid: Iterable[object], near: str = "") -> None:
        names = sorted(str(v) for v in valid)
        near = near or did_you_mean(name, names)
        choose = f"{near} Choose" if near else "choose"
        super().__init__(f"{kind} {name!r} is not known: {choose} from {', '.join(names)}.")


class HostError(AttncheckError):
    """A worker cannot be started, or does not answer properly."""


def require_known(kind: str, names: Iterable[object], valid: Collection[object]) -> None:
    """Raise UnknownName for the first of ``names`` that is not ``valid``."""
    for name in names:
        if name not in valid:
            raise UnknownName(kind, name, valid)


def look_up(kind: str, name: str, table: Mapping[str, T]) -> T:
    """Return ``table[name]``; raise UnknownName with the valid names if there is none."""
    require_known(kind, [name], table)
    return table[name]


def did_you_mean(name: object, valid: Iterable[str]) -> str:
    """Return ``did you mean 'causal'?`` for ``casual``; empty if no valid name is similar.

    For torch's name of a dtype it is attncheck's.
    """
    from difflib import SequenceMatcher  # imported here, since most runs do not need it

    def nearness(other: str) -> float:
        # For a key in a table or a cell (override[0].when.dtyp) the last parts are compared.
        ends = "/" if other.endswith(".py") else "[./]"  # for a file the whole name
        a, b = (re.split(ends, text.lower())[-1] for text in (str(name), other))
        if sorted(a) == sorted(b):  # exchanged letters, such as bf61
            return 1.0
        # fp64 is not a misspelling of fp16: names must differ in more than digits.
        numbers_differ = re.sub(r"\d", "", a) == re.sub(r"\d", "", b)
        return 0.0 if numbers_differ else SequenceMatcher(None, a, b).ratio()

    names = list(valid)
    dtype = _TORCH_NAMES.get(str(name).lower().removeprefix("torch."))
    if dtype in names:
        return f"did you mean {dtype!r}?"
    near = max(names, key=nearness, default="")
    return f"did you mean {near!r}?" if near and nearness(near) >= _NEAR else ""


class ProblemError(UsageError):
    """An invalid Problem: a shape, a number or a mod that does not fit."""


class TraceError(UsageError):
    """A mask or score mod that cannot be turned into an expression."""


class InterpreterUnavailable(AttncheckError):
    """Triton's CPU interpreter, or one of its repairs, cannot be switched on here."""


class OraclesDisagree(AttncheckError):
    """Two computations of the exact result differ too much, so that kernels cannot be judged."""


# The name of a recording: file, call, and a digest of its bytes.
_RECORDED = re.compile(r"(.+?):.+@[0-9a-f]{8}", re.DOTALL)


def refuse_recorded(kind: str, name: str) -> None:
    """Raise ProblemError, with the file to load, for the name of a recording that is not loaded."""
    # Only names of this form are of recordings: others are misspelt.
    if file := recorded_file(name):
        raise ProblemError(
            f"{kind} {name!r} is of a recording: give its file {file} with --inputs."
        )


def recorded_file(name: str) -> str | None:
    """Return the file of the recording that ``name`` refers to; None for any other name."""
    recorded = _RECORDED.fullmatch(name)
    return recorded[1] if recorded else None


def without_recorded(names: Iterable[str]) -> list[str]:
    """Return ``names`` without those of recordings, which exist only once their file is loaded."""
    return [name for name in names if not _RECORDED.fullmatch(name)]


_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)\s*([smh]?)", re.ASCII)


def parse_seconds(text: str | None, option: str) -> float | None:
    """Return the seconds of ``90``, ``90s``, ``10m`` or ``2h``; raise UsageError otherwise."""
    if text is None:
        return None
    match = _DURATION.fullmatch(text.strip().lower())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if seconds <= 0:
        raise UsageError(f"{option} {text!r} must be a time above 0, such as 90s, 10m or 2h.")
    return seconds
