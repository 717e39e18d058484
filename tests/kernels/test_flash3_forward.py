"""FlashAttention-3 without a GPU: where it goes, what it takes, who does the rest; emulated.

That it waits long enough, and how fast it is, shows on a GPU alone.
"""

from functools import partial

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.gluon_emulation import Emulated, dawdle
from tests.kernels.patched_kernels import PLANTED, copy_kernels

from attncheck.core.errors import UsageError
from attncheck.core.formats import FORMATS
from attncheck.core.mod_spec import FULL, Spec
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.mods.block_mask import BlockMask, list_visits
from attncheck.mods.masks import Band, band_of
from attncheck.subjects.kernel_mods import visited_tiles
from attncheck.subjects.triton_flash import Flash2, Flash3
from attncheck.verify.environment import prepare
from attncheck.verify.run_case import run_case

if not torch.cuda.is_available():
    prepare("cpu")

from attncheck.kernels import flash3_forward, tile
from attncheck.kernels.launch import VisitList

CAUSAL, BOTTOM_RIGHT = Spec.of("causal"), Spec.of("causal_bottom_right")
WINDOW = Spec.of("sliding_window", window=20)
LATER = Spec.of("offset", WINDOW, rows=30)
DOCUMENT = Spec.of("document", lengths=[40, 30])
ALIBI = Spec.of("alibi")


@pytest.fixture
def _interpreted():
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here, and no GPU is asked of")


def shown(problem: Problem) -> torch.Tensor:
    """Which keys each row sees, by the mask itself."""
    rows, keys = torch.arange(problem.query)[:, None], torch.arange(problem.kv)[None]
    zero = torch.zeros((), dtype=torch.int32)
    return problem.mask_mod("cpu")(zero, zero, rows, keys).expand(problem.query, problem.kv)


def within(band: Band, query: int, kv: int) -> torch.Tensor:
    distance = torch.arange(kv)[None] - torch.arange(query)[:, None]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if band.least is not None:
        seen &= distance >= band.least
    if band.most is not None:
        seen &= distance <= band.most
    return seen


@pytest.mark.parametrize("query", [50, 90])
@pytest.mark.parametrize(
    "mask",
    [FULL, CAUSAL, BOTTOM_RIGHT, WINDOW, LATER, Spec.of("sliding_window", window=0),
     Spec.of("and", CAUSAL, LATER), Spec.of("offset", BOTTOM_RIGHT, rows=7)],
    ids=str,
)  # fmt: skip
def test_a_band_is_its_mask(mask, query):
    problem = Problem(heads=1, query=query, kv=70, head_dim=64, dtype="bf16", mask=mask)
    band = band_of(mask, problem.dimensions)
    assert band is not None
    for same in (band, band.within(query, 70)):
        assert torch.equal(within(same, query, 70), shown(problem))
    assert band_of(FULL, problem.dimensions) == Band()


def test_a_limit_beyond_32_bits_is_none():
    assert Band(least=-(2**40), most=2**40).within(50, 70) == Band()
    assert Band(least=2**40).within(50, 70) == Band(least=70)


@triton.jit
def walked(  # noqa: PLR0917
    out_ptr, block, query, kv, least, most, WALK: tl.constexpr, ROWS: tl.constexpr,  # noqa: N803
    KEYS: tl.constexpr, UPPER: tl.constexpr, LOWER: tl.constexpr,  # noqa: N803
):  # fmt: skip
    first, end = WALK(block, query, kv, least, most, ROWS, KEYS, UPPER, LOWER)
    tl.store(out_ptr, first)
    tl.store(out_ptr + 1, end)


