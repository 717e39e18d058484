"""Codes of the key index for V: which columns of a key hold a 1, so that sums count keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.probes.boundaries import boundaries
from attncheck.probes.kv_heads import amplitudes, shifts
from attncheck.probes.margins import countable

if TYPE_CHECKING:
    from attncheck.problem import Problem

__all__ = ["Code", "by_column", "by_parity", "code", "rounds", "values"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Code:
    """Columns of V that hold a 1, for each key.

    Attributes:
        name: ``direct`` (a column each), ``two digits``, ``digit 0``, ``digit 1`` or ``marked``.
        base: Columns that a digit has.
        digits: int64 ``(digits, kv)``: the column of a key, counted from the digit's own first one;
            −1 where the key has none.
    """

    name: str
    base: int
    digits: torch.Tensor


def rounds(problem: Problem) -> int:
    """How many rounds it takes to tell every key: see ``code``."""
    columns, kv = problem.value_dim, problem.kv
    if kv <= columns or _has_room(problem, columns // 2):
        return 1
    return 2 if _has_room(problem, columns) else 1 + -(-kv // columns)


def code(problem: Problem, number: int = 0) -> Code:
    """Round ``number`` of the first of these codes that the Problem has room for.

    * kv ≤ value_dim: a column each.
    * Two digits of base B = ⌊value_dim / 2⌋, side by side: j mod B and (j + ⌊j/B⌋) mod B, for
      kv ≤ B². Of equal first digits the second ones differ, and no column of either digit has more
      than ⌈kv/B⌉ keys.
    * The same with B = value_dim, a round for each digit.
    * Marked keys: value_dim of them a round, all others 0. The first round has those at boundaries
      (``boundaries``), the others one key after the other.

    A digit is taken only if rounding cannot blur counts up to ⌈kv/B⌉ (``margins.countable``).
    """
    columns, kv = problem.value_dim, problem.kv
    if kv <= columns:
        return _code("direct", columns, [torch.arange(kv)])
    if _has_room(problem, columns // 2):
        return _code("two digits", columns // 2, _digits(kv, columns // 2))
    if _has_room(problem, columns):
        return _code(f"digit {number}", columns, [_digits(kv, columns)[number]])
    start = (number - 1) * columns
    keys = range(start, min(start + columns, kv)) if number else boundaries(problem)[:columns]
    return _code("marked", columns, [_marked(problem, list(keys))])


def by_column(problem: Problem) -> Code:
    """One round for any number of keys: j mod value_dim."""
    digit = torch.arange(problem.kv) % problem.value_dim
    return _code("columns", problem.value_dim, [digit])


def by_parity(problem: Problem) -> Code:
    """As ``by_column``, with even and odd keys in columns of their own.

    Where value_dim is 1, even keys have none.
    """
    base = problem.value_dim // 2 * 2
    key = torch.arange(problem.kv)
    if base:
        return _code("columns", base, [key % base])
    return _code("columns", 1, [key % 2 - 1])


def values(problem: Problem, coded: Code) -> torch.Tensor:
    """V, float64 ``(batch, kv_heads, kv, value_dim)``: 0, or the amplitude of batch and key head.

    The columns of a digit are turned by batch and key head.
    """
    shape = (problem.batch, problem.kv_heads, problem.kv, problem.value_dim)
    v = torch.zeros(shape, dtype=torch.float64)
    turned = shifts(problem)[..., None]
    for number, digit in enumerate(coded.digits):
        column = (digit + turned) % coded.base + number * coded.base
        one = (digit >= 0).to(v.dtype).expand(shape[:3])
        v.scatter_add_(-1, column[..., None], one[..., None])
    return v * amplitudes(problem)[..., None, None]


def _code(name: str, base: int, digits: list[torch.Tensor]) -> Code:
    return Code(name=name, base=base, digits=torch.stack(digits))


def _has_room(problem: Problem, base: int) -> bool:
    if base < 2 or problem.kv > base * base:
        return False
    most = torch.tensor(float(-(-problem.kv // base)), dtype=torch.float64)
    any_number, zero = torch.tensor([3.0, 0.0], dtype=torch.float64)
    return bool(countable(problem, most, any_number, zero))


def _digits(kv: int, base: int) -> list[torch.Tensor]:
    key = torch.arange(kv)
    return [key % base, (key + key // base) % base]


def _marked(problem: Problem, keys: list[int]) -> torch.Tensor:
    digit = torch.full((problem.kv,), -1)
    digit[torch.tensor(keys)] = torch.arange(len(keys))
    return digit
