"""The float64 oracles on many Problems, beside many digits and proven bounds.

Every difference is taken between numbers of many digits, and only then becomes a float: nothing is
lost of an error that is far below the number. A difference that is no finite number is counted and
never compared: NaN is not above anything.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from importlib import metadata
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attncheck import oracles
from attncheck.cases.variants import SHARP, VARIANTS, plan_cells
from attncheck.core.balls import flint_version
from attncheck.core.errors import UnknownName, UsageError
from attncheck.core.judgement import Place
from attncheck.inputs import input_tensors as inputs_room
from attncheck.inputs.distributions import DISTRIBUTIONS
from attncheck.inputs.problem import Case
from attncheck.judge.declared_arithmetic import FP64_ORACLE, default
from attncheck.judge.verdict_rules import PROVEN
from attncheck.mods.ball_algebra import BALLS
from attncheck.mods.mpmath_algebra import MPMATH
from attncheck.oracles.ball_numbers import BITS, Ball, enclosed, proven_error
from attncheck.oracles.mp_numbers import Mp
from attncheck.oracles.row_conditions import sampled_rows, samples_all_rows
from attncheck.records.survey_reports import (
    TRUTH,
    Agreement,
    Certificate,
    CertificateReport,
    Distance,
    OracleRecord,
    OracleReport,
    ProvenError,
    Rows,
)
from attncheck.verify.environment import environment
from attncheck.verify.evidence import Evidence, row_bounds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from attncheck.cases.variants import Cell
    from attncheck.core.conditions import Rows as Rows_of_conditions
    from attncheck.core.outputs import Outputs
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Problem
    from attncheck.oracles.mp_numbers import ManyDigits
    from attncheck.oracles.recurrence_steps import Recurrence, Result

__all__ = [
    "CERTIFIED_ORACLES",
    "CERTIFIED_VARIANTS",
    "DEFAULT_VARIANTS",
    "DIGITS_LOST",
    "MOST_CERTIFIED_PRODUCTS",
    "MOST_PRODUCTS",
    "ORACLES",
    "agreement",
    "certify_oracles",
    "distances",
    "oracle_plan",
    "survey_oracles",
]


DEFAULT_VARIANTS = ("full", "causal", SHARP.name, "softmax")

CERTIFIED_VARIANTS = ("full", "causal", "alibi", "softcap", SHARP.name, "softmax")
"""Proven by default: score mods too, whose own roundings are the oracle's as well."""


def oracle_plan(
    *,
    variants: Sequence[str],
    distributions: Sequence[str],
    dtype: str,
    shape: str,
    seed: int,
    default: Sequence[str] = DEFAULT_VARIANTS,
) -> list[Cell]:
    """Each variant on each distribution, in the order in which a report shows them.

    Args:
        variants: Names of ``cases.variants.VARIANTS``, or ``sharp``; none: those of ``default``.
        distributions: Names; none: all. Of softmax those that it has.
        dtype: Of the inputs.
        shape: As typed.
        seed: Which draw.
        default: Names of variants.

    Raises UnknownName or ProblemError for what cannot be, before anything is computed.
    """
    known = VARIANTS | {SHARP.name: SHARP}
    cells: list[Cell] = []
    for name in variants or default:
        if name not in known:
            raise UnknownName("variant", name, known)
        every = tuple(distributions or DISTRIBUTIONS)
        existing = tuple(d for d in every if known[name].exists(dtype, d))
        # By name it must exist: the Problem says why it does not.
        must = bool(variants) and (bool(distributions) or not existing)
        for distribution in every if must else existing:
            cells += plan_cells(
                dtypes=(dtype,),
                variants=() if name == SHARP.name else (name,),
                own=SHARP if name == SHARP.name else None,
                shapes=(shape,),
                distributions=(distribution,),
                seed=seed,
            )
    return list(dict.fromkeys(cells))


_HALF_ULP = 2.0**-53
_SMALLEST_NORMAL = 2.0**-1022


