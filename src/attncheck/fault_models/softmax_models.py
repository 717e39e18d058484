"""Fault models of the softmax: its end, sentinels, rows that see no key, LSE, and sinks."""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from attncheck.core.outputs import Outputs
from attncheck.fault_models.exact_attention import FP32_LOWEST
from attncheck.fault_models.fault_model import (
    Form,
    ModelTable,
    Parameters,
    Prediction,
    has_mask,
    has_score,
    is_attention,
)
from attncheck.fault_models.steps import LOG2E, Steps
from attncheck.fault_models.tile_models import edge_tiles, padded_keys, tile_visibility

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attncheck.fault_models.exact_attention import ExactAttention
    from attncheck.inputs.problem import Problem

MODELS = ModelTable("empty rows")  # faults in the softmax itself
SINKS = ModelTable("score")  # faults in sinks, which take part in the softmax without a value

_model = MODELS.model

# Scores of hidden keys: 0, as with a multiplied mask; large numbers in published kernels; the
# lowest numbers of fp16 and fp32.
SENTINELS = (0.0, -1e4, -1e5, -1e6, -1e9, -1e10, -1e30, -65504.0, -3.4028234663852886e38)


@_model(family="rescaling")
def not_normalised(call: ExactAttention) -> Iterator[Form]:
    """The output is not divided by the row sum, but multiplied by it, or divides it."""
    parts = call.parts
    yield Outputs(parts.values, parts.lse)
    yield Outputs(parts.values * parts.total[..., None], parts.lse), {"of": "multiplied"}
    yield Outputs(parts.total[..., None] / parts.values, parts.lse), {"of": "the wrong way round"}


@_model(applies=is_attention, family="rescaling")
def sum_of_another_row(call: ExactAttention) -> Iterator[Form]:
    """A row is divided by the row sums of others: they are spread along the columns."""
    parts, query = call.parts, call.problem.query
    columns = torch.arange(call.problem.value_dim)
    # Only a square block can have them along its columns.
    wide = 1 << (call.problem.value_dim - 1).bit_length()
    if wide in call.row_tiles and call.whole:
        row_of_column = torch.arange(query)[:, None] // wide * wide + columns
        # In padded rows, which are zeros, all keys weigh 1.
        totals = torch.nn.functional.pad(parts.total, (0, wide), value=float(call.problem.kv))
        yield Outputs(parts.values / totals[:, :, row_of_column], parts.lse)


@_model(family="rescaling")
def sum_missing(call: ExactAttention) -> Iterator[Form]:
    """Nothing is added to the row sum: it is 0, and LSE is that of no key."""
    parts = call.parts
    lse = torch.full_like(parts.total, -math.inf)
    # The kernel may divide by the sum of 0, or by 1 in its place.
    nothing = torch.where(parts.dead[..., None], 0.0, parts.values * math.inf)
    for out in (parts.values, nothing):
        for of_none in (lse, parts.maximum):
            yield Outputs(out, of_none)


@_model(family="rescaling")
def values_missing(call: ExactAttention) -> Iterator[Form]:
    """Out is 0, and LSE right: V is read as 0, or no product with it is kept."""
    yield Outputs(torch.zeros_like(call.parts.out), call.parts.lse)
    # Or out is 0 in some blocks of rows: all but the first, or the last, which may be partial.
    for rows in call.row_tiles:
        number, last = call.i[..., 0] // rows, (call.problem.query - 1) // rows
        for which, zero in {"later blocks": number > 0, "the last block": number == last}.items():
            outputs = call.with_out(zero.expand(call.shape[:3]), 0.0)
            yield outputs, {"rows": rows, "which": which}


@_model(family="rescaling")
def every_row_empty(call: ExactAttention) -> Iterator[Form]:
    """Every row gives what one gives that sees no key: no tile is visited, or nothing is kept of
    it.
    """
    parts = call.parts
    yield Outputs(torch.zeros_like(parts.out), torch.full_like(parts.lse, -math.inf))


@_model(applies=is_attention, family="rescaling")
def only_padding_counts(call: ExactAttention) -> Iterator[Form]:
    """The padding of the last tile counts in place of the keys, alone or with what is hidden: a
    comparison with the end, or what is done to what it hides, is the wrong way round.
    """
    shown = call.visible(call.mask)
    for size in dict.fromkeys(size for _, size in call.tiles):
        count = padded_keys(call, size)
        for of, seen in {"the end": torch.zeros_like(shown), "what is hidden": ~shown}.items():
            # The key at the end itself may be hidden, too.
            for more in (count, max(0, count - 1)):
                score = math.log(more) if more else -math.inf
                z = torch.where(seen, call.s, -math.inf)
                outputs = call.with_extra_keys(z.new_full((1,), score), z)
                yield outputs, {"of": of, "tile": size}


