"""What the library has of each mask and score mod, by name, and how a Spec is checked and built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

from attncheck.errors import ProblemError, UnknownName
from attncheck.formats import fp32
from attncheck.mods import arguments as check
from attncheck.mods.spec import Argument, Dimensions, Spec
from attncheck.recorded_names import refuse_recorded, without_recorded

__all__ = ["ANY_SEED", "Entry", "Values", "build", "check_spec", "real", "text", "whole"]

Mod = TypeVar("Mod")
Values = Mapping[str, Argument]
"""Arguments by name."""

ANY_SEED = check.whole(0, 2**63 - 1)

_ANY_NUMBER = 10**9


def _any(_name: str, _values: Values, _dimensions: Dimensions) -> None:
    """Arguments that are right are right together."""


def _the_same(_values: Values, dimensions: Dimensions) -> Dimensions:
    """Parts are asked at the composition's own indices."""
    return dimensions


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(Generic[Mod]):
    """One mask or score mod of the library, or one way to compose them.

    Attributes:
        summary: What it does, in a line.
        build: (arguments by name, dimensions, device) → callable; None for a composition.
        compose: The callables of the parts, and its arguments as keywords → callable; None for
            anything else.
        arguments: Its numbers, or its text, by name, each with the check that it must pass.
        together: (name, arguments by name, dimensions) → None: raises ProblemError where arguments
            that are right one by one do not fit together.
        within: Compositions only: (arguments by name, dimensions) → the dimensions that its parts
            are asked about.
        most_parts: How many parts a composition takes at most (at least one).
        additive: Scores only: what is added does not depend on the score. A composition is
            additive when its parts are (``is_additive``).
    """

    summary: str
    build: Callable[[Values, Dimensions, str], Mod] | None = None
    compose: Callable[..., Mod] | None = None
    arguments: Mapping[str, check.Check] = field(default_factory=dict)
    together: Callable[[str, Values, Dimensions], None] = _any
    within: Callable[[Values, Dimensions], Dimensions] = _the_same
    most_parts: int = _ANY_NUMBER
    additive: bool = True


def check_spec(
    kind: str, option: str, entries: Mapping[str, Entry[Mod]], spec: Spec, dims: Dimensions
) -> None:
    """Raises UnknownName or ProblemError unless ``spec`` is one of ``entries`` and fits.

    Args:
        kind: What an error calls it: ``mask`` or ``score mod``.
        option: Of the command line, that takes a file of such mods.
        entries: By name.
        spec: What is asked for.
        dims: The index ranges.
    """
    if spec.name not in entries:
        refuse_recorded(kind, spec.name)
        if "::" in spec.name:  # a Case from elsewhere
            raise ProblemError(f"{kind} {spec.name!r} is of a file: give that file with {option}.")
        raise UnknownName(kind, spec.name, without_recorded(entries))
    entry = entries[spec.name]
    _check_arguments(spec, entry, dims)
    if entry.compose is None and spec.parts:
        raise ProblemError(f"{spec.name} takes no parts: only a composition does.")
    if entry.compose is not None and not 1 <= len(spec.parts) <= entry.most_parts:
        wanted = "exactly one part" if entry.most_parts == 1 else "at least one part"
        raise ProblemError(f"{spec.name} has {len(spec.parts)} parts: it takes {wanted}.")
    for part in spec.parts:
        check_spec(kind, option, entries, part, entry.within(spec.values, dims))


def _check_arguments(spec: Spec, entry: Entry[Mod], dims: Dimensions) -> None:
    checks, values = entry.arguments, spec.values
    for name in values:
        if name not in checks:
            allowed = ", ".join(checks) or "none"
            raise ProblemError(f"{spec.name} has no argument {name!r}: its arguments: {allowed}.")
    for name, passes in checks.items():
        if name not in values:
            raise ProblemError(f"{spec.name} needs its argument {name!r}.")
        passes(f"{spec.name}.{name}", values[name], dims)
    entry.together(spec.name, values, dims)


def build(entries: Mapping[str, Entry[Mod]], spec: Spec, dims: Dimensions, device: str) -> Mod:
    """The callable of a checked ``spec``, its tensors on ``device``."""
    entry = entries[spec.name]
    if entry.compose is not None:
        inside = entry.within(spec.values, dims)
        parts = (build(entries, part, inside, device) for part in spec.parts)
        return entry.compose(*parts, **spec.values)
    assert entry.build is not None
    return entry.build(spec.values, dims, device)


def whole(values: Values, name: str) -> int:
    """A whole number that was checked at the door."""
    return cast("int", values[name])


def real(values: Values, name: str) -> float:
    """A real number as a kernel receives it."""
    return fp32(float(cast("float", values[name])))


def text(values: Values) -> str:
    """The text of an expression."""
    return cast("str", values["text"])
