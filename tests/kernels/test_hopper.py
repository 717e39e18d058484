"""Our kernels compiled for Hopper, without a GPU: shared memory, spilled registers, and the machine
code that their bits depend on."""

import os
from pathlib import Path

import pytest

COMPILE = Path(__file__).with_name("compile_for_hopper.py")
SPILLS = Path(__file__).parents[2] / "benchmarks" / "spills.py"
SHARED_MEMORY = 232448  # bytes a block may use on Hopper
MOST_SPILLED = 80  # bytes a thread: the limit when tiles were chosen (subjects/triton_flash.py)


@pytest.fixture
def compile_kernels(tmp_path, warm_python):
    """``compile_kernels(argument, …)``: what a script prints, in a process that compiles."""

    def run(*arguments, script=COMPILE):
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment["TRITON_CACHE_DIR"] = str(tmp_path)
        process = warm_python.run(str(script), *arguments, cwd=tmp_path, env=environment)
        assert process.returncode == 0, process.stderr
        return process.stdout.splitlines()

    return run


BACKWARDS = ("flash2-dq", "flash2-dkdv", "varlen-dq", "varlen-dkdv")


@pytest.mark.parametrize("name", BACKWARDS)
def test_backwards_fit_and_hardly_spill(name, compile_kernels):
    sizes = ("--dtype", "bf16", "--head-dim", "64", "256", "--kind", "causal", "atomic")
    lines = compile_kernels("--kernel", name, *sizes, script=SPILLS)[2:]
    assert len(lines) == (4 if name == "flash2-dkdv" else 2)
    for line in map(str.split, lines):
        *_, spilled, shared, products, _, _ = line
        assert int(shared) <= SHARED_MEMORY
        # Tiles were not chosen for atomic sums.
        assert int(spilled) <= MOST_SPILLED or line[3] == "atomic", line
        assert int(products) > 0  # tensor-core instructions of 16-bit operands


@pytest.mark.parametrize(
    ("name", "dtypes", "head_dim", "kinds"),
    [
        ("flash2", ("bf16", "e4m3"), "128", ("careful", "fastacc")),
        ("flash1", ("e5m2",), "64", ("document",)),
    ],
)
def test_forwards_fit(name, dtypes, head_dim, kinds, compile_kernels):
    """Only the launch ``fastacc`` sums fp8 products in the tensor core's accumulator."""
    sizes = ("--dtype", *dtypes, "--head-dim", head_dim, "--kind", *kinds)
    lines = [x.split() for x in compile_kernels("--kernel", name, *sizes, script=SPILLS)[2:]]
    assert {line[1] for line in lines} == set(dtypes)
    for _, _, _, kind, *_, shared, _, qgmma, _ in lines:
        assert int(shared) <= SHARED_MEMORY
        assert (int(qgmma) > 0) == (kind == "fastacc")


def test_dq_with_gradients_of_captured_tensors_fits(compile_kernels):
    """Tables are loaded for the score, its slope, and the index of each number."""
    sizes = ("--dtype", "bf16", "--head-dim", "256", "--kind", "dalibi", "dbias")
    lines = compile_kernels("--kernel", "flash2-dq", *sizes, script=SPILLS)[2:]
    assert [line.split()[3] for line in lines] == ["dalibi", "dbias"]
    assert all(int(line.split()[-4]) <= SHARED_MEMORY for line in lines)
    assert all(int(line.split()[-3]) > 0 for line in lines)  # instructions of 16-bit operands


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_flash3_fits_and_hardly_spills(head_dim, compile_kernels):
    lines = [line.split() for line in compile_kernels("flash3", str(head_dim))]
    assert len(lines) == 4
    for line in lines:
        shared, spilled, in_loops = map(int, line[3:])
        assert shared <= SHARED_MEMORY, line
        assert in_loops == 0, line
        # Three groups of rows in fp8 spill more, before and after their loop.
        assert spilled <= MOST_SPILLED or line[:3] == ["e4m3", "128", "00"], line


@pytest.mark.parametrize("head_dim", [64, 128])
def test_flash3_fits_with_mods_and_hardly_spills(head_dim, compile_kernels):
    lines = [line.split() for line in compile_kernels("flash3_mods", str(head_dim))]
    assert [name for name, *_ in lines] == ["document", "alibi", "relative_bias", "softcap"]
    for name, *counts in lines:
        shared, spilled, in_loops, differences = map(int, counts)
        assert shared <= SHARED_MEMORY, name
        # Two rows of each group: were the difference fused with a product, a maximum that stays
        # would not be rescaled by 1.
        groups = 3 if head_dim == 64 and name != "softcap" else 2
        assert differences == 2 * groups, name
        # Three groups of rows have no register left for a document's ids: under Triton 3.9 they
        # spill in their loops, under 3.6, which they were timed with, 48 bytes before and after.
        if (head_dim, name) != (64, "document"):
            assert spilled <= MOST_SPILLED, name
            assert in_loops == 0, name


@pytest.mark.parametrize("head_dim", [64, 128])
def test_flash3_backward_fits_and_its_products_overlap(head_dim, compile_kernels):
    """With too few registers ptxas would wait for each product before the next one starts."""
    kinds = compile_kernels("flash3_gradients", str(head_dim))
    for kind, line in zip(("full", "causal", "window"), kinds, strict=True):
        shared, spilled, in_loops, products, waits = map(int, line.split())
        assert shared <= SHARED_MEMORY, line
        assert spilled <= 5 * MOST_SPILLED, line
        # Windows wait for all earlier additions to dQ.
        assert in_loops == 0 or head_dim == 64 or kind == "window", line
        assert waits < products / 4, line


def test_spills_in_loops_are_counted_with_too_few_registers(compile_kernels):
    """Shows that the count of 0 elsewhere means something."""
    assert int(compile_kernels("flash3_without_registers")[0]) > 0


def test_softmax_loads_vectors_and_does_not_spill(compile_kernels):
    compile_kernels("softmax")


def test_decode_hardly_spills_and_fuses_no_exponent(compile_kernels):
    compile_kernels("decode")


def test_careful_launch_adds_rows_up_in_the_same_order(compile_kernels):
    """Otherwise hidden non-finite values would change bits of rows that do not see them."""
    tiles = ("tf32:128", "bf16:256", "tf32:128:64,32,8")
    lines = compile_kernels("score_layouts", *tiles)
    # The last has two warps a row in one launch: the case that failed on an H200.
    assert [line.split()[:2] for line in lines] == [
        [tile, verdict] for tile, verdict in zip(tiles, ("same", "same", "apart"), strict=True)
    ]


def test_score_mod_and_its_slope_are_compiled_as_two_functions(compile_kernels):
    """Triton distinguishes callees by name and types only, unlike its interpreter.

    If both had one name, the slope of a temperature, which is a number, would divide as the
    temperature does.
    """
    assert compile_kernels("mod_and_slope") == ["1"]


@pytest.mark.parametrize("value_dim", [128, 44])
@pytest.mark.parametrize("options", [(), ("specialised",)], ids=str)
def test_all_layouts_of_dout_share_one_delta_kernel(value_dim, options, compile_kernels):
    """A kernel for one layout alone may sum rows in another order: on an H200 delta's bits changed.

    How wide loads may be decides that order. Rows of 44 numbers do not begin at 16-byte boundaries.
    """
    lines = compile_kernels("delta_kernels", str(value_dim), *options)
    assert len(lines) == 5
    assert (len(set(lines)) == 1) == (not options)
