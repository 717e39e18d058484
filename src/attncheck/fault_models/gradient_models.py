"""Fault models of the backward alone."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from attncheck.fault_models.exact_attention import weighted_sum
from attncheck.fault_models.fault_model import Prediction, masked, model, scored
from attncheck.fault_models.mask_models import mask_without_part
from attncheck.mods import masks
from attncheck.mods.captured_gradients import CapturedSums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from attncheck.core.outputs import Outputs
    from attncheck.fault_models.exact_attention import ExactAttention
    from attncheck.inputs.problem import Problem

__all__ = ["ExactGradients", "slip"]


class ExactGradients:
    """Gradients of a Given with a loss, all of whose rows are there.

    Attributes:
        given: The call.
        dout, dlse: The loss's.
    """

    def __init__(self, given: ExactAttention) -> None:
        self.given = given
        self.dout, self.dlse = given.inputs.loss()

    @cached_property
    def delta(self) -> Tensor:
        """Σ dO·O."""
        return (self.dout * self.given.parts.out).sum(-1)

    @cached_property
    def dp(self) -> Tensor:
        """dO·v."""
        return self.dout @ self.given.v.mT

    @cached_property
    def slopes(self) -> Tensor:
        """The score mod's derivative."""
        return self.slopes_at(self.given.x)

    def slopes_at(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        """The same at other scores, or of other heads."""
        given = self.given
        if given.problem.score.name == "none":
            return torch.ones_like(x)
        x = x.clone().requires_grad_()
        with torch.enable_grad():
            s = given.modified(x, h=h)
            if not s.requires_grad:
                return torch.zeros_like(x)
            (found,) = torch.autograd.grad(s, x, torch.ones_like(s))
        return found

    def weights(
        self, *, s: Tensor | None = None, seen: Tensor | None = None, lse: Tensor | None = None
    ) -> Tensor:
        """P from LSE, 0 where hidden."""
        given = self.given
        lse = given.parts.lse if lse is None else lse
        base = torch.where(lse == -math.inf, 0.0, lse)[..., None]
        seen = given.seen if seen is None else seen
        return torch.where(seen, ((given.s if s is None else s) - base).exp(), 0.0)

    def gradients(  # noqa: PLR0913  # a place to bend each
        self,
        *,
        weights: Tensor | None = None,
        delta: Tensor | None = None,
        dlse: Tensor | None = None,
        dout: Tensor | None = None,
        dp: Tensor | None = None,
        slopes: Tensor | None = None,
        k: Tensor | None = None,
        q: Tensor | None = None,
        scale: float | None = None,
    ) -> Outputs:
        """Exact out and LSE with these gradients; each argument in place of the exact one."""
        given, problem = self.given, self.given.problem
        p = self.weights() if weights is None else weights
        dout = self.dout if dout is None else dout
        scale = given.scale if scale is None else scale
        off = (self.delta if delta is None else delta) - (self.dlse if dlse is None else dlse)
        dz = p * ((self.dp if dp is None else dp) - off[..., None])
        dx = torch.where(p == 0, 0.0, dz * (self.slopes if slopes is None else slopes))
        k, q = given.k if k is None else k, given.q if q is None else q
        dq = product_of(dx, k) * scale
        dk = product_of(dx.mT, q) * scale
        dv = product_of(p.mT, dout)
        dsink = None
        if given.sink is not None:
            of_sink = torch.exp(given.sink - given.parts.lse)
            dsink = torch.where(of_sink > 0, of_sink * -off, 0.0).sum((0, 2))
        return replace(
            given.parts.outputs,
            dq=dq,
            dk=summed(dk, problem.group),
            dv=summed(dv, problem.group),
            dsink=dsink,
            dcaptured=self.captured(dz) if problem.dcaptured else None,
        )

    def captured(self, dz: Tensor, where: Tensor | None = None) -> Tensor:
        """Of the numbers that the score mod reads: from gradients of the scores after it.

        Args:
            dz: Those, ``(batch, heads, query, kv)``.
            where: Which of them count; those that are seen unless told.
        """
        given = self.given
        sums = CapturedSums(given.score, "cpu")
        at = (given.b, given.h, given.i, given.j)
        sums.add(given.x, at, dz, given.seen if where is None else given.seen & where)
        return sums.sums


def product_of(weights: Tensor, values: Tensor) -> Tensor:
    """Weights · values of either sign, where a weight of 0 keeps what is not finite away."""
    if bool(values.isfinite().all()):
        return weights @ values
    return weighted_sum(weights.clamp(min=0.0), values) - weighted_sum(
        (-weights).clamp(min=0.0), values
    )


def summed(of_heads: Tensor, group: int) -> Tensor:
    """Over the query heads that read one key head."""
    batch, heads, *rest = of_heads.shape
    return of_heads.view(batch, heads // group, group, *rest).sum(2)


_LOG2E = math.log2(math.e)
_MOST_PARTS = 12  # of dQ, that are tried


def _backward(more: Callable[[Problem], bool] | None = None) -> Callable[[Problem], bool]:
    return lambda problem: problem.backward and (more is None or more(problem))


def slip(
    name: str, sentence: str, applies: Callable[[Problem], bool] | None = None, order: int = 0
) -> Callable[[Callable[[ExactGradients], Iterator[Outputs | Prediction]]], None]:
    """A model of a backward: a generator over a Backward."""

    def add(variants: Callable[[ExactGradients], Iterator[Outputs | Prediction]]) -> None:
        @model(
            name,
            sentence,
            group="gradients",
            of="backward",
            applies=_backward(applies),
            order=order,
        )
        def all_of(given: ExactAttention) -> Iterator[Prediction]:
            for found in variants(_of(given)):
                yield found if isinstance(found, Prediction) else Prediction(outputs=found)

    return add


_KEPT: list[tuple[ExactAttention, ExactGradients]] = []


def _of(given: ExactAttention) -> ExactGradients:
    """One for all models of a Given."""
    if not _KEPT or _KEPT[0][0] is not given:
        _KEPT[:] = [(given, ExactGradients(given))]
    return _KEPT[0][1]


@slip("delta-missing", "delta is missing: dS is P · dP, not P · (dP − delta)")
def _delta(of: ExactGradients) -> Iterator[Outputs]:
    zero = torch.zeros_like(of.delta)
    yield of.gradients(delta=zero)
    yield of.gradients(delta=zero, dlse=zero)


@slip("dlse-ignored", "the gradient that arrives by LSE is ignored", lambda problem: problem.dlse)
def _dlse(of: ExactGradients) -> Iterator[Outputs]:
    yield of.gradients(dlse=torch.zeros_like(of.delta))


@slip("dlse-sign", "the gradient that arrives by LSE has the wrong sign", lambda p: p.dlse)
def _sign(of: ExactGradients) -> Iterator[Outputs]:
    yield of.gradients(dlse=-of.dlse)
    yield of.gradients(dlse=of.dlse * _LOG2E)
    yield of.gradients(dlse=of.dlse / _LOG2E)


@slip("dout-scaled", "all gradients are off by one factor", order=2)
def _scaled(of: ExactGradients) -> Iterator[Prediction]:
    exact = of.gradients()

    def at(share: float) -> Outputs:
        return _times(exact, 1.0 + share, "dq", "dk", "dv", "dsink")

    yield Prediction(outputs=at(0.1), family=at, start=0.1, parameter="share")


def _times(outputs: Outputs, factor: float, *names: str) -> Outputs:
    there: dict[str, Any] = {n: getattr(outputs, n) for n in names}
    return replace(outputs, **{n: x * factor for n, x in there.items() if x is not None})


@slip("dk-without-scale", "dK is not multiplied by the scale")
def _dk(of: ExactGradients) -> Iterator[Outputs]:
    yield _times(of.gradients(), 1.0 / of.given.scale, "dk")


@slip("dq-without-scale", "dQ is not multiplied by the scale")
def _dq(of: ExactGradients) -> Iterator[Outputs]:
    yield _times(of.gradients(), 1.0 / of.given.scale, "dq")


@slip("dq-dk-without-scale", "neither dQ nor dK is multiplied by the scale")
def _both(of: ExactGradients) -> Iterator[Outputs]:
    yield _times(of.gradients(), 1.0 / of.given.scale, "dq", "dk")


@slip("gradient-units", "dQ or dK is off by log2 e, or multiplied by the scale once too often")
def _units(of: ExactGradients) -> Iterator[Prediction]:
    exact = of.gradients()
    for names in (("dq",), ("dk",), ("dq", "dk"), ("dv",)):
        for factor in (_LOG2E, 1.0 / _LOG2E, of.given.scale):
            outputs = _times(exact, factor, *names)
            yield Prediction(outputs=outputs, parameters={"of": ", ".join(names)})


@slip("gradient-missing", "a gradient is 0, or some of it is")
def _missing(of: ExactGradients) -> Iterator[Prediction]:
    exact = of.gradients()
    for name in ("dq", "dk", "dv", "dsink"):
        yield Prediction(outputs=_times(exact, 0.0, name), parameters={"of": name})
    yield Prediction(outputs=_times(exact, 0.0, "dq", "dk"), parameters={"of": "dq, dk"})


def _seen(of: ExactGradients, seen: Tensor) -> Outputs:
    return of.gradients(weights=of.weights(seen=seen))


@slip("backward-mask-ignored", "the backward ignores the mask", masked())
def _ignored(of: ExactGradients) -> Iterator[Outputs]:
    yield _seen(of, torch.ones_like(of.given.seen))
    yield _seen(of, (of.given.parts.lse > -math.inf)[..., None].expand(of.given.shape))
    ones = torch.ones_like(of.given.seen)
    yield of.gradients(weights=of.weights(seen=ones).clamp(max=torch.finfo(torch.float32).max))


@slip("backward-causal-always", "the backward applies a causal mask that nobody asked for")
def _causal(of: ExactGradients) -> Iterator[Outputs]:
    given = of.given
    for later in dict.fromkeys((0, given.problem.kv - given.problem.query)):
        yield _seen(of, given.seen & (given.i + later >= given.j))


@slip("backward-mask-shifted", "the mask of the backward is one key off", masked())
def _shifted(of: ExactGradients) -> Iterator[Outputs]:
    for rows in (1, -1):
        yield _seen(of, of.given.visible(of.given.mask, i=rows))


@slip(
    "backward-window-ignored",
    "the backward ignores the window, and is causal alone",
    masked("sliding_window"),
)
def _window(of: ExactGradients) -> Iterator[Outputs]:
    mask = mask_without_part(of.given.problem, "sliding_window", masks.causal)
    if mask is not None:
        yield _seen(of, of.given.visible(mask))


@slip("slope-missing", "the derivative of the score mod is missing", scored())
def _slope(of: ExactGradients) -> Iterator[Outputs]:
    yield of.gradients(slopes=torch.ones_like(of.slopes))


@slip("backward-score-mod-ignored", "the backward ignores the score mod", scored())
def _mod(of: ExactGradients) -> Iterator[Outputs]:
    weights = of.weights(s=of.given.x)
    yield of.gradients(weights=weights, slopes=torch.ones_like(of.slopes))
    yield of.gradients(weights=weights)


@slip(
    "group-last-head",
    "dK and dV of a key head are those of one query head of its group, not the sum",
    lambda problem: problem.group > 1,
)
def _group(of: ExactGradients) -> Iterator[Prediction]:
    given, problem = of.given, of.given.problem
    exact = of.gradients()
    p = of.weights()
    off = of.delta - of.dlse
    dx = p * (of.dp - off[..., None]) * of.slopes
    each = {"dk": dx.mT @ given.q * given.scale, "dv": p.mT @ of.dout}
    for number in (problem.group - 1, 0):
        mine = {name: x[:, number :: problem.group] for name, x in each.items()}
        yield Prediction(outputs=replace(exact, **mine), parameters={"head": number})
        for name in each:
            one = replace(exact, **{name: mine[name]})
            yield Prediction(outputs=one, parameters={"head": number, "of": name})
    means = replace(_times(exact, 1.0 / problem.group, "dk", "dv"))
    yield Prediction(outputs=means, parameters={"head": "mean"})


@slip("backward-lse-base-2", "the backward takes a natural LSE for one to base 2, or the reverse")
def _lse(of: ExactGradients) -> Iterator[Outputs]:
    for factor in (_LOG2E, 1.0 / _LOG2E):
        yield of.gradients(weights=of.weights(lse=of.given.parts.lse * factor))


@slip("backward-scale", "the backward has another scale in its weights")
def _scale(of: ExactGradients) -> Iterator[Outputs]:
    given = of.given
    for factor in (given.scale, 1.0 / given.scale, _LOG2E, 1.0 / _LOG2E):
        s = given.modified(given.x * factor)
        yield of.gradients(weights=of.weights(s=s))


@slip("dq-tile-dropped", "a tile of keys adds nothing to dQ", order=1)
def _dq_tile(of: ExactGradients) -> Iterator[Prediction]:
    given, exact = of.given, of.gradients()
    for size in given.key_tiles:
        count = -(-given.problem.kv // size)
        for number in dict.fromkeys((0, count - 1)):
            seen = given.seen & (given.j // size != number)
            dropped = _seen(of, seen)
            parameters = {"tile": size, "number": number}
            yield Prediction(outputs=replace(exact, dq=dropped.dq), parameters=parameters)
            yield Prediction(outputs=dropped, parameters=parameters)
        # Of atomic additions that are none the last one stays.
        only = _seen(of, given.seen & (given.j // size == count - 1))
        yield Prediction(outputs=replace(exact, dq=only.dq), parameters={"tile": size})
    for rows, size in given.tiles:
        blocks, count = -(-given.problem.query // rows), -(-given.problem.kv // size)
        if 1 < blocks * count <= _MOST_PARTS:
            for part in range(blocks * count):
                lost = (given.i // rows == part // count) & (given.j // size == part % count)
                parameters = {"tile": size, "number": part % count, "rows": part // count * rows}
                found = replace(exact, dq=_seen(of, given.seen & ~lost).dq)
                yield Prediction(outputs=found, parameters=parameters)


@slip("dk-rows-dropped", "a tile of rows adds nothing to dK and dV", order=1)
def _dk_rows(of: ExactGradients) -> Iterator[Prediction]:
    given, exact = of.given, of.gradients()
    query = given.problem.query
    for size in dict.fromkeys(rows for rows, _ in given.tiles):
        count = -(-query // size)
        for number in dict.fromkeys((0, count - 1)):
            dropped = _seen(of, given.seen & (given.i // size != number))
            parameters = {"tile": size, "number": number}
            keys = replace(exact, dk=dropped.dk, dv=dropped.dv)
            yield Prediction(outputs=keys, parameters=parameters)
            yield Prediction(outputs=replace(exact, dk=dropped.dk), parameters=parameters)
            yield Prediction(outputs=replace(exact, dv=dropped.dv), parameters=parameters)


@slip("backward-kv-heads", "the backward reads another key head", lambda p: p.kv_heads > 1)
def _heads(of: ExactGradients) -> Iterator[Prediction]:
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
        yield Prediction(
            outputs=of.gradients(weights=weights, dp=dp, k=k[:, heads]), parameters={"head": name}
        )


@slip("delta-of-another-row", "delta is that of another row")
def _other_row(of: ExactGradients) -> Iterator[Outputs]:
    for later in (1, -1):
        yield of.gradients(delta=of.delta.roll(later, -1))


@slip("backward-empty-rows-nan", "rows that see no key make gradients NaN or infinite", masked())
def _nan(of: ExactGradients) -> Iterator[Outputs]:
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
def _tail(of: ExactGradients) -> Iterator[Outputs]:
    exact = of.gradients()
    assert exact.dq is not None, "of a backward"
    low = of.given.parts.lse < -math.log(torch.finfo(torch.float32).max)
    yield replace(exact, dq=torch.where(low[..., None], math.nan, exact.dq))
