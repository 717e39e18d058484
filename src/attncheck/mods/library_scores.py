"""The score mods of the library: what each takes, and how it is built."""

from __future__ import annotations

import decimal
import math
from functools import lru_cache
from typing import TYPE_CHECKING

from attncheck.errors import ProblemError
from attncheck.formats import fp32
from attncheck.mods import arguments as check
from attncheck.mods import compose, scores, written
from attncheck.mods.entries import ANY_SEED, Entry, Values, real, text, whole

if TYPE_CHECKING:
    from torch import Tensor

    from attncheck.mods.signatures import ScoreMod
    from attncheck.mods.spec import Dimensions

__all__ = ["SCORES", "alibi_slopes"]

_LARGEST_DISTANCE = 2**20
_MOST_NUMBERS = 2**31 - 1  # kernels compute where to read in 32 bits


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """2^(−8(h+1)/heads) for each head, as fp32 numbers (Press et al. 2022, for any head count).

    Through ``decimal``, so that the bits are the same on every machine.
    """
    context = decimal.Context(prec=50)
    exponents = [context.divide(decimal.Decimal(-8 * (h + 1)), heads) for h in range(heads)]
    return tuple(fp32(float(context.power(2, exponent))) for exponent in exponents)


def _alibi(_values: Values, dims: Dimensions, device: str) -> ScoreMod:
    import torch

    slopes = torch.tensor(alibi_slopes(dims.heads), dtype=torch.float32, device=device)
    return scores.alibi(slopes)


def _relative_bias(values: Values, dims: Dimensions, device: str) -> ScoreMod:
    import numpy as np
    import torch

    from attncheck.draws import Draws

    shape = (dims.heads, 2 * whole(values, "distance") + 1)
    table = Draws(whole(values, "seed")).normal("relative_bias", shape)
    return scores.relative_bias(torch.from_numpy(table.astype(np.float32)).to(device))


def _bias_shape(values: Values, dims: Dimensions) -> tuple[int, int, int, int]:
    batch = dims.batch if values["per_batch"] else 1
    return batch, dims.heads if values["per_head"] else 1, dims.query, dims.kv


def _few_enough(name: str, values: Values, dims: Dimensions) -> None:
    shape = _bias_shape(values, dims)
    if math.prod(shape) > _MOST_NUMBERS:
        raise ProblemError(
            f"{name} of shape {shape} has {math.prod(shape)} numbers: at most {_MOST_NUMBERS}."
        )


def _bias(values: Values, dims: Dimensions, device: str) -> ScoreMod:
    shape = _bias_shape(values, dims)
    few = math.prod(shape) <= _KEPT
    return scores.bias(
        (_kept_bias if few else _drawn_bias)(whole(values, "seed"), shape).to(device)
    )


def _drawn_bias(seed: int, shape: tuple[int, int, int, int]) -> Tensor:
    """Standard normal fp32 numbers; element (b, h, i, j) is the same in every shape that has it.

    So that a part of a Problem has a part of its bias.
    """
    import numpy as np
    import torch

    from attncheck.draws import Draws

    draws, table = Draws(seed), np.empty(shape, np.float32)
    for b, h, i in np.ndindex(shape[:3]):
        table[b, h, i] = draws.normal(f"bias/{b}/{h}/{i}", shape[3:])
    return torch.from_numpy(table)


_KEPT = 2**24  # numbers, 64 MiB: a mod is built several times for one Case
_kept_bias = lru_cache(maxsize=4)(_drawn_bias)


SCORES: dict[str, Entry[ScoreMod]] = {
    "none": Entry(
        summary="the score itself",
        build=lambda _values, _dims, _device: scores.none,
    ),
    "alibi": Entry(
        summary="adds 2^(−8(h+1)/heads) · (j − i)",
        build=_alibi,
    ),
    "softcap": Entry(
        summary="cap · tanh(score / cap)",
        arguments={"cap": check.positive},
        build=lambda values, _dims, _device: scores.softcap(real(values, "cap")),
        additive=False,
    ),
    "relative_bias": Entry(
        summary="adds a learned number for each head and j − i clamped to ±distance",
        arguments={"distance": check.whole(0, _LARGEST_DISTANCE), "seed": ANY_SEED},
        build=_relative_bias,
    ),
    "bias": Entry(
        summary="adds a drawn number for each row and key; 1 for other ones in each batch or head",
        arguments={
            "seed": ANY_SEED,
            "per_batch": check.whole(0, 1),
            "per_head": check.whole(0, 1),
        },
        together=_few_enough,
        build=_bias,
    ),
    "temperature": Entry(
        summary="divides every score by `temperature`",
        arguments={"temperature": check.positive},
        build=lambda values, _dims, _device: scores.temperature(real(values, "temperature")),
        additive=False,
    ),
    "expression": Entry(
        summary="what `text` gives, as where(q_idx % 2 == 0, score, score * 0.5)",
        arguments={"text": check.text(written.read_score)},
        build=lambda values, dims, _device: written.score(text(values), dims),
        additive=False,  # or is: only its text says so
    ),
    "chain": Entry(summary="applies its parts from left to right", compose=compose.chain),
    "offset": Entry(
        summary="its part as row i + `rows` has it",
        compose=compose.offset_score,
        arguments={"rows": check.later_rows},
        within=compose.later,
        most_parts=1,
    ),
}
