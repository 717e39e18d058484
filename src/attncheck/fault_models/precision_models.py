"""Fault models of the online softmax, of precision and of fp8: mostly steps of the recurrence."""

from __future__ import annotations

import dataclasses
import math
import operator
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from attncheck.core.formats import FORMATS
from attncheck.core.outputs import Outputs
from attncheck.fault_models.exact_attention import FP32_LOWEST, fp32_exp, weighted_sum
from attncheck.fault_models.fault_model import (
    Form,
    ModelTable,
    Prediction,
    has_mask,
    is_attention,
    is_scaled,
)
from attncheck.fault_models.softmax_models import SENTINELS
from attncheck.fault_models.steps import (
    LOG2E,
    Steps,
    round_to_format,
    rounded_log2e,
)
from attncheck.fault_models.tile_models import padded_keys, tile_visibility

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from attncheck.core.tensor_names import TensorName
    from attncheck.fault_models.exact_attention import ExactAttention
    from attncheck.inputs.problem import Problem

RECURRENCE = ModelTable("rescaling")  # faults in the recurrence of the online softmax
FP8 = ModelTable("factor")  # faults in descales, and in the rounding of P to fp8
MODELS = ModelTable("precision")  # faults of rounding to too few bits
_SUMS = ("out", "sum")
_FEW_BITS = -120 * math.log(2.0)  # logarithm of a row sum that may be of subnormal weights
_LEAST_FACTOR = 2.0**-10  # least factor of an output that counts as a bias; less is missing

RECURRENCE.add(
    "alpha-not-on-out",
    "the output so far is not rescaled when the running maximum rises",
    steps=Steps(rescales_out=False),
)
RECURRENCE.add(
    "alpha-not-on-sum",
    "the row sum so far is not rescaled when the running maximum rises",
    steps=Steps(rescales_sum=False),
)
RECURRENCE.add(
    "alpha-not-at-all",
    "neither the output nor the row sum so far is rescaled when the running maximum rises",
    steps=Steps(rescales_sum=False, rescales_out=False),
)


@RECURRENCE.model(steps=(Steps(rescale_exponent=LOG2E), Steps(rescale_exponent=1.0 / LOG2E)))
def alpha_of_another_base(call: ExactAttention) -> Iterator[Form]:
    """What was summed so far is rescaled by a power of another base than the weights are of."""
    # The scale may be in the weights and not in the rescaling factor, or the reverse.
    for exponent in (call.scale, 1 / call.scale):
        yield Steps(rescale_exponent=exponent)


RECURRENCE.add(
    "alpha-not-of-the-difference",
    "what was summed so far is rescaled by a power of the old maximum alone, or of the sum of old "
    "and new: not of their difference",
    steps=(Steps(rescale_maximum=0.0), Steps(rescale_maximum=-1.0)),
)


def _to_the_power(power: float) -> Steps:
    """Return Steps whose weights, not what rescales them, are raised to a power."""

    def raised(p: Tensor) -> Tensor:
        return p**power

    return Steps(weights=raised, summed_weights=raised)


@RECURRENCE.model(steps=(_to_the_power(1.0 / LOG2E), _to_the_power(LOG2E)))
def weights_of_another_base(_call: ExactAttention) -> Iterator[Form]:
    """Weights are powers of another base than what rescales them, and than LSE takes them for."""
    # The factor for exp2 may be rounded.
    for name, factor in rounded_log2e().items():
        yield _to_the_power(factor), {"log2 e": name}


RECURRENCE.add(
    "last-tile-without-maximum",
    "the weights of the last tile are not relative to the maximum",
    steps=Steps(maximum_in_tiles="all but the last"),
)
RECURRENCE.add(
    "maximum-not-subtracted",
    "weights are not relative to the maximum, in LSE and where they are rescaled they are taken "
    "for such",
    # Or the rescaling factor lacks the new maximum, too.
    steps=(
        Steps(maximum_in_tiles="none"),
        Steps(maximum_in_tiles="none", rescale_maximum=0.0),
    ),
)


@RECURRENCE.model(steps=(Steps(first_maximum=0.0), Steps(zero_maximum_when_empty=True)))
def maximum_from_zero(call: ExactAttention) -> Iterator[Form]:
    """The running maximum starts at 0, or another number that is finite: rows whose scores are all
    far below lose their weights.
    """
    lowest = float(call.parts.maximum.min())
    for first in SENTINELS:
        if first < lowest:  # Every row's maximum rises above it.
            yield call.exact, {"first": f"{first:g}"}
        else:
            for outputs, parameters in call.predict(Steps(first_maximum=first)):
                yield outputs, {**parameters, "first": f"{first:g}"}


