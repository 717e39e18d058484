"""Faults of the backward alone: the forward is right."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from attncheck.hypotheses.backward import Backward, summed
from attncheck.hypotheses.masks import without_part
from attncheck.hypotheses.model import Variant, masked, model, scored
from attncheck.mods import masks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from attncheck.hypotheses.given import Given
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem

__all__ = ["slip"]

_LOG2E = math.log2(math.e)
_MOST_PARTS = 12  # of dQ, that are tried


def _backward(more: Callable[[Problem], bool] | None = None) -> Callable[[Problem], bool]:
    return lambda problem: problem.backward and (more is None or more(problem))


def slip(
    name: str, sentence: str, applies: Callable[[Problem], bool] | None = None, order: int = 0
) -> Callable[[Callable[[Backward], Iterator[Outputs | Variant]]], None]:
    """A model of a backward: a generator over a Backward."""

    def add(variants: Callable[[Backward], Iterator[Outputs | Variant]]) -> None:
        @model(
            name,
            sentence,
            group="gradients",
            of="backward",
            applies=_backward(applies),
            order=order,
        )
        def all_of(given: Given) -> Iterator[Variant]:
            for found in variants(_of(given)):
                yield found if isinstance(found, Variant) else Variant(outputs=found)

    return add


_KEPT: list[tuple[Given, Backward]] = []


def _of(given: Given) -> Backward:
    """One for all models of a Given."""
    if not _KEPT or _KEPT[0][0] is not given:
        _KEPT[:] = [(given, Backward(given))]
    return _KEPT[0][1]


@slip("delta-missing", "delta is missing: dS is P · dP, not P · (dP − delta)")
def _delta(of: Backward) -> Iterator[Outputs]:
    zero = torch.zeros_like(of.delta)
    yield of.gradients(delta=zero)
    yield of.gradients(delta=zero, dlse=zero)


@slip("dlse-ignored", "the gradient that arrives by LSE is ignored", lambda problem: problem.dlse)
def _dlse(of: Backward) -> Iterator[Outputs]:
    yield of.gradients(dlse=torch.zeros_like(of.delta))


@slip("dlse-sign", "the gradient that arrives by LSE has the wrong sign", lambda p: p.dlse)
def _sign(of: Backward) -> Iterator[Outputs]:
    yield of.gradients(dlse=-of.dlse)
    yield of.gradients(dlse=of.dlse * _LOG2E)
    yield of.gradients(dlse=of.dlse / _LOG2E)


@slip("dout-scaled", "all gradients are off by one factor", order=2)
def _scaled(of: Backward) -> Iterator[Variant]:
    exact = of.gradients()

    def at(share: float) -> Outputs:
        return _times(exact, 1.0 + share, "dq", "dk", "dv", "dsink")

    yield Variant(outputs=at(0.1), family=at, start=0.1, parameter="share")


def _times(outputs: Outputs, factor: float, *names: str) -> Outputs:
    there: dict[str, Any] = {n: getattr(outputs, n) for n in names}
    return replace(outputs, **{n: x * factor for n, x in there.items() if x is not None})


@slip("dk-without-scale", "dK is not multiplied by the scale")
def _dk(of: Backward) -> Iterator[Outputs]:
    yield _times(of.gradients(), 1.0 / of.given.scale, "dk")


@slip("dq-without-scale", "dQ is not multiplied by the scale")
def _dq(of: Backward) -> Iterator[Outputs]:
    yield _times(of.gradients(), 1.0 / of.given.scale, "dq")


@slip("dq-dk-without-scale", "neither dQ nor dK is multiplied by the scale")
def _both(of: Backward) -> Iterator[Outputs]:
    yield _times(of.gradients(), 1.0 / of.given.scale, "dq", "dk")


@slip("gradient-units", "dQ or dK is off by log2 e, or multiplied by the scale once too often")
def _units(of: Backward) -> Iterator[Variant]:
    exact = of.gradients()
    for names in (("dq",), ("dk",), ("dq", "dk"), ("dv",)):
        for factor in (_LOG2E, 1.0 / _LOG2E, of.given.scale):
            outputs = _times(exact, factor, *names)
            yield Variant(outputs=outputs, parameters={"of": ", ".join(names)})


@slip("gradient-missing", "a gradient is 0, or some of it is")
def _missing(of: Backward) -> Iterator[Variant]:
    exact = of.gradients()
    for name in ("dq", "dk", "dv", "dsink"):
        yield Variant(outputs=_times(exact, 0.0, name), parameters={"of": name})
    yield Variant(outputs=_times(exact, 0.0, "dq", "dk"), parameters={"of": "dq, dk"})


def _seen(of: Backward, seen: Tensor) -> Outputs:
    return of.gradients(weights=of.weights(seen=seen))


@slip("backward-mask-ignored", "the backward ignores the mask", masked())
def _ignored(of: Backward) -> Iterator[Outputs]:
    yield _seen(of, torch.ones_like(of.given.seen))
    yield _seen(of, (of.given.parts.lse > -math.inf)[..., None].expand(of.given.shape))
    ones = torch.ones_like(of.given.seen)
    yield of.gradients(weights=of.weights(seen=ones).clamp(max=torch.finfo(torch.float32).max))


@slip("backward-causal-always", "the backward applies a causal mask that nobody asked for")
def _causal(of: Backward) -> Iterator[Outputs]:
    given = of.given
    for later in dict.fromkeys((0, given.problem.kv - given.problem.query)):
        yield _seen(of, given.seen & (given.i + later >= given.j))


@slip("backward-mask-shifted", "the mask of the backward is one key off", masked())
def _shifted(of: Backward) -> Iterator[Outputs]:
    for rows in (1, -1):
        yield _seen(of, of.given.visible(of.given.mask, i=rows))


@slip(
    "backward-window-ignored",
    "the backward ignores the window, and is causal alone",
    masked("sliding_window"),
)
def _window(of: Backward) -> Iterator[Outputs]:
    mask = without_part(of.given.problem, "sliding_window", masks.causal)
    if mask is not None:
        yield _seen(of, of.given.visible(mask))


@slip("slope-missing", "the derivative of the score mod is missing", scored())
def _slope(of: Backward) -> Iterator[Outputs]:
    yield of.gradients(slopes=torch.ones_like(of.slopes))


@slip("backward-score-mod-ignored", "the backward ignores the score mod", scored())
def _mod(of: Backward) -> Iterator[Outputs]:
    weights = of.weights(s=of.given.x)
    yield of.gradients(weights=weights, slopes=torch.ones_like(of.slopes))
    yield of.gradients(weights=weights)


@slip(
    "group-last-head",
    "dK and dV of a key head are those of one query head of its group, not the sum",
    lambda problem: problem.group > 1,
)
def _group(of: Backward) -> Iterator[Variant]:
    given, problem = of.given, of.given.problem
    exact = of.gradients()
    p = of.weights()
    off = of.delta - of.dlse
    dx = p * (of.dp - off[..., None]) * of.slopes
    each = {"dk": dx.mT @ given.q * given.scale, "dv": p.mT @ of.dout}
    for number in (problem.group - 1, 0):
        mine = {name: x[:, number :: problem.group] for name, x in each.items()}
        yield Variant(outputs=replace(exact, **mine), parameters={"head": number})
        for name in each:
            one = replace(exact, **{name: mine[name]})
            yield Variant(outputs=one, parameters={"head": number, "of": name})
    means = replace(_times(exact, 1.0 / problem.group, "dk", "dv"))
    yield Variant(outputs=means, parameters={"head": "mean"})


@slip("backward-lse-base-2", "the backward takes a natural LSE for one to base 2, or the reverse")
def _lse(of: Backward) -> Iterator[Outputs]:
    for factor in (_LOG2E, 1.0 / _LOG2E):
        yield of.gradients(weights=of.weights(lse=of.given.parts.lse * factor))


@slip("backward-scale", "the backward has another scale in its weights")
def _scale(of: Backward) -> Iterator[Outputs]:
    given = of.given
    for factor in (given.scale, 1.0 / given.scale, _LOG2E, 1.0 / _LOG2E):
        s = given.modified(given.x * factor)
        yield of.gradients(weights=of.weights(s=s))


@slip("dq-tile-dropped", "a tile of keys adds nothing to dQ", order=1)
def _dq_tile(of: Backward) -> Iterator[Variant]:
    given, exact = of.given, of.gradients()
    for size in given.key_tiles:
        count = -(-given.problem.kv // size)
        for number in dict.fromkeys((0, count - 1)):
            seen = given.seen & (given.j // size != number)
            dropped = _seen(of, seen)
            parameters = {"tile": size, "number": number}
            yield Variant(outputs=replace(exact, dq=dropped.dq), parameters=parameters)
            yield Variant(outputs=dropped, parameters=parameters)
        # Of atomic additions that are none the last one stays.
        only = _seen(of, given.seen & (given.j // size == count - 1))
        yield Variant(outputs=replace(exact, dq=only.dq), parameters={"tile": size})
    for rows, size in given.tiles:
        blocks, count = -(-given.problem.query // rows), -(-given.problem.kv // size)
        if 1 < blocks * count <= _MOST_PARTS:
            for part in range(blocks * count):
                lost = (given.i // rows == part // count) & (given.j // size == part % count)
                parameters = {"tile": size, "number": part % count, "rows": part // count * rows}
                found = replace(exact, dq=_seen(of, given.seen & ~lost).dq)
                yield Variant(outputs=found, parameters=parameters)


@slip("dk-rows-dropped", "a tile of rows adds nothing to dK and dV", order=1)
def _dk_rows(of: Backward) -> Iterator[Variant]:
    given, exact = of.given, of.gradients()
    query = given.problem.query
    for size in dict.fromkeys(rows for rows, _ in given.tiles):
        count = -(-query // size)
        for number in dict.fromkeys((0, count - 1)):
            dropped = _seen(of, given.seen & (given.i // size != number))
            parameters = {"tile": size, "number": number}
            keys = replace(exact, dk=dropped.dk, dv=dropped.dv)
            yield Variant(outputs=keys, parameters=parameters)
            yield Variant(outputs=replace(exact, dk=dropped.dk), parameters=parameters)
            yield Variant(outputs=replace(exact, dv=dropped.dv), parameters=parameters)


@slip("backward-kv-heads", "the backward reads another key head", lambda p: p.kv_heads > 1)
def _heads(of: Backward) -> Iterator[Variant]:
    given, problem = of.given, of.given.problem
    _, k, v = given.inputs.promoted()
    h = given.h.flatten()
    for name, heads in {
        "interleaved": h % problem.kv_heads,
        "first": 0 * h,
        "by place in the group": (h % problem.group) % problem.kv_heads,
    }.items():
        s = given.modified(given.q @ k[:, heads].mT * given.scale)
        weights, dp = of.weights(s=s), of.dout @ v[:, heads].mT
        yield Variant(
            outputs=of.gradients(weights=weights, dp=dp, k=k[:, heads]), parameters={"head": name}
        )


@slip("delta-of-another-row", "delta is that of another row")
def _other_row(of: Backward) -> Iterator[Outputs]:
    for later in (1, -1):
        yield of.gradients(delta=of.delta.roll(later, -1))


@slip("backward-empty-rows-nan", "rows that see no key make gradients NaN or infinite", masked())
def _nan(of: Backward) -> Iterator[Outputs]:
    exact = of.gradients()
    dead = of.given.parts.lse == -math.inf
    if not bool(dead.any()):
        return
    assert exact.dq is not None, "of a backward"
    assert exact.dk is not None, "of a backward"
    assert exact.dv is not None, "of a backward"
    dq = torch.where(dead[..., None], math.nan, exact.dq)
    of_keys = dead.any(-1).view(*exact.dk.shape[:2], -1).any(-1)[..., None, None]
    dk, dv = (torch.where(of_keys, math.nan, x) for x in (exact.dk, exact.dv))
    yield replace(exact, dq=dq)
    yield replace(exact, dq=dq, dk=dk, dv=dv)
    yield replace(exact, dk=dk, dv=dv)
    yield replace(exact, dv=dv)
    # Their weights are exp(score − LSE) = ∞; where they have a part in dS they make that NaN.
    infinite = (of.weights() + torch.where(dead, math.inf, 0.0)[..., None]).mT @ of.dout
    infinite = summed(infinite, of.given.problem.group)
    yield replace(exact, dv=infinite)
    yield replace(exact, dq=dq, dk=dk, dv=infinite)


@slip("backward-tail-nan", "the padding of the last tile of keys makes dQ NaN: exp overflows")
def _tail(of: Backward) -> Iterator[Outputs]:
    exact = of.gradients()
    assert exact.dq is not None, "of a backward"
    low = of.given.parts.lse < -math.log(torch.finfo(torch.float32).max)
    yield replace(exact, dq=torch.where(low[..., None], math.nan, exact.dq))
