"""Exact attention in float64, and how far a correct kernel may be from it."""

import math
from dataclasses import dataclass

import pytest
import torch
from tests.exact_attention import attention

from attncheck.core.formats import FORMATS
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Inputs
from attncheck.verify.environment import prepare

FALSE_ALARM = 1e-6  # largest probability of one by ``lead``
U32 = FORMATS["fp32"].unit_roundoff


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """One thread in every test of this folder."""


@pytest.fixture(scope="session")
def require_interpreter():
    """Skip where the Triton kernels would be compiled."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here: the properties judge them on the GPU")
    prepare("cpu")


@dataclass(frozen=True, eq=False)
class Exact:
    """Exact attention in float64 and the largest rounding error that a correct kernel can make.

    Operations counted, u the unit roundoff of fp32, x the logits, every count rounded up:

    * a logit: two operands rounded to the products' format (``products`` each), D products and
      sums, and at most 8 more roundings on the way to the exponent (scale split over q and k, an
      added bias, log2 e and its rounding, m·c, the multiply-add): ``logit``;
    * a weight: twice the logit's error, since the maximum and the row sum carry it too; exp2,
      rescaling (3 for each tile, never more tiles than keys), the row sum's n additions;
    * P rounded to the weights' format, or by its smallest spacing where it is tiny (the row sum
      is at least 1); V rounded to the products' format; P·V: n products and sums; two roundings
      for the division; the output's format.
    """

    out: torch.Tensor
    lse: torch.Tensor
    out_allowance: torch.Tensor
    lse_allowance: torch.Tensor

    def excess(self, outputs: Outputs) -> float:
        """Largest |error| / allowance over all elements; above 1 means more than rounding."""
        worst = _ratio(outputs.out, self.out, self.out_allowance)
        if outputs.lse is not None:
            worst = max(worst, _ratio(outputs.lse, self.lse, self.lse_allowance))
        return worst


def _ratio(result: torch.Tensor, exact: torch.Tensor, allowance: torch.Tensor) -> float:
    assert result.shape == exact.shape
    error = (result.cpu().double() - exact).abs()
    error = torch.where(result.cpu() == exact, 0.0, error)  # −∞ in both
    ratio = torch.where(error == 0, 0.0, error / allowance)
    return torch.where(ratio.isnan(), torch.inf, ratio).max().item()


def plain_formula(inputs: Inputs, *, truncated: bool = False) -> Exact:
    problem = inputs.problem
    q, k, v = (x.cpu() for x in inputs.promoted())
    mods = {"mask": problem.mask_mod(), "score": problem.score_mod()}
    plain = attention(q, k, v, scale=problem.scale, **mods)
    seen, out, lse = plain.seen, plain.out, plain.lse
    k, v = (x.repeat_interleave(problem.group, dim=1) for x in (k, v))
    magnitude = q.abs() @ k.abs().mT * problem.scale

    n = problem.kv
    formats = problem.formats
    products = formats.products.unit_roundoff if formats.products != formats.storage else 0.0
    weights = formats.weights.unit_roundoff
    if truncated:
        products, weights = 2 * products, 2 * weights
    largest = torch.where(seen, plain.z.abs(), 0.0).amax(-1)
    sizes = torch.where(seen, magnitude, 0.0).amax(-1) + largest
    logit = sizes * (2 * products + products**2 + (problem.head_dim + 8) * U32)
    # Second-order terms of these small numbers: exp(a) − 1 holds those of the logits, and
    # 1 + the first-order sum those of the rest.
    relative = weights + products + (6 * n + 8) * U32
    relative = torch.expm1(2 * logit) + relative * (1 + relative) * torch.exp(2 * logit)
    tiny = formats.weights.subnormal_spacing * torch.where(seen[..., None], v.abs()[:, :, None], 0)
    spread = relative[..., None] * (plain.p @ v.abs()) + tiny.sum(-2)
    last = formats.output.unit_roundoff * (out.abs() + spread) + formats.output.subnormal_spacing
    lse_allowance = logit + (4 * n + 8) * U32 * (1 + largest + lse.abs())
    return Exact(out, lse, spread + last, lse_allowance)


def lead_of_other(outputs: Outputs, other: Outputs, truth: torch.Tensor) -> float:
    """How far ``outputs`` falls behind ``other`` in RMSE; beyond ±1 it is not chance.

    Two kernels that round at the same places differ where a number lies within fp32's errors of a
    rounding boundary. Which of them then is nearer the truth is a coin toss for each row (not for
    each element: a weight that is rounded otherwise moves a whole row). Let d be a row's squared
    errors, those of ``outputs`` less those of ``other``; Σd is the difference of the squared RMSEs
    times the number of elements. With tossed signs P(|Σd| ≥ λ·√Σd²) ≤ 2·exp(−λ²/2) (Hoeffding
    1963, theorem 2: each summand lies in ±d), whatever the sizes. λ makes that ``FALSE_ALARM``, and
    Σd / (λ·√Σd²) is returned. A kernel that loses equally in all of n rows gets √n / λ, however
    little it loses.
    """
    errors = [(x.out.double() - truth).square().sum(-1) for x in (outputs, other)]
    d = errors[0] - errors[1]
    if not d.any():
        return 0.0
    toss = math.sqrt(2 * math.log(2 / FALSE_ALARM)) * d.square().sum().sqrt()
    return (d.sum() / toss).item()


@pytest.fixture
def lead():
    """``lead(outputs, other, truth)``: within ±1 if both are equally near the truth."""
    return lead_of_other


@pytest.fixture
def exact():
    """``exact(inputs, truncated=False) -> Exact``."""
    return plain_formula
