"""The evidence on a Case: the inputs and exact result that do not depend on a kernel."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.core.declared_arithmetic import Arithmetic
from attncheck.core.errors import TraceError
from attncheck.core.outputs import Outputs
from attncheck.inputs.distributions import distribution_named
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.mods.captured_reads import CapturedRead, trace_reads
from attncheck.mods.expression import Expression
from attncheck.mods.running_error import RunningError
from attncheck.probes import PROBES


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Evidence:
    """The inputs and exact result that a kernel's outputs on a Case are judged by."""

    case: Case
    device: str  # ``cpu`` or ``cuda``, where the truth was computed
    inputs: Inputs  # the tensors that the kernel and the oracle read
    # The exact result in float64: out ``(batch, heads, query, value_dim)``, LSE ``(batch, heads,
    # query)``, and gradients of a backward.
    truth: Outputs

    @property
    def lse(self) -> Tensor:
        """The exact LSE, ``(batch, heads, query)``."""
        assert self.truth.lse is not None, "the oracle always gives LSE"
        return self.truth.lse

    @property
    def alive(self) -> Tensor:
        """Rows that see a key, ``(batch, heads, query)`` bool."""
        return ~torch.isneginf(self.lse)

    @property
    def generic(self) -> bool:
        """True if inputs are drawn without structure, so that roundings are independent."""
        # A probe's inputs are structured so that its right answer is an integer.
        if self.case.question in PROBES:
            return False
        return distribution_named(self.case.problem.distribution).generic

    @property
    def reads(self) -> tuple[CapturedRead, ...]:
        """The reads of captured tensors by the score mod.

        Empty if their gradients are not requested, or the score mod cannot be traced.
        """
        problem = self.case.problem
        return _traced_reads(problem, self.device) if problem.dcaptured else ()

    def running_error(self, arithmetic: Arithmetic) -> RunningError | None:
        """Return the error analysis of the score mod; None where it cannot be traced."""
        traced = _traced_score(self.case.problem, self.device)
        return None if traced is None else score_analysis(traced, arithmetic)

    def slope_error(self, arithmetic: Arithmetic) -> RunningError | None:
        """Return the error analysis of the score mod's derivative; None if it cannot be traced."""
        traced = _traced_slope(self.case.problem, self.device)
        return None if traced is None else score_analysis(traced, arithmetic)


def score_analysis(expression: Expression, arithmetic: Arithmetic) -> RunningError:
    """Return the error analysis of an expression of scores in a kernel's arithmetic."""
    from attncheck.mods.operation_errors import KERNEL_FP32, TORCH_FP64
    from attncheck.mods.running_error import RunningError

    # Only oracles compute in float64, and they call torch's functions.
    fp64 = arithmetic.computes.name == "fp64"
    return RunningError(
        expression, arithmetic.tanh_error, arithmetic=TORCH_FP64 if fp64 else KERNEL_FP32
    )


# The caches are small, because a mod may capture large tensors. Most calls repeat one Problem.


@functools.lru_cache(maxsize=2)
def _traced_score(problem: Problem, device: str) -> Expression | None:
    from attncheck.subjects.kernel_mods import score_expression

    try:
        return score_expression(problem, device)
    except TraceError:
        return None


@functools.lru_cache(maxsize=2)
def _traced_slope(problem: Problem, device: str) -> Expression | None:
    from attncheck.mods.trace import trace_derivative

    try:
        return trace_derivative(problem.score_mod(device), device)
    except TraceError:
        return None


@functools.lru_cache(maxsize=2)
def _traced_reads(problem: Problem, device: str) -> tuple[CapturedRead, ...]:
    try:
        return trace_reads(problem.score_mod(device), device)
    except TraceError:
        return ()
