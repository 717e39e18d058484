"""fp8: descales, the scale of P, transposed V, NaN and infinities, and which kernels take fp8."""

import dataclasses
import math

import pytest
import torch
from tests.kernels.patched_kernels import faulty_forward

from attncheck import oracles
from attncheck.core.formats import DTYPES, FORMATS
from attncheck.core.mod_spec import Spec
from attncheck.inputs.input_tensors import Descale, draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.subjects import ideal
from attncheck.subjects.capabilities.named_kernels import BUILTIN
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal
from attncheck.subjects.triton_flash import (
    Flash1,
    Flash2,
    Flash2FastAccumulation,
    Flash2TransposedValues,
)

KERNELS = (Flash2, Flash2TransposedValues, Flash2FastAccumulation, Flash1)
MASKS = {
    "full": Spec.of("full"),
    "window": Spec.of("sliding_window", window=90),
    "padding": Spec.of("padding", lengths=[200]),
}


pytestmark = pytest.mark.usefixtures("require_interpreter")


@pytest.fixture(params=[*KERNELS[:2], Flash1, Ideal], ids=lambda kernel: kernel.name)
def any_kernel(request):
    return request.param()


@pytest.fixture(params=["e4m3", "e5m2"])
def dtype(request):
    return request.param


def small(dtype: str, **changes) -> Problem:
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 40, "kv": 70, "head_dim": 16}
    return Problem(**(sizes | {"dtype": dtype} | changes))


def are_equal(a, b) -> bool:
    return torch.equal(a.out, b.out) and torch.equal(a.lse, b.lse)


def test_fp8_attention_is_within_rounding(any_kernel, dtype, exact):
    for score in ("none", "alibi"):
        inputs = draw_inputs(small(dtype, score=Spec.of(score), distribution="outliers"))
        outputs = any_kernel.run(inputs)
        assert exact(inputs).excess(outputs) <= 1
        assert (outputs.out.dtype, outputs.lse.dtype) == (torch.bfloat16, torch.float32)


def test_doubled_numbers_with_halved_descales_give_the_same_bits(any_kernel, dtype):
    inputs = draw_inputs(small(dtype))
    limit = FORMATS[dtype].max / 2
    whole = {n: t.float().clamp(-limit, limit).round() for n, t in inputs.tensors().items()}
    stored = {n: whole[n].to(inputs.q.dtype) for n in "qkv"}  # no subnormals, which would round
    before = any_kernel.run(inputs.replace(**stored))
    for name in "qkv":
        twice = (stored[name].float() * 2).to(inputs.q.dtype)
        half = dataclasses.replace(inputs.descale, **{name: getattr(inputs.descale, name) / 2})
        moved = inputs.replace(**(stored | {name: twice}), descale=half)
        assert are_equal(any_kernel.run(moved), before)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_descales_are_read_by_sequence_and_key_head(name, any_kernel, dtype, exact):
    inputs = draw_inputs(small(dtype))
    scales = getattr(inputs.descale, name) * torch.tensor([[1.0, 0.7], [0.3, 1.9]])
    inputs = inputs.replace(descale=dataclasses.replace(inputs.descale, **{name: scales}))
    outputs = any_kernel.run(inputs)
    assert exact(inputs).excess(outputs) <= 1
    swapped = dataclasses.replace(inputs.descale, **{name: scales.flip(1)})
    assert exact(inputs.replace(descale=swapped)).excess(outputs) > 1


def test_strides_of_descales_change_no_bit(any_kernel, dtype):
    inputs = draw_inputs(small(dtype))
    scales = {n: getattr(inputs.descale, n) for n in "qkv"}
    strided = Descale(**{n: scale.T.contiguous().T for n, scale in scales.items()})
    assert not strided.q.is_contiguous()
    assert are_equal(any_kernel.run(inputs.replace(descale=strided)), any_kernel.run(inputs))


@pytest.mark.parametrize("mask", ["full", "window", "padding"])
def test_transposed_values_give_the_same_bits(mask, dtype):
    inputs = draw_inputs(small(dtype, batch=1, query=256, kv=256, mask=MASKS[mask], value_dim=24))
    assert are_equal(Flash2TransposedValues().run(inputs), Flash2().run(inputs))


def test_transposed_values_are_stored_transposed(dtype):
    inputs = draw_inputs(small(dtype))
    v = inputs.v
    _, stored, _ = Flash2TransposedValues().stored(inputs)
    assert torch.equal(stored.float(), v.float())
    assert stored.stride()[-2:] == (1, v.shape[2])
    assert Flash2().stored(inputs)[1] is v


