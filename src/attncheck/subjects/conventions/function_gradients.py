"""Gradients of a function of a convention, by autograd or by a backward function."""

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
from attncheck.subjects.conventions.results import BrokenResult, to_natural_lse

_NO_LSE = "it gives no LSE, of which the loss is a function"
_NO_WINDOW = (-1, -1)
_TENSORS = 6  # positional tensors of a backward function: dout, q, k, v, out and lse
# With these results in rows that see no key, the loss ignores such rows, as in training: the
# returned values are no differentiable function of the inputs.
_IGNORED_EMPTY_ROWS = {"mean", "unspecified"}


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A tensor converted to a kernel's axes, which converts its gradient back."""

    name: str  # of its gradient, such as ``dq``
    source: torch.Tensor  # in attncheck's axes
    changed: torch.Tensor  # in the kernel's axes, with an autograd graph to ``source``
    tensor: torch.Tensor  # ``changed`` as a leaf of autograd, for the kernel

    @classmethod
    def of(
        cls, name: str, source: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]
    ) -> Leaf:
        """Convert ``source`` to a kernel's axes by ``change``; its gradient is called ``name``."""
        with torch.enable_grad():
            # Detached, so that the input itself does not collect gradients.
            source = source.detach().requires_grad_()
            changed = change(source)
        return cls(name, source, changed, changed.detach().requires_grad_())

    def back(self, gradient: object) -> torch.Tensor:
        """Return a gradient in attncheck's axes; 0 for keys that were not passed to the kernel.

        Raises BrokenResult if it is not a tensor of the right shape, dtype and device.
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
    """Return the gradient of ``source`` from that of ``changed``, keeping the graph."""
    (result,) = torch.autograd.grad(_loss([changed], [gradient]), source, retain_graph=True)
    return result


class _Loss(torch.autograd.Function):
    """A scalar function whose gradients with respect to ``results`` are the given ones.

    It replaces autograd's ``grad_outputs``, which takes half a second of imports.
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
    """The tensors of a call that autograd follows, and the computation of its gradients.

    Args:
        dead: Rows that see no key, if the function's results there are to be changed.
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
    ) -> None:
        self._options, self._layout, self._parameters = options, layout, parameters
        self._backward = options.backward
        changes = {"q": layout.queries, "k": layout.keys, "v": layout.keys}
        self._leaves = [Leaf.of(f"d{n}", getattr(inputs, n), how) for n, how in changes.items()]
        if inputs.sink is not None:
            self._leaves.append(Leaf.of("dsink", inputs.sink, lambda sink: sink))
        dout, self._dlse = inputs.dout, inputs.dlse
        assert dout is not None, "Inputs of a Problem with a backward have it"
        if dead is not None and options.empty_row in _IGNORED_EMPTY_ROWS:
            dout = torch.where(dead[..., None], torch.zeros_like(dout), dout)
            if self._dlse is not None:
                self._dlse = torch.where(dead, torch.zeros_like(self._dlse), self._dlse)
        self._dout = layout.queries(dout)
        self.by_autograd = not callable(self._backward)  # then autograd must be on in the call
        tensors = [
            leaf.tensor if self.by_autograd else leaf.tensor.detach() for leaf in self._leaves
        ]
        q, k, v = tensors[:3]
        self.tensors = (q, k, v)  # the function's positional arguments
        # The function's keywords, with a leaf in place of sinks.
        self.passed = {
            name: tensors[3] if value is inputs.sink is not None else value
            for name, value in passed.items()
        }

    def added(self, out: Any, lse: Any, outputs: Outputs) -> Outputs:
        """Return ``outputs``, which were made from the function's own results, with gradients.

        If out is malformed, gradients are left out, and the executor reports the mistake.

        Raises:
            Refused: if a result has no gradient.
            BrokenResult: if q, k or v have no gradient, or a backward function returns anything
                but dq, dk and dv, and dsink if there are sinks.
        """
        gradients: dict[str, torch.Tensor] = {}
        if _is_like(out, self._dout):
            if callable(self._backward):
                gradients = self._by_function(self._backward, out, lse)
            else:
                gradients = self._by_autograd(out, outputs.lse)
        return Outputs(_without_graph(outputs.out), _without_graph(outputs.lse), **gradients)

    def _by_autograd(self, out: torch.Tensor, lse: object) -> dict[str, torch.Tensor]:
        if not out.requires_grad:
            raise Refused("its result has no gradient")
        results, gradients = [out], [self._dout]
        if self._dlse is not None:
            if not isinstance(lse, torch.Tensor):
                raise Refused(_NO_LSE)
            if not _is_like(lse, self._dlse):
                return {}
            # Many functions compute LSE outside autograd, which would ignore its part of the loss.
            if not lse.requires_grad:
                raise Refused("its LSE has no gradient")
            results, gradients = [out, lse], [self._dout, self._dlse]
        tensors = [leaf.tensor for leaf in self._leaves]
        leaf_grads = torch.autograd.grad(_loss(results, gradients), tensors, allow_unused=True)
        by_leaf = list(zip(self._leaves, leaf_grads, strict=True))
        for leaf, gradient in by_leaf:
            if gradient is None and leaf.name == "dsink":  # in many kernels sinks are constants
                raise Refused("its result has no gradient with respect to its sinks")
            if gradient is None:
                what = leaf.name.removeprefix("d")
                raise BrokenResult(f"its result has no gradient with respect to {what}")
        return {leaf.name: leaf.back(gradient) for leaf, gradient in by_leaf}

    def _by_function(
        self, function: Callable[..., Any], out: Any, lse: Any
    ) -> dict[str, torch.Tensor]:
        """Return gradients from ``function(dout, q, k, v, out, lse, **keywords)``."""
        keywords = _backward_keywords(function, self.passed, self._parameters)
        assert not isinstance(keywords, str), keywords
        if self._dlse is not None:
            keywords["dlse"] = self._own_dlse(lse)
        elif any(p.name == "dlse" and p.default is p.empty for p in _parameters(function) or ()):
            keywords["dlse"] = None
        # It may overwrite out and LSE, which are judged later, so it gets copies.
        results = [
            _without_graph(each).clone() if isinstance(each, torch.Tensor) else each
            for each in (out, lse)
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
        """Return dLSE in the function's own axes and logarithm."""
        if not isinstance(lse, torch.Tensor):
            raise Refused(_NO_LSE)
        assert self._dlse is not None
        with torch.enable_grad():
            own_lse = lse.detach().requires_grad_()
            natural = to_natural_lse(own_lse, self._layout, self._options)
        return _adjoint(natural, own_lse, self._dlse)


