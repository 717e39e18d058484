"""Exact gradients in float64, and how far a correct kernel may be from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from tests.exact_attention import Attention, attention, gradients, indices

from attncheck.core.formats import FORMATS

if TYPE_CHECKING:
    from attncheck.core.outputs import Outputs
    from attncheck.inputs.input_tensors import Inputs

U32 = FORMATS["fp32"].unit_roundoff


def plain_attention(inputs: Inputs, q, k, v, sink=None) -> Attention:
    problem = inputs.problem
    mods = {"mask": problem.mask_mod(), "score": problem.score_mod()}
    return attention(q, k, v, sink, scale=problem.scale, **mods)


@torch.enable_grad()
def slopes(inputs: Inputs, x: torch.Tensor) -> torch.Tensor:
    """The derivative of the score mod at every score of ``x``."""
    leaf = x.detach().requires_grad_()
    modified = inputs.problem.score_mod()(leaf, *indices(*x.shape))
    return torch.autograd.grad(modified.sum(), leaf)[0]


@dataclass(frozen=True, eq=False)
class ExactGradients:
    """Exact gradients by name, and the largest rounding error that a correct kernel can make.

    First-order errors are added, each count rounded up; u is the unit roundoff of fp32, w that of
    the format in which P and dS are multiplied, p that of operands where it is shorter than the
    storage's, n the keys of a row, m the rows of all heads that share a key head:

    * a score, a weight, LSE and O as in ``conftest.Exact``; P is made from LSE and has its error;
    * dP: D products of operands rounded to p;
    * delta: of the rounded O, or Σ P·dP, as an unfused kernel has it: both are allowed;
    * dS = P·(dP − delta)·f′: four roundings, and f′ at a score that is off by its own error, where
      the difference over twice that stands for f″; then rounded to w;
    * dQ: n products and sums; dK, dV: m; two more roundings for the scale; the storage's format.

    Attributes:
        exact: dq, dk, dv, and dsink.
        allowance: By the same names.
    """

    exact: dict[str, torch.Tensor]
    allowance: dict[str, torch.Tensor]

    def ratios(self, outputs: Outputs) -> dict[str, float]:
        """Largest |error| / allowance of each gradient."""
        assert set(outputs.gradients()) == set(self.exact)
        return {
            name: _ratio(result, self.exact[name], self.allowance[name])
            for name, result in outputs.gradients().items()
        }

    def excess(self, outputs: Outputs) -> float:
        """The largest of all ratios; above 1 means more than rounding."""
        return max(self.ratios(outputs).values())


def _ratio(result: torch.Tensor, exact: torch.Tensor, allowance: torch.Tensor) -> float:
    assert result.shape == exact.shape
    error = (result.double() - exact).abs()
    ratio = torch.where(error == 0, 0.0, error / allowance)
    return torch.where(ratio.isnan(), torch.inf, ratio).max().item()


def exact_gradients(inputs: Inputs, *, sums_in_storage: int = 0) -> ExactGradients:
    """The exact gradients and their allowances.

    Args:
        inputs: Inputs of a Problem with a backward.
        sums_in_storage: How often a kernel rounds a running dQ, dK or dV to the storage format.
    """
    leaves = [t.detach().requires_grad_() for t in inputs.promoted()]
    if inputs.sink is not None:
        leaves.append(inputs.sink.double().requires_grad_())
    plain = plain_attention(inputs, *leaves)
    named = dict(zip(("q", "k", "v", "sink"), leaves, strict=False))
    dout, dlse = inputs.loss()
    exact = gradients(plain, named, dout, dlse)
    with torch.no_grad():
        errors = _Errors(inputs, plain, dout, dlse.masked_fill(plain.lse.isneginf(), 0.0))
    allowance = errors.allowances(exact, sums_in_storage)
    return ExactGradients({name: one.detach() for name, one in exact.items()}, allowance)


class _Errors:
    def __init__(self, inputs: Inputs, plain: Attention, dout: torch.Tensor, dlse: torch.Tensor):
        self.problem, self.inputs, self.plain = inputs.problem, inputs, plain
        self.weights = plain.p[..., : inputs.problem.kv]
        formats, self.dout = self.problem.formats, dout
        self.p = formats.products.unit_roundoff if formats.products != formats.storage else 0.0
        q, k, v = (t.abs() for t in inputs.promoted())
        self.q = q
        self.k, self.v = (t.repeat_interleave(self.problem.group, 1) for t in (k, v))
        self._backward(self._forward(), dlse)

    def _forward(self) -> torch.Tensor:
        """Return the error of O; set the relative error of P."""
        problem, plain, n = self.problem, self.plain, self.problem.kv
        largest = torch.where(plain.seen & plain.z.isfinite(), plain.z.abs(), 0.0).amax(-1)
        if self.inputs.sink is not None:
            largest = torch.maximum(largest, self.inputs.sink.double().abs()[:, None])
        sizes = torch.where(plain.seen, self.q @ self.k.mT * problem.scale, 0.0).amax(-1) + largest
        self.logit = sizes * (2 * self.p + self.p**2 + (problem.head_dim + 8) * U32)
        lse_size = torch.where(plain.lse.isneginf(), 0.0, plain.lse.abs())
        lse = self.logit + (4 * n + 8) * U32 * (1 + largest + lse_size)
        self.of_p = torch.expm1(2 * self.logit + lse + (6 * n + 8) * U32)[..., None]
        weights = problem.formats.weights.unit_roundoff
        spread = self.of_p + (weights + self.p + n * U32) * (1 + self.of_p)
        tiny = problem.formats.weights.subnormal_spacing * self.v.sum(-2, keepdim=True)
        out = spread * (self.weights @ self.v) + tiny
        output = problem.formats.output
        return out + output.unit_roundoff * (plain.out.abs() + out) + output.subnormal_spacing

    def _backward(self, out_error: torch.Tensor, dlse: torch.Tensor) -> None:
        """Set the sizes and errors of P and dX, as operands of the products."""
        problem, p = self.problem, self.weights
        n, dims = problem.kv, problem.value_dim
        size_dp = self.dout.abs() @ self.v.mT
        of_dp = (2 * self.p + self.p**2 + (dims + 2) * U32) * size_dp
        dp = self.dout @ self.inputs.promoted()[2].repeat_interleave(problem.group, 1).mT
        delta = (self.dout * self.plain.out).sum(-1) - dlse
        size_delta = (self.dout.abs() * self.plain.out.abs()).sum(-1) + dlse.abs()
        of_delta = (self.dout.abs() * out_error).sum(-1) + (dims + 4) * U32 * size_delta
        weighed = p * ((self.of_p + (n + 4) * U32) * size_dp + (1 + self.of_p) * of_dp)
        of_delta = (of_delta + weighed.sum(-1))[..., None]
        delta, size_delta = delta[..., None], size_delta[..., None]
        steps = of_dp + of_delta + 4 * U32 * (size_dp + size_delta)
        dz = p * (dp - delta)
        of_dz = p * ((1 + self.of_p) * steps + self.of_p * (dp - delta).abs())
        f = slopes(self.inputs, self.plain.x)
        around = [
            slopes(self.inputs, self.plain.x + side * self.logit[..., None]) for side in (-1, 1)
        ]
        of_f = 2 * sum((one - f).abs() for one in around) + 8 * U32 * (1 + f.abs())
        of_dx = (f.abs() + of_f) * of_dz + of_f * dz.abs() + 4 * U32 * (f * dz).abs()
        self.dx = torch.where(self.plain.seen, (f * dz).abs() + of_dx, 0.0)
        self.of_dx = self._as_multiplied(torch.where(self.plain.seen, of_dx, 0.0), self.dx)
        self.of_weights = self._as_multiplied(p * self.of_p, p * (1 + self.of_p))
        at_sink = self._sink_weights()
        self.sinks = at_sink * (1 + self.of_p[..., 0]) * (size_delta + of_delta)[..., 0]
        of_sinks = (of_delta + 4 * U32 * size_delta + self.of_p * delta.abs())[..., 0]
        self.of_sinks = at_sink * (1 + self.of_p[..., 0]) * of_sinks

    def _sink_weights(self) -> torch.Tensor:
        if self.inputs.sink is None:
            return torch.zeros_like(self.plain.lse)
        return torch.exp(self.inputs.sink.double()[:, None] - self.plain.lse)

    def _as_multiplied(self, error: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        fmt = self.problem.formats.weights
        rounded = fmt.unit_roundoff * size + fmt.subnormal_spacing
        return error + torch.where(self.plain.seen & (size > 0), rounded, 0.0)

    def allowances(self, exact: dict[str, torch.Tensor], sums: int) -> dict[str, torch.Tensor]:
        problem = self.problem
        n, m = problem.kv, problem.query * problem.group
        scale, dout = problem.scale, self.dout.abs()
        factor = self.p + 4 * U32 + sums * problem.formats.storage.unit_roundoff
        group = (problem.kv_heads, problem.group)

        def of_keys(by_head: torch.Tensor) -> torch.Tensor:
            return by_head.unflatten(1, group).sum(2)

        p = self.weights * (1 + self.of_p)
        inner = {
            "dq": scale * ((self.of_dx + (factor + n * U32) * self.dx) @ self.k),
            "dk": scale * of_keys((self.of_dx + (factor + m * U32) * self.dx).mT @ self.q),
            "dv": of_keys((self.of_weights + (factor + m * U32) * p).mT @ dout),
        }
        fmt = problem.formats.storage
        for name, error in inner.items():
            size = exact[name].abs() + error
            last = fmt.unit_roundoff * size + fmt.subnormal_spacing
            inner[name] = error + torch.where(size > 0, last, 0.0)
        if "dsink" in exact:
            rows = problem.batch * problem.query
            inner["dsink"] = (self.of_sinks + rows * U32 * self.sinks).sum((0, 2))
        return {name: error.detach() for name, error in inner.items()}