@RECURRENCE.model(applies=has_mask())
def maximum_of_hidden_keys(call: ExactAttention) -> Iterator[Form]:
    """The maximum is that of hidden keys, too: weights far below it are 0."""
    for size in call.key_tiles:
        tops = {"all": [call.s]}
        tops["those of visited tiles"] = [
            torch.where(tile_visibility(call, rows, size)[0], call.s, -math.inf)
            for rows, keys in call.tiles
            if keys == size
        ]
        for of, each in tops.items():
            for maxima_of in each:
                yield from _with_maxima(call, size, maxima_of, of)


@RECURRENCE.model()
def maximum_of_some_scores(call: ExactAttention) -> Iterator[Form]:
    """The maximum is not that of all that counts, keys or a sink: weights far above it are
    infinite.
    """
    for size in call.key_tiles:
        place, half = call.j % size, size // 2
        for of, some in {
            "even keys": place % 2 == 0,
            "odd keys": place % 2 == 1,
            "the first half of each tile": place < half,
            "the last half of each tile": place >= half,
        }.items():
            yield from _with_maxima(call, size, torch.where(some, call.z, -math.inf), of)
    outputs = call.exact
    if call.sink is not None:
        keys = call.softmax(call.z, sink=None)
        base = torch.where(keys.maximum == -math.inf, call.sink, keys.maximum)
        base = torch.where(base == -math.inf, 0.0, base)
        total = keys.total + fp32_exp(call.sink - base)
        outputs = dataclasses.replace(keys, maximum=base, total=total).outputs
    yield outputs, {"of": "keys alone"}


def _with_maxima(
    call: ExactAttention, size: int, maxima_of: Tensor, of: str
) -> Iterator[Prediction]:
    """Yield outputs whose running maximum is of other scores, in tiles of ``size`` keys."""
    # Weights far below 1 lose bits before they are 0, and those of fp16 overflow at e¹¹.
    formats = call.problem.formats
    steps = Steps(
        weights=None if formats.scaled else round_to_format(formats.weights.name),
        summed_weights=round_to_format("fp32"),
    )
    # How few bits are left of weights near fp32's least depends on the last bit of an exponent.
    log_total = call.parts.lse - maxima_of.amax(-1)
    few_bits = (log_total > FP32_LOWEST) & (log_total < _FEW_BITS)
    ties: dict[TensorName, Tensor]
    ties = {"out": 2 * few_bits[..., None] * call.v.abs().amax(), "lse": few_bits * -FP32_LOWEST}
    for outputs in call.recurrences(size, steps, maxima_of=maxima_of):
        yield Prediction(outputs=outputs, parameters={"tile": size, "of": of}, ties=ties)


@RECURRENCE.model()
def weights_of_another_sign(call: ExactAttention) -> Iterator[Form]:
    """Weights are powers of score plus maximum, or of maximum less score: not of score less
    maximum.
    """
    for of, exponent in {
        "plus": operator.add,
        "reversed": lambda part, shift: torch.where(part == -math.inf, math.inf, shift - part),
    }.items():
        for outputs, parameters in call.predict(Steps(exponent=exponent)):
            # Hidden keys and padding have infinite weights then.
            padded = of == "reversed" and padded_keys(call, parameters["tile"])
            every = torch.ones_like(call.parts.dead)
            spoilt = call.with_out(every, math.nan, lse=math.inf)
            yield spoilt if padded else outputs, {**parameters, "of": of}


@RECURRENCE.model()
def sum_of_the_largest(_call: ExactAttention) -> Iterator[Form]:
    """Each tile adds its largest weight to the row sum, not the sum of its weights."""
    yield Steps(summed_weights=lambda p: p.amax(-1, keepdim=True))


@RECURRENCE.model()
def alpha_misapplied(call: ExactAttention) -> Iterator[Form]:
    """What was summed so far is not multiplied by what rescales it: it is divided by it, or that
    stands in its place or is added, or a tile is taken off and not added.
    """
    slips = {
        "divided": operator.truediv,
        "in its place": lambda sums, alpha: alpha + 0 * sums,
        "added": operator.add,
    }
    every: dict[str, dict[str, Any]]
    every = {f"{of} {name}": {f"of_{of}": slip} for of in _SUMS for name, slip in slips.items()}
    every |= {f"{of} taken off": {f"sign_of_{of}": -1.0} for of in _SUMS}
    for name, changes in every.items():
        for outputs, parameters in call.predict(Steps(**changes)):
            yield outputs, {**parameters, "of": name}


