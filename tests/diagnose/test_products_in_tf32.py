"""An fp32 kernel whose products are rounded to tf32 is told so; no other kernel is."""

import math

import pytest
import torch
from tests.diagnose.helpers import add_wave, diagnose
from tests.fault_models.planted import best_models, execute
from tests.planted_kernels.other_steps import SMALL, kept_in, stepping
from tests.planted_kernels.outputs_given import giving

from attncheck.core.formats import FORMATS
from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.fault_models.exact_attention import ExactAttention
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.ideal import Ideal
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.run_case import run_case

pytestmark = pytest.mark.usefixtures("shared_evidence")

MODEL = "products-tf32"
CAUSAL = Problem(query=77, kv=77, heads=2, head_dim=32, dtype="fp32", mask=Spec.of("causal"))


def ten_bits(x):
    """Round fp32 numbers to the 10 bits behind the point that tf32 has."""
    return ((x.contiguous().view(torch.int32) + (1 << 12)) >> 13 << 13).view(torch.float32)


def dense(round_scores=ten_bits, round_values=ten_bits):
    """Attention as one writes it in torch, with its operands rounded; P is divided before."""

    def attend(inputs, _right):
        group, query, kv = inputs.problem.group, inputs.problem.query, inputs.problem.kv
        q = round_scores(inputs.q)
        k, v = (x.repeat_interleave(group, 1) for x in (inputs.k, inputs.v))
        scores = q @ round_scores(k).mT * inputs.problem.scale
        hidden = torch.arange(kv) > torch.arange(query)[:, None]
        scores = scores.masked_fill(hidden, -math.inf)
        p = round_values(scores.softmax(-1))
        return Outputs(p @ round_values(v), scores.logsumexp(-1))

    return giving(attend)


def in_format(name, **how):
    """Round q, k, v and P to a format."""
    return {"operand": lambda _, x, _fmt: Ideal(**how).operand(x, FORMATS[name])}


def unchanged(x):
    return x


def scale_first(self, tiling):
    """Multiply q by the scale before it is rounded."""
    Ideal.__init__(self, tiling, scale_first=True)


TF32 = {
    "dense": dense(),
    "dense scores": dense(round_values=unchanged),
    "dense values": dense(round_scores=unchanged),
    "truncated": in_format("tf32", tf32="truncate"),
    "nearest": in_format("tf32"),
    "scaled first": in_format("tf32") | {"__init__": scale_first},
    "fp16": in_format("fp16"),
}
OTHERS = {
    "bf16": in_format("bf16"),
    "out in bf16": kept_in(torch.bfloat16),
    "factor": {"normalised": lambda self, out, sums: 0.9995 * Ideal.normalised(self, out, sums)},
    "scale": {"scores": lambda _, products: 1.0005 * products},
    "no model": {"normalised": add_wave},
}


@pytest.mark.parametrize("name", TF32)
def test_products_in_tf32_are_named(name):
    diagnosis = diagnose(stepping(SMALL, **TF32[name]), CAUSAL)
    assert (diagnosis.level, diagnosis.tied) == ("named", 1)
    assert diagnosis.ranked[0].model == MODEL
    assert 'input_precision="ieee"' in diagnosis.ranked[0].sentence


@pytest.mark.parametrize("name", OTHERS)
def test_another_fault_in_fp32_is_not_called_tf32(name):
    diagnosis = diagnose(stepping(SMALL, **OTHERS[name]), CAUSAL)
    assert MODEL not in [one.model for one in diagnosis.ranked]


def test_error_where_every_weight_may_be_near_a_tie_is_not_called_tf32():
    """What may fall either way would explain any error there."""
    problem = Problem(query=17, kv=77, heads=2, head_dim=64, dtype="fp32", scale=300 / 8)
    evidence = EvidenceBuilder(Case(problem=problem), "cpu")
    right = ExactAttention(evidence.inputs).exact
    noise = torch.randn(right.out.shape, generator=torch.Generator().manual_seed(0))
    result = execute(problem, Outputs(right.out * (1 + 3e-4 * noise.double()), right.lse))
    assert MODEL not in best_models(result, evidence)


@pytest.mark.parametrize("steps", [{}, dense(unchanged, unchanged)], ids=["tiled", "dense"])
def test_right_fp32_kernel_passes(steps):
    """The kernels above are wrong by their roundings alone."""
    assert run_case(stepping(SMALL, **steps), Case(problem=CAUSAL), device="cpu").status == "pass"
