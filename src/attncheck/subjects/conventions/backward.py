"""A function's call where gradients are asked for: what it is given, and what is had from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attncheck.mods import library
from attncheck.outputs import Outputs
from attncheck.subjects.contract import Refused
from attncheck.subjects.conventions.gradients import (
    NO_LSE,
    Laid,
    Loss,
    adjoint,
    by_autograd,
    by_function,
    laid,
    needs,
    passed_on,
)
from attncheck.subjects.empty_rows import empty_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attncheck.inputs import Inputs
    from attncheck.problem import Problem
    from attncheck.subjects.conventions.layouts import Layout
    from attncheck.subjects.conventions.options import ConventionOptions
    from attncheck.subjects.conventions.outcome import Returned

__all__ = ["Backward", "refusal"]

# Of rows that see no key: what a function gives is not what is differentiated, and the loss of
# somebody who trains with it has no part of them.
_LEFT_OUT = {"mean", "unspecified"}


class Backward:
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
            gradients = by_autograd(found, outputs.lse, self._leaves, self._loss)
        out, lse = (_without_graph(one) for one in (outputs.out, outputs.lse))
        return Outputs(out, lse, **gradients)

    def _given(self, leaf: Laid) -> torch.Tensor:
        return leaf.given if self.by_autograd else leaf.given.detach()

    def _of_a_function(
        self, function: Callable[..., Any], found: Returned
    ) -> dict[str, torch.Tensor]:
        keywords = passed_on(function, self.passed, self._meanings)
        assert not isinstance(keywords, str), keywords
        if self._loss.dlse is not None:
            keywords["dlse"] = self._dlse(found)
        elif needs(function, "dlse"):
            keywords["dlse"] = None
        return by_function(function, found, self._leaves, self._loss, keywords)

    def _dlse(self, found: Returned) -> torch.Tensor:
        """In the function's own axes and logarithm."""
        if not isinstance(found.lse, torch.Tensor):
            raise Refused(NO_LSE)
        assert self._loss.dlse is not None, "asked where there is one"
        with torch.enable_grad():
            own = found.lse.detach().requires_grad_()
            natural = self._lse_of(own)
        return adjoint(natural, own, self._loss.dlse)


def refusal(
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
        keywords = passed_on(options.backward, asked, meanings)
        if isinstance(keywords, str):
            return keywords
    if options.empty_row == "nan" and _has_empty_rows(problem, device):
        return "its rows that see no key are NaN, and so is every gradient of a key beside them"
    return None


def _has_empty_rows(problem: Problem, device: str) -> bool:
    if problem.mask == library.FULL or problem.sink:
        return False
    return bool(empty_rows(problem, device).any())


def _leaves(layout: Layout, inputs: Inputs) -> list[Laid]:
    """Of q, k, v, and of the sink where there is one."""
    leaves = [
        laid("dq", inputs.q, layout.queries),
        laid("dk", inputs.k, layout.keys),
        laid("dv", inputs.v, layout.keys),
    ]
    if inputs.sink is not None:
        leaves.append(laid("dsink", inputs.sink, lambda sink: sink))
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
