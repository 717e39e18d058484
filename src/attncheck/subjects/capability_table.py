"""A capability table as text: read strictly from TOML, and written."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from attncheck.errors import AttncheckError, UnknownName, UsageError
from attncheck.formats import DTYPES, Format, dtype_named
from attncheck.judge.arithmetic import default
from attncheck.mods.library import MASKS, SCORES
from attncheck.question import PROMISES
from attncheck.subjects.capabilities import (
    ALIASES,
    ALIGNMENTS,
    ANY,
    AUTOGRAD,
    COMPOSITION,
    DEVICES,
    EMPTY_ROWS,
    PHASES,
    Capabilities,
    DeclaredArithmetic,
    Limits,
    Override,
    When,
)
from attncheck.subjects.source_patterns import mistake

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["read", "written"]

_LARGEST_HEAD_DIM = 256


def read(table: object, what: str) -> Capabilities:
    """The table that a file or an entry point holds.

    Args:
        table: As TOML reads it.
        what: Where it stands, which begins every error: ``pyproject.toml: kernels.mine``.

    Raises:
        UsageError: for a key, a type or a name that cannot be, in one line with the valid ones.
    """
    try:
        _check_keys(table)
        found = msgspec.convert(table, Capabilities)
        for name, limits in _all_limits(found):
            _check_limits(limits, name)
        _check_listed("promises", found.promises or (), PROMISES)
        _check_backward(found.backward)
        _check_sources(found.sources)
        for index, override in enumerate(found.override):
            _check_when(override.when, f"override[{index}].when")
        _check_arithmetic(found)
    except msgspec.ValidationError as error:
        raise UsageError(f"{what}: {_in_our_words(str(error))}.") from None
    except UsageError as error:
        raise UsageError(f"{what}: {error}") from None
    return found


def written(found: Capabilities, header: str, comments: Mapping[str, Iterable[str]]) -> str:
    """The table as TOML, below ``[header]``.

    Args:
        found: What is written; fields that are as they would be without being said are left out.
        header: Its place in the file: ``tool.attncheck.kernels.mine``.
        comments: Lines that stand above a field, by its name; under ``""`` above all.
    """
    lines = [f"[{header}]", *(f"# {line}" for line in comments.get("", ()))]
    for name in (name for name in _ORDER if name not in _TABLES):
        value = getattr(found, name)
        lines += [f"# {line}" for line in comments.get(name, ())]
        if value is not None and value != ():
            lines.append(f"{name} = {_value(value)}")
    changes = found.arithmetic.changes()
    if changes:
        lines += ["", f"[{header}.arithmetic]", *(f"{k} = {_value(v)}" for k, v in changes.items())]
    for override in found.override:
        lines += ["", f"[[{header}.override]]", *_override(override)]
    return "\n".join(lines) + "\n"


def _override(found: Override) -> Iterator[str]:
    when = msgspec.structs.asdict(found.when)
    fits = ", ".join(f"{k} = {_value(v)}" for k, v in when.items() if v is not None)
    yield f"when = {{ {fits} }}"
    for name in _ORDER:
        value = getattr(found, name, None)
        if value is not None and name not in _TABLES:
            yield f"{name} = {_value(value)}"
    changes = found.arithmetic.changes()
    if changes:
        yield f"arithmetic = {{ {', '.join(f'{k} = {_value(v)}' for k, v in changes.items())} }}"


_ORDER = (
    "entry",
    "convention",
    "dtypes",
    "head_dims",
    "masks",
    "scores",
    "gqa",
    "rectangular",
    "scale",
    "length_multiple",
    "max_query",
    "max_kv",
    "causal",
    "lse",
    "empty_row",
    "promises",
    "backward",
    "sources",
    "arithmetic",
    "override",
)
_TABLES = ("arithmetic", "override")


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    if value is None or isinstance(value, Format):  # what an Arithmetic has, as a table says it
        return json.dumps(value.name if value else False)
    # JSON's strings, numbers and truth values are TOML's.
    return json.dumps(value, ensure_ascii=False)


def _all_limits(found: Capabilities) -> list[tuple[str, Limits]]:
    return [("", found), *((f"override[{i}].", one) for i, one in enumerate(found.override))]


def _check_keys(table: object) -> None:
    """Raises UsageError for a key that there is not; msgspec would not say which there are."""
    for place, struct, given in _tables(table):
        if not isinstance(given, Mapping):
            continue  # its type is msgspec's to say
        for key in given:
            if key not in struct.__struct_fields__:
                fields = struct.__struct_fields__
                valid = ", ".join(
                    sorted(fields, key=_ORDER.index if struct is Capabilities else None)
                )
                raise UsageError(f"key {place + str(key)!r} is not known: choose from {valid}.")


def _tables(table: object) -> list[tuple[str, type[msgspec.Struct], object]]:
    """Each table within ``table``: where, what it must be, and what stands there."""
    found: list[tuple[str, type[msgspec.Struct], object]] = [("", Capabilities, table)]
    if not isinstance(table, Mapping):
        return found
    found.append(("arithmetic.", DeclaredArithmetic, table.get("arithmetic")))
    overrides = table.get("override")
    for index, each in enumerate(overrides if isinstance(overrides, list | tuple) else ()):
        place = f"override[{index}]."
        found.append((place, Override, each))
        if isinstance(each, Mapping):
            found.append((f"{place}when.", When, each.get("when")))
            found.append((f"{place}arithmetic.", DeclaredArithmetic, each.get("arithmetic")))
    return found


def _check_backward(said: bool | str | None) -> None:  # noqa: FBT001  # a field
    if said is True or (isinstance(said, str) and said != AUTOGRAD and ":" not in said):
        raise UsageError(
            f'backward={json.dumps(said)} must be "autograd", FILE.py::NAME, package.module:NAME '
            "or false."
        )


def _check_sources(patterns: Iterable[str]) -> None:
    for pattern in patterns:
        if wrong := mistake(pattern):
            raise UsageError(f"sources: {pattern!r} {wrong}.")


def _check_limits(limits: Limits, place: str) -> None:
    for dtype in limits.dtypes or ():
        dtype_named(dtype)
    _check_listed(f"{place}masks", limits.masks or (), (*_mods(MASKS), *ALIASES))
    _check_listed(f"{place}scores", limits.scores or (), _mods(SCORES))
    for dims in limits.head_dims if isinstance(limits.head_dims, tuple) else ():
        for dim in dims if isinstance(dims, tuple) else (dims,):
            if not 1 <= dim <= _LARGEST_HEAD_DIM:
                raise UsageError(f"{place}head_dims={dim} must be 1–{_LARGEST_HEAD_DIM}.")
    for name in ("length_multiple", "max_query", "max_kv"):
        length = getattr(limits, name)
        if length is not None and length < 1:
            raise UsageError(f"{place}{name}={length} must be at least 1.")


def _mods(entries: Mapping[str, Any]) -> tuple[str, ...]:
    return (*(name for name, one in entries.items() if one.compose is None), COMPOSITION, ANY)


def _check_when(when: When, place: str) -> None:
    asked = {"dtype": DTYPES, "device": DEVICES, "phase": PHASES, "mask": (*_mods(MASKS), *ALIASES)}
    for name, valid in asked.items():
        value = getattr(when, name)
        _check_listed(f"{place}.{name}", (value,) if isinstance(value, str) else value or (), valid)
    if when == When():
        raise UsageError(f"{place} is empty: choose from {', '.join(When.__struct_fields__)}.")


def _check_listed(what: str, names: Iterable[str], valid: Iterable[str]) -> None:
    known = tuple(valid)
    for name in names:
        if name not in known:
            raise UnknownName(what, name, known)


def _check_arithmetic(found: Capabilities) -> None:
    """Raises UsageError for numbers that no arithmetic of the declared dtypes can have."""
    for place, limits in _all_limits(found):
        said = limits.arithmetic
        alias, name = said.p_in_sum, said.sums_rounded_weights
        if alias is not None and name is not None and alias != name:
            raise UsageError(
                f"{place}arithmetic: p_in_sum and sums_rounded_weights are one thing: give one."
            )
        if said.rounds_value_products is True:
            raise UsageError(
                f"{place}arithmetic: rounds_value_products=true must be a format or false."
            )
        for dtype in found.dtypes or ("bf16",):
            try:
                dataclasses.replace(default(DTYPES[dtype]), **said.changes())
            except (AttncheckError, TypeError, ValueError) as error:
                raise UsageError(f"{place}arithmetic: {error}") from None


_AT = re.compile(r"(.*) - at `\$\.?([^`]*)`", re.DOTALL)
_WORDS = {"object": "table", "array": "list", "str": "text", "int": "whole number"}
_ENUMS = {"lse": '"natural" or "base2"'} | {
    name: " or ".join(f'"{each}"' for each in valid)
    for name, valid in (("empty_row", EMPTY_ROWS), ("causal", ALIGNMENTS))
}


def _in_our_words(text: str) -> str:
    """What msgspec says of a type, with the key in front."""
    match = _AT.fullmatch(text)
    said, key = (match[1], match[2]) if match else (text, "")
    said = re.sub(r" ?\| ?null", "", said.replace("`", ""))
    said = re.sub(r"\b[a-z]+\b", lambda word: _WORDS.get(word[0], word[0]), said)
    said = said[0].lower() + said[1:].replace(" | ", " or ")
    if key in _ENUMS:
        said += f": it must be {_ENUMS[key]}"
    return f"{key}: {said}" if key else said
