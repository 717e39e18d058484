"""Fault models of the softmax: sentinels, empty rows, LSE, infinities, sinks, the online recurrence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.core.outputs import Outputs
from attncheck.fault_models.exact_attention import weighted_sum
from attncheck.fault_models.fault_model import Prediction, attention, masked, model
from attncheck.fault_models.tile_models import tile_visibility

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from attncheck.fault_models.exact_attention import ExactAttention
    from attncheck.inputs.problem import Problem

__all__ = ["OnlineSteps", "online_attention"]


_FP32_LOWEST = -150 * math.log(2.0)  # exp below it is 0 in fp32
_FP32_LARGEST = 128 * math.log(2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineSteps:
    """What is done otherwise.

    Attributes:
        alpha_on_out, alpha_on_sum: Whether what was summed before is rescaled.
        exponent: What alpha's exponent is multiplied by.
        raw_last: Whether the last tile's weights are not relative to the maximum.
        first_maximum: Before the first tile.
        guarded: Whether a row that has seen nothing yet keeps a maximum of 0.
        weights: What becomes of a tile's weights before they are multiplied by V.
        sums: What becomes of them before they are summed.
        kept_out, kept_sum: What becomes of the running sums after each tile.
    """

    alpha_on_out: bool = True
    alpha_on_sum: bool = True
    exponent: float = 1.0
    raw_last: bool = False
    first_maximum: float = -math.inf
    guarded: bool = False
    weights: Callable[[Tensor], Tensor] | None = None
    sums: Callable[[Tensor], Tensor] | None = None
    kept_out: Callable[[Tensor], Tensor] | None = None
    kept_sum: Callable[[Tensor], Tensor] | None = None


def online_attention(
    given: ExactAttention, size: int, steps: OnlineSteps, z: Tensor | None = None
) -> Outputs:
    """FlashAttention-2's recurrence in float64 over tiles of ``size`` keys, with ``steps``."""
    z = given.z if z is None else z
    shape = z.shape[:3]
    m = z.new_full(shape, steps.first_maximum)
    total, out = z.new_zeros(shape), z.new_zeros((*shape, given.v.shape[-1]))
    if given.sink is not None:
        m, total = given.sink.expand(shape), torch.ones_like(total)
    tiles = list(range(0, z.shape[-1], size))
    for start in tiles:
        part = z[..., start : start + size]
        new = torch.maximum(m, part.amax(-1))
        if steps.guarded:
            new = torch.where(new == -math.inf, 0.0, new)
        shift = torch.where(new == -math.inf, 0.0, new)
        raw = steps.raw_last and start == tiles[-1]
        p = _exp(part if raw else part - shift[..., None])
        alpha = _exp((m - shift) * steps.exponent)
        total = total * (alpha if steps.alpha_on_sum else 1.0) + (
            p if steps.sums is None else steps.sums(p)
        ).sum(-1)
        p = p if steps.weights is None else steps.weights(p)
        weighted = weighted_sum(p, given.v[:, :, start : start + size])
        out = out * (alpha if steps.alpha_on_out else 1.0 + 0 * alpha)[..., None] + weighted
        out = out if steps.kept_out is None else steps.kept_out(out)
        total = total if steps.kept_sum is None else steps.kept_sum(total)
        m = new
    dead = total == 0
    lse = torch.where(dead, -math.inf, m + total.log())
    return Outputs(
        torch.where(dead[..., None], 0.0, out / torch.where(dead, 1.0, total)[..., None]), lse
    )


def _exp(exponent: Tensor) -> Tensor:
    """With what is 0 or infinite in fp32 such."""
    found = exponent.exp()
    found = torch.where(exponent < _FP32_LOWEST, 0.0, found)
    return torch.where(exponent > _FP32_LARGEST, math.inf, found)


def _each(given: ExactAttention, steps: OnlineSteps) -> Iterator[Prediction]:
    for size in given.key_tiles:
        yield Prediction(outputs=online_attention(given, size, steps), parameters={"tile": size})


