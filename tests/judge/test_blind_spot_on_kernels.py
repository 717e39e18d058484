"""In real kernels faults beyond the blind spot fail, and faults well inside it do not."""

from functools import cache

import pytest
import torch

from attncheck.core.judgement import BlindSpot, Judgement
from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.inputs.problem import Case, Problem
from attncheck.judge.blind_spot import cut, first_bits
from attncheck.subjects.ideal import Ideal
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.executor import Execution, InProcess
from attncheck.verify.judging import judge_outputs

BOUND_RULES = {"bound", "improbable"}
CAUSAL = Spec.of("causal_bottom_right")
LSE = pytest.mark.parametrize("exposes_lse", [True, False], ids=["lse", "out alone"])
DTYPE = pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])


@cache
def evidence(dtype: str) -> EvidenceBuilder:
    problem = Problem(heads=2, query=64, head_dim=64, dtype=dtype, mask=CAUSAL)
    return EvidenceBuilder(Case(problem=problem), "cpu")


def verdict(kernel: Ideal, dtype: str, *, exposes_lse: bool) -> Judgement:
    builder = evidence(dtype)
    result = InProcess().run(kernel, builder.inputs)
    assert isinstance(result, Execution)
    lse = result.outputs.lse if exposes_lse else None
    execution = Execution(
        outputs=Outputs(out=result.outputs.out, lse=lse),
        seconds=None,
        tiling=result.tiling,
        arithmetic=result.arithmetic,
    )
    return judge_outputs(execution, builder)


def spot(dtype: str, *, exposes_lse: bool) -> BlindSpot:
    arithmetic = Ideal().arithmetic(evidence(dtype).case.problem, "cpu")
    blind_spot = evidence(dtype).blind_spot(arithmetic, exposes_lse=exposes_lse)
    assert blind_spot is not None
    return blind_spot


class Scaled(Ideal):
    """Every score is too large by a relative ``share``."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def scores(self, products: torch.Tensor) -> torch.Tensor:
        return (products.double() * (1 + self.share)).float()


class Cut(Ideal):
    """Sums of products are truncated to few bits after every 16 products."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def product(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for start in range(0, rows.shape[-1], 16):
            part = slice(start, start + 16)
            total = cut(
                total + rows[..., part].double() @ columns[:, part].double(), first_bits(self.bits)
            )
        return total.float()


@LSE
@DTYPE
def test_correct_kernel_stays_below_three_quarters_of_its_bounds(dtype, exposes_lse):
    """The next test relies on this margin: a quarter of an allowance may be added."""
    result = verdict(Ideal(), dtype, exposes_lse=exposes_lse)
    assert result.status == "pass"
    assert max(result.out_over_bound, result.out_over_probable) < 0.75


@LSE
@DTYPE
def test_scale_error_fails_at_twice_the_blind_spot_and_not_at_a_quarter(dtype, exposes_lse):
    """Twice an allowance, less the kernel's own error, is beyond it; ¼ and ¾ of one are not."""
    smallest = spot(dtype, exposes_lse=exposes_lse).scale
    assert verdict(Scaled(2 * smallest), dtype, exposes_lse=exposes_lse).rule in BOUND_RULES
    assert verdict(Scaled(smallest / 4), dtype, exposes_lse=exposes_lse).rule not in BOUND_RULES


@LSE
@DTYPE
def test_accumulator_fails_two_bits_below_the_blind_spot_and_not_two_above(dtype, exposes_lse):
    """One bit halves the loss; two leave room for the kernel's own error."""
    bits = spot(dtype, exposes_lse=exposes_lse).accumulator_bits
    assert 2 < bits < 22
    assert verdict(Cut(bits - 2), dtype, exposes_lse=exposes_lse).rule in BOUND_RULES
    assert verdict(Cut(bits + 2), dtype, exposes_lse=exposes_lse).rule not in BOUND_RULES
