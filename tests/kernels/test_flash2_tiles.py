"""FlashAttention-2's list of visible tiles (the same bits as without one; wrong lists fail), its
careful second pass, its launches and its sink."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from tests.kernels.backward_calls import wrong_list
from tests.messages import one_line

from attncheck.core.errors import UsageError
from attncheck.core.mod_spec import FULL, Spec
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.mods import block_mask
from attncheck.subjects import kernel_mods
from attncheck.subjects.triton_flash import Flash1, Flash2
from attncheck.verify.environment import prepare
from attncheck.verify.run_case import run_case

if not torch.cuda.is_available():
    prepare("cpu")

from attncheck.kernels import flash2_forward, tile
from attncheck.kernels.flash2_forward import hoists_offsets
from attncheck.kernels.launch import needs_careful_launch

CAUSAL = Spec.of("causal")
MASKS = {
    "causal": CAUSAL,
    "window": Spec.of("sliding_window", window=20),
    "nothing": Spec.of("sliding_window", window=0),
    "document": Spec.of("document", lengths=[20, 0, 13, 37]),
    "padding": Spec.of("padding", lengths=[40]),
    "future": Spec.of("not", CAUSAL),
    "of heads": Spec.of("expression", text="kv_idx <= q_idx + 40 * h"),
    "of both": Spec.of("expression", text="kv_idx // 32 < q_idx // 32 + h - b"),
    "gaps": Spec.of(
        "expression", text="(kv_idx // 10 + q_idx // 32 + h) % 3 * (q_idx // 32 - 1) != 0"
    ),
}


def small(**changes) -> Problem:
    sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "query": 70, "kv": 66, "head_dim": 16}
    return Problem(**(sizes | {"dtype": "bf16", "mask": CAUSAL} | changes))


def same(one, other) -> bool:
    return torch.equal(one.out, other.out) and torch.equal(one.lse, other.lse)


def verdict(subject, problem: Problem) -> str:
    return run_case(subject, Case(problem=problem), device="cpu", brief=True).status


@pytest.mark.parametrize("mask", MASKS)
def test_listed_tiles_give_the_same_bits_as_all_tiles(mask):
    """A hidden key has weight 0, and an unchanged maximum rescales by exactly 1."""
    inputs = draw_inputs(small(mask=MASKS[mask], batch=2 if mask == "of both" else 1))
    assert same(Flash2((32, 32)).run(inputs), Flash2((32, 32), dense=True).run(inputs))


@pytest.mark.parametrize("mask", ["causal", "of heads"])
def test_listed_tiles_pass_in_fp8(mask):
    assert verdict(Flash2((32, 32)), small(mask=MASKS[mask], dtype="e4m3")) == "pass"


@pytest.mark.parametrize("mask", MASKS)
def test_list_omits_hidden_tiles(mask):
    """It has one entry for all sequences or heads if the mask does not depend on them."""
    paddings = {"mask": Spec.of("padding", lengths=[0, 40])} if mask == "padding" else {}
    problem = small(batch=2, **({"mask": MASKS[mask]} | paddings))
    tiles = Flash2((32, 32)).visited(problem, torch.device("cpu"))["tiles"]
    assert int(tiles.runs[..., 1].sum(-1).min()) < 3
    reads = {"padding": (2, 1), "of heads": (1, 2), "of both": (2, 2), "gaps": (1, 2)}
    assert tiles.counts.shape == (*reads.get(mask, (1, 1)), 3)
    assert Flash2().visited(small(mask=FULL), torch.device("cpu")) == {}


def test_list_is_cached_by_mask_and_lengths():
    """Seed, score mod and sink do not matter; another number of keys does."""
    lists = [
        kernel_mods.visited_tiles(small(**changes), 32, 32, "cpu")
        for changes in ({}, {"seed": 5, "score": Spec.of("alibi"), "sink": True}, {"kv": 50})
    ]
    assert lists[0] is lists[1]
    assert lists[0].runs.tolist() != lists[2].runs.tolist()


class WrongList(Flash2):
    """Uses a list changed by ``change``."""

    def __init__(self, change) -> None:
        super().__init__((32, 32))
        self.change = change

    def visited(self, problem, device):
        return {"tiles": self.change(super().visited(problem, device)["tiles"])}


@pytest.mark.parametrize(
    "fault",
    [
        *("nothing", "last run dropped", "first run dropped", "last tile short", "one tile long"),
        *("partial called full", "one twice", "of another head"),
    ],
)
def test_wrong_list_of_tiles_fails(fault):
    problem = small(mask=MASKS["of heads" if fault == "of another head" else "causal"])
    subject = WrongList(partial(wrong_list, fault))
    assert verdict(subject, problem) == ("pass" if fault == "nothing" else "fail")
    inputs = draw_inputs(problem)
    dense = Flash2((32, 32), dense=True).run(inputs)
    assert same(subject.run(inputs), dense) == (fault == "nothing")


def test_list_for_other_tile_sizes_is_refused():
    inputs = draw_inputs(small())
    for blocks, message in (
        ((16, 32), "tiles lists the tiles of 5 blocks: 70 in blocks of 32 are 3."),
        ((32, 16), "tiles lists tile 4, counted from 0: 66 in tiles of 32 are 3."),
    ):
        wrong = kernel_mods.visited_tiles(inputs.problem, *blocks, "cpu")
        with one_line(UsageError, whole=message):
            WrongList(lambda _, wrong=wrong: wrong).run(inputs)


@pytest.mark.parametrize("heads", [1, 3, 4, 5])
def test_runs_of_tiles_of_every_kind(heads):
    """Full and partial runs, gaps between them, single tiles, and blocks without any run."""
    inputs = draw_inputs(small(heads=heads, mask=MASKS["gaps"], query=96, kv=131))
    subject = Flash2((32, 16))
    tiles = subject.visited(inputs.problem, inputs.device)["tiles"]
    assert tiles.counts[:, :, 1].max() == 0
    assert tiles.counts.max() > 2
    heads_of, lengths = tiles.runs[..., 0], tiles.runs[..., 1]
    assert {
        (int(h) & 3, int(n) > 1)
        for h, n in zip(heads_of[lengths > 0], lengths[lengths > 0], strict=True)
    } >= {(block_mask.PARTIAL, False), (block_mask.PARTIAL, True), (block_mask.FULL, False)}
    assert same(subject.run(inputs), Flash2((32, 16), dense=True).run(inputs))


@triton.jit
def place_kernel(out_ptr, blocks, together, BESIDE: tl.constexpr):  # noqa: N803
    number = tl.program_id(0)
    block, bh = tile.place(number, blocks, together, BESIDE)
    tl.store(out_ptr + 2 * number, block)
    tl.store(out_ptr + 2 * number + 1, bh)


@pytest.mark.parametrize("beside", [4, 8])
@pytest.mark.parametrize("together", [1, 3, 4, 6, 9])
def test_programs_start_each_block_of_each_head_once(together, beside):
    """In groups of ``beside`` heads (the last group may be smaller), last blocks first."""
    blocks = 3
    out = torch.empty(blocks * together, 2, dtype=torch.int32)
    place_kernel[(blocks * together,)](out, blocks, together, BESIDE=beside)
    expected = [
        [block, head]
        for leading in range(0, together, beside)
        for block in reversed(range(blocks))
        for head in range(leading, min(leading + beside, together))
    ]
    assert out.tolist() == expected


@triton.jit
def count_kernel(again_ptr, out_ptr, every):
    program = tl.program_id(0)
    tl.store(out_ptr + program, tile.blocks_to_check(again_ptr, program, every))


@pytest.mark.parametrize("flagged", [None, 0, 2, 767, 768, 799])
def test_careful_program_checks_its_share_of_blocks(flagged):
    """Of three programs only the one that owns the flagged block has any to check."""
    again, out = torch.zeros(800, dtype=torch.int32), torch.full((3,), -1, dtype=torch.int32)
    expected = [0, 0, 0]
    if flagged is not None:
        again[flagged] = 1
        expected[flagged % 3] = len(range(flagged % 3, 800, 3))
    count_kernel[(3,)](again, out, 800)
    assert out.tolist() == expected


@pytest.mark.parametrize("programs", [1, 2, 5])
def test_few_careful_programs_redo_all_flagged_blocks(programs, monkeypatch):
    inputs = draw_inputs(small(heads=3, kv_heads=3, query=66, batch=2))
    v = inputs.v.clone()
    v[0, 1, 60], v[1, 2, 20], v[1, 0, 5] = math.nan, math.inf, -math.inf
    poisoned = inputs.replace(v=v)
    many = Flash2((32, 16)).run(poisoned)
    assert 0 < int(many.out.isfinite().sum()) < many.out.numel()
    monkeypatch.setattr(flash2_forward, "_CAREFUL_PROGRAMS", programs)
    few = Flash2((32, 16)).run(poisoned)
    assert torch.equal(few.out.nan_to_num(7.0), many.out.nan_to_num(7.0))
    assert torch.equal(few.lse, many.lse)


def test_stages_and_register_limit_of_launches_on_gpus(monkeypatch):
    """More than the defaults only in 16 bits, without score mod, with memory for three stages."""

    def stages_and_registers(**changes) -> tuple[int, int | None]:
        chosen = Flash2().launch(small(**changes), "cuda")
        return chosen.stages, chosen.registers

    assert stages_and_registers() == stages_and_registers(dtype="fp16", head_dim=64) == (3, 128)
    assert (
        stages_and_registers(head_dim=65)
        == stages_and_registers(value_dim=128, mask=FULL)
        == (3, None)
    )
    assert stages_and_registers(head_dim=129)[1] is None
    for other in ({"dtype": "fp32"}, {"dtype": "e4m3"}, {"score": Spec.of("alibi")}):
        assert stages_and_registers(**other)[1] is None
        assert stages_and_registers(head_dim=128, **other)[0] == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, stages in (((9, 0), 3), ((10, 3), 3), ((8, 9), 2), ((12, 0), 2)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
        assert stages_and_registers(head_dim=128)[0] == stages


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_hidden_infinite_or_nan_keys_change_no_bit(poison):
    """Whether their tile is skipped, or visited, so that its rows are computed again with care."""
    inputs = draw_inputs(small(query=20, heads=1))
    k, v = inputs.k.clone(), inputs.v.clone()
    k[:, :, 20:], v[:, :, 20:] = poison, poison
    poisoned = inputs.replace(k=k, v=v)
    for subject in (Flash2((32, 16)), Flash2((16, 32)), Flash2((32, 32), dense=True)):
        assert same(subject.run(poisoned), subject.run(inputs))


def test_flash2_offers_other_tile_sizes_and_dense():
    """Half as long, half as wide, twice as large, dense; never fewer than 32 keys in fp8."""
    assert list(Flash2().launches(small(kv=70), "cpu")) == ["32×64", "64×32", "128×128", "dense"]
    assert list(Flash2().launches(small(mask=FULL, query=20, kv=20), "cpu")) == [
        "16×32",
        "32×16",
        "64×64",
    ]
    fp8 = Flash2().launches(small(dtype="e4m3", query=20, kv=20), "cpu")
    assert list(fp8) == ["16×32", "64×64", "dense"]
    for name, other in Flash2().launches(small(), "cpu").items():
        tiling = other.tiling(small(), "cpu")
        assert name in {f"{tiling.block_query}×{tiling.block_kv}", "dense"}
    assert Flash2().launches(small(head_dim=64), "cuda").keys() == {"64×64", "128×32", "dense"}


SINKS = {"causal": {}, "nothing": {"mask": MASKS["nothing"]}, "full": {"mask": FULL}}
SINKS["score mod"] = {"score": Spec.of("softcap", cap=5.0)}


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [(dtype, name) for dtype in ("fp32", "bf16", "e4m3") for name in SINKS if name != "score mod"]
    + [("bf16", "score mod")],
)
@pytest.mark.parametrize("subject", [Flash2(), Flash1()], ids=["flash2", "flash1"])
def test_sink_passes(subject, changes, dtype):
    """With a score mod, scores and sink are in natural units, else in powers of two."""
    assert verdict(subject, small(sink=True, query=40, dtype=dtype, **SINKS[changes])) == "pass"


@pytest.mark.parametrize("subject", [Flash2(), Flash1()], ids=["flash2", "flash1"])
def test_row_without_keys_has_the_lse_of_the_sink(subject):
    inputs = draw_inputs(small(sink=True, mask=MASKS["nothing"], score=Spec.of("softcap", cap=5.0)))
    outputs = subject.run(inputs)
    assert torch.equal(outputs.out, torch.zeros_like(outputs.out))
    assert torch.equal(outputs.lse, inputs.sink[:, None].expand_as(outputs.lse))


@pytest.mark.parametrize("name", ["k", "v"])
def test_offset_of_a_tile_may_exceed_32_bits(name):
    """The second tile starts at 32 strides: 2^31. Untouched pages of memory cost nothing."""
    inputs = draw_inputs(small(heads=1, query=3, kv=33, mask=FULL))
    tensor = getattr(inputs, name)
    stride = 2**31 // 32
    view = torch.empty(33 * stride, dtype=tensor.dtype).as_strided(tensor.shape, (0, 0, stride, 1))
    view.copy_(tensor)
    assert hoists_offsets(view, view)
    subject = Flash2((32, 32))
    assert same(subject.run(inputs.replace(**{name: view})), subject.run(inputs))


def test_offsets_are_hoisted_for_aligned_16_bit_rows():
    """Both K and V: 16 bits, contiguous rows of whole 16 bytes, at most 128 columns."""
    right = torch.empty(1, 1, 4, 128, dtype=torch.float16, device="meta")
    assert hoists_offsets(right, right[..., :64])
    for other in (right.float(), right.mT, right.repeat(1, 1, 1, 2), right[..., :100].clone()):
        assert not hoists_offsets(right, other)
        assert not hoists_offsets(other, right)


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("some", [False, True])
def test_careful_launch_runs_if_flagged_or_while_a_cuda_graph_is_captured(
    some, capturing, monkeypatch
):
    """During a capture the flags cannot be read."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    flags = torch.tensor([0, int(some)])
    assert needs_careful_launch(flags) == some
    on_gpu = SimpleNamespace(is_cuda=True, any=flags.any)
    assert needs_careful_launch(on_gpu) == (some or capturing)
