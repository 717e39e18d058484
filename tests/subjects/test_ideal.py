"""The ideal kernel: within its rounding bounds, and bit for bit the roundings that it declares."""

import dataclasses
import math

import pytest
import torch
from tests.subjects.sample_problems import MASKS, SCORES, small

from attncheck.core.formats import FORMATS, MEASURED_DTYPES, fp32, round_to
from attncheck.core.mod_spec import Entry, Spec
from attncheck.core.outputs import same_numbers
from attncheck.inputs.input_tensors import Descale, draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.mods import library
from attncheck.subjects import ideal
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal, finite, ideal_softmax, multiply_add, power_of_two

NOT_FINITE = (math.nan, math.inf, -math.inf)
TILINGS = {
    "flash1": Tiling(block_query=64, block_kv=32, recurrence="flash1"),
    "wide": Tiling(block_query=128, block_kv=128),
    "narrow": Tiling(block_query=16, block_kv=16),
    "reverse": Tiling(block_query=64, block_kv=32, reverse=True),
    "lazy": Tiling(block_query=64, block_kv=16, lazy_rescale=8.0),
    "lazy-int": Tiling(block_query=64, block_kv=16, lazy_rescale=8),
    "reverse-lazy": Tiling(block_query=32, block_kv=16, reverse=True, lazy_rescale=2.0),
}


def change_descales(inputs, change):
    """The inputs' descales, changed, or None if they have none."""
    old = inputs.descale
    return old and Descale(q=change(old.q), k=change(old.k), v=change(old.v))


def rms(error: torch.Tensor) -> float:
    return error.double().square().mean().sqrt().item()


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("dtype", MEASURED_DTYPES)
def test_tiling_changes_bits_within_rounding(dtype, tiling, exact):
    inputs = draw_inputs(small(kv=150, dtype=dtype))
    kernel = Ideal(TILINGS[tiling])
    outputs = kernel.run(inputs)
    assert kernel.tiling(inputs.problem, "cpu") == TILINGS[tiling]
    assert exact(inputs).excess(outputs) <= 1
    assert not torch.equal(outputs.lse, Ideal().run(inputs).lse)


@pytest.mark.parametrize(
    "options", [{}, {"score": Spec.of("alibi"), "scale": 0.3}, {"scale": -0.3}], ids=str
)
@pytest.mark.parametrize("order", ["reverse_sums", "scale_first"])
@pytest.mark.parametrize("dtype", MEASURED_DTYPES)
def test_reordered_operations_change_bits_within_rounding(dtype, order, options, exact):
    inputs = draw_inputs(small(kv=150, dtype=dtype, **options))
    outputs = Ideal(**{order: True}).run(inputs)
    assert exact(inputs).excess(outputs) <= 1
    assert not torch.equal(outputs.lse, Ideal().run(inputs).lse)


def test_reverse_sums_reverses_products_and_row_sums():
    terms = torch.rand(1, 64, 256, generator=torch.Generator().manual_seed(1))
    ones, problem = torch.ones(1, 256, 8), small()
    usual, other = Ideal(), Ideal(reverse_sums=True)
    reverse = terms.flip(-1)
    assert torch.equal(other.product(terms, ones), usual.product(reverse, ones))
    assert not torch.equal(other.product(terms, ones), usual.product(terms, ones))
    sums = [each.row_sum(terms, problem, 1.0) for each in (usual, other)]
    assert torch.equal(sums[1], usual.row_sum(reverse, problem, 1.0))
    assert not torch.equal(*sums)


def test_scale_first_rounds_a_score_mod_only_once():
    """The LSE of a single key is its score."""
    linear = Spec.of("expression", text="score * 3.0 + 1.0")
    problem = Problem(head_dim=1, kv=1, query=64, dtype="fp32", scale=fp32(1 / 3), score=linear)
    inputs = draw_inputs(problem)
    product = (inputs.q * inputs.k).flatten().double()  # rounded, as every sum of products is
    lse = Ideal(scale_first=True).run(inputs).lse.flatten()
    assert torch.equal(lse, (product * problem.scale * 3.0 + 1.0).float())
    assert not torch.equal(lse, Ideal().run(inputs).lse.flatten())