@RECURRENCE.model()
def earlier_tiles_lost(call: ExactAttention) -> Iterator[Form]:
    """The output, the row sum or both are those of the last tile alone: what was summed before is
    thrown away.
    """
    parts = call.parts
    for size in call.key_tiles:
        tile = call.j // size
        # The last tile of each row, or of each block of rows, which share a loop.
        some = [(call.seen, {"tile": size})]
        some += [
            (tile_visibility(call, rows, size)[0], {"tile": size, "rows": rows})
            for rows, keys in call.tilings
            if keys == size
        ]
        for visited, parameters in some:
            last = tile == torch.where(visited, tile, -1).amax(-1, keepdim=True)
            weights = torch.where(last, parts.weights, 0.0)
            values, total = weights @ call.v, weights.sum(-1)
            for of, one in {
                "out": dataclasses.replace(parts, values=values),
                "sum": dataclasses.replace(parts, total=total),
                "both": dataclasses.replace(parts, values=values, total=total),
            }.items():
                yield one.outputs, {"of": of, **parameters}
    lost = {"out": Steps(of_out=_discard), "sum": Steps(of_sum=_discard)}
    for of, steps in {**lost, "both": Steps(of_out=_discard, of_sum=_discard)}.items():
        for outputs, parameters in call.predict(steps):
            # Each split has its own last tile.
            if "splits" in parameters:
                yield outputs, {"of": of, **parameters}


def _discard(sums: Tensor, _alpha: Tensor) -> Tensor:
    return torch.zeros_like(sums)


def _without_descales(*names: str) -> Steps:
    return Steps(descale=lambda name, own: torch.ones_like(own) if name in names else own)


for _name in "qkv":
    FP8.add(
        f"descale-{_name}-missing",
        f"the descale of {_name} is ignored",
        applies=is_scaled,
        steps=_without_descales(_name),
    )


@FP8.model(applies=is_scaled, order=1)
def descales_missing(_call: ExactAttention) -> Iterator[Form]:
    """Several descales are ignored."""
    for names in ("qk", "qkv", "kv", "qv"):
        yield _without_descales(*names), {"of": ", ".join(names)}


# Slices where both indices are missing, that of the batch, or that of the head.
_FIRST = {"all": (slice(1), slice(1)), "batch": (slice(1), slice(None))}
_FIRST["head"] = (slice(None), slice(1))


def _first_descales(names: str, where: str) -> Steps:
    """Return Steps where the first descale along ``where`` replaces all others of some tensors."""

    def first(name: str, own: Tensor) -> Tensor:
        return own[_FIRST[where]].expand_as(own) if name in names else own

    return Steps(descale=first)


@FP8.model(
    applies=lambda problem: is_scaled(problem) and problem.batch * problem.kv_heads > 1,
    steps=_first_descales("k", "all"),
    family="mapping",
)
def descale_first_head(_call: ExactAttention) -> Iterator[Form]:
    """One head's descale is used for all: its index is missing."""
    for names, where in product(("qkv", "qk", "q", "k", "v"), _FIRST):
        yield _first_descales(names, where), {"of": ", ".join(names), "first": where}


FP8.add(
    "weights-underflow",
    "small weights are lost in fp8: they are not multiplied by anything before they are rounded",
    applies=is_scaled,
    steps=Steps(weights_scale=1.0),
    family="precision",
)


@FP8.model(applies=is_scaled, family="precision")
def weights_saturated(call: ExactAttention) -> Iterator[Form]:
    """Large weights are cut off in fp8: they are multiplied by too much before they are rounded."""
    for size, bits in product(call.key_tiles, (9, 10, 11, 12)):
        yield call.online(size, Steps(weights_scale=2.0**bits)), {"tile": size, "bits": bits}


@FP8.model(applies=is_scaled)
def weights_scale_left(call: ExactAttention) -> Iterator[Form]:
    """The factor of P is not taken off the output."""
    # If it is multiplied instead of divided, it is there twice.
    scale = call.problem.formats.weights_scale
    for factor in (scale, 1.0 / scale):
        out = (call.exact.out * factor).clamp(torch.finfo(torch.float32).min)
        yield Outputs(out, call.parts.lse)


