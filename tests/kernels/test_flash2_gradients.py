"""FlashAttention-2's backward as its subject launches it, and compiled for Hopper without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attncheck.core.outputs import GRADIENTS
from attncheck.core.source_files import import_file
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.mods import library
from attncheck.mods.spec import Spec
from attncheck.subjects import kernel_mods
from attncheck.subjects.triton_flash import Flash2, Flash2Atomic

REFERENCE = import_file(Path(__file__).with_name("gradient_reference.py"), "a file of these tests")
BLOCKS = (32, 32)


def problem(**changes) -> Problem:
    sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "query": 40, "kv": 50, "head_dim": 20}
    asked = {"mask": Spec.of("causal"), "backward": True, "dlse": True, "sink": True}
    return Problem(**(sizes | {"value_dim": 12, "dtype": "bf16"} | asked | changes))


def of_problem(inputs):
    """The same question in this file's terms."""
    case = inputs.problem
    named = {name: getattr(inputs, name) for name in ("q", "k", "v", "dout", "dlse", "sink")}
    score = (
        None if case.score == library.NONE else REFERENCE.Score(mod=case.score_mod("cpu"), bend=0.2)
    )
    mods = {"mask": case.mask_mod("cpu"), "score": score}
    return REFERENCE.Given(**named, **mods, dtype=case.dtype, scale=case.scale)


@pytest.mark.parametrize("subject", [Flash2(), Flash2(BLOCKS), Flash2Atomic(BLOCKS)])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mask": library.FULL, "dlse": False, "sink": False},
        {"score": Spec.of("softcap", cap=5.0), "dtype": "tf32"},
        {"score": Spec.of("alibi"), "dtype": "fp16"},
    ],
    ids=["causal", "full", "softcap", "alibi"],
)
def test_the_subject_gives_gradients(changes, subject):
    inputs = draw_inputs(problem(**changes))
    assert subject.backward
    assert subject.concerns(inputs.problem)
    found = subject.run(inputs)
    assert found.gradients().keys() == {f"d{n}" for n in inputs.tensors()} & set(GRADIENTS)
    reached = REFERENCE.worst(found.gradients(), of_problem(inputs), found.out, found.lse)
    assert max(reached.values()) <= 1
    forward = subject.run(inputs.forward())
    assert torch.equal(forward.out, found.out)
    assert not forward.gradients()


@pytest.mark.parametrize("subject", [Flash2(), Flash2(BLOCKS)])
def test_a_key_that_is_nan_has_no_part_in_the_gradients_of_keys_of_other_rows(subject):
    asked = problem(mask=Spec.of("document", lengths=[30, 20]), kv=50, query=50, sink=False)
    plain = draw_inputs(asked)
    k = plain.k.clone()
    k[:, :, 3] = torch.nan
    right, found = subject.run(plain), subject.run(plain.replace(k=k))
    assert not bool(torch.isfinite(found.dk[:, :, :30]).all())
    for name in ("dk", "dv"):
        given, wanted = (one.gradients()[name][:, :, 30:] for one in (found, right))
        assert torch.equal(given, wanted)


def test_its_lists_have_the_tiles_of_their_launches():
    """And dense it has none; to the bit the same."""
    inputs = draw_inputs(problem(query=70, kv=70))
    listed, dense = Flash2(BLOCKS).run(inputs), Flash2(BLOCKS, dense=True).run(inputs)
    for name, one in listed.gradients().items():
        assert torch.equal(one, dense.gradients()[name])
    by_rows, by_keys = (
        kernel_mods.visited_tiles(inputs.problem, 32, 16, "cpu", by_keys=by_keys)
        for by_keys in (False, True)
    )
    assert by_rows.runs[..., 1].sum(-1).flatten().tolist() == [2, 4, 5]
    assert by_keys.runs[..., 1].sum(-1).flatten().tolist() == [3, 3, 2, 2, 1]
    # Key block 2, of keys 32 to 47: rows 32 to 63 see some of them, the later ones not all exist.
    assert by_keys.runs[0, 0, 2].tolist()[0] == [2 * 1, 2]
    assert by_keys.runs[0, 0, 0].tolist() == [[2 * 0, 1], [2 * 1 + 1, 1], [2 * 2, 1]]