@pytest.mark.parametrize("score", ["none", "alibi"])
def test_reordered_operations_keep_hidden_keys_hidden(score):
    inputs = draw_inputs(small(dtype="fp16", mask=MASKS["causal"], score=Spec.of(score)))
    for name in ("k", "v"):
        getattr(inputs, name)[:, :, -1] = math.nan
    outputs = Ideal(reverse_sums=True, scale_first=True).run(inputs)
    assert torch.isfinite(outputs.out[:, :, :-1]).all()
    assert outputs.out[:, :, -1].isnan().all()


def test_lazy_maximum_does_not_follow_scores_that_rise_by_less_than_its_threshold(exact):
    """P then exceeds 1, and out is still within rounding."""
    inputs = draw_inputs(small(kv=64, batch=1, heads=1, kv_heads=1, dtype="fp32"))
    rising = torch.linspace(0, 4, 64).view(1, 1, 64, 1).expand_as(inputs.k)
    inputs = inputs.replace(q=torch.full_like(inputs.q, 0.25), k=rising.contiguous())
    largest = []

    class Watched(Ideal):
        def operand(self, values, fmt):
            largest.append(values.max().item())
            return super().operand(values, fmt)

    lazy = Tiling(block_query=64, block_kv=16, lazy_rescale=8.0)
    assert exact(inputs).excess(Watched(lazy).run(inputs)) <= 1
    weights = largest[3:]  # after q, k and v: the weights of each tile
    assert max(weights) > 2
    largest.clear()
    Watched(dataclasses.replace(lazy, lazy_rescale=0.0)).run(inputs)
    assert max(largest[3:]) < 2


@pytest.mark.parametrize("name", ["fp32", "tf32", "fp16", "bf16"])
def test_operands_are_rounded_once_to_nearest(name):
    values = torch.randn(4096, generator=torch.Generator().manual_seed(1)).double()
    values = torch.cat([values, values * 2.0**-20, torch.tensor([1 + 2.0**-11, 1 + 3 * 2.0**-11])])
    values = values.float()
    expected = round_to(values.double(), FORMATS[name])
    assert torch.equal(Ideal().operand(values, FORMATS[name]).double(), expected)


def test_truncated_tf32_operands_lose_their_last_bits():
    values = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    values = torch.cat([values, torch.tensor([torch.inf, -torch.inf, 0.0])])
    operands = Ideal(tf32="truncate").operand(values, FORMATS["tf32"])
    significand, exponent = torch.frexp(values.double())
    bits = 2.0 ** FORMATS["tf32"].significand
    truncated = torch.ldexp(torch.trunc(significand * bits) / bits, exponent)
    assert torch.equal(operands.double(), torch.where(values.isinf(), values.double(), truncated))
    assert Ideal(tf32="truncate").operand(torch.tensor([math.nan]), FORMATS["tf32"]).isnan().all()


@pytest.mark.parametrize("dtype", ["tf32", "fp16", "bf16"])
def test_rounding_of_operands_costs_accuracy(dtype, exact):
    class Unrounded(Ideal):
        def operand(self, values, fmt):
            del fmt
            return values

    inputs = draw_inputs(small(kv=101, dtype=dtype))
    true = exact(inputs).out
    assert rms(Ideal().run(inputs).out - true) > rms(Unrounded().run(inputs).out - true)


def test_truncation_costs_more_than_rounding(exact):
    inputs = draw_inputs(small(kv=101, dtype="tf32"))
    true = exact(inputs, truncated=True)
    nearest, truncated = Ideal().run(inputs), Ideal(tf32="truncate").run(inputs)
    assert true.excess(truncated) <= 1
    assert rms(truncated.out - true.out) > rms(nearest.out - true.out)


@pytest.mark.parametrize("tiling", [None, TILINGS["flash1"], TILINGS["reverse-lazy"]], ids=str)
@pytest.mark.parametrize(
    ("dtype", "filling"),
    # e4m3 has no infinity: torch converts it to 448 or NaN.
    [(d, x) for d in MEASURED_DTYPES for x in NOT_FINITE if d != "e4m3" or math.isnan(x)],
)
def test_future_keys_and_values_that_are_not_finite_change_no_bit(dtype, filling, tiling):
    inputs = draw_inputs(small(query=90, dtype=dtype, mask=MASKS["causal"]))
    k, v = inputs.k.clone(), inputs.v.clone()
    k[:, :, 70:], v[:, :, 70:] = filling, filling
    before, after = Ideal(tiling).run(inputs), Ideal(tiling).run(inputs.replace(k=k, v=v))
    assert torch.equal(before.out[:, :, :70], after.out[:, :, :70])
    assert torch.equal(before.lse[:, :, :70], after.lse[:, :, :70])
    assert not after.out[:, :, 70:].isfinite().any()