@MODELS.model(order=1)
def weights_rounded(_call: ExactAttention) -> Iterator[Form]:
    """The weights are rounded to too few bits before they multiply the values."""
    for name in ("fp16", "bf16", "e4m3", "e5m2"):
        yield Steps(weights=round_to_format(name)), {"format": name}
    # Also before they are summed, or only there.
    for name in ("fp16", "bf16"):
        rounded = round_to_format(name)
        yield Steps(weights=rounded, summed_weights=rounded), {"format": name}
        yield Steps(summed_weights=rounded), {"format": name}


@MODELS.model(steps=Steps(kept_sum=round_to_format("bf16")), order=1)
def sum_rounded(_call: ExactAttention) -> Iterator[Form]:
    """The row sum is kept in too few bits."""
    for name in ("bf16", "fp16"):
        rounded = round_to_format(name)
        yield Steps(kept_sum=rounded), {"format": name}
        yield Steps(summed_weights=rounded, kept_sum=rounded), {"format": name}


@MODELS.model(order=1)
def alpha_rounded(_call: ExactAttention) -> Iterator[Form]:
    """What rescales what was summed so far is rounded to too few bits."""
    for name in ("fp16", "bf16"):
        rescaled = partial(_rescaled_by_rounded, round_to_format(name))
        yield Steps(of_out=rescaled, of_sum=rescaled), {"format": name}
        yield Steps(of_out=rescaled), {"format": name}
        yield Steps(of_sum=rescaled), {"format": name}


def _rescaled_by_rounded(
    rounded: Callable[[Tensor], Tensor], sums: Tensor, alpha: Tensor
) -> Tensor:
    return sums * rounded(alpha)


@MODELS.model(order=1)
def lse_rounded(_call: ExactAttention) -> Iterator[Form]:
    """LSE is rounded to too few bits."""
    for name in ("fp16", "bf16"):
        yield Steps(lse=round_to_format(name)), {"format": name}


@MODELS.model(
    steps=(Steps(kept_out=round_to_format("bf16")), Steps(kept_out=round_to_format("fp16"))),
    order=1,
)
def out_rounded(_call: ExactAttention) -> Iterator[Form]:
    """The output is accumulated in too few bits."""
    for name in ("bf16", "fp16"):
        yield Steps(kept_out=round_to_format(name)), {"format": name}


@MODELS.model(steps=Steps(products=round_to_format("fp16")), order=1)
def scores_rounded(call: ExactAttention) -> Iterator[Form]:
    """Scores are rounded to too few bits before the softmax."""
    for name in ("bf16", "fp16"):
        rounded = round_to_format(name)
        # Rounded before the scale, after it, or after the score mod: any may exceed fp16.
        yield call.attend(x=rounded(call.qk) * call.scale), {"format": name}
        yield call.attend(x=rounded(call.x)), {"format": name}
        yield call.attend(s=rounded(call.s)), {"format": name}


def _is_fp32(problem: Problem) -> bool:
    return is_attention(problem) and problem.dtype == "fp32"


@MODELS.model(applies=_is_fp32, order=1)
def products_tf32(call: ExactAttention) -> Iterator[Form]:
    """Its products read operands in tf32, or in fp16, which has as many bits: `tl.dot` needs
    `input_precision="ieee"`, and torch `torch.set_float32_matmul_precision("highest")`; if tf32 is
    meant, check it by `--dtype tf32` on a GPU.
    """
    # Tensor cores drop bits, and some kernels round to nearest before.
    for rounded in (
        round_to_format("tf32"),
        round_to_format("tf32", nearest=True),
        round_to_format("fp16"),
    ):
        yield from _rounded_products(call, rounded)


@MODELS.model(applies=is_attention, order=1)
def operands_rounded(call: ExactAttention) -> Iterator[Form]:
    """Q, k and v are rounded to too few bits before they are multiplied."""
    for name in ("bf16", "fp16", "e4m3"):
        rounded = round_to_format(name)
        if _is_fp32(call.problem):
            # Of fp16 ``products_tf32`` speaks.
            for one in _rounded_products(call, rounded) if name != "fp16" else ():
                yield dataclasses.replace(one, parameters={"format": name, **one.parameters})
            continue
        q, k, v = (rounded(x) for x in (call.q, call.k, call.v))
        x = q @ k.mT * call.scale
        yield call.attend(x=x, v=v), {"format": name}
        yield call.attend(x=x), {"format": name}
        # q may be multiplied by the scale first, or by what exp2 needs, and rounded with it.
        for unit in (1.0, LOG2E):
            scaled = rounded(call.q * (call.scale * unit)) @ call.k.mT / unit
            yield call.attend(x=scaled), {"format": name, "of": "q · scale"}


