"""Registers, spilled bytes and shared memory of our forward, compiled for Hopper without a GPU.

    python benchmarks/spills.py [--dtype bf16 ...] [--head-dim 128 ...]

One line for each dtype, head dim and kind of mask, at the tiles of ``subjects/flash2.py``, which
were chosen by it. Spilled bytes are ptxas's stack a thread, with this triton's ptxas.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before triton: this process compiles

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attncheck.kernels.flash2_forward import _forward
from attncheck.mods.spec import Spec
from attncheck.mods.to_triton import TritonMod, to_triton
from attncheck.problem import Problem
from attncheck.subjects.flash2 import launch
from attncheck.subjects.traced import traced_mask, traced_score

STORED = {"fp32": "*fp32", "tf32": "*fp32", "fp16": "*fp16", "bf16": "*bf16"}
CAPTURED = {torch.int32: "*i32", torch.float32: "*fp32"}
KINDS = {
    "full": {},
    "causal": {"mask": Spec.of("causal")},
    "document": {"mask": Spec.of("document", lengths=[2048, 2048])},
    "softcap": {"score": Spec.of("softcap", cap=20.0)},
}


def types_of(mod: TritonMod) -> tuple[str, ...]:
    """Triton's names for the types of what a mod captures."""
    return tuple(
        CAPTURED[v.dtype]
        if isinstance(v, torch.Tensor)
        else "fp32"
        if isinstance(v, float)
        else "i32"
        for v in mod.captured
    )


def source_of(problem: Problem, *, identity: bool) -> tuple[ASTSource, dict[str, int]]:
    """The kernel as it is launched for contiguous tensors, and its launch options."""
    chosen = launch(problem, "cuda")
    mask = to_triton(traced_mask(problem, "cpu"))
    score = mask if identity else to_triton(traced_score(problem, "cpu"))
    constants: dict[str, Any] = {
        "MASK": mask.function, "SCORE": score.function, "IDENTITY": identity,
        "CAUSAL": chosen.causal, "FREE": chosen.free, "BLOCK_Q": chosen.block_query,
        "BLOCK_K": chosen.block_kv, "BLOCK_D": problem.head_dim, "BLOCK_V": problem.head_dim,
        "PRECISION": chosen.precision, "group": 1,
    }  # fmt: skip
    names = _forward.arg_names
    constants |= {name: 1 for name in names if name.endswith("_col")}
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), STORED[problem.dtype])
    types |= {"lse_ptr": "*fp32", "factor": "fp32"} | dict.fromkeys(constants, "constexpr")
    types |= {
        "mask_captured": types_of(mask),
        "score_captured": () if identity else types_of(score),
    }
    signature = {name: types.get(name, "i32") for name in names}
    divisible = [i for i, kind in enumerate(signature.values()) if kind == "i32" or "*" in kind]
    source = ASTSource(
        _forward,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in divisible},
    )
    return source, {"num_warps": chosen.warps, "num_stages": chosen.stages}


def usage(problem: Problem) -> str:
    """Tile, registers, spilled bytes and shared memory, in one line."""
    source, options = source_of(problem, identity=str(problem.score) == "none")
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        said = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = (re.search(rf"{name}:(\d+)", said)[1] for name in ("REG", "STACK"))
    chosen = launch(problem, "cuda")
    tile = f"{chosen.block_query}×{chosen.block_kv} w{chosen.warps} s{chosen.stages}"
    return f"{tile:>14} {registers:>9} {stack:>8} {kernel.metadata.shared:>8}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", nargs="*", default=list(STORED), choices=list(STORED))
    parser.add_argument("--head-dim", nargs="*", type=int, default=[64, 128, 256])
    asked = parser.parse_args()
    print(f"triton {triton.__version__}, sm_90")
    print("dtype head_dim mask               tile registers  spilled   shared")
    for dtype in asked.dtype:
        for dim in asked.head_dim:
            for name, mods in KINDS.items():
                problem = Problem(heads=16, query=4096, head_dim=dim, dtype=dtype, **mods)
                print(f"{dtype:<5} {dim:>8} {name:<8} {usage(problem)}", flush=True)


if __name__ == "__main__":
    main()
