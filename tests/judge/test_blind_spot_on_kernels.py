"""The blind spot says of real kernels what the verdict then finds."""

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

BEYOND = {"bound", "improbable"}
CAUSAL = Spec.of("causal_bottom_right")
LSE = pytest.mark.parametrize("exposes_lse", [True, False], ids=["lse", "out alone"])
DTYPE = pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])


@cache
def evidence(dtype: str) -> EvidenceBuilder:
    problem = Problem(heads=2, query=64, head_dim=64, dtype=dtype, mask=CAUSAL)
    return EvidenceBuilder(Case(problem=problem), "cpu")


def verdict(kernel: Ideal, dtype: str, *, exposes_lse: bool) -> Judgement:
    case = evidence(dtype)
    found = InProcess().run(kernel, case.inputs, timed=False)
    assert isinstance(found, Execution)
    lse = found.outputs.lse if exposes_lse else None
    shown = Execution(
        outputs=Outputs(out=found.outputs.out, lse=lse),
        seconds=None,
        tiling=found.tiling,
        arithmetic=found.arithmetic,
    )
    return judge_outputs(shown, case)


def spot(dtype: str, *, exposes_lse: bool) -> BlindSpot:
    arithmetic = Ideal().arithmetic(evidence(dtype).case.problem, "cpu")
    found = evidence(dtype).blind_spot(arithmetic, exposes_lse=exposes_lse)
    assert found is not None
    return found


class Scaled(Ideal):
    """Every score is larger by a share."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def scores(self, products: torch.Tensor) -> torch.Tensor:
        return (products.double() * (1 + self.share)).float()


class Cut(Ideal):
    """Sums of products keep few bits, cut off after every 16 products."""

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
def test_a_right_kernel_leaves_room(dtype, exposes_lse):
    """What the next test's quarter rests on."""
    found = verdict(Ideal(), dtype, exposes_lse=exposes_lse)
    assert found.status == "pass"
    assert max(found.out_over_bound, found.out_over_probable) < 0.75


@LSE
@DTYPE
def test_a_scale_off_by_twice_the_smallest_is_beyond_and_by_a_quarter_is_not(dtype, exposes_lse):
    """Twice an allowance, less the kernel's own error, is beyond it; ¼ and ¾ of one are not."""
    smallest = spot(dtype, exposes_lse=exposes_lse).scale
    assert verdict(Scaled(2 * smallest), dtype, exposes_lse=exposes_lse).rule in BEYOND
    assert verdict(Scaled(smallest / 4), dtype, exposes_lse=exposes_lse).rule not in BEYOND


@LSE
@DTYPE
def test_sums_of_fewer_bits_are_beyond_and_of_more_are_not(dtype, exposes_lse):
    """Two bits to either side: a bit halves what is lost, and the kernel's own error is beside."""
    bits = spot(dtype, exposes_lse=exposes_lse).accumulator_bits
    assert 2 < bits < 22
    assert verdict(Cut(bits - 2), dtype, exposes_lse=exposes_lse).rule in BEYOND
    assert verdict(Cut(bits + 2), dtype, exposes_lse=exposes_lse).rule not in BEYOND