def peaked(dtype: str, lead: float):
    """Inputs whose first key, with value 0, leads the others, which are equal, in log2 units."""
    problem = small(dtype, batch=1, heads=1, kv_heads=1, kv=1024)
    inputs = draw_inputs(problem)
    q, k = torch.zeros(inputs.q.shape), torch.zeros(inputs.k.shape)
    q[..., 0], k[:, :, 0, 0] = 1.0, 1.0
    v = inputs.v.float()
    v[:, :, 0] = 0.0
    scale = torch.full((1, 1), lead * math.log(2) / problem.scale)
    return inputs.replace(
        q=q.to(inputs.q.dtype),
        k=k.to(inputs.k.dtype),
        v=v.to(inputs.v.dtype),
        descale=dataclasses.replace(inputs.descale, q=torch.ones(1, 1), k=scale),
    )


@pytest.mark.parametrize("subject", [Flash2, Ideal])
def test_weights_are_scaled_before_they_are_rounded(subject, dtype, monkeypatch):
    """Out consists of 1,023 weights that fp8 would round to 0 without the scale."""
    inputs = peaked(dtype, 2 - math.log2(FORMATS[dtype].subnormal_spacing))
    truth = oracles.dense(inputs).out
    error = subject().run(inputs).out.double() - truth
    assert (error.abs() < truth.abs()).all()
    unscaled = dataclasses.replace(inputs.problem.formats, weights_scale=1.0)
    monkeypatch.setitem(DTYPES, dtype, unscaled)
    assert not subject().run(inputs).out.any()


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param((" / WEIGHTS_SCALE", ""), id="the scale of P is not undone"),
        pytest.param(("tl.load(descale[2] + kv_head)", "1.0"), id="v's descale is forgotten"),
        pytest.param((" // group  # group divides heads", " * 0"), id="another head's descales"),
        pytest.param((" * tl.load(descale[1] + kv_head)", ""), id="k's descale is forgotten"),
        pytest.param(("(p * WEIGHTS_SCALE)", "(p * 1.0)"), id="P is not scaled"),
    ],
)
@pytest.mark.parametrize("subject", [Flash2, Flash1])
def test_planted_fault_is_more_than_rounding(subject, fault, dtype, exact, tmp_path, monkeypatch):
    inputs = draw_inputs(small(dtype))
    assert exact(inputs).excess(subject().run(inputs)) <= 1
    module = subject().forward().__name__
    wrong = faulty_forward(tmp_path, module, *fault)
    monkeypatch.setattr(subject, "forward", lambda self: wrong)
    assert exact(inputs).excess(subject().run(inputs)) > 1


@pytest.mark.parametrize(("subject", "sum_of"), [(Flash2, "alpha + "), (Flash1, "beta * ")])
def test_scale_of_p_in_the_row_sum_is_more_than_rounding(subject, sum_of, dtype, exact, tmp_path):
    inputs, right = draw_inputs(small(dtype)), f"{sum_of}tl.sum(p, 1)"
    module = subject().forward().__name__
    wrong = faulty_forward(tmp_path, module, right, right.replace("(p,", "(p * 256.0,"))

    class Planted(subject):
        def forward(self):
            return wrong

    assert exact(inputs).excess(Planted().run(inputs)) > 1


def test_lazy_rescaling_does_not_overflow_fp8_weights(dtype, exact):
    """P reaches 2^τ, which at the full scale would be clamped to fp8's largest number."""
    problem = small(dtype, batch=1, heads=1, kv_heads=1, kv=128)
    rising = torch.linspace(0.0, 1.0, 128).view(1, 1, 128, 1) * FORMATS[dtype].max
    fp8 = problem.formats.storage.torch_dtype
    inputs = draw_inputs(problem)
    inputs = inputs.replace(
        q=torch.ones_like(inputs.q, dtype=torch.float32).to(fp8),
        k=rising.expand(inputs.k.shape).to(fp8),
        descale=dataclasses.replace(inputs.descale, q=torch.ones(1, 1), k=torch.full((1, 1), 2e-3)),
    )
    lazy = Tiling(block_query=64, block_kv=16, lazy_rescale=8.0)
    assert exact(inputs).excess(Ideal(lazy).run(inputs)) <= 1


