"""The facts of a convention of functions: a table that ``FunctionSubject`` reads."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from attncheck.subjects.conventions.convention import Convention
from attncheck.subjects.conventions.signature import Taken, parameter_names, required_names, taken

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from attncheck.inputs import Inputs
    from attncheck.problem import Problem
    from attncheck.subjects.contract import Subject
    from attncheck.subjects.conventions.arguments import Arguments, Asked
    from attncheck.subjects.conventions.layouts import Layout
    from attncheck.subjects.conventions.options import ConventionOptions

__all__ = ["Calling", "convention_of", "named_like"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calling:
    """How functions of one convention are called.

    Attributes:
        name: Of the convention.
        summary: One line.
        spellings: By meaning, the names that functions have for it; the convention's own first.
        arguments: What becomes of a Problem's mask, score mod and scale: arguments by meaning, or
            why the convention cannot pass them.
        layout: The axes of the tensors of a Problem that can be passed.
        claims: Whether a function's (parameters, dotted name) show that it is of this convention.
        by_name: Meanings that are passed only where the signature names them, and never into
            somebody's ``**keywords``.
        musts: Meanings without which a function is none of this convention.
        most: Most things that a function returns.
        bottom_right: How causal masks and windows are aligned where the lengths differ.
        empty_lse: What LSE may be of a row that sees no key.
        within: What is entered around a call on (device).
        declined: Arguments for which it has no value, with the reason: a function that requires
            one is none of this convention.
        tensors: What it is given by position, where keys and values are laid out together; None
            for what the layout makes of each.
        paged: Whether keys and values lie in pages: it is asked Problems with paging, and no other.
    """

    name: str
    summary: str
    spellings: Mapping[str, tuple[str, ...]]
    arguments: Callable[[Asked], Arguments | str]
    layout: Callable[[Problem], Layout]
    claims: Callable[[frozenset[str], str], bool]
    by_name: frozenset[str] = frozenset()
    musts: tuple[str, ...] = ()
    most: int = 2
    bottom_right: bool = False
    empty_lse: tuple[float, ...] = (float("-inf"),)
    within: Callable[[str], AbstractContextManager[object]] = lambda _device: nullcontext()
    declined: Mapping[str, str] = field(default_factory=dict)
    tensors: Callable[[Layout, Inputs], tuple[Tensor, Tensor, Tensor]] | None = None
    paged: bool = False

    def takes(self, function: object) -> Taken | str:
        """What the function takes of it, or why it is no such function."""
        for name in required_names(function) & set(self.declined):
            return f"need no {name!r}: {self.declined[name]}"
        names = [name for names in self.spellings.values() for name in names]
        found = taken(function, names)
        if isinstance(found, str):
            return found
        for meaning in self.musts:
            if not found.keywords & set(self.spellings[meaning]):
                return f"take {self.spellings[meaning][0]}, as the {self.name} convention has it"
        return found


def named_like(function: object) -> str:
    """Dotted name of a function, its module first; empty where it has none."""
    whole = inspect.unwrap(function) if callable(function) else function
    parts = (getattr(whole, name, "") for name in ("__module__", "__qualname__"))
    return ".".join(part for part in parts if isinstance(part, str))


def convention_of(calling: Calling) -> Convention:
    """The convention whose functions are called so."""

    def claims(found: object) -> bool:
        if not callable(found) or inspect.isclass(found):
            return False
        return calling.claims(parameter_names(found), named_like(found))

    def unfit(found: object) -> str | None:
        fits = calling.takes(found)
        return fits if isinstance(fits, str) else None

    def adopt(found: object, name: str, options: ConventionOptions) -> Subject:
        from attncheck.subjects.conventions.function_subject import FunctionSubject

        fits = calling.takes(found)
        assert isinstance(fits, Taken), "asked of what fits"
        assert callable(found)
        path, separator, member = name.partition("::")
        return FunctionSubject(found, Path(path).name + separator + member, calling, fits, options)

    return Convention(
        name=calling.name, summary=calling.summary, claims=claims, unfit=unfit, adopt=adopt
    )