@model(
    "alpha-not-on-out",
    "the output so far is not rescaled when the running maximum rises",
    group="softmax",
)
def _out(given: ExactAttention) -> Iterator[Prediction]:
    yield from _each(given, OnlineSteps(alpha_on_out=False))


@model(
    "alpha-not-on-sum",
    "the row sum so far is not rescaled when the running maximum rises",
    group="softmax",
)
def _sum(given: ExactAttention) -> Iterator[Prediction]:
    yield from _each(given, OnlineSteps(alpha_on_sum=False))


@model(
    "alpha-not-at-all",
    "neither the output nor the row sum so far is rescaled when the running maximum rises",
    group="softmax",
)
def _neither(given: ExactAttention) -> Iterator[Prediction]:
    yield from _each(given, OnlineSteps(alpha_on_sum=False, alpha_on_out=False))


@model(
    "alpha-of-another-base",
    "what was summed so far is rescaled by a power of another base than the weights are of",
    group="softmax",
)
def _base(given: ExactAttention) -> Iterator[Prediction]:
    for exponent in (math.log(2.0), 1 / math.log(2.0), given.scale, 1 / given.scale):
        yield from _each(given, OnlineSteps(exponent=exponent))


@model(
    "last-tile-without-maximum",
    "the weights of the last tile are not relative to the maximum",
    group="softmax",
)
def _raw(given: ExactAttention) -> Iterator[Prediction]:
    yield from _each(given, OnlineSteps(raw_last=True))


@model(
    "maximum-from-zero",
    "the running maximum starts at 0: rows whose scores are all far below lose their weights",
    group="softmax",
)
def _from_zero(given: ExactAttention) -> Iterator[Prediction]:
    for size in given.key_tiles:
        outputs = online_attention(given, size, OnlineSteps(first_maximum=0.0))
        yield Prediction(outputs=outputs, parameters={"tile": size})
        yield Prediction(
            outputs=online_attention(given, size, OnlineSteps(guarded=True)),
            parameters={"tile": size},
        )


_LOG2E = math.log2(math.e)


def _visits(given: ExactAttention, size: int) -> Iterator[Tensor]:
    """Places (batch, heads, rows, kv) whose tile of ``size`` keys is looked at for their row.

    Every tile; or those in which the row sees a key, or its block of rows does.
    """
    yield torch.ones(given.shape, dtype=torch.bool)
    for rows in dict.fromkeys((1, *(rows for rows, keys in given.tiles if keys == size))):
        yield tile_visibility(given, rows, size)[0]


