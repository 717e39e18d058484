"""Building blocks of probes: boundary keys, codes of the key index, logits, exact storage."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from attncheck.core.errors import ProblemError
from attncheck.core.formats import round_to
from attncheck.inputs.input_tensors import Descale, Inputs
from attncheck.probes.margins import is_countable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.inputs.problem import Problem
    from attncheck.mods.spec import Spec

__all__ = [
    "Code",
    "amplitudes",
    "boundary_keys",
    "code_by_column",
    "code_by_parity",
    "code_values",
    "column_shifts",
    "count_rounds",
    "fill_orthogonal_columns",
    "key_code",
    "logit_factors",
    "logit_out_of_range",
    "store_inputs",
    "zero_query_and_keys",
]


_TILES = (64, 128, 32, 16, 256)
"""Widths of tiles and pages, the commonest first."""


def boundary_keys(problem: Problem) -> list[int]:
    """All keys, those at boundaries first.

    In this order: the first and the last key; the key before and the key at each edge that the
    mask's name and numbers tell (end of the prefix, of a document, of padding, a window's width,
    the diagonals of the first and the last row); those of tiles; the rest, spread evenly.
    """
    kv = problem.kv
    edges = [0, kv, *_of_mask(problem.mask, problem)]
    edges += [side for width in _TILES for side in _ends(width, kv)]
    edges += [multiple for width in _TILES for multiple in range(width, kv, width)]
    near = [key for edge in edges for key in (edge - 1, edge) if 0 <= key < kv]
    return list(dict.fromkeys(near + _spread(kv)))


def _ends(width: int, kv: int) -> tuple[int, int]:
    """The end of the first tile and the start of the last one."""
    return width, (kv - 1) // width * width


def _of_mask(mask: Spec, problem: Problem) -> Iterator[int]:
    for part in mask.walk():
        numbers = part.values
        if part.name in {"document", "padding"}:
            lengths = cast("tuple[int, ...]", numbers["lengths"])
            ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
            yield from ends if part.name == "document" else lengths
        elif part.name == "prefix_lm":
            yield cast("int", numbers["prefix"])
        elif part.name == "sliding_window":
            window = cast("int", numbers["window"])
            yield from (window, problem.query - window)
        if part.name in {"causal", "sliding_window", "prefix_lm"}:
            yield from (1, problem.query)
        elif part.name == "causal_bottom_right":
            yield problem.kv - problem.query + 1


def _spread(kv: int) -> list[int]:
    """All keys, by halves: the middle, the quarters, the eighths, and so on."""
    bits = (kv - 1).bit_length()
    by_halves = (int(f"{n:0{bits}b}"[::-1], 2) if bits else 0 for n in range(1 << bits))
    return [key for key in by_halves if key < kv]


_FACTOR = 4
"""Between the values of two key heads: a row that reads the other one's is off by 3/4 or more."""

_KINDS = 5
"""Different factors: 1 to 4**4 = 256, which every format can store."""


def _pairs(problem: Problem, per_batch: int) -> torch.Tensor:
    batch = torch.arange(problem.batch)[:, None]
    return batch * per_batch + torch.arange(problem.kv_heads)


def amplitudes(problem: Problem) -> torch.Tensor:
    """Powers of four, float64 ``(batch, kv_heads)``: what V is multiplied by.

    A neighbour in heads, in batch or in both has another one.
    """
    kinds = _pairs(problem, 2) % _KINDS
    return torch.pow(torch.tensor(float(_FACTOR), dtype=torch.float64), kinds)


def column_shifts(problem: Problem) -> torch.Tensor:
    """By how many columns the code of V is turned, int64 ``(batch, kv_heads)``."""
    return _pairs(problem, problem.kv_heads)


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


