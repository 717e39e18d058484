"""Masks and score mods by name: the Spec that a Problem stores, and the entries of a library.

An entry defines how a Spec is checked and built. Importing this module imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from attncheck.core.errors import ProblemError, UnknownName, refuse_recorded, without_recorded

__all__ = ["Spec"]

Argument = int | float | str | tuple[int, ...]

Values: TypeAlias = Mapping[str, Any]  # Arguments by name, of the types that their checks require.

INT32_LARGEST = 2**31 - 1

GENERATOR = 1
"""Version of the random numbers of ``core.draws``, which itself would load NumPy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """The index ranges a mod is called with: b < batch, h < heads, q_idx < query, kv_idx < kv."""

    batch: int
    heads: int
    query: int
    kv: int


@dataclass(frozen=True, slots=True)
class Spec:
    """A mask or score mod of the library, or a composition, as data.

    >>> Spec.of("and", Spec.of("causal"), Spec.of("sliding_window", window=64)).to_json()
    {'name': 'and', 'of': [{'name': 'causal'}, {'name': 'sliding_window', 'window': 64}]}

    Attributes:
        name: A name in ``mods.library``.
        arguments: Its numbers or its text, sorted by name; sequences of integers as tuples.
        parts: The parts of a composition, in order.
    """

    name: str
    arguments: tuple[tuple[str, Argument], ...] = ()
    parts: tuple[Spec, ...] = ()

    @classmethod
    def of(cls, name: str, /, *parts: Spec, **arguments: Argument | list[int]) -> Spec:
        """Return Spec ``name`` with keyword numbers or a text, or a composition of ``parts``."""
        frozen = {k: tuple(v) if isinstance(v, list) else v for k, v in arguments.items()}
        return cls(name, tuple(sorted(frozen.items())), parts)

    @property
    def values(self) -> dict[str, Any]:
        """Arguments by name, of the types that the checks of ``name`` require."""
        return dict(self.arguments)

    def walk(self) -> Iterator[Spec]:
        """Yield this spec and everything it is composed of."""
        yield self
        for part in self.parts:
            yield from part.walk()

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; ``from_json`` gives the same Spec back."""
        arguments = {k: list(v) if isinstance(v, tuple) else v for k, v in self.arguments}
        composed = {"of": [part.to_json() for part in self.parts]} if self.parts else {}
        return {"name": self.name, **arguments, **composed}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Spec:
        """Return the Spec that ``to_json`` wrote; raise ProblemError on anything else."""
        if not isinstance(data, Mapping) or not isinstance(data.get("name"), str):
            raise ProblemError(f"a mod is an object with a name, not {data!r}.")
        composed = data.get("of", [])
        if not isinstance(composed, list):
            raise ProblemError(f"{data['name']}.of must be a list of mods, not {composed!r}.")
        parts = tuple(cls.from_json(part) for part in composed)
        arguments = {k: v for k, v in data.items() if k not in {"name", "of"}}
        for key, value in arguments.items():
            items = value if isinstance(value, list) else [value]
            numbers = all(isinstance(i, int | float) and not isinstance(i, bool) for i in items)
            if not (numbers or isinstance(value, str)):
                raise ProblemError(f"{data['name']}.{key} must be numbers or a text: {value!r}.")
        return cls.of(data["name"], *parts, **arguments)

    def __str__(self) -> str:
        inner = [str(part) for part in self.parts]
        inner += [
            (v if isinstance(v, str) else f"{k}={v}").replace(" ", "") for k, v in self.arguments
        ]
        return f"{self.name}({', '.join(inner)})" if inner else self.name


# --- library entries --------------------------------------------------------------------------

Mod = TypeVar("Mod")

Check: TypeAlias = "Callable[[str, Argument, Dimensions], None]"
"""``check(label, value, dimensions)`` raises ProblemError; the label is ``mod.argument``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(Generic[Mod]):
    """One mask or score mod of the library, or one way to compose them."""

    summary: str  # One-line description.
    # (arguments by name, dimensions, device) → callable; None for a composition.
    build: Callable[[Values, Dimensions, str], Mod] | None = None
    # (callables of the parts, ``keywords``) → callable; None unless it is a composition.
    compose: Callable[..., Mod] | None = None
    # Compositions only: (arguments by name, dimensions, device) → the keywords of ``compose``.
    keywords: Callable[[Values, Dimensions, str], Values] = lambda values, _dims, _device: values
    # Names of its numbers or text, each with a check.
    arguments: Mapping[str, Check] = field(default_factory=dict)
    # (name, arguments by name, dimensions) → None: raises ProblemError if arguments that are valid
    # one by one are inconsistent.
    together: Callable[[str, Values, Dimensions], None] = lambda _name, _values, _dims: None
    # Compositions only: (arguments by name, dimensions) → the dimensions that its parts are
    # called with.
    within: Callable[[Values, Dimensions], Dimensions] = lambda _values, dims: dims
    most_parts: float = math.inf  # Largest number of parts of a composition (at least one).
    # Compositions only: names that its parts may have; empty: any. With these it is a mod of its
    # own to a capability table, and no ``composition``.
    takes: tuple[str, ...] = ()
    # Score mods only: the change does not depend on the score. A composition is additive if its
    # parts are (``is_additive``).
    additive: bool = True


