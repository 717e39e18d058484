"""What a function takes of a convention: its signature says it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

__all__ = ["Taken", "called", "parameter_names", "required_names", "taken"]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Taken:
    """Keywords of a convention that a function takes.

    Attributes:
        keywords: All of them.
        required: Those that it gives no default.
        named: Those that its signature names; the others go into its ``**keywords``, or it has no
            signature.
    """

    keywords: frozenset[str]
    required: frozenset[str] = frozenset()
    named: frozenset[str] = frozenset()

    def spelled(
        self, spellings: Mapping[str, tuple[str, ...]], by_name: Collection[str] = ()
    ) -> dict[str, tuple[str, ...]]:
        """By meaning, the names under which it takes it: all that it requires, else one.

        What goes into ``**keywords`` has the convention's own name, the first of each meaning; of
        the meanings in ``by_name`` nothing does.
        """
        found = {}
        for meaning, names in spellings.items():
            required = tuple(name for name in names if name in self.required)
            one = [name for name in names if name in self.named] or [
                name for name in names[:1] if name in self.keywords and meaning not in by_name
            ]
            if required or one:
                found[meaning] = required or (one[0],)
        return found


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
    parameters = _parameters(function)
    if parameters is None:
        return Taken(frozenset(keywords))
    return _read(parameters, frozenset(keywords))


def parameter_names(function: object) -> frozenset[str]:
    """Names in the signature; none where there is none."""
    parameters = _parameters(function) if callable(function) else None
    return frozenset(parameter.name for parameter in parameters or ())


def required_names(function: object) -> frozenset[str]:
    """Names in the signature that have no default, beyond the first three: those are tensors."""
    parameters = _parameters(function) if callable(function) else None
    return _required((parameters or [])[3:])


def called(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a call of ``function`` calls: a ``torch.nn.Module``'s ``forward``."""
    import torch

    return function.forward if isinstance(function, torch.nn.Module) else function


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(called(function)).parameters.values())
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001  # in C, or somebody's own __signature__: it says nothing
        return None


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
    parameters = [p for p in parameters if p not in tensors]
    required = _required(parameters)
    named = keywords & {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return Taken(keywords, required & keywords, named)
    others = required - keywords
    if others:
        return f"need no {min(others)!r}, for which the convention has no value"
    return Taken(named, required, named)


def _required(parameters: list[inspect.Parameter]) -> frozenset[str]:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return frozenset(p.name for p in parameters if p.default is p.empty and p.kind not in variable)