def test_value_of_nan_reaches_exactly_the_rows_and_column_that_read_it():
    inputs = draw_inputs(small(mask=MASKS["window"], dtype="bf16"))
    v = inputs.v.clone()
    v[1, 0, 9, 3] = math.nan
    out = Ideal().run(inputs.replace(v=v)).out
    reached = torch.zeros_like(out, dtype=torch.bool)
    reached[1, :2, 9:16, 3] = True  # the heads of key head 0, the rows of key 9's window
    assert torch.equal(out.isnan(), reached)
    assert torch.equal(out[~reached], Ideal().run(inputs).out[~reached])


@pytest.mark.parametrize("dtype", MEASURED_DTYPES)
def test_rows_do_not_depend_on_other_rows_or_sequences(dtype):
    inputs = draw_inputs(small(query=140, kv=33, dtype=dtype))
    few = inputs.problem.replace(query=5, batch=1)
    first = {"q": inputs.q[:1, :, :5], "k": inputs.k[:1], "v": inputs.v[:1]}
    descale = change_descales(inputs, lambda scale: scale[:1])
    part = inputs.replace(problem=few, **first, descale=descale)
    assert torch.equal(Ideal().run(inputs).out[:1, :, :5], Ideal().run(part).out)


def test_rows_computed_in_parts_have_the_same_bits(monkeypatch):
    inputs = draw_inputs(small(query=300, kv=101, mask=MASKS["causal"], dtype="fp32"))
    whole = Ideal().run(inputs)
    monkeypatch.setitem(ideal._ROWS_AT_A_TIME, "cpu", 1)
    parts = Ideal().run(inputs)
    assert torch.equal(whole.out, parts.out)
    assert torch.equal(whole.lse, parts.lse)


@pytest.mark.parametrize("dtype", MEASURED_DTYPES)
@pytest.mark.parametrize("n", [1, 2, 64, 128])
def test_mean_of_equal_scores_is_exact(dtype, n):
    """With q = 0 every weight is 1, and powers of two are numbers of every format."""
    inputs = draw_inputs(small(kv=n, dtype=dtype))
    ones = torch.zeros_like(inputs.v)
    ones[:, :, 0] = 4.0
    inputs = inputs.replace(q=torch.zeros_like(inputs.q), v=ones)
    outputs = Ideal().run(inputs.replace(descale=change_descales(inputs, torch.ones_like)))
    assert torch.equal(outputs.out.double(), torch.full_like(outputs.out, 4.0 / n).double())
    assert torch.equal(outputs.lse, torch.full_like(outputs.lse, fp32(math.log(n))))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_row_that_sees_one_key_returns_its_value(dtype):
    """Its weight is 1 except for the rounding of m·c in fp32, which the output's format absorbs."""
    inputs = draw_inputs(small(dtype=dtype, mask=Spec.of("sliding_window", window=1)))
    assert torch.equal(Ideal().run(inputs).out, inputs.v.repeat_interleave(2, dim=1))


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*MEASURED_DTYPES, "softmax"])
def test_default_dtype_of_torch_changes_no_bit(name, default):
    if name == "softmax":
        inputs = [draw_inputs(Problem(operation="softmax", heads=2, query=5, kv=33))]
    else:
        mods = (Spec.of("none"), SCORES["chain"])
        inputs = [
            draw_inputs(small(dtype=name, mask=MASKS["padding"], score=score)) for score in mods
        ]
    before = [Ideal().run(each) for each in inputs]
    torch.set_default_dtype(default)
    try:
        after = [Ideal().run(each) for each in inputs]
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(before, after, strict=True):
        assert (a.out.dtype, a.lse.dtype) == (b.out.dtype, b.lse.dtype)
        assert torch.equal(a.out, b.out)
        assert torch.equal(a.lse, b.lse)


def fl(values: torch.Tensor) -> torch.Tensor:
    """``fl(x)``: float64 values rounded once to fp32."""
    return values.float().double()


def fp8_scales(inputs, tiling):
    """The scales of q·k, v and P: 1 without descales."""
    if not inputs.descale:
        one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
        return one, one, 1.0
    q, k, v = (getattr(inputs.descale, name).double()[..., None, None] for name in "qkv")
    return fl(q * k), v, inputs.problem.formats.weights_scale / 2.0**tiling.lazy_rescale