def from_arguments(function: Callable[..., Mod]) -> Callable[[Values, Dimensions, str], Mod]:
    """Return the ``build`` of an entry whose ``function`` takes only the arguments, as keywords."""
    return lambda values, _dimensions, _device: function(**values)


def check_spec(
    kind: Literal["mask", "score mod"],
    entries: Mapping[str, Entry[Mod]],
    spec: Spec,
    dims: Dimensions,
) -> None:
    """Raise UnknownName or ProblemError unless ``spec`` is one of ``entries`` and fits.

    Args:
        kind: Kind of ``spec``, for error messages.
        entries: Entries of the library by name.
    """
    if spec.name not in entries:
        refuse_recorded(kind, spec.name)
        if "::" in spec.name:  # a mod of a user's file, which is not loaded
            option = "--mask" if kind == "mask" else "--score"
            raise ProblemError(f"{kind} {spec.name!r} is of a file: give that file with {option}.")
        raise UnknownName(kind, spec.name, without_recorded(entries))
    entry, values = entries[spec.name], spec.values
    for name in values:
        if name not in entry.arguments:
            allowed = ", ".join(entry.arguments) or "none"
            raise ProblemError(f"{spec.name} has no argument {name!r}: its arguments: {allowed}.")
    for name, check in entry.arguments.items():
        if name not in values:
            raise ProblemError(f"{spec.name} needs its argument {name!r}.")
        check(f"{spec.name}.{name}", values[name], dims)
    entry.together(spec.name, values, dims)
    _check_parts(entry, spec)
    # Parts are checked last, since their dimensions follow from checked arguments.
    for part in spec.parts:
        check_spec(kind, entries, part, entry.within(values, dims))


def _check_parts(entry: Entry[Mod], spec: Spec) -> None:
    """Raise ProblemError unless ``spec`` has as many parts as its entry takes, and of its names."""
    if entry.compose is None and spec.parts:
        raise ProblemError(f"{spec.name} takes no parts: only a composition does.")
    if entry.compose is not None and not 1 <= len(spec.parts) <= entry.most_parts:
        parts_text = "exactly one part" if entry.most_parts == 1 else "at least one part"
        raise ProblemError(f"{spec.name} has {len(spec.parts)} parts: it takes {parts_text}.")
    for part in spec.parts:
        if entry.takes and part.name not in entry.takes:
            allowed = " or ".join(entry.takes)
            raise ProblemError(f"{spec.name} is of {allowed}, and not of {str(part)!r}.")


def build_entry(
    entries: Mapping[str, Entry[Mod]], spec: Spec, dims: Dimensions, device: str
) -> Mod:
    """Return the callable of a checked ``spec``, its tensors on ``device``."""
    entry = entries[spec.name]
    if entry.compose is not None:
        inside = entry.within(spec.values, dims)
        parts = (build_entry(entries, part, inside, device) for part in spec.parts)
        return entry.compose(*parts, **entry.keywords(spec.values, dims, device))
    assert entry.build is not None
    return entry.build(spec.values, dims, device)