def is_right(room, query: int, kv: int, band: Band, rows: int, keys: int, block: int) -> bool:
    """Whether a block visits the tiles that it sees, and no others."""
    out = torch.full((2,), -1, dtype=torch.int32)
    walked[(1,)](
        out, block, query, kv, band.least or 0, band.most or 0, room.walk, rows, keys,
        band.most is not None, band.least is not None,
    )  # fmt: skip
    first, end = out.tolist()
    tiles = -(-kv // keys)
    visited = range(first, end)
    seen = torch.zeros(query, tiles * keys, dtype=torch.bool)
    seen[:, :kv] = within(band, query, kv)
    of_tiles = seen[block * rows : (block + 1) * rows].unflatten(1, (tiles, keys))
    due = {i for i in range(tiles) if of_tiles[:, i].any()}
    # A block that sees nothing visits some tile all the same.
    return set(visited) == due or (not due and 0 <= first < end <= tiles)


def walks(room):
    """Whether each of some hundred walks is right."""
    drawn = np.random.default_rng(1)
    for _ in range(60):
        query, kv = drawn.integers(1, 500, 2).tolist()
        least, most = (
            x if drawn.integers(3) else None for x in drawn.integers(-query, kv, 2).tolist()
        )
        band = Band(least=least, most=most).within(query, kv)
        rows, keys = ((128, 128), (192, 64), (128, 64))[drawn.integers(3)]
        for block in range(-(-query // rows)):
            yield is_right(room, query, kv, band, rows, keys, block)


@pytest.mark.usefixtures("_interpreted")
def test_every_tile_that_is_seen_is_visited():
    assert all(walks(flash3_forward))


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("fault", PLANTED["flash3_forward"])
def test_a_wrong_walk_is_noticed(fault, tmp_path):
    copy = copy_kernels(tmp_path, ("tile", "flash3_forward"), **PLANTED["flash3_forward"][fault])
    assert not all(walks(copy.flash3_forward))


@triton.jit
def numbered(out_ptr, blocks, together, NUMBER: tl.constexpr, PLACE: tl.constexpr):  # noqa: N803
    number = tl.program_id(0)
    block, bh = PLACE(number, blocks, together)
    tl.store(out_ptr + number, NUMBER(block, bh, blocks, together))


@pytest.mark.usefixtures("_interpreted")
def test_a_flag_stands_where_the_careful_launch_looks():
    out = torch.full((35,), -1, dtype=torch.int32)
    numbered[(35,)](out, 5, 7, tile.number_of, tile.place)
    assert out.tolist() == list(range(35))


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("mask", [CAUSAL, DOCUMENT], ids=str)
def test_what_it_does_not_take_the_other_kernel_does(mask):
    """Here: everything, since there is no such GPU."""
    problem = Problem(heads=2, query=70, head_dim=64, dtype="bf16", mask=mask)
    inputs = draw_inputs(problem)
    one, other = Flash3().run(inputs), Flash2(dense=True).run(inputs)
    assert torch.equal(one.out, other.out)
    assert torch.equal(one.lse, other.lse)


def test_a_descriptor_has_an_address_that_tma_takes_and_keeps_no_other_memory():
    moved = torch.arange(70 * 64 + 1).bfloat16()[1:].view(1, 1, 70, 64)
    assert moved.data_ptr() % 16
    columns = torch.ones(1, 1, 64, 70, dtype=torch.bfloat16).mT
    plain = torch.zeros(1, 1, 70, 64, dtype=torch.bfloat16)
    for x, is_copied in ((moved, True), (columns, True), (plain, False)):
        base = flash3_forward.descriptor(x, 64).base
        assert base.data_ptr() % 16 == 0
        assert torch.equal(base, x)
        assert (base is not x) == is_copied
    # Of the next tensor all but the address is the same.
    kept = flash3_forward._descriptor_of(plain.shape, plain.stride(), plain.dtype, 64, 64)
    assert kept.base.numel() == 0


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("kv", [16, 70, 300])
def test_fp8_values_are_turned_in_the_order_of_their_weights(kv):
    """Keys 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15 of every 16, and zeros behind the last."""
    wide = -(-kv // 16) * 16
    whole = torch.arange(2 * 3 * wide * 48).view(2, wide, 3, 48) % 100
    v = whole.to(torch.float8_e4m3fn)[:, :kv].transpose(1, 2)
    order = torch.tensor([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15])
    keys = (torch.arange(wide).view(-1, 16)[:, order]).flatten()
    whole[:, kv:] = 0
    expected = whole.to(torch.float8_e4m3fn).float()[:, keys].permute(0, 2, 3, 1)
    turned = flash3_forward._transposed_descriptor(v, 128)
    assert turned.block_shape == [1, 1, 64, 128]
    assert torch.equal(turned.base.float(), expected)


problem_of = partial(Problem, heads=2, query=70, head_dim=64, dtype="bf16", mask=CAUSAL)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (problem_of(), None),
        (problem_of(dtype="fp16", head_dim=128, value_dim=72, mask=LATER), None),
        (problem_of(head_dim=256, mask=FULL), None),
        (problem_of(dtype="fp32"), "it takes fp16, bf16 and e4m3"),
        (problem_of(dtype="e5m2"), "it takes fp16, bf16 and e4m3"),
        (problem_of(dtype="e4m3", value_dim=48), None),
        (problem_of(dtype="e4m3", value_dim=40), "it takes multiples of 16 up to 256"),
        (problem_of(score=ALIBI), None),
        (problem_of(dtype="e4m3", score=ALIBI), "in e4m3 it takes no score mod"),
        (problem_of(dtype="e4m3", mask=DOCUMENT), None),
        (problem_of(mask=DOCUMENT, score=ALIBI, backward=True), None),
        (problem_of(head_dim=60), "head dims 60 and 60: it takes multiples of 8 up to 256"),
        (problem_of(value_dim=128), "both within the same of 64, 128, 256"),
    ],
    ids=lambda x: str(x)[:70],
)
def test_what_it_takes(problem, reason):
    said = Flash3().unsupported(problem, "cpu")
    assert said is reason is None or (reason is not None and reason in said)


def test_it_needs_hopper():
    assert Flash3().absent("cpu") == "it needs a Hopper GPU (compute capability 9.0)"


def test_other_launches_are_other_tiles():
    problem = problem_of()
    launches = Flash3().launches(problem, "cuda")
    assert {name: str(each.tiling(problem, "cuda")) for name, each in launches.items()} == {
        "64 keys": "192×64 reverse",
        "other waits": "192×128 reverse",
    }


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_a_group_of_rows_leaves_out_only_tiles_that_it_does_not_see(data):
    """And visits all from the first to the last that it sees: one tile if it sees none."""
    groups, rows, tiles = (data.draw(st.integers(1, most)) for most in (3, 5, 6))
    drawn = data.draw(st.lists(st.integers(0, 2), min_size=rows * tiles, max_size=rows * tiles))
    kinds = torch.tensor(drawn, dtype=torch.uint8).view(1, 1, rows, tiles)
    mask = BlockMask(kinds=kinds, query=rows * 4, kv=tiles * 8, block_query=4, block_kv=8)
    visits = VisitList(*list_visits(mask, groups), groups=groups)
    for block, spans in enumerate(visits.spans[0, 0].tolist()):
        own = kinds[0, 0, block * groups : (block + 1) * groups]
        listed = own[:, own.amax(0) > 0]
        for group, (before, visited, after) in enumerate(spans):
            assert before + visited + after == max(1, listed.shape[1])
            seen = listed[group].nonzero().flatten().tolist() if group < len(own) else []
            if seen:
                assert (before, before + visited - 1) == (seen[0], seen[-1])
            else:
                assert visited == 1


def test_a_list_for_another_number_of_groups_is_refused():
    problem = Problem(**SIZES, dtype="bf16", mask=MASKS[0])
    shape = Flash3()._chosen(problem, "cpu")
    tiles = visited_tiles(problem, shape.rows, shape.keys, "cpu")
    with pytest.raises(UsageError, match=r"tiles lists .* of 1 group\(s\) .*: this kernel has 3\."):
        tiles.check("tiles", (300, shape.rows), (300, shape.keys), groups=shape.groups)


def test_tiles_come_from_the_last_back_but_in_a_list():
    for mask, order in ((CAUSAL, " reverse"), (WINDOW, " reverse"), (DOCUMENT, "")):
        tiling = Flash3().tiling(problem_of(mask=mask), "cpu")
        assert str(tiling) == f"192×128{order}"


@pytest.mark.parametrize(
    ("score", "tile"),
    [
        (ALIBI, "192×128"),
        (Spec.of("temperature", temperature=3.0), "192×128"),
        (Spec.of("expression", text="where(h < 1, score, 0.5 * score)"), "192×128"),
        (Spec.of("expression", text="where(q_idx < 9, score, 0.5 * score)"), "192×64"),
        (Spec.of("relative_bias", distance=9, seed=1), "192×64"),
        (Spec.of("softcap", cap=2.0), "128×64"),
    ],
    ids=str,
)
def test_what_a_mod_does_for_each_score_chooses_the_tiles(score, tile):
    assert str(Flash3().tiling(problem_of(score=score), "cpu")) == f"{tile} reverse"
    heavy = Spec.of("expression", text="q_idx // 7 >= kv_idx // 7")
    assert str(Flash3().tiling(problem_of(score=score, mask=heavy), "cpu")) == "128×64"


CALLEES = ("walk", "_write_slot", "_read_slot", "_find_block", "_publish_block",
           "_await_block", "_copy", "_listed_tile", "_offsets", "_apply_score_mod", "_apply_mask",
           "_leave_tile_out",
           "_scale_scores", "_update_softmax", "_row_maxima", "_row_sums", "_scale_max", "_base",
           "_round_weights", "_value_tile", "_attend")  # fmt: skip
OF_TILES = ("place", "number_of", "listed")


@pytest.fixture
def emulate(monkeypatch):
    """``emulate(room)``: its kernel's Python in place of the kernel, by two programs."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    monkeypatch.setattr(Flash3, "absent", lambda self, device: None)

    def patched(room):
        callees = [getattr(room, name) for name in CALLEES]
        kernel = Emulated(room._forward, [*callees, *(getattr(tile, name) for name in OF_TILES)], 2)
        monkeypatch.setattr(room, "_forward", kernel)
        monkeypatch.setattr(room, "on_hopper", lambda device: True)
        monkeypatch.setattr(room, "multiprocessors", lambda device: 2)
        return room.flash3_forward

    return patched


@pytest.fixture
def emulated(emulate):
    """Outputs of its kernel's Python, of a problem's inputs."""
    emulate(flash3_forward)
    return lambda inputs: Flash3().run(inputs)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "e4m3"])
@pytest.mark.parametrize("scale", [0.125, -0.1, 0.0, 2.0**33])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, Spec.of("sliding_window", window=130)], ids=str)
def test_what_it_gives_is_within_the_bounds(mask, scale, dtype, emulated):
    """With scores of 2^33 too, where one key has most of a row, and with factors below 0."""
    problem = Problem(**SIZES, dtype=dtype, mask=mask, scale=scale)
    # Where one key has a row the ideal kernel errs by nothing, and any distance from it warns.
    assert judge_emulated(problem) in {"pass", "warn"}
    inputs = draw_inputs(problem)
    one, other = emulated(inputs).out.double(), Flash2().run(inputs).out.double()
    # Of each a weight and a sum are rounded: two roundings of up to u, in no known direction.
    assert (one - other).norm() <= 2 * FORMATS[dtype].unit_roundoff * other.norm()


SIZES = {"heads": 6, "kv_heads": 2, "query": 300, "head_dim": 64}


def judge_emulated(problem, subject=None):
    """The status of what the emulated kernel gives."""
    return run_case(subject or Flash3(), Case(problem=problem), device="cpu", brief=True).status


# Among them a block of rows that sees no key, tiles that are wholly visible between others, and
# heads with lists of their own.
BELOW = Spec.of("offset", Spec.of("sliding_window", window=400), rows=299)  # no limit above
# Of the tiles of a block each warpgroup sees others, and most of them wholly.
STEPS = Spec.of("expression", text="kv_idx // 128 == q_idx // 64")
MASKS = [
    Spec.of("document", lengths=[150, 20, 130]),
    Spec.of("expression", text="(q_idx - kv_idx) % 3 < 2"),
    BELOW,
    Spec.of("expression", text="(q_idx >= 200) & (kv_idx % 150 < 40)"),
    Spec.of("prefix_lm", prefix=130),
    Spec.of("expression", text="kv_idx <= q_idx + 40 * h"),
]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "e4m3"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.usefixtures("emulated")
def test_any_mask_is_within_the_bounds(mask, dtype):
    assert judge_emulated(Problem(**SIZES, dtype=dtype, mask=mask)) == "pass"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "score",
    [ALIBI, Spec.of("softcap", cap=2.0), Spec.of("relative_bias", distance=9, seed=1),
     Spec.of("expression", text="where(kv_idx == q_idx, 2.0, score)")],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("mask", [FULL, CAUSAL, MASKS[0]], ids=str)
@pytest.mark.usefixtures("emulated")
def test_any_score_mod_is_within_the_bounds(mask, score, dtype):
    problem = Problem(**SIZES, dtype=dtype, mask=mask, score=score, scale=-0.1)
    assert judge_emulated(problem) == "pass"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_row_of_nan_has_no_lse_beside_a_score_mod(dtype, emulated):
    """No maximum keeps a NaN: the row would look as if it saw no key."""
    inputs = draw_inputs(Problem(**SIZES, dtype=dtype, score=ALIBI))
    q = inputs.q.clone()
    q[:, :, 5] = torch.nan
    lse = emulated(inputs.replace(q=q)).lse
    assert lse[:, :, 5].isnan().all()
    assert lse.isfinite().sum() == lse.numel() - lse[:, :, 5].numel()


@pytest.mark.parametrize("fault", PLANTED["flash3_mods"])
def test_a_wrong_mask_or_mod_is_not(fault, emulate, tmp_path, monkeypatch):
    copy = copy_kernels(tmp_path, ("tile", "flash3_forward"), **PLANTED["flash3_mods"][fault])
    monkeypatch.setattr(tile, "listed", copy.tile.listed)
    launcher = emulate(copy.flash3_forward)

    class Emulation(Flash3):
        def forward(self):
            return launcher

    sizes = {**SIZES, "kv_heads": 6}
    problems = [
        Problem(**sizes, dtype="bf16", mask=MASKS[0]),
        Problem(**sizes, dtype="bf16", mask=MASKS[-1]),
        Problem(**sizes, dtype="bf16", mask=MASKS[1]),
        Problem(**sizes, dtype="bf16", mask=BELOW),
        Problem(**sizes, dtype="bf16", mask=STEPS),
        # Of one row of a warpgroup the last key, or the first, of a whole tile is hidden.
        Problem(**sizes, dtype="bf16", mask=Spec.of("sliding_window", window=191)),
        Problem(**sizes, kv=426, dtype="bf16", mask=BOTTOM_RIGHT),
        *(Problem(**sizes, dtype=dtype, score=ALIBI) for dtype in ("bf16", "fp16")),
    ]
    assert any(judge_emulated(problem, Emulation()) == "fail" for problem in problems)


MANY_TILES = {"heads": 1, "query": 300, "kv": 900, "head_dim": 64, "dtype": "bf16"}


@pytest.mark.parametrize(
    "problem",
    [
        *(Problem(**MANY_TILES | {"head_dim": dim}, mask=CAUSAL) for dim in (64, 128, 256)),
        *(Problem(**MANY_TILES | {"head_dim": dim, "dtype": "e4m3"}) for dim in (64, 128)),
        *(Problem(**MANY_TILES, mask=mask, score=ALIBI) for mask in (CAUSAL, MASKS[-1])),
        *(Problem(**MANY_TILES | {"head_dim": dim}, mask=CAUSAL, score=Spec.of("softcap", cap=2.0))
          for dim in (64, 128)),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.usefixtures("emulated")
def test_it_waits_for_nothing_that_may_have_gone_on(problem, monkeypatch):
    """A barrier tells two phases apart: who comes two late waits for one that needs them."""
    dawdle(monkeypatch)
    assert judge_emulated(problem) == "pass"


@pytest.mark.parametrize(
    "problem",
    [
        Problem(**MANY_TILES | {"head_dim": 256}),
        Problem(**MANY_TILES | {"head_dim": 128, "dtype": "e4m3", "query": 400}),
        # Of the second block's warpgroups one has no row, and would begin behind the last tile.
        Problem(**MANY_TILES | {"query": 200}),
    ],
    ids=str,
)
@pytest.mark.usefixtures("emulated")
def test_no_tile_that_is_left_out_is_waited_for_by_all(problem, monkeypatch):
    """In small tiles a warpgroup leaves out as many as shared memory has room for."""
    dawdle(monkeypatch)
    steps = Spec.of("expression", text="kv_idx // 300 == q_idx // 64")
    for mask in (Spec.of("sliding_window", window=130), steps):
        asked = problem.replace(mask=mask)
        for kernel in (Flash3(), *Flash3().launches(asked, "cpu").values()):
            assert judge_emulated(asked, kernel) == "pass"


@pytest.mark.parametrize("fault", PLANTED["flash3_waits"])
def test_a_wait_that_comes_too_late_is_noticed(fault, emulate, tmp_path, monkeypatch):
    copy = copy_kernels(tmp_path, ("tile", "flash3_forward"), **PLANTED["flash3_waits"][fault])
    launcher = emulate(copy.flash3_forward)
    dawdle(monkeypatch)

    class Emulation(Flash3):
        def forward(self):
            return launcher

    assert judge_emulated(Problem(**MANY_TILES), Emulation()) == "error"


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "e4m3"])
@pytest.mark.usefixtures("emulated")
def test_a_factor_that_is_wrong_is_not(dtype, monkeypatch):
    monkeypatch.setattr(flash3_forward, "LOG2E", 1.0)
    assert judge_emulated(Problem(**SIZES, dtype=dtype, mask=CAUSAL)) == "fail"


HIDDEN = [CAUSAL, BOTTOM_RIGHT, Spec.of("sliding_window", window=130),
          Spec.of("document", lengths=[120, 140])]  # fmt: skip


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("mask", HIDDEN, ids=str)
def test_a_value_that_is_not_finite_moves_no_bit_of_rows_that_do_not_see_it(
    mask, kept, emulated, monkeypatch
):
    """Nor of other columns; a row that sees one has what the other kernel's careful launch says."""
    if not kept:  # the other kernel's bits, whatever a row sees
        everything = lambda *_, **__: lambda q, *_, **__: (q.new_ones(()), q.new_ones(()))  # noqa: E731
        monkeypatch.setattr(flash3_forward, "partial", everything)
    sizes = {"heads": 4, "kv_heads": 2, "query": 200, "kv": 260, "head_dim": 64}
    problem = Problem(**sizes, dtype="bf16", mask=mask)
    inputs = draw_inputs(problem)
    v = inputs.v.clone()
    v[:, 1, 150, 5:9] = torch.nan
    v[:, 0, 90, 7] = torch.inf
    right, got = emulated(inputs), emulated(inputs.replace(v=v))
    marks = (~v.isfinite()).repeat_interleave(2, 1).double()
    sees = torch.einsum("qk,bhkd->bhqd", shown(problem).double(), marks) > 0
    assert sees.any()
    assert not got.out[sees].isfinite().any()
    assert torch.equal(got.out[sees].isnan(), Flash2().run(inputs.replace(v=v)).out[sees].isnan())
    alike = torch.equal(got.out[~sees], right.out[~sees]) and torch.equal(got.lse, right.lse)
    assert alike == kept


@pytest.mark.parametrize("mask", HIDDEN, ids=str)
def test_a_key_that_is_not_finite_moves_no_bit_of_rows_that_do_not_see_it(mask, emulated):
    problem = Problem(heads=2, query=200, kv=260, head_dim=64, dtype="bf16", mask=mask)
    inputs = draw_inputs(problem)
    k = inputs.k.clone()
    k[:, :, 100] = torch.nan
    right, got = emulated(inputs), emulated(inputs.replace(k=k))
    sees = shown(problem)[:, 100]
    assert got.out[:, :, sees].isnan().all()
    assert torch.equal(got.out[:, :, ~sees], right.out[:, :, ~sees])
    assert torch.equal(got.lse[:, :, ~sees], right.lse[:, :, ~sees])