def distances(
    case: Case,
    variant: str,
    given: Mapping[str, Outputs],
    exact: Result[ManyDigits],
    spread: ManyDigits,
) -> list[OracleRecord]:
    """One Record for each float64 oracle.

    Args:
        case: What was computed.
        variant: The plan's name for the mask and score mod.
        given: What each oracle gives, by its name.
        exact: The result in many digits.
        spread: Σ_j p_j |v_j| of each element of out, in many digits; p_j for softmax. What an
            error of a rounding is relative to.
    """
    exact_lse = exact.lse[..., 0]
    known = _are_finite(exact.out).all(axis=-1) & _are_finite(spread).all(axis=-1)
    alive = np.frompyfunc(lambda x: x != x.context.ninf, 1, 1)(exact_lse).astype(bool)
    records = []
    for name, outputs in given.items():
        assert outputs.lse is not None, "an oracle always gives LSE"
        out, lse = (tensor.cpu().numpy() for tensor in (outputs.out, outputs.lse))
        records.append(
            OracleRecord(
                case_id=case.id,
                case=case.to_json(),
                variant=variant,
                distribution=case.problem.distribution,
                oracle=name,
                out=_distance(out, exact.out, spread, alive[..., None]),
                lse=_distance(lse, exact_lse, _sizes(exact_lse), alive),
                rows=_rows(out, lse, alive, known & _are_finite(exact_lse)),
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
    """How far the recurrences are apart when all are run in many digits.

    Args:
        case: What was computed.
        variant: The plan's name for the mask and score mod.
        others: By name, what each recurrence but the reference gives.
        exact: What the reference gives.
        spread: As for ``distances``.
    """
    found = [
        (value, name)
        for name, other in others.items()
        for mine, yours, unit in (
            (other.out, exact.out, spread),
            (other.lse, exact.lse, _sizes(exact.lse)),
        )
        for value in _apart(mine, yours, unit)
    ]
    finite = [value for value, _ in found if value != math.inf]
    return Agreement(
        case_id=case.id,
        variant=variant,
        distribution=case.problem.distribution,
        oracles=tuple(others),
        log10=_log10(max(finite)) if finite else None,
        infinite=len(found) - len(finite),
        furthest=max(found, key=itemgetter(0))[1] if found else None,
    )


def _distance(
    values: NDArray[np.float64], exact: ManyDigits, sizes: ManyDigits, alive: NDArray[np.bool_]
) -> Distance:
    """The largest |value − exact| ÷ (2^-53 · size) over the rows that are ``alive``."""
    asked = np.broadcast_to(alive, values.shape)
    finite = asked & np.isfinite(values) & _are_finite(exact) & _are_finite(sizes)
    worst, at = -1.0, None
    for index in zip(*np.nonzero(finite), strict=True):
        size = max(sizes[index], _SMALLEST_NORMAL)
        units = float(abs(exact[index] - float(values[index])) / size / _HALF_ULP)
        units = min(units, sys.float_info.max)  # JSON has no ∞
        if units > worst:
            worst, at = units, index
    compared = int(finite.sum())
    return Distance(
        units=worst if compared else None,
        at=_first_place(at),
        compared=compared,
        nonfinite=int(asked.sum()) - compared,
    )


def _rows(
    out: NDArray[np.float64],
    lse: NDArray[np.float64],
    alive: NDArray[np.bool_],
    known: NDArray[np.bool_],
) -> Rows:
    """``known``: the rows whose exact result is finite."""
    broken = alive & ~(known & np.isfinite(out).all(axis=-1) & np.isfinite(lse))
    # A sum of exponentials that is 0, without a row that sees no key: 0/0.
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


def _sizes(lse: ManyDigits) -> ManyDigits:
    """``max(1, |LSE|)``."""
    sizes = np.empty(lse.shape, dtype=object)
    for index, value in np.ndenumerate(lse):
        sizes[index] = max(abs(value), 1)
    return sizes


def _apart(one: ManyDigits, other: ManyDigits, sizes: ManyDigits) -> Iterator[Any]:
    """|one − other| ÷ size, or ∞ where that is no number, wherever they are not the same."""
    numbers = (array.ravel().tolist() for array in (one, other, sizes))
    for mine, yours, size in zip(*numbers, strict=True):
        if mine != yours:  # as NaN is not the same as NaN
            difference = abs(mine - yours)
            sound = size != 0 and _is_finite(size) and _is_finite(difference)
            yield difference / size if sound else math.inf


def _is_finite(value: Any) -> bool:
    return bool(abs(value) < math.inf)


def _are_finite(values: ManyDigits) -> NDArray[np.bool_]:
    return np.asarray(np.frompyfunc(_is_finite, 1, 1)(values)).astype(bool)


def _log10(value: Any) -> float:
    """Of an mpmath number that may be far below the smallest float."""
    return float(value.context.log10(value))


def _first_place(index: tuple[Any, ...] | None) -> Place | None:
    return None if index is None else Place.of(tuple(map(int, index)))


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


def survey_oracles(
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
    case, inputs = Case(problem=problem), inputs_room.draw_inputs(problem)
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
    return recurrence(Mp(digits, MPMATH.score), inputs)


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


MOST_CERTIFIED_PRODUCTS = 2**31
"""Products of balls of one Problem: Arb does some 30 million a second."""

_MOST_DENSE = 2**22  # scores of an oracle that holds them all: 32 MB

CERTIFIED_ORACLES = {
    TRUTH: "what kernels are compared with",
    "naive": "exp(x) / Σ exp(x), nothing subtracted",
    "safe": "the row's maximum subtracted first; dense",
    "online": "Milakov & Gimelshein's running maximum, one pass",
    "flash1": "FlashAttention's recurrence, key blocks outermost",
    "flash2": "FlashAttention-2's recurrence, query blocks outermost",
    "split": "splits of the keys, each on its own, merged by LSE",
}
"""What each oracle is, in a line."""


def certify_oracles(
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
        _check_certified_size(problem)
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
        oracles={name: summary for name, summary in CERTIFIED_ORACLES.items() if name in asked},
        records=tuple(records),
    )


def _certified(variant: str, problem: Problem) -> list[Certificate]:
    """One Certificate for each oracle."""
    case, pieces = Case(problem=problem), sampled_rows(problem, "cpu")
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
    rows: Rows_of_conditions,
    found: Mapping[str, tuple[_Found, _Found]],
) -> None:
    """Add what is proven of some rows to what is ``found`` of out and LSE of each oracle."""
    problem = evidence.case.problem
    exact = enclosed(Ball(evaluate=BALLS.score), evidence.inputs, rows)
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
    if scores > _MOST_DENSE or not samples_all_rows(problem, "cpu"):
        return {}
    softmax = problem.operation == "softmax"
    every = oracles.SOFTMAXES if softmax else oracles.ORACLES
    return {name: every[name](inputs) for name in CERTIFIED_ORACLES if name in every}


def _check_certified_size(problem: Problem) -> None:
    rows = sum(len(rows.heads) * len(rows.query) for rows in sampled_rows(problem, "cpu"))
    products = rows * problem.kv * (problem.head_dim + problem.value_dim + 1)
    if products > MOST_CERTIFIED_PRODUCTS:
        raise UsageError(
            f"shape {problem.shape} needs {products:.1e} products of balls; at most "
            f"{MOST_CERTIFIED_PRODUCTS:.1e} are done: choose a smaller shape."
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
        self,
        error: Tensor,
        allowed: Tensor,
        assumed: Tensor | None,
        rows: Rows_of_conditions,
        problem: Problem,
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

    def proven(self) -> ProvenError:
        """As data; JSON has no ∞."""
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


def _shares(errors: Tensor, bounds: Tensor, asked: Tensor) -> Tensor:
    """Error ÷ bound, 0 where both are 0, and −1 where it is not asked."""
    shares = torch.where(errors == 0, 0.0, errors / bounds)
    return torch.where(asked, shares, -1.0)


def _place(number: int, shape: Sequence[int], rows: Rows_of_conditions, problem: Problem) -> Place:
    head, row, *dim = (int(i) for i in np.unravel_index(number, tuple(shape)))
    pair = rows.heads[head]
    return Place(
        batch=pair // problem.heads,
        head=pair % problem.heads,
        query=int(rows.query[row]),
        dim=dim[0] if dim else -1,
    )
