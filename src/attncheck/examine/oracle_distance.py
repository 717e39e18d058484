"""How far is each float64 oracle from the same definition in many digits?

Every difference is taken between numbers of many digits, and only then becomes a float: nothing is
lost of an error that is far below the number. A difference that is no finite number is counted and
never compared: NaN is not above anything.
"""

from __future__ import annotations

import math
import sys
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from attncheck.judgement import Place
from attncheck.oracle_record import Agreement, Distance, OracleRecord, Rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from attncheck.oracles.numbers import ManyDigits
    from attncheck.oracles.result import Result
    from attncheck.outputs import Outputs
    from attncheck.problem import Case

__all__ = ["agreement", "distances"]

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
        at=_place(at),
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


def _place(index: tuple[Any, ...] | None) -> Place | None:
    return None if index is None else Place.of(tuple(map(int, index)))
