"""Backward passes of fused kernels in torch fp32, with the exact gradients and their bounds.

Written from the definition: P is recomputed from the kernel's own LSE, delta is the sum of dO times
its own out, P and dS are rounded to the operands' format, everything else is fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from tests.exact_attention import attention, gradients
from tests.exact_attention import indices as exact_indices

from attncheck.core.declared_arithmetic import Arithmetic, default_arithmetic
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Inputs, draw_inputs
from attncheck.judge.deterministic_bound import deterministic_bound
from attncheck.judge.gradient_bounds import KeyGradients, row_gradients
from attncheck.judge.score_errors import score_error
from attncheck.judge.score_gradient_errors import SavedErrors
from attncheck.oracles.row_conditions import all_rows, compute_gradient_conditions

if TYPE_CHECKING:
    from attncheck.inputs.problem import Problem

LOG2E = math.log2(math.e)


def tf32(x: torch.Tensor, *, truncate: bool = False) -> torch.Tensor:
    bits = x.contiguous().view(torch.int32)
    if not truncate:
        bits = bits + 0xFFF + ((bits >> 13) & 1)
    return (bits & ~0x1FFF).view(torch.float32)


@dataclass(frozen=True)
class Exact:
    """Exact out, LSE and gradients: torch's autograd of the formula in float64, over every pair."""

    inputs: Inputs
    out: torch.Tensor
    lse: torch.Tensor
    gradients: dict[str, torch.Tensor]

    @classmethod
    def of(cls, inputs: Inputs) -> Exact:
        problem = inputs.problem
        tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "sink": inputs.sink}
        leaves = {n: x.double().requires_grad_() for n, x in tensors.items() if x is not None}
        mods = {"mask": problem.mask_mod("cpu"), "score": problem.score_mod("cpu")}
        exact = attention(**leaves, scale=problem.scale, **mods)
        computed = gradients(exact, leaves, *inputs.loss())
        return cls(inputs, exact.out.detach(), exact.lse.detach(), computed)


def indices(problem: Problem):
    return exact_indices(problem.batch, problem.heads, problem.query, problem.kv)


def visible_pairs(problem: Problem) -> torch.Tensor:
    sizes = (problem.batch, problem.heads, problem.query, problem.kv)
    return problem.mask_mod("cpu")(*indices(problem)).expand(sizes)


