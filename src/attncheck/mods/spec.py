"""The name of a mask or score mod with its numbers: what a Problem stores and JSON carries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from attncheck.errors import ProblemError

__all__ = ["Argument", "Dimensions", "Spec"]

Argument = int | float | str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """The index ranges a mod is asked about: b < batch, h < heads, q_idx < query, kv_idx < kv."""

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
        parts: What a composition composes, in order.
    """

    name: str
    arguments: tuple[tuple[str, Argument], ...] = ()
    parts: tuple[Spec, ...] = ()

    @classmethod
    def of(cls, name: str, /, *parts: Spec, **arguments: Argument | list[int]) -> Spec:
        """Spec ``name`` with keyword numbers or a text, or a composition of ``parts``."""
        frozen = {k: tuple(v) if isinstance(v, list) else v for k, v in arguments.items()}
        return cls(name, tuple(sorted(frozen.items())), parts)

    @property
    def values(self) -> dict[str, Argument]:
        """Arguments by name."""
        return dict(self.arguments)

    def walk(self) -> Iterator[Spec]:
        """This spec and everything it is composed of."""
        yield self
        for part in self.parts:
            yield from part.walk()

    def to_json(self) -> dict[str, Any]:
        """A JSON object; ``from_json`` gives the same Spec back."""
        given = {k: list(v) if isinstance(v, tuple) else v for k, v in self.arguments}
        composed = {"of": [part.to_json() for part in self.parts]} if self.parts else {}
        return {"name": self.name, **given, **composed}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Spec:
        """The Spec that ``to_json`` wrote; raises ProblemError on anything else."""
        if not isinstance(data, Mapping) or not isinstance(data.get("name"), str):
            raise ProblemError(f"a mod is an object with a name, not {data!r}.")
        composed = data.get("of", [])
        if not isinstance(composed, list):
            raise ProblemError(f"{data['name']}.of must be a list of mods, not {composed!r}.")
        parts = tuple(cls.from_json(part) for part in composed)
        given = {k: v for k, v in data.items() if k not in {"name", "of"}}
        for key, value in given.items():
            items = value if isinstance(value, list) else [value]
            numbers = all(isinstance(i, int | float) and not isinstance(i, bool) for i in items)
            if not (numbers or isinstance(value, str)):
                raise ProblemError(f"{data['name']}.{key} must be numbers or a text: {value!r}.")
        return cls.of(data["name"], *parts, **given)

    def __str__(self) -> str:
        inner = [str(part) for part in self.parts]
        inner += [
            (v if isinstance(v, str) else f"{k}={v}").replace(" ", "") for k, v in self.arguments
        ]
        return f"{self.name}({', '.join(inner)})" if inner else self.name
