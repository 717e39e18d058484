"""Arb's balls as a number system, and a proven error bound of a float64 result.

Every array holds enclosures: the exact result of the recurrence on the exact inputs lies in the
computed ball, whatever was rounded on the way. ``proven_error`` assumes nothing about the float64
oracle: the exact result of a row is enclosed in balls, and the distance of the oracle's numbers
from the far end of the balls is rounded up. On the CPU. Needs python-flint, the extra ``exact``.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import flint
import numpy as np
import torch
from torch import Tensor

from attncheck.core.balls import BallArray, balls_of, each_ball, error_bound, working_precision
from attncheck.core.conditions import Rows
from attncheck.core.errors import UsageError
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Inputs
from attncheck.mods.signatures import ScoreMod
from attncheck.oracles.forward_recurrences import one_head
from attncheck.oracles.mod_calls import Indices
from attncheck.oracles.number_system import Captures, Evaluate, ObjectNumbers
from attncheck.oracles.recurrence_steps import Result

BITS = 128
"""Bits of a midpoint: two machine words, which cost no more than any number of bits above one word.
A score of 10^6 is then known to 2^-108, where a float64 oracle is off by 2^-53 of it."""

LEAST_BITS = 53  # Bits that hold any float64.

_MINUS_INFINITY = flint.arb.neg_inf()


@dataclass(frozen=True, slots=True, eq=False)
class Balls:
    """An array of balls; operators are elementwise, broadcast, and round to ``bits``."""

    array: BallArray  # ``(batch, heads, rows, columns)``, ``flint.arb`` objects
    bits: int  # bits of a midpoint

    def __add__(self, other: Self) -> Self:
        return self._combine(operator.add, other.array)

    def __sub__(self, other: Self) -> Self:
        return self._combine(operator.sub, other.array)

    def __mul__(self, other: Self | float) -> Self:
        return self._combine(operator.mul, other.array if isinstance(other, Balls) else other)

    def __truediv__(self, other: Self) -> Self:
        return self._combine(operator.truediv, other.array)

    def _combine(self, operation: Callable[[Any, Any], Any], other: Any) -> Self:
        with working_precision(self.bits):
            return type(self)(operation(self.array, other), self.bits)


class Ball(ObjectNumbers[Balls]):
    """Arrays of balls ``(batch, heads, rows, columns)``; see ``Numbers`` for each method.

    Exponents are unbounded: nothing overflows or underflows. −∞ is exact. A score without any
    known value makes the results of its row unknown (``core.balls.is_known``), and no others.

    Args:
        bits: Bits of a midpoint; raises UsageError below 53, which hold a float64.
        evaluate, slope, captures: See ``ObjectNumbers``; the context is ``bits``. Their results
            must enclose the exact number for every score in a ball.
    """

    def __init__(
        self,
        bits: int = BITS,
        evaluate: Evaluate | None = None,
        slope: Evaluate | None = None,
        captures: Captures | None = None,
    ) -> None:
        if isinstance(bits, bool) or not isinstance(bits, int) or bits < LEAST_BITS:
            raise UsageError(
                f"bits={bits!r} must be a whole number of at least {LEAST_BITS}: fewer do not hold "
                "a float64."
            )
        self.bits = bits
        super().__init__(bits, evaluate, slope, captures)

    def exact(self, values: Tensor) -> Balls:
        """Return balls of radius 0, and an unknown ball for NaN; ``values`` on the CPU."""
        return self._apply(balls_of, values.numpy())

    def rounded(self, array: Balls) -> Tensor:
        """Return the midpoints, rounded once; NaN for unknown balls."""
        return torch.from_numpy(_NEAREST(array.array).astype(np.float64))

    def matmul(self, left: Balls, right: Balls) -> Balls:
        """Return the batched product, by Arb's own matrix product."""
        product = np.empty((*left.array.shape[:-1], right.array.shape[-1]), dtype=object)
        with working_precision(self.bits):
            for head in np.ndindex(left.array.shape[:2]):
                product[head] = _product(left.array[head], right.array[head])
        return Balls(product, self.bits)

    def weigh(self, weights: Balls, values: Balls, attended: Tensor) -> Balls:
        """Return the product if all values are finite, else sums over the attended keys alone."""
        # Arb's matrix product is many times faster than sums in Python.
        if _FINITE(values.array).all():
            return self.matmul(weights, values)  # 0 times a finite number is 0
        used = attended.expand(weights.array.shape).numpy()
        # Each row attends to different keys.
        product = np.empty((*weights.array.shape[:-1], values.array.shape[-1]), dtype=object)
        with working_precision(self.bits):
            for row in np.ndindex(weights.array.shape[:-1]):
                keys = used[row].nonzero()[0]
                seen_values = values.array[row[:2]][keys]
                product[row] = _product(weights.array[row][None, keys], seen_values)
        return Balls(product, self.bits)

    def exp(self, array: Balls) -> Balls:
        """Return the exponential, elementwise."""
        return self._apply(_EXP, array.array)

    def log(self, array: Balls) -> Balls:
        """Return the logarithm, elementwise; −∞ for an exact 0, unknown if a ball reaches 0."""
        return self._apply(_LOG, array.array)

    def maximum(self, left: Balls, right: Balls) -> Balls:
        """Return the maximum, elementwise: from the larger lower end to the larger upper end."""
        return self._apply(_LARGER, left.array, right.array)

    def rowmax(self, array: Balls) -> Balls:
        """Return the maximum over the last axis."""
        columns = np.moveaxis(array.array, -1, 0)
        with working_precision(self.bits):
            # Not np.max, which compares by >= and picks either of two overlapping balls.
            largest = functools.reduce(_LARGER, columns)
        return Balls(largest[..., None], self.bits)

    def is_minus_infinity(self, array: Balls) -> Tensor:
        """Return which balls are −∞; False for an unknown ball, which makes its row unknown."""
        infinite = ~_FINITE(array.array).astype(bool)
        # Only the few non-finite balls are tested, since each test is a Python call.
        infinite[infinite] = _IS_MINUS_INFINITY(array.array[infinite]).astype(bool)
        return torch.from_numpy(infinite)

    def captured(
        self, score_mod: ScoreMod, scores: Balls, indices: Indices, factors: Balls, attended: Tensor
    ) -> Balls:
        """Return the sums by ``captures``; raise UsageError without it."""
        with working_precision(self.bits):
            terms = self._captured_sums(score_mod, scores, indices, factors, attended)
            # A number that no score reads has a plain 0, which becomes a ball here.
            sums = terms + np.full((), flint.arb(0), dtype=object)
        return Balls(sums.reshape(1, 1, 1, -1), self.bits)

    def _objects(self, array: Balls) -> BallArray:
        return array.array

    def _made(self, objects: BallArray) -> Balls:
        return Balls(objects, self.bits)

    def _number(self, value: float) -> Any:
        return flint.arb(value)

    def _sums(self, objects: BallArray) -> BallArray:
        with working_precision(self.bits):
            sums: BallArray = objects.sum(axis=-1)
        return sums

    def _apply(self, function: Callable[..., BallArray], *arrays: Any) -> Balls:
        with working_precision(self.bits):
            return Balls(function(*arrays), self.bits)


