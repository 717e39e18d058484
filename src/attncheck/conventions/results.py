"""What a function of a convention returned or raised, and what it wrote to."""

from __future__ import annotations

import functools
import math
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from attncheck.capabilities.subject import ContractViolation, Refused
from attncheck.conventions.convention import MadeArgument
from attncheck.core.outputs import Outputs
from attncheck.core.source_files import error_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from attncheck.conventions.convention import ConventionOptions
    from attncheck.conventions.layouts import Layout
    from attncheck.inputs.input_tensors import Inputs

__all__ = [
    "BrokenResult",
    "MutationCheck",
    "Returned",
    "WroteToInput",
    "base2_to_natural",
    "check_shape",
    "read_result",
    "refusals",
    "require_unchanged",
    "to_natural_lse",
    "to_outputs",
]


# How a kernel says that it does not take its arguments. What else it raises is an error.
_REFUSALS = (ValueError, NotImplementedError, AssertionError)


@contextmanager
def refusals() -> Iterator[None]:
    """Within, what a kernel raises to say that it does not take its arguments is Refused."""
    try:
        yield
    except _REFUSALS as error:
        raise Refused(error_line(error)) from error


class BrokenResult(ContractViolation):
    """What a function returned is not what its convention says; one line."""


class WroteToInput(ContractViolation):
    """It wrote to what it was given; one line."""

    rule = "mutation"


@dataclass(frozen=True, slots=True)
class Returned:
    """What was found where out and LSE should be; whether it is a tensor, the executor asks."""

    out: Any
    lse: Any = None


def read_result(given: object, convention: str, most: int, options: ConventionOptions) -> Returned:
    """``out``, ``(out, lse)``, or with up to ``most`` things in all.

    Raises BrokenConvention for anything else, and for a missing LSE where one is declared.
    """
    if isinstance(given, torch.Tensor):
        found = Returned(given)
    elif isinstance(given, tuple | list) and 2 <= len(given) <= most:
        second = given[1]
        # FlexAttention's AuxOutput holds LSE by name.
        lse = second if isinstance(second, torch.Tensor) else getattr(second, "lse", second)
        found = Returned(given[0], lse)
    else:
        many = f" of {len(given)}" if isinstance(given, tuple | list) else ""
        raise BrokenResult(
            f"it returned {type(given).__name__}{many}: the {convention} convention gives out, or "
            "(out, lse)"
        )
    if options.returns_lse is False:
        return Returned(found.out)
    if options.returns_lse and found.lse is None:
        raise BrokenResult("it gave no LSE, which it is declared to give")
    return found


def check_shape(
    name: str, value: Any, axes: str, known: Mapping[tuple[int, ...], Callable[..., Any]]
) -> Any:
    """``value`` brought back by what ``known`` has for its shape; what is no tensor stays.

    Raises BrokenConvention for a tensor of another shape.
    """
    if not isinstance(value, torch.Tensor):
        return value
    shape = tuple(value.shape)
    if shape not in known:
        wanted = " or ".join(str(one) for one in known)
        raise BrokenResult(f"{name}.shape={shape}, but should be {wanted} ({axes})")
    return known[shape](value)


def to_outputs(found: Returned, layout: Layout, options: ConventionOptions) -> Outputs:
    """What was found in attncheck's axes; raises BrokenConvention for another shape."""
    out = found.out
    if layout.out:
        out = check_shape("out", out, layout.out_axes, layout.out)
    return Outputs(out, to_natural_lse(found.lse, layout, options))


def to_natural_lse(lse: Any, layout: Layout, options: ConventionOptions) -> Any:
    """LSE in attncheck's axes, natural; what is no tensor stays. Raises as ``brought``."""
    if layout.lse:
        lse = check_shape("lse", lse, layout.lse_axes, layout.lse)
    return base2_to_natural(lse) if options.lse == "base2" else lse


def base2_to_natural(lse: Any) -> Any:
    """A base-2 LSE times ln 2, rounded once more to its own dtype; what is no such tensor stays.

    B18 of the manual counts three roundings of LSE at its own size: such a kernel's own, and this.
    """
    if not isinstance(lse, torch.Tensor) or not lse.is_floating_point():
        return lse
    return (lse.double() * math.log(2)).to(lse.dtype)


_EQUAL = torch.equal  # as it was before any kernel was imported
_COPIED = 1 << 20  # bytes of a tensor that is copied; what is larger is made once more


class MutationCheck:
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
        self._made = {n: each for n, each in arguments.items() if isinstance(each, MadeArgument)}
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
                require_unchanged(name, its.detach().to(mine.device), mine)

    def _unseen(self, value: Any) -> list[torch.Tensor]:
        by_id = {id(tensor): tensor for tensor in _tensors(value, set())}
        return [tensor for tensor in by_id.values() if _address(tensor) not in self._seen]


def require_unchanged(name: str, its: torch.Tensor, mine: torch.Tensor) -> None:
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
