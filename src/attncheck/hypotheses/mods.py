"""Faults of score mods: softcap, ALiBi, biases."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from attncheck.hypotheses.model import Variant, model, scored
from attncheck.hypotheses.respelled import score_with
from attncheck.mods import scores
from attncheck.mods.library import alibi_slopes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from attncheck.hypotheses.given import Given
    from attncheck.mods.signatures import ScoreMod
    from attncheck.mods.spec import Dimensions, Spec

_LOG2E = math.log2(math.e)


def _with(
    given: Given, name: str, instead: Callable[[Any, Dimensions], ScoreMod], **parameters: str
) -> Iterator[Variant]:
    """With another mod in place of the parts called ``name``."""

    def change(spec: Spec, dims: Dimensions) -> ScoreMod | None:
        return instead(spec.values, dims) if spec.name == name else None

    score = score_with(given.problem, change)
    if score is not None:
        outputs = given.attend(s=given.modified(given.x, score))
        yield Variant(outputs=outputs, parameters=parameters)


@model("softcap-missing", "softcap is ignored", group="mods", applies=scored("softcap"))
def _missing(given: Given) -> Iterator[Variant]:
    yield from _with(given, "softcap", lambda _values, _dims: scores.none)


@model(
    "softcap-of-log2",
    "softcap is applied to scores in log2 units",
    group="mods",
    applies=scored("softcap"),
)
def _log2(given: Given) -> Iterator[Variant]:
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
def _tanh(given: Given) -> Iterator[Variant]:
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
def _times(given: Given) -> Iterator[Variant]:
    def capped(values: Any, _dims: Dimensions) -> ScoreMod:
        return lambda s, _b, _h, _i, _j: s * torch.tanh(s / values["cap"])

    yield from _with(given, "softcap", capped)


@model(
    "softcap-after-mask",
    "softcap is applied after the mask: hidden keys get −cap, and are seen",
    group="mods",
    applies=scored("softcap"),
)
def _after(given: Given) -> Iterator[Variant]:
    s = given.modified(torch.where(given.seen, given.x, -math.inf))
    yield Variant(outputs=given.attend(s=s, seen=torch.ones_like(given.seen)))


@model(
    "score-mod-ignored",
    "the score mod is ignored",
    group="mods",
    applies=scored(),
)
def _ignored(given: Given) -> Iterator[Variant]:
    yield Variant(outputs=given.attend(s=given.x))
    for part in dict.fromkeys(part.name for part in given.problem.score.walk()):
        if part != given.problem.score.name:
            yield from _with(given, part, lambda _values, _dims: scores.none, ignored=part)


@model(
    "score-mod-twice",
    "the score mod is applied twice",
    group="mods",
    applies=scored(),
)
def _twice(given: Given) -> Iterator[Variant]:
    yield Variant(outputs=given.attend(s=given.modified(given.s)))


@model(
    "alibi-sign",
    "what the score mod adds has the wrong sign",
    group="mods",
    applies=scored("alibi", "relative_bias", "bias"),
)
def _sign(given: Given) -> Iterator[Variant]:
    yield Variant(outputs=given.attend(s=2 * given.x - given.s))


@model(
    "alibi-head-order",
    "the score mod is asked about another head: slopes or biases are those of the wrong one",
    group="mods",
    applies=lambda problem: scored()(problem) and problem.heads > 1,
)
def _heads(given: Given) -> Iterator[Variant]:
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
        yield Variant(outputs=given.attend(s=s), parameters={"head": name})


@model(
    "alibi-slopes",
    "slopes are those of another number of heads",
    group="mods",
    applies=scored("alibi"),
)
def _slopes(given: Given) -> Iterator[Variant]:
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
def _offset(given: Given) -> Iterator[Variant]:
    apart = given.problem.kv - given.problem.query
    for rows in dict.fromkeys((apart, -apart, 1, -1)):
        if rows:
            s = given.modified(given.x, i=rows)
            yield Variant(outputs=given.attend(s=s), parameters={"rows": rows})


@model(
    "alibi-distance",
    "ALiBi takes the distance without its sign",
    group="mods",
    applies=scored("alibi"),
)
def _distance(given: Given) -> Iterator[Variant]:
    added = given.s - given.x
    for sign in (1.0, -1.0):
        yield Variant(outputs=given.attend(s=given.x + sign * added.abs()))


@model(
    "score-mod-batch",
    "the score mod is asked about another sequence of the batch",
    group="mods",
    applies=lambda problem: scored()(problem) and problem.batch > 1,
)
def _batch(given: Given) -> Iterator[Variant]:
    for other in (0 * given.b, given.problem.batch - 1 - given.b):
        yield Variant(outputs=given.attend(s=given.modified(given.x, b=other)))