def count_rounds(problem: Problem) -> int:
    """How many rounds it takes to tell every key: see ``code``."""
    columns, kv = problem.value_dim, problem.kv
    if kv <= columns or _has_room(problem, columns // 2):
        return 1
    return 2 if _has_room(problem, columns) else 1 + -(-kv // columns)


def key_code(problem: Problem, number: int = 0) -> Code:
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
    keys = range(start, min(start + columns, kv)) if number else boundary_keys(problem)[:columns]
    return _code("marked", columns, [_marked(problem, list(keys))])


def code_by_column(problem: Problem) -> Code:
    """One round for any number of keys: j mod value_dim."""
    digit = torch.arange(problem.kv) % problem.value_dim
    return _code("columns", problem.value_dim, [digit])


def code_by_parity(problem: Problem) -> Code:
    """As ``by_column``, with even and odd keys in columns of their own.

    Where value_dim is 1, even keys have none.
    """
    base = problem.value_dim // 2 * 2
    key = torch.arange(problem.kv)
    if base:
        return _code("columns", base, [key % base])
    return _code("columns", 1, [key % 2 - 1])


def code_values(problem: Problem, coded: Code) -> torch.Tensor:
    """V, float64 ``(batch, kv_heads, kv, value_dim)``: 0, or the amplitude of batch and key head.

    The columns of a digit are turned by batch and key head.
    """
    shape = (problem.batch, problem.kv_heads, problem.kv, problem.value_dim)
    v = torch.zeros(shape, dtype=torch.float64)
    turned = column_shifts(problem)[..., None]
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
    return bool(is_countable(problem, most, any_number, zero))


def _digits(kv: int, base: int) -> list[torch.Tensor]:
    key = torch.arange(kv)
    return [key % base, (key + key // base) % base]


def _marked(problem: Problem, keys: list[int]) -> torch.Tensor:
    digit = torch.full((problem.kv,), -1)
    digit[torch.tensor(keys)] = torch.arange(len(keys))
    return digit


_SIGNIFICANDS = (1.0, 1.25, 1.5, 1.75)  # three bits, as e5m2 has


def logit_factors(problem: Problem, logit: float) -> tuple[float, float]:
    """(x, y) whose product is the least with scale · x · y ≥ ``logit`` that has three bits.

    x is a power of two and y has the three bits; each takes half of the exponent.
    """
    size = logit / problem.scale
    exponent = math.frexp(size)[1] - 1
    larger = (math.ldexp(s, exponent) for s in (*_SIGNIFICANDS, 2.0))
    product = next(x for x in larger if x >= size)
    significand, exponent = math.frexp(product)
    x = math.ldexp(1.0, exponent // 2)
    return x, math.ldexp(significand, exponent - exponent // 2)


def logit_out_of_range(problem: Problem, logit: float, factor: float = 1.0) -> str | None:
    """Why the storage format cannot hold what makes ``logit``, times ``factor``; None if it can."""
    fmt = problem.formats.storage
    sizes = [x * factor for x in logit_factors(problem, logit)]
    # fp8 has descales; there the range is that of fp32.
    top, low = (2.0**60, 2.0**-60) if fmt.saturates else (fmt.max, 2.0**fmt.min_exponent)
    if all(2 * low < size <= top / 2 for size in sizes):
        return None
    return f"scale={problem.scale:g} asks for q and k beyond {fmt.name}"


def zero_query_and_keys(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros: q ``(batch, heads, query, head_dim)`` and k ``(batch, kv_heads, kv, head_dim)``."""
    q = (problem.batch, problem.heads, problem.query, problem.head_dim)
    k = (problem.batch, problem.kv_heads, problem.kv, problem.head_dim)
    return torch.zeros(q, dtype=torch.float64), torch.zeros(k, dtype=torch.float64)


_KINDS_of_storing = 4
"""Different descales: the largest number comes to fp8's largest power of two, or to 2^-3 of it."""


def fill_orthogonal_columns(q: torch.Tensor, k: torch.Tensor, first: int) -> None:
    """Write to columns from ``first`` on what adds nothing to q·k: where q is not 0, k is.

    q takes the even ones and k the odd ones, with signs and sizes that change along the rows: a
    column or row read in place of another multiplies what should not meet. Sizes are those of
    what the tensors hold already.
    """
    for parity, tensor in enumerate((q, k)):
        columns = torch.arange(tensor.shape[-1])
        here = (columns >= first) & (columns % 2 == (first + parity) % 2)
        size = _power_of_two(tensor.abs().amax()) if bool(tensor.any()) else 1.0
        rows = torch.arange(tensor.shape[2])[:, None] + columns
        pattern = torch.where(rows % 3 == 0, -1.0, 1.0) * torch.where(rows % 2 == 0, 1.0, 0.5)
        tensor.add_(torch.where(here, size * pattern.to(tensor.dtype), 0.0))


def store_inputs(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, exact: bool = True
) -> Inputs:
    """Inputs that mean float64 ``q``, ``k`` and ``v``, on the CPU.

    In fp8 each batch and key head has descales of its own, powers of two.

    Args:
        problem: What they are inputs of.
        q: ``(batch, heads, query, head_dim)``.
        k: ``(batch, kv_heads, kv, head_dim)``.
        v: ``(batch, kv_heads, kv, value_dim)``.
        exact: Whether they must be the format's numbers; otherwise they are rounded once.

    Raises:
        ProblemError: where they must be and are not.
    """
    fmt = problem.formats.storage
    tensors, scales = {}, {}
    for turn, (name, values) in enumerate((("q", q), ("k", k), ("v", v))):
        held = values
        if problem.formats.scaled:
            scales[name] = scale = _descale(problem, values, turn)
            each = scale.double().repeat_interleave(values.shape[1] // problem.kv_heads, dim=1)
            held = values / each[..., None, None]
        tensors[name] = round_to(held, fmt)
        if exact and not torch.equal(tensors[name], held):
            raise ProblemError(f"{name} of this probe are not numbers of {fmt.name}: {problem}.")
    return Inputs(
        problem=problem,
        **{name: values.to(fmt.torch_dtype) for name, values in tensors.items()},
        descale=Descale(**scales) if scales else None,
    )


def _descale(problem: Problem, values: torch.Tensor, turn: int) -> torch.Tensor:
    """fp32 powers of two ``(batch, kv_heads)``, unlike those of the neighbours."""
    top = math.floor(math.log2(problem.formats.storage.max))
    largest = values.reshape(problem.batch, problem.kv_heads, -1).abs().amax(-1)
    _, exponent = torch.frexp(torch.where(largest == 0, 1.0, largest))
    pair = torch.arange(problem.batch)[:, None] + torch.arange(problem.kv_heads)
    return torch.pow(2.0, (exponent - top + (pair + turn) % _KINDS_of_storing).float())


def _power_of_two(value: torch.Tensor) -> float:
    return 2.0 ** math.floor(math.log2(float(value)))
