"""Compiles row softmax for Hopper, without one: loads and stores are wide, and nothing spills."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attncheck.kernels.softmax_forward import KINDS, Launch, _softmax
from attncheck.subjects.softmax_kernels import launch_softmax as launch

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def compiled(kind, dtype, chosen, one_block, align, ends, flat=True, unit=True):
    constants = {
        "STATISTICS": KINDS[kind],
        "NAIVE": kind == "naive",
        "ONE_BLOCK": one_block,
        "FLAT": flat,
        "UNIT": unit,
        "ALIGN": align,
        "ENDS": ends,
        "BLOCK_R": chosen.block_rows,
        "BLOCK_C": chosen.block_columns,
        "STAGES": chosen.stages,
    } | ({"x_col": 1} if unit else {})
    names = _softmax.arg_names
    types = {"x_ptr": "*" + dtype, "out_ptr": "*" + dtype, "lse_ptr": "*fp32"}
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in names}
    pointers = [i for i, kind in enumerate(signature.values()) if "*" in kind]
    source = ASTSource(
        _softmax,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in pointers},
    )
    target = GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options={"num_warps": chosen.warps})


def spilled(kernel):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        said = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True)
    return int(re.search(r"STACK:(\d+)", said.stdout)[1])


for kind in KINDS:
    wide = (("fp32", 65536),) if kind == "online" else ()
    for dtype, columns in (("bf16", 32768), ("fp16", 50257), *wide):
        chosen = launch(kind, columns, dtype, "cuda")
        align, ends = 4 if dtype == "fp32" else 8, columns % 2 == 1
        kernel = compiled(kind, dtype, chosen, chosen.block_columns >= columns, align, ends)
        ptx = kernel.asm["ptx"]
        loads = re.findall(r"ld\.global\S*\.v4\.b32|cp\.async\S*\.global", ptx)
        stores = re.findall(r"st\.global\S*\.v4\.b32", ptx)
        each = chosen.block_columns // align // (32 * chosen.warps)
        assert len(loads) >= each, (kind, dtype, columns, len(loads))
        assert len(stores) == each, (kind, dtype, columns, len(stores))
        assert spilled(kernel) == 0, (kind, dtype, columns, spilled(kernel))
compiled("blocked", "bf16", Launch(block_columns=1024), False, 1, False, flat=False, unit=False)
sys.stdout.write("compiled\n")
