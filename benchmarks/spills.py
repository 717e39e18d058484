"""Registers, spilled bytes and shared memory of our kernels, compiled for Hopper without a GPU.

    python benchmarks/spills.py [--kernel flash2 ...] [--dtype bf16 ...] [--head-dim 128 ...]

One line for each kernel, dtype, head dim and kind of call, at the tiles of
``subjects/triton_flash.py``, which were chosen by these figures. flash2-dq and flash2-dkdv are
FlashAttention-2's backward, varlen-dq and varlen-dkdv that of packed documents. Spilled bytes are
the stack of a thread, from this triton's ptxas.

Under a mask FlashAttention-2 visits a list of tiles. Its further kinds are: no such list (dense),
pages (paged), and the second launch where values are not finite (careful); in fp8 also V stored
transposed (vt) and the tensor core's own accumulator (fastacc). dQ also has a careful launch, and
can sum up the gradients of numbers that a score mod reads (dalibi, dbias); the launch of dK and dV
can sum up dQ (atomic). The last columns count tensor-core instructions (HGMMA for 16-bit operands
and tf32, QGMMA for fp8) and fp32 additions, which take fp8 products out of the tensor core's
accumulator.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before triton: this process compiles

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attncheck.core.formats import DTYPES
from attncheck.core.mod_spec import FULL, Spec
from attncheck.inputs.problem import Problem
from attncheck.kernels import flash1_forward, flash2_forward, varlen_backward
from attncheck.kernels.flash2_backward import by_keys_kernel, by_rows_kernel
from attncheck.kernels.launch import block_dim
from attncheck.mods.to_triton import TritonMod, to_triton
from attncheck.subjects.kernel_mods import (
    captured_reads,
    mask_expression,
    score_expression,
    slope_expression,
)
from attncheck.subjects.triton_caches import Varlen
from attncheck.subjects.triton_flash import Flash1, Flash2, Flash2FastAccumulation

STORED = {"fp32": "*fp32", "tf32": "*fp32", "fp16": "*fp16", "bf16": "*bf16"}
STORED |= {"e4m3": "*fp8e4nv", "e5m2": "*fp8e5"}
CAPTURED = {torch.int32: "*i32", torch.float32: "*fp32"}
KERNELS = {
    "flash2": flash2_forward._forward,
    "flash1": flash1_forward._step,
    "flash2-dq": by_rows_kernel,
    "flash2-dkdv": by_keys_kernel,
    "varlen-dq": varlen_backward.by_rows_kernel,
    "varlen-dkdv": varlen_backward.by_keys_kernel,
}
BACKWARD = {
    "flash2-dq": (Flash2, 0),
    "flash2-dkdv": (Flash2, 1),
    "varlen-dq": (Varlen, 0),
    "varlen-dkdv": (Varlen, 1),
}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A way to call a kernel."""

    mods: dict[str, Any] = field(default_factory=dict)
    dense: bool = False
    careful: bool = False
    page: int = 0
    sink: bool = False
    transposed: bool = False
    fast: bool = False
    atomic: bool = False


CAUSAL = {"mask": Spec.of("causal")}
ALIBI, BIAS = Spec.of("alibi"), Spec.of("bias", seed=0, per_batch=0, per_head=0)
CAPTURED_TOO = {"backward": True, "dcaptured": True}
KINDS = {
    "full": Kind(),
    "causal": Kind(mods=CAUSAL),
    "dense": Kind(mods=CAUSAL, dense=True),
    "careful": Kind(mods=CAUSAL, careful=True),
    "paged": Kind(mods=CAUSAL, page=16, sink=True),
    "document": Kind(mods={"mask": Spec.of("document", lengths=[2048, 2048])}),
    "softcap": Kind(mods={"score": Spec.of("softcap", cap=20.0)}),
    "alibi": Kind(mods={"score": ALIBI}),
    "dalibi": Kind(mods={"score": ALIBI} | CAPTURED_TOO),
    "bias": Kind(mods={"score": BIAS}),
    "dbias": Kind(mods={"score": BIAS} | CAPTURED_TOO),
    "vt": Kind(transposed=True),
    "fastacc": Kind(fast=True),
    "atomic": Kind(mods=CAUSAL, atomic=True),
}