def gradient_refusal(
    problem: Problem,
    device: str,
    options: ConventionOptions,
    passed: Mapping[str, Any],
    parameters: Mapping[str, Parameter],
) -> str | None:
    """Return why the gradients of ``problem`` are unsupported, if that is known before a call."""
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
    """Return a call's keywords that its backward has too, or which one its backward lacks."""
    keywords: dict[str, Any] = {}
    for name, value in passed.items():
        # Keywords that do not affect gradients need a backward that names them.
        of_result = name in parameters and parameters[name].of_result
        # False, no cap, no bias and no window have no effect and may be left out.
        no_effect = value is None or value in (False, 0.0, _NO_WINDOW)
        if _has_keyword(function, name, by_name=of_result):
            keywords[name] = value
        elif not of_result and not no_effect:
            return f"its backward takes no {name}"
    return keywords


def _has_keyword(function: Callable[..., Any], name: str, *, by_name: bool) -> bool:
    """Return whether a function accepts a keyword; with ``by_name`` ``**keywords`` do not count."""
    parameters = _parameters(function)
    if parameters is None:
        return not by_name
    keywords = [p for i, p in enumerate(parameters) if i >= _TENSORS or p.kind is p.KEYWORD_ONLY]
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return any(p.name == name for p in keywords) or (accepts_any and not by_name)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(callee(function)).parameters.values())
    except (TypeError, ValueError):  # functions in C have no signature
        return None


def _without_graph(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _is_like(tensor: object, other: torch.Tensor) -> bool:
    if not isinstance(tensor, torch.Tensor):
        return False
    return (tensor.shape, tensor.dtype) == (other.shape, other.dtype)