@dataclass(frozen=True)
class Backward:
    """A fused backward, with the forward that computes its out and LSE.

    Faults override its methods.
    """

    block_query: int = 32
    block_kv: int = 32
    reverse: bool = False
    truncate: bool = False
    natural: bool = False  # exp of scores in natural units, else exp2 with the factor folded in
    delta_first: bool = False  # the sum of dO·v starts with −delta
    rereads: bool = False  # dS is of the P that was rounded for dV
    parts: bool = False  # gradients are added up tile by tile in the output format

    def operand(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if name == "tf32":
            return tf32(x, truncate=self.truncate)
        return x.to(
            {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, torch.float32)
        ).float()

    def product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    def delta(self, dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return (dout * out).sum(-1)

    def saved_lse(self, lse: torch.Tensor) -> torch.Tensor:
        return lse

    def slope(self, mod, scores: torch.Tensor, at) -> torch.Tensor:
        leaf = scores.detach().requires_grad_()
        with torch.enable_grad():
            moved = mod(leaf, *at)
        return torch.autograd.grad(moved, leaf, torch.ones_like(moved))[0]

    def seen(self, problem: Problem) -> torch.Tensor:
        return visible_pairs(problem)

    def tiles(self, length: int, block: int) -> list[slice]:
        tiles = [slice(i, min(i + block, length)) for i in range(0, length, block)]
        return tiles[::-1] if self.reverse else tiles

    def query_tiles(self, length: int) -> list[slice]:
        return self.tiles(length, self.block_query)

    def key_scale(self, scale: float) -> float:
        return scale

    def loss(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        dout, dlse = inputs.loss()
        return dout.float(), dlse.float()

    def forward(self, inputs: Inputs) -> Outputs:
        problem = inputs.problem
        name = problem.formats.products.name
        q, k, v = self.read(inputs)
        scores = problem.score_mod("cpu")(problem.scale * self.product(q, k.mT), *indices(problem))
        seen = self.forward_seen(problem)
        scores = scores.masked_fill(~seen, -math.inf)
        if inputs.sink is not None:
            sink = inputs.sink[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sink], -1)
        top = scores.amax(-1, keepdim=True)
        top = torch.where(torch.isneginf(top), 0.0, top)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        dead = total == 0
        total = torch.where(dead, 1.0, total)
        weights = weights[..., : problem.kv]
        out = self.product(self.operand(weights, name), v) / total
        lse = torch.where(dead, -math.inf, top + total.log())[..., 0]
        return Outputs(out.to(problem.formats.output.torch_dtype), lse)

    def forward_seen(self, problem: Problem) -> torch.Tensor:
        return visible_pairs(problem)

    def read(self, inputs: Inputs):
        name, group = inputs.problem.formats.products.name, inputs.problem.group
        q, k, v = (self.operand(x.float(), name) for x in (inputs.q, inputs.k, inputs.v))
        return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)

    def run(self, inputs: Inputs) -> Outputs:
        outputs = self.forward(inputs)
        problem, (q, k, v) = inputs.problem, self.read(inputs)
        name = problem.formats.products.name
        dout, dlse = self.loss(inputs)
        lse = self.saved_lse(outputs.lse)
        alive = ~torch.isneginf(lse)
        lse = torch.where(alive, lse, 0.0)
        delta = self.delta(dout, outputs.out.float()) - dlse
        dout = self.operand(dout, name)
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        at, seen = indices(problem), self.seen(problem) & alive[..., None]
        mod = problem.score_mod("cpu")
        plain = problem.score.name == "none"
        for cols in self.tiles(problem.kv, self.block_kv):
            for rows in self.query_tiles(problem.query):
                here = [*at[:2], at[2][:, :, rows], at[3][..., cols]]
                raw = self.product(q[:, :, rows], k[:, :, cols].mT)
                if plain and not self.natural:
                    factor = torch.tensor(problem.scale * LOG2E, dtype=torch.float32)
                    log2 = (raw.double() * factor).float() - lse[:, :, rows, None] * LOG2E
                    p = torch.exp2(log2)
                else:
                    natural = raw * problem.scale
                    p = torch.exp(mod(natural, *here) - lse[:, :, rows, None])
                p = torch.where(seen[:, :, rows, cols], p, 0.0)
                of_row = delta[:, :, rows, None]
                if self.delta_first:
                    ones = torch.ones_like(v[:, :, cols, :1])
                    dp = self.product(
                        torch.cat([-of_row, dout[:, :, rows]], -1),
                        torch.cat([ones, v[:, :, cols]], -1).mT,
                    )
                else:
                    dp = self.product(dout[:, :, rows], v[:, :, cols].mT) - of_row
                ds = (self.operand(p, name) if self.rereads else p) * dp
                if not plain:
                    ds = torch.where(
                        seen[:, :, rows, cols], ds * self.slope(mod, raw * problem.scale, here), 0.0
                    )
                ds, p = self.operand(ds, name), self.operand(p, name)
                dv[:, :, cols] += self.product(p.mT, dout[:, :, rows])
                dk[:, :, cols] += self.product(ds.mT, q[:, :, rows])
                dq[:, :, rows] += self.product(ds, k[:, :, cols])
                if self.parts:
                    dq, dk, dv = (self.store(x, problem) for x in (dq, dk, dv))
        return self.finish(inputs, outputs, dq, dk, dv, delta)

    def finish(self, inputs, outputs, dq, dk, dv, delta) -> Outputs:
        problem = inputs.problem
        fmt = problem.formats.output.torch_dtype
        dq, dk = dq * problem.scale, dk * self.key_scale(problem.scale)
        dsink = None
        if inputs.sink is not None:
            weight = torch.exp(inputs.sink[:, None] - outputs.lse)
            dsink = -(weight * delta).sum((0, 2))
        dk, dv = (self.sum_group(x, problem).to(fmt) for x in (dk, dv))
        return replace(outputs, dq=dq.to(fmt), dk=dk, dv=dv, dsink=dsink)

    def sum_group(self, x: torch.Tensor, problem: Problem) -> torch.Tensor:
        return x.unflatten(1, (problem.kv_heads, problem.group)).sum(2)

    def store(self, x: torch.Tensor, problem: Problem) -> torch.Tensor:
        return x.to(problem.formats.output.torch_dtype).float()


def bounds(
    inputs: Inputs,
    exact: Exact,
    outputs: Outputs,
    arithmetic: Arithmetic,
    mods=None,
    *,
    exposes_lse: bool = True,
    pieces=None,
):
    """The bound of every gradient; ``mods`` returns the errors of a score mod and its slope."""
    problem = inputs.problem
    truth = Outputs(exact.out, exact.lse)
    dq = torch.zeros_like(exact.gradients["dq"]).flatten(0, 1)
    keys = KeyGradients(
        arithmetic,
        batch=problem.batch,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        query=problem.query,
    )
    for rows in pieces or all_rows(problem, "cpu"):
        heads = slice(rows.heads.start, rows.heads.stop)
        known = compute_gradient_conditions(inputs, truth, rows)
        scores = score_error(known.known, arithmetic)
        mod, slope = mods(known, scores) if mods else (None, None)
        out = outputs.out.flatten(0, 1)[heads][:, rows.query].double()
        if exposes_lse:
            lse = outputs.lse.flatten(0, 1)[heads][:, rows.query].double() - known.known.lse
        else:
            lse = deterministic_bound(known.known, arithmetic, scores, mod).lse
        saved = SavedErrors(out_error=out - known.known.out, lse_error=lse)
        row_bounds = row_gradients(known, arithmetic, scores, saved, mod, slope)
        dq[heads, rows.query] = row_bounds.dq
        keys.add(row_bounds)
    exacts = exact.gradients
    key_bounds, _ = keys.bounds({name: exacts[name] for name in exacts if name != "dq"})
    return {"dq": dq.view_as(exacts["dq"])} | key_bounds


def error_shares(
    kernel: Backward, problem: Problem, arithmetic: Arithmetic | None = None, mods=None, **options
):
    """Largest error ÷ bound of every gradient; infinite where one must be 0 and is not."""
    inputs = draw_inputs(problem)
    exact = Exact.of(inputs)
    outputs = kernel.run(inputs)
    arithmetic = arithmetic or declared_arithmetic(problem, kernel)
    gradient_bounds = bounds(inputs, exact, outputs, arithmetic, mods, **options)
    shares = {}
    for name, bound in gradient_bounds.items():
        error = (getattr(outputs, name).double() - exact.gradients[name]).abs()
        error = torch.where(torch.isinf(bound), 0.0, error.nan_to_num(nan=math.inf))
        shares[name] = float(torch.where(error == 0, 0.0, error / bound).max())
    return shares


def declared_arithmetic(problem: Problem, kernel: Backward) -> Arithmetic:
    tiles = math.ceil(problem.query / kernel.block_query)
    return replace(
        default_arithmetic(problem.formats),
        truncates=kernel.truncate,
        tanh_error=2.0**-22,
        rereads_weights=kernel.rereads,
        # The heads of a group are added in fp32, and the sum is multiplied by the scale.
        dkv_parts=problem.group * tiles + 2 if kernel.parts else 1,
        dq_parts=math.ceil(problem.kv / kernel.block_kv) + 2 if kernel.parts else 1,
    )
