"""The printed Triton function computes what the callable does, also beyond the last index."""

# ruff: noqa: N803  # mods have FlexAttention's whole signature; constexprs are in capitals

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.errors import InterpreterUnavailable
from attncheck.kernels import interpreter
from attncheck.mods import masks, scores
from attncheck.mods.library import MASKS, SCORES, build_mask, build_score
from attncheck.mods.spec import Dimensions, Spec
from attncheck.mods.trace import trace_mask, trace_score

try:
    interpreter.enable()
except InterpreterUnavailable:
    if not torch.cuda.is_available():
        raise
    pytest.skip("this process compiles for its GPU", allow_module_level=True)

import triton  # after enable(), which must come first
import triton.language as tl

from attncheck.mods import to_triton as printed
from attncheck.mods.to_triton import to_triton

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

DIMENSIONS = Dimensions(batch=2, heads=3, query=13, kv=21)
ROWS, KEYS = 16, 32  # blocks with ragged tails in both directions
UNIT = 2.0**-24  # unit roundoff of fp32

PLAIN_MASKS = [
    Spec.of("full"),
    Spec.of("causal"),
    Spec.of("causal_bottom_right"),
    Spec.of("sliding_window", window=0),
    Spec.of("sliding_window", window=1),
    Spec.of("sliding_window", window=6),
    Spec.of("prefix_lm", prefix=3),
    Spec.of("document", lengths=[3, 0, 10, 8]),
    Spec.of("padding", lengths=[3, 21]),
]
PLAIN_SCORES = [
    Spec.of("none"),
    Spec.of("alibi"),
    Spec.of("relative_bias", distance=4, seed=1),
    Spec.of("relative_bias", distance=0, seed=1),
    Spec.of("temperature", temperature=2.5),
    Spec.of("temperature", temperature=1),
]


@triton.jit
def mask_kernel(out, ROWS: tl.constexpr, KEYS: tl.constexpr, MASK: tl.constexpr, captured):
    b, h = tl.program_id(0), tl.program_id(1)
    q_idx = tl.arange(0, ROWS)[:, None]
    kv_idx = tl.arange(0, KEYS)[None, :]
    seen = MASK(b, h, q_idx, kv_idx, captured)
    tl.static_assert(seen.dtype == tl.int1)
    place = ((b * tl.num_programs(1) + h) * ROWS + q_idx) * KEYS + kv_idx
    tl.store(out + place, tl.where(seen, 1, 0) + tl.zeros((ROWS, KEYS), tl.int32))


@triton.jit
def score_kernel(x, out, ROWS: tl.constexpr, KEYS: tl.constexpr, SCORE: tl.constexpr, captured):
    b, h = tl.program_id(0), tl.program_id(1)
    q_idx = tl.arange(0, ROWS)[:, None]
    kv_idx = tl.arange(0, KEYS)[None, :]
    place = ((b * tl.num_programs(1) + h) * ROWS + q_idx) * KEYS + kv_idx
    score = SCORE(tl.load(x + place), b, h, q_idx, kv_idx, captured)
    tl.static_assert(score.dtype == tl.float32)
    tl.store(out + place, score)


def indices() -> list[Tensor]:
    return [
        torch.arange(DIMENSIONS.batch)[:, None, None, None],
        torch.arange(DIMENSIONS.heads)[:, None, None],
        torch.arange(ROWS)[:, None],
        torch.arange(KEYS),
    ]


SHAPE = (DIMENSIONS.batch, DIMENSIONS.heads, ROWS, KEYS)
INSIDE = (slice(None), slice(None), slice(DIMENSIONS.query), slice(DIMENSIONS.kv))


def seen_by_triton(mask_mod: Callable[..., Tensor]) -> Tensor:
    mod = to_triton(trace_mask(mask_mod))
    out = torch.full(SHAPE, -1, dtype=torch.int32)
    mask_kernel[SHAPE[:2]](out, ROWS, KEYS, mod.function, mod.captured)
    return out


def scored_by_triton(score_mod: Callable[..., Tensor], start: Tensor) -> Tensor:
    mod = to_triton(trace_score(score_mod))
    out = torch.full(SHAPE, float("nan"))
    score_kernel[SHAPE[:2]](start, out, ROWS, KEYS, mod.function, mod.captured)
    return out


def start() -> Tensor:
    return torch.linspace(-30, 30, int(np.prod(SHAPE))).reshape(SHAPE)