def types_of(mod: TritonMod) -> tuple[str, ...]:
    """Return Triton's names for the types of the values that a mod captures."""
    return tuple(
        CAPTURED[v.dtype]
        if isinstance(v, torch.Tensor)
        else "fp32"
        if isinstance(v, float)
        else "i32"
        for v in mod.captured
    )


def launch_of(name: str, problem: Problem, kind: Kind) -> Any:
    """Return how the subject launches the kernel on a GPU."""
    if name in BACKWARD:
        subject, index = BACKWARD[name]
        return subject().gradient_launches(problem, "cuda")[index]
    if name == "flash1":
        return Flash1().launch(problem, "cuda")
    subject = Flash2FastAccumulation if kind.fast else Flash2
    return subject(dense=kind.dense).launch(problem, "cuda")


def listed(problem: Problem, kind: Kind) -> bool:
    """Return whether the subject lists the tiles to visit."""
    return not kind.dense and problem.mask != FULL


def source_of(name: str, problem: Problem, kind: Kind) -> tuple[ASTSource, dict[str, int]]:
    """Return the kernel as launched for contiguous tensors, and its launch options."""
    kernel = KERNELS[name]
    chosen = launch_of(name, problem, kind)
    identity = "score" not in kind.mods
    packed = name.startswith("varlen")  # a causal mask is its flag, documents are no mask
    mask = to_triton(mask_expression(problem.replace(mask=FULL) if packed else problem, "cpu"))
    score = mask if identity else to_triton(score_expression(problem, "cpu"))
    slope = mask if identity else to_triton(slope_expression(problem, "cpu"))
    reads = captured_reads(problem, "cpu") if problem.dcaptured else None
    scaled = problem.formats.scaled
    dim = block_dim(problem.head_dim, problem.formats.storage.torch_dtype)
    stored = torch.empty(1, 1, 1, dim, dtype=problem.formats.storage.torch_dtype)
    constants: dict[str, Any] = {
        "MASK": mask.function, "SCORE": score.function, "SLOPE": slope.function,
        "TERMS": reads and reads.function(), "IDENTITY": identity, "ATOMIC": kind.atomic,
        "CAUSAL": kind.mods == CAUSAL if packed else chosen.causal,
        "ALL": True, "BOTTOM_RIGHT": False, "LOCAL": False,
        "FREE": chosen.free, "CAREFUL": kind.careful,
        "SINK": kind.sink, "PAGE": kind.page,
        "HOISTED": not kind.page and flash2_forward.hoists_offsets(stored, stored),
        "LISTED": listed(problem, kind), "BLOCK_Q": chosen.block_query,
        "BLOCK_K": chosen.block_kv, "BLOCK_D": dim, "BLOCK_V": dim, "SCALED": scaled,
        "WEIGHTS_SCALE": chosen.weights_scale, "PRECISION": chosen.precision,
        "IMPRECISE": chosen.max_num_imprecise_acc, "group": 1,
    }  # fmt: skip
    names = kernel.arg_names
    constants |= {name: 1 for name in names if name.endswith("_col")}
    if kind.transposed:
        del constants["v_col"]
        constants["v_row"] = 1
    constants = {name: value for name, value in constants.items() if name in names}
    like_inputs = ("q_ptr", "k_ptr", "v_ptr", "dout_ptr", "dq_ptr", "dk_ptr", "dv_ptr")
    types = dict.fromkeys(like_inputs, STORED[problem.dtype])
    types["out_ptr"] = STORED[problem.formats.output.name]
    in_fp32 = ("lse_ptr", "state_ptr", "total_ptr", "m_ptr", "delta_ptr")
    types |= dict.fromkeys(in_fp32, "*fp32")
    packs = ("query_starts", "kv_starts", "places", "programs", "again_ptr")
    types |= (
        {"factor": "fp32", "scale": "fp32"}
        | dict.fromkeys(packs, "*i32")
        | dict.fromkeys(constants, "constexpr")
    )
    types |= {
        "descale": ("*fp32",) * 3 if scaled else (),
        "sink": ("*fp32",) if kind.sink else (),
        "tiles": ("*i32", "*i32", *("i32",) * 6) if listed(problem, kind) else (),
        "pages": ("*i32", "i32") if kind.page else (),
        "mask_captured": types_of(mask),
        "score_captured": () if identity else types_of(score),
        "slope_captured": () if identity else types_of(slope),
        "dq": ("*fp32",) if kind.atomic else (),
        "terms": tuple(
            ("*fp32", types_of(slope), types_of(place))
            for slope, place, _ in (reads.reads if reads else ())
        ),
    }
    signature = {name: types.get(name, "i32") for name in names}
    divisible = [i for i, kind in enumerate(signature.values()) if kind == "i32" or "*" in kind]
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in divisible},
    )
    options = {"num_warps": chosen.warps, "num_stages": 1 if kind.careful else chosen.stages}
    if chosen.registers is not None and not kind.careful:
        options["maxnreg"] = chosen.registers
    return source, options


