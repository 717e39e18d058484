"""Fault models of the scale, of units and of score mods: softcap, ALiBi, biases."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from attncheck.core.outputs import Outputs
from attncheck.fault_models.fault_model import Form, ModelTable, Prediction, has_score, is_attention
from attncheck.fault_models.steps import (
    LOG2E,
    Steps,
    round_to_format,
    rounded_log2e,
    steps_with_scores,
)
from attncheck.inputs.problem import USUAL_SCALE
from attncheck.mods import scores
from attncheck.mods.library import is_additive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from attncheck.core.mod_spec import Dimensions
    from attncheck.fault_models.exact_attention import ExactAttention
    from attncheck.inputs.problem import Problem
    from attncheck.mods.signatures import ScoreMod

MODELS = ModelTable("score")

_model = MODELS.model


def fixed_scale(constant: float) -> Steps:
    """Return Steps that multiply q·k by a constant; right where that is the call's scale."""
    return Steps(
        scale=lambda problem: constant if abs(constant / problem.scale - 1.0) > 1e-6 else None
    )


def _with_factor(call: ExactAttention, factor: float, **parameters: float | str) -> Iterator[Form]:
    """Yield outputs with scores times ``factor``, also without it in the maximum that LSE adds."""
    yield call.attend(x=call.x * factor), parameters
    # After the score mod the factor also scales what the mod has added.
    if call.problem.score.name != "none" or call.sink is not None:
        yield call.attend(s=call.s * factor), parameters
    sink = None if call.sink is None else call.sink * factor
    parts = call.softmax(call.z * factor, sink=sink)
    # The maximum in LSE may have the right units, and its sum those of the scaled scores.
    lse = parts.lse - parts.maximum + call.parts.maximum
    dead = parts.maximum == -math.inf
    yield Outputs(parts.out, torch.where(dead, -math.inf, lse)), parameters


@_model(applies=is_attention, family="factor")
def scale_missing(call: ExactAttention) -> Iterator[Form]:
    """Q·k is not multiplied by the scale."""
    yield from _with_factor(call, 1.0 / call.scale)


@_model(applies=is_attention, family="factor")
def scale_twice(call: ExactAttention) -> Iterator[Form]:
    """Q·k is multiplied by the scale twice."""
    yield from _with_factor(call, call.scale)


@_model(applies=is_attention, family="factor")
def scale_of_dim(call: ExactAttention) -> Iterator[Form]:
    """The scale is another power of head_dim than 1 / √head_dim: 1 / head_dim, or head_dim."""
    for power in (-1, 1):
        yield from _with_factor(call, call.problem.head_dim**power / call.scale)


@_model(family="factor")
def scale_log2e(call: ExactAttention) -> Iterator[Form]:
    """Log2 e is missing, there twice or rounded: weights are powers of another base than e."""
    # exp for exp2 or the reverse: the factor is missing, or exp includes it already.
    for factor in (1.0 / LOG2E, LOG2E, 1.0 / LOG2E**2):
        yield from _with_factor(call, factor)
    for name, factor in rounded_log2e().items():
        yield from _with_factor(call, factor, **{"log2 e": name})


@_model(
    applies=is_attention, steps=Steps(scale=lambda problem: 1.0 / problem.scale), family="factor"
)
def scale_inverted(call: ExactAttention) -> Iterator[Form]:
    """Q·k is multiplied by √head_dim, not divided by it."""
    yield from _with_factor(call, 1.0 / call.scale**2)
    # Or divided by the scale in base 2.
    yield from _with_factor(call, 1.0 / (call.scale * LOG2E) ** 2)
    yield from _with_factor(call, math.sqrt(call.problem.head_dim) / call.scale)


@_model(applies=is_attention, steps=fixed_scale(0.125), family="factor")
def scale_fixed(call: ExactAttention) -> Iterator[Form]:
    """The scale is a constant, whatever the call says."""
    # Constants of usual head dims, and what the call's dims, or a padded one, would give.
    padded = 1 << (call.problem.head_dim - 1).bit_length()
    dims = {f"{1.0 / math.sqrt(dim):.4g}": dim for dim in (32, 64, 128)}
    dims |= {"1/√head_dim": call.problem.head_dim, "1/√value_dim": call.problem.value_dim}
    for name, dim in (dims | {"1/√head_dim, padded": padded}).items():
        constant = 1.0 / math.sqrt(dim)
        if any(True for _ in call.predict(fixed_scale(constant))):
            yield from _with_factor(call, constant / call.scale, scale=name)
        else:  # A call with this scale is right, which does not refute the constant.
            yield call.exact, {"scale": name}


