"""Compare the float64 oracles on many Problems with the same definition in many digits.

Every difference is computed in many digits before it is rounded to a float, so that errors far
below the number are accurate. Differences that are not finite are counted, not compared, because
comparisons with NaN are always false.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck import oracles
from attncheck.core.errors import UsageError
from attncheck.core.judgement import Place
from attncheck.core.outputs import Outputs
from attncheck.inputs import input_tensors
from attncheck.inputs.problem import Case, Problem
from attncheck.mods.mpmath_algebra import MPMATH
from attncheck.oracles.mp_numbers import ManyDigits, Mp
from attncheck.oracles.recurrence_steps import Result
from attncheck.records.survey_reports import (
    TRUTH,
    Agreement,
    Distance,
    OracleOnCase,
    OracleRecord,
    OracleReport,
    Rows,
)
from attncheck.verify.environment import environment

ORACLES = {
    TRUTH: "what kernels are compared with",
    "naive": "exp(x) / Σ exp(x), nothing subtracted",
    "safe": "the row's maximum subtracted first; dense",
    "online": "Milakov & Gimelshein's running maximum, one pass",
    "flash1": "FlashAttention's recurrence, key blocks outermost",
    "flash2": "FlashAttention-2's recurrence, query blocks outermost",
    "split": "splits of the keys, each on its own, merged by LSE",
    "streaming": "what kernels are compared with",
}
"""Oracle → a description in one line."""

MOST_PRODUCTS = 2**23
"""Limit on the multiplications of one Problem; a recurrence in 50 digits then takes seconds."""

DIGITS_LOST = 10
"""The recurrences must agree to all computed digits but this many: to 40 of 50.

