"""Gradients of a function of a convention: by autograd, or by a function of their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attncheck.core.mod_spec import FULL
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Problem
from attncheck.subjects.capabilities.subject import Refused
from attncheck.subjects.conventions.convention import ConventionOptions, Parameter, callee
from attncheck.subjects.conventions.empty_rows import empty_rows
from attncheck.subjects.conventions.layouts import Layout
from attncheck.subjects.conventions.results import BrokenResult, Returned

_NO_LSE = "it gives no LSE, of which the loss is a function"
_NO_WINDOW = (-1, -1)
_TENSORS = 6  # dout, q, k, v, out and lse
# Of rows that see no key: what a function gives is not what is differentiated, and the loss of
# somebody who trains with it has no part of them.
_LEFT_OUT = {"mean", "unspecified"}


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A tensor in a kernel's axes, and the way of its gradient back."""

    name: str  # of its gradient
    source: torch.Tensor  # in attncheck's axes
    changed: torch.Tensor  # in the kernel's, by way of autograd
    tensor: torch.Tensor  # the same numbers; what the kernel gets, and autograd ends there

    @classmethod
    def of(
        cls, name: str, source: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]
    ) -> Leaf:
        """``source`` changed to a kernel's axes, for gradients called ``name``."""
        with torch.enable_grad():
            # A leaf of its own: somebody's input must not collect gradients.
            source = source.detach().requires_grad_()
            changed = change(source)
        return cls(name, source, changed, changed.detach().requires_grad_())

    def back(self, gradient: object) -> torch.Tensor:
        """The kernel's gradient in attncheck's axes; 0 for keys that the kernel did not get.

        Raises BrokenResult for what is no gradient of the tensor.
        """
        if not isinstance(gradient, torch.Tensor):
            kind = type(gradient).__name__
            raise BrokenResult(f"{self.name} is {kind}, but should be a tensor")
        for what in ("shape", "dtype", "device"):
            actual, expected = getattr(gradient, what), getattr(self.tensor, what)
            if actual != expected:
                if what == "shape":
                    actual, expected = tuple(actual), tuple(expected)
                raise BrokenResult(f"{self.name}.{what}={actual}, but should be {expected}")
        return _adjoint(self.changed, self.source, gradient)