def _rounded_products(
    call: ExactAttention, rounded: Callable[[Tensor], Tensor]
) -> Iterator[Prediction]:
    """Yield fp32 attention whose products read rounded operands: q·k, P·v or both.

    Of P·v both operands may be rounded, or v alone.
    """
    v = rounded(call.v)
    for x, tiled, divided in _rounded_scores(call, rounded):
        z = torch.where(call.seen, call.modified(x), -math.inf)
        if x is not call.x:
            yield Prediction(outputs=call.softmax(z, sink=call.sink).outputs)
            yield Prediction(outputs=call.softmax(z, v, sink=call.sink).outputs)
        ties = partial(_between_roundings, rounded, _usual_rounding(call, x))
        for size in call.key_tiles if tiled else ():
            yield Prediction(
                outputs=call.online(size, Steps(weights=rounded), z, v),
                parameters={"tile": size},
                ties={"out": call.online(size, Steps(weights=ties), z, v.abs()).out},
            )
        if divided:
            parts = call.softmax(z, sink=call.sink)
            p = parts.weights / torch.where(parts.dead, 1.0, parts.total)[..., None]
            yield Prediction(
                outputs=Outputs(weighted_sum(rounded(p), v), parts.lse),
                ties={"out": weighted_sum(ties(p), v.abs())},
            )


def _rounded_scores(
    call: ExactAttention, rounded: Callable[[Tensor], Tensor]
) -> Iterator[tuple[Tensor, bool, bool]]:
    """Yield scores of rounded or exact q and k, and how P may be rounded: by tile, or divided."""
    yield rounded(call.q) @ rounded(call.k).mT * call.scale, True, True
    yield call.x, True, True
    # Tiled kernels may multiply q by the scale before it is rounded.
    yield rounded((call.q * call.scale).float().double()) @ rounded(call.k).mT, True, False
    # torch multiplies q and k each by its root, and divides P by the row sum.
    if call.scale > 0:
        root = math.sqrt(call.scale)
        q, k = (rounded((x * root).float().double()) for x in (call.q, call.k))
        yield q @ k.mT, False, True


def _usual_rounding(call: ExactAttention, x: Tensor) -> Tensor:
    """Return the share by which fp32 usually moves a row's weights, ``(batch, heads, rows, 1)``."""
    sums = call.q.abs() @ call.k.abs().mT * abs(call.scale)
    # A sum's roundings add up like a random walk; those of exponents are relative to scores.
    usual = math.sqrt(call.problem.head_dim) * sums + 2 * x.abs() + 4
    largest = torch.where(call.seen, usual, 0.0).amax(-1, keepdim=True)
    return largest * FORMATS["fp32"].unit_roundoff


def _between_roundings(rounded: Callable[[Tensor], Tensor], share: Tensor, p: Tensor) -> Tensor:
    """Return by how much weights differ that are moved by ``share`` either way and rounded."""
    return rounded(p * (1 + share)) - rounded(p * (1 - share))


@MODELS.model(steps=Steps(normaliser=0.997), order=2, family="factor")
def normaliser_biased(call: ExactAttention) -> Iterator[Form]:
    """The output is off by a factor: the reciprocal of the row sum is biased."""

    # A factor of 0 is no bias: missing or unwritten outputs are 0, too.
    def at(share: float) -> Outputs:
        off = 1.0 + share
        ((outputs, _),) = call.predict(Steps(normaliser=off if abs(off) > _LEAST_FACTOR else 1.0))
        return outputs

    yield Prediction(
        outputs=at(-0.01), family=at, start=-0.01, parameter="factor", shown=lambda x: 1.0 + x
    )


@MODELS.model(family="overflow")
def out_overflows(call: ExactAttention) -> Iterator[Form]:
    """The output before it is normalised overflows fp16."""
    # Hardware overflows to infinity, which becomes NaN if it meets a weight of 0.
    largest = FORMATS["fp16"].max
    for steps in (
        Steps(kept_out=round_to_format("fp16")),
        Steps(kept_out=lambda x: torch.where(x.abs() > largest, math.nan, x)),
    ):
        for outputs, parameters in call.predict(steps):
            if not bool(outputs.out.isfinite().all()):
                yield outputs, parameters