# --- checks of arguments ----------------------------------------------------------------------

_LONGEST = 200  # Characters of a text argument.
_LINE = re.compile(rf"(?=.{{1,{_LONGEST}}}\Z)[!-~]([ -~]*[!-~])?")
_FP32_SMALLEST = 2.0**-149
_FP32_LARGEST = math.ldexp(2 - 2.0**-23, 127)
_MOST_CELLS = 2**24  # Cells of the largest canvas: more than any length in use.


def whole_number(low: int, high: int) -> Check:
    """Return a check of a whole number from ``low`` to ``high``."""

    def check(label: str, value: Argument, _: Dimensions) -> None:
        if not _is_whole(value, low, high):
            raise ProblemError(f"{label}={value!r} must be a whole number from {low} to {high}.")

    return check


ANY_SEED = whole_number(0, 2**63 - 1)


def positive_number(label: str, value: Argument, _: Dimensions) -> None:
    """Check a positive number that fp32 can hold."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not _FP32_SMALLEST <= value <= _FP32_LARGEST:  # type: ignore[operator]  # it is one
        raise ProblemError(f"{label}={value!r} must be a positive number in the range of fp32.")


def lengths_covering(what: str, count: Callable[[Dimensions], int]) -> Check:
    """Return a check of lengths that cover ``count`` positions, called ``what`` in errors."""

    def check(label: str, value: Argument, dimensions: Dimensions) -> None:
        total, needed = sum(_lengths(label, value)), count(dimensions)
        if total < needed:
            raise ProblemError(f"{label} cover {total} positions: they must cover {what}={needed}.")

    return check


def padding_lengths(label: str, value: Argument, dimensions: Dimensions) -> None:
    """Check one length for each sequence of the batch, none longer than kv."""
    lengths = _lengths(label, value)
    batch, kv = dimensions.batch, dimensions.kv
    if len(lengths) != batch:
        raise ProblemError(
            f"{label} has {len(lengths)} lengths: it needs one for each of the batch={batch}."
        )
    if max(lengths) > kv:
        raise ProblemError(f"{label} has a length {max(lengths)}: none may exceed kv={kv}.")


def rows_and_columns(label: str, value: Argument, _: Dimensions) -> None:
    """Check the rows and columns of a canvas or a part of one."""
    pair = isinstance(value, tuple) and len(value) == 2
    shown = list(value) if isinstance(value, tuple) else value
    if not pair or not all(_is_whole(v, 1, _MOST_CELLS) for v in value):  # type: ignore[union-attr]  # it is a tuple
        raise ProblemError(
            f"{label}={shown!r} must be two whole numbers from 1 to {_MOST_CELLS}: rows, columns."
        )
    if math.prod(value) > _MOST_CELLS:  # type: ignore[arg-type]  # it is a tuple
        raise ProblemError(f"{label}={shown} has more than {_MOST_CELLS} cells.")


def formula_text(read: Callable[[str, Dimensions], object]) -> Check:
    """Return a check of a line of text that ``read`` parses; its errors name the argument."""

    def check(label: str, value: Argument, dimensions: Dimensions) -> None:
        if not isinstance(value, str) or not _LINE.fullmatch(value):
            text = repr(value)
            text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
            raise ProblemError(
                f"{label}={text} must be one line of at most {_LONGEST} ASCII characters, with "
                "no space before or after."
            )
        try:
            read(value, dimensions)
        except ProblemError as error:
            raise ProblemError(f"{label}={value!r}: {error}") from None

    return check


def _is_whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _lengths(label: str, value: Argument) -> tuple[int, ...]:
    if isinstance(value, tuple) and value and all(_is_whole(v, 0, INT32_LARGEST) for v in value):
        return value
    shown = list(value) if isinstance(value, tuple) else value
    raise ProblemError(
        f"{label}={shown!r} must be a list of whole numbers from 0 to {INT32_LARGEST}."
    )


FULL = Spec.of("full")
NONE = Spec.of("none")
