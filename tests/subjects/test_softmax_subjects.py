"""The softmax kernels and the ideal softmax: within rounding of float64, and their launches."""

import math

import pytest
import torch

from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Inputs, draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.subjects import ideal as ideal_module
from attncheck.subjects.capabilities.named_kernels import subject_named
from attncheck.subjects.ideal import ideal_softmax
from attncheck.subjects.softmax_kernels import launch_softmax

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ("naive", "safe", "online", "blocked")
TRITON = tuple(f"triton-softmax-{kind}" for kind in KINDS)
UNIT = 2.0**-24


def problem(**changes: object) -> Problem:
    return Problem(**{"operation": "softmax", "heads": 2, "query": 9, "kv": 70} | changes)


def excess(inputs: Inputs, outputs: Outputs) -> float:
    """Largest error over the rounding allowance of any correct softmax, every count rounded up.

    In units of 2^-24, z = x − m: the exponent moves by 3|z| (naive: |x| for |z|), exp is off by 8,
    and a column goes through at most one rescaling of 10 and one addition for each of the others.
    A quotient inherits the weighted mean of that from the sum and adds 4 of its own; then comes the
    output's format. LSE has the sum's error, 8 for a log, and its own rounding.
    """
    x = inputs.scores().cpu()
    z = (x - x.amax(-1, keepdim=True)).abs().maximum(x.abs())
    exact, lse = torch.softmax(x, -1), torch.logsumexp(x, -1)
    each = 3 * z + 8 + 11 * x.shape[-1]
    mean = (exact * each).sum(-1)
    allowed = exact * (each + mean[..., None] + 4) * UNIT + 2.0**-126
    fmt = inputs.problem.formats.output
    allowed += fmt.unit_roundoff * exact + fmt.subnormal_spacing
    ratio = (outputs.out.cpu().double() - exact).abs() / allowed
    worst = float(ratio.nan_to_num(nan=math.inf).max())
    if outputs.lse is not None:
        log = (mean + 8 * (lse - x.amax(-1)).abs() + lse.abs()) * UNIT
        ratio = (outputs.lse.cpu().double() - lse).abs() / log
        worst = max(worst, float(ratio.nan_to_num(nan=math.inf).max()))
    return worst


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", [*TRITON, "torch-softmax"])
def test_softmax_kernel_is_within_rounding(name, dtype):
    inputs = draw_inputs(problem(dtype=dtype), DEVICE)
    outputs = subject_named(name).run(inputs)
    assert outputs.out.dtype == inputs.x.dtype
    assert (outputs.lse is None) == (name == "torch-softmax")
    assert excess(inputs, outputs) <= 1


@pytest.mark.parametrize("distribution", ["large_logits", "negative_logits", "sink", "one_hot"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_ideal_softmax_is_within_rounding(dtype, distribution):
    inputs = draw_inputs(problem(dtype=dtype, distribution=distribution), DEVICE)
    outputs = ideal_softmax(inputs)
    assert outputs.out.shape == inputs.x.shape
    assert outputs.out.dtype == inputs.x.dtype
    assert outputs.lse.dtype == torch.float32
    assert excess(inputs, outputs) <= 1


def test_weights_rounded_to_fp16_before_the_sum_are_more_than_rounding():
    inputs = draw_inputs(problem(dtype="fp32"), DEVICE)
    e = torch.exp(inputs.x - inputs.x.amax(-1, keepdim=True)).half().float()
    assert excess(inputs, Outputs(e / e.sum(-1, keepdim=True))) > 1


def test_ideal_softmax_in_parts_has_the_same_bits(monkeypatch):
    inputs = draw_inputs(problem(), DEVICE)
    whole = ideal_softmax(inputs)
    monkeypatch.setitem(ideal_module._SCORES_AT_A_TIME, "cpu", 200)
    parts = ideal_softmax(inputs)
    assert torch.equal(whole.out, parts.out)
    assert torch.equal(whole.lse, parts.lse)


@pytest.mark.parametrize("name", ["ideal", *TRITON[1:]])
def test_row_of_minus_infinity_gives_zeros_and_row_with_nan_gives_nan(name):
    inputs = draw_inputs(problem(dtype="fp32"), DEVICE)
    inputs.x[0, 0, 3] = -math.inf
    inputs.x[0, 1, 4, 69] = math.nan
    outputs = ideal_softmax(inputs) if name == "ideal" else subject_named(name).run(inputs)
    assert (outputs.out[0, 0, 3] == 0).all()
    assert outputs.lse[0, 0, 3] == -math.inf
    assert outputs.out[0, 1, 4].isnan().all()
    assert outputs.lse[0, 1, 4].isnan()
    assert int(outputs.out.isnan().any(-1).sum()) == 1


@pytest.mark.parametrize("name", [*TRITON, "torch-softmax"])
def test_softmax_kernels_concern_softmax_and_not_attention(name):
    subject = subject_named(name)
    assert subject.name == name
    assert subject.concerns(problem())
    assert subject.unsupported(problem(), DEVICE) is None
    assert not subject.concerns(Problem(query=8))
    assert subject.triton == name.startswith("triton")


@pytest.mark.parametrize("columns", [1, 33, 100, 1000, 4096, 40000, 100000])
@pytest.mark.parametrize("kind", KINDS)
def test_launch_tiles_long_rows_and_limits_columns_per_thread(kind, columns):
    """Interpreted rows above 32 take several tiles; a compiled thread holds at most 32 columns."""
    interpreted = launch_softmax(kind, columns, "fp32", "cpu")
    assert (interpreted.block_columns < columns) == (columns > 32)
    for dtype in ("fp32", "fp16", "bf16"):
        compiled = launch_softmax(kind, columns, dtype, "cuda")
        for size in (compiled.block_rows, compiled.block_columns, compiled.warps):
            assert size & (size - 1) == 0
        assert compiled.block_rows * compiled.block_columns <= 32 * 32 * compiled.warps