def run_as_declared(inputs, tiling) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and LSE by algorithm 1, two keys at a time, with each declared rounding written out.

    Computed in float64, which holds q·k and P·V of these inputs exactly.
    """
    problem = inputs.problem
    q, k, v = inputs.q.double(), inputs.k.double(), inputs.v.double()
    qk, of_v, p_scale = fp8_scales(inputs, tiling)
    plain = problem.score == Spec.of("none")
    scale = fl(problem.scale * qk)
    log2_e = torch.full_like(qk, fp32(math.log2(math.e)))
    c = fl(fp32(problem.scale * math.log2(math.e)) * qk) if plain else log2_e
    m = torch.full_like(q, -math.inf)
    total, out = torch.zeros_like(q), torch.zeros_like(q)

    def weights(s, maximum):
        exponent = s * c - fl(maximum * c) if plain else fl(s - maximum) * c
        return fl(torch.exp2(fl(exponent)))

    def power(old, new):
        return fl(torch.exp2(fl(fl(old - new) * c)))

    def product(p, start):
        return fl(round_to(p * p_scale, problem.formats.weights) @ v[:, :, start : start + 2])

    for start in sorted(range(0, problem.kv, 2), reverse=tiling.reverse):
        s = q @ k[:, :, start : start + 2].mT
        if not plain:
            s = fl(fl(s * scale) / fp32(0.7))
        own = s.amax(-1, keepdim=True)
        raised = torch.maximum(m, own)
        if tiling.lazy_rescale:
            stays = (fl(fl(raised - m) * c) <= tiling.lazy_rescale) & m.isfinite()
            raised = torch.where(stays, m, raised)
        alpha = power(m, raised)
        if tiling.recurrence == "flash1":
            p, beta, before = weights(s, own), power(own, raised), fl(total * alpha)
            total = fl(before + fl(beta * fl(p.sum(-1, keepdim=True))))
            sums = fl(fl(out * before) + fl(beta * product(p, start)))
            out = fl(sums / total)
        else:
            p = weights(s, raised)
            total = fl(fl(total * alpha) + fl(p.sum(-1, keepdim=True)))
            out = fl(fl(out * alpha) + product(p, start))
        m = raised
    lse = fl((fl(m * scale) if plain else m) + fl(total.log()))
    if tiling.recurrence == "flash2":
        out = fl(out * fl(1 / total))
    return round_to(fl(out * fl(of_v / p_scale)), problem.formats.output), lse[..., 0]


@pytest.mark.parametrize("score", ["none", "temperature"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "e4m3", "e5m2"])
@pytest.mark.parametrize(
    "tiling",
    [
        Tiling(block_query=16, block_kv=2),
        Tiling(block_query=16, block_kv=2, reverse=True),
        Tiling(block_query=16, block_kv=2, lazy_rescale=2.0),
        Tiling(block_query=16, block_kv=2, recurrence="flash1"),
    ],
    ids=str,
)
def test_out_and_lse_have_the_bits_of_the_declared_roundings(tiling, dtype, score):
    spec = SCORES.get(score, Spec.of(score))
    problem = Problem(query=2048, kv=12, head_dim=1, scale=1.3, dtype=dtype, score=spec)
    inputs = draw_inputs(problem)
    if dtype == "fp32":  # shortened so that products and their sums are exact
        q, k = inputs.q.half().float(), inputs.k.half().float()
        v = torch.copysign(torch.exp2(inputs.v.round()), inputs.v)
        inputs = inputs.replace(q=q, k=k, v=v)
    outputs = Ideal(tiling).run(inputs)
    out, lse = run_as_declared(inputs, tiling)
    assert torch.equal(outputs.out.double(), out)
    assert torch.equal(outputs.lse.double(), lse)


def test_softmax_problem_runs_the_ideal_softmax():
    inputs = draw_inputs(Problem(operation="softmax", heads=2, query=5, kv=33))
    assert Ideal().concerns(inputs.problem)
    outputs, expected = Ideal().run(inputs), ideal_softmax(inputs)
    assert torch.equal(outputs.out, expected.out)
    assert torch.equal(outputs.lse, expected.lse)


class OneKeyTooWide(Ideal):
    def visible(self, mask, at):
        return super().visible(mask, dataclasses.replace(at, kv_idx=at.kv_idx - 1))


class NotRescaled(Ideal):
    def rescaled(self, running, alpha):
        del alpha
        return running


@pytest.mark.parametrize("dtype", MEASURED_DTYPES)
@pytest.mark.parametrize("fault", [OneKeyTooWide, NotRescaled])
def test_planted_fault_is_more_than_rounding(fault, dtype, exact):
    inputs = draw_inputs(small(dtype=dtype, mask=MASKS["causal"]))
    assert exact(inputs).excess(fault(Tiling(block_query=32, block_kv=16)).run(inputs)) > 1


def test_float64_score_mod_gives_the_bits_of_fp32():
    """The score mod doubles, which is exact in both formats."""

    def outputs(mod):
        library.SCORES["doubled"] = Entry(summary="", build=lambda *_: mod)
        try:
            return Ideal().run(draw_inputs(Problem(query=8, head_dim=8, score=Spec.of("doubled"))))
        finally:
            del library.SCORES["doubled"]

    wide = outputs(lambda score, b, h, q_idx, kv_idx: score.double() * 2.0)
    narrow = outputs(lambda score, b, h, q_idx, kv_idx: score * 2.0)
    assert wide.lse.dtype == torch.float32
    assert torch.equal(wide.lse, narrow.lse)
    assert torch.equal(wide.out, narrow.out)


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("mask", MASKS)
def test_number_of_tiles_per_mask_evaluation_changes_no_bit(mask, tiling, monkeypatch):
    problem = small(query=150, kv=150, mask=MASKS[mask], score=SCORES["alibi"], backward=True)
    inputs, widths = draw_inputs(problem), []

    class WidthRecorder(Ideal):
        def visible(self, mask, at):
            widths.append(at.kv_idx.shape[-1])
            return super().visible(mask, at)

    kernel = WidthRecorder(TILINGS[tiling])
    together = kernel.run(inputs)
    assert max(widths) > TILINGS[tiling].block_kv
    assert _are_equal(together, Ideal(TILINGS[tiling]).run(inputs))
    widths.clear()
    monkeypatch.setitem(ideal._SEEN_AT_A_TIME, "cpu", 1)
    assert _are_equal(together, kernel.run(inputs))
    assert set(widths) == {TILINGS[tiling].block_kv}


class WarpSum(Ideal):
    """Adds weights in the order of a warp in ideal.cu; all else is torch's operations."""

    def row_sum(self, p, problem, scale):
        del problem, scale
        lanes = torch.nn.functional.pad(p, (0, -p.shape[-1] % 32)).unflatten(-1, (-1, 32))
        total = torch.zeros_like(lanes[..., 0, :])
        for i in range(lanes.shape[-2]):
            total = total + lanes[..., i, :]
        while total.shape[-1] > 1:
            total = torch.add(*total.chunk(2, -1))
        return total[..., 0]


