"""What a function of a convention returned, read as out and LSE; or raised."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attncheck.outputs import Outputs
from attncheck.source_files import brief
from attncheck.subjects.contract import Broken, Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from attncheck.subjects.conventions.layouts import Layout
    from attncheck.subjects.conventions.options import ConventionOptions

__all__ = [
    "BrokenConvention",
    "Returned",
    "WroteToInput",
    "brought",
    "brought_lse",
    "in_natural_logarithm",
    "read",
    "refusing",
    "shaped",
]


# How a kernel says that it does not take its arguments. What else it raises is an error.
_REFUSALS = (ValueError, NotImplementedError, AssertionError)


@contextmanager
def refusing() -> Iterator[None]:
    """Within, what a kernel raises to say that it does not take its arguments is Refused."""
    try:
        yield
    except _REFUSALS as error:
        raise Refused(brief(error)) from error


class BrokenConvention(Broken):
    """What a function returned is not what its convention says; one line."""


class WroteToInput(Broken):
    """It wrote to what it was given; one line."""

    rule = "mutation"


@dataclass(frozen=True, slots=True)
class Returned:
    """What was found where out and LSE should be; whether it is a tensor, the executor asks."""

    out: Any
    lse: Any = None


def read(given: object, convention: str, most: int, options: ConventionOptions) -> Returned:
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
        raise BrokenConvention(
            f"it returned {type(given).__name__}{many}: the {convention} convention gives out, or "
            "(out, lse)"
        )
    if options.returns_lse is False:
        return Returned(found.out)
    if options.returns_lse and found.lse is None:
        raise BrokenConvention("it gave no LSE, which it is declared to give")
    return found


def shaped(
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
        raise BrokenConvention(f"{name}.shape={shape}, but should be {wanted} ({axes})")
    return known[shape](value)


def brought(found: Returned, layout: Layout, options: ConventionOptions) -> Outputs:
    """What was found in attncheck's axes; raises BrokenConvention for another shape."""
    out = found.out
    if layout.out:
        out = shaped("out", out, layout.out_axes, layout.out)
    return Outputs(out, brought_lse(found.lse, layout, options))


def brought_lse(lse: Any, layout: Layout, options: ConventionOptions) -> Any:
    """LSE in attncheck's axes, natural; what is no tensor stays. Raises as ``brought``."""
    if layout.lse:
        lse = shaped("lse", lse, layout.lse_axes, layout.lse)
    return in_natural_logarithm(lse) if options.lse == "base2" else lse


def in_natural_logarithm(lse: Any) -> Any:
    """A base-2 LSE times ln 2, rounded once more to its own dtype; what is no such tensor stays.

    B18 of the manual counts three roundings of LSE at its own size: such a kernel's own, and this.
    """
    if not isinstance(lse, torch.Tensor) or not lse.is_floating_point():
        return lse
    return (lse.double() * math.log(2)).to(lse.dtype)
