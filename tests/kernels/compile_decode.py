"""Compiles the decode kernel for Hopper, without one, as its subject launches it there."""

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attncheck.core.mod_spec import Spec
from attncheck.inputs.problem import Problem
from attncheck.kernels.decode_forward import _merge, _split
from attncheck.kernels.launch import block_dim
from attncheck.mods.to_triton import to_triton
from attncheck.subjects.kernel_mods import mask_expression, score_expression
from attncheck.subjects.triton_caches import Decode

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
MOST_SPILLED = 80  # bytes a thread: what the forwards' tiles may (subjects/triton_flash.py)
STORED = {"fp32": "*fp32", "bf16": "*bf16", "e4m3": "*fp8e4nv"}


def compiled(kernel, constants, types, **options):
    """A kernel whose other arguments are 32-bit numbers that 16 divides, as pointers are."""
    names = kernel.arg_names
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in names}
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, kind in enumerate(signature.values())
            if kind == "i32" or "*" in kind
        },
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def split(problem, page):
    """The launch of the splits, for contiguous tensors."""
    chosen = Decode().launch(problem, "cuda")
    mask, score = (to_triton(t(problem, "cpu")) for t in (mask_expression, score_expression))
    storage, scaled = problem.formats.storage.torch_dtype, problem.formats.scaled
    constants = {
        "MASK": mask.function, "SCORE": score.function, "IDENTITY": False, "FREE": chosen.free,
        "PAGE": page, "SCALED": scaled, "WEIGHTS_SCALE": chosen.weights_scale,
        "BLOCK_Q": chosen.block_query, "BLOCK_K": chosen.block_kv,
        "BLOCK_D": block_dim(problem.head_dim, storage),
        "BLOCK_V": block_dim(problem.value_dim, storage), "PRECISION": chosen.precision,
        "IMPRECISE": chosen.max_num_imprecise_acc,
        "q_col": 1, "k_col": 1, "v_col": 1,
    }  # fmt: skip
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), STORED[problem.dtype])
    types |= dict.fromkeys(("out_ptr", "lse_ptr"), "*fp32") | {"factor": "fp32"}
    types |= {
        "descale": ("*fp32",) * 3 if scaled else (),
        "pages": ("*i32", "i32") if page else (),
        "mask_captured": tuple("i32" for _ in mask.captured),
        "score_captured": ("*fp32", "i32"),  # alibi's slopes and how many there are
    }
    assert len(score.captured) == len(types["score_captured"])
    options = {"num_warps": chosen.warps, "num_stages": chosen.stages}
    return compiled(_split, constants, types, **options)


def merge():
    """The launch that merges them."""
    constants = {"SINK": True, "BLOCK_R": 16, "BLOCK_V": 128}
    types = dict.fromkeys(("part_ptr", "part_lse_ptr", "lse_ptr"), "*fp32")
    return compiled(_merge, constants, types | {"out_ptr": "*bf16", "sink": ("*fp32",)})


def spilled(kernel):
    """Bytes of stack a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        said = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True)
    return int(re.search(r"STACK:(\d+)", said.stdout)[1])


for dtype, query, page in (("bf16", 1, 16), ("e4m3", 4, 16), ("fp32", 2, 0)):
    asked = Problem(
        heads=8,
        kv_heads=1,
        query=query,
        kv=4096,
        head_dim=128,
        dtype=dtype,
        mask=Spec.of("causal_bottom_right"),
        score=Spec.of("alibi"),
    )
    found = spilled(split(asked, page))
    assert found <= MOST_SPILLED, (dtype, query, page, found)
assert spilled(merge()) == 0
