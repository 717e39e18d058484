"""Our Triton forward in the interpreter: within rounding, as good as the ideal kernel, inside its
tensors; and each of these notices a planted fault."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attncheck import oracles
from attncheck.examine.environment import prepare
from attncheck.inputs import draw
from attncheck.judge.metrics import errors
from attncheck.mods.spec import Spec
from attncheck.problem import Problem
from attncheck.subjects import flash2
from attncheck.subjects.contract import Tiling
from attncheck.subjects.flash2 import Flash2, launch
from attncheck.subjects.ideal import Ideal

MASKS = {
    "full": Spec.of("full"),
    "causal": Spec.of("causal"),
    "bottom_right": Spec.of("causal_bottom_right"),
    "window": Spec.of("sliding_window", window=7),
    "prefix_lm": Spec.of("prefix_lm", prefix=5),
    "document": Spec.of("document", lengths=[20, 0, 50, 80]),
    "padding": Spec.of("padding", lengths=[0, 33]),
    "causal and padding": Spec.of("and", Spec.of("causal"), Spec.of("padding", lengths=[9, 40])),
    "not causal": Spec.of("not", Spec.of("causal")),
}
SCORES = {
    "none": Spec.of("none"),
    "alibi": Spec.of("alibi"),
    "softcap": Spec.of("softcap", cap=5.0),
    "relative_bias": Spec.of("relative_bias", distance=9, seed=1),
    "temperature": Spec.of("temperature", temperature=0.7),
    "chain": Spec.of("chain", Spec.of("softcap", cap=5.0), Spec.of("alibi")),
}
DTYPES = ("fp32", "tf32", "fp16", "bf16")


@pytest.fixture(scope="module", autouse=True)
def _interpreted():
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here: the properties judge them on the GPU")
    prepare("cpu")


def small(**changes) -> Problem:
    sizes = {"batch": 2, "heads": 2, "kv_heads": 1, "query": 40, "head_dim": 16, "value_dim": 8}
    return Problem(**(sizes | changes))


def excess(inputs, exact, subject=None):
    truncated = inputs.problem.dtype == "tf32"
    return exact(inputs, truncated=truncated).excess((subject or Flash2()).run(inputs))


@pytest.mark.parametrize("lengths", [(40, 40), (70, 150), (150, 70)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask, lengths, exact):
    query, kv = lengths
    problem = small(query=query, kv=kv, dtype="fp32", mask=MASKS[mask])
    assert excess(draw(problem), exact) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("score", SCORES)
def test_scores_in_every_dtype(score, dtype, exact):
    problem = small(kv=70, dtype=dtype, mask=MASKS["causal"], score=SCORES[score])
    assert excess(draw(problem), exact) <= 1


@pytest.mark.parametrize(
    "dims", [(1, 1), (3, 5), (17, 64), (64, 17), (80, 80), (256, 256)], ids=str
)
def test_any_head_dim(dims, exact):
    problem = small(head_dim=dims[0], value_dim=dims[1], kv=33, dtype="bf16")
    assert excess(draw(problem), exact) <= 1


@pytest.mark.parametrize(
    "lengths", [(1, 1), (1, 65), (65, 1), (31, 32), (33, 33), (64, 129)], ids=str
)
def test_any_lengths(lengths, exact):
    problem = small(query=lengths[0], kv=lengths[1], dtype="fp16", mask=MASKS["causal"])
    assert excess(draw(problem), exact) <= 1


@pytest.mark.parametrize("tiles", [(64, 16), (16, 64)], ids=str)
@pytest.mark.parametrize("mask", ["full", "causal", "window", "causal and padding"])
def test_tiles_that_are_not_square(mask, tiles, exact, monkeypatch):
    """As on a GPU; the interpreter's own choice is square."""
    chosen = dict(zip(("block_query", "block_kv"), tiles, strict=True))
    monkeypatch.setattr(flash2, "_interpreted", lambda problem: chosen)
    for query, kv in ((150, 150), (70, 150), (150, 70)):
        problem = small(query=query, kv=kv, dtype="fp32", mask=MASKS[mask])
        assert Flash2().tiling(problem, "cpu") == Tiling(**chosen)
        assert excess(draw(problem), exact) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_gpu_is_asked_for(dtype):
    """Only tf32 multiplies in tf32; the wider of the two head dims chooses the tiles."""
    for device in ("cuda", "cpu"):
        problem = small(head_dim=64, value_dim=64, dtype=dtype)
        assert launch(problem, device).precision == ("tf32" if dtype == "tf32" else "ieee")
    chosen = {
        dims: launch(small(head_dim=dims[0], value_dim=dims[1], dtype=dtype), "cuda")
        for dims in ((64, 64), (65, 64), (64, 65), (128, 128), (128, 129), (256, 1), (256, 256))
    }
    assert chosen[64, 64] != chosen[65, 64] == chosen[64, 65] == chosen[128, 128]
    assert chosen[128, 128] != chosen[128, 129] == chosen[256, 1] == chosen[256, 256]


