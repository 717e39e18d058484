"""Gradients of a function of a convention: by autograd, or by a function of their own."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attncheck.subjects.contract import Refused
from attncheck.subjects.conventions.outcome import BrokenConvention
from attncheck.subjects.conventions.signature import called
from attncheck.tensor_names import GRADIENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attncheck.subjects.conventions.outcome import Returned

__all__ = [
    "NO_LSE",
    "Laid",
    "Loss",
    "adjoint",
    "by_autograd",
    "by_function",
    "laid",
    "needs",
    "passed_on",
]

NO_LSE = "it gives no LSE, of which the loss is a function"
"""Why gradients are refused where dLSE is given and no LSE is."""

# What changes no gradient: a backward is passed it only where it names it.
_OF_RESULTS = {"dropout_p", "return_attn_probs", "return_lse", "return_aux"}
_NO_WINDOW = (-1, -1)
_TENSORS = 6  # dout, q, k, v, out and lse


@dataclass(frozen=True, slots=True, eq=False)
class Laid:
    """A tensor in a kernel's axes, and the way of its gradient back.

    Attributes:
        name: Of its gradient.
        source: In attncheck's axes.
        changed: In the kernel's, by way of autograd.
        given: The same numbers; what the kernel gets, and autograd ends there.
    """

    name: str
    source: torch.Tensor
    changed: torch.Tensor
    given: torch.Tensor

    def back(self, gradient: object) -> torch.Tensor:
        """The kernel's gradient in attncheck's axes; 0 for keys that the kernel did not get.

        Raises BrokenConvention for what is no gradient of the tensor.
        """
        like = self.given
        if not isinstance(gradient, torch.Tensor):
            kind = type(gradient).__name__
            raise BrokenConvention(f"{self.name} is {kind}, but should be a tensor")
        for what in ("shape", "dtype", "device"):
            found, wanted = getattr(gradient, what), getattr(like, what)
            if found != wanted:
                said = (tuple(found), tuple(wanted)) if what == "shape" else (found, wanted)
                raise BrokenConvention(f"{self.name}.{what}={said[0]}, but should be {said[1]}")
        return adjoint(self.changed, self.source, gradient)


def laid(name: str, source: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> Laid:
    """``source`` changed to a kernel's axes, for gradients called ``name``."""
    with torch.enable_grad():
        source = source.detach().requires_grad_()
        changed = change(source)
    return Laid(name, source, changed, changed.detach().requires_grad_())


def adjoint(changed: torch.Tensor, source: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of ``source`` from that of what it was changed to; may be asked again."""
    (found,) = torch.autograd.grad(changed, source, gradient, retain_graph=True)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Loss:
    """What gradients are of.

    Attributes:
        dout: Like out, in the kernel's axes.
        dlse: Like LSE, in attncheck's axes and natural; None where the loss has no part of LSE.
    """

    dout: torch.Tensor
    dlse: torch.Tensor | None


def by_autograd(
    found: Returned, lse: object, leaves: Sequence[Laid], loss: Loss
) -> dict[str, torch.Tensor]:
    """Gradients by their names, from a call that autograd was on for.

    Args:
        found: What it gave; where out is no such tensor as ``dout`` there are no gradients, and the
            executor says what is wrong.
        lse: In attncheck's axes.
        leaves: What it was given.
        loss: The gradients of its results.

    Raises:
        Refused: where a result has no gradient.
        BrokenConvention: where q, k or v have none.
    """
    out = found.out
    if not _like(out, loss.dout):
        return {}
    if not out.requires_grad:
        raise Refused("its result has no gradient")
    results, gradients = [out], [loss.dout]
    if loss.dlse is not None:
        if not isinstance(lse, torch.Tensor):
            raise Refused(NO_LSE)
        if not _like(lse, loss.dlse):
            return {}
        if not lse.requires_grad:
            raise Refused("its LSE has no gradient")
        results, gradients = [out, lse], [loss.dout, loss.dlse]
    given = torch.autograd.grad(
        results, [leaf.given for leaf in leaves], gradients, allow_unused=True
    )
    for leaf, gradient in zip(leaves, given, strict=True):
        if gradient is None:
            raise _without(leaf.name)
    return {leaf.name: leaf.back(one) for leaf, one in zip(leaves, given, strict=True)}


def by_function(
    function: Callable[..., Any],
    found: Returned,
    leaves: Sequence[Laid],
    loss: Loss,
    keywords: Mapping[str, Any],
) -> dict[str, torch.Tensor]:
    """Gradients by their names, from ``function(dout, q, k, v, out, lse, **keywords)``.

    Raises BrokenConvention where it gives anything but dq, dk and dv, and dsink where there are
    sinks.
    """
    if not _like(found.out, loss.dout):
        return {}
    tensors = [leaf.given.detach() for leaf in leaves[:3]]
    # Copies: out and LSE are judged after it, and it may use them up.
    results = [
        x.detach().clone() if isinstance(x, torch.Tensor) else x for x in (found.out, found.lse)
    ]
    given = function(loss.dout, *tensors, *results, **keywords)
    names = [leaf.name for leaf in leaves]
    if not isinstance(given, tuple | list) or len(given) < len(names):
        many = f" of {len(given)}" if isinstance(given, tuple | list) else ""
        raise BrokenConvention(
            f"its backward returned {type(given).__name__}{many}: it should give "
            f"({', '.join(names)})"
        )
    return {leaf.name: leaf.back(one) for leaf, one in zip(leaves, given, strict=False)}


def passed_on(
    function: Callable[..., Any], passed: Mapping[str, Any], meanings: Mapping[str, str]
) -> dict[str, Any] | str:
    """Of the keywords that a call has, those of its backward; or what its backward lacks.

    Args:
        function: The backward.
        passed: Keywords of the call.
        meanings: What each of them means in the convention.
    """
    taken: dict[str, Any] = {}
    for name, value in passed.items():
        of_results = meanings.get(name) in _OF_RESULTS
        if _takes(function, name, by_name=of_results):
            taken[name] = value
        elif not of_results and not _is_nothing(value):
            return f"its backward takes no {name}"
    return taken


def _takes(function: Callable[..., Any], name: str, *, by_name: bool) -> bool:
    """Whether it takes a keyword; ``by_name``: only where its signature names it."""
    try:
        parameters = list(inspect.signature(called(function)).parameters.values())
    except (TypeError, ValueError):  # in C: it says nothing
        return not by_name
    keywords = [p for i, p in enumerate(parameters) if i >= _TENSORS or p.kind is p.KEYWORD_ONLY]
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return any(p.name == name for p in keywords) or (anything and not by_name)


def needs(function: Callable[..., Any], name: str) -> bool:
    """Whether its signature names a parameter without which it cannot be called."""
    try:
        parameter = inspect.signature(called(function)).parameters.get(name)
    except (TypeError, ValueError):  # in C: it says nothing
        return False
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _is_nothing(value: object) -> bool:
    """Whether a keyword asks for nothing: no flag, no cap, no bias, no window."""
    return value is None or value in (False, 0.0, _NO_WINDOW)


def _like(tensor: object, other: torch.Tensor) -> bool:
    if not isinstance(tensor, torch.Tensor):
        return False
    return (tensor.shape, tensor.dtype) == (other.shape, other.dtype)


def _without(name: str) -> Exception:
    what = name.removeprefix("d")
    assert name in GRADIENTS
    if what == "sink":  # many kernels take sinks as constants
        return Refused("its result has no gradient with respect to its sinks")
    return BrokenConvention(f"its result has no gradient with respect to {what}")
