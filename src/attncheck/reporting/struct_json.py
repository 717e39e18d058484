"""Reports other than ``record.Report`` as JSON, and back."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from attncheck.core.errors import UsageError
from attncheck.core.sanitize_text import one_line

__all__ = ["read", "written"]

S = TypeVar("S", bound=msgspec.Struct)


def written(report: msgspec.Struct) -> str:
    """``report`` as indented JSON, keys in the order of its fields.

    What is no Unicode text (a lone surrogate in a foreign message) is written as its escape.
    """
    data = _text(msgspec.to_builtins(report))
    return msgspec.json.format(msgspec.json.encode(data), indent=2).decode() + "\n"


def read(text: str, kind: type[S], schema: int) -> S:
    """The report of type ``kind`` that ``written`` wrote.

    Raises:
        UsageError: for anything else, another ``schema`` too.
    """
    try:
        data = msgspec.json.decode(text)
        found = data.get("schema") if isinstance(data, dict) else None
        if found == schema and not isinstance(found, bool):
            return msgspec.convert(data, kind)
        fact = f"schema is {found!r}, this version reads {schema}"
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        fact = str(error)
    raise UsageError(f"the text is no {kind.__name__} of attncheck: {one_line(fact)}.")


def _text(value: Any) -> Any:
    if isinstance(value, dict):
        return {_text(k): _text(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_text(v) for v in value]
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
