"""torch's scaled_dot_product_attention as Subjects: mask, bias, backend, arithmetic, refusals."""

import warnings

import pytest
import torch
from tests.subjects.sample_problems import MASKS, small
from torch.utils._python_dispatch import TorchDispatchMode

from attncheck.core.mod_spec import Spec
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.subjects import torch_kernels
from attncheck.subjects.conventions.call_tensors import attention_bias, attention_mask
from attncheck.subjects.torch_kernels import Sdpa

SOFTCAP = Spec.of("softcap", cap=5.0)


class OperationRecorder(TorchDispatchMode):
    """Records the names of the operations that torch runs."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mask", ["full", "causal", "padding"])
@pytest.mark.parametrize("score", ["alibi", "relative_bias", "bias", "offset", "chain"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("backend", ["math", "flash"])
def test_attention_with_an_additive_score_mod_is_within_rounding(
    backend, dtype, score, mask, exact
):
    relative = Spec.of("relative_bias", distance=9, seed=1)
    spec = {
        "alibi": Spec.of("alibi"),
        "relative_bias": relative,
        "bias": Spec.of("bias", seed=1, per_batch=1, per_head=0),
        "offset": Spec.of("offset", Spec.of("bias", seed=1, per_batch=0, per_head=1), rows=3),
        "chain": Spec.of("chain", Spec.of("none"), Spec.of("alibi")),
    }[score]
    problem = small(kv=57, dtype=dtype, mask=MASKS[mask], score=spec)
    kernel = Sdpa(backend)
    assert kernel.unsupported(problem, "cpu") is None
    inputs = draw_inputs(problem)
    assert exact(inputs).excess(kernel.run(inputs)) <= 1


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_requested_backend_runs(mask, dtype):
    inputs = draw_inputs(small(dtype=dtype, mask=MASKS[mask]))
    for backend in ("math", "flash"):
        call = Sdpa(backend).prepare(inputs)
        with OperationRecorder() as operations:
            call()
        flash = any("flash_attention_for_cpu" in name for name in operations.names)
        assert flash == (backend == "flash"), operations.names


@pytest.mark.parametrize("backend", ["efficient", "cudnn"])
def test_efficient_and_cudnn_need_a_gpu(backend):
    assert Sdpa(backend).absent("cpu") == "needs a CUDA GPU"
    assert Sdpa(backend).absent("cuda") is None
    assert Sdpa(backend).unsupported(small(), "cpu") == "needs a CUDA GPU"


def test_unsupported_problems_have_a_one_line_reason():
    math, flash = Sdpa("math"), Sdpa("flash")
    assert math.unsupported(small(dtype="tf32"), "cpu") == "the CPU has no tf32 products"
    assert math.unsupported(small(score=SOFTCAP), "cpu") == (
        "SDPA takes no score mod, and softcap(cap=5.0) is more than an added number"
    )
    assert math.unsupported(small(value_dim=8), "cpu") is None
    reason = flash.unsupported(small(value_dim=8), "cpu")
    assert reason.startswith("torch: Flash attention requires q,k,v to have the same last")
    assert "\n" not in reason


def test_bias_that_fp32_cannot_hold_is_unsupported():
    """With three heads the slopes of ALiBi have 24 bits, and their multiples have more."""
    odd = small(heads=3, kv_heads=3, score=Spec.of("alibi"))
    assert Sdpa("math").unsupported(odd, "cpu") == "would round the bias to fp32"
    assert Sdpa("math").unsupported(small(score=Spec.of("alibi")), "cpu") is None
    own_key = odd.replace(mask=Spec.of("sliding_window", window=1))  # every visible bias is 0
    assert Sdpa("math").unsupported(own_key, "cpu") is None


def test_mask_and_bias_have_only_the_axes_that_they_depend_on():
    assert attention_mask(small(mask=MASKS["causal"]), "cpu", range(40)).shape == (1, 1, 40, 40)
    assert attention_mask(small(mask=MASKS["padding"]), "cpu", range(40)).shape == (2, 1, 40, 40)
    nothing = small(mask=Spec.of("not", Spec.of("full")))
    assert attention_mask(nothing, "cpu", range(40)).shape == (1, 1, 40, 40)
    bias = attention_bias(small(score=Spec.of("alibi")), "cpu", range(40))
    assert bias.shape == (1, 4, 40, 40)
    assert bias.dtype == torch.float64


def test_settings_of_torch_are_restored():
    def settings():
        return (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
            torch.backends.cuda.matmul.fp32_precision,
            torch.get_float32_matmul_precision(),
            torch.is_grad_enabled(),
        )

    before = settings()
    inputs = draw_inputs(small())
    Sdpa("flash").run(inputs)
    assert settings() == before
    assert Sdpa("flash").unsupported(small(value_dim=8), "cpu")
    assert settings() == before
    call = Sdpa("flash").prepare(draw_inputs(small(value_dim=8)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the reasons before it raises
        with pytest.raises(RuntimeError, match="No available kernel"):
            call()
    assert settings() == before


@pytest.mark.parametrize(
    ("backend", "changes", "tensor"),
    [
        ("math", {}, "scores and weights in fp32"),
        ("flash", {"mask": Spec.of("prefix_lm", prefix=3)}, "attn_mask"),
        ("flash", {"score": Spec.of("alibi"), "dtype": "fp32"}, "bias in fp32"),
    ],
)
def test_mask_bias_or_scores_beyond_memory_are_unsupported(backend, changes, tensor):
    problem = Problem(heads=8, query=2_000_000, head_dim=1, **changes)
    reason = Sdpa(backend).unsupported(problem, "cpu")
    assert reason.startswith(f"its {tensor} would take ")
    assert Sdpa(backend).unsupported(problem.replace(query=64, kv=64), "cpu") is None


def test_declared_arithmetic_of_the_backends():
    assert Sdpa("math").arithmetic(small(), "cpu").normalised_weights
    assert not Sdpa("flash").arithmetic(small(), "cpu").normalised_weights
    assert Sdpa("flash").arithmetic(small(dtype="fp32"), "cpu").exp2_ulps == 2


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_inaccurate_exp_of_torch_is_within_the_declared_ulps(dtype):
    """With n equal scores exp(LSE) is n·exp(0); the fp32 logarithm adds a few units."""
    problem = small(kv=64, dtype=dtype, distribution="zero_q")
    inputs = draw_inputs(problem)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    _, lse = flash(inputs.q, inputs.k, inputs.v)
    error = (lse.double().exp() / problem.kv - 1).abs().max()
    ulps = Sdpa("flash").arithmetic(problem, "cpu").exp2_ulps
    assert error <= ulps * 2.0**-23


def test_unaligned_tensors_are_recognised():
    aligned = torch.zeros(64, dtype=torch.bfloat16)
    assert torch_kernels._aligned([aligned, aligned[8:]])
    assert not torch_kernels._aligned([aligned, aligned[1:]])


def test_only_cudnn_has_garbage_in_empty_rows():
    blind = Problem(batch=2, query=3, kv=4, mask=Spec.of("padding", lengths=[4, 0]))
    assert torch_kernels.Sdpa("cudnn")._garbage(blind, "cpu").squeeze(1).tolist() == [
        [False] * 3,
        [True] * 3,
    ]
    seeing = blind.replace(mask=Spec.of("padding", lengths=[4, 1]))
    assert torch_kernels.Sdpa("cudnn")._garbage(seeing, "cpu") is None
    assert torch_kernels.Sdpa("efficient")._garbage(blind, "cpu") is None


def test_only_cudnn_uses_a_compiler():
    assert [name for name in torch_kernels._BACKENDS if Sdpa(name).compiler] == ["cudnn"]