def _has_usual_scale(problem: Problem) -> bool:
    return is_attention(problem) and problem.scale == problem.replace(scale=USUAL_SCALE).scale


@_model(applies=is_attention, family="factor")
def scale_default(call: ExactAttention) -> Iterator[Form]:
    """The scale that is taken where none is given is not 1 / √head_dim."""
    dim = call.problem.head_dim
    # An explicit scale is used, and right.
    if not _has_usual_scale(call.problem):
        yield call.exact, {}
        return
    for factor in (1.0, 1.0 / dim, dim, math.sqrt(dim), 1.0 / dim**2, dim**-0.25):
        yield from _with_factor(call, factor / call.scale)
    # Or head_dim is that of a padded tile: the next power of two, or multiple of a block.
    padded = {"a power of two": 1 << (dim - 1).bit_length()}
    padded |= {f"a multiple of {block}": -(-dim // block) * block for block in (16, 32, 64)}
    for name, columns in padded.items():
        yield from _with_factor(call, columns**-0.5 / call.scale, padded=name)


def _usual_for_zero(problem: Problem) -> float | None:
    return None if problem.scale else problem.replace(scale=USUAL_SCALE).scale


@_model(applies=is_attention, steps=Steps(scale=_usual_for_zero))
def scale_of_zero_for_none(call: ExactAttention) -> Iterator[Form]:
    """A scale of 0 is taken for none, and 1 / √head_dim stands for it."""
    # ``scale or default``; any other scale is used, and right.
    if call.problem.scale:
        yield call.exact, {}


@_model(order=2, family="factor")
def scale_off(call: ExactAttention) -> Iterator[Form]:
    """The scale is off by a factor."""

    # Fit the logarithm of the factor, so that no step makes the factor negative.
    def factor(log: float) -> float:
        return math.exp(min(max(log, -20.0), 20.0))

    def at(log: float) -> Outputs:
        return call.attend(x=call.x * factor(log))

    yield Prediction(outputs=at(0.1), family=at, start=0.1, parameter="factor", shown=factor)


@_model(applies=has_score())
def score_mod_before_scale(call: ExactAttention) -> Iterator[Form]:
    """The score mod is applied before the scale."""
    yield call.attend(s=call.modified(call.qk) * call.scale)


def _in_base_2(problem: Problem, device: str) -> ScoreMod | None:
    """Return an additive mod that takes and returns scores times log2 e, as exp2 needs them."""
    if not is_additive(problem.score):
        return None
    mod = problem.score_mod(device)
    return lambda score, *at: mod(score * LOG2E, *at) / LOG2E


@_model(
    applies=has_score("alibi", "relative_bias", "bias", "expression"), steps=Steps(score=_in_base_2)
)
def bias_not_scaled(call: ExactAttention) -> Iterator[Form]:
    """What the score mod adds is in other units than the scores: log2 e is missing there."""
    # Only the added term is in other units, as in kernels that keep scores in base 2.
    added = call.s - call.x
    for factor in (1.0 / LOG2E, LOG2E):
        yield call.attend(s=call.x + added * factor)
    # The mod gets scores in base 2, and its result is taken for base 2.
    yield call.attend(s=call.modified(call.x * LOG2E) / LOG2E)


def _softcap(capped: Callable[[Tensor, float], Tensor]) -> Steps:
    """Return Steps with another function (score, cap) in place of softcap."""
    return steps_with_scores(
        {"softcap": lambda values, _d, _: lambda s, _b, _h, _i, _j: capped(s, values["cap"])}
    )


def _without(part: str) -> Steps:
    return steps_with_scores({part: lambda _v, _d, _: scores.none})


@_model(applies=has_score(), order=1, family="precision")
def score_mod_rounded(call: ExactAttention) -> Iterator[Form]:
    """What the score mod adds, or a result on its way, is rounded to too few bits."""
    for name in ("bf16", "fp16"):
        rounded = round_to_format(name)
        if is_additive(call.problem.score):
            # In natural units, or in those of exp2.
            for unit in (1.0, LOG2E):
                s = call.x + rounded((call.s - call.x) * unit) / unit
                yield call.attend(s=s), {"format": name, "of": "what it adds"}
        of_cap = {
            "score / cap": partial(_softcap_rounded, rounded, lambda x: x),
            "tanh": partial(_softcap_rounded, lambda x: x, rounded),
            "both": partial(_softcap_rounded, rounded, rounded),
        }
        for of, capped in of_cap.items():
            for outputs, _ in call.predict(_softcap(capped)):
                yield outputs, {"format": name, "of": of}


def _softcap_rounded(
    quotient: Callable[[Tensor], Tensor], tanh: Callable[[Tensor], Tensor], s: Tensor, cap: float
) -> Tensor:
    return cap * tanh(torch.tanh(quotient(s / cap)))


def _softcap_in_units(into: float, out: float) -> Steps:
    return _softcap(lambda s, cap: cap * torch.tanh(s * into / cap) * out)


def _tanh_by_e(x: Tensor) -> Tensor:
    up, down = x.exp(), (-x).exp()
    return (up - down) / (up + down)


def _tanh_by_e_squared(x: Tensor) -> Tensor:
    up = (2 * x).exp()
    return (up - 1) / (up + 1)


def _tanh_by_one_minus(x: Tensor) -> Tensor:
    # It cancels for a small x, and saturates rightly for a large one.
    return 1 - 2 / ((2 * x).exp() + 1)


for _name, _sentence, _steps in (
    (
        "softcap-missing",
        "softcap is ignored",
        _without("softcap"),
    ),
    (
        "softcap-of-log2",
        "softcap is applied to scores in log2 units",
        (
            _softcap_in_units(LOG2E, 1.0 / LOG2E),
            _softcap_in_units(LOG2E, 1.0),
            _softcap_in_units(1.0, LOG2E),
            _softcap_in_units(1.0 / LOG2E, 1.0),
        ),
    ),
    (
        "tanh-overflows",
        (
            "tanh is made of exponentials: NaN where a score is large beside the cap, and rounded "
            "away where it is small"
        ),
        (
            _softcap(lambda s, cap: cap * _tanh_by_e((s / cap).float()).to(s.dtype)),
            _softcap(lambda s, cap: cap * _tanh_by_e_squared((s / cap).float()).to(s.dtype)),
            _softcap(lambda s, cap: cap * _tanh_by_one_minus((s / cap).float()).to(s.dtype)),
        ),
    ),
    (
        "softcap-times-score",
        "softcap multiplies tanh(score / cap) by the score, not by the cap",
        _softcap(lambda s, cap: s * torch.tanh(s / cap)),
    ),
    (
        "softcap-not-of-the-quotient",
        (
            "softcap is not cap · tanh(score / cap): a cap is missing, or divides and multiplies "
            "the wrong way round"
        ),
        tuple(
            _softcap(one)
            for one in (
                lambda s, cap: cap * torch.tanh(s * cap),
                lambda s, cap: cap * torch.tanh(s),
                lambda s, cap: cap * torch.tanh(cap / s),
                lambda s, cap: torch.tanh(s / cap),
                lambda s, cap: torch.tanh(s / cap) / cap,
                lambda s, cap: cap / torch.tanh(s / cap),
                lambda s, cap: cap * torch.tanh(s / cap / 2),
                lambda s, cap: cap * torch.tanh(s / cap * 2),
            )
        ),
    ),
):
    MODELS.add(_name, _sentence, applies=has_score("softcap"), steps=_steps)


@_model(applies=has_score("softcap"))
def softcap_after_mask(call: ExactAttention) -> Iterator[Form]:
    """Softcap is applied after the mask: hidden keys get −cap, and are seen."""
    # tanh(−∞) is −1, so that a hidden key has a finite score.
    s = call.modified(torch.where(call.seen, call.x, -math.inf))
    yield call.attend(s=s, seen=torch.ones_like(call.seen))


@_model(
    # Softcap alone has a model of its own.
    applies=lambda problem: has_score()(problem) and problem.score.name != "softcap",
)
def score_mod_ignored(call: ExactAttention) -> Iterator[Form]:
    """The score mod is ignored."""
    yield call.attend(s=call.x)
    for part in dict.fromkeys(part.name for part in call.problem.score.walk()):
        # The whole mod is left out above; here it is a part of a composed one.
        if part != call.problem.score.name:
            yield _without(part), {"ignored": part}


@_model(applies=has_score())
def score_mod_twice(call: ExactAttention) -> Iterator[Form]:
    """The score mod is applied twice."""
    yield call.attend(s=call.modified(call.s))


def _negative_alibi(_values: Any, dims: Dimensions, device: str) -> ScoreMod:
    return scores.alibi(-torch.tensor(scores.alibi_slopes(dims.heads), device=device))


@_model(
    applies=has_score("alibi", "relative_bias", "bias"),
    steps=steps_with_scores({"alibi": _negative_alibi}),
)
def alibi_sign(call: ExactAttention) -> Iterator[Form]:
    """What the score mod adds has the wrong sign."""
    # For an additive mod this is x − (s − x).
    yield call.attend(s=2 * call.x - call.s)


def _by_key_head(problem: Problem, device: str) -> ScoreMod | None:
    mod = problem.score_mod(device)
    return lambda score, b, h, i, j: mod(score, b, h // problem.group, i, j)


@_model(
    applies=lambda problem: has_score()(problem) and problem.heads > 1,
    steps=Steps(score=_by_key_head),
)
def alibi_head_order(call: ExactAttention) -> Iterator[Form]:
    """The score mod is asked about another head: slopes or biases are those of the wrong one."""
    problem, h = call.problem, call.h
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
        yield call.attend(s=call.modified(call.x, h=other)), {"head": name}


def _published_slopes(heads: int) -> tuple[float, ...]:
    """Return ALiBi's slopes of the power of two below ``heads``, then every other of the next."""
    power = 1 << (heads.bit_length() - 1)
    return (*scores.alibi_slopes(power), *scores.alibi_slopes(2 * power)[::2])[:heads]


def _alibi_with(slopes: Callable[[int], tuple[float, ...]]) -> Steps:
    def build(_values: Any, dims: Dimensions, device: str) -> ScoreMod:
        return scores.alibi(torch.tensor(slopes(dims.heads), device=device))

    return steps_with_scores({"alibi": build})


@_model(applies=has_score("alibi"), steps=_alibi_with(_published_slopes))
def alibi_slopes(call: ExactAttention) -> Iterator[Form]:
    """Slopes are those of another number of heads."""
    heads = call.problem.heads
    power = 1 << (heads.bit_length() - 1)
    # These slopes begin at 2⁰, and the published ones at 2^(-8 / heads).
    later = tuple(2.0 ** (-8.0 * h / heads) for h in range(heads))
    for slopes in dict.fromkeys(
        (scores.alibi_slopes(power * 2)[:heads], later, scores.alibi_slopes(call.problem.kv_heads))
    ):
        if len(slopes) == heads:
            yield _alibi_with(dict.fromkeys([heads], slopes).__getitem__)


def _without_offset(problem: Problem, device: str) -> ScoreMod | None:
    if problem.score.name != "offset":
        return None
    return problem.replace(score=problem.score.parts[0]).score_mod(device)


@_model(applies=has_score(), steps=Steps(score=_without_offset))
def alibi_offset(call: ExactAttention) -> Iterator[Form]:
    """The score mod is asked about another row: an offset is missing, or there once too often."""
    # Rows may be counted from the end or the start of the keys, or from 1.
    apart = call.problem.kv - call.problem.query
    for rows in dict.fromkeys((apart, -apart, 1, -1)):
        if rows:
            s = call.modified(call.x, i=rows)
            yield call.attend(s=s), {"rows": rows}
            # flash-attn's ALiBi falls on both sides of a row's own key.
            if is_additive(call.problem.score):
                yield call.attend(s=call.x - (s - call.x).abs()), {"rows": rows, "falls": "twice"}


@_model(applies=has_score("alibi"))
def alibi_distance(call: ExactAttention) -> Iterator[Form]:
    """ALiBi takes the distance without its sign."""
    added = call.s - call.x
    for sign in (1.0, -1.0):
        yield call.attend(s=call.x + sign * added.abs())


@_model(applies=lambda problem: has_score()(problem) and problem.batch > 1)
def score_mod_batch(call: ExactAttention) -> Iterator[Form]:
    """The score mod is asked about another sequence of the batch."""
    for other in (0 * call.b, call.problem.batch - 1 - call.b):
        yield call.attend(s=call.modified(call.x, b=other))
