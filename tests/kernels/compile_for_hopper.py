"""Compile kernels for Hopper on a machine without one, and print or assert facts about their code.

``compile_for_hopper.py FUNCTION ARGUMENT…`` calls one of these functions; test_hopper.py runs it in
processes of their own, since kernels cannot be compiled next to Triton's interpreter.
"""

import importlib.util
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

from attncheck.core.mod_spec import Spec
from attncheck.inputs.problem import Problem
from attncheck.kernels import flash3_forward, gradient_terms
from attncheck.kernels.decode_forward import _merge, _split
from attncheck.kernels.flash3_backward import BACKWARD_SHAPES, ROWS_LAYOUT, _backward
from attncheck.kernels.flash3_forward import (
    FP8_SHAPES,
    MOD_SHAPES,
    OWN,
    SHAPES,
    layout_of,
)
from attncheck.kernels.launch import block_dim
from attncheck.kernels.softmax_forward import KINDS, Launch, _softmax
from attncheck.mods.scores import temperature
from attncheck.mods.to_triton import to_triton
from attncheck.mods.trace import trace_derivative, trace_score
from attncheck.subjects.kernel_mods import triton_mask, triton_score
from attncheck.subjects.softmax_kernels import launch_softmax
from attncheck.subjects.triton_caches import Decode
from attncheck.subjects.triton_flash import Flash2

HOPPER = GPUTarget("cuda", 90, 32)
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
SPILLS = Path(__file__).parents[2] / "benchmarks" / "spills.py"
MOST_SPILLED = 80  # bytes a thread: the limit of the forwards' tiles (subjects/triton_flash.py)


def compile_kernel(kernel, constants, types, divisible=(), **options):
    """Compile a kernel whose other arguments are int32; 16 divides pointers and ``divisible``."""
    names = kernel.arg_names
    types = types | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in names}
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, kind in enumerate(signature.values())
            if kind in divisible or "*" in kind
        },
    )
    return triton.compile(source, target=HOPPER, options=options)


def run_cuobjdump(kernel, option):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([CUOBJDUMP, option, file.name], capture_output=True, text=True).stdout


def spilled_bytes(kernel):
    """Bytes of stack per thread."""
    return int(re.search(r"STACK:(\d+)", run_cuobjdump(kernel, "-res-usage"))[1])


def machine_code(kernel):
    return run_cuobjdump(kernel, "-sass")


def spills_in_loops(kernel):
    """How often the innermost loops over matrix instructions read or write spilled registers."""
    instructions = re.findall(r"/\*(\w{4,})\*/ +(.+?);", machine_code(kernel))
    code = [(int(address, 16), text) for address, text in instructions]

    def addresses(*names):
        return [address for address, text in code if any(name in text for name in names)]

    # The slow paths of waits for barriers lie beyond the last exit, and jump back from there.
    last = max(addresses("EXIT"))
    jumps = [
        (int(target[1], 16), address)
        for address, text in code
        if address < last and (target := re.search(r"BRA.* 0x(\w+)", text))
    ]
    products, spills = addresses("HGMMA", "QGMMA"), addresses("LDL", "STL")
    loops = {(to, at) for to, at in jumps if any(to <= product <= at for product in products)}
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    assert inner, "a kernel that walks over keys has a loop"
    return sum(to <= spill <= at for to, at in inner for spill in spills)


# --- decode: hardly spills, and fuses no product into an exponent -------------------------------