def _adjoint(changed: torch.Tensor, source: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of ``source`` from that of what it was changed to; may be called again."""
    (result,) = torch.autograd.grad(_loss([changed], [gradient]), source, retain_graph=True)
    return result


class _Loss(torch.autograd.Function):
    """A number whose gradients with respect to some results are those that it is given.

    To torch's own ``grad_outputs`` it looks with half a second of imports.
    """

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *results: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return results[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.gradients)


def _loss(results: list[torch.Tensor], gradients: list[torch.Tensor]) -> torch.Tensor:
    with torch.enable_grad():
        return _Loss.apply(gradients, *results)  # type: ignore[no-any-return, no-untyped-call]  # torch's


class GradientCall:
    """Tensors that autograd follows, and the loss's gradients in the function's axes.

    Args:
        dead: Rows that see no key, where something is said of them.
        natural_lse: LSE as the function gives it → in attncheck's axes, natural.
    """

    def __init__(
        self,
        options: ConventionOptions,
        layout: Layout,
        inputs: Inputs,
        *,
        passed: Mapping[str, Any],
        parameters: Mapping[str, Parameter],
        dead: torch.Tensor | None,
        natural_lse: Callable[[Any], Any],
    ) -> None:
        self._backward, self._natural_lse, self._parameters = (
            options.backward,
            natural_lse,
            parameters,
        )
        changes = {"q": layout.queries, "k": layout.keys, "v": layout.keys}
        self._leaves = [Leaf.of(f"d{n}", getattr(inputs, n), how) for n, how in changes.items()]
        if inputs.sink is not None:
            self._leaves.append(Leaf.of("dsink", inputs.sink, lambda sink: sink))
        dout, self._dlse = inputs.dout, inputs.dlse
        assert dout is not None, "Inputs of a Problem with a backward have it"
        if dead is not None and options.empty_row in _LEFT_OUT:
            dout = torch.where(dead[..., None], torch.zeros_like(dout), dout)
            if self._dlse is not None:
                self._dlse = torch.where(dead, torch.zeros_like(self._dlse), self._dlse)
        self._dout = layout.queries(dout)
        self.by_autograd = not callable(self._backward)  # whether autograd must be on for the call
        followed = [
            leaf.tensor if self.by_autograd else leaf.tensor.detach() for leaf in self._leaves
        ]
        q, k, v = followed[:3]
        self.tensors = (q, k, v)  # what the function is passed by position
        # Keywords of the call, its sinks followed too.
        self.passed = {
            name: followed[3] if value is inputs.sink is not None else value
            for name, value in passed.items()
        }

    def added(self, returned: Returned, outputs: Outputs) -> Outputs:
        """``outputs``, made from ``returned``, with gradients.

        Where out is no such tensor as its gradient there are none, and the executor says what is
        wrong.

        Raises:
            Refused: where a result has no gradient.
            BrokenResult: where q, k or v have none, or a backward gives anything but dq, dk and dv,
                and dsink where there are sinks.
        """
        gradients: dict[str, torch.Tensor] = {}
        if _is_like(returned.out, self._dout):
            if callable(self._backward):
                gradients = self._by_function(self._backward, returned)
            else:
                gradients = self._by_autograd(returned.out, outputs.lse)
        out, lse = _without_graph(outputs.out), _without_graph(outputs.lse)
        return Outputs(out, lse, **gradients)

    def _by_autograd(self, out: torch.Tensor, lse: object) -> dict[str, torch.Tensor]:
        if not out.requires_grad:
            raise Refused("its result has no gradient")
        results, gradients = [out], [self._dout]
        if self._dlse is not None:
            if not isinstance(lse, torch.Tensor):
                raise Refused(_NO_LSE)
            if not _is_like(lse, self._dlse):
                return {}
            # Many functions compute LSE outside autograd: its part of the loss would be lost.
            if not lse.requires_grad:
                raise Refused("its LSE has no gradient")
            results, gradients = [out, lse], [self._dout, self._dlse]
        leaves = [leaf.tensor for leaf in self._leaves]
        of_leaves = torch.autograd.grad(_loss(results, gradients), leaves, allow_unused=True)
        for leaf, gradient in zip(self._leaves, of_leaves, strict=True):
            if gradient is None and leaf.name == "dsink":  # many kernels take sinks as constants
                raise Refused("its result has no gradient with respect to its sinks")
            if gradient is None:
                what = leaf.name.removeprefix("d")
                raise BrokenResult(f"its result has no gradient with respect to {what}")
        return {
            leaf.name: leaf.back(one) for leaf, one in zip(self._leaves, of_leaves, strict=True)
        }

    def _by_function(
        self, function: Callable[..., Any], returned: Returned
    ) -> dict[str, torch.Tensor]:
        """Gradients from ``function(dout, q, k, v, out, lse, **keywords)``."""
        keywords = _backward_keywords(function, self.passed, self._parameters)
        assert not isinstance(keywords, str), keywords
        if self._dlse is not None:
            keywords["dlse"] = self._own_dlse(returned.lse)
        elif _requires(function, "dlse"):
            keywords["dlse"] = None
        # Copies: out and LSE are judged after it, and it may use them up.
        results = [
            _without_graph(each).clone() if isinstance(each, torch.Tensor) else each
            for each in (returned.out, returned.lse)
        ]
        tensors = [leaf.tensor.detach() for leaf in self._leaves[:3]]
        result = function(self._dout, *tensors, *results, **keywords)
        names = [leaf.name for leaf in self._leaves]
        if not isinstance(result, tuple | list) or len(result) < len(names):
            many = f" of {len(result)}" if isinstance(result, tuple | list) else ""
            raise BrokenResult(
                f"its backward returned {type(result).__name__}{many}: it should give "
                f"({', '.join(names)})"
            )
        return {leaf.name: leaf.back(one) for leaf, one in zip(self._leaves, result, strict=False)}

    def _own_dlse(self, lse: object) -> torch.Tensor:
        """DLSE in the function's own axes and logarithm."""
        if not isinstance(lse, torch.Tensor):
            raise Refused(_NO_LSE)
        assert self._dlse is not None
        with torch.enable_grad():
            own = lse.detach().requires_grad_()
            natural = self._natural_lse(own)
        return _adjoint(natural, own, self._dlse)


def gradient_refusal(
    problem: Problem,
    device: str,
    options: ConventionOptions,
    passed: Mapping[str, Any],
    parameters: Mapping[str, Parameter],
) -> str | None:
    """Why the gradients of ``problem`` cannot be had, where that is known before the call."""
    if problem.dlse and options.returns_lse is False:
        return _NO_LSE
    if callable(options.backward):
        loss = {**passed, "dlse": True} if problem.dlse else passed
        keywords = _backward_keywords(options.backward, loss, parameters)
        if isinstance(keywords, str):
            return keywords
    if options.empty_row != "nan" or problem.mask == FULL or problem.sink:
        return None
    if bool(empty_rows(problem, device).any()):
        return "its rows that see no key are NaN, and so is every gradient of a key beside them"
    return None


def _backward_keywords(
    function: Callable[..., Any], passed: Mapping[str, Any], parameters: Mapping[str, Parameter]
) -> dict[str, Any] | str:
    """Of the keywords of a call, those that its backward takes; or what its backward lacks."""
    keywords: dict[str, Any] = {}
    for name, value in passed.items():
        # What changes no gradient is passed only to a backward that names it.
        of_result = name in parameters and parameters[name].of_result
        # No flag, no cap, no bias, no window: nothing is lost where it is not taken.
        nothing = value is None or value in (False, 0.0, _NO_WINDOW)
        if _takes(function, name, by_name=of_result):
            keywords[name] = value
        elif not of_result and not nothing:
            return f"its backward takes no {name}"
    return keywords


def _takes(function: Callable[..., Any], name: str, *, by_name: bool) -> bool:
    """Return whether it takes a keyword; ``by_name``: only where its signature names it."""
    try:
        parameters = list(inspect.signature(callee(function)).parameters.values())
    except (TypeError, ValueError):  # in C: it says nothing
        return not by_name
    keywords = [p for i, p in enumerate(parameters) if i >= _TENSORS or p.kind is p.KEYWORD_ONLY]
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return any(p.name == name for p in keywords) or (anything and not by_name)


def _requires(function: Callable[..., Any], name: str) -> bool:
    """Return whether its signature names a parameter without which it cannot be called."""
    try:
        parameter = inspect.signature(callee(function)).parameters.get(name)
    except (TypeError, ValueError):  # in C: it says nothing
        return False
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _without_graph(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _is_like(tensor: object, other: torch.Tensor) -> bool:
    if not isinstance(tensor, torch.Tensor):
        return False
    return (tensor.shape, tensor.dtype) == (other.shape, other.dtype)
