"""The library's score mods: FlexAttention callables, and the table that builds each from a Spec.

The result has the dtype of the incoming score: captured fp32 tensors are promoted to it before
any arithmetic, so that the float64 oracle computes in float64 (a product of an fp32 tensor with
an integer tensor would be rounded to fp32). Importing this module does not import torch.
"""

# ruff: noqa: ARG001, ARG005  (every score mod has FlexAttention's whole signature, whatever it
# reads)

from __future__ import annotations

import decimal
import math
from functools import lru_cache
from typing import TYPE_CHECKING

from attncheck.core import mod_spec as check
from attncheck.core.errors import ProblemError
from attncheck.core.formats import fp32
from attncheck.core.mod_spec import ANY_SEED, Dimensions, Entry, Values
from attncheck.mods import formula, masks

if TYPE_CHECKING:
    from torch import Tensor

    from attncheck.mods.signatures import MaskMod, ScoreMod


def none(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Return the score itself."""
    return score


def alibi(slopes: Tensor) -> ScoreMod:
    """Add slopes[h] · (kv_idx − q_idx) (Press et al., "Train Short, Test Long", 2022, eq. 1).

    Args:
        slopes: One number a query head, fp32 (heads,).
    """
    return lambda score, b, h, q_idx, kv_idx: score + slopes[h].to(score.dtype) * (kv_idx - q_idx)


def alibi_by_sequence(slopes: Tensor) -> ScoreMod:
    """Add slopes[b, h] · (kv_idx − q_idx), the batch axis that flash-attn's slopes may have.

    Args:
        slopes: fp32 (batch, heads).
    """
    return lambda score, b, h, q_idx, kv_idx: (
        score + slopes[b, h].to(score.dtype) * (kv_idx - q_idx)
    )


def bias(table: Tensor) -> ScoreMod:
    """Add table[b, h, q_idx, kv_idx], as the float ``attn_mask`` of torch's SDPA.

    Args:
        table: fp32 (batch or 1, heads or 1, query, kv).
    """
    read = table_reader(table)
    return lambda score, b, h, q_idx, kv_idx: score + read(b, h, q_idx, kv_idx).to(score.dtype)


def softcap(cap: float) -> ScoreMod:
    """Bend scores into (−cap, cap): cap · tanh(score / cap) (Gemma 2 report, 2024, section 2)."""
    return lambda score, b, h, q_idx, kv_idx: cap * (score / cap).tanh()


def relative_bias(table: Tensor) -> ScoreMod:
    """Add table[h, d + distance], d = kv_idx − q_idx clamped to ±distance (the bias of T5, 2020).

    Args:
        table: fp32 (heads, 2·distance + 1).
    """
    distance = table.shape[1] // 2

    def biased(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        # Clamped, as T5 does: all keys farther away share the outermost numbers.
        column = (kv_idx - q_idx).clamp(-distance, distance) + distance
        return score + table[h, column].to(score.dtype)

    return biased


def temperature(temperature: float) -> ScoreMod:
    """Divide every score by ``temperature``."""
    return lambda score, b, h, q_idx, kv_idx: score / temperature


def table_reader(table: Tensor) -> MaskMod:
    """Return a mod that reads ``table``, ``(batch or 1, heads or 1, query or 1, kv or 1)``.

    Axes of size 1 are not indexed. A table of one number keeps its last axis, since captured
    tensors must be read by an index.
    """
    axes = [axis for axis, size in enumerate(table.shape) if size > 1] or [3]
    squeezed = table.reshape([table.shape[axis] for axis in axes])
    one = math.prod(table.shape) == 1

    def read(*indices: Tensor) -> Tensor:
        used = tuple(indices[axis] for axis in axes)
        return squeezed[(used[0] * 0,) if one else used]

    return read


# --- compositions: each part is any callable of a score mod's signature ------------------------


def chain_scores(first: ScoreMod, *rest: ScoreMod) -> ScoreMod:
    """Apply the parts from left to right: ``chain_scores(f, g)`` is g(f(score))."""

    def chained(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        for part in (first, *rest):
            score = part(score, b, h, q_idx, kv_idx)
        return score

    return chained


def offset_score(part: ScoreMod, *, rows: int) -> ScoreMod:
    """Row i gets what row i + ``rows`` gets from ``part``."""
    return lambda score, b, h, q_idx, kv_idx: part(score, b, h, q_idx + rows, kv_idx)


# --- the library ------------------------------------------------------------------------------

_LARGEST_DISTANCE = 2**20
_SLOPE_PERIOD = 8  # Period of ``sequence_slopes`` in sequences.
_MOST_NUMBERS = check.INT32_LARGEST  # Kernels compute offsets into a table in 32 bits.


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return 2^(−8(h+1)/heads) for each head, as fp32 numbers (Press et al. 2022).

    Computed with ``decimal``, so that the bits are the same on every machine.
    """
    # Far more digits than fp32 has, so that only the last rounding matters.
    context = decimal.Context(prec=50)
    exponents = [context.divide(decimal.Decimal(-8 * (h + 1)), heads) for h in range(heads)]
    return tuple(fp32(float(context.power(2, exponent))) for exponent in exponents)


def _alibi(_values: Values, dims: Dimensions, device: str) -> ScoreMod:
    import torch

    slopes = torch.tensor(alibi_slopes(dims.heads), dtype=torch.float32, device=device)
    return alibi(slopes)


def sequence_slopes(batch: int, heads: int) -> list[list[float]]:
    """Return ``alibi_slopes`` of each sequence: each has half the slopes of the one before it.

    Every eighth sequence starts again with the first one's, so that no slope is subnormal.
    """
    usual = alibi_slopes(heads)
    return [[slope * 2.0 ** -(b % _SLOPE_PERIOD) for slope in usual] for b in range(batch)]


def _alibi_by_sequence(_values: Values, dims: Dimensions, device: str) -> ScoreMod:
    import torch

    slopes = sequence_slopes(dims.batch, dims.heads)
    return alibi_by_sequence(torch.tensor(slopes, dtype=torch.float32, device=device))


def _relative_bias(values: Values, dims: Dimensions, device: str) -> ScoreMod:
    import numpy as np
    import torch

    from attncheck.core.draws import Draws

    shape = (dims.heads, 2 * values["distance"] + 1)
    table = Draws(values["seed"]).normal("relative_bias", shape)
    return relative_bias(torch.from_numpy(table.astype(np.float32)).to(device))


def _bias_shape(values: Values, dims: Dimensions) -> tuple[int, int, int, int]:
    batch = dims.batch if values["per_batch"] else 1
    return batch, dims.heads if values["per_head"] else 1, dims.query, dims.kv


def _check_table_size(name: str, values: Values, dims: Dimensions) -> None:
    shape = _bias_shape(values, dims)
    if math.prod(shape) > _MOST_NUMBERS:
        raise ProblemError(
            f"{name} of shape {shape} has {math.prod(shape)} numbers: at most {_MOST_NUMBERS}."
        )


def _bias(values: Values, dims: Dimensions, device: str) -> ScoreMod:
    shape = _bias_shape(values, dims)
    is_small = math.prod(shape) <= _MOST_CACHED
    table = (_cached_bias if is_small else _draw_bias)(values["seed"], shape)
    return bias(table.to(device))


def _draw_bias(seed: int, shape: tuple[int, int, int, int]) -> Tensor:
    """Draw standard normal fp32 numbers; element (b, h, i, j) does not depend on the shape.

    A part of a Problem thus has a part of its bias.
    """
    import numpy as np
    import torch

    from attncheck.core.draws import Draws

    draws, table = Draws(seed), np.empty(shape, np.float32)
    for b, h, i in np.ndindex(shape[:3]):
        table[b, h, i] = draws.normal(f"bias/{b}/{h}/{i}", shape[3:])
    return torch.from_numpy(table)


_MOST_CACHED = 2**24  # Numbers, 64 MiB; cached since a mod is built several times per Case.
_cached_bias = lru_cache(maxsize=4)(_draw_bias)


SCORES: dict[str, Entry[ScoreMod]] = {
    "none": Entry(summary="the score itself", build=check.from_arguments(lambda: none)),
    "alibi": Entry(summary="adds 2^(−8(h+1)/heads) · (j − i)", build=_alibi),
    "alibi_by_sequence": Entry(
        summary="adds 2^(−8(h+1)/heads − b) · (j − i), b counted to 8: slopes of each sequence",
        build=_alibi_by_sequence,
    ),
    "softcap": Entry(
        summary="cap · tanh(score / cap)",
        arguments={"cap": check.positive_number},
        build=check.from_arguments(lambda cap: softcap(fp32(cap))),
        additive=False,
    ),
    "relative_bias": Entry(
        summary="adds a learned number for each head and j − i clamped to ±distance",
        arguments={"distance": check.whole_number(0, _LARGEST_DISTANCE), "seed": ANY_SEED},
        build=_relative_bias,
    ),
    "bias": Entry(
        summary="adds a drawn number for each row and key; 1 for other ones in each batch or head",
        arguments={
            "seed": ANY_SEED,
            "per_batch": check.whole_number(0, 1),
            "per_head": check.whole_number(0, 1),
        },
        together=_check_table_size,
        build=_bias,
    ),
    "temperature": Entry(
        summary="divides every score by `temperature`",
        arguments={"temperature": check.positive_number},
        build=lambda values, _dims, _device: temperature(fp32(values["temperature"])),
        additive=False,
    ),
    "expression": Entry(
        summary="what `text` gives, as where(q_idx % 2 == 0, score, score * 0.5)",
        arguments={"text": check.formula_text(formula.score_formula_code)},
        build=lambda values, dims, _device: formula.formula_score(values["text"], dims),
        additive=False,  # even if the text adds something to the score
    ),
    "chain": Entry(summary="applies its parts from left to right", compose=chain_scores),
    "offset": Entry(
        summary="its part as row i + `rows` has it",
        compose=offset_score,
        arguments={"rows": masks.later_rows},
        within=masks.shifted_dimensions,
        most_parts=1,
    ),
}