def compile_splits(problem, page, *, fused=False):
    """The kernel of the splits as its subject launches it, for contiguous tensors.

    ``fused`` lets the compiler fuse products with sums, as an earlier version did.
    """
    chosen = Decode().launch(problem, "cuda")
    mask = triton_mask(problem, "cpu")
    score = triton_score(problem, "cpu") or mask
    identity = score is mask
    storage, scaled = problem.formats.storage.torch_dtype, problem.formats.scaled
    constants = {
        "MASK": mask.function, "SCORE": score.function, "IDENTITY": identity, "FREE": chosen.free,
        "PAGE": page, "SCALED": scaled, "WEIGHTS_SCALE": chosen.weights_scale,
        "BLOCK_Q": chosen.block_query, "BLOCK_K": chosen.block_kv,
        "BLOCK_D": block_dim(problem.head_dim, storage),
        "BLOCK_V": block_dim(problem.value_dim, storage), "PRECISION": chosen.precision,
        "IMPRECISE": chosen.max_num_imprecise_acc, "ADDED": chosen.together > 1, "EARLY": True,
        "q_col": 1, "k_col": 1, "v_col": 1,
    }  # fmt: skip
    stored = {"fp32": "*fp32", "bf16": "*bf16", "e4m3": "*fp8e4nv"}[problem.dtype]
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), stored)
    types |= dict.fromkeys(("out_ptr", "m_ptr", "total_ptr"), "*fp32") | {"factor": "fp32"}
    types |= {
        "descale": ("*fp32",) * 3 if scaled else (),
        "pages": ("*i32", "i32") if page else (),
        "mask_captured": tuple("i32" for _ in mask.captured),
        # alibi's slopes and how many there are
        "score_captured": () if identity else ("*fp32", "i32"),
    }
    assert identity or len(score.captured) == len(types["score_captured"])
    options = {"num_warps": chosen.warps, "num_stages": chosen.stages}
    options |= {"enable_fp_fusion": fused}
    return compile_kernel(_split, constants, types, ("i32",), **options)


def decode():
    """Assert that splits and merge hardly spill, and that no exponent comes from an FMA.

    With fusion one does: that shows that the search of the code finds it.
    """
    sizes = {"heads": 8, "kv_heads": 1, "kv": 4096, "head_dim": 128}
    mods = {"mask": Spec.of("causal_bottom_right"), "score": Spec.of("alibi")}
    for dtype, query, page in (("bf16", 1, 16), ("e4m3", 4, 16), ("fp32", 2, 0)):
        problem = Problem(dtype=dtype, query=query, **sizes, **mods)
        spilled = spilled_bytes(compile_splits(problem, page))
        assert spilled <= MOST_SPILLED, (dtype, query, page, spilled)
    plain = Problem(dtype="bf16", query=4, mask=mods["mask"], **sizes)
    for fused in (False, True):
        ptx = compile_splits(plain, 0, fused=fused).asm["ptx"]
        sums = set(re.findall(r"fma\S*f32\s+(%\w+),", ptx))
        assert fused == bool(sums & set(re.findall(r"ex2\S*\s+%\w+, (%\w+);", ptx)))
    types = dict.fromkeys(("part_ptr", "m_ptr", "total_ptr", "lse_ptr"), "*fp32")
    types |= {"out_ptr": "*bf16", "sink": ("*fp32",)}
    merge = {"SINK": True, "IDENTITY": True, "BLOCK_S": 4, "BLOCK_V": 256, "EARLY": True}
    for together in (1, 4):
        constants = merge | {"ADDED": together > 1, "TOGETHER": together}
        kernel = compile_kernel(_merge, constants, types, ("i32",), num_warps=1)
        assert spilled_bytes(kernel) == 0, together


# --- softmax: loads and stores are wide, and nothing spills -------------------------------------


def compile_softmax(kind, dtype, chosen, one_block, align, ends, flat=True, unit=True):
    constants = {
        "STATISTICS": KINDS[kind], "NAIVE": kind == "naive", "ONE_BLOCK": one_block, "FLAT": flat,
        "UNIT": unit, "ALIGN": align, "ENDS": ends, "BLOCK_R": chosen.block_rows,
        "BLOCK_C": chosen.block_columns, "STAGES": chosen.stages,
    } | ({"x_col": 1} if unit else {})  # fmt: skip
    types = {"x_ptr": "*" + dtype, "out_ptr": "*" + dtype, "lse_ptr": "*fp32"}
    return compile_kernel(_softmax, constants, types, num_warps=chosen.warps)


