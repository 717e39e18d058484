"""Reads the results of a function of a convention, and checks that it did not write to inputs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from attncheck.core.outputs import Outputs
from attncheck.core.source_files import error_line
from attncheck.inputs.input_tensors import Inputs
from attncheck.subjects.capabilities.subject import ContractViolation, Refused
from attncheck.subjects.conventions.convention import (
    ComputedArgument,
    Convention,
    ConventionOptions,
)
from attncheck.subjects.conventions.layouts import Layout


@contextmanager
def refusals() -> Iterator[None]:
    """Turn exceptions by which a kernel rejects its arguments into Refused within this context."""
    try:
        yield
    except (ValueError, NotImplementedError, AssertionError) as error:  # others are failures
        raise Refused(error_line(error)) from error


class BrokenResult(ContractViolation):
    """Raised if a result does not follow its convention, with the reason in one line."""


class WroteToInput(ContractViolation):
    """Raised if a kernel wrote to an input, which is named in one line."""

    rule = "mutation"


def read_result(
    result: object, convention: Convention, options: ConventionOptions
) -> tuple[Any, Any]:
    """Return out and LSE, or None, from a result: out, or a tuple with out and LSE first.

    Whether they are tensors is checked by the executor. Raises BrokenResult for anything else than
    out or a tuple of 2 to ``convention.most_results``, and if a declared LSE is missing.
    """
    most = convention.most_results
    if isinstance(result, tuple | list):
        # Functions that may also return weights or a cache end their tuples with None.
        while len(result) > most and result[-1] is None:
            result = result[:-1]
    lse: Any = None
    if isinstance(result, torch.Tensor):
        out = result
    elif isinstance(result, tuple | list) and 2 <= len(result) <= most:
        out, second = result[:2]
        # FlexAttention's AuxOutput holds LSE by name.
        lse = second if isinstance(second, torch.Tensor) else getattr(second, "lse", second)
    else:
        many = f" of {len(result)}" if isinstance(result, tuple | list) else ""
        raise BrokenResult(
            f"it returned {type(result).__name__}{many}: the {convention.name} convention gives "
            "out, or (out, lse)"
        )
    if options.returns_lse and lse is None:
        raise BrokenResult("it gave no LSE, which it is declared to give")
    return out, None if options.returns_lse is False else lse


def to_outputs(out: Any, lse: Any, layout: Layout, options: ConventionOptions) -> Outputs:
    """Return results converted to attncheck's axes; raises BrokenResult for a wrong shape."""
    own_out = _convert("out", out, layout.out_axes, layout.out)
    return Outputs(own_out, to_natural_lse(lse, layout, options))


def to_natural_lse(lse: Any, layout: Layout, options: ConventionOptions) -> Any:
    """Return LSE converted to attncheck's axes and natural logarithm, if it is a tensor.

    Raises BrokenResult for a wrong shape.
    """
    lse = _convert("lse", lse, layout.lse_axes, layout.lse)
    return base2_to_natural(lse) if options.lse == "base2" else lse


def _convert(
    name: str, value: Any, axes: str, conversions: Mapping[tuple[int, ...], Callable[..., Any]]
) -> Any:
    """Return ``value`` converted by the function for its shape; others than tensors unchanged."""
    if not conversions or not isinstance(value, torch.Tensor):
        return value
    shape = tuple(value.shape)
    if shape not in conversions:
        expected = " or ".join(str(one) for one in conversions)
        raise BrokenResult(f"{name}.shape={shape}, but should be {expected} ({axes})")
    return conversions[shape](value)


def base2_to_natural(lse: Any) -> Any:
    """Return a base-2 LSE times ln 2, rounded to its own dtype; other objects unchanged.

    B18 of the manual counts three roundings of LSE at its own size: the kernel's, and this one.
    """
    if not isinstance(lse, torch.Tensor) or not lse.is_floating_point():
        return lse
    return (lse.double() * math.log(2)).to(lse.dtype)


# ------------------------------------------------------------------ writes to inputs

_EQUAL = torch.equal  # saved before a kernel's module could replace it
_COPIED = 1 << 20  # bytes up to which a tensor is copied; larger ones are created again


class MutationCheck:
    """The state before a call of tensors made for it: tables, lengths, masks, mods' captures.

    Args:
        passed: The keywords of the call.
        arguments: The same keywords before a ComputedArgument was evaluated.
    """

    def __init__(
        self, passed: Mapping[str, Any], arguments: Mapping[str, Any], inputs: Inputs
    ) -> None:
        self._inputs = inputs
        self._input_addresses = {_address(tensor) for tensor in inputs.tensors().values()}
        self._made = {
            n: each for n, each in arguments.items() if isinstance(each, ComputedArgument)
        }
        self._tensors = {name: self._own_tensors(passed[name]) for name in self._made}
        # Copies lie on the CPU, because a GPU's free memory is filled for the kernel's call.
        self._copies = {
            name: [tensor.detach().to("cpu", copy=True) for tensor in tensors]
            for name, tensors in self._tensors.items()
            if all(tensor.nbytes <= _COPIED for tensor in tensors)
        }

    def check(self) -> None:
        """Raise WroteToInput for the first argument that has changed."""
        for name, tensors in self._tensors.items():
            before = self._copies.get(name)
            if before is None:
                before = self._own_tensors(self._made[name].make(self._inputs))
            for tensor, copy in zip(tensors, before, strict=True):
                require_unchanged(name, tensor.detach().to(copy.device), copy)

    def _own_tensors(self, value: Any) -> list[torch.Tensor]:
        by_id = {id(tensor): tensor for tensor in _tensors(value, set())}
        return [each for each in by_id.values() if _address(each) not in self._input_addresses]


def require_unchanged(name: str, its: torch.Tensor, mine: torch.Tensor) -> None:
    """Raise WroteToInput unless ``its`` is bitwise equal to ``mine``."""
    its, mine = (each.contiguous().flatten().view(torch.uint8) for each in (its, mine))
    if not _EQUAL(its, mine):
        raise WroteToInput(f"wrote to its input {name}")


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors that ``value`` is, contains, or captures if it is a function."""
    # A function may capture itself, and a list may contain itself.
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    parts: list[Any] = []
    if isinstance(value, list | tuple):
        parts = list(value)
    elif isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, BlockMask):
        parts = list(vars(value).values())
    elif isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, FunctionType):
        # A function's closure, its defaults, and the tensors among the globals that it uses.
        named = (value.__globals__.get(name) for name in value.__code__.co_names)
        parts = [cell.cell_contents for cell in value.__closure__ or ()]
        parts += value.__defaults__ or ()
        parts += [each for each in named if isinstance(each, torch.Tensor)]
    for part in parts:
        yield from _tensors(part, seen)
