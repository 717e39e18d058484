"""The arithmetic fingerprint of kernels with a known, and with a misdeclared, arithmetic."""

from pathlib import Path

import pytest
import torch
from tests.surveys import planted_arithmetics as planted

from attncheck.core.errors import UnknownName
from attncheck.records.failure_causes import without_place
from attncheck.records.survey_reports import FIELDS, Reading
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal
from attncheck.subjects.load import load_subject
from attncheck.subjects.torch_kernels import Sdpa
from attncheck.surveys.arithmetic_survey import fingerprint_kernel, survey_arithmetic
from attncheck.surveys.fingerprint_scenes import Grid, coarsest, read_grid
from attncheck.verify.environment import prepare


def fields(subject, dtype) -> dict[str, Reading]:
    record = fingerprint_kernel(subject, dtype)
    return {reading.field: reading for reading in record.readings}


def differing(readings) -> set[str]:
    return {name for name, reading in readings.items() if reading.standing == "differs"}


WEIGHTS = {
    "fp32": "fp32",
    "tf32": "tf32, nearest",
    "fp16": "fp16, nearest",
    "bf16": "bf16, nearest",
    "e4m3": "e4m3 × 256, nearest",
    "e5m2": "e5m2 × 32768, nearest",
}


@pytest.mark.parametrize("dtype", WEIGHTS)
def test_fingerprint_of_the_ideal_kernel_agrees_with_its_declaration(dtype):
    """Every field is read in every dtype, except the row sum where P is not rounded."""
    read = fields(Ideal(), dtype)
    assert list(read) == list(FIELDS)
    assert not differing(read)
    unseen = {name for name, reading in read.items() if reading.standing == "not seen"}
    assert unseen == ({"row sum"} if dtype == "fp32" else set())
    assert read["P"].read == WEIGHTS[dtype]
    assert read["q·k"].read == read["P·V"].read == "24 bits, nearest"
    assert read["products"].read == ("11 bits, nearest" if dtype == "tf32" else "as stored")
    assert (read["tile"].read, read["order"].read) == ("64 keys", "forward")
    assert (read["parts"].read, read["sentinel"].read) == ("1", "−∞")
    assert read["subnormals"].read == "kept"


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize(
    ("tiling", "size", "order"),
    [
        (Tiling(block_query=64, block_kv=16), "16 keys", "forward"),
        (Tiling(block_query=64, block_kv=48), "steps begin at 48, 96, 144, 192, …", "forward"),
        (Tiling(block_query=64, block_kv=128, reverse=True), "128 keys", "reverse"),
        (Tiling(block_query=128, block_kv=32, lazy_rescale=8.0), "32 keys", "forward"),
        (Tiling(block_query=128, block_kv=64, recurrence="flash1"), "64 keys", ""),
    ],
    ids=str,
)
def test_fingerprint_reads_tile_size_and_order(dtype, tiling, size, order):
    """In fp32 too, where P is not rounded."""
    read = fields(Ideal(tiling), dtype)
    assert (read["tile"].read, read["order"].read) == (size, order)
    # With tiles of 48 the last is shorter, so no size is read and none can agree.
    assert differing(read) == ({"tile"} if tiling.block_kv == 48 else set())
    assert read["P"].standing == "agrees"


def test_fingerprint_reads_truncated_tf32():
    read = fields(Ideal(tf32="truncate"), "tf32")
    assert (read["products"].read, read["P"].read) == ("11 bits, truncated", "tf32, truncated")
    assert not differing(read)