def softmax():
    """Assert that every kind of softmax loads and stores vectors, and does not spill."""
    for kind in KINDS:
        wide = (("fp32", 65536),) if kind == "online" else ()
        for dtype, columns in (("bf16", 32768), ("fp16", 50257), *wide):
            chosen = launch_softmax(kind, columns, dtype, "cuda")
            align, ends = 4 if dtype == "fp32" else 8, columns % 2 == 1
            one_block = chosen.block_columns >= columns
            kernel = compile_softmax(kind, dtype, chosen, one_block, align, ends)
            ptx = kernel.asm["ptx"]
            loads = re.findall(r"ld\.global\S*\.v4\.b32|cp\.async\S*\.global", ptx)
            stores = re.findall(r"st\.global\S*\.v4\.b32", ptx)
            per_thread = chosen.block_columns // align // (32 * chosen.warps)
            assert len(loads) >= per_thread, (kind, dtype, columns, len(loads))
            assert len(stores) == per_thread, (kind, dtype, columns, len(stores))
            assert spilled_bytes(kernel) == 0, (kind, dtype, columns, spilled_bytes(kernel))
    launch = Launch(block_columns=1024)
    compile_softmax("blocked", "bf16", launch, False, 1, False, flat=False, unit=False)


# --- FlashAttention-2's two launches ------------------------------------------------------------
# They add a row up in the same order only if they lay the scores out alike, that is, if the same
# number of warps share the keys of a row.


def warps_of_scores(spills, problem, kind):
    """``warpsPerCTA`` of the first product's result."""
    source, options = spills.source_of("flash2", problem, spills.KINDS[kind])
    text = triton.compile(source, target=HOPPER, options=options).asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    products = [x for x in text.splitlines() if "tt.dot " in x or "warp_group_dot " in x]
    name = re.findall(r"(#\w+)>\s*(?:loc\(.*\))?$", products[0])[-1]
    return re.search(r"warpsPerCTA = (\[[^]]*\])", layouts[name])[1]


def score_layouts(*tiles):
    """Print whether the plain and the careful launch have the same layout of scores.

    For each of ``tiles``, ``DTYPE:DIM[:Q,KV,WARPS]``, a line with it, ``same`` or ``apart``, and
    the layouts.
    """
    spec = importlib.util.spec_from_file_location("spills", SPILLS)
    sys.modules["spills"] = spills = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(spills)
    default = Flash2.launch
    for tile in tiles:
        dtype, dim, *sizes = tile.split(":")
        if sizes:
            q, kv, warps = map(int, sizes[0].split(","))
            changes = {"block_query": q, "block_kv": kv, "warps": warps}
            Flash2.launch = lambda *args, c=changes: replace(default(*args), **c)
        problem = Problem(
            heads=16, query=4096, head_dim=int(dim), dtype=dtype, mask=Spec.of("causal")
        )
        layouts = {warps_of_scores(spills, problem, kind) for kind in ("causal", "careful")}
        verdict = "same" if len(layouts) == 1 else "apart"
        sys.stdout.write(f"{tile} {verdict} {' '.join(sorted(layouts))}\n")
        Flash2.launch = default


# --- a score mod and its slope in one kernel ----------------------------------------------------


@triton.jit
def mod_and_slope_kernel(x_ptr, captured, slopes, SCORE: tl.constexpr, SLOPE: tl.constexpr):  # noqa: N803
    x = tl.load(x_ptr)
    i = tl.program_id(0)
    y = SCORE(x, i, i, i, i, (captured,)) + SLOPE(x, i, i, i, i, (slopes,))
    tl.store(x_ptr, y)


def mod_and_slope():
    """Print how often a kernel divides that calls a temperature and its slope."""
    mod = temperature(3.0)
    score, slope = to_triton(trace_score(mod)), to_triton(trace_derivative(mod))
    assert len(score.captured) == len(slope.captured) == 1
    types = {"x_ptr": "*fp32", "captured": "fp32", "slopes": "fp32"}
    constants = {"SCORE": score.function, "SLOPE": slope.function}
    text = compile_kernel(mod_and_slope_kernel, constants, types).asm["ttir"]
    sys.stdout.write(f"{text.count('rcp.approx')}\n")


# --- delta: dO's layouts that share a kernel have rows summed in one order ----------------------