SKIPPED = {
    "full": (False, True),
    "causal": (True, True),
    "bottom_right": (False, False),
    "window": (True, False),
    "prefix_lm": (False, False),
    "document": (False, False),
    "padding": (False, False),
    "causal and padding": (True, False),
    "not causal": (False, False),
}


@pytest.mark.parametrize("mask", MASKS)
def test_which_tiles_a_mask_lets_it_skip(mask):
    """Whether keys after the row are hidden, and whether nothing else is."""
    chosen = launch(small(mask=MASKS[mask]), "cuda")
    assert (chosen.causal, chosen.free) == SKIPPED[mask]
    causal_or = Spec.of("or", MASKS["causal"], MASKS["padding"])
    assert not launch(small(mask=causal_or), "cuda").causal


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (6, 2), (4, 4)], ids=str)
def test_any_group(heads, exact):
    problem = small(heads=heads[0], kv_heads=heads[1], dtype="fp16")
    assert excess(draw(problem), exact) <= 1


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_as_good_as_the_ideal_kernel(mask, dtype):
    """Within 3 % of the ideal kernel's RMSE at the same tiles and order, on 2^16 outputs."""
    problem = Problem(heads=4, query=256, head_dim=64, dtype=dtype, mask=MASKS[mask])
    inputs = draw(problem)
    truth, everything = oracles.dense(inputs).out, torch.tensor(True)
    ideal = Ideal(Flash2().tiling(problem, "cpu"))
    found, best = (errors(s.run(inputs).out, truth, everything).rmse for s in (Flash2(), ideal))
    assert abs(found / best - 1) <= 0.03


def test_any_strides(exact):
    inputs = draw(small(dtype="bf16", mask=MASKS["causal"]))
    turned = {n: getattr(inputs, n).transpose(1, 2).contiguous().transpose(1, 2) for n in "qkv"}
    gapped = {n: torch.stack([t, t * 2], -1)[..., 0] for n, t in turned.items()}
    plain = Flash2().run(inputs)
    for views in (turned, gapped):
        outputs = Flash2().run(inputs.replace(**views))
        assert torch.equal(outputs.out, plain.out)
        assert torch.equal(outputs.lse, plain.lse)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mask", ["causal", "document"])
def test_a_visible_value_that_is_not_finite_reaches_its_rows_and_no_other(mask, poison):
    inputs = draw(small(batch=1, heads=1, query=70, dtype="bf16", mask=MASKS[mask]))
    v = inputs.v.clone()
    v[0, 0, 30, 3] = poison
    before, after = Flash2().run(inputs).out, Flash2().run(inputs.replace(v=v)).out
    at = torch.arange(70)
    zero = torch.tensor(0)
    seen = inputs.problem.mask_mod()(zero, zero, at, torch.full((70,), 30))
    reached = torch.zeros_like(before, dtype=torch.bool)
    reached[0, 0, :, 3] = seen
    # In a tile without a mask it is p · ∞; where a mask hides it from some row, NaN.
    assert not after[reached].isfinite().any()
    assert torch.equal(after[~reached], before[~reached])


def planted(folder: Path, right: str, wrong: str):
    """The kernel's module from a copy of its source with one fault."""
    from attncheck.kernels import flash2_forward

    source = Path(flash2_forward.__file__).read_text()
    assert source.count(right) == 1, f"{source.count(right)} × {right!r}"
    copy = folder / "planted_flash2.py"
    copy.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location("planted_flash2", copy)
    module = importlib.util.module_from_spec(spec)
    sys.modules["planted_flash2"] = module
    spec.loader.exec_module(module)
    return module.flash2_forward


