"""Reference gradients by torch's autograd in float64, and the errors allowed to a kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from tests.exact_attention import attention, gradients, indices

from attncheck.core.formats import DTYPES, FORMATS
from attncheck.mods.captured_reads import trace_reads

if TYPE_CHECKING:
    from collections.abc import Callable

U = FORMATS["fp32"].unit_roundoff
TINY = 2.0**-126  # below it exp2 may give 0


@dataclass(frozen=True, kw_only=True)
class Score:
    """A score mod with a slope of at most 1, a bound on its curvature, and a small own error.

    With ``make`` and ``tensors``, ``mod`` is ``make(*tensors)``; ``exact`` makes it from the same
    numbers in float64 and differentiates by them.
    """

    mod: Callable[..., torch.Tensor]
    bend: float = 0.0  # the largest second derivative, also by the captured numbers
    make: Callable[..., Callable[..., torch.Tensor]] | None = None
    tensors: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(cls, make: Callable[..., Callable[..., torch.Tensor]], *tensors, bend=0.0) -> Score:
        return cls(mod=make(*tensors), bend=bend, make=make, tensors=tensors)


@dataclass(frozen=True, kw_only=True)
class Question:
    """The arguments of a backward; ``dtype`` as a Problem names it."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None
    sink: torch.Tensor | None
    mask: Callable[..., torch.Tensor]
    score: Score | None
    dtype: str
    scale: float = 0.3

    def but(self, **changes) -> Question:
        return replace(self, **changes)

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    def indices(self) -> list[torch.Tensor]:
        return indices(*self.q.shape[:3], self.k.shape[2])

    def seen(self) -> torch.Tensor:
        return self.mask(*self.indices()).expand(*self.q.shape[:3], self.k.shape[2])

    def repeated(self, x: torch.Tensor) -> torch.Tensor:
        return x.double().repeat_interleave(self.group, 1)

    def grouped(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the query heads that share a key head."""
        return x.unflatten(1, (-1, self.group)).sum(2)

    def loss(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.q.new_zeros(self.q.shape[:3]).double()
        return self.dout.double(), rows if self.dlse is None else self.dlse.double()


def make_question(
    mask, dtype="fp32", *, shape=(1, 2, 1, 40, 50, 20, 12), score=None, dlse=True, sink=False
) -> Question:
    """Draw standard normal tensors.

    ``shape``: batch, heads, kv_heads, query, kv, head and value dim.
    """
    batch, heads, kv_heads, query, kv, dim, value_dim = shape
    numbers = torch.Generator().manual_seed(3)
    rows = (batch, heads, query)
    sizes = {
        "q": (*rows, dim),
        "k": (batch, kv_heads, kv, dim),
        "v": (batch, kv_heads, kv, value_dim),
        "dout": (*rows, value_dim),
        "dlse": rows,
        "sink": (heads,),
    }
    drawn = {name: torch.randn(size, generator=numbers) for name, size in sizes.items()}
    stored = DTYPES[dtype].storage.torch_dtype
    drawn |= {name: drawn[name].to(stored) for name in ("q", "k", "v", "dout")}
    drawn |= {name: None for name, kept in (("dlse", dlse), ("sink", sink)) if not kept}
    return Question(**drawn, mask=mask, score=score, dtype=dtype)


def exact(question: Question) -> dict[str, torch.Tensor]:
    """out, lse and the gradients by definition; rows that see no key have out 0 and lse −∞."""
    leaves = {
        name: getattr(question, name).detach().double().requires_grad_()
        for name in ("q", "k", "v", "sink")
        if getattr(question, name) is not None
    }
    score, numbers = question.score, []
    mod = None if score is None else score.mod
    if score is not None and score.make is not None:
        numbers = [each.double().requires_grad_() for each in score.tensors]
        mod = score.make(*numbers)
    of = attention(**leaves, scale=question.scale, mask=question.mask, score=mod)
    captured = {f"{place}": each for place, each in enumerate(numbers)}
    truth = gradients(of, leaves | captured, *question.loss())
    if numbers:
        truth["dcaptured"] = torch.cat([truth.pop(f"d{name}").flatten() for name in captured])
    return {"out": of.out.detach(), "lse": of.lse.detach()} | truth


def gamma(terms: int) -> float:
    """Higham's γ: the relative error of a sum of so many terms in fp32, in any order."""
    return terms * U / (1 - terms * U)


def allowed(question: Question, out: torch.Tensor, lse: torch.Tensor) -> dict[str, torch.Tensor]:
    """The largest errors that a right kernel's gradients may have, for its saved ``out``, ``lse``.

    Errors propagate by |âb̂ − ab| ≤ (|a| + ea)(|b| + eb) − |a||b|, products are summed in fp32 (γ),
    tensor cores truncate tf32 operands (``t``), P and dX are rounded to the operands' format and
    results to the storage format (half a spacing for subnormal numbers). exp2 is within 2 ulp,
    that is 4 U. The saved LSE and out count with their actual errors.
    """
    truth, formats = exact(question), DTYPES[question.dtype]
    t = FORMATS["tf32"].unit_roundoff * 2 if question.dtype == "tf32" else 0.0  # truncated
    t = 2 * t + t * t  # of both operands
    of_operand = t if question.dtype == "tf32" else formats.storage.unit_roundoff
    spacing = formats.storage.subnormal_spacing / 2
    q, k, v = question.q.double(), question.repeated(question.k), question.repeated(question.v)
    dout, dlse = question.loss()
    dim, value_dim, kv = q.shape[-1], v.shape[-1], k.shape[2]

    def rounded(values, error):
        return error + of_operand * (values + error) + spacing

    x = (question.scale * q @ k.mT).requires_grad_(question.score is not None)
    e_x = (gamma(dim + 4) + t) * question.scale * (q.abs() @ k.abs().mT)
    z, slope, e_z, e_slope = x, torch.ones_like(x), e_x, torch.zeros_like(x)
    if question.score is not None:
        z = question.score.mod(x, *question.indices())
        (slope,) = torch.autograd.grad(z.sum(), x)
        x, z = x.detach(), z.detach()
        bend = question.score.bend
        # A division, a tanh, two products and a sum, each of ``triton_ulp``: below 16 U in all.
        e_z = e_x + 16 * U * (x.abs() + z.abs())
        e_slope = bend * (e_x + 16 * U * x.abs()) + 32 * U * slope.abs() + 32 * U * (bend > 0)

    alive = truth["lse"].isfinite()
    true_lse = truth["lse"].masked_fill(~alive, 0.0)
    e_lse = (lse.double().masked_fill(~alive, 0.0) - true_lse).abs() + 4 * U * true_lse.abs()
    attended = question.seen() & alive[..., None]
    p = (z - true_lse[..., None]).exp().masked_fill(~attended, 0.0)
    exponent = e_z + e_lse[..., None] + 4 * U * (z.abs() + true_lse.abs()[..., None])
    e_p = (p * (exponent.expm1() + 8 * U) + TINY).masked_fill(~attended, 0.0)

    dp, e_dp = dout @ v.mT, (gamma(value_dim) + t) * (dout.abs() @ v.abs().mT)
    delta = (dout * truth["out"]).sum(-1) - dlse
    e_delta = (dout.abs() * (out.double() - truth["out"]).abs()).sum(-1)
    e_delta += gamma(value_dim + 4) * ((dout * out.double()).abs().sum(-1) + dlse.abs())
    inner = (dp - delta[..., None]).abs()
    most = (p + e_p) * (inner + e_dp + e_delta[..., None]) * (slope.abs() + e_slope)
    dx = p * inner * slope.abs()
    e_dx = rounded(dx, most * (1 + 4 * U) - dx).masked_fill(~attended, 0.0)
    e_p_stored = rounded(p, e_p).masked_fill(~attended, 0.0)

    def summed(values, error, others, terms):
        return error @ others.abs() + (gamma(terms + 4) + t) * ((values + error) @ others.abs())

    rows = q.shape[2] * question.group
    bounds = {
        "dq": question.scale * summed(dx, e_dx, k, kv),
        "dk": question.scale * question.grouped(summed(dx.mT, e_dx.mT, q, rows)),
        "dv": question.grouped(summed(p.mT, e_p_stored.mT, dout, rows)),
    }
    stored = formats.storage.unit_roundoff
    for name, bound in bounds.items():
        least = 0.0 if bound.numel() == 0 else spacing * (bound > 0)
        bounds[name] = bound + (stored + 4 * U) * (truth[name].abs() + bound) + least
    if question.sink is not None:
        sink = question.sink.double()[:, None]
        weight = (sink - truth["lse"]).exp()
        e_weight = weight * ((e_lse + 4 * U * (sink.abs() + true_lse.abs())).expm1() + 8 * U)
        most = (weight + e_weight) * (delta.abs() + e_delta)
        e_sink = most * (1 + gamma(q.shape[0] * q.shape[2] + 4)) - weight * delta.abs()
        bounds["dsink"] = e_sink.sum((0, 2))
    most = (p + e_p) * (inner + e_dp + e_delta[..., None])
    return bounds | allowed_captured(question, x, e_x, p * inner * attended, most * attended)


def allowed_captured(question: Question, x, e_x, dz, most_dz) -> dict[str, torch.Tensor]:
    """The same for captured numbers: Σ dZ·J in fp32, from |dZ| and its upper bound."""
    score = question.score
    if score is None or score.make is None:
        return {}
    bound = torch.zeros(sum(tensor.numel() for tensor in score.tensors), dtype=torch.float64)
    sizes, counts = bound.clone(), bound.clone()
    for read in trace_reads(score.mod):
        at = (x, *question.indices())
        slope, place = (one.evaluate(*at).expand(x.shape) for one in (read.slope, read.place))
        e_slope = score.bend * (e_x + 16 * U * x.abs()) + 32 * U * slope.abs()
        e_slope = e_slope + 32 * U * (score.bend > 0)
        most = most_dz * (slope.abs() + e_slope) * (1 + 4 * U)
        where = (read.start + place).flatten()
        bound.index_add_(0, where, (most - dz * slope.abs()).flatten())
        sizes.index_add_(0, where, most.flatten())
        counts.index_add_(0, where, (most > 0).double().flatten())
    return {"dcaptured": bound + counts * U / (1 - counts * U) * sizes}


def worst(results: dict[str, torch.Tensor], question: Question, out, lse) -> dict[str, float]:
    """The largest error of each gradient in units of its allowance; ∞ where it is not finite."""
    truth, bounds = exact(question), allowed(question, out, lse)
    largest = {}
    for name, bound in bounds.items():
        error = (results[name].double() - truth[name]).abs()
        share = torch.where(error == 0, 0.0, error / bound)  # 0 / 0: exact where it must be
        largest[name] = float(share.nan_to_num(torch.inf).max())
    return largest