def delta_kernels(value_dim, specialised=""):
    """Print the key by which Triton compiles delta's kernel, a line for each layout of dO.

    Equal lines share one kernel. ``specialised`` restores Triton's specialisation by arguments,
    which the kernel turns off.
    """
    dim = int(value_dim)
    shape, like = (2, 1, dim, dim), {"dtype": torch.float16}
    layouts = (
        torch.empty(shape, **like),
        torch.empty(2, 1, dim + 1, dim + 8, **like)[:, :, :dim, :dim],
        torch.empty(1, **like).expand(shape),
        torch.empty(2 * dim * dim + 1, **like)[1:].view(shape),
        torch.empty(shape, **like).mT,
    )
    kernel = gradient_terms._row_deltas
    if specialised:
        for parameter in kernel.params:
            parameter.do_not_specialize = parameter.do_not_specialize_on_alignment = False
    backend = make_backend(HOPPER)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    out, of_rows = torch.empty(shape, **like), torch.empty(shape[:3])
    for dout in layouts:
        o, do, strides, ahead = gradient_terms.in_steps(out, dout)
        _, key, _ = bind(
            o, do, of_rows, of_rows, (), *strides, 1, dim, dim, DLSE=False, AHEAD=ahead,
            BLOCK_Q=64, BLOCK_V=64, num_warps=4, debug=False,
        )  # fmt: skip
        sys.stdout.write(f"{key}\n")


# --- FlashAttention-3, as its subject launches it -----------------------------------------------


def flash3(head_dim):
    """Print dtype, head dim, limits, shared memory, spilled bytes and spills in loops of each.

    Only without limits and with both: fewer limits are fewer instructions.
    """
    width = int(head_dim)
    for dtype, shapes in (("bf16", SHAPES), ("e4m3", FP8_SHAPES)):
        for limited in (False, True):
            kernel = flash3_kernel(width, shapes[width], upper=limited, lower=limited, dtype=dtype)
            counts = f"{kernel.metadata.shared} {spilled_bytes(kernel)} {spills_in_loops(kernel)}"
            sys.stdout.write(f"{dtype} {width} {limited:d}{limited:d} {counts}\n")


def flash3_without_registers():
    """Print how often three groups of rows spill in their loops at twice their head dim."""
    kernel = flash3_kernel(128, SHAPES[64], upper=True, lower=False)
    sys.stdout.write(f"{spills_in_loops(kernel)}\n")


MODS = {
    "document": {"mask": Spec.of("document", lengths=[100, 412])},
    "alibi": {"score": Spec.of("alibi")},
    "relative_bias": {"score": Spec.of("relative_bias", distance=64, seed=1)},
    "softcap": {"score": Spec.of("softcap", cap=20.0)},
}
WEIGHTS = {"document": "light", "alibi": "light", "relative_bias": "medium", "softcap": "heavy"}


def flash3_mods(head_dim):
    """Print each mod's name, shared memory, spilled bytes, spills in loops, and powers.

    The powers are the exp2 instructions whose argument is the result of a subtraction.
    """
    width = int(head_dim)
    for name, mods in MODS.items():
        shape = MOD_SHAPES[WEIGHTS[name]][width]
        kernel = flash3_kernel(width, shape, upper="score" in mods, lower=False, **mods)
        counts = f"{kernel.metadata.shared} {spilled_bytes(kernel)} {spills_in_loops(kernel)}"
        differences = re.findall(r"sub\S*f32\s+(%\w+),", kernel.asm["ptx"])
        powers = re.findall(r"ex2\S*\s+%\w+, (%\w+);", kernel.asm["ptx"])
        sys.stdout.write(f"{name} {counts} {len(set(differences) & set(powers))}\n")


