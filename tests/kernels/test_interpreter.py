"""The repaired interpreter computes what a GPU computes: casts, arithmetic, products, sums."""

# ruff: noqa: N803  # Triton: constexprs in capitals

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attncheck.errors import InterpreterUnavailable
from attncheck.kernels import interpreter
from attncheck.kernels.interpreter import casts

try:
    interpreter.enable()
except InterpreterUnavailable:
    if not torch.cuda.is_available():
        raise
    pytest.skip("this process compiles for its GPU", allow_module_level=True)

import triton  # after enable(), which must come first
import triton.language as tl

TORCH = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
TRITON = {
    "fp64": tl.float64,
    "fp32": tl.float32,
    "fp16": tl.float16,
    "bf16": tl.bfloat16,
    "fp8e4nv": tl.float8e4nv,
    "fp8e5": tl.float8e5,
}
NARROW = ("fp16", "bf16", "fp8e4nv", "fp8e5")
LARGEST = {"fp8e4nv": 448.0, "fp8e5": 57344.0}


@triton.jit
def cast_kernel(source, target, DTYPE: tl.constexpr, SIZE: tl.constexpr, MODE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(target + at, tl.load(source + at).to(DTYPE, fp_downcast_rounding=MODE))


@triton.jit
def binary_kernel(left, right, target, OP: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    a = tl.load(left + at)
    b = tl.load(right + at)
    if OP == "add":
        c = a + b
    elif OP == "sub":
        c = a - b
    elif OP == "mul":
        c = a * b
    elif OP == "max":
        c = tl.maximum(a, b)
    elif OP == "max_nan":
        c = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "less":
        c = tl.where(a < b, a, b)
    elif OP == "fma":
        c = tl.fma(a, b, b)
    elif OP == "abs":
        c = tl.abs(a)
    else:
        c = -a
    tl.store(target + at, c.to(target.dtype.element_ty))


@triton.jit
def reduce_kernel(source, target, OP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    x = tl.load(source + rows[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    if OP == "sum":
        y = tl.sum(x, 1)
    elif OP == "max":
        y = tl.max(x, 1)
    elif OP == "min":
        y = tl.min(x, 1)
    elif OP == "argmax":
        y = tl.argmax(x, 1)
    elif OP == "argmin":
        y = tl.argmin(x, 1)
    elif OP == "all":
        y = tl.zeros((ROWS,), tl.float32) + tl.sum(x)
    else:
        y = tl.sum(tl.where(tl.arange(0, COLUMNS)[None, :] == COLUMNS - 1, tl.cumsum(x, 1), 0.0), 1)
    tl.store(target + rows, y.to(tl.float32))


@triton.jit
def dot_kernel(a, b, c, out, PRECISION: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    total = tl.load(c + at)
    total = tl.dot(
        tl.load(a + at),
        tl.load(b + at),
        total,
        input_precision=PRECISION,
        out_dtype=total.dtype,
    )
    tl.store(out + at, total)


@triton.jit
def faulty_kernel(source, target, SIZE: tl.constexpr):
    tl.static_assert(SIZE < 0, "planted")


@triton.jit
def count_kernel(source, target, steps):
    total = 0.0
    for i in range(tl.load(steps)):
        total += tl.load(source + i)
    tl.store(target, total)


@triton.jit
def atomic_kernel(target, values, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.atomic_add(target + at // 2, tl.load(values + at), mask=at < SIZE - 1)


def patterns(name: str) -> torch.Tensor:
    """Every bit pattern of an 8- or 16-bit format."""
    bits = torch.finfo(TORCH[name]).bits
    array = np.arange(2**bits).astype(f"uint{bits}")
    return torch.from_numpy(array).view(TORCH[name])


def around(target: str, source: str) -> torch.Tensor:
    """Every finite number of ``target``, each tie, the neighbours of both, overflow, inf, NaN."""
    numbers = patterns(target).double().numpy()
    numbers = np.unique(numbers[np.isfinite(numbers)])
    step = numbers[-1] - numbers[-2]
    beyond = numbers[-1] + step * np.arange(1, 17) / 8
    points = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2, beyond, -beyond])
    with np.errstate(over="ignore", under="ignore"):
        points = points.astype(np.float32 if source == "fp32" else np.float64)
        up, down = (np.nextafter(points, points.dtype.type(s * np.inf)) for s in (1, -1))
        special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-149, 3.4e38, 1e300])
        return torch.from_numpy(np.concatenate([points, up, down, special.astype(points.dtype)]))


def cast(source: torch.Tensor, target: str, mode: str | None = None) -> torch.Tensor:
    size = 1 << (source.numel() - 1).bit_length()
    padded = torch.zeros(size, dtype=source.dtype)
    padded[: source.numel()] = source
    result = torch.zeros(size, dtype=TORCH[target])
    cast_kernel[(1,)](padded, result, TRITON[target], size, mode)
    return result[: source.numel()]


def mismatches(left: torch.Tensor, right: torch.Tensor) -> int:
    """How many numbers differ; NaN equals NaN, zero has a sign."""
    a, b = left.double(), right.double()
    same = (a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()
    return int((~same).sum())


def in_range(source: torch.Tensor, target: str) -> torch.Tensor:
    """torch's fp8 casts do not saturate in every version: its inputs are clamped as a GPU would."""
    if target not in LARGEST:
        return source
    limit = LARGEST[target]
    return source.double().clamp(-limit, limit).to(source.dtype)


def double_to(numbers: torch.Tensor, name: str) -> torch.Tensor:
    """fp64 rounded once; torch's own casts to 8 and 16 bits go through fp32 and round twice."""
    near = numbers.float()
    odd = (near.double() != numbers) & numbers.isfinite()
    away = near.double().abs() > numbers.abs()
    bits = near.view(torch.int32) - away.int()
    return (bits | odd.int()).view(torch.float32).to(TORCH[name])


@pytest.mark.parametrize("target", ["fp64", "fp32"])
@pytest.mark.parametrize("source", NARROW)
def test_every_pattern_goes_up_as_in_torch(source, target):
    numbers = patterns(source)
    if (source, target) in {("fp8e4nv", "fp64"), ("fp8e5", "fp64")}:
        # Triton compiles no such cast for an H200; through fp32 it is exact.
        assert mismatches(cast(cast(numbers, "fp32"), "fp64"), numbers.double()) == 0
    assert mismatches(cast(numbers, target), numbers.to(TORCH[target])) == 0


@pytest.mark.parametrize("target", NARROW)
@pytest.mark.parametrize("source", NARROW)
def test_every_pattern_goes_across_as_in_torch(source, target):
    if source == target:
        return
    numbers = patterns(source)
    expected = in_range(numbers.float(), target).to(TORCH[target])
    assert mismatches(cast(numbers, target), expected) == 0


@pytest.mark.parametrize("target", NARROW)
def test_fp32_goes_down_as_in_torch(target):
    numbers = around(target, "fp32")
    assert mismatches(cast(numbers, target), in_range(numbers, target).to(TORCH[target])) == 0


@pytest.mark.parametrize("target", [*NARROW, "fp32"])
def test_fp64_rounds_once(target):
    numbers = around(target if target in NARROW else "bf16", "fp64")
    if target == "fp32":
        assert mismatches(cast(numbers, target), numbers.float()) == 0
    else:
        expected = double_to(in_range(numbers, target), target)
        assert mismatches(cast(numbers, target), expected) == 0


def test_casting_twice_would_be_noticed():
    numbers = around("bf16", "fp64")
    assert mismatches(cast(numbers, "bf16"), numbers.float().bfloat16()) > 0


@pytest.mark.parametrize("target", ["bf16", "fp16"])
def test_rounding_toward_zero(target):
    numbers = around(target, "fp32")
    got = cast(numbers, target, "rtz").double()
    exact = numbers.double()
    above = torch.nextafter(got.to(TORCH[target]), torch.full_like(got, np.inf).to(TORCH[target]))
    finite = exact.isfinite()
    assert (got.abs() <= exact.abs())[finite].all()
    assert (above.double() > exact)[finite & (exact > 0)].all()
    assert got[finite].isfinite().all()
    assert mismatches(got[~finite], exact[~finite]) == 0


@pytest.mark.parametrize("target", ["bf16", "fp8e4nv", "fp8e5"])
def test_the_stock_cast_fails_this_check(target):
    numbers = around(target, "fp32")
    with np.errstate(all="ignore"):
        bits = interpreter.stock("_convert_float")(
            numbers.numpy(), tl.float32, TRITON[target], _rtne() if target != "bf16" else None
        )
    got = torch.from_numpy(bits).view(TORCH[target])
    assert mismatches(got, in_range(numbers, target).to(TORCH[target])) > 0


def _rtne():
    from triton._C.libtriton import ir  # private, and only this check needs it

    return ir.ROUNDING_MODE.RTNE


def test_integers_become_bf16():
    numbers = torch.tensor([0, 1, -1, 255, 257, 2**24 + 1, -(2**31), 2**31 - 1], dtype=torch.int32)
    assert mismatches(cast(numbers, "bf16"), numbers.float().bfloat16()) == 0


def binary(op: str, a: torch.Tensor, b: torch.Tensor, out: torch.dtype | None = None):
    result = torch.zeros(a.shape, dtype=out or a.dtype)
    binary_kernel[(1,)](a, b, result, op, a.numel())
    return result


def test_one_and_one_is_two_in_bf16():
    one = torch.ones(4, dtype=torch.bfloat16)
    assert binary("add", one, one).tolist() == [2.0] * 4


@pytest.mark.parametrize("op", ["add", "sub", "mul", "less", "abs", "neg"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_arithmetic_as_in_torch(dtype, op):
    a = patterns(dtype)
    b = a.view(torch.int16)[torch.randperm(len(a), generator=torch.Generator().manual_seed(1))]
    b = b.view(TORCH[dtype])
    expected = {
        "add": a + b,
        "sub": a - b,
        "mul": a * b,
        "less": torch.where(a < b, a, b),
        "abs": a.abs(),
        # Triton up to 3.7 has no negation: 0 - x, whose zero is positive.
        "neg": -a if binary("neg", a[:1].expand(4), a[:1]).signbit()[0] else 0 - a,
    }[op]
    assert mismatches(binary(op, a, b), expected) == 0


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_fma_rounds_once(dtype):
    a = around("bf16", "fp32")[: 1 << 16].to(TORCH[dtype])
    b = a.flip(0).contiguous()
    finite = a.isfinite() & b.isfinite()
    exact = a.numpy(force=True) if dtype == "fp32" else a.float().numpy()
    other = b.float().numpy()
    with np.errstate(all="ignore"):
        wide = exact.astype(np.longdouble) * other + other
        expected = torch.from_numpy(wide.astype(np.float64))
    got = binary("fma", a, b)[finite]
    # Exact but for sums whose terms lie more than 48 bits apart; those are far from a tie here.
    near = double_to(expected[finite], dtype) if dtype != "fp32" else expected[finite].float()
    assert mismatches(got, near) == 0


def test_fma_rounding_twice_would_be_noticed():
    one, tiny = np.float32(1 + 2.0**-12), np.float32(2.0**-80)
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24 is a tie in fp32; only 2^-80 more decides it.
    a = torch.full((4,), float(one))
    from attncheck.kernels.interpreter.arithmetic import (
        _fused,  # private, and only this check needs it
    )

    fused = _fused(a.numpy(), a.numpy(), np.full(4, tiny, np.float32)).astype(np.float32)
    twice = (np.float64(one) * np.float64(one) + np.float64(tiny)).astype(np.float32)
    assert fused[0] == np.nextafter(twice, np.float32(2.0))


def test_maximum_drops_nan_unless_told():
    nan, one = torch.full((4,), np.nan).bfloat16(), torch.ones(4).bfloat16()
    assert binary("max", nan, one).tolist() == [1.0] * 4
    assert binary("max_nan", nan, one).isnan().all()


def test_atomic_addition_to_one_address_twice():
    target = torch.zeros(4, dtype=torch.bfloat16)
    atomic_kernel[(1,)](target, torch.arange(1, 9).bfloat16(), 8)
    assert target.tolist() == [3.0, 7.0, 11.0, 7.0]


def reduced(op: str, x: torch.Tensor) -> torch.Tensor:
    target = torch.zeros(x.shape[0])
    reduce_kernel[(1,)](x, target, op, *x.shape)
    return target


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("op", ["sum", "max", "min", "cumsum", "all", "argmax", "argmin"])
def test_reductions_of_integers_are_exact(op, dtype):
    x = torch.from_numpy(np.random.Generator(np.random.Philox(3)).integers(-2, 3, (8, 16)))
    x = x.to(TORCH[dtype])
    wide = x.float()
    expected = {
        "sum": wide.sum(1),
        "cumsum": wide.sum(1),
        "all": wide.sum().expand(8),
        "max": wide.amax(1),
        "min": wide.amin(1),
        "argmax": torch.from_numpy(np.argmax(wide.numpy(), 1)),
        "argmin": torch.from_numpy(np.argmin(wide.numpy(), 1)),
    }[op]
    assert torch.equal(reduced(op, x), expected.float())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_reductions_drop_nan_and_keep_a_row_of_it(dtype):
    x = torch.tensor(
        [[1.0, np.nan, 3.0, 2.0], [np.nan] * 4, [-np.inf] * 4, [np.nan, -np.inf, 0, 1]]
    )
    x = x.to(TORCH[dtype])
    assert mismatches(reduced("max", x), torch.tensor([3.0, np.nan, -np.inf, 1.0])) == 0
    assert mismatches(reduced("min", x), torch.tensor([1.0, np.nan, -np.inf, -np.inf])) == 0
    assert reduced("argmax", x).tolist() == [2.0, 3.0, 0.0, 3.0]
    assert reduced("sum", x).isnan().tolist() == [True, True, False, True]


@pytest.mark.parametrize(("dtype", "full"), [("bf16", 256.0), ("fp16", 2048.0)])
def test_sums_round_after_every_addition(dtype, full):
    x = torch.tensor([[full, 1.0, 1.0, 0.0]] * 2, dtype=TORCH[dtype])
    assert reduced("sum", x).tolist() == [full] * 2  # summed in fp32 it would be full + 2


def product(a: torch.Tensor, b: torch.Tensor, precision: str = "ieee", c=None) -> torch.Tensor:
    c = (
        torch.zeros(a.shape, dtype=torch.float64 if a.dtype == torch.float64 else torch.float32)
        if (c is None)
        else c
    )
    out = torch.zeros_like(c)
    dot_kernel[(1,)](a, b, c, out, precision, a.shape[0])
    return out


def uniform(*shape: int) -> torch.Tensor:
    draw = np.random.Generator(np.random.Philox(5)).integers(-(2**23), 2**23, shape)
    return torch.from_numpy(draw.astype(np.float32) / 2**23)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "fp8e4nv", "fp8e5"])
def test_dot_is_the_fp32_product_of_the_values(dtype):
    a, b = (x.to(TORCH[dtype]) for x in uniform(2, 32, 32))
    assert torch.equal(product(a, b), torch.from_numpy(a.float().numpy() @ b.float().numpy()))


def test_dot_does_not_round_products_of_fp16():
    a = torch.full((16, 16), 1000.0, dtype=torch.float16)  # 10^6 is beyond fp16
    assert torch.equal(product(a, a), torch.full((16, 16), 16e6))


def test_dot_adds_to_its_accumulator_in_its_dtype():
    a = torch.eye(16, dtype=torch.bfloat16)
    c = torch.full((16, 16), 1.0 + 2.0**-20)
    assert torch.equal(product(a, a, c=c), c + torch.eye(16))
    half = torch.full((16, 16), 2048.0, dtype=torch.float16)
    assert torch.equal(product(a.half(), a.half(), c=half), half)  # 2049 rounds to 2048


def test_dot_of_fp64_stays_fp64():
    a = uniform(16, 16).double() / 3
    assert torch.equal(product(a, torch.eye(16).double()), a)


def test_tf32_truncates_to_ten_bits():
    a, one = uniform(32, 32), torch.eye(32)
    truncated = (a.view(torch.int32) & ~0x1FFF).view(torch.float32)
    assert torch.equal(product(a, one, "tf32"), truncated)
    assert torch.equal(product(one, a, "tf32"), truncated)
    assert torch.equal(product(a, one, "ieee"), a)
    assert not torch.equal(truncated, a)


@pytest.mark.parametrize("precision", ["tf32x3", "bf16x3", "bf16x6"])
def test_split_products_are_better_than_their_format(precision):
    a, b = uniform(2, 32, 32)
    exact = a.double() @ b.double()
    plain = product(a, b, "tf32") if precision == "tf32x3" else product(a.bfloat16(), b.bfloat16())
    error, plain_error = ((x.double() - exact).norm() for x in (product(a, b, precision), plain))
    assert error < plain_error
    infinite = torch.full((16, 16), np.inf)
    assert torch.equal(product(infinite, torch.ones(16, 16), precision), infinite)


def test_the_stock_dot_fails_this_check():
    a = torch.ones(16, 16, dtype=torch.bfloat16)
    stock = interpreter.stock("InterpreterBuilder.create_dot")
    interp = sys.modules["triton.runtime.interpreter"]
    one = interp.TensorHandle(a.view(torch.uint16).numpy(), tl.bfloat16)
    zero = interp.TensorHandle(np.zeros((16, 16), np.float32), tl.float32)
    result = stock(interp.interpreter_builder, one, one, zero, SimpleNamespace(name="IEEE"), 0)
    assert not np.array_equal(result.data, np.full((16, 16), 16.0))
    assert torch.equal(product(a, a), torch.full((16, 16), 16.0))


def test_an_exception_in_a_kernel_leaves_the_next_launch_working():
    before = dict(vars(tl)), dict(vars(tl.tensor)), dict(vars(tl.core))
    with pytest.raises(Exception, match="planted"):
        faulty_kernel[(1,)](torch.zeros(4), torch.zeros(4), 4)
    assert (dict(vars(tl)), dict(vars(tl.tensor)), dict(vars(tl.core))) == before
    assert cast(torch.ones(4), "bf16").tolist() == [1.0] * 4
    assert (dict(vars(tl)), dict(vars(tl.tensor)), dict(vars(tl.core))) == before


def test_a_loop_bound_may_be_loaded():
    target = torch.zeros(1)
    count_kernel[(1,)](torch.arange(8.0), target, torch.tensor([5], dtype=torch.int32))
    assert target.item() == 10.0


def test_what_is_nan_is_quiet(recwarn):
    infinite = torch.full((4,), np.inf)
    assert binary("sub", infinite, infinite).isnan().all()
    assert not recwarn.list


def test_enabling_twice_changes_nothing():
    interp = sys.modules["triton.runtime.interpreter"]
    before = interp.InterpreterBuilder.create_dot, interp.GridExecutor.__call__
    interpreter.enable()
    assert (interp.InterpreterBuilder.create_dot, interp.GridExecutor.__call__) == before
    assert interpreter.enabled()
    assert len(interpreter.repairs()) == len(set(interpreter.repairs())) == 5


def fresh_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(
        command, env=clean | environment, capture_output=True, text=True, check=False
    )


def test_enabling_after_compiled_triton_raises():
    done = fresh_process(
        "import os, triton\n"
        "from attncheck.kernels import interpreter\n"
        "assert not interpreter.enabled() and interpreter.repairs() == ()\n"
        "try:\n    interpreter.enable()\n"
        "except interpreter.InterpreterUnavailable as error:\n    print(error)\n"
        "assert 'TRITON_INTERPRET' not in os.environ and not interpreter.enabled()\n"
    )
    assert "set TRITON_INTERPRET=1" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr


def test_a_missing_name_is_named_and_nothing_is_patched():
    done = fresh_process(
        "import triton, triton.runtime.interpreter as interp\n"
        "from attncheck.kernels import interpreter\n"
        "convert = interp._convert_float\n"
        "del interp.ReduceOps.min_max\n"
        "try:\n    interpreter.enable()\n"
        "except interpreter.InterpreterUnavailable as error:\n    print(error)\n"
        "assert interp._convert_float is convert and not interpreter.enabled()\n",
        TRITON_INTERPRET="1",
    )
    assert done.returncode == 0, done.stderr
    for part in ("ReduceOps.min_max", "reductions", triton.__version__):
        assert part in done.stdout


def test_formats_are_known_under_tritons_names():
    assert casts.FORMATS.keys() == TORCH.keys()
    assert all(getattr(TRITON[name], "name", None) == name for name in TORCH)


def test_the_stock_interpreter_is_never_taken_for_a_gpu():
    from attncheck.kernels.compilation import prepare_triton

    with pytest.raises(InterpreterUnavailable, match="without TRITON_INTERPRET"):
        prepare_triton("cuda")
    code = (
        "from attncheck.kernels.compilation import prepare_triton\n"
        "try: prepare_triton('cuda')\n"
        "except Exception as error: print(type(error).__name__)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip() == "InterpreterUnavailable", run.stderr