def tool(name: str, *arguments: str | Path) -> str:
    """Run one of triton's CUDA tools, and return what it prints."""
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def usage(name: str, problem: Problem, kind: Kind) -> str:
    """Return tile, registers, spilled bytes, shared memory and instructions in one line."""
    source, options = source_of(name, problem, kind)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        resources = tool("cuobjdump", "-res-usage", file.name)
        sass = tool("cuobjdump", "-sass", file.name)
    registers, stack = (re.search(rf"{name}:(\d+)", resources)[1] for name in ("REG", "STACK"))
    counts = [len(re.findall(rf"\b{op}\b", sass)) for op in ("HGMMA", "QGMMA", "FADD")]
    chosen = launch_of(name, problem, kind)
    tile = f"{chosen.block_query}×{chosen.block_kv} w{chosen.warps} s{chosen.stages}"
    shared = kernel.metadata.shared
    return f"{tile:>14} {registers:>9} {stack:>8} {shared:>8}" + "".join(f" {n:>6}" for n in counts)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", nargs="*", default=list(KERNELS), choices=list(KERNELS))
    parser.add_argument("--dtype", nargs="*", default=list(STORED), choices=list(STORED))
    parser.add_argument("--head-dim", nargs="*", type=int, default=[64, 128, 256])
    parser.add_argument("--kind", nargs="*", default=list(KINDS), choices=list(KINDS))
    options = parser.parse_args()
    print(f"triton {triton.__version__}, sm_90")
    print("kernel      dtype head_dim kind               tile registers  spilled   shared", end="")
    print("  HGMMA  QGMMA   FADD")
    for name in options.kernel:
        for dtype in options.dtype:
            kinds = [k for k in options.kind if concerned(KINDS[k], name, dtype)]
            for dim in options.head_dim:
                for k in kinds:
                    problem = Problem(
                        heads=16, query=4096, head_dim=dim, dtype=dtype, **KINDS[k].mods
                    )
                    line = usage(name, problem, KINDS[k])
                    print(f"{name:<11} {dtype:<5} {dim:>8} {k:<8} {line}", flush=True)


def concerned(kind: Kind, name: str, dtype: str) -> bool:
    """Return whether the kernel has this kind: five are FlashAttention-2's, two of them fp8."""
    if kind.mods.get("score") in (ALIBI, BIAS):  # with and without gradients of captured numbers
        return name == "flash2-dq" and not DTYPES[dtype].scaled
    if kind.atomic:
        return name == "flash2-dkdv" and not DTYPES[dtype].scaled
    if name in BACKWARD and (kind.page or DTYPES[dtype].scaled):
        return False
    if name in BACKWARD and (kind.dense or kind.careful):
        return name.startswith("flash2") if kind.dense else name.endswith("-dq")
    if kind.transposed or kind.fast:
        return name == "flash2" and DTYPES[dtype].scaled
    return not (kind.dense or kind.careful or kind.page) or name == "flash2"


if __name__ == "__main__":
    main()
