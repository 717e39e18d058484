"""What a convention passes beside q, k and v, by meaning: a function may spell it otherwise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.inputs import Inputs
    from attncheck.problem import Problem
    from attncheck.subjects.conventions.options import ConventionOptions

__all__ = ["SINKS", "Argument", "Arguments", "Asked", "Made", "needed", "offered", "spare"]

When = Literal["needed", "offered", "required"]

SINKS = ("sinks", "sink", "s_aux", "softmax_sink", "attention_sinks")
"""Names for each head's logit, fp32 ``(heads,)``: those of gpt-oss, of flash-attn's Hopper kernels,
and others that say the same. Not ``learnable_sink``: flash-attn's CuTe kernels take bf16 there, to
which a drawn logit would have to be rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A value that is made only once there are inputs.

    Attributes:
        make: What makes it, on their device.
        text: The same for a script: a Python expression of torch, q, k, v and ``mask``, a bool
            tensor that broadcasts to ``(batch, heads, query, kv)``. Empty where it cannot be said.
        setup: Statements that the expression needs before it.
        what: What is written out, for who has no memory for it.
        size: Its bytes.
    """

    make: Callable[[Inputs], Any]
    text: str
    setup: str = ""
    what: str = ""
    size: int = 0


@dataclass(frozen=True, slots=True)
class Argument:
    """A value for one meaning.

    Attributes:
        value: Itself, or how it is ``Made``.
        when: ``needed``: without it the Problem cannot be asked. ``offered``: passed where it is
            taken. ``required``: passed where it has no default.
    """

    value: Any
    when: When


Arguments = dict[str, Argument]


def needed(value: Any) -> Argument:
    """Without it the Problem cannot be asked."""
    return Argument(value, "needed")


def offered(value: Any) -> Argument:
    """Passed where it is taken."""
    return Argument(value, "offered")


def spare(value: Any) -> Argument:
    """The default of the convention: passed only where a function has none."""
    return Argument(value, "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a convention's arguments depend on.

    Attributes:
        problem: What to compute.
        able: Meanings that the function takes.
        bottom_right: Whether causal masks and windows are aligned so.
        options: What else was said of the function.
    """

    problem: Problem
    able: frozenset[str]
    bottom_right: bool
    options: ConventionOptions

    def scale(self) -> Argument:
        """Left out where it is 1/√head_dim, so that its default is examined too."""
        from attncheck.formats import fp32

        usual = self.problem.scale == fp32(self.problem.head_dim**-0.5)
        return spare(self.problem.scale) if usual else needed(self.problem.scale)

    def sinks(self) -> Argument:
        """Each head's logit, fp32 ``(heads,)``; −∞, which weighs nothing, where there is none."""
        heads = self.problem.heads

        def make(inputs: Inputs) -> torch.Tensor:
            if inputs.sink is not None:
                return inputs.sink
            return inputs.q.new_full((heads,), -math.inf, dtype=torch.float32)

        if self.problem.sink:
            return needed(Made(make=make, text="sink"))
        return spare(
            Made(make=make, text=f'torch.full(({heads},), -float("inf"), device=q.device)')
        )

    def lse_flag(self) -> Argument:
        """Whether LSE is asked for."""
        if self.options.returns_lse is False:
            return spare(value=False)
        return offered(value=True)