Two evaluations are at most 4·(5 kv + 19 max|score|) roundings of 10^-digits apart, to first order:
a row's additions and rescales, at most five per key, and exponentials of rounded scores (rounded in
the product, the scale, thrice in a score mod, the change of base, score − maximum and the chain of
its rescales), in numerator and denominator, in both evaluations. ``MOST_PRODUCTS`` keeps 20 kv
below 2·10^8, and the plan's variants and distributions keep scores below 10^6: far below 10^10.
"""

_HALF_ULP = 2.0**-53
_SMALLEST_NORMAL = 2.0**-1022


def check_problem_size(problem: Problem, rows: int, most: int, what: str) -> None:
    """Raise UsageError for a Problem with more than ``most`` products, which would take hours."""
    products = rows * problem.kv * (problem.head_dim + problem.value_dim + 1)
    if products > most:
        raise UsageError(
            f"shape {problem.shape} needs {products:.1e} {what}; at most {most:.1e} are done: "
            "choose a smaller shape."
        )


def oracle_summaries(records: Iterable[OracleOnCase]) -> dict[str, str]:
    """Return the oracles in the records with their descriptions."""
    measured = {record.oracle for record in records}
    return {name: summary for name, summary in ORACLES.items() if name in measured}


# ------------------------------------------------------------------ comparison in many digits


def survey_oracles(
    problems: Sequence[tuple[str, Problem]],
    *,
    digits: int,
    command: str,
    done: Callable[[str], None] = lambda _: None,
) -> OracleReport:
    """Compare the float64 oracles, and recurrences in many digits, with a reference recurrence.

    Args:
        problems: The plan's name for the variant, and the Problem.
        digits: Decimal digits of the reference, at least 17.
        done: Called with the variant and distribution of each Problem when it is done.

    Raises:
        UsageError: for a Problem that would take hours, or no Problem at all.
    """
    if not problems:
        raise UsageError("no problem was named: nothing can be measured, name at least one.")
    for _, problem in problems:
        rows = problem.batch * problem.heads * problem.query
        check_problem_size(problem, rows, MOST_PRODUCTS, "multiplications of many digits")
    records: list[OracleRecord] = []
    agreements: list[Agreement] = []
    for variant, problem in problems:
        of_problem, agreed = _survey_problem(variant, problem, digits)
        records += of_problem
        agreements.append(agreed)
        done(f"{variant} {problem.distribution}")
    return OracleReport(
        command=command,
        environment=environment("cpu"),
        mpmath=metadata.version("mpmath"),
        backend=_backend(),
        digits=digits,
        must_agree=digits - DIGITS_LOST,
        reference=oracles.REFERENCE,
        may_overflow=tuple(sorted(oracles.MAY_OVERFLOW)),
        oracles=oracle_summaries(records),
        records=tuple(records),
        agreements=tuple(agreements),
    )


def _survey_problem(
    variant: str, problem: Problem, digits: int
) -> tuple[list[OracleRecord], Agreement]:
    case, inputs = Case(problem=problem), input_tensors.draw_inputs(problem)
    softmax = problem.operation == "softmax"
    recurrences = oracles.SOFTMAX_RECURRENCES if softmax else oracles.RECURRENCES
    in_float64 = oracles.SOFTMAXES if softmax else oracles.ORACLES
    numbers = Mp(digits, MPMATH.score)
    results = {name: recurrence(numbers, inputs) for name, recurrence in recurrences.items()}
    # The other recurrences are compared with the reference in the same number of digits.
    exact = results.pop(oracles.REFERENCE)
    # For a softmax out is p itself.
    spread = exact.out
    if not softmax:  # Σ_j p_j |v_j|, by the same recurrence
        sizes = inputs.replace(v=inputs.v.abs())
        spread = recurrences[oracles.REFERENCE](numbers, sizes).out
    outputs = {name: oracle(inputs) for name, oracle in in_float64.items()}
    records = distances(case, variant, outputs, exact, spread)
    return records, agreement(case, variant, results, exact, spread)


def _backend() -> str:
    """Return the backend of mpmath: ``python``, or ``gmpy2`` and its version."""
    from mpmath import libmp

    if libmp.BACKEND == "python":
        return "python"
    try:
        return f"gmpy2 {metadata.version('gmpy2')}"
    except metadata.PackageNotFoundError:
        return str(libmp.BACKEND)


def distances(
    case: Case,
    variant: str,
    by_oracle: Mapping[str, Outputs],
    exact: Result[ManyDigits],
    spread: ManyDigits,
) -> list[OracleRecord]:
    """Return one Record for each float64 oracle.

    Args:
        variant: The plan's name for the mask and score mod.
        by_oracle: Name of an oracle → its outputs.
        spread: Σ_j p_j |v_j| for each element of out, in many digits; p_j for softmax. Errors are
            measured relative to it.
    """
    exact_lse = exact.lse[..., 0]
    finite_rows = _are_finite(exact.out).all(axis=-1) & _are_finite(spread).all(axis=-1)
    # Rows that see no key have no finite LSE to compare with.
    alive = np.frompyfunc(lambda x: x != x.context.ninf, 1, 1)(exact_lse).astype(bool)
    records = []
    for name, outputs in by_oracle.items():
        assert outputs.lse is not None, "an oracle always gives LSE"
        out, lse = (tensor.cpu().numpy() for tensor in (outputs.out, outputs.lse))
        records.append(
            OracleRecord(
                case_id=case.id,
                case=case.to_json(),
                variant=variant,
                distribution=case.problem.distribution,
                oracle=name,
                out=_largest_distance(out, exact.out, spread, alive[..., None]),
                lse=_largest_distance(lse, exact_lse, _lse_sizes(exact_lse), alive),
                rows=_count_rows(out, lse, alive, finite_rows & _are_finite(exact_lse)),
            )
        )
    return records


def agreement(
    case: Case,
    variant: str,
    others: Mapping[str, Result[ManyDigits]],
    exact: Result[ManyDigits],
    spread: ManyDigits,
) -> Agreement:
    """Return the largest distance of recurrences in many digits from the reference.

    Args:
        variant: The plan's name for the mask and score mod.
        others: Name → result of each recurrence but the reference.
        spread: As in ``distances``.
    """
    differences = [
        (value, name)
        for name, other in others.items()
        for values, exact_values, unit in (
            (other.out, exact.out, spread),
            (other.lse, exact.lse, _lse_sizes(exact.lse)),
        )
        for value in _differences(values, exact_values, unit)
    ]
    finite = [value for value, _ in differences if value != math.inf]
    largest = max(finite) if finite else None
    return Agreement(
        case_id=case.id,
        variant=variant,
        distribution=case.problem.distribution,
        oracles=tuple(others),
        # mpmath's log10, because the number may be far below the smallest float.
        log10=None if largest is None else float(largest.context.log10(largest)),
        infinite=len(differences) - len(finite),
        furthest=max(differences, key=itemgetter(0))[1] if differences else None,
    )


def _largest_distance(
    values: NDArray[np.float64], exact: ManyDigits, sizes: ManyDigits, alive: NDArray[np.bool_]
) -> Distance:
    """Return the largest |value − exact| ÷ (2^-53 · size) over the rows that are ``alive``."""
    rows = np.broadcast_to(alive, values.shape)
    finite = rows & np.isfinite(values) & _are_finite(exact) & _are_finite(sizes)
    worst, at = -1.0, None
    for index in zip(*np.nonzero(finite), strict=True):
        # Below the smallest normal number float64 has fewer digits, which is no error of an oracle.
        size = max(sizes[index], _SMALLEST_NORMAL)
        units = float(abs(exact[index] - float(values[index])) / size / _HALF_ULP)
        units = min(units, sys.float_info.max)  # JSON has no ∞
        if units > worst:
            worst, at = units, index
    compared = int(finite.sum())
    return Distance(
        units=worst if compared else None,
        at=None if at is None else Place.of(tuple(map(int, at))),
        compared=compared,
        nonfinite=int(rows.sum()) - compared,
    )


def _count_rows(
    out: NDArray[np.float64],
    lse: NDArray[np.float64],
    alive: NDArray[np.bool_],
    finite_rows: NDArray[np.bool_],
) -> Rows:
    """Count rows by kind of failure; ``finite_rows`` are the rows whose exact result is finite."""
    broken = alive & ~(finite_rows & np.isfinite(out).all(axis=-1) & np.isfinite(lse))
    # A sum of exponentials that is 0 although the row sees a key: 0/0.
    vanished = broken & np.isneginf(lse)
    overflowed = broken & ~vanished & (np.isposinf(lse) | np.isinf(out).any(axis=-1))
    dead = ~alive & ((out != 0).any(axis=-1) | ~np.isneginf(lse))
    return Rows(
        total=int(alive.sum()),
        nonfinite=int(broken.sum()),
        overflowed=int(overflowed.sum()),
        vanished=int(vanished.sum()),
        dead_wrong=int(dead.sum()),
    )


def _lse_sizes(lse: ManyDigits) -> ManyDigits:
    """Return ``max(1, |LSE|)``."""
    sizes = np.empty(lse.shape, dtype=object)
    for index, value in np.ndenumerate(lse):
        sizes[index] = max(abs(value), 1)
    return sizes


def _differences(one: ManyDigits, other: ManyDigits, sizes: ManyDigits) -> Iterator[Any]:
    """Yield |one − other| ÷ size, or ∞ if it is not finite, wherever the two differ."""
    numbers = (array.ravel().tolist() for array in (one, other, sizes))
    for value, reference, size in zip(*numbers, strict=True):
        if value != reference:  # NaN differs from NaN
            difference = abs(value - reference)
            sound = size != 0 and _is_finite(size) and _is_finite(difference)
            yield difference / size if sound else math.inf


def _is_finite(value: Any) -> bool:
    return bool(abs(value) < math.inf)


def _are_finite(values: ManyDigits) -> NDArray[np.bool_]:
    return np.asarray(np.frompyfunc(_is_finite, 1, 1)(values)).astype(bool)