def inside(mod: Callable[..., Tensor], *first: Tensor) -> Tensor:
    """The callable's values at the indices that exist."""
    b, h, q_idx, kv_idx = indices()
    cut = [value[INSIDE] for value in first]
    value = mod(*cut, b, h, q_idx[: DIMENSIONS.query], kv_idx[: DIMENSIONS.kv])
    return value.expand(DIMENSIONS.batch, DIMENSIONS.heads, DIMENSIONS.query, DIMENSIONS.kv)


def assert_same_mask(mask_mod: Callable[..., Tensor]) -> None:
    assert torch.equal(seen_by_triton(mask_mod)[INSIDE], inside(mask_mod).to(torch.int32))


@pytest.mark.parametrize("spec", PLAIN_MASKS, ids=str)
def test_library_mask(spec: Spec) -> None:
    assert_same_mask(build_mask(spec, DIMENSIONS))


@pytest.mark.parametrize("spec", PLAIN_SCORES, ids=str)
def test_library_score_has_the_bits_of_fp32_torch(spec: Spec) -> None:
    mod = build_score(spec, DIMENSIONS)
    assert torch.equal(scored_by_triton(mod, start())[INSIDE], inside(mod, start()))


def test_every_library_mod_is_here() -> None:
    assert {spec.name for spec in PLAIN_MASKS} | {"and", "or", "not"} == set(MASKS)
    assert {spec.name for spec in PLAIN_SCORES} | {"chain", "softcap"} == set(SCORES)


any_mask = st.recursive(
    st.sampled_from(PLAIN_MASKS),
    lambda parts: st.one_of(
        st.lists(parts, min_size=1, max_size=3).map(lambda of: Spec.of("and", *of)),
        st.lists(parts, min_size=1, max_size=3).map(lambda of: Spec.of("or", *of)),
        parts.map(lambda of: Spec.of("not", of)),
    ),
    max_leaves=5,
)
any_chain = st.lists(st.sampled_from(PLAIN_SCORES), min_size=1, max_size=4)


@given(spec=any_mask)
@settings(max_examples=20, deadline=None)
def test_composed_masks(spec: Spec) -> None:
    assert_same_mask(build_mask(spec, DIMENSIONS))


@given(parts=any_chain)
@settings(max_examples=10, deadline=None)
def test_chained_scores(parts: list[Spec]) -> None:
    mod = build_score(Spec.of("chain", *parts), DIMENSIONS)
    assert torch.equal(scored_by_triton(mod, start())[INSIDE], inside(mod, start()))


def test_a_wrong_mask_differs() -> None:
    causal = inside(masks.causal).to(torch.int32)
    assert not torch.equal(seen_by_triton(lambda b, h, q, k: q > k)[INSIDE], causal)


def test_indices_beyond_a_captured_tensor_read_its_last_element() -> None:
    around = torch.full((40,), 99)  # neighbours in memory, which must not be read
    around[10:23] = torch.arange(13)
    seen = seen_by_triton(masks.document(around[10:23]))
    clamped = torch.arange(KEYS).clamp(max=12)
    expected = clamped[:ROWS, None] == clamped
    assert torch.equal(seen, expected.to(torch.int32).expand(SHAPE))


BIAS = torch.arange(12, dtype=torch.float32).reshape(3, 4) / 8
CUBE = torch.arange(2 * 3 * 32).reshape(2, 3, 32)
FLAGS = torch.tensor([True, False, True])

MODS: dict[str, Callable[..., Tensor]] = {
    "floor division": lambda s, b, h, q, k: s + (q - k) // 3,
    "floor division, negative": lambda s, b, h, q, k: s + (q - k) // -3,
    "remainder": lambda s, b, h, q, k: s + (q - k) % 5,
    "remainder, negative": lambda s, b, h, q, k: s + (q - k) % -5,
    "division by 1": lambda s, b, h, q, k: s + (q - k) // 1 + (q - k) % 1,
    "computed divisor": lambda s, b, h, q, k: s + (q - k) // (b - h * 3 - 2),
    "true division": lambda s, b, h, q, k: s + q / (k + 1) + (q - 3) / 4,
    "where with a number": lambda s, b, h, q, k: torch.where(q > k, s, -float("inf")),
    "negative index": lambda s, b, h, q, k: s + BIAS[h, -1 - h],
    "3-d table": lambda s, b, h, q, k: s + CUBE[b, h, k],
    "flags": lambda s, b, h, q, k: torch.where(FLAGS[h], s, -s),
    "logical": lambda s, b, h, q, k: torch.where(torch.logical_xor(q, h) & (k > 1), s, s.abs()),
    "rsub": lambda s, b, h, q, k: s + (1 - q) - (2.5 - s),
    "minimum": lambda s, b, h, q, k: torch.minimum(s, q) + torch.maximum(s, k * 0.5),
    "one-sided clamps": lambda s, b, h, q, k: s.clamp(min=-1) + s.clamp(max=2) + s.clamp_min(0),
    "bool as number": lambda s, b, h, q, k: s + (q > k) - (h == 1) * 2,
    "xor of whole numbers": lambda s, b, h, q, k: s + ((q ^ k) & 3),
    "not of a whole number": lambda s, b, h, q, k: s + ~q,
    "nan": lambda s, b, h, q, k: torch.where(q == k, float("nan"), s).clamp(-1, 1),
    "comparisons": lambda s, b, h, q, k: (
        s + (q >= k) + 2 * (q <= k) + 4 * (q < k) + 8 * (q == k) + 16 * (q != k)
    ),
    "a number of 40 bits": lambda s, b, h, q, k: s + (q < 2**40),
}


