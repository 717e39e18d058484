"""Whether a function left alone what it was given, where an executor does not see it."""

from __future__ import annotations

import functools
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from attncheck.subjects.conventions.arguments import Made
from attncheck.subjects.conventions.outcome import WroteToInput

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attncheck.inputs import Inputs

__all__ = ["LeftAlone", "require_same"]

_EQUAL = torch.equal  # as it was before any kernel was imported
_COPIED = 1 << 20  # bytes of a tensor that is copied; what is larger is made once more


class LeftAlone:
    """What a convention made of a Problem, as it is before a call: tables, lengths, masks, mods.

    Of a mod the tensors that it captures: the same object is what the function gets.

    Args:
        passed: Keywords of the call.
        arguments: The same, as they are ``Made``.
        inputs: What they are made of; the executor looks at these itself.
    """

    def __init__(
        self, passed: Mapping[str, Any], arguments: Mapping[str, Any], inputs: Inputs
    ) -> None:
        self._inputs = inputs
        self._seen = {_address(tensor) for tensor in inputs.tensors().values()}
        self._made = {n: each for n, each in arguments.items() if isinstance(each, Made)}
        self._tensors = {name: self._unseen(passed[name]) for name in self._made}
        self._copies = {
            name: [_copy(tensor) for tensor in tensors]
            for name, tensors in self._tensors.items()
            if all(tensor.nbytes <= _COPIED for tensor in tensors)
        }

    def check(self) -> None:
        """Raises WroteToInput for the first argument that is not as it was."""
        for name, tensors in self._tensors.items():
            before = self._copies.get(name)
            if before is None:
                before = self._unseen(self._made[name].make(self._inputs))
            for its, mine in zip(tensors, before, strict=True):
                require_same(name, its.detach().to(mine.device), mine)

    def _unseen(self, value: Any) -> list[torch.Tensor]:
        by_id = {id(tensor): tensor for tensor in _tensors(value, set())}
        return [tensor for tensor in by_id.values() if _address(tensor) not in self._seen]


def require_same(name: str, its: torch.Tensor, mine: torch.Tensor) -> None:
    """Raises WroteToInput unless ``its`` has the very bits of ``mine``."""
    if not _EQUAL(_bytes(its), _bytes(mine)):
        raise WroteToInput(f"wrote to its input {name}")


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Those that ``value`` is, or holds, or captures where it is a function."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    for part in _parts(value):
        yield from _tensors(part, seen)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, BlockMask):
        return list(vars(value).values())
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    return _captured(value) if isinstance(value, FunctionType) else []


def _captured(function: FunctionType) -> list[Any]:
    """What its cells and defaults hold, and the tensors among the globals that it names."""
    named = (function.__globals__.get(name) for name in function.__code__.co_names)
    return [
        *(cell.cell_contents for cell in function.__closure__ or ()),
        *(function.__defaults__ or ()),
        *(value for value in named if isinstance(value, torch.Tensor)),
    ]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, where it takes nothing of a GPU's memory that was filled for the kernel."""
    return tensor.detach().to("cpu", copy=True)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