def _ragged(given: ExactAttention, size: int) -> Tensor:
    """Keys (1, 1, 1, kv) of a last tile that is not full; none of them where it is."""
    kv = given.problem.kv
    return (given.j // size == kv // size) if kv % size else torch.zeros_like(given.j).bool()


def _without(
    given: ExactAttention, rows: Tensor, /, *, lse: bool = True, **parameters: int
) -> Prediction:
    """NaN in these rows: in out, and in LSE too."""
    exact = given.parts
    out = torch.where(rows[..., None], math.nan, exact.out)
    of_rows = torch.where(rows, math.nan, exact.lse) if lse else exact.lse
    return Prediction(outputs=Outputs(out, of_rows), parameters=parameters)


@model(
    "scale-of-zero-after-mask",
    "a scale that is 0 in fp32 multiplies what is −∞, hidden scores or the maximum before the "
    "first tile: 0 · ∞ is NaN",
    group="scale",
    applies=attention,
)
def _scaled(given: ExactAttention) -> Iterator[Prediction]:
    for gone in _gone(given):
        if not bool(gone.any()):
            continue
        # The maximum is −∞ before the first tile, whatever is seen.
        yield _without(given, gone.expand(given.shape[:3]))
        for size in given.key_tiles:
            ragged = _ragged(given, size)
            for visited in _visits(given, size):
                hidden = (visited & (~given.seen | ragged)).any(-1)
                yield _without(given, hidden & gone, tile=size)


def _gone(given: ExactAttention) -> Iterator[Tensor]:
    """Sequences and query heads ``(batch, heads, 1)`` whose factor of q·k is 0 in fp32.

    That of exp, or of exp2; also where what is smaller than a normal number is 0.
    """
    problem, descale = given.problem, given.inputs.descale
    products = torch.ones((problem.batch, problem.heads, 1))
    if descale is not None:
        products = products * given.by_query_head(descale.q.float() * descale.k.float())[..., None]
    for unit in (1.0, _LOG2E):
        factor = torch.tensor(given.scale * unit, dtype=torch.float32) * products
        yield factor == 0
        yield factor.abs() < torch.finfo(torch.float32).tiny


@model(
    "mask-times-infinity",
    "the mask is multiplied by −∞ and added to the scores: what is seen gets 0 · ∞, which is NaN",
    group="softmax",
)
def _added(given: ExactAttention) -> Iterator[Prediction]:
    yield _without(given, given.seen.any(-1))
    # Or only in tiles that need a mask.
    for rows, size in given.tiles:
        some, every = tile_visibility(given, rows, size)
        masked = some & (~every | _ragged(given, size))
        yield _without(given, (given.seen & masked).any(-1), tile=size, rows=rows)


def _scaled_format(problem: Problem) -> bool:
    return problem.formats.scaled


@model(
    "column-scale-of-zero",
    "a column of V that is 0 throughout has no scale: 0 · ∞ or 0 / 0 is NaN in that column",
    group="fp8",
    applies=_scaled_format,
)
def _columns(given: ExactAttention) -> Iterator[Prediction]:
    exact, v = given.parts.outputs, given.v
    for size in (*given.key_tiles, given.problem.kv):
        whose = torch.arange(given.problem.kv) // size
        # (batch, heads, value_dim, tiles)
        empty = torch.stack(
            [(v[:, :, whose == n] == 0).all(-2) for n in range(int(whose[-1]) + 1)], -1
        )
        if not bool(empty.any()):
            continue
        of_keys = empty[..., whose].double()
        for visited in _visits(given, size):
            touched = visited.double() @ of_keys.mT > 0
            out = torch.where(touched, math.nan, exact.out)
            yield Prediction(outputs=Outputs(out, exact.lse), parameters={"tile": size})


@model(
    "tail-in-block-scale",
    "what lies behind the last key has a part in the scale of its block: NaN, if there is one",
    group="fp8",
    applies=_scaled_format,
)
def _tail(given: ExactAttention) -> Iterator[Prediction]:
    for size in given.key_tiles:
        ragged = _ragged(given, size)
        if bool(ragged.any()):
            for visited in _visits(given, size):
                rows = (visited & ragged).any(-1)
                for of_keys in (False, True):  # whose scores LSE is of
                    yield _without(given, rows, lse=of_keys, tile=size)


_SENTINELS = (-1e4, -1e5, -1e6, -1e9, -1e10, -1e30, -65504.0, -3.4028234663852886e38)


@model(
    "not-normalised",
    "the output is not divided by the row sum",
    group="softmax",
)
def _unnormalised(given: ExactAttention) -> Iterator[Prediction]:
    parts = given.parts
    yield Prediction(outputs=Outputs(parts.values, parts.lse))


@model(
    "sum-of-padding",
    "the row sum is too large by keys that have no value",
    group="softmax",
    order=2,
)
def _padding(given: ExactAttention) -> Iterator[Prediction]:
    parts = given.parts
    base = torch.where(parts.maximum == -math.inf, 0.0, parts.maximum)

    def at(count: float) -> Outputs:
        total = parts.total + count * (-base).exp()
        return Outputs(parts.values / total.clamp(min=1e-300)[..., None], base + total.log())

    yield Prediction(outputs=at(1.0), family=at, start=1.0, parameter="keys")


@model(
    "sentinel-finite",
    "hidden keys get a finite score: they have weight where all others score lower",
    group="softmax",
    applies=masked(),
)
def _sentinel(given: ExactAttention) -> Iterator[Prediction]:
    units = dict.fromkeys((1.0, given.scale, 1.0 / _LOG2E))
    for sentinel in _SENTINELS:
        for unit in units:
            outputs = given.attend(hidden=sentinel * unit)
            yield Prediction(outputs=outputs, parameters={"sentinel": sentinel})


def _dead(given: ExactAttention) -> Tensor:
    return given.parts.lse == -math.inf


@model(
    "empty-rows-mean",
    "rows that see no key get the mean of all values",
    group="softmax",
    applies=masked(),
)
def _mean(given: ExactAttention) -> Iterator[Prediction]:
    dead, exact = _dead(given), given.parts.outputs
    if not bool(dead.any()):
        return
    assert exact.lse is not None, "of attention"
    scores = [unit * one for unit in (1.0, given.scale, 1 / _LOG2E) for one in _SENTINELS]
    for keys in _visited(given):
        there = keys.sum(-1, keepdim=True).clamp(min=1)
        sums = keys.double() @ given.v
        for size in (1, *given.key_tiles):
            count = -(-there // size) * size if size > 1 else there
            out = torch.where(dead[..., None], sums / count, exact.out)
            log = count[..., 0].double().log()
            for lse in (torch.full_like(log, -math.inf), *(one + log for one in scores)):
                yield Prediction(outputs=Outputs(out, torch.where(dead, lse, exact.lse)))


def _visited(given: ExactAttention) -> Iterator[Tensor]:
    """Keys that a row has to do with: all, or those of tiles in which its block sees any."""
    yield torch.ones(given.shape, dtype=torch.bool)
    for rows, size in given.tilings:
        yield tile_visibility(given, rows, size)[0]


@model(
    "empty-rows-nan",
    "rows that see no key are NaN",
    group="softmax",
    applies=masked(),
)
def _nan(given: ExactAttention) -> Iterator[Prediction]:
    dead, exact = _dead(given), given.parts.outputs
    if not bool(dead.any()):
        return
    assert exact.lse is not None, "of attention"
    out = torch.where(dead[..., None], math.nan, exact.out)
    for lse in (math.nan, -math.inf):
        yield Prediction(outputs=Outputs(out, torch.where(dead, lse, exact.lse)))
    yield Prediction(outputs=Outputs(exact.out, torch.where(dead, math.nan, exact.lse)))


@model(
    "lse-plus-infinity-of-empty",
    "LSE of rows that see no key is +∞",
    group="lse",
    applies=masked(),
)
def _plus(given: ExactAttention) -> Iterator[Prediction]:
    dead, exact = _dead(given), given.parts.outputs
    assert exact.lse is not None, "of attention"
    yield Prediction(outputs=Outputs(exact.out, torch.where(dead, math.inf, exact.lse)))


@model(
    "lse-finite-of-empty",
    "LSE of rows that see no key is a finite number",
    group="lse",
    applies=masked(),
)
def _finite(given: ExactAttention) -> Iterator[Prediction]:
    dead, exact = _dead(given), given.parts.outputs
    assert exact.lse is not None, "of attention"
    for number in (0.0, *_SENTINELS):
        lse = torch.where(dead, number, exact.lse)
        yield Prediction(outputs=Outputs(exact.out, lse), parameters={"lse": number})


def _lse(given: ExactAttention, lse: Tensor) -> Prediction:
    return Prediction(outputs=Outputs(given.parts.out, lse))


@model("lse-base-2", "LSE is to base 2", group="lse")
def _base_2(given: ExactAttention) -> Iterator[Prediction]:
    yield _lse(given, given.parts.lse * _LOG2E)


@model("lse-times-ln2", "LSE is multiplied by ln 2 once too often", group="lse")
def _ln_2(given: ExactAttention) -> Iterator[Prediction]:
    yield _lse(given, given.parts.lse / _LOG2E)


@model("lse-without-maximum", "LSE lacks the row's maximum", group="lse")
def _no_maximum(given: ExactAttention) -> Iterator[Prediction]:
    yield _lse(given, given.parts.total.log())


@model("lse-without-sum", "LSE is the row's maximum alone", group="lse")
def _no_sum(given: ExactAttention) -> Iterator[Prediction]:
    yield _lse(given, given.parts.maximum)


@model(
    "lse-mixed-units",
    "the maximum and the logarithm in LSE are in different units",
    group="lse",
)
def _mixed(given: ExactAttention) -> Iterator[Prediction]:
    parts = given.parts
    dead = parts.total == 0
    scale = given.scale
    for of_maximum, of_log in (
        (_LOG2E, 1.0),
        (1.0, _LOG2E),
        (1.0 / scale, 1.0),
        (1.0 / _LOG2E, 1.0),
        (1.0, 1.0 / _LOG2E),
        (scale, 1.0),
        (_LOG2E / scale, 1.0),
    ):
        lse = parts.maximum * of_maximum + parts.total.log() * of_log
        yield _lse(given, torch.where(dead, -math.inf, lse))


def _sunk(problem: Problem) -> bool:
    return problem.sink


def _with_sink(given: ExactAttention, sink: Tensor | None) -> Outputs:
    return given.softmax(given.z, sink=sink).outputs


@model("sink-ignored", "the sink is ignored", group="sinks", applies=_sunk)
def _no_sink(given: ExactAttention) -> Iterator[Prediction]:
    plain = _with_sink(given, None)
    exact = given.parts
    yield Prediction(outputs=plain)
    yield Prediction(outputs=Outputs(plain.out, exact.lse))
    yield Prediction(outputs=Outputs(exact.out, plain.lse))


@model("sink-twice", "the sink counts more than once", group="sinks", applies=_sunk)
def _sink_twice(given: ExactAttention) -> Iterator[Prediction]:
    assert given.sink is not None, "asked of what has one"
    blocks = {-(-given.problem.kv // size) for size in given.key_tiles}
    for count in sorted({2, 3, 4, 5, *(n for n in blocks if 1 < n < 64)}):
        outputs = _with_sink(given, given.sink + math.log(count))
        yield Prediction(outputs=outputs, parameters={"times": count})


@model(
    "sink-in-other-units",
    "the sink is in other units than the scores: log2 e or the scale is missing, or there too "
    "often",
    group="sinks",
    applies=_sunk,
)
def _units(given: ExactAttention) -> Iterator[Prediction]:
    assert given.sink is not None, "asked of what has one"
    for factor in (_LOG2E, 1.0 / _LOG2E, given.scale, 1.0 / given.scale):
        yield Prediction(outputs=_with_sink(given, given.sink * factor))


@model("sink-of-head-0", "every head has another head's sink", group="sinks", applies=_sunk)
def _sink_head(given: ExactAttention) -> Iterator[Prediction]:
    assert given.sink is not None, "asked of what has one"
    h, problem = torch.arange(given.problem.heads), given.problem
    for of in (0 * h, h // problem.group, h % problem.kv_heads, problem.heads - 1 - h):
        yield Prediction(outputs=_with_sink(given, given.sink[:, of]))


@model("sink-as-key", "the sink is a key with a value", group="sinks", applies=_sunk)
def _sink_key(given: ExactAttention) -> Iterator[Prediction]:
    plain, exact = _with_sink(given, None), given.parts
    # Whose share is that of a gate: out · sigmoid(LSE − sink), with LSE of the keys alone.
    assert plain.lse is not None, "as it was made"
    assert given.sink is not None, "asked of what has one"
    gate = torch.sigmoid(plain.lse - given.sink)
    yield Prediction(outputs=Outputs(plain.out * gate[..., None], plain.lse))
    yield Prediction(outputs=Outputs(exact.out * gate[..., None], exact.lse))