def weigh_in_torch(_grid, arguments):
    """``ideal_weigh`` of ideal.cu, the weights of a tile, in torch's operations."""
    scores, seen, weights, maximum, total, out_factor, part_factor, c, lazy, *more = arguments
    _lines, _keys, _rows, _heads, by_step, natural, to_format, *strides = more
    # The GPU kernel gets pointers, and eight bytes for each number.
    for tensor in (scores, weights, maximum, total, out_factor, part_factor, c):
        assert tensor.is_contiguous()
        assert tensor.dtype == torch.float32
    assert seen is None or seen.dtype == torch.bool
    assert isinstance(lazy, float)
    assert all(type(number) is int for number in more)
    if seen is not None:
        sees = torch.as_strided(seen, scores.shape, strides, seen.storage_offset())
        scores = torch.where(sees, scores, -math.inf)
    old, own = maximum.clone(), scores.amax(-1)
    now = torch.maximum(old, own)
    if lazy:
        now = torch.where(((now - old) * c <= lazy) & ~torch.isneginf(old), old, now)
    base = finite(own if by_step else now)[..., None]
    factor = c[..., None]
    exponent = multiply_add(scores, factor, -(base * factor))
    exponent = (scores - base) * factor if natural else exponent
    p = power_of_two(Ideal().exp2, exponent, scores)
    kind = {0: torch.float32, 1: torch.bfloat16, 2: torch.float16}[to_format]
    weights.copy_(p.to(kind))
    alpha, beta = (
        power_of_two(Ideal().exp2, (x - finite(now)) * c, x) for x in (old, own if by_step else now)
    )
    before = total * alpha
    maximum.copy_(now)
    part_factor.copy_(beta if by_step else torch.ones_like(beta))
    out_factor.copy_(before if by_step else alpha)
    total.copy_(before + part_factor * WarpSum().row_sum(p, None, 1.0))