@_model(order=2, family="tile")
def sum_of_padding(call: ExactAttention) -> Iterator[Form]:
    """The row sum is too large by keys that have no value."""
    parts = call.parts
    base = torch.where(parts.maximum == -math.inf, 0.0, parts.maximum)

    # These keys score 0, as do products with padding.
    def at(count: float) -> Outputs:
        total = parts.total + max(count, 0.0) * (-base).exp()
        return Outputs(parts.values / total.clamp(min=1e-300)[..., None], base + total.log())

    yield Prediction(outputs=at(1.0), family=at, start=1.0, parameter="keys")


@_model(applies=has_mask(), steps=(Steps(hidden=-1e4), Steps(hidden=-1e6)))
def sentinel_finite(call: ExactAttention) -> Iterator[Form]:
    """Hidden keys get a finite score: they have weight where all others score lower."""
    for score, sentinel in _sentinels(call).items():
        yield call.attend(hidden=score), {"sentinel": sentinel}
    # Or hidden keys score 0 only in visited tiles, and so does the last one's padding.
    for rows, size in call.tiles:
        visited = tile_visibility(call, rows, size)[0]
        z = torch.where(call.seen, call.s, torch.where(visited, 0.0, -math.inf))
        count = padded_keys(call, size)
        padding = math.log(count) if count else -math.inf
        behind = torch.where(visited[..., -1:], padding, -math.inf)
        yield call.with_extra_keys(behind, z), {"tile": size, "rows": rows, "sentinel": 0.0}


def _sentinels(call: ExactAttention) -> dict[float, float]:
    """Return sentinels by their scores: set before or after the scale, or in base 2."""
    units = dict.fromkeys((1.0, call.scale, 1.0 / LOG2E))
    return {unit * one: one for one in SENTINELS for unit in units}


@_model(applies=is_attention, family="tile")
def padding_sentinel_finite(call: ExactAttention) -> Iterator[Form]:
    """The padding of the last tile of keys gets a finite score: it has weight, and no values, where
    all keys score lower.
    """
    lowest = float(call.parts.maximum.min())
    # Lower scores have no weight; for a score of 0 there is ``tail_unmasked``.
    sentinels = [one for one in _sentinels(call) if lowest + FP32_LOWEST < one < 0]
    for sentinel, size in product(sentinels, call.key_tiles):
        if count := padded_keys(call, size):
            score = call.z.new_full((1,), sentinel + math.log(count))
            yield call.with_extra_keys(score), {"tile": size}


