"""Gradients of a function of a convention: by autograd, or by a function of their own."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attncheck.capabilities.subject import Refused
from attncheck.conventions.convention import callee
from attncheck.conventions.empty_rows import empty_rows
from attncheck.conventions.results import BrokenResult
from attncheck.core.outputs import GRADIENTS, Outputs
from attncheck.mods import library

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attncheck.conventions.convention import ConventionOptions
    from attncheck.conventions.layouts import Layout
    from attncheck.conventions.results import Returned
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Problem

__all__ = [
    "NO_LSE",
    "GradientCall",
    "Leaf",
    "Loss",
    "adjoint",
    "backward_keywords",
    "gradient_refusal",
    "gradients_by_autograd",
    "gradients_by_function",
    "make_leaf",
    "requires_parameter",
]


NO_LSE = "it gives no LSE, of which the loss is a function"
"""Why gradients are refused where dLSE is given and no LSE is."""

# What changes no gradient: a backward is passed it only where it names it.
_OF_RESULTS = {"dropout_p", "return_attn_probs", "return_lse", "return_aux"}
_NO_WINDOW = (-1, -1)
_TENSORS = 6  # dout, q, k, v, out and lse


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
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
            raise BrokenResult(f"{self.name} is {kind}, but should be a tensor")
        for what in ("shape", "dtype", "device"):
            found, wanted = getattr(gradient, what), getattr(like, what)
            if found != wanted:
                said = (tuple(found), tuple(wanted)) if what == "shape" else (found, wanted)
                raise BrokenResult(f"{self.name}.{what}={said[0]}, but should be {said[1]}")
        return adjoint(self.changed, self.source, gradient)


def make_leaf(
    name: str, source: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]
) -> Leaf:
    """``source`` changed to a kernel's axes, for gradients called ``name``."""
    with torch.enable_grad():
        source = source.detach().requires_grad_()
        changed = change(source)
    return Leaf(name, source, changed, changed.detach().requires_grad_())


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


