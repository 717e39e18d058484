"""JSON of Records, with strings for non-finite numbers, and strict reading."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from attncheck.core.errors import UsageError
from attncheck.core.files import read_bytes
from attncheck.core.sanitize_text import one_line

# JSON has no literals for these numbers; strings keep files valid for all readers.
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
# Fields of a Record with numbers; elsewhere, as in a name or a message, "nan" is text.
_NUMERIC = ("case", "out", "lse", "gradients", "judgement", "seconds", "accuracy", "error_map")
_LONGEST_MESSAGE = 300  # Characters of an error's text.


def to_json_text(data: msgspec.Struct) -> str:
    """Return ``data`` as indented JSON, keys in the order of its fields.

    NaN and infinities are the strings ``"nan"``, ``"inf"`` and ``"-inf"``. Lone surrogates, which
    may occur in foreign messages, are written as escapes.
    """
    return msgspec.json.format(msgspec.json.encode(to_plain_data(data)), indent=2).decode() + "\n"


def to_plain_data(data: Any) -> Any:
    """Return structs and plain values as JSON-compatible data; see ``to_json_text``."""
    return _numbers_to_words(msgspec.to_builtins(data))


def words_to_numbers(value: Any) -> Any:
    """Return ``value`` with floats for all of these strings; for data without other texts."""
    if isinstance(value, dict):
        return {k: words_to_numbers(v) for k, v in value.items()}
    if isinstance(value, list):
        return [words_to_numbers(v) for v in value]
    return _WORDS.get(value, value) if isinstance(value, str) else value


def read_json(source: Path | str, kind: str, largest: int) -> Any:
    """Return the parsed JSON of a file, given as a Path, or of a str.

    Args:
        kind: The expected content, for messages: ``report``.
        largest: Largest number of bytes to accept.

    Raises:
        UsageError: if it cannot be read, is too large, or is no JSON.
    """
    name = source_name(source)
    try:
        return msgspec.json.decode(read_bytes(source, name, kind, largest))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise UsageError(refusal_message(name, kind, str(error))) from None


def words_to_record_numbers(record: Any) -> Any:
    """Return a Record's JSON with floats for strings such as ``"nan"`` in numeric fields."""
    if not isinstance(record, dict):
        return record
    return record | {name: words_to_numbers(record[name]) for name in _NUMERIC if name in record}


def source_name(source: Path | str) -> str:
    """Return the name of a source for messages."""
    return one_line(str(source)) if isinstance(source, Path) else "the text"


def refusal_message(name: str, kind: str, fact: str) -> str:
    """Return a one-line message: why ``name`` is no ``kind`` of attncheck."""
    return f"{name} is no {kind} of attncheck: {one_line(fact)[:_LONGEST_MESSAGE]}."


def other_schema(data: Any, known: int) -> str:
    """Return an error text for a file's schema version; empty if it is ``known``."""
    schema = data.get("schema") if isinstance(data, dict) else None
    # True equals 1 in Python, but is not a version.
    right = schema == known and not isinstance(schema, bool)
    return "" if right else f"schema is {schema!r}, this version reads {known}"


def _numbers_to_words(value: Any) -> Any:
    """Return ``value`` with strings for non-finite floats, and without lone surrogates."""
    if isinstance(value, dict):
        return {_numbers_to_words(k): _numbers_to_words(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers_to_words(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    # A lone surrogate, as of a foreign file name, is no UTF-8.
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
