"""Every oracle on many Problems, in float64 and in many digits: one OracleReport."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from attncheck import inputs as inputs_room
from attncheck import oracles
from attncheck.errors import UsageError
from attncheck.examine.environment import environment
from attncheck.examine.oracle_distance import agreement, distances
from attncheck.mods.to_mpmath import evaluator
from attncheck.oracle_record import OracleReport
from attncheck.oracles.numbers import Mp
from attncheck.problem import Case

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attncheck.inputs import Inputs
    from attncheck.oracle_record import Agreement, OracleRecord
    from attncheck.oracles.numbers import ManyDigits
    from attncheck.oracles.result import Recurrence, Result
    from attncheck.problem import Problem

__all__ = ["DIGITS_LOST", "MOST_PRODUCTS", "ORACLES", "survey"]

MOST_PRODUCTS = 2**23
"""Multiplications of one Problem: a recurrence in 50 digits then takes some seconds."""

DIGITS_LOST = 10
"""To how many digits fewer than computed with the recurrences must agree: 40 of 50.

Two evaluations are at most 4·(5 kv + 19 max|score|) roundings of 10^-digits apart, to first order:
a row's additions and rescales, at most five a key, and exponentials of scores that were rounded
(the product, the scale, three of a score mod, the change of base, score − maximum and the chain of
its rescales), above and below the division, in either. ``MOST_PRODUCTS`` keeps 20 kv below 2·10^8,
the plan's variants and distributions keep scores below 10^6: no rounding comes near 10^10.
"""

ORACLES = {
    "naive": "exp(x) / Σ exp(x), nothing subtracted",
    "safe": "the row's maximum subtracted first; dense",
    "online": "Milakov & Gimelshein's running maximum, one pass",
    "flash1": "FlashAttention's recurrence, key blocks outermost",
    "flash2": "FlashAttention-2's recurrence, query blocks outermost",
    "split": "splits of the keys, each on its own, merged by LSE",
    "streaming": "what kernels are compared with",
}
"""What each oracle is, in a line."""


def survey(
    problems: Sequence[tuple[str, Problem]],
    *,
    digits: int,
    command: str,
    done: Callable[[str], None] = lambda _: None,
) -> OracleReport:
    """Compare the float64 oracles with the same definition in many digits, and that with itself.

    Args:
        problems: The plan's name for the variant, and the Problem.
        digits: Decimal digits of the exact side, at least 17.
        command: The command line, for the report.
        done: Called with a word on each Problem as it is done.

    Raises:
        UsageError: for a Problem that would take hours, or no Problem at all.
    """
    if not problems:
        raise UsageError("no problem was named: nothing can be measured, name at least one.")
    for _, problem in problems:
        _check_size(problem)
    records: list[OracleRecord] = []
    agreements: list[Agreement] = []
    for variant, problem in problems:
        found, agreed = _examined(variant, problem, digits)
        records += found
        agreements.append(agreed)
        done(f"{variant} {problem.distribution}")
    asked = {record.oracle for record in records}
    return OracleReport(
        command=command,
        environment=environment("cpu"),
        mpmath=metadata.version("mpmath"),
        backend=_backend(),
        digits=digits,
        must_agree=digits - DIGITS_LOST,
        reference=oracles.REFERENCE,
        may_overflow=tuple(sorted(oracles.MAY_OVERFLOW)),
        oracles={name: summary for name, summary in ORACLES.items() if name in asked},
        records=tuple(records),
        agreements=tuple(agreements),
    )


def _examined(variant: str, problem: Problem, digits: int) -> tuple[list[OracleRecord], Agreement]:
    case, inputs = Case(problem=problem), inputs_room.draw(problem)
    softmax = problem.operation == "softmax"
    recurrences = oracles.SOFTMAX_RECURRENCES if softmax else oracles.RECURRENCES
    in_float64 = oracles.SOFTMAXES if softmax else oracles.ORACLES
    results = {name: _result(r, inputs, digits) for name, r in recurrences.items()}
    exact = results.pop(oracles.REFERENCE)
    spread = exact.out
    if not softmax:  # Σ_j p_j |v_j|, by the same recurrence
        sizes = inputs.replace(v=inputs.v.abs())
        spread = _result(recurrences[oracles.REFERENCE], sizes, digits).out
    given = {name: oracle(inputs) for name, oracle in in_float64.items()}
    found = distances(case, variant, given, exact, spread)
    return found, agreement(case, variant, results, exact, spread)


def _result(recurrence: Recurrence, inputs: Inputs, digits: int) -> Result[ManyDigits]:
    return recurrence(Mp(digits, evaluator), inputs)


def _check_size(problem: Problem) -> None:
    columns = problem.head_dim + problem.value_dim + 1
    products = problem.batch * problem.heads * problem.query * problem.kv * columns
    if products > MOST_PRODUCTS:
        raise UsageError(
            f"shape {problem.shape} needs {products:.1e} multiplications of many digits; at most "
            f"{MOST_PRODUCTS:.1e} are done: choose a smaller shape."
        )


def _backend() -> str:
    """What mpmath computes with: ``python``, or ``gmpy2`` and its version."""
    from mpmath import libmp  # type: ignore[import-untyped]  # it ships no types

    if libmp.BACKEND == "python":
        return "python"
    try:
        return f"gmpy2 {metadata.version('gmpy2')}"
    except metadata.PackageNotFoundError:
        return str(libmp.BACKEND)
