"""Traces of the library's mods, kept: the same code with the same closure has the same trace.

A trace costs as much as a small kernel, and a library mod is built anew for each Problem: causal
for a thousand lengths is one function. Only the library's own functions are known to read nothing
that changes; one function of somebody else's in a closure, and nothing is kept.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.mods.expression import Expression

__all__ = ["kept"]

_LIBRARY = frozenset(
    f"attncheck.mods.{room}" for room in ("compose", "masks", "neighborhoods", "scores", "tables")
)
_MOST = 256
_LARGEST = 4096  # numbers of a tensor that is compared
_PLAIN = (bool, int, float, str, type(None))
_KEPT: OrderedDict[Any, Expression] = OrderedDict()


class _Unknown(Exception):
    """Something in a closure may be another next time."""


def kept(
    what: str, mod: Callable[..., Tensor], device: str, trace: Callable[[], Expression]
) -> Expression:
    """``trace()``, or what it gave for a library mod of the same code and closure.

    Args:
        what: What is traced of it.
        mod: The callable.
        device: Where its tensors are.
        trace: Makes the trace.
    """
    try:
        key = what, device, _of(mod)
    except _Unknown:
        return trace()
    if key not in _KEPT:
        _KEPT[key] = trace()
        while len(_KEPT) > _MOST:
            _KEPT.popitem(last=False)
    _KEPT.move_to_end(key)
    return _KEPT[key]


def _of(value: object) -> Any:
    """What tells a value of a closure from others; raises _Unknown."""
    if type(value) in _PLAIN:
        # 1, 1.0 and True are equal, and 0.0 and -0.0: they are not the same.
        return type(value), repr(value)
    if type(value) in (tuple, list):
        return type(value), tuple(map(_of, value))  # type: ignore[call-overload]  # it is one
    if isinstance(value, FunctionType):
        return _of_function(value)
    if type(value) is functools.partial:
        return "partial", _of(value.func), _of(value.args), _of(sorted(value.keywords.items()))
    if type(value) is Tensor:
        return _of_tensor(value)
    raise _Unknown


def _of_function(function: FunctionType) -> Any:
    if function.__module__ not in _LIBRARY or function.__dict__:
        raise _Unknown
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # an empty cell
        raise _Unknown from None
    named = sorted((function.__kwdefaults__ or {}).items())
    return function.__code__, _of(cells), _of(function.__defaults__), _of(named)


def _of_tensor(tensor: Tensor) -> Any:
    if tensor.device.type != "cpu" or tensor.numel() > _LARGEST or tensor.requires_grad:
        raise _Unknown
    numbers = tensor.contiguous().numpy().tobytes()
    return str(tensor.dtype), tuple(tensor.shape), tensor.stride(), numbers