@pytest.mark.parametrize(
    ("name", "filling"), [("e4m3", math.nan), ("e5m2", math.nan), ("e5m2", math.inf)]
)
@pytest.mark.parametrize("mask", ["causal", "padding"])
def test_hidden_keys_and_values_that_are_not_finite_change_no_bit(mask, name, filling, any_kernel):
    spec = {"causal": Spec.of("causal"), "padding": Spec.of("padding", lengths=[70])}[mask]
    inputs = draw_inputs(small(name, batch=1, query=90, kv=90, mask=spec))
    k, v = inputs.k.float(), inputs.v.float()
    k[:, :, 70:], v[:, :, 70:] = filling, filling
    filled = inputs.replace(k=k.to(inputs.k.dtype), v=v.to(inputs.v.dtype))
    assert not filled.v.float().isfinite().all()
    before, after = any_kernel.run(inputs), any_kernel.run(filled)
    rows = slice(70) if mask == "causal" else slice(None)
    assert torch.equal(before.out[:, :, rows], after.out[:, :, rows])
    assert torch.equal(before.lse[:, :, rows], after.lse[:, :, rows])


def underflowing_inputs(dtype, score):
    """Inputs with padding whose product of descales is 0 in fp32, and so is every score."""
    lengths = Spec.of("padding", lengths=[0, 33])
    inputs = draw_inputs(small(dtype, mask=lengths, score=Spec.of(score)))
    tiny = {name: getattr(inputs.descale, name) * 1e-21 for name in "qk"}
    inputs = inputs.replace(descale=dataclasses.replace(inputs.descale, **tiny))
    assert not (inputs.descale.q * inputs.descale.k).any()
    return inputs


@pytest.mark.parametrize("score", ["none", "alibi"])
def test_underflowing_descales_are_within_rounding(score, any_kernel, dtype, exact):
    inputs = underflowing_inputs(dtype, score)
    assert exact(inputs).excess(any_kernel.run(inputs)) <= 1


TILINGS = [
    Tiling(block_query=16, block_kv=16, recurrence="flash1"),
    Tiling(block_query=16, block_kv=16, reverse=True, lazy_rescale=2.0),
]


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_underflowing_descales_are_within_rounding_in_any_tiling(tiling, dtype, exact, monkeypatch):
    inputs = underflowing_inputs(dtype, "none")
    assert exact(inputs).excess(Ideal(tiling).run(inputs)) <= 1

    def naive(exp2, exponent, score):
        del exp2, score
        return torch.exp2(exponent)

    monkeypatch.setattr(ideal, "power_of_two", naive)
    assert Ideal(tiling).run(inputs).out.isnan().any()  # −∞ times 0


def test_empty_rows_have_zero_out_and_lse_of_minus_infinity(any_kernel, dtype):
    outputs = any_kernel.run(draw_inputs(small(dtype, mask=Spec.of("padding", lengths=[0, 33]))))
    assert not outputs.out[0].float().any()
    assert torch.isneginf(outputs.lse[0]).all()
    assert outputs.lse[1].isfinite().all()


@pytest.mark.parametrize("name", BUILTIN)
def test_fp8_is_supported_or_refused_with_a_reason_by_every_builtin_kernel(name, dtype):
    subject, problem = BUILTIN[name](), small(dtype)
    only_fp8 = name in {"triton-flash2-vt", "triton-flash2-fastacc"}
    assert subject.concerns(small("bf16")) == (
        not only_fp8 and subject.concerns(Problem(query=8, dtype="bf16"))
    )
    assert not (only_fp8 and subject.concerns(Problem(operation="softmax", query=8, dtype="bf16")))
    if not subject.concerns(problem):
        return
    reason = subject.unsupported(problem, "cpu")
    if name == "triton-flash3" and dtype == "e5m2":
        assert reason == "it takes fp16, bf16 and e4m3"
    elif name == "ideal" or name.startswith("triton"):
        assert reason is None
    elif subject.absent("cpu") is None:
        assert reason == "takes no fp8 inputs with descales"


def test_launches_forbid_imprecise_accumulation_except_fastacc(dtype):
    limits = {s.name: s().launch(small(dtype), "cuda").max_num_imprecise_acc for s in KERNELS}
    assert limits.pop("triton-flash2-fastacc") is None
    assert set(limits.values()) == {0}
    assert Flash2FastAccumulation().absent("cpu")


@pytest.mark.parametrize("dim", [1, 16, 33, 64, 100, 256])
def test_blocks_of_fp8_have_at_least_32_numbers_for_tensor_cores(dim, dtype):
    from attncheck.kernels.launch import block_dim

    storage = FORMATS[dtype].torch_dtype
    assert block_dim(dim, storage) >= max(32, dim)
    assert block_dim(dim, torch.bfloat16) >= max(16, dim)
    problem = small(dtype, head_dim=dim)
    assert all(Flash2().launch(problem, d).block_kv >= 32 for d in ("cpu", "cuda"))