def flash3_kernel(width, shape, *, upper, lower, dtype="bf16", **mods):
    """The compiled forward of one shape, for a mask's limits or for mods."""
    scaled = dtype == "e4m3"
    stored = torch.float8_e4m3fn if scaled else torch.bfloat16
    tiles = {
        "q_desc": (stored, OWN, width),
        "k_desc": (stored, shape.keys, width),
        "v_desc": (stored, width, shape.keys) if scaled else (stored, shape.keys, width),
        "out_desc": (torch.bfloat16, OWN, width),
    }
    constants = {
        "GROUPS": shape.groups, "STAGES": shape.stages, "REGISTERS": shape.registers,
        "PINGPONG": shape.pingpong, "OVERLAP": shape.overlap, "UPPER": upper, "LOWER": lower,
        "SCALED": scaled, "LIFT": 8.0 if scaled else 0.0, "FUSED": True, "MASK": None,
        "SCORE": None,
    }  # fmt: skip
    problem = Problem(heads=4, query=512, head_dim=width, dtype=dtype, **mods)
    types = {"tiles": (), "mask_captured": (), "score_captured": ()}
    if "mask" in mods:
        mod = triton_mask(problem, "cpu")
        constants["MASK"], types["mask_captured"] = mod.function, types_of(mod.captured)
        types["tiles"] = ("*i32", "*i32", *("i32",) * 6, "*i32", "*i32")
    if "score" in mods:
        mod = triton_score(problem, "cpu")
        constants["SCORE"], types["score_captured"] = mod.function, types_of(mod.captured)
    types |= descriptor_types(tiles) | {"again_ptr": "*i32", "next_ptr": "*i32", "factor": "fp32"}
    types |= dict.fromkeys(("lse_ptr", "q_scale", "k_scale", "v_scale"), "*fp32")
    return compile_gluon_kernel(
        flash3_forward._forward, constants, types, enable_fp_fusion="score" in mods
    )


def types_of(captured):
    """The types of a mod's captured values."""
    named = {torch.float32: "*fp32", torch.int32: "*i32", float: "fp32", int: "i32"}
    return tuple(named[getattr(value, "dtype", type(value))] for value in captured)


def descriptor_types(tiles):
    """Types of descriptors by name, from the dtype, rows and columns of their tiles."""
    named = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv"}
    return {
        name: f"tensordesc<{named[dtype]}[1,1,{rows},{width}],{layout_of(dtype, rows, width)!r}>"
        for name, (dtype, rows, width) in tiles.items()
    }


def compile_gluon_kernel(kernel, constants, types, **options):
    """Compile a Gluon kernel whose other arguments are int32."""
    names = kernel.arg_names
    signature = {n: types.get(n, "constexpr" if n in constants else "i32") for n in names}
    source = GluonASTSource(kernel, signature, constants)
    return triton.compile(source, target=HOPPER, options={"num_warps": 4, **options})


def flash3_gradients(width):
    """Print shared memory, spilled bytes, spills in loops, products and waits for them.

    A line each for no limit, a causal mask's and a window's.
    """
    width, shape = int(width), BACKWARD_SHAPES[int(width)]
    pointers = {"dq_ptr": "*fp32", "turns_ptr": "*i32", "next_ptr": "*i32"}
    tiles = dict.fromkeys(("q_desc", "dout_desc"), (torch.bfloat16, shape.rows, width))
    own = (torch.bfloat16, OWN, width)
    tiles |= dict.fromkeys(("k_desc", "v_desc", "dk_desc", "dv_desc"), own)
    stat_type = f"tensordesc<fp32[1,{shape.rows}],{ROWS_LAYOUT!r}>"
    types = descriptor_types(tiles) | pointers | {"factor": "fp32", "scale": "fp32"}
    for upper, lower in ((False, False), (True, False), (True, True)):
        constants = {
            "STAGES": shape.stages, "REGISTERS": shape.registers, "UPPER": upper,
            "LOWER": lower,
        }  # fmt: skip
        kernel = compile_gluon_kernel(_backward, constants, types | {"stat_desc": stat_type})
        code = machine_code(kernel)
        counts = [kernel.metadata.shared, spilled_bytes(kernel), spills_in_loops(kernel)]
        counts += [len(re.findall(name, code)) for name in ("HGMMA", "GROUP.DEPBAR")]
        sys.stdout.write(f"{' '.join(map(str, counts))}\n")


globals()[sys.argv[1]](*sys.argv[2:])