@pytest.mark.parametrize("name", MODS)
def test_neighbouring_operations_have_the_bits_of_fp32_torch(name: str) -> None:
    mod = MODS[name]
    result, expected = scored_by_triton(mod, start())[INSIDE], inside(mod, start())
    assert ((result == expected) | (result.isnan() & expected.isnan())).all()


def test_truncating_division_would_be_noticed() -> None:
    mod = MODS["floor division"]
    cut = inside(lambda s, b, h, q, k: s + torch.div(q - k, 3, rounding_mode="trunc"), start())
    assert not torch.equal(scored_by_triton(mod, start())[INSIDE], cut)


def test_numbers_and_tensors_are_passed_as_the_kernel_reads_them() -> None:
    wide = torch.tensor([0, 2**40])
    assert to_triton(trace_mask(masks.document(wide))).captured[0].dtype is torch.int64
    narrow = to_triton(trace_mask(masks.document(torch.tensor([0, 2**31 - 1, -(2**31)]))))
    assert narrow.captured[0].dtype is torch.int32
    assert narrow.captured[1:] == (3,)
    flags = to_triton(trace_score(MODS["flags"]))
    assert flags.captured[0].dtype is torch.int8
    table = to_triton(trace_score(lambda s, b, h, q, k: s + BIAS.T[k, h]))
    assert table.captured[0].tolist() == BIAS.T.flatten().tolist()
    assert table.captured[1:] == (4, 3)
    assert to_triton(trace_score(lambda s, *_: s * 0.1)).captured == (float(np.float32(0.1)),)
    assert to_triton(trace_mask(masks.full)).captured == ()


def test_one_function_serves_every_number() -> None:
    short, long = (to_triton(trace_mask(masks.sliding_window(w))) for w in (3, 64))
    assert short.function is long.function
    assert (short.captured, long.captured) == ((3,), (64,))
    assert to_triton(trace_mask(masks.causal)).function is not short.function


def test_the_source_can_be_read_where_triton_looks() -> None:
    mod = to_triton(trace_mask(masks.sliding_window(3)))
    assert inspect.getsource(mod.function.fn) == mod.source
    assert mod.source == (
        "def mask_mod(b, h, q_idx, kv_idx, captured):\n"
        "    v2 = q_idx - kv_idx\n"
        "    v4 = v2 < captured[0]\n"
        "    v5 = q_idx >= kv_idx\n"
        "    v6 = v4 & v5\n"
        "    return v6\n"
    )


