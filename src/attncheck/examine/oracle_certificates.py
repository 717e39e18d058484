"""What is proven of the float64 oracles on many Problems, beside what the judge allows a kernel."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from attncheck import oracles
from attncheck.arb import flint_version
from attncheck.errors import UsageError
from attncheck.examine.allowances import row_bounds
from attncheck.examine.environment import environment
from attncheck.examine.evidence import Evidence
from attncheck.judge.arithmetic import FP64_ORACLE, default
from attncheck.judge.rules import PROVEN
from attncheck.judgement import Place
from attncheck.mods.to_ball import evaluator
from attncheck.oracle_record import TRUTH, Certificate, CertificateReport, Proven
from attncheck.oracles.certificate import enclosed, proven_error
from attncheck.oracles.conditions import is_whole, sampled
from attncheck.oracles.numbers.ball import BITS, Ball
from attncheck.problem import Case

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from attncheck.conditions import Rows
    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem

__all__ = ["MOST_PRODUCTS", "ORACLES", "certificates"]

MOST_PRODUCTS = 2**31
"""Products of balls of one Problem: Arb does some 30 million a second."""

_MOST_DENSE = 2**22  # scores of an oracle that holds them all: 32 MB

ORACLES = {
    TRUTH: "what kernels are compared with",
    "naive": "exp(x) / Σ exp(x), nothing subtracted",
    "safe": "the row's maximum subtracted first; dense",
    "online": "Milakov & Gimelshein's running maximum, one pass",
    "flash1": "FlashAttention's recurrence, key blocks outermost",
    "flash2": "FlashAttention-2's recurrence, query blocks outermost",
    "split": "splits of the keys, each on its own, merged by LSE",
}
"""What each oracle is, in a line."""


def certificates(
    problems: Sequence[tuple[str, Problem]],
    *,
    command: str,
    done: Callable[[str], None] = lambda _: None,
) -> CertificateReport:
    """Prove how far the float64 oracles are from the exact result, and compare with allowances.

    Every row of a small Problem is proven, and the judge's own sample of a large one's. The
    allowance is that of a kernel of the Problem's dtype that declares nothing.

    Args:
        problems: The plan's name for the variant, and the Problem.
        command: The command line, for the report.
        done: Called with a word on each Problem as it is done.

    Raises:
        UsageError: for a Problem that would take hours, or no Problem at all.
    """
    if not problems:
        raise UsageError("no problem was named: nothing can be proven, name at least one.")
    for _, problem in problems:
        _check_size(problem)
    records: list[Certificate] = []
    for variant, problem in problems:
        records += _certified(variant, problem)
        done(f"{variant} {problem.distribution}")
    asked = {record.oracle for record in records}
    dtypes = {problem.dtype: str(default(problem.formats)) for _, problem in problems}
    return CertificateReport(
        command=command,
        environment=environment("cpu"),
        flint=flint_version(),
        bits=BITS,
        limit=PROVEN,
        arithmetics=dtypes,
        oracles={name: summary for name, summary in ORACLES.items() if name in asked},
        records=tuple(records),
    )


def _certified(variant: str, problem: Problem) -> list[Certificate]:
    """One Certificate for each oracle."""
    case, pieces = Case(problem=problem), sampled(problem, "cpu")
    evidence = Evidence(case, "cpu")
    given = {TRUTH: evidence.truth} | _others(evidence.inputs)
    found = {name: (_Found(), _Found()) for name in given}
    for rows in pieces:
        _examine(evidence, given, rows, found)
    return [
        Certificate(
            case_id=case.id,
            case=case.to_json(),
            variant=variant,
            distribution=problem.distribution,
            oracle=name,
            out=out.proven(),
            lse=lse.proven(),
            rows=problem.batch * problem.heads * problem.query,
            proven_rows=sum(len(rows.heads) * len(rows.query) for rows in pieces),
        )
        for name, (out, lse) in found.items()
    ]


def _examine(
    evidence: Evidence,
    given: Mapping[str, Outputs],
    rows: Rows,
    found: Mapping[str, tuple[_Found, _Found]],
) -> None:
    """Add what is proven of some rows to what is ``found`` of out and LSE of each oracle."""
    problem = evidence.case.problem
    exact = enclosed(Ball(evaluate=evaluator), evidence.inputs, rows)
    allowed = row_bounds(evidence, default(problem.formats), rows)
    assumed = row_bounds(evidence, FP64_ORACLE, rows)
    for name, outputs in given.items():
        proven = proven_error(outputs, exact, rows)
        for i, error in enumerate((proven.out, proven.lse)):
            a_priori = assumed[i] if name == TRUTH else None
            found[name][i].add(error, allowed[i], a_priori, rows, problem)


def _others(inputs: Inputs) -> dict[str, Outputs]:
    """The dense oracles, where they are cheap; what streams is the truth itself."""
    problem = inputs.problem
    scores = problem.batch * problem.heads * problem.query * problem.kv
    if scores > _MOST_DENSE or not is_whole(problem, "cpu"):
        return {}
    softmax = problem.operation == "softmax"
    every = oracles.SOFTMAXES if softmax else oracles.ORACLES
    return {name: every[name](inputs) for name in ORACLES if name in every}


def _check_size(problem: Problem) -> None:
    rows = sum(len(rows.heads) * len(rows.query) for rows in sampled(problem, "cpu"))
    products = rows * problem.kv * (problem.head_dim + problem.value_dim + 1)
    if products > MOST_PRODUCTS:
        raise UsageError(
            f"shape {problem.shape} needs {products:.1e} products of balls; at most "
            f"{MOST_PRODUCTS:.1e} are done: choose a smaller shape."
        )


@dataclass(slots=True, eq=False)
class _Found:
    """The worst element so far."""

    share: float = -1.0
    error: float = 0.0
    allowance: float = 0.0
    at: Place | None = None
    a_priori: float = -1.0
    elements: int = 0
    unproven: int = 0
    unbounded: int = 0

    def add(
        self, error: Tensor, allowed: Tensor, assumed: Tensor | None, rows: Rows, problem: Problem
    ) -> None:
        """Errors and bounds ``(heads, rows[, value_dim])``."""
        known = error.isfinite()
        bounded = known & allowed.isfinite()
        self.elements += int(bounded.sum())
        self.unproven += int((~known).sum())
        self.unbounded += int((known & ~bounded).sum())
        if assumed is not None:
            told = known & assumed.isfinite()
            self.a_priori = max(self.a_priori, float(_shares(error, assumed, told).max()))
        shares = _shares(error, allowed, bounded)
        worst = int(shares.argmax())
        if float(shares.flatten()[worst]) > self.share:
            self.share = float(shares.flatten()[worst])
            self.error, self.allowance = (float(x.flatten()[worst]) for x in (error, allowed))
            self.at = _place(worst, error.shape, rows, problem)

    def proven(self) -> Proven:
        """As data; JSON has no ∞."""
        some = self.elements > 0
        return Proven(
            share=min(self.share, sys.float_info.max) if some else None,
            error=self.error if some else None,
            allowance=self.allowance if some else None,
            at=self.at if some else None,
            a_priori=min(self.a_priori, sys.float_info.max) if self.a_priori >= 0 else None,
            elements=self.elements,
            unproven=self.unproven,
            unbounded=self.unbounded,
        )


def _shares(errors: Tensor, bounds: Tensor, asked: Tensor) -> Tensor:
    """Error ÷ bound, 0 where both are 0, and −1 where it is not asked."""
    shares = torch.where(errors == 0, 0.0, errors / bounds)
    return torch.where(asked, shares, -1.0)


def _place(number: int, shape: Sequence[int], rows: Rows, problem: Problem) -> Place:
    head, row, *dim = (int(i) for i in np.unravel_index(number, tuple(shape)))
    pair = rows.heads[head]
    return Place(
        batch=pair // problem.heads,
        head=pair % problem.heads,
        query=int(rows.query[row]),
        dim=dim[0] if dim else -1,
    )