def test_every_dtype_has_tiles_that_hopper_holds():
    """Those of both gradients are chosen for head dims as the forward's are."""
    for dtype in ("fp32", "tf32", "fp16", "bf16"):
        for dim in (64, 80, 256):
            rows, keys = Flash2().gradient_launches(problem(dtype=dtype, head_dim=dim), "cuda")
            assert {rows.warps, keys.warps} == {8}
            assert rows.precision == keys.precision == ("tf32" if dtype == "tf32" else "ieee")


SPILLS = Path(__file__).parents[2] / "benchmarks" / "spills.py"
SHARED_MEMORY = 232448  # bytes a block may use on Hopper
MOST_SPILLED = 80  # bytes a thread: what tiles were chosen by (subjects/triton_flash.py)


@pytest.mark.parametrize("kernel", ["flash2-dq", "flash2-dkdv"])
def test_compiles_for_hopper_and_hardly_spills(kernel, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    asked = ["--dtype", "bf16", "--head-dim", "64", "128", "256", "--kind", "causal", "atomic"]
    done = subprocess.run(
        [sys.executable, SPILLS, "--kernel", kernel, *asked],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()[2:]]
    assert len(lines) == (3 if kernel == "flash2-dq" else 6)
    for line in lines:
        *_, spilled, shared, products, _, _ = line
        assert int(shared) <= SHARED_MEMORY
        # Tiles are not chosen for atomic sums.
        assert int(spilled) <= MOST_SPILLED or line[3] == "atomic", line
        assert int(products) > 0  # of 16-bit operands by tensor cores


def test_it_fits_hopper_with_the_gradients_of_what_a_score_mod_reads(tmp_path):
    """A table is loaded for the score, the slope and the place of each number."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    asked = ["--dtype", "bf16", "--head-dim", "64", "256", "--kind", "dalibi", "dbias"]
    done = subprocess.run(
        [sys.executable, SPILLS, "--kernel", "flash2-dq", *asked],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [line[3] for line in lines] == ["dalibi", "dbias"] * 2
    assert all(int(line[-4]) <= SHARED_MEMORY for line in lines)
    assert all(int(line[-3]) > 0 for line in lines)  # products of 16-bit operands


NAMES = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton.language as tl
from attncheck.mods.scores import temperature
from attncheck.mods.to_triton import to_triton
from attncheck.mods.trace import trace_derivative, trace_score

mod = temperature(3.0)
score, slope = to_triton(trace_score(mod)), to_triton(trace_derivative(mod))
assert len(score.captured) == len(slope.captured) == 1

@triton.jit
def both(x_ptr, captured, slopes, SCORE: tl.constexpr, SLOPE: tl.constexpr):
    x = tl.load(x_ptr)
    i = tl.program_id(0)
    y = SCORE(x, i, i, i, i, (captured,)) + SLOPE(x, i, i, i, i, (slopes,))
    tl.store(x_ptr, y)

signature = {"x_ptr": "*fp32", "captured": "fp32", "slopes": "fp32"}
constants = {"SCORE": score.function, "SLOPE": slope.function}
source = ASTSource(both, signature | dict.fromkeys(constants, "constexpr"), constants)
text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"]
print(text.count("arith.divf"))
"""


def test_a_score_mod_and_its_slope_are_two_functions_of_a_compiled_kernel(tmp_path):
    """Triton tells callees apart by name and types alone, which the interpreter does not show.

    Of one name the slope of a temperature would divide as the temperature does.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = tmp_path / "names.py"
    script.write_text(NAMES)
    done = subprocess.run(
        [sys.executable, script],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1"]  # the mod divides, and its slope is a number


@pytest.mark.parametrize(("how", "kernels"), [((), 1), (("specialised",), 5)], ids=str)
def test_the_layout_of_a_gradient_moves_no_bit_of_delta(how, kernels):
    """As it did on an H200: how wide loads may be decides in which order a row is added up."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("specialise_deltas.py")
    done = subprocess.run(
        [sys.executable, script, *how], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert (len(lines), len(set(lines))) == (5, kernels)
