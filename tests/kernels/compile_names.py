"""Compiles a score mod and its slope in one kernel for Hopper; prints how often it divides."""

import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attncheck.mods.scores import temperature
from attncheck.mods.to_triton import to_triton
from attncheck.mods.trace import trace_derivative, trace_score

mod = temperature(3.0)
score, slope = to_triton(trace_score(mod)), to_triton(trace_derivative(mod))
assert len(score.captured) == len(slope.captured) == 1


@triton.jit
def both(x_ptr, captured, slopes, SCORE: tl.constexpr, SLOPE: tl.constexpr):  # noqa: N803
    x = tl.load(x_ptr)
    i = tl.program_id(0)
    y = SCORE(x, i, i, i, i, (captured,)) + SLOPE(x, i, i, i, i, (slopes,))
    tl.store(x_ptr, y)


signature = {"x_ptr": "*fp32", "captured": "fp32", "slopes": "fp32"}
constants = {"SCORE": score.function, "SLOPE": slope.function}
source = ASTSource(both, signature | dict.fromkeys(constants, "constexpr"), constants)
text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"]
sys.stdout.write(f"{text.count('arith.divf')}\n")