@triton.jit
def tanh_kernel(x, out, TANH: tl.constexpr, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(out + place, TANH(tl.load(x + place)))


def tanh_of(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    tanh_kernel[(1,)](x, out, printed._tanh, x.numel())
    return out


def tanh_bound(x: Tensor) -> Tensor:
    """Relative error of the printed tanh, in units of 2^-24, from its operations.

    Below 5/8 it is s + s·t, t = z·p(z) = tanh(s)/s − 1: z, eight operations of Horner's rule on
    terms whose absolute sum is below 4/3 of p, five rounded coefficients, z·p and s·(z·p) err on
    t; the sum and the fit (0.074) on the whole. Above, with q = 2e/(1+e) = 1 − tanh: the argument
    of exp2 has two roundings and |ln e| = 2|x|, exp2 is taken as good to 2 units, the sum and the
    quotient have one each, the last difference one.
    """
    a = x.double().abs()
    y = torch.tanh(a)
    t = (y / a - 1).abs()
    small = 1 + 0.074 + (1 + 4 / 3 * (8 + 5) + 2) * t / (1 - t)
    e = torch.exp(-2 * a)
    large = 1 + (1 - y) / y * ((4 * a + 2) / (1 + e) + 2)
    return torch.where(a < 0.625, small, large)


def test_tanh_keeps_the_bound_of_its_operations() -> None:
    parts = [
        np.linspace(1e-3, 1.5, 2**14),
        np.logspace(-37, 38, 2**13),
        np.linspace(0.5, 20, 2**13),
    ]
    x = torch.from_numpy(np.concatenate(parts).astype(np.float32))
    for sign in (1, -1):
        result, exact = tanh_of(sign * x).double(), torch.tanh(sign * x.double())
        # (1 + 2^-20) covers second-order terms and the float64 reference.
        assert ((result - exact).abs() <= tanh_bound(x) * UNIT * exact.abs() * (1 + 2**-20)).all()


def test_the_bound_rejects_the_quotient_of_exponentials() -> None:
    x = torch.linspace(1e-4, 0.5, 2**10)
    e = torch.exp(-2 * x)
    wrong, exact = ((1 - e) / (1 + e)).double(), torch.tanh(x.double())
    assert ((wrong - exact).abs() > tanh_bound(x) * UNIT * exact * (1 + 2**-20)).any()


def test_tanh_at_the_ends() -> None:
    ends = torch.tensor([0.0, float("inf"), -float("inf"), float("nan")])
    assert tanh_of(ends)[:3].tolist() == [0.0, 1.0, -1.0]
    assert tanh_of(ends)[3].isnan()


def test_softcap_keeps_the_bound_of_its_operations() -> None:
    mod = scores.softcap(20.0)
    result, exact = scored_by_triton(mod, start()).double(), mod(start().double(), *indices())
    # The quotient's rounding moves tanh by at most as much relatively; one more for the product.
    bound = (tanh_bound(start() / 20.0) + 2) * UNIT * exact.abs() * (1 + 2**-20)
    assert ((result - exact).abs() <= bound).all()


COMPILE = """
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attncheck.mods.library import build_mask, build_score
from attncheck.mods.spec import Dimensions, Spec
from attncheck.mods.to_triton import to_triton
from attncheck.mods.trace import trace_mask, trace_score
from compiled_kernel import kernel

TYPES = {torch.int32: "*i32", torch.float32: "*fp32"}

def argument(value):
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "constexpr" if value == 1 else "i32"

def compiled(mask, score):
    sizes = Dimensions(batch=2, heads=4, query=64, kv=64)
    mods = [to_triton(trace_mask(build_mask(mask, sizes)))]
    mods.append(to_triton(trace_score(build_score(score, sizes))))
    captured = [tuple(argument(v) for v in mod.captured) for mod in mods]
    signature = dict(x="*fp32", out="*fp32", MASK="constexpr", SCORE="constexpr",
                     mask_captured=captured[0], score_captured=captured[1])
    constants = {(2,): mods[0].function, (3,): mods[1].function}
    for place, mod in enumerate(mods):
        ones = [i for i, v in enumerate(mod.captured) if isinstance(v, int) and v == 1]
        constants |= {(4 + place, i): 1 for i in ones}
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]

of = Spec.of
document = of("document", lengths=[30, 34])
window = of("sliding_window", window=1)
everything = of("or", of("not", window), of("and", document, of("padding", lengths=[64, 3])))
bias = of("relative_bias", distance=3, seed=0)
assert "div.full.f32" in compiled(of("full"), of("softcap", cap=5.0))
compiled(everything, of("chain", of("alibi"), bias, of("temperature", temperature=2.0)))
print("compiled")
"""

KERNEL = """
import triton
import triton.language as tl

@triton.jit
def kernel(x, out, MASK: tl.constexpr, SCORE: tl.constexpr, mask_captured, score_captured):
    q_idx = tl.arange(0, 64)[:, None]
    kv_idx = tl.arange(0, 64)[None, :]
    b, h = tl.program_id(0), tl.program_id(1)
    score = SCORE(tl.load(x + q_idx * 64 + kv_idx), b, h, q_idx, kv_idx, score_captured)
    seen = MASK(b, h, q_idx, kv_idx, mask_captured)
    tl.static_assert(seen.dtype == tl.int1)
    tl.static_assert(score.dtype == tl.float32)
    tl.store(out + q_idx * 64 + kv_idx, tl.where(seen, score, -float("inf")))
"""


def test_functions_compile_for_hopper(tmp_path: Path) -> None:
    (tmp_path / "compiled_kernel.py").write_text(KERNEL)
    environment: dict[str, Any] = {
        **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "compiled", done.stderr
