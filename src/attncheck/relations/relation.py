"""What a relation is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from attncheck.errors import ProblemError
from attncheck.question import (
    Allowed,
    Parameters,
    Promise,
    check_parameters,
    fits_all,
    no_parameters,
)

if TYPE_CHECKING:
    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.relations.finding import Finding

__all__ = ["Errors", "Holds", "Parameters", "Relation"]

Errors = Sequence["Outputs"] | None
"""What each run may be off by, in float64; None where bits are compared."""

Holds = Callable[[Sequence["Inputs"], Sequence["Outputs"], Parameters, Errors], "Finding | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """Something that holds between what a right kernel gives in several runs, without an oracle.

    All of it is pure: no kernel, no oracle, no judge.

    Attributes:
        name: The question of a Case.
        summary: What must hold, in one line: a failure quotes it.
        runs: (inputs, parameters) → the inputs of each run of the kernel, in order; of other
            Problems too. What is given is not changed; tensors may be shared between runs.
        holds: (inputs of each run, outputs of each run, parameters, errors) → what is wrong, or
            None. ``errors`` is None where bits are compared. Else it has for each run how far its
            out ``(batch, heads, query, value_dim)`` and LSE ``(batch, heads, query)`` may be from
            the exact result, and of a backward its gradients; what the runs may be apart follows
            from that. The value of a
            Finding is an element of the last run.
        promise: What a kernel must promise for bits to be compared; empty where every right
            kernel's agree; ``bounds`` where no kernel's need to. Of a kernel that does not promise
            it, the relation is asked within bounds. Bits of two
            runs are compared only of a kernel that promises ``repeat``.
        needs_lse: Whether it is asked only of kernels that give LSE.
        only_promised: Whether it is not asked of a kernel that does not promise it: the last run's
            inputs have no bounds. Where what is not promised is gradients alone, the first run's
            are taken for those of both.
        spacious: Whether its inputs take gibibytes, of addresses or of a GPU: where there is not so
            much memory it is not asked, and no kernel is blamed.
        relaunched: Whether the last run is by another launch of the kernel, the one that the
            parameter ``launch`` counts (``Subject.launches``); asked only of a kernel that has any.
        unfit: Why the relation says nothing of a Problem, in one line; None if it does.
        allowed: The numbers that may be asked of a Problem, by name, smallest first.
    """

    name: str
    summary: str
    runs: Callable[[Inputs, Parameters], tuple[Inputs, ...]]
    holds: Holds
    promise: Promise | Literal["", "bounds"] = ""
    needs_lse: bool = False
    only_promised: bool = False
    relaunched: bool = False
    spacious: bool = False
    unfit: Callable[[Problem], str | None] = fits_all
    allowed: Callable[[Problem], Allowed] = no_parameters

    def check(self, problem: Problem, parameters: Parameters) -> None:
        """Raises ProblemError unless the relation can be asked of ``problem`` with these."""
        reason = self.unfit(problem)
        if reason:
            raise ProblemError(f"{self.name} says nothing of {problem}: {reason}.")
        check_parameters(self.name, parameters, self.allowed(problem))
