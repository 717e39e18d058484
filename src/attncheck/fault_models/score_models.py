"""Fault models of the scale, of units and of score mods."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from attncheck.core.outputs import Outputs
from attncheck.fault_models.fault_model import Prediction, attention, model, scored
from attncheck.fault_models.mask_models import score_with
from attncheck.mods import scores
from attncheck.mods.scores import alibi_slopes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from attncheck.fault_models.exact_attention import ExactAttention
    from attncheck.mods.spec import Dimensions, ScoreMod, Spec


_LOG2E = math.log2(math.e)


def _factor(given: ExactAttention, factor: float, **parameters: float) -> Iterator[Prediction]:
    """Scores times ``factor``: all the same, or all but the maximum that LSE adds."""
    for outputs in _of(given, factor):
        yield Prediction(outputs=outputs, parameters=parameters)


def _of(given: ExactAttention, factor: float) -> Iterator[Outputs]:
    plain = given.problem.score.name == "none" and given.sink is None
    yield given.attend(x=given.x * factor)
    if not plain:
        yield given.attend(s=given.s * factor)
    parts = given.softmax(given.z * factor, sink=_sink(given, factor))
    outputs = parts.outputs
    yield Outputs(outputs.out, _other_maximum(given, parts.maximum, parts.lse))


def _sink(given: ExactAttention, factor: float) -> torch.Tensor | None:
    return None if given.sink is None else given.sink * factor


def _other_maximum(given: ExactAttention, maximum: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    dead = maximum == -math.inf
    return torch.where(dead, -math.inf, lse - maximum + given.parts.maximum)


@model("scale-missing", "q·k is not multiplied by the scale", group="scale", applies=attention)
def _missing(given: ExactAttention) -> Iterator[Prediction]:
    yield from _factor(given, 1.0 / given.scale)


@model("scale-twice", "q·k is multiplied by the scale twice", group="scale", applies=attention)
def _twice(given: ExactAttention) -> Iterator[Prediction]:
    yield from _factor(given, given.scale)


@model(
    "scale-of-dim",
    "the scale is 1 / head_dim, without the square root",
    group="scale",
    applies=attention,
)
def _dim(given: ExactAttention) -> Iterator[Prediction]:
    yield from _factor(given, 1.0 / given.problem.head_dim / given.scale)


@model(
    "scale-log2e",
    "log2 e is missing or there twice: weights are powers of another base than e",
    group="scale",
)
def _log2e(given: ExactAttention) -> Iterator[Prediction]:
    yield from _factor(given, 1.0 / _LOG2E)
    yield from _factor(given, _LOG2E)


@model(
    "scale-inverted",
    "q·k is multiplied by √head_dim, not divided by it",
    group="scale",
    applies=attention,
)
def _inverted(given: ExactAttention) -> Iterator[Prediction]:
    yield from _factor(given, 1.0 / given.scale**2)
    yield from _factor(given, math.sqrt(given.problem.head_dim) / given.scale)


@model(
    "scale-fixed",
    "the scale is a constant, whatever the call says",
    group="scale",
    applies=attention,
)
def _fixed(given: ExactAttention) -> Iterator[Prediction]:
    dims = dict.fromkeys((given.problem.head_dim, 32, 64, 128, given.problem.value_dim))
    padded = 1 << (given.problem.head_dim - 1).bit_length()
    for dim in dict.fromkeys([*dims, padded]):
        constant = 1.0 / math.sqrt(dim)
        if abs(constant / given.scale - 1.0) > 1e-6:  # another scale at all
            yield from _factor(given, constant / given.scale, scale=constant)


@model(
    "scale-off",
    "the scale is off by a factor",
    group="scale",
    order=2,
)
def _off(given: ExactAttention) -> Iterator[Prediction]:
    def at(log: float) -> Outputs:
        return given.attend(x=given.x * math.exp(min(max(log, -20.0), 20.0)))

    yield Prediction(outputs=at(0.1), family=at, start=0.1, parameter="log of the factor")


@model(
    "score-mod-before-scale",
    "the score mod is applied before the scale",
    group="mods",
    applies=scored(),
)
def _before(given: ExactAttention) -> Iterator[Prediction]:
    yield Prediction(outputs=given.attend(s=given.modified(given.qk) * given.scale))


@model(
    "bias-not-scaled",
    "what the score mod adds is in other units than the scores: log2 e is missing there",
    group="mods",
    applies=scored("alibi", "relative_bias", "bias", "expression"),
)
def _bias(given: ExactAttention) -> Iterator[Prediction]:
    added = given.s - given.x
    for factor in (1.0 / _LOG2E, _LOG2E):
        yield Prediction(outputs=given.attend(s=given.x + added * factor))
    # Scores in base 2 go into the mod, and what comes out is taken for base 2.
    yield Prediction(outputs=given.attend(s=given.modified(given.x * _LOG2E) / _LOG2E))


def _with(
    given: ExactAttention,
    name: str,
    instead: Callable[[Any, Dimensions], ScoreMod],
    **parameters: str,
) -> Iterator[Prediction]:
    """With another mod in place of the parts called ``name``."""

    def change(spec: Spec, dims: Dimensions) -> ScoreMod | None:
        return instead(spec.values, dims) if spec.name == name else None

    score = score_with(given.problem, change)
    if score is not None:
        outputs = given.attend(s=given.modified(given.x, score))
        yield Prediction(outputs=outputs, parameters=parameters)


@model("softcap-missing", "softcap is ignored", group="mods", applies=scored("softcap"))
def _missing_of_mods(given: ExactAttention) -> Iterator[Prediction]:
    yield from _with(given, "softcap", lambda _values, _dims: scores.none)


@model(
    "softcap-of-log2",
    "softcap is applied to scores in log2 units",
    group="mods",
    applies=scored("softcap"),
)
def _log2(given: ExactAttention) -> Iterator[Prediction]:
    for into, out in ((_LOG2E, 1.0 / _LOG2E), (_LOG2E, 1.0), (1.0, _LOG2E), (1.0 / _LOG2E, 1.0)):

        def capped(
            values: Any, _dims: Dimensions, into: float = into, out: float = out
        ) -> ScoreMod:
            cap = values["cap"]
            return lambda s, _b, _h, _i, _j: cap * torch.tanh(s * into / cap) * out

        yield from _with(given, "softcap", capped)


def _by_e(x: Tensor) -> Tensor:
    up, down = x.exp(), (-x).exp()
    return (up - down) / (up + down)


def _by_e_squared(x: Tensor) -> Tensor:
    up = (2 * x).exp()
    return (up - 1) / (up + 1)


@model(
    "tanh-overflows",
    "tanh is made of exponentials: NaN where a score is large beside the cap, and rounded away "
    "where it is small",
    group="mods",
    applies=scored("softcap"),
)
def _tanh(given: ExactAttention) -> Iterator[Prediction]:
    for tanh in (_by_e, _by_e_squared):

        def capped(
            values: Any, _dims: Dimensions, tanh: Callable[[Tensor], Tensor] = tanh
        ) -> ScoreMod:
            cap = values["cap"]
            return lambda s, _b, _h, _i, _j: cap * tanh((s / cap).float()).to(s.dtype)

        yield from _with(given, "softcap", capped)


@model(
    "softcap-times-score",
    "softcap multiplies tanh(score / cap) by the score, not by the cap",
    group="mods",
    applies=scored("softcap"),
)
def _times(given: ExactAttention) -> Iterator[Prediction]:
    def capped(values: Any, _dims: Dimensions) -> ScoreMod:
        return lambda s, _b, _h, _i, _j: s * torch.tanh(s / values["cap"])

    yield from _with(given, "softcap", capped)


@model(
    "softcap-after-mask",
    "softcap is applied after the mask: hidden keys get −cap, and are seen",
    group="mods",
    applies=scored("softcap"),
)
def _after(given: ExactAttention) -> Iterator[Prediction]:
    s = given.modified(torch.where(given.seen, given.x, -math.inf))
    yield Prediction(outputs=given.attend(s=s, seen=torch.ones_like(given.seen)))


@model(
    "score-mod-ignored",
    "the score mod is ignored",
    group="mods",
    applies=scored(),
)
def _ignored(given: ExactAttention) -> Iterator[Prediction]:
    yield Prediction(outputs=given.attend(s=given.x))
    for part in dict.fromkeys(part.name for part in given.problem.score.walk()):
        if part != given.problem.score.name:
            yield from _with(given, part, lambda _values, _dims: scores.none, ignored=part)


@model(
    "score-mod-twice",
    "the score mod is applied twice",
    group="mods",
    applies=scored(),
)
def _twice_of_mods(given: ExactAttention) -> Iterator[Prediction]:
    yield Prediction(outputs=given.attend(s=given.modified(given.s)))


@model(
    "alibi-sign",
    "what the score mod adds has the wrong sign",
    group="mods",
    applies=scored("alibi", "relative_bias", "bias"),
)
def _sign(given: ExactAttention) -> Iterator[Prediction]:
    yield Prediction(outputs=given.attend(s=2 * given.x - given.s))


@model(
    "alibi-head-order",
    "the score mod is asked about another head: slopes or biases are those of the wrong one",
    group="mods",
    applies=lambda problem: scored()(problem) and problem.heads > 1,
)
def _heads(given: ExactAttention) -> Iterator[Prediction]:
    problem, h = given.problem, given.h
    others = {
        "the key head": h // problem.group,
        "its place in the group": h % problem.group,
        "its place among the key heads": h % problem.kv_heads,
        "head 0": 0 * h,
        "in reverse order": problem.heads - 1 - h,
        "the next": (h + 1) % problem.heads,
        "the last before": (h - 1).clamp(min=0),
    }
    for name, other in others.items():
        s = given.modified(given.x, h=other)
        yield Prediction(outputs=given.attend(s=s), parameters={"head": name})


@model(
    "alibi-slopes",
    "slopes are those of another number of heads",
    group="mods",
    applies=scored("alibi"),
)
def _slopes(given: ExactAttention) -> Iterator[Prediction]:
    heads = given.problem.heads
    power = 1 << (heads.bit_length() - 1)
    more = tuple(alibi_slopes(2 * power))[::2] if power < heads else ()
    published = (*alibi_slopes(power), *more)[:heads]
    later = tuple(2.0 ** (-8.0 * h / heads) for h in range(heads))
    for slopes in dict.fromkeys(
        (published, alibi_slopes(power * 2)[:heads], later, alibi_slopes(given.problem.kv_heads))
    ):
        if len(slopes) == heads:
            sloped = scores.alibi(torch.tensor(slopes))
            yield from _with(given, "alibi", _always(sloped))


def _always(score: ScoreMod) -> Callable[[Any, Dimensions], ScoreMod]:
    return lambda _values, _dims: score


@model(
    "alibi-offset",
    "the score mod is asked about another row: an offset is missing, or there once too often",
    group="mods",
    applies=scored(),
)
def _offset(given: ExactAttention) -> Iterator[Prediction]:
    apart = given.problem.kv - given.problem.query
    for rows in dict.fromkeys((apart, -apart, 1, -1)):
        if rows:
            s = given.modified(given.x, i=rows)
            yield Prediction(outputs=given.attend(s=s), parameters={"rows": rows})


@model(
    "alibi-distance",
    "ALiBi takes the distance without its sign",
    group="mods",
    applies=scored("alibi"),
)
def _distance(given: ExactAttention) -> Iterator[Prediction]:
    added = given.s - given.x
    for sign in (1.0, -1.0):
        yield Prediction(outputs=given.attend(s=given.x + sign * added.abs()))


@model(
    "score-mod-batch",
    "the score mod is asked about another sequence of the batch",
    group="mods",
    applies=lambda problem: scored()(problem) and problem.batch > 1,
)
def _batch(given: ExactAttention) -> Iterator[Prediction]:
    for other in (0 * given.b, given.problem.batch - 1 - given.b):
        yield Prediction(outputs=given.attend(s=given.modified(given.x, b=other)))
