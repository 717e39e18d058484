"""Attention's gradients by torch's autograd in float64, and how far a kernel may be from them."""

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
    """A score mod whose slope is at most 1, and how fast that changes; its own error is small.

    With ``make`` and ``tensors`` it is ``make(*tensors)``, and so differentiable in them: for
    ``exact`` it is made of the same numbers in float64.
    """

    mod: Callable[..., torch.Tensor]
    bend: float = 0.0  # the largest second derivative, with respect to what it reads, too
    make: Callable[..., Callable[..., torch.Tensor]] | None = None
    tensors: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(cls, make: Callable[..., Callable[..., torch.Tensor]], *tensors, bend=0.0) -> Score:
        return cls(mod=make(*tensors), bend=bend, make=make, tensors=tensors)


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a backward is asked; ``dtype`` one of a Problem's."""

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

    def but(self, **changes) -> Given:
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
        """The sum over the heads that share a key head."""
        return x.unflatten(1, (-1, self.group)).sum(2)

    def loss(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.q.new_zeros(self.q.shape[:3]).double()
        return self.dout.double(), rows if self.dlse is None else self.dlse.double()


def given(
    mask, dtype="fp32", *, shape=(1, 2, 1, 40, 50, 20, 12), score=None, dlse=True, sink=False
) -> Given:
    """Standard normal numbers; ``shape``: batch, heads, kv_heads, query, kv, head and value dim."""
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
    return Given(**drawn, mask=mask, score=score, dtype=dtype)


def exact(given: Given) -> dict[str, torch.Tensor]:
    """out, lse and the gradients, of the definition; rows that see no key give 0 and −∞."""
    leaves = {
        name: getattr(given, name).detach().double().requires_grad_()
        for name in ("q", "k", "v", "sink")
        if getattr(given, name) is not None
    }
    score, numbers = given.score, []
    mod = None if score is None else score.mod
    if score is not None and score.make is not None:
        numbers = [one.double().requires_grad_() for one in score.tensors]
        mod = score.make(*numbers)
    of = attention(**leaves, scale=given.scale, mask=given.mask, score=mod)
    read = {f"{place}": one for place, one in enumerate(numbers)}
    found = gradients(of, leaves | read, *given.loss())
    if numbers:
        found["dcaptured"] = torch.cat([found.pop(f"d{name}").flatten() for name in read])
    return {"out": of.out.detach(), "lse": of.lse.detach()} | found


def gamma(terms: int) -> float:
    """Higham's γ: the relative error of a sum of so many terms in fp32, in any order."""
    return terms * U / (1 - terms * U)


def allowed(given: Given, out: torch.Tensor, lse: torch.Tensor) -> dict[str, torch.Tensor]:
    """How far the gradients of a right kernel that saved ``out`` and ``lse`` may be from ``exact``.

    Every error is carried on by |âb̂ − ab| ≤ (|a| + ea)(|b| + eb) − |a||b|, products are summed in
    fp32 (γ), tensor cores read tf32 operands with ``t``, P and dX are rounded to the operands'
    format and results to the storage format (half a spacing below the normal numbers). exp2 is
    within 2 ulp, that is 4 U. The saved LSE and out count with the error that they have.
    """
    truth, formats = exact(given), DTYPES[given.dtype]
    t = FORMATS["tf32"].unit_roundoff * 2 if given.dtype == "tf32" else 0.0  # truncated
    t = 2 * t + t * t  # of both operands
    of_operand = t if given.dtype == "tf32" else formats.storage.unit_roundoff
    spacing = formats.storage.subnormal_spacing / 2
    q, k, v = given.q.double(), given.repeated(given.k), given.repeated(given.v)
    dout, dlse = given.loss()
    dim, value_dim, kv = q.shape[-1], v.shape[-1], k.shape[2]

    def rounded(values, error):
        return error + of_operand * (values + error) + spacing

    x = (given.scale * q @ k.mT).requires_grad_(given.score is not None)
    e_x = (gamma(dim + 4) + t) * given.scale * (q.abs() @ k.abs().mT)
    z, slope, e_z, e_slope = x, torch.ones_like(x), e_x, torch.zeros_like(x)
    if given.score is not None:
        z = given.score.mod(x, *given.indices())
        (slope,) = torch.autograd.grad(z.sum(), x)
        x, z = x.detach(), z.detach()
        bend = given.score.bend
        # A division, a tanh, two multiplications and an addition of ``triton_ulp``: below 16 U.
        e_z = e_x + 16 * U * (x.abs() + z.abs())
        e_slope = bend * (e_x + 16 * U * x.abs()) + 32 * U * slope.abs() + 32 * U * (bend > 0)

    alive = truth["lse"].isfinite()
    true_lse = truth["lse"].masked_fill(~alive, 0.0)
    e_lse = (lse.double().masked_fill(~alive, 0.0) - true_lse).abs() + 4 * U * true_lse.abs()
    attended = given.seen() & alive[..., None]
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

    rows = q.shape[2] * given.group
    bounds = {
        "dq": given.scale * summed(dx, e_dx, k, kv),
        "dk": given.scale * given.grouped(summed(dx.mT, e_dx.mT, q, rows)),
        "dv": given.grouped(summed(p.mT, e_p_stored.mT, dout, rows)),
    }
    stored = formats.storage.unit_roundoff
    for name, bound in bounds.items():
        least = 0.0 if bound.numel() == 0 else spacing * (bound > 0)
        bounds[name] = bound + (stored + 4 * U) * (truth[name].abs() + bound) + least
    if given.sink is not None:
        sink = given.sink.double()[:, None]
        weight = (sink - truth["lse"]).exp()
        e_weight = weight * ((e_lse + 4 * U * (sink.abs() + true_lse.abs())).expm1() + 8 * U)
        most = (weight + e_weight) * (delta.abs() + e_delta)
        e_sink = most * (1 + gamma(q.shape[0] * q.shape[2] + 4)) - weight * delta.abs()
        bounds["dsink"] = e_sink.sum((0, 2))
    most = (p + e_p) * (inner + e_dp + e_delta[..., None])
    return bounds | of_captured(given, x, e_x, p * inner * attended, most * attended)


def of_captured(given: Given, x, e_x, dz, most_dz) -> dict[str, torch.Tensor]:
    """The same of what the score mod reads: Σ dZ·J, dZ in size and at most, added up in fp32."""
    score = given.score
    if score is None or score.make is None:
        return {}
    bound = torch.zeros(sum(tensor.numel() for tensor in score.tensors), dtype=torch.float64)
    sizes, counts = bound.clone(), bound.clone()
    for read in trace_reads(score.mod):
        at = (x, *given.indices())
        slope, place = (one.evaluate(*at).expand(x.shape) for one in (read.slope, read.place))
        e_slope = score.bend * (e_x + 16 * U * x.abs()) + 32 * U * slope.abs()
        e_slope = e_slope + 32 * U * (score.bend > 0)
        most = most_dz * (slope.abs() + e_slope) * (1 + 4 * U)
        where = (read.start + place).flatten()
        bound.index_add_(0, where, (most - dz * slope.abs()).flatten())
        sizes.index_add_(0, where, most.flatten())
        counts.index_add_(0, where, (most > 0).double().flatten())
    return {"dcaptured": bound + counts * U / (1 - counts * U) * sizes}


def worst(found: dict[str, torch.Tensor], given: Given, out, lse) -> dict[str, float]:
    """The largest error of each gradient in units of what is allowed; ∞ where it is not finite."""
    truth, bounds = exact(given), allowed(given, out, lse)
    largest = {}
    for name, bound in bounds.items():
        error = (found[name].double() - truth[name]).abs()
        share = torch.where(error == 0, 0.0, error / bound)  # 0 / 0: exact where it must be
        largest[name] = float(share.nan_to_num(torch.inf).max())
    return largest