def add_in_torch(_grid, arguments):
    """``ideal_add`` of ideal.cu, which adds a tile to out, in torch's operations."""
    out, part, out_factor, part_factor, total, _lines, _dim, by_step = arguments
    assert all(tensor.is_contiguous() for tensor in (out, part, out_factor, part_factor, total))
    out.copy_(out * out_factor[..., None] + part_factor[..., None] * part)
    if by_step:
        out.div_(torch.where(total == 0, 1.0, total)[..., None])


GPU_PROBLEMS = [
    {},
    {"kv": 150, "mask": MASKS["causal_bottom_right"]},
    {"mask": MASKS["padding"], "sink": True},
    {"mask": MASKS["document"], "score": SCORES["chain"]},
    {"mask": MASKS["window"], "score": SCORES["relative_bias"], "scale": -0.3},
    {"scale": 60.0, "value_dim": 24},
    {"head_dim": 1, "value_dim": 1},
]


def _are_equal(left, right):
    """Whether both outputs have the same numbers, NaN included."""
    pairs = zip(left.tensors().values(), right.tensors().values(), strict=True)
    return all(same_numbers(*pair) for pair in pairs)


@pytest.mark.parametrize("changes", GPU_PROBLEMS, ids=str)
@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_arguments_of_the_gpu_kernels_give_the_bits_of_torch(dtype, tiling, changes, monkeypatch):
    """Stand-ins in torch take the GPU kernels' arguments, so that a CPU tests them."""
    inputs = draw_inputs(small(dtype=dtype, **changes))
    expected = WarpSum(TILINGS[tiling]).run(inputs)
    steps = weigh_in_torch, add_in_torch
    monkeypatch.setattr(ideal.Pass, "fused", steps)
    assert _are_equal(Ideal(TILINGS[tiling]).run(inputs), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("changes", [*GPU_PROBLEMS, {"kv": 150, "query": 700}], ids=str)
@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_gpu_kernels_give_the_bits_of_torch(dtype, tiling, changes, monkeypatch):
    inputs = draw_inputs(small(dtype=dtype, **changes), "cuda")
    inputs.q[0, 1, 3, 0], inputs.k[1, 0, 7, 0] = math.nan, math.inf
    monkeypatch.setattr(ideal, "_FEWEST_PRODUCTS", 0)
    kernel = Ideal(TILINGS[tiling], quick=True)
    expected = WarpSum(TILINGS[tiling]).run(inputs)
    assert ideal.Pass(kernel, inputs).fused
    assert _are_equal(kernel.run(inputs), expected)


GPU_FAULTS = {
    "out doubled": ("__fmul_rn(a, out[i])", "__fmul_rn(2 * a, out[i])"),
    "mask ignored": ("!seen || seen[key * by_key]", "true"),
    "truncated weights": ("cvt.rn.bf16.f32", "cvt.rz.bf16.f32"),
    "the maximum left behind": ("maximum[line] = now", "maximum[line] = old"),
    "a sum without a lane's keys": ("sum = __fadd_rn(sum, p)", "if (lane) sum = __fadd_rn(sum, p)"),
}


@pytest.mark.parametrize("fault", GPU_FAULTS)
def test_text_replaced_by_a_gpu_fault_is_in_the_source(fault):
    assert GPU_FAULTS[fault][0] in ideal._GPU_SOURCE.read_text(encoding="utf-8")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("fault", GPU_FAULTS)
def test_planted_fault_of_a_gpu_kernel_changes_bits(fault, monkeypatch, tmp_path):
    before, after = GPU_FAULTS[fault]
    source = ideal._GPU_SOURCE.read_text(encoding="utf-8")
    inputs = draw_inputs(small(query=150, mask=MASKS["causal"]), "cuda")
    expected = WarpSum(TILINGS["wide"]).run(inputs)
    monkeypatch.setattr(ideal, "_FEWEST_PRODUCTS", 0)
    monkeypatch.setattr(ideal, "_GPU_SOURCE", tmp_path / "ideal.cu")
    ideal._GPU_SOURCE.write_text(source.replace(before, after), encoding="utf-8")
    ideal._gpu_kernels.cache_clear()
    try:
        kernel = Ideal(TILINGS["wide"], quick=True)
        assert ideal.Pass(kernel, inputs).fused, "it is compiled"
        assert not _are_equal(kernel.run(inputs), expected)
    finally:
        ideal._gpu_kernels.cache_clear()