def _product(left: BallArray, right: BallArray) -> BallArray:
    """Return the product of two matrices; zeros if the left one has no columns."""
    shape = (left.shape[0], right.shape[1])
    # flint has no matrix without columns.
    if not left.shape[1]:
        return np.full(shape, flint.arb(0), dtype=object)
    product = flint.arb_mat(left.tolist()) * flint.arb_mat(right.tolist())
    return np.array(product.entries(), dtype=object).reshape(shape)


def _log(ball: Any) -> Any:
    return _MINUS_INFINITY if ball.is_zero() else ball.log()


def _is_minus_infinity(ball: Any) -> bool:
    """Return whether a non-finite ball is −∞; its radius must be finite."""
    return not ball.is_nan() and ball.mid() == _MINUS_INFINITY and bool(ball.rad().is_finite())


_EXP = each_ball(flint.arb.exp, 1)
_LOG = each_ball(_log, 1)
_LARGER = each_ball(flint.arb.max, 2)
_FINITE = each_ball(flint.arb.is_finite, 1)
_NEAREST = each_ball(float, 1)
_IS_MINUS_INFINITY = each_ball(_is_minus_infinity, 1)
_ERROR = each_ball(error_bound, 2)


@dataclass(frozen=True, slots=True, eq=False)
class ProvenError:
    """Upper bounds of |result − exact|, float64 on the CPU; infinite where none is proven."""

    rows: Rows
    out: Tensor  # ``(heads, rows, value_dim)``; of a softmax ``(heads, rows, kv)``
    lse: Tensor  # ``(heads, rows)``; 0 where both are −∞


def proven_error(outputs: Outputs, exact: Result[Balls], rows: Rows) -> ProvenError:
    """Return upper bounds of the distance of ``outputs`` from the exact result.

    Args:
        outputs: Results of the whole Problem, float64, with LSE.
        exact: Enclosures of ``rows`` by ``enclose_rows``.
    """
    assert outputs.lse is not None, "an oracle always gives LSE"
    heads, query = slice(rows.heads.start, rows.heads.stop), rows.query.cpu()
    out = outputs.out.cpu().flatten(0, 1)[heads][:, query]
    lse = outputs.lse.cpu().flatten(0, 1)[heads][:, query]
    with working_precision(exact.out.bits):
        # At the precision of the enclosure, since fewer bits would widen the difference.
        of_out = _ERROR(out.numpy(), exact.out.array[0])
        of_lse = _ERROR(lse.numpy(), exact.lse.array[0, ..., 0])
    bounds = (torch.from_numpy(part.astype(np.float64)) for part in (of_out, of_lse))
    return ProvenError(rows, *bounds)


def enclose_rows(numbers: Ball, inputs: Inputs, rows: Rows) -> Result[Balls]:
    """Enclose the exact out and LSE of some rows in balls, whatever the size of the Problem.

    The work is proportional to ``rows``, and memory does not grow with the keys.

    Args:
        numbers: Balls, with the evaluation of a score mod if there is one.

    Returns:
        Out ``(1, heads, rows, value_dim)``, of a softmax ``(1, heads, rows, kv)``, and natural-log
        LSE ``(1, heads, rows, 1)``; exactly 0 and −∞ in rows that attend to no key.
    """
    # flint runs on the CPU only.
    inputs = inputs.to("cpu")
    # One head at a time, since an object takes some hundred bytes.
    results = [one_head(numbers, inputs, head, rows.query.cpu()) for head in rows.heads]
    out, lse = ([getattr(result, part).array for result in results] for part in ("out", "lse"))
    return Result(*(Balls(np.concatenate(part, axis=1), numbers.bits) for part in (out, lse)))
