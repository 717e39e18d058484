"""Building blocks of probes: boundary keys, codes of the key index, logits, exact storage."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch

from attncheck.core.errors import ProblemError
from attncheck.core.formats import round_to
from attncheck.core.mod_spec import Spec
from attncheck.inputs.input_tensors import Descale, Inputs
from attncheck.inputs.problem import Problem
from attncheck.probes.margins import is_countable

# ------------------------------------------------------------------ keys where kernels go wrong

_TILES = (64, 128, 32, 16, 256)  # Widths of tiles and pages, the most common first.


def boundary_keys(problem: Problem) -> list[int]:
    """Return all keys, those at boundaries first.

    In this order: the first and the last key; the key before and the key at each edge of the mask
    (end of the prefix, of a document, of padding, a window's width, the diagonals of the first and
    the last row); the keys at edges of tiles; the rest by bisection: the middle, the quarters, the
    eighths, and so on.
    """
    kv = problem.kv
    edges = [0, kv, *_mask_edges(problem.mask, problem)]
    # The end of the first tile and the start of the last one, for each width.
    edges += [side for width in _TILES for side in (width, (kv - 1) // width * width)]
    edges += [multiple for width in _TILES for multiple in range(width, kv, width)]
    near = [key for edge in edges for key in (edge - 1, edge) if 0 <= key < kv]
    bits = (kv - 1).bit_length()
    by_halves = (int(f"{n:0{bits}b}"[::-1], 2) if bits else 0 for n in range(1 << bits))
    return list(dict.fromkeys([*near, *(key for key in by_halves if key < kv)]))


def _mask_edges(mask: Spec, problem: Problem) -> Iterator[int]:
    for part in mask.walk():
        numbers = part.values
        if part.name in {"document", "padding", "bottom_right"}:
            lengths = cast("tuple[int, ...]", numbers["lengths"])
            ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
            yield from ends if part.name == "document" else lengths
            # The diagonal of the first row, aligned at the end of each sequence.
            if part.name == "bottom_right":
                yield from (length - problem.query + 1 for length in lengths)
        elif part.name == "prefix_lm":
            yield cast("int", numbers["prefix"])
        elif part.name == "sliding_window":
            window = cast("int", numbers["window"])
            yield from (window, problem.query - window)
        if part.name in {"causal", "sliding_window", "prefix_lm"}:
            yield from (1, problem.query)
        elif part.name == "causal_bottom_right":
            yield problem.kv - problem.query + 1


# ------------------------------------------------------------------ differences between heads

_FACTOR = 4
"""Ratio of the values of two key heads: a row that reads the wrong head is off by 3/4 or more."""

_AMPLITUDES = 5  # Number of different amplitudes: 1 to 4**4 = 256, which every format can store.


def _number_pairs(problem: Problem, per_batch: int) -> torch.Tensor:
    """Return ``per_batch`` · batch + key head, int64 ``(batch, kv_heads)``."""
    batch = torch.arange(problem.batch)[:, None]
    return batch * per_batch + torch.arange(problem.kv_heads)


def amplitudes(problem: Problem) -> torch.Tensor:
    """Return the factors of V, powers of four, float64 ``(batch, kv_heads)``.

    Neighbours in heads, in batch or in both have different factors.
    """
    kinds = _number_pairs(problem, 2) % _AMPLITUDES
    return torch.pow(torch.tensor(float(_FACTOR), dtype=torch.float64), kinds)


def column_shifts(problem: Problem) -> torch.Tensor:
    """Return by how many columns the code of V is rotated, int64 ``(batch, kv_heads)``."""
    return _number_pairs(problem, problem.kv_heads)


# ------------------------------------------------------------------ codes of the key index


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Code:
    """Columns of V that hold a 1 for each key, so that sums count keys."""

    # ``direct`` (a column for each key), ``two digits``, ``digit 0``, ``digit 1``, ``marked`` or
    # ``columns``.
    name: str
    base: int  # columns of a digit
    # int64 ``(digits, kv)``: a key's column, counted from the digit's first column; −1 if the key
    # has none.
    digits: torch.Tensor


def count_rounds(problem: Problem) -> int:
    """Return how many rounds ``key_code`` needs to identify every key."""
    columns, kv = problem.value_dim, problem.kv
    if kv <= columns or _has_room(problem, columns // 2):
        return 1
    return 2 if _has_room(problem, columns) else 1 + -(-kv // columns)


def key_code(problem: Problem, number: int = 0) -> Code:
    """Return round ``number`` of the first of these codes that fits the Problem.

    * kv ≤ value_dim: a column for each key.
    * Two digits of base B = ⌊value_dim / 2⌋, side by side: j mod B and (j + ⌊j/B⌋) mod B, for
      kv ≤ B². Keys with equal first digits have different second ones, and no column of either
      digit has more than ⌈kv/B⌉ keys.
    * The same digits with B = value_dim, one round for each digit.
    * Marked keys: each round marks value_dim keys, and all others are 0. The first round marks keys
      at boundaries (``boundary_keys``), later rounds all keys in order.

    Digits are used only if rounding cannot blur counts up to ⌈kv/B⌉ (``margins.is_countable``).
    """
    columns, kv = problem.value_dim, problem.kv
    key = torch.arange(kv)
    if kv <= columns:
        return Code(name="direct", base=columns, digits=key[None])
    if _has_room(problem, columns // 2):
        return Code(name="two digits", base=columns // 2, digits=_digits(key, columns // 2))
    if _has_room(problem, columns):
        digits = _digits(key, columns)[number][None]
        return Code(name=f"digit {number}", base=columns, digits=digits)
    start = (number - 1) * columns
    keys = range(start, min(start + columns, kv)) if number else boundary_keys(problem)[:columns]
    marked = torch.full((kv,), -1)
    marked[torch.tensor(list(keys))] = torch.arange(len(keys))
    return Code(name="marked", base=columns, digits=marked[None])


def _has_room(problem: Problem, base: int) -> bool:
    if base < 2 or problem.kv > base * base:
        return False
    most = torch.tensor(float(-(-problem.kv // base)), dtype=torch.float64)
    any_number, zero = torch.tensor([3.0, 0.0], dtype=torch.float64)
    return bool(is_countable(problem, most, any_number, zero))


def _digits(key: torch.Tensor, base: int) -> torch.Tensor:
    return torch.stack([key % base, (key + key // base) % base])


def code_by_column(problem: Problem) -> Code:
    """Return a code of one round for any number of keys: j mod value_dim."""
    digit = torch.arange(problem.kv) % problem.value_dim
    return Code(name="columns", base=problem.value_dim, digits=digit[None])


def code_by_parity(problem: Problem) -> Code:
    """Return the code by column, with even and odd keys in different columns.

    If value_dim is 1, even keys have no column.
    """
    base, key = problem.value_dim // 2 * 2, torch.arange(problem.kv)
    digit = key % base if base else key % 2 - 1
    return Code(name="columns", base=base or 1, digits=digit[None])


def code_values(problem: Problem, code: Code) -> torch.Tensor:
    """Return V, float64 ``(batch, kv_heads, kv, value_dim)``: 0, or the head's amplitude.

    The columns of a digit are rotated by batch and key head.
    """
    shape = (problem.batch, problem.kv_heads, problem.kv, problem.value_dim)
    v = torch.zeros(shape, dtype=torch.float64)
    shift = column_shifts(problem)[..., None]
    for number, digit in enumerate(code.digits):
        column = (digit + shift) % code.base + number * code.base
        one = (digit >= 0).to(v.dtype).expand(shape[:3])
        v.scatter_add_(-1, column[..., None], one[..., None])
    return v * amplitudes(problem)[..., None, None]


# ------------------------------------------------------------------ logits

_SIGNIFICANDS = (1.0, 1.25, 1.5, 1.75)  # All significands of three bits, as e5m2 has.


def logit_factors(problem: Problem, logit: float) -> tuple[float, float]:
    """Return (x, y) with the least product of three significant bits so that scale·x·y ≥ ``logit``.

    x is a power of two and y has three significant bits; each has half of the exponent.
    """
    size = logit / problem.scale
    exponent = math.frexp(size)[1] - 1
    larger = (math.ldexp(s, exponent) for s in (*_SIGNIFICANDS, 2.0))
    product = next(x for x in larger if x >= size)
    significand, exponent = math.frexp(product)
    x = math.ldexp(1.0, exponent // 2)
    return x, math.ldexp(significand, exponent - exponent // 2)


def logit_out_of_range(problem: Problem, logit: float, factor: float = 1.0) -> str | None:
    """Return why storage cannot hold the factors of ``logit``, times ``factor``; None if it can."""
    fmt = problem.formats.storage
    # With the descales of fp8 the range is fp32's.
    top, low = (2.0**60, 2.0**-60) if fmt.saturates else (fmt.max, 2.0**fmt.min_exponent)
    if all(2 * low < x * factor <= top / 2 for x in logit_factors(problem, logit)):
        return None
    return f"scale={problem.scale:g} asks for q and k beyond {fmt.name}"


def zero_query_and_keys(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float64 zeros in q's shape, ``(batch, heads, query, head_dim)``, and in that of k."""
    q = (problem.batch, problem.heads, problem.query, problem.head_dim)
    k = (problem.batch, problem.kv_heads, problem.kv, problem.head_dim)
    return torch.zeros(q, dtype=torch.float64), torch.zeros(k, dtype=torch.float64)


