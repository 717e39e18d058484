"""Prove error bounds of the float64 oracles in ball arithmetic.

They are compared with the judge's allowance for a kernel. Needs python-flint, the extra ``exact``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attncheck import oracles
from attncheck.core.balls import flint_version
from attncheck.core.conditions import Rows
from attncheck.core.declared_arithmetic import FP64_ORACLE, default_arithmetic
from attncheck.core.errors import UsageError
from attncheck.core.judgement import Place
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.judge.verdict_rules import PROVEN
from attncheck.mods.ball_algebra import BALLS
from attncheck.oracles.ball_numbers import BITS, Ball, enclose_rows, proven_error
from attncheck.oracles.row_conditions import sampled_rows, samples_all_rows
from attncheck.records.survey_reports import TRUTH, Certificate, CertificateReport, ProvenError
from attncheck.surveys.oracle_survey import ORACLES, check_problem_size, oracle_summaries
from attncheck.verify.allowances import row_bounds
from attncheck.verify.environment import environment
from attncheck.verify.evidence_builder import EvidenceBuilder

MOST_CERTIFIED_PRODUCTS = 2**31
"""Limit on the products of balls of one Problem; Arb computes some 30 million a second."""

_MOST_DENSE_SCORES = 2**22  # Limit on the scores of an oracle that holds all at once: 32 MB.


def certify_oracles(
    problems: Sequence[tuple[str, Problem]],
    *,
    command: str,
    done: Callable[[str], None] = lambda _: None,
) -> CertificateReport:
    """Prove how far the float64 oracles are from the exact result, and compare with allowances.

    Every row of a small Problem is proven, and the rows that the judge samples of a large one. The
    allowance is that of a kernel of the Problem's dtype that declares nothing.

    Args:
        problems: The plan's name for the variant, and the Problem.
        done: Called with the variant and distribution of each Problem when it is done.

    Raises:
        UsageError: for a Problem that would take hours, or no Problem at all.
    """
    if not problems:
        raise UsageError("no problem was named: nothing can be proven, name at least one.")
    for _, problem in problems:
        rows = sum(len(each.heads) * len(each.query) for each in sampled_rows(problem, "cpu"))
        check_problem_size(problem, rows, MOST_CERTIFIED_PRODUCTS, "products of balls")
    records: list[Certificate] = []
    for variant, problem in problems:
        records += _certify_problem(variant, problem)
        done(f"{variant} {problem.distribution}")
    dtypes = {problem.dtype: str(default_arithmetic(problem.formats)) for _, problem in problems}
    return CertificateReport(
        command=command,
        environment=environment("cpu"),
        flint=flint_version(),
        bits=BITS,
        limit=PROVEN,
        arithmetics=dtypes,
        oracles=oracle_summaries(records),
        records=tuple(records),
    )


def _certify_problem(variant: str, problem: Problem) -> list[Certificate]:
    """Return one Certificate for each oracle."""
    case, pieces = Case(problem=problem), sampled_rows(problem, "cpu")
    # The judge's own evidence, so that the comparison is with the judge's own allowance.
    evidence = EvidenceBuilder(case, "cpu")
    by_oracle = {TRUTH: evidence.truth} | _dense_oracles(evidence.inputs)
    worst = {name: (_WorstElement(), _WorstElement()) for name in by_oracle}
    for rows in pieces:
        exact = enclose_rows(Ball(evaluate=BALLS.score), evidence.inputs, rows)
        allowed = row_bounds(evidence.evidence, default_arithmetic(problem.formats), rows)
        assumed = row_bounds(evidence.evidence, FP64_ORACLE, rows)
        for name, outputs in by_oracle.items():
            proven = proven_error(outputs, exact, rows)
            for i, error in enumerate((proven.out, proven.lse)):
                # The judge assumes an error bound only for the truth.
                a_priori = assumed[i] if name == TRUTH else None
                worst[name][i].add(error, allowed[i], a_priori, rows, problem)
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
        for name, (out, lse) in worst.items()
    ]


def _dense_oracles(inputs: Inputs) -> dict[str, Outputs]:
    """Return the outputs of the dense oracles, if they are cheap; ``streaming`` is the truth."""
    problem = inputs.problem
    scores = problem.batch * problem.heads * problem.query * problem.kv
    # They hold all scores at once, and are only compared if every row is proven.
    if scores > _MOST_DENSE_SCORES or not samples_all_rows(problem, "cpu"):
        return {}
    softmax = problem.operation == "softmax"
    by_name = oracles.SOFTMAXES if softmax else oracles.ORACLES
    proven = (name for name in ORACLES if name in by_name and name != "streaming")
    return {name: by_name[name](inputs) for name in proven}


@dataclass(slots=True, eq=False)
class _WorstElement:
    """The element with the largest error relative to its allowance so far, and counts."""

    # Below any share, so that an error of 0 has a place too.
    share: float = -1.0
    error: float = 0.0
    allowance: float = 0.0
    at: Place | None = None
    a_priori: float = -1.0
    elements: int = 0
    unproven: int = 0
    unbounded: int = 0

    def add(
        self,
        error: Tensor,
        allowed: Tensor,
        assumed: Tensor | None,
        rows: Rows,
        problem: Problem,
    ) -> None:
        """Add errors and bounds ``(heads, rows[, value_dim])``."""
        # A ball of infinite radius proves nothing: it is counted, not compared.
        is_proven = error.isfinite()
        bounded = is_proven & allowed.isfinite()
        self.elements += int(bounded.sum())
        self.unproven += int((~is_proven).sum())
        self.unbounded += int((is_proven & ~bounded).sum())
        if assumed is not None:
            where = is_proven & assumed.isfinite()
            self.a_priori = max(self.a_priori, float(_shares_of_bound(error, assumed, where).max()))
        shares = _shares_of_bound(error, allowed, bounded)
        worst = int(shares.argmax())
        if float(shares.flatten()[worst]) > self.share:
            self.share = float(shares.flatten()[worst])
            self.error, self.allowance = (float(x.flatten()[worst]) for x in (error, allowed))
            at = [int(i) for i in np.unravel_index(worst, tuple(error.shape))]
            self.at = Place.of(rows.index(at, problem.heads))

    def proven(self) -> ProvenError:
        """Return the record of it; large numbers are clamped, because JSON has no ∞."""
        some = self.elements > 0
        return ProvenError(
            share=min(self.share, sys.float_info.max) if some else None,
            error=self.error if some else None,
            allowance=self.allowance if some else None,
            at=self.at if some else None,
            a_priori=min(self.a_priori, sys.float_info.max) if self.a_priori >= 0 else None,
            elements=self.elements,
            unproven=self.unproven,
            unbounded=self.unbounded,
        )


def _shares_of_bound(errors: Tensor, bounds: Tensor, where: Tensor) -> Tensor:
    """Return error ÷ bound, 0 where both are 0, and −1 except at ``where``."""
    shares = torch.where(errors == 0, 0.0, errors / bounds)
    return torch.where(where, shares, -1.0)
