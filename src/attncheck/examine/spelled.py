"""What a kernel declares, as JSON and back: every field by its name, and nothing besides."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from attncheck.errors import UsageError
from attncheck.formats import FORMATS, Format

__all__ = ["read", "spelled"]

_Dataclass = TypeVar("_Dataclass")


def spelled(value: Any) -> Any:
    """A dataclass as a JSON object, formats by their names.

    Raises:
        UsageError: for what JSON cannot say, and for a format that is none of attncheck's.
    """
    if isinstance(value, Format):
        if FORMATS.get(value.name) != value:
            raise UsageError(f"{value.name!r} is no format of attncheck's.")
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: spelled(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if value is not None and type(value) not in {bool, int, float, str}:
        raise UsageError(f"{type(value).__name__} is no number, word or flag.")
    return value


def read(kind: type[_Dataclass], words: Any) -> _Dataclass:
    """What ``spelled`` wrote of a dataclass of this kind.

    Raises:
        UsageError: for anything else: a field too many or too few, or of another type.
    """
    assert dataclasses.is_dataclass(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    if not isinstance(words, dict) or sorted(words) != sorted(names):
        raise UsageError(f"what came is no {kind.__name__}.")
    types_of = _types(kind)
    try:
        found = kind(**{name: _value(types_of[name], words[name], name) for name in names})
    except (TypeError, ValueError) as error:
        raise UsageError(f"what came is no {kind.__name__}: {error}") from None
    return found


@functools.cache
def _types(kind: type) -> dict[str, Any]:
    """The types of its fields; to look them up takes longer than to read it."""
    return get_type_hints(kind)


def _value(kind: Any, value: Any, name: str) -> Any:
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
    elif get_origin(kind) is types.UnionType:
        if value is None and type(None) in get_args(kind):
            return None
        (kind,) = (each for each in get_args(kind) if each is not type(None))
        return _value(kind, value, name)
    elif kind is Format:
        if isinstance(value, str) and value in FORMATS:
            return FORMATS[value]
    elif dataclasses.is_dataclass(kind):
        return read(kind, value)  # type: ignore[arg-type]  # it is a class
    elif type(value) is kind or (kind is float and type(value) is int):
        return value
    raise UsageError(f"{name} is of no type that it may be of.")