def fill_orthogonal_columns(q: torch.Tensor, k: torch.Tensor, first: int) -> None:
    """Fill columns from ``first`` on, alternately in q and in k, without changing q·k.

    q gets the even columns and k the odd ones, with signs and sizes that change along the rows, so
    that a kernel which reads a wrong column or row changes q·k. Sizes are those of the numbers that
    the tensors hold already.
    """
    for parity, tensor in enumerate((q, k)):
        columns = torch.arange(tensor.shape[-1])
        here = (columns >= first) & (columns % 2 == (first + parity) % 2)
        largest = float(tensor.abs().amax()) or 1.0
        size = 2.0 ** math.floor(math.log2(largest))
        rows = torch.arange(tensor.shape[2])[:, None] + columns
        pattern = torch.where(rows % 3 == 0, -1.0, 1.0) * torch.where(rows % 2 == 0, 1.0, 0.5)
        tensor.add_(torch.where(here, size * pattern.to(tensor.dtype), 0.0))


# ------------------------------------------------------------------ storage

_DESCALES = 4
"""Number of different descales: they bring the largest number to fp8's largest power of two, or to
2^-1, 2^-2 or 2^-3 of it."""


def store_inputs(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, exact: bool = True
) -> Inputs:
    """Return Inputs on the CPU that store float64 ``q``, ``k`` and ``v``.

    In fp8 each batch and key head has its own descales, powers of two.

    Args:
        q: ``(batch, heads, query, head_dim)``.
        k: ``(batch, kv_heads, kv, head_dim)``.
        v: ``(batch, kv_heads, kv, value_dim)``.
        exact: Whether to reject values that the format cannot hold; else they are rounded once.

    Raises:
        ProblemError: for values that the format cannot hold, if ``exact``.
    """
    fmt = problem.formats.storage
    tensors, scales = {}, {}
    for turn, (name, values) in enumerate((("q", q), ("k", k), ("v", v))):
        stored = values
        if problem.formats.scaled:
            scales[name] = scale = _descale(problem, values, turn)
            each = scale.double().repeat_interleave(values.shape[1] // problem.kv_heads, dim=1)
            stored = values / each[..., None, None]
        rounded = round_to(stored, fmt)
        if exact and not torch.equal(rounded, stored):
            raise ProblemError(f"{name} of this probe are not numbers of {fmt.name}: {problem}.")
        tensors[name] = rounded.to(fmt.torch_dtype)
    return Inputs(problem=problem, **tensors, descale=Descale(**scales) if scales else None)


def _descale(problem: Problem, values: torch.Tensor, turn: int) -> torch.Tensor:
    """Return powers of two, fp32 ``(batch, kv_heads)``, that differ between neighbours."""
    top = math.floor(math.log2(problem.formats.storage.max))
    largest = values.reshape(problem.batch, problem.kv_heads, -1).abs().amax(-1)
    _, exponent = torch.frexp(torch.where(largest == 0, 1.0, largest))
    kind = (_number_pairs(problem, 1) + turn) % _DESCALES
    return torch.pow(2.0, (exponent - top + kind).float())