FAULTS = {
    "output is not rescaled": ("acc = acc * alpha[:, None]", "acc = acc"),
    "row sum is not rescaled": ("total * alpha + tl.sum(p, 1)", "total + tl.sum(p, 1)"),
    "keys beyond the last are seen": (") & inside[None, :]\n", ")\n"),
    "last partial tile is lost": (
        "range(whole, end, BLOCK_K)",
        "range(whole, end // BLOCK_K * BLOCK_K, BLOCK_K)",
    ),
    "kv head is h, not h // group": (
        "(h64 // group) * k_head",
        "(h64 % (heads // group)) * k_head",
    ),
    "LSE in base 2": (") * _LN2", ")"),
    "maximum starts at 0": (
        'tl.full([BLOCK_Q], float("-inf"), tl.float32)',
        "tl.zeros([BLOCK_Q], tl.float32)",
    ),
    "hidden values reach the product": (
        "tl.where(finite, v_block, tl.zeros_like(v_block))",
        "v_block",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_noticed(fault, exact, tmp_path, monkeypatch):
    from attncheck.kernels import flash2_forward

    inputs = draw(
        small(heads=6, kv_heads=3, query=70, kv=101, dtype="bf16", distribution="negative_logits")
    )
    if fault == "hidden values reach the product":
        inputs = draw(inputs.problem.replace(mask=MASKS["causal"]))
        inputs.v[:, :, 70:] = math.nan
        shown = inputs.replace(v=inputs.v.nan_to_num())
        exact_of = exact(shown)
    else:
        exact_of = exact(inputs)
    assert exact_of.excess(Flash2().run(inputs)) <= 1
    monkeypatch.setattr(flash2_forward, "flash2_forward", planted(tmp_path, *FAULTS[fault]))
    assert not exact_of.excess(Flash2().run(inputs)) <= 1


class Bounds:
    """Watches what the interpreter loads and stores: it would copy from anywhere."""

    def __init__(self, monkeypatch, tensors):
        from triton.runtime import interpreter

        self.tensors, self.outside = tensors, 0
        builder = interpreter.InterpreterBuilder
        for name, place in (("create_masked_load", 0), ("create_masked_store", 1)):
            monkeypatch.setattr(builder, name, self._watched(getattr(builder, name), place))

    def _watched(self, call, place):
        def watched(builder, pointers, *rest, **named):
            addresses = torch.from_numpy(pointers.data.astype("int64"))
            asked = addresses[torch.from_numpy(rest[place].data.astype("bool"))]
            inside = torch.zeros_like(asked, dtype=torch.bool)
            for tensor in self.tensors:
                start = tensor.data_ptr()
                inside |= (asked >= start) & (
                    asked < start + tensor.numel() * tensor.element_size()
                )
            self.outside += int((~inside).sum())
            return call(builder, pointers, *rest, **named)

        return watched


@pytest.mark.parametrize("missing", [None, "q", "k", "v"])
def test_reads_and_writes_its_own_tensors_only(missing, monkeypatch):
    inputs = draw(small(query=70, kv=101, head_dim=17, dtype="bf16", mask=MASKS["causal"]))
    tensors = [getattr(inputs, name) for name in "qkv" if name != missing]
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *a, **k: tensors.append(empty(*a, **k)) or tensors[-1]
    )
    bounds = Bounds(monkeypatch, tensors)
    Flash2().run(inputs)
    assert (bounds.outside > 0) == (missing is not None)  # it notices a tensor it does not know


COMPILE = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from attncheck.kernels.flash2_forward import _forward
from attncheck.mods.to_triton import to_triton
from attncheck.problem import Problem
from attncheck.subjects.flash2 import launch
from attncheck.subjects.traced import traced_mask, traced_score
from attncheck.mods.spec import Spec

STORED = {"fp32": "*fp32", "tf32": "*fp32", "fp16": "*fp16", "bf16": "*bf16"}
CAPTURED = {torch.int32: "*i32", torch.float32: "*fp32"}
SHARED_MEMORY = 232448  # bytes a block may use on Hopper

def kind(value):
    if isinstance(value, torch.Tensor):
        return CAPTURED[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"

def compiled(dtype, head_dim, mask, score):
    problem = Problem(heads=4, query=4096, head_dim=head_dim, dtype=dtype, mask=mask, score=score)
    chosen = launch(problem, "cuda")
    mods = [to_triton(traced_mask(problem, "cpu")), to_triton(traced_score(problem, "cpu"))]
    constants = dict(
        MASK=mods[0].function, SCORE=mods[1].function, IDENTITY=False, CAUSAL=chosen.causal,
        FREE=chosen.free, BLOCK_Q=chosen.block_query, BLOCK_K=chosen.block_kv, BLOCK_D=head_dim,
        BLOCK_V=head_dim, PRECISION=chosen.precision,
    )
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), STORED[dtype])
    types |= {"lse_ptr": "*fp32", "factor": "fp32"} | dict.fromkeys(constants, "constexpr")
    types["mask_captured"], types["score_captured"] = (
        tuple(map(kind, mod.captured)) for mod in mods
    )
    names = _forward.arg_names
    source = ASTSource(
        _forward,
        signature={name: types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    options = {"num_warps": chosen.warps, "num_stages": chosen.stages}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert kernel.metadata.shared <= SHARED_MEMORY, kernel.metadata.shared

compiled("bf16", 128, Spec.of("causal"), Spec.of("alibi"))
compiled("fp32", 64, Spec.of("document", lengths=[4000, 96]), Spec.of("softcap", cap=5.0))
compiled("tf32", 256, Spec.of("full"), Spec.of("none"))
print("compiled")
"""


def test_compiles_for_hopper_without_a_gpu(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip() == "compiled", run.stderr
