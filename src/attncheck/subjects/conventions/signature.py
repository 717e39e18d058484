"""What a function takes of a convention: its signature says it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

__all__ = ["Taken", "taken"]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Taken:
    """Keywords of a convention that a function takes.

    Attributes:
        keywords: All of them.
        required: Those that it gives no default.
    """

    keywords: frozenset[str]
    required: frozenset[str] = frozenset()


def taken(function: object, keywords: Collection[str]) -> Taken | str:
    """What ``function`` takes of a convention of q, k, v by position and ``keywords`` by name.

    Args:
        function: A callable; a ``torch.nn.Module`` is its ``forward``.
        keywords: The convention's.

    Returns:
        What it takes; all, where nothing says it (functions written in C). Or why it does not
        follow the convention, to stand after ``it must``: ``be a function``.
    """
    if not callable(function) or inspect.isclass(function):
        return "be a function of query, key and value"
    if type(function).__module__.partition(".")[0] == "triton":
        return "be the Python function that launches this Triton function"
    try:
        signature = inspect.signature(_called(function))
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001  # in C, or somebody's own __signature__: it says nothing
        return Taken(frozenset(keywords))
    return _read(list(signature.parameters.values()), frozenset(keywords))


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    return function.forward if isinstance(function, torch.nn.Module) else function


def _read(parameters: list[inspect.Parameter], keywords: frozenset[str]) -> Taken | str:
    tensors = [p for p in parameters if p.kind in _POSITIONAL][:3]
    anything = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    for parameter in tensors:
        if parameter.name in keywords or parameter.default is not parameter.empty:
            anything = False
            tensors = tensors[: tensors.index(parameter)]
            break
    if len(tensors) < 3 and not anything:
        return "be a function of query, key and value: its first three arguments, without defaults"
    named = {p.name: p for p in parameters if p not in tensors}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return Taken(keywords, _required(named) & keywords)
    others = _required(named) - keywords
    if others:
        return f"need no {min(others)!r}, for which the convention has no value"
    by_name = {n for n, p in named.items() if p.kind is not p.POSITIONAL_ONLY}
    return Taken(keywords & by_name, _required(named))


def _required(named: dict[str, inspect.Parameter]) -> frozenset[str]:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return frozenset(
        name for name, p in named.items() if p.default is p.empty and p.kind not in variable
    )