FAULTS = {
    "P in bf16": ("fp16", planted.round_weights(torch.bfloat16), {"P": "bf16, nearest"}),
    "P in fp16": ("bf16", planted.round_weights(torch.float16), {"P": "fp16, nearest"}),
    "P truncated": ("bf16", planted.P_TRUNCATED, {"P": "bf16, truncated"}),
    "P unscaled": ("e4m3", planted.P_UNSCALED, {"P": "e4m3, nearest"}),
    "sum of rounded P": ("bf16", planted.SUMS_ROUNDED_P, {"row sum": "of rounded P"}),
    "q·k in bf16": ("bf16", planted.SCORES_IN_BF16, {"q·k": "8 bits, nearest"}),
    "P·V in 16 bits": ("bf16", planted.OUT_OF_16_BITS, {"P·V": "16 bits, truncated"}),
    "sentinel": ("bf16", planted.sentinel(-1e4), {"sentinel": "−10000"}),
    "sentinel in fp16": ("fp16", planted.sentinel(-1e4), {"sentinel": "−10000"}),
    "sentinel in e4m3": ("e4m3", planted.sentinel(-1e4), {"sentinel": "−10000"}),
    "large sentinel": ("fp32", planted.sentinel(-1e30), {"sentinel": "−1e30"}),
    "lowest sentinel": (
        "bf16",
        planted.sentinel(torch.finfo(torch.float32).min),
        {"sentinel": "finite, lower than was asked"},
    ),
    "flush": ("fp16", planted.FLUSHES_TO_ZERO, {"subnormals": "q, k, v or out, P flushed to 0"}),
    "tf32": ("fp32", planted.READS_TF32, {"products": "11 bits, nearest", "P": "tf32, nearest"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_only_the_misdeclared_field_differs(fault):
    dtype, runs, wrong = FAULTS[fault]
    read = fields(planted.Misdeclared(runs), dtype)
    assert {name: read[name].read for name in differing(read)} == wrong


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_exp2_of_ten_bits_differs(dtype):
    """P has no more bits than exp2, so its field may differ too."""
    read = fields(planted.Misdeclared(planted.SHORT_EXP), dtype)
    assert "exp2" in differing(read)
    assert float(read["exp2"].read.split()[0]) > 1000


@pytest.mark.parametrize(
    ("tiling", "wrong"),
    [
        (Tiling(block_query=128, block_kv=32), {"tile": "32 keys"}),
        (Tiling(block_query=128, block_kv=64, reverse=True), {"order": "reverse"}),
        (
            Tiling(block_query=128, block_kv=64, recurrence="flash1"),
            {"parts": "4 of 256 keys; 4 of 256 keys in a batch of 4; 16 of 1,024 keys"},
        ),
    ],
    ids=["tile", "order", "parts"],
)
def test_misdeclared_tiling_differs(tiling, wrong):
    read = fields(planted.Misdeclared(Ideal(tiling), Ideal()), "bf16")
    assert {name: read[name].read for name in differing(read)} == wrong


def test_row_sum_is_read_from_out_where_there_is_no_lse():
    assert fields(planted.WITHOUT_LSE, "bf16")["row sum"].standing == "agrees"


def test_fields_of_refused_questions_are_not_seen_and_have_the_reason():
    read = fields(planted.SHORT, "bf16")
    unseen = {name: each.reason for name, each in read.items() if each.standing == "not seen"}
    refused = dict.fromkeys(("tile", "order", "parts"), "more than 128 keys")
    assert unseen == {**refused, "sentinel": "no masks"}


def test_nan_outputs_leave_nearly_every_field_unread():
    """Only the sentinel and the subnormals may be read: hidden keys may cause wrong rows too."""
    read = fields(planted.GIVES_NAN, "bf16")
    seen = {name for name, reading in read.items() if reading.standing != "not seen"}
    assert seen <= {"sentinel", "subnormals"}


def test_fingerprint_stops_after_the_kernel_raises():
    record = fingerprint_kernel(planted.RAISES, "bf16")
    assert record.calls == 0
    assert without_place(record.readings[0].reason) == "RuntimeError: out of order"


@pytest.mark.parametrize(
    ("name", "dtype", "tile", "parts"),
    [
        ("triton-flash2", "bf16", "64 keys", "1"),
        ("triton-paged", "bf16", "64 keys", "1"),
        (
            "triton-flash1",
            "fp16",
            "64 keys",
            "4 of 256 keys; 4 of 256 keys in a batch of 4; 8 of 1,024 keys",
        ),
        (
            "triton-decode",
            "fp32",
            "64 keys",
            "3 of 256 keys; 3 of 256 keys in a batch of 4; 3 of 1,024 keys",
        ),
    ],
)
def test_triton_kernels_agree_with_their_declarations(name, dtype, tile, parts):
    if torch.cuda.is_available():
        pytest.skip("this process compiles")
    prepare("cpu")
    read = fields(load_subject(name), dtype)
    assert not differing(read)
    assert (read["tile"].read, read["parts"].read) == (tile, parts)
    assert read["P"].read.startswith(dtype)


def test_tutorial_kernel_that_always_casts_to_fp16_differs():
    """The kernel takes only as many rows as keys, and adds −1e6 to a hidden score in log2 units."""
    if torch.cuda.is_available():
        pytest.skip("this process compiles")
    prepare("cpu")
    example = Path(__file__).parents[2] / "examples/tutorial_attention.py"
    read = fields(load_subject(f"{example}::attention"), "bf16")
    wrong = {"P": "fp16, nearest", "sentinel": "−1e6 in log2 units"}
    assert {name: read[name].read for name in differing(read)} == wrong
    assert read["tile"].read == "64 keys"


def test_cpu_flash_kernel_agrees_with_its_declaration():
    """It steps by 512 keys and, where the CPU has vectors, uses a short polynomial for exp."""
    read = fields(Sdpa("flash"), "bf16")
    assert not differing(read)
    assert (read["tile"].read, read["P"].read) == ("512 keys", "bf16, nearest")
    assert float(read["exp2"].read.split()[0]) < 1024


def test_unfused_kernel_is_finer_than_declared():
    read = fields(Sdpa("math"), "bf16")
    assert not differing(read)
    assert (read["P"].standing, read["P"].read) == ("finer", "fp32")
    assert read["tile"].standing == "not seen"


def test_survey_rejects_unknown_dtypes():
    with pytest.raises(UnknownName):
        survey_arithmetic(Ideal(), ["fp8"], device="cpu", command="")


@pytest.mark.parametrize(
    ("spacing", "rounding", "values"),
    [
        (2, "nearest", [0, 0, 2, 4, 4, 4, 6, 8]),
        (4, "nearest", [0, 0, 0, 4, 4, 4, 8, 8]),
        (2, "truncated", [0, 0, 2, 2, 4, 4, 6, 6]),
        (4, "truncated", [0, 4, 4, 4, 4, 8, 8, 8]),
    ],
)
def test_read_grid_reads_spacing_and_rounding(spacing, rounding, values):
    grid = read_grid([float(x) for x in values], 10)
    assert grid == Grid(11 - spacing.bit_length() + 1, rounding)


def test_read_grid_returns_none_off_any_grid():
    assert read_grid([0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0], 10) is None
    assert coarsest([(10, [float("nan")] * 8)]) is None
    assert coarsest([(10, list(map(float, range(8))))]) == Grid(11)
