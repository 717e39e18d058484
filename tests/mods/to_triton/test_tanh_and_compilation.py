"""The printed tanh keeps the error bound of its operations; printed functions compile for a GPU."""

# ruff: noqa: N803  # Triton: constexprs in capitals

import os
import sys

import numpy as np
import torch
import triton
import triton.language as tl

from attncheck.mods import scores
from attncheck.mods import triton_functions as printed

UNIT = 2.0**-24  # unit roundoff of fp32


@triton.jit
def tanh_kernel(x, out, TANH: tl.constexpr, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(out + place, TANH(tl.load(x + place)))


def tanh_of(x):
    out = torch.empty_like(x)
    tanh_kernel[(1,)](x, out, printed._tanh, x.numel())
    return out


def tanh_bound(x):
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


def test_tanh_stays_within_bound():
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


def test_quotient_of_exponentials_exceeds_tanh_bound():
    x = torch.linspace(1e-4, 0.5, 2**10)
    e = torch.exp(-2 * x)
    wrong, exact = ((1 - e) / (1 + e)).double(), torch.tanh(x.double())
    assert ((wrong - exact).abs() > tanh_bound(x) * UNIT * exact * (1 + 2**-20)).any()


def test_tanh_of_zero_infinity_and_nan():
    ends = torch.tensor([0.0, float("inf"), -float("inf"), float("nan")])
    assert tanh_of(ends)[:3].tolist() == [0.0, 1.0, -1.0]
    assert tanh_of(ends)[3].isnan()


def test_softcap_stays_within_bound(grid):
    mod = scores.softcap(20.0)
    result, exact = (
        grid.scored(mod, grid.start()).double(),
        mod(grid.start().double(), *grid.indices()),
    )
    # The quotient's rounding moves tanh by at most as much relatively; one more for the product.
    bound = (tanh_bound(grid.start() / 20.0) + 2) * UNIT * exact.abs() * (1 + 2**-20)
    assert ((result - exact).abs() <= bound).all()


COMPILE = """
import functools
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attncheck.mods.library import build_mask, build_score
from attncheck.core.mod_spec import Dimensions, Spec
from attncheck.mods.to_triton import to_triton
from attncheck.mods.trace import trace_mask, trace_score
from compiled_kernel import kernel

TYPES = {torch.int8: "*i8", torch.int32: "*i32", torch.float32: "*fp32"}

def argument(value):
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "constexpr" if value == 1 else "i32"

def compiled(mask, score):
    sizes = Dimensions(batch=2, heads=4, query=64, kv=64)
    return instructions(build_mask(mask, sizes), build_score(score, sizes))

def instructions(mask_mod, score_mod):
    mods = [to_triton(trace_mask(mask_mod)), to_triton(trace_score(score_mod))]
    captured = [tuple(argument(v) for v in mod.captured) for mod in mods]
    signature = dict(x="*fp32", out="*fp32", MASK="constexpr", SCORE="constexpr",
                     mask_captured=captured[0], score_captured=captured[1])
    constants = {(2,): mods[0].function, (3,): mods[1].function}
    for place, mod in enumerate(mods):
        ones = [i for i, v in enumerate(mod.captured) if isinstance(v, int) and v == 1]
        constants |= {(4 + place, i): 1 for i in ones}
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]

"""

LIBRARY = """
of = Spec.of
document = of("document", lengths=[30, 34])
window = of("sliding_window", window=1)
everything = of("or", of("not", window), of("and", document, of("padding", lengths=[64, 3])))
bias = of("relative_bias", distance=3, seed=0)
# Most numbers have a reciprocal.
for cap, other, instruction in (5.0, "div.full", "rcp.approx.ftz"), (2.0**127, "", "div.full.f32"):
    ptx = compiled(of("full"), of("softcap", cap=cap))
    assert instruction in ptx and not (other and other in ptx), cap
compiled(everything, of("chain", of("alibi"), bias, of("temperature", temperature=2.0)))
"""

OPERATIONS_COMPILED = """
bias = torch.linspace(-1, 1, 64 * 4).reshape(4, 64)
narrow = torch.arange(64).to(torch.uint8)
flags = torch.arange(64) > 7
causal = lambda b, h, q, k: q >= k
score = lambda s, b, h, q, k: s
# Each group is one kernel: an instruction that is required comes from only one of its functions.
groups = {
    "tanh sqrt sin log floor abs relu": ("rcp.approx.ftz.f32", "sqrt.rn.f32"),
    "sigmoid cos log2 ceil neg": ("div.rn.f32",),
    "rsqrt sign trunc": ("sqrt.rn.f32",),
    "exp": ("ex2.approx",),
    "exp2": ("ex2.approx",),
}
for names, must in groups.items():
    functions = [getattr(torch, name) for name in names.split()]
    ptx = instructions(causal, lambda s, b, h, q, k: sum(f(s) + f(bias[h, k]) for f in functions))
    assert all(instruction in ptx for instruction in must), (names, must)
    assert not any(f"{op}.approx" in ptx for op in ("sqrt", "rsqrt", "lg2", "sin", "cos")), names
pairs = [torch.add, torch.sub, torch.mul, torch.div]
pairs += [torch.floor_divide, torch.remainder, torch.fmod]
tensors = [*pairs, torch.minimum, torch.maximum]
instructions(causal, lambda s, b, h, q, k: sum(f(s, bias[h, k]) + f(q, k + 1) for f in tensors))
instructions(causal, lambda s, b, h, q, k: sum(f(s, h) + f(s, 1) + f(s, 3.5) for f in pairs))
instructions(causal, lambda s, b, h, q, k: s + sum(f(k, 3) + f(k, 1) for f in pairs))
whole = [lambda q, k: q << k, lambda q, k: 1 << k, lambda q, k: q >> 2, lambda q, k: q >> 1,
         lambda q, k: 2 ** k, lambda q, k: q & k, lambda q, k: q | 1, lambda q, k: q ^ k,
         lambda q, k: ~q, lambda q, k: torch.sign(q - k), lambda q, k: q % 7 + q // 1,
         lambda q, k: torch.where(q > k, q, 1), lambda q, k: (q - k).clamp(-3, 5)]
all_whole = lambda q, k: sum(function(q, k) for function in whole)
instructions(lambda b, h, q, k: all_whole(q, k) > 3, lambda s, b, h, q, k: s + all_whole(q, k))
truths = [lambda q, k: (q > k) & True, lambda q, k: (q > k) | (k > 3), lambda q, k: ~(q > k),
          lambda q, k: (q > k) ^ (k == 1), lambda q, k: (q > 2) == (k > 2), lambda q, k: flags[k],
          lambda q, k: (q > 2) + (k > 2), lambda q, k: torch.logical_xor(q, narrow[k]),
          lambda q, k: torch.where(q > k, flags[k], flags[q]), lambda q, k: (q - k).bool(),
          lambda q, k: bias[q % 4, k - 64] >= 0, lambda q, k: torch.isnan(q / k)]
instructions(lambda b, h, q, k: functools.reduce(torch.ne, (f(q, k) for f in truths)), score)
instructions(causal, lambda s, b, h, q, k: s.masked_fill(flags[q], 1))
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


def test_printed_functions_compile_for_hopper(tmp_path, warm_python):
    (tmp_path / "compiled_kernel.py").write_text(KERNEL)
    environment = {
        **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
    }
    program = COMPILE + LIBRARY + OPERATIONS_COMPILED
    done = warm_python.run("-c", program, cwd=tmp_path, env=environment)
    assert done.stdout.strip() == "compiled", done.stderr