def gradients_by_autograd(
    found: Returned, lse: object, leaves: Sequence[Leaf], loss: Loss
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


def gradients_by_function(
    function: Callable[..., Any],
    found: Returned,
    leaves: Sequence[Leaf],
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
        raise BrokenResult(
            f"its backward returned {type(given).__name__}{many}: it should give "
            f"({', '.join(names)})"
        )
    return {leaf.name: leaf.back(one) for leaf, one in zip(leaves, given, strict=False)}


def backward_keywords(
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
        parameters = list(inspect.signature(callee(function)).parameters.values())
    except (TypeError, ValueError):  # in C: it says nothing
        return not by_name
    keywords = [p for i, p in enumerate(parameters) if i >= _TENSORS or p.kind is p.KEYWORD_ONLY]
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return any(p.name == name for p in keywords) or (anything and not by_name)


def requires_parameter(function: Callable[..., Any], name: str) -> bool:
    """Whether its signature names a parameter without which it cannot be called."""
    try:
        parameter = inspect.signature(callee(function)).parameters.get(name)
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
    return BrokenResult(f"its result has no gradient with respect to {what}")


# Of rows that see no key: what a function gives is not what is differentiated, and the loss of
# somebody who trains with it has no part of them.
_LEFT_OUT = {"mean", "unspecified"}


class GradientCall:
    """Tensors that autograd follows, and the loss's gradients in the function's axes.

    Args:
        options: How gradients are had.
        layout: The function's axes.
        inputs: Of the Problem.
        passed: Keywords of the call.
        meanings: What each of them means in the convention.
        dead: Rows that see no key, where something is said of them.
        lse_of: LSE as the function gives it → in attncheck's axes, natural.

    Attributes:
        by_autograd: Whether autograd must be on for the call.
        tensors: What the function is given by position.
        passed: Keywords of the call, its sinks followed too.
    """

    def __init__(
        self,
        options: ConventionOptions,
        layout: Layout,
        inputs: Inputs,
        *,
        passed: Mapping[str, Any],
        meanings: Mapping[str, str],
        dead: torch.Tensor | None,
        lse_of: Callable[[Any], Any],
    ) -> None:
        self._how, self._lse_of, self._meanings = options.backward, lse_of, meanings
        self._leaves = _leaves(layout, inputs)
        self._loss = _loss(layout, inputs, dead if options.empty_row in _LEFT_OUT else None)
        self.by_autograd = not callable(self._how)
        q, k, v = (self._given(leaf) for leaf in self._leaves[:3])
        self.tensors = (q, k, v)
        self.passed = {
            name: self._given(self._leaves[3]) if value is inputs.sink is not None else value
            for name, value in passed.items()
        }

    def added(self, found: Returned, outputs: Outputs) -> Outputs:
        """``outputs``, which are those of ``found``, with gradients; they raise as in there."""
        if callable(self._how):
            gradients = self._of_a_function(self._how, found)
        else:
            gradients = gradients_by_autograd(found, outputs.lse, self._leaves, self._loss)
        out, lse = (_without_graph(one) for one in (outputs.out, outputs.lse))
        return Outputs(out, lse, **gradients)

    def _given(self, leaf: Leaf) -> torch.Tensor:
        return leaf.given if self.by_autograd else leaf.given.detach()

    def _of_a_function(
        self, function: Callable[..., Any], found: Returned
    ) -> dict[str, torch.Tensor]:
        keywords = backward_keywords(function, self.passed, self._meanings)
        assert not isinstance(keywords, str), keywords
        if self._loss.dlse is not None:
            keywords["dlse"] = self._dlse(found)
        elif requires_parameter(function, "dlse"):
            keywords["dlse"] = None
        return gradients_by_function(function, found, self._leaves, self._loss, keywords)

    def _dlse(self, found: Returned) -> torch.Tensor:
        """In the function's own axes and logarithm."""
        if not isinstance(found.lse, torch.Tensor):
            raise Refused(NO_LSE)
        assert self._loss.dlse is not None, "asked where there is one"
        with torch.enable_grad():
            own = found.lse.detach().requires_grad_()
            natural = self._lse_of(own)
        return adjoint(natural, own, self._loss.dlse)


def gradient_refusal(
    problem: Problem,
    device: str,
    options: ConventionOptions,
    passed: Mapping[str, Any],
    meanings: Mapping[str, str],
) -> str | None:
    """Why the gradients of ``problem`` are not asked for, where that is known before the call."""
    if problem.dlse and options.returns_lse is False:
        return NO_LSE
    if callable(options.backward):
        asked = {**passed, "dlse": True} if problem.dlse else passed
        keywords = backward_keywords(options.backward, asked, meanings)
        if isinstance(keywords, str):
            return keywords
    if options.empty_row == "nan" and _has_empty_rows(problem, device):
        return "its rows that see no key are NaN, and so is every gradient of a key beside them"
    return None


def _has_empty_rows(problem: Problem, device: str) -> bool:
    if problem.mask == library.FULL or problem.sink:
        return False
    return bool(empty_rows(problem, device).any())


def _leaves(layout: Layout, inputs: Inputs) -> list[Leaf]:
    """Of q, k, v, and of the sink where there is one."""
    leaves = [
        make_leaf("dq", inputs.q, layout.queries),
        make_leaf("dk", inputs.k, layout.keys),
        make_leaf("dv", inputs.v, layout.keys),
    ]
    if inputs.sink is not None:
        leaves.append(make_leaf("dsink", inputs.sink, lambda sink: sink))
    return leaves


def _loss(layout: Layout, inputs: Inputs, left_out: torch.Tensor | None) -> Loss:
    """Its gradients, 0 in the rows that are left out."""
    dout, dlse = inputs.dout, inputs.dlse
    assert dout is not None, "a Problem with a backward has it"
    if left_out is not None:
        dout = torch.where(left_out[..., None], torch.zeros_like(dout), dout)
        dlse = None if dlse is None else torch.where(left_out, torch.zeros_like(dlse), dlse)
    return Loss(layout.queries(dout), dlse)


def _without_graph(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
