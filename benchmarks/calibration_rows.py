"""What a calibration keeps of one judgement: a row, small enough to be kept by the ten thousand."""

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


def crash(number: int, kernel: str, asked: Problem, error: Exception) -> dict[str, Any]:
    """The judge itself raised."""
    reason = f"the judge raised {type(error).__name__}: {error}".splitlines()[0]
    facts = {"status": "error", "reason": reason, "case": Case(problem=asked).to_json()}
    return _facts(number, kernel, asked) | facts


def row(number: int, kernel: str, asked: Problem, record: Record) -> dict[str, Any]:
    """What the page needs; the whole Case of what is not a pass, of a refusal the reason alone."""
    kept = _facts(number, kernel, asked) | {"status": record.status}
    if record.status == "unsupported":
        return kept | {"reason": record.reason}
    if record.status != "pass":
        kept |= {"case": record.case, "reason": record.reason}
    said = record.judgement
    if said is None:
        return kept
    kept |= {name: _short(getattr(said, name)) for name in NUMBERS}
    kept |= _of_gradients(said)
    if said.precision is not None:
        kept |= {name: _short(getattr(said.precision, name)) for name in OF_PRECISION}
    if record.status != "pass" or said.warnings:
        kept |= {"rule": said.rule, "reason": said.reason, "warnings": list(said.warnings)}
        kept["tiling"] = record.tiling
    return kept


def _facts(number: int, kernel: str, asked: Problem) -> dict[str, Any]:
    """What a row says of its problem."""
    softmax = asked.operation == "softmax"
    facts = {
        "n": number,
        "kernel": kernel,
        "dtype": asked.dtype,
        "distribution": asked.distribution,
        "score": asked.score.name,
        "mask": "(softmax)" if softmax else asked.mask.name,
    }
    if asked.backward:
        facts["loss"] = ", ".join(["out", *["LSE"] * asked.dlse, *["a sink"] * asked.sink])
    return facts


def _of_gradients(said: Judgement) -> dict[str, float | None]:
    """Shares by the names of columns; none of a forward."""
    if not isinstance(said.gradients_over_bound, dict):
        return {}
    shares = said.gradients_over_bound
    return {f"{name}_over_bound": _short(shares[name]) for name in GRADIENTS if name in shares}


def _short(value: float | None) -> float | None:
    """Four digits are plenty, and a tenth of the file."""
    return value if value is None or isinstance(value, int) else float(f"{value:.4g}")