@_model(applies=has_mask())
def empty_rows_mean(call: ExactAttention) -> Iterator[Form]:
    """Rows that see no key get the mean of all values."""
    dead, exact = call.parts.dead, call.exact
    if not bool(dead.any()):
        return
    scores = tuple(_sentinels(call))
    visited = [torch.ones(call.shape, dtype=torch.bool)]
    # A kernel that skips tiles computes the mean of visited values only.
    visited += [tile_visibility(call, rows, size)[0] for rows, size in call.tilings]
    for keys in visited:
        visited_keys = keys.sum(-1, keepdim=True).clamp(min=1)
        sums = keys.double() @ call.v
        # Padding of the last tile counts as keys of value 0.
        for size in (1, *call.key_tiles):
            count = -(-visited_keys // size) * size if size > 1 else visited_keys
            out = torch.where(dead[..., None], sums / count, exact.out)
            log = count[..., 0].double().log()
            for lse in (torch.full_like(log, -math.inf), *(one + log for one in scores)):
                yield Outputs(out, torch.where(dead, lse, call.parts.lse))


@_model(applies=has_mask())
def empty_rows_nan(call: ExactAttention) -> Iterator[Form]:
    """Rows that see no key are NaN."""
    dead = call.parts.dead
    if bool(dead.any()):
        yield call.with_out(dead, math.nan, lse=math.nan)
        yield call.with_out(dead, math.nan)
        # Or LSE alone: log of 0 plus −∞ is −∞, but their difference is NaN.
        yield call.with_lse(torch.where(dead, math.nan, call.parts.lse))


@_model(applies=has_mask(), order=1)
def first_tile_nan(call: ExactAttention) -> Iterator[Form]:
    """Rows that see no key of the first tile are NaN, as −∞ − (−∞) is."""
    for size in call.key_tiles:
        unseen = ~(call.seen & (call.j < size)).any(-1)
        yield call.with_out(unseen, math.nan, lse=math.nan), {"tile": size}
    for rows, size in call.any_tiles:
        if size >= call.problem.kv:
            continue
        first = edge_tiles(call, rows, size, last=False)
        unseen = ~(call.seen & first).any(-1)
        # A block that visits no tile may leave its rows at 0, or divide 0 by 0.
        for which, words in (
            (unseen, "the first that its block visits"),
            (unseen & first.any(-1), "the first that its block visits, if any"),
        ):
            parameters: Parameters = {"tile": size, "rows": rows, "of": words}
            yield call.with_out(which, math.nan, lse=math.nan), parameters


MODELS.add(
    "lse-plus-infinity-of-empty",
    "LSE of rows that see no key is +∞",
    applies=has_mask(),
    steps=Steps(lse=lambda lse: torch.where(lse == -math.inf, math.inf, lse)),
)


@_model(applies=has_mask())
def lse_finite_of_empty(call: ExactAttention) -> Iterator[Form]:
    """LSE of rows that see no key is a finite number."""
    for number in SENTINELS:
        lse = torch.where(call.parts.dead, number, call.parts.lse)
        yield call.with_lse(lse), {"lse": number}


MODELS.add(
    "lse-base-2",
    "LSE is to base 2",
    steps=Steps(lse=lambda lse: lse * LOG2E),
    family="lse",
)
MODELS.add(
    "lse-times-ln2",
    "LSE is multiplied by ln 2 once too often",
    steps=Steps(lse=lambda lse: lse / LOG2E),
    family="lse",
)


@_model(family="lse")
def lse_without_maximum(call: ExactAttention) -> Iterator[Form]:
    """LSE lacks the row's maximum."""
    yield call.with_lse(call.parts.total.log())


@_model(family="lse")
def lse_without_sum(call: ExactAttention) -> Iterator[Form]:
    """LSE is the row's maximum alone."""
    yield call.with_lse(call.parts.maximum)


@_model(family="lse")
def lse_mixed_units(call: ExactAttention) -> Iterator[Form]:
    """The maximum and the logarithm in LSE are in different units, or of different signs."""
    parts, scale = call.parts, call.scale
    for of_maximum, of_log in (
        (1.0, -1.0),
        (LOG2E, 1.0),
        (1.0, LOG2E),
        (1.0 / scale, 1.0),
        (1.0 / LOG2E, 1.0),
        (1.0, 1.0 / LOG2E),
        (scale, 1.0),
        (LOG2E / scale, 1.0),
    ):
        lse = parts.maximum * of_maximum + parts.total.log() * of_log
        yield call.with_lse(torch.where(parts.dead, -math.inf, lse))


@_model(applies=has_score("softcap"), family="lse")
def lse_in_units_of_cap(call: ExactAttention) -> Iterator[Form]:
    """The maximum in LSE is multiplied or divided by the cap, or by cap · scale."""
    parts = call.parts
    for spec in call.problem.score.walk():
        if spec.name == "softcap":
            cap: Any = spec.values["cap"]
            for unit in (cap, cap * call.scale, 1.0 / cap, 1.0 / (cap * call.scale)):
                lse = parts.maximum * unit + parts.total.log()
                yield call.with_lse(torch.where(parts.dead, -math.inf, lse))


def _has_sink(problem: Problem) -> bool:
    return problem.sink


def _with_sink(call: ExactAttention, change: Tensor | float) -> Outputs:
    """Return outputs with another sink ``(1, heads, 1)``, or with each head's times a number."""
    assert call.sink is not None, "asked of what has one"
    sink = change * call.sink if isinstance(change, float) else change
    return call.softmax(call.z, sink=sink).outputs


@SINKS.model(applies=_has_sink, steps=Steps(sink=False))
def sink_ignored(call: ExactAttention) -> Iterator[Form]:
    """The sink is ignored."""
    plain = call.softmax(call.z, sink=None)
    # Out and LSE are computed separately: only one of them may lack the sink.
    yield Outputs(plain.out, call.parts.lse)
    yield Outputs(call.parts.out, plain.lse)


@SINKS.model(applies=_has_sink)
def sink_twice(call: ExactAttention) -> Iterator[Form]:
    """The sink counts more than once."""
    assert call.sink is not None, "asked of what has one"
    # The sink may count once for each split, or for each tile of keys.
    blocks = {-(-call.problem.kv // size) for size in call.key_tiles}
    for count in sorted({2, 3, 4, 5, *(n for n in blocks if 1 < n < 64)}):
        yield _with_sink(call, call.sink + math.log(count)), {"times": count}


@SINKS.model(applies=_has_sink)
def sink_in_other_units(call: ExactAttention) -> Iterator[Form]:
    """The sink is in other units than the scores: log2 e or the scale is missing, or there too
    often.
    """
    for factor in (LOG2E, 1.0 / LOG2E, call.scale, 1.0 / call.scale):
        yield _with_sink(call, factor)


@SINKS.model(applies=_has_sink)
def sink_of_head_0(call: ExactAttention) -> Iterator[Form]:
    """Every head has another head's sink."""
    assert call.sink is not None, "asked of what has one"
    h, problem = torch.arange(call.problem.heads), call.problem
    for other in (0 * h, h // problem.group, h % problem.kv_heads, problem.heads - 1 - h):
        yield _with_sink(call, call.sink[:, other])


@SINKS.model(applies=_has_sink)
def sink_as_key(call: ExactAttention) -> Iterator[Form]:
    """The sink is a key with a value."""
    plain, exact = call.softmax(call.z, sink=None), call.parts
    # Its share may be that of a gate: out · sigmoid(LSE − sink), with LSE of the keys alone.
    assert call.sink is not None, "asked of what has one"
    gate = torch.sigmoid(plain.lse - call.sink)
    yield Outputs(plain.out * gate[..., None], plain.lse)
    yield Outputs(exact.out * gate[..., None], exact.lse)
