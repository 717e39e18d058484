"""Reference gradients: torch's autograd of attention's definition, and error bounds for oracles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from tests.exact_attention import Attention, attention, gradients

from attncheck.core.mod_spec import Spec
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem

if TYPE_CHECKING:
    from attncheck.core.outputs import Outputs
    from attncheck.inputs.input_tensors import Inputs

UNIT = 2.0**-53
# Each with a bound of its second derivative.
SCORES = {
    Spec.of("none"): 0.0,
    Spec.of("alibi"): 0.0,
    Spec.of("softcap", cap=1.5): 1 / 1.5,  # |2 tanh (1 − tanh²)| < 1
    Spec.of("temperature", temperature=2.0): 0.0,
    Spec.of("bias", seed=1, per_batch=1, per_head=1): 0.0,
    Spec.of("expression", text="where(score > 0, score, score * 0.5) * (kv_idx - 2)"): 0.0,
}


def tiny(**changes: object) -> Inputs:
    problem = Problem(batch=2, heads=4, kv_heads=2, query=9, kv=11, head_dim=6, value_dim=3)
    return draw_inputs(problem.replace(**{"backward": True, "dlse": True, **changes}))


@dataclass(frozen=True)
class Definition:
    """Attention written out, with leaves for autograd."""

    leaves: dict[str, torch.Tensor]
    of_leaves: Attention

    @classmethod
    def of(cls, inputs: Inputs) -> Definition:
        p, tensors = inputs.problem, dict(zip("qkv", inputs.promoted(), strict=True))
        if inputs.sink is not None:
            tensors["sink"] = inputs.sink.double()
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
        mods = {"mask": p.mask_mod("cpu"), "score": p.score_mod("cpu")}
        return cls(leaves, attention(**leaves, scale=p.scale, **mods))

    def gradients(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        return gradients(self.of_leaves, self.leaves, *inputs.loss())


@dataclass(frozen=True)
class Allowed:
    """First-order error bounds of gradients, by any of the oracles or by autograd.

    In units of 2^-53. P: twice a weight's error (``Allowance``) and ``kv`` additions, for numerator
    and denominator; computed from LSE, three times |LSE| and |score − LSE| more. dP:
    ``value_dim`` + 1 roundings of Σ|dO||V|; delta: out's error and as many. Their differences
    and products with P and f': 5. f': 8 operations of the score mods here, and its change with
    the score. The sums: as many roundings as terms, the scale and the group. All relative to sums
    of |terms|, as terms may cancel.
    """

    of: dict[str, torch.Tensor]

    @classmethod
    def by(cls, inputs: Inputs, bound, curvature: float) -> Allowed:
        p, known = inputs.problem, Definition.of(inputs).of_leaves
        weights = known.p.detach()
        sizes = torch.cat([known.x.flatten(), known.z.flatten(), known.lse.flatten()]).detach()
        largest = sizes[sizes.isfinite()].abs().max().item()
        of_p = 2 * (bound.weight + p.kv) + 3 * 2 * largest + 4
        (dout, dlse), q, k, v = inputs.loss(), *inputs.promoted()
        k, v = (x.abs().repeat_interleave(p.group, dim=1) for x in (k, v))
        row = (dout.abs() * bound.spread).sum(-1, keepdim=True) + dlse.abs()[..., None]
        terms = weights[..., : p.kv] * (dout.abs() @ v.mT + row)
        of_terms = of_p + bound.out + 2 * (p.value_dim + 1) + 5
        slopes = torch.autograd.grad(known.z.sum(), known.x)[0].abs()
        moved = curvature * (bound.weight + 8 * slopes.max().item() + 8)
        sums = p.kv + p.query * p.group + p.group + 2
        dx = terms * ((of_terms + sums) * slopes + 8 * slopes + moved)
        of = {
            "dq": p.scale * (dx @ k),
            "dk": p.scale * (dx.mT @ q.abs()),
            "dv": (of_p + sums) * (weights[..., : p.kv].mT @ dout.abs()),
        }
        for name in ("dk", "dv"):
            of[name] = of[name].view(p.batch, p.kv_heads, p.group, *of[name].shape[2:]).sum(2)
        if p.sink:
            of_sink = (of_terms + p.query * p.batch) * weights[..., -1:] * row
            of["dsink"] = of_sink.sum((0, 2, 3))
        return cls(of)

    def misses(self, one: Outputs, other: dict[str, torch.Tensor]) -> list[str]:
        """Gradients that differ by more than the errors of two evaluations."""
        gradients = one.gradients()
        assert set(gradients) == set(self.of) == set(other)
        off = {name: (gradients[name] - other[name]).abs() for name in self.of}
        return [
            f"{name}: {(off[name] / UNIT).max().item():.1f} units"
            for name, allowed in self.of.items()
            if not bool((off[name] <= 2 * UNIT * allowed).all())
        ]


def allowed(inputs: Inputs, allowance) -> Allowed:
    # The bounds of weight, out and spread are those of the forward alone.
    return Allowed.by(inputs, allowance(inputs.forward()), SCORES[inputs.problem.score])
