"""How much faster the repaired interpreter runs a small FlashAttention-2 forward than stock.

    python benchmarks/interpreter.py [--repeats N] [--dtype fp32|fp16|bf16]

The patches are process-wide, so each measurement is a process of its own; the two kinds take turns.
Stock results are wrong in bf16; only their time is looked at.
"""

# ruff: noqa: N803  # Triton: constexprs in capitals

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

HEADS, LENGTH, DIM, BLOCK, LAUNCHES = 2, 256, 64, 64, 5
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

if __name__ == "__main__" and "--one" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
    if "--repaired" in sys.argv:
        from attncheck.kernels import interpreter

        interpreter.enable()
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def forward(
        query,
        key,
        value,
        out,
        scale,
        LENGTH: tl.constexpr,
        DIM: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Causal FlashAttention-2 forward of (heads, query, dim) tensors, a block a program."""
        base = tl.program_id(1) * LENGTH * DIM
        rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        dims = tl.arange(0, DIM)
        inside = rows[:, None] < LENGTH
        q = tl.load(query + base + rows[:, None] * DIM + dims[None, :], mask=inside, other=0.0)
        peak = tl.full((BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        acc = tl.zeros((BLOCK, DIM), tl.float32)
        for start in range(0, LENGTH, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            valid = columns[:, None] < LENGTH
            at = base + columns[:, None] * DIM + dims[None, :]
            k = tl.load(key + at, mask=valid, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            scores = tl.where(rows[:, None] >= columns[None, :], scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            weights = tl.exp2((scores - new_peak[:, None]) * 1.4426950408889634)
            decay = tl.exp2((peak - new_peak) * 1.4426950408889634)
            total = total * decay + tl.sum(weights, 1)
            v = tl.load(value + at, mask=valid, other=0.0)
            acc = acc * decay[:, None]
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
            peak = new_peak
        at = base + rows[:, None] * DIM + dims[None, :]
        tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


def _measure(dtype_name: str) -> float:
    """Seconds of one launch: the median of LAUNCHES, after one that is not counted."""
    torch.set_num_threads(1)
    dtype = getattr(torch, DTYPES[dtype_name])
    tensors = [torch.rand(HEADS, LENGTH, DIM).to(dtype) for _ in range(4)]
    seconds = []
    for _ in range(LAUNCHES + 1):
        start = time.perf_counter()
        forward[(LENGTH // BLOCK, HEADS)](*tensors, DIM**-0.5, LENGTH=LENGTH, DIM=DIM, BLOCK=BLOCK)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _in_a_process(dtype_name: str, *flags: str) -> float:
    command = [sys.executable, "-W", "ignore", __file__, "--one", "--dtype", dtype_name, *flags]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout)


def _compare(dtype_name: str, repeats: int) -> None:
    stock, repaired = [], []
    for _ in range(repeats):
        stock.append(_in_a_process(dtype_name))
        repaired.append(_in_a_process(dtype_name, "--repaired"))
    slow, fast = statistics.median(stock), statistics.median(repaired)
    shape = f"{HEADS} heads x {LENGTH} x {DIM}, blocks of {BLOCK}, causal"
    print(f"{dtype_name}, {shape}; median of {repeats} processes of {LAUNCHES} launches each")
    print(f"stock {slow * 1e3:.1f} ms, repaired {fast * 1e3:.1f} ms a launch: {slow / fast:.2f}x")


def main() -> None:
    """Read the command line and print one measurement, or the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--repaired", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(_measure(arguments.dtype))
    else:
        _compare(arguments.dtype, arguments.repeats)


if __name__ == "__main__":
    main()
