"""A backward in single torch operations: P, dO·v and dS are stored in the output format."""

import math
from dataclasses import dataclass, replace

import torch
from tests.judge import backward_kernels as kernels

from attncheck.core.declared_arithmetic import Arithmetic
from attncheck.core.outputs import Outputs
from attncheck.inputs.problem import Problem


@dataclass(frozen=True)
class Unfused(kernels.Backward):
    """Attributes say where it rounds; ``scaled``: dS is multiplied by the scale, and rounded again.

    Delta is Σ P dP, as in the derivative of a softmax, and dLSE is added separately.
    """

    rounds_products: bool = True
    rounds_heads: bool = True
    scaled: bool = True

    def forward(self, inputs) -> Outputs:
        """Rounds P as the backward does."""
        problem = inputs.problem
        shares, lse = self.weights(inputs)
        v = self.read(inputs)[2]
        out = self.product(shares[..., : problem.kv], v)
        return Outputs(out.to(problem.formats.output.torch_dtype), lse)

    def weights(self, inputs):
        problem = inputs.problem
        q, k, _ = self.read(inputs)
        scores = problem.score_mod("cpu")(problem.scale * (q @ k.mT), *kernels.indices(problem))
        scores = scores.masked_fill(~kernels.visible_pairs(problem), -math.inf)
        if inputs.sink is not None:
            sink = inputs.sink[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sink], -1)
        shares = torch.softmax(scores, -1).nan_to_num(0.0)
        return self.store(shares, problem), torch.logsumexp(scores, -1)

    def run(self, inputs) -> Outputs:
        outputs, problem = self.forward(inputs), inputs.problem
        q, k, v = self.read(inputs)
        shares, _ = self.weights(inputs)
        dout, dlse = self.loss(inputs)
        dp = self.product(dout, v.mT)
        if inputs.sink is not None:
            dp = torch.nn.functional.pad(dp, (0, 1))
        if self.rounds_products:
            dp = self.store(dp, problem)
        ds = shares * (dp - (shares * dp).sum(-1, keepdim=True))
        ds = self.store(ds, problem) + self.store(shares * dlse[..., None], problem)
        dsink = None if inputs.sink is None else ds[..., -1].sum((0, 2))
        ds, shares = ds[..., : problem.kv], shares[..., : problem.kv]
        if self.scaled:
            ds = self.store(ds * problem.scale, problem) / problem.scale
        ds = self.store(ds, problem)
        dq, dk, dv = ds @ k, ds.mT @ q, shares.mT @ dout
        gradients = self.finish(inputs, outputs, dq, dk, dv, torch.zeros_like(outputs.lse))
        return replace(gradients, dsink=dsink)

    def sum_group(self, x, problem: Problem):
        if self.rounds_heads:
            x = self.store(x, problem)
        return super().sum_group(x, problem)

    def arithmetic(self, problem: Problem) -> Arithmetic:
        """The arithmetic this kernel declares."""
        return replace(
            kernels.declared_arithmetic(problem, self),
            normalised_weights=True,
            rounds_value_products=problem.formats.output if self.rounds_products else None,
            sums_rounded_heads=self.rounds_heads,
        )
