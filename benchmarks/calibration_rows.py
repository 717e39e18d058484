"""The row that a calibration keeps of each judgement, small since there are ten thousands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncheck.core.tensor_names import GRADIENTS
from attncheck.inputs.problem import Case

if TYPE_CHECKING:
    from attncheck.core.judgement import Judgement
    from attncheck.inputs.problem import Problem
    from attncheck.records.record import Record

__all__ = ["crash", "row"]

NUMBERS = (
    *("out_over_bound", "lse_over_bound", "out_over_probable", "lse_over_probable"),
    *("rows", "rows_unbounded", "jumps"),
)
OF_PRECISION = ("z", "spread", "residual")


def crash(number: int, kernel: str, problem: Problem, error: Exception) -> dict[str, Any]:
    """Return the row of a problem on which the judge itself raised an error."""
    reason = f"the judge raised {type(error).__name__}: {error}".splitlines()[0]
    facts = {"status": "error", "reason": reason, "case": Case(problem=problem).to_json()}
    return _facts(number, kernel, problem) | facts


def row(number: int, kernel: str, problem: Problem, record: Record) -> dict[str, Any]:
    """Return the row of ``record``: the page's numbers, and the Case unless the status is a pass.

    A row of an unsupported problem has only the reason.
    """
    facts = _facts(number, kernel, problem) | {"status": record.status}
    if record.status == "unsupported":
        return facts | {"reason": record.reason}
    if record.status != "pass":
        facts |= {"case": record.case, "reason": record.reason}
    judgement = record.judgement
    if judgement is None:
        return facts
    facts |= {name: _short(getattr(judgement, name)) for name in NUMBERS}
    facts |= _gradient_shares(judgement)
    if judgement.precision is not None:
        facts |= {name: _short(getattr(judgement.precision, name)) for name in OF_PRECISION}
    if record.status != "pass" or judgement.warnings:
        facts |= {"rule": judgement.rule, "reason": judgement.reason}
        facts |= {"warnings": list(judgement.warnings), "tiling": record.tiling}
    return facts


def _facts(number: int, kernel: str, problem: Problem) -> dict[str, Any]:
    """Return a row's facts about its problem."""
    softmax = problem.operation == "softmax"
    facts = {
        "n": number,
        "kernel": kernel,
        "dtype": problem.dtype,
        "distribution": problem.distribution,
        "score": problem.score.name,
        "mask": "(softmax)" if softmax else problem.mask.name,
    }
    if problem.backward:
        facts["loss"] = ", ".join(["out", *["LSE"] * problem.dlse, *["a sink"] * problem.sink])
    return facts


def _gradient_shares(judgement: Judgement) -> dict[str, float | None]:
    """Return the gradients' shares of their bounds by column; empty for a forward."""
    shares = judgement.gradients_over_bound
    if not isinstance(shares, dict):
        return {}
    return {f"{name}_over_bound": _short(shares[name]) for name in GRADIENTS if name in shares}


def _short(value: float | None) -> float | None:
    """Round to four digits, which are enough and make the file a tenth as large."""
    return value if value is None or isinstance(value, int) else float(f"{value:.4g}")
