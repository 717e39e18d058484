"""FlashAttention-3's forward without a GPU: the walk over tiles in Triton's interpreter, and the
whole kernel with its Gluon source run as Python, in an emulation.

Whether its waits suffice on hardware, and its speed, can be tested on a GPU only.
"""

from functools import partial

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.gluon_emulation import EmulatedKernel, delay_arrivals
from tests.kernels.patched_kernels import PLANTED, copy_kernels

from attncheck.core.errors import UsageError
from attncheck.core.formats import FORMATS
from attncheck.core.mod_spec import FULL, Spec
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.mods.block_mask import BlockMask, list_visits
from attncheck.mods.masks import Band, band_of
from attncheck.subjects import triton_flash
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
problem_of = partial(Problem, heads=2, query=70, head_dim=64, dtype="bf16", mask=CAUSAL)


@pytest.fixture
def _interpreted():
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here, and these tests have no tensors on the GPU")


def visible_by_mask(problem: Problem) -> torch.Tensor:
    """Which keys each row sees: (rows, keys)."""
    rows, keys = torch.arange(problem.query)[:, None], torch.arange(problem.kv)[None]
    zero = torch.zeros((), dtype=torch.int32)
    return problem.mask_mod("cpu")(zero, zero, rows, keys).expand(problem.query, problem.kv)


def visible_by_band(band: Band, query: int, kv: int) -> torch.Tensor:
    distance = torch.arange(kv)[None] - torch.arange(query)[:, None]
    visible = torch.ones_like(distance, dtype=torch.bool)
    if band.least is not None:
        visible &= distance >= band.least
    if band.most is not None:
        visible &= distance <= band.most
    return visible


@pytest.mark.parametrize("query", [50, 90])
@pytest.mark.parametrize(
    "mask",
    [FULL, CAUSAL, BOTTOM_RIGHT, WINDOW, LATER, Spec.of("sliding_window", window=0),
     Spec.of("and", CAUSAL, LATER), Spec.of("offset", BOTTOM_RIGHT, rows=7)],
    ids=str,
)  # fmt: skip
def test_band_shows_the_same_keys_as_its_mask(mask, query):
    problem = Problem(heads=1, query=query, kv=70, head_dim=64, dtype="bf16", mask=mask)
    band = band_of(mask, problem.dimensions)
    assert band is not None
    for each in (band, band.within(query, 70)):
        assert torch.equal(visible_by_band(each, query, 70), visible_by_mask(problem))
    assert band_of(FULL, problem.dimensions) == Band()


def test_limits_of_a_band_beyond_32_bits_are_dropped_or_clipped():
    """The kernel gets limits as 32-bit numbers, so no limit may exceed the lengths by much."""
    assert Band(least=-(2**40), most=2**40).within(50, 70) == Band()
    assert Band(least=2**40).within(50, 70) == Band(least=70)


@triton.jit
def walk_kernel(  # noqa: PLR0917
    out_ptr, block, query, kv, least, most, WALK: tl.constexpr, ROWS: tl.constexpr,  # noqa: N803
    KEYS: tl.constexpr, UPPER: tl.constexpr, LOWER: tl.constexpr,  # noqa: N803
):  # fmt: skip
    first, end = WALK(block, query, kv, least, most, ROWS, KEYS, UPPER, LOWER)
    tl.store(out_ptr, first)
    tl.store(out_ptr + 1, end)


def visits_visible_tiles(
    module, query: int, kv: int, band: Band, rows: int, keys: int, block: int
) -> bool:
    """Whether the walk of a block covers the tiles that its rows see, and no others."""
    out = torch.full((2,), -1, dtype=torch.int32)
    walk_kernel[(1,)](
        out, block, query, kv, band.least or 0, band.most or 0, module.walk, rows, keys,
        band.most is not None, band.least is not None,
    )  # fmt: skip
    first, end = out.tolist()
    tiles = -(-kv // keys)
    visible = torch.zeros(query, tiles * keys, dtype=torch.bool)
    visible[:, :kv] = visible_by_band(band, query, kv)
    by_tile = visible[block * rows : (block + 1) * rows].unflatten(1, (tiles, keys))
    expected = {i for i in range(tiles) if by_tile[:, i].any()}
    # A block that sees nothing visits some tile all the same.
    return set(range(first, end)) == expected or (not expected and 0 <= first < end <= tiles)


def walks_are_right(module) -> bool:
    """Whether ``module.walk`` is right for every block of 60 random lengths, bands and tiles."""
    rng = np.random.default_rng(1)
    for _ in range(60):
        query, kv = rng.integers(1, 500, 2).tolist()
        least, most = (x if rng.integers(3) else None for x in rng.integers(-query, kv, 2).tolist())
        band = Band(least=least, most=most).within(query, kv)
        rows, keys = ((128, 128), (192, 64), (128, 64))[rng.integers(3)]
        for block in range(-(-query // rows)):
            if not visits_visible_tiles(module, query, kv, band, rows, keys, block):
                return False
    return True


@pytest.mark.usefixtures("_interpreted")
def test_walk_visits_exactly_the_visible_tiles():
    assert walks_are_right(flash3_forward)


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("fault", PLANTED["flash3_forward"])
def test_planted_fault_in_the_walk_is_detected(fault, tmp_path):
    copy = copy_kernels(tmp_path, ("tile", "flash3_forward"), **PLANTED["flash3_forward"][fault])
    assert not walks_are_right(copy.flash3_forward)


@triton.jit
def renumber(out_ptr, blocks, together, NUMBER: tl.constexpr, PLACE: tl.constexpr):  # noqa: N803
    number = tl.program_id(0)
    block, bh = PLACE(number, blocks, together)
    tl.store(out_ptr + number, NUMBER(block, bh, blocks, together))


@pytest.mark.usefixtures("_interpreted")
def test_number_of_inverts_place():
    """A block is flagged at ``number_of``; the careful launch reads the flag at its own number."""
    out = torch.full((35,), -1, dtype=torch.int32)
    renumber[(35,)](out, 5, 7, tile.number_of, tile.place)
    assert out.tolist() == list(range(35))


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("mask", [CAUSAL, DOCUMENT], ids=str)
def test_flash2_runs_instead_without_a_hopper_gpu(mask):
    inputs = draw_inputs(problem_of(mask=mask))
    outputs, expected = Flash3().run(inputs), Flash2(dense=True).run(inputs)
    assert torch.equal(outputs.out, expected.out)
    assert torch.equal(outputs.lse, expected.lse)


def test_descriptor_copies_only_tensors_that_tma_cannot_read():
    """TMA needs addresses that 16 divides, and contiguous columns."""
    shifted = torch.arange(70 * 64 + 1).bfloat16()[1:].view(1, 1, 70, 64)
    assert shifted.data_ptr() % 16
    columns = torch.ones(1, 1, 64, 70, dtype=torch.bfloat16).mT
    plain = torch.zeros(1, 1, 70, 64, dtype=torch.bfloat16)
    for x, is_copied in ((shifted, True), (columns, True), (plain, False)):
        base = flash3_forward.descriptor(x, 64).base
        assert base.data_ptr() % 16 == 0
        assert torch.equal(base, x)
        assert (base is not x) == is_copied
    # The cached descriptor, which differs by its address only, must not keep a tensor alive.
    cached = flash3_forward._descriptor_of(plain.shape, plain.stride(), plain.dtype, 64, 64)
    assert cached.base.numel() == 0


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("kv", [16, 70, 300])
def test_fp8_values_are_transposed_in_the_order_of_their_weights(kv):
    """That order is 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15 of every 16 keys; zeros pad them."""
    wide = -(-kv // 16) * 16
    whole = torch.arange(2 * 3 * wide * 48).view(2, wide, 3, 48) % 100
    v = whole.to(torch.float8_e4m3fn)[:, :kv].transpose(1, 2)
    order = torch.tensor([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15])
    keys = (torch.arange(wide).view(-1, 16)[:, order]).flatten()
    whole[:, kv:] = 0
    expected = whole.to(torch.float8_e4m3fn).float()[:, keys].permute(0, 2, 3, 1)
    transposed = flash3_forward._transposed_descriptor(v, 128)
    assert transposed.block_shape == [1, 1, 64, 128]
    assert torch.equal(transposed.base.float(), expected)


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
def test_unsupported_problems_have_a_reason(problem, reason):
    message = Flash3().unsupported(problem, "cpu")
    assert message is reason is None or (reason is not None and reason in message)


def test_hopper_gpu_is_required():
    assert Flash3().absent("cpu") == "it needs a Hopper GPU (compute capability 9.0)"


def test_tilings_of_the_alternative_launches():
    problem = problem_of()
    launches = Flash3().launches(problem, "cuda")
    assert {name: str(each.tiling(problem, "cuda")) for name, each in launches.items()} == {
        "64 keys": "192×64 reverse",
        "other waits": "192×128 reverse",
    }


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_span_of_a_group_covers_the_tiles_that_it_sees(data):
    """Of its block's tiles, a warpgroup's rows visit the first to the last that they see.

    Where they see none they visit one.
    """
    groups, rows, tiles = (data.draw(st.integers(1, most)) for most in (3, 5, 6))
    values = data.draw(st.lists(st.integers(0, 2), min_size=rows * tiles, max_size=rows * tiles))
    kinds = torch.tensor(values, dtype=torch.uint8).view(1, 1, rows, tiles)
    mask = BlockMask(kinds=kinds, query=rows * 4, kv=tiles * 8, block_query=4, block_kv=8)
    visits = VisitList(*list_visits(mask, groups), groups=groups)
    for block, spans in enumerate(visits.spans[0, 0].tolist()):
        own = kinds[0, 0, block * groups : (block + 1) * groups]
        listed = own[:, own.amax(0) > 0]
        for group, (before, visited, after) in enumerate(spans):
            assert before + visited + after == max(1, listed.shape[1])
            visible = listed[group].nonzero().flatten().tolist() if group < len(own) else []
            if visible:
                assert (before, before + visited - 1) == (visible[0], visible[-1])
            else:
                assert visited == 1


@pytest.mark.parametrize(
    ("groups", "longer", "message"),
    [
        (1, 0, r"tiles lists .* of 1 group\(s\) of rows per block: this kernel has 3\."),
        (3, 100, r"tiles lists tile 3, counted from 0: 300 in tiles of 128 are 3\."),
    ],
    ids=["groups", "tiles"],
)
def test_visit_list_that_does_not_fit_the_launch_is_refused(
    groups, longer, message, run_emulated, monkeypatch
):
    problem = Problem(**SIZES, dtype="bf16", mask=MASKS[-1])
    other = problem.replace(kv=300 + longer)
    rows = 64 * (3 // groups)
    lists = lambda _, __, keys, device, **___: visited_tiles(  # noqa: E731
        other, rows, keys, device, groups=groups
    )
    monkeypatch.setattr(triton_flash, "visited_tiles", lists)
    with pytest.raises(UsageError, match=message):
        run_emulated(draw_inputs(problem))


def test_tiles_are_visited_in_reverse_unless_listed():
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
def test_tile_sizes_depend_on_the_cost_of_the_mods(score, tile):
    """Mods that read or compare for every score get tiles of 64 keys; so do costly masks."""
    assert str(Flash3().tiling(problem_of(score=score), "cpu")) == f"{tile} reverse"
    heavy = Spec.of("expression", text="q_idx // 7 >= kv_idx // 7")
    assert str(Flash3().tiling(problem_of(score=score, mask=heavy), "cpu")) == "128×64"


CALLEES = ("walk", "_write_slot", "_read_slot", "_find_block", "_publish_block",
           "_await_block", "_copy", "_listed_tile", "_offsets", "_apply_score_mod", "_apply_mask",
           "_leave_tile_out",
           "_scale_scores", "_update_softmax", "_row_maxima", "_row_sums", "_scale_max", "_base",
           "_round_weights", "_value_tile", "_attend")  # fmt: skip
TILE_CALLEES = ("place", "number_of", "listed")


@pytest.fixture
def emulate(monkeypatch):
    """``emulate(module)``: replace the module's kernel by an emulation of its source.

    Two programs share the work; returns the module's launcher.
    """
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    monkeypatch.setattr(Flash3, "absent", lambda self, device: None)

    def emulate(module):
        callees = [getattr(module, name) for name in CALLEES]
        callees += [getattr(tile, name) for name in TILE_CALLEES]
        monkeypatch.setattr(module, "_forward", EmulatedKernel(module._forward, callees, 2))
        monkeypatch.setattr(module, "on_hopper", lambda device: True)
        monkeypatch.setattr(module, "multiprocessors", lambda device: 2)
        return module.flash3_forward

    return emulate


@pytest.fixture
def run_emulated(emulate):
    """``run_emulated(inputs)``: outputs of the emulated kernel, which stays in place."""
    emulate(flash3_forward)
    return Flash3().run


SIZES = {"heads": 6, "kv_heads": 2, "query": 300, "head_dim": 64}


class Flash3By(Flash3):
    """FlashAttention-3 by the launcher of a patched copy."""

    def __init__(self, launcher) -> None:
        super().__init__()
        self.launcher = launcher

    def forward(self):
        return self.launcher


def judge_emulated(problem, subject=None):
    """The status of the emulated kernel's outputs."""
    return run_case(subject or Flash3(), Case(problem=problem), device="cpu", brief=True).status


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "e4m3"])
@pytest.mark.parametrize("scale", [0.125, -0.1, 0.0, 2.0**33])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, Spec.of("sliding_window", window=130)], ids=str)
def test_output_is_within_the_bounds_at_every_scale(mask, scale, dtype, run_emulated):
    """A scale of 2^33 gives one key most of a row's weight; one below 0 makes maxima minima."""
    problem = Problem(**SIZES, dtype=dtype, mask=mask, scale=scale)
    # Where one key has all weight the ideal kernel has no error, and any distance from it warns.
    assert judge_emulated(problem) in {"pass", "warn"}
    inputs = draw_inputs(problem)
    out, expected = run_emulated(inputs).out.double(), Flash2().run(inputs).out.double()
    # Either kernel rounds weights and sums: two roundings of up to u, in no known direction.
    assert (out - expected).norm() <= 2 * FORMATS[dtype].unit_roundoff * expected.norm()


# Among them a block of rows that sees no key, tiles that are wholly visible between others, and
# heads with lists of their own.
BELOW = Spec.of("offset", Spec.of("sliding_window", window=400), rows=299)  # no limit above
# Each warpgroup of a block sees other tiles than the next, and most of them wholly.
STEPS = Spec.of("expression", text="kv_idx // 128 == q_idx // 64")
# Between tiles that a warpgroup sees there are tiles that only its neighbours see, and of a second
# sequence they are the other way round.
CHEQUERED = Spec.of("expression", text="(kv_idx // 128 + q_idx // 64 + b) % 2 == 0")
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
@pytest.mark.usefixtures("run_emulated")
def test_output_with_masks_is_within_the_bounds(mask, dtype):
    assert judge_emulated(Problem(**SIZES, dtype=dtype, mask=mask)) == "pass"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "score",
    [ALIBI, Spec.of("softcap", cap=2.0), Spec.of("relative_bias", distance=9, seed=1),
     Spec.of("expression", text="where(kv_idx == q_idx, 2.0, score)")],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("mask", [FULL, CAUSAL, MASKS[0]], ids=str)
@pytest.mark.usefixtures("run_emulated")
def test_output_with_score_mods_is_within_the_bounds(mask, score, dtype):
    problem = Problem(**SIZES, dtype=dtype, mask=mask, score=score, scale=-0.1)
    assert judge_emulated(problem) == "pass"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_lse_of_a_nan_row_is_nan_with_a_score_mod(dtype, run_emulated):
    """A GPU's maximum drops NaN: the row must not look as if it saw no key (LSE −∞)."""
    inputs = draw_inputs(Problem(**SIZES, dtype=dtype, score=ALIBI))
    q = inputs.q.clone()
    q[:, :, 5] = torch.nan
    lse = run_emulated(inputs.replace(q=q)).lse
    assert lse[:, :, 5].isnan().all()
    assert lse.isfinite().sum() == lse.numel() - lse[:, :, 5].numel()


@pytest.mark.parametrize("fault", PLANTED["flash3_mods"])
def test_planted_fault_in_masks_or_mods_fails(fault, emulate, tmp_path, monkeypatch):
    copy = copy_kernels(tmp_path, ("tile", "flash3_forward"), **PLANTED["flash3_mods"][fault])
    monkeypatch.setattr(tile, "listed", copy.tile.listed)
    subject = Flash3By(emulate(copy.flash3_forward))
    sizes = {**SIZES, "kv_heads": 6}
    problems = [
        Problem(**sizes, dtype="bf16", mask=MASKS[0]),
        Problem(**sizes, dtype="bf16", mask=MASKS[-1]),
        Problem(**sizes, dtype="bf16", mask=MASKS[1]),
        Problem(**sizes, dtype="bf16", mask=BELOW),
        Problem(**sizes, dtype="bf16", mask=STEPS),
        Problem(**sizes | {"query": 384}, batch=2, dtype="bf16", mask=CHEQUERED),
        # One row of a warpgroup does not see the last key, or the first, of an otherwise full tile.
        Problem(**sizes, dtype="bf16", mask=Spec.of("sliding_window", window=191)),
        Problem(**sizes, kv=426, dtype="bf16", mask=BOTTOM_RIGHT),
        *(Problem(**sizes, dtype=dtype, score=ALIBI) for dtype in ("bf16", "fp16")),
    ]
    assert any(judge_emulated(problem, subject) == "fail" for problem in problems)


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
@pytest.mark.usefixtures("run_emulated")
def test_no_wait_depends_on_timing(problem, monkeypatch):
    """A barrier tells only two phases apart: a wait for a phase that has passed may never end."""
    delay_arrivals(monkeypatch)
    assert judge_emulated(problem) == "pass"


@pytest.mark.parametrize(
    "problem",
    [
        Problem(**MANY_TILES | {"head_dim": 256}),
        Problem(**MANY_TILES | {"head_dim": 128, "dtype": "e4m3", "query": 400}),
        # One of the second block's warpgroups has no row, and would start beyond the last tile.
        Problem(**MANY_TILES | {"query": 200}),
    ],
    ids=str,
)
@pytest.mark.usefixtures("run_emulated")
def test_no_wait_hangs_where_warpgroups_leave_tiles_out(problem, monkeypatch):
    """With small tiles a warpgroup leaves out as many as fit in shared memory."""
    delay_arrivals(monkeypatch)
    steps = Spec.of("expression", text="kv_idx // 300 == q_idx // 64")
    for mask in (Spec.of("sliding_window", window=130), steps):
        masked = problem.replace(mask=mask)
        for kernel in (Flash3(), *Flash3().launches(masked, "cpu").values()):
            assert judge_emulated(masked, kernel) == "pass"


@pytest.mark.parametrize("fault", PLANTED["flash3_waits"])
def test_planted_late_wait_is_detected(fault, emulate, tmp_path, monkeypatch):
    copy = copy_kernels(tmp_path, ("tile", "flash3_forward"), **PLANTED["flash3_waits"][fault])
    subject = Flash3By(emulate(copy.flash3_forward))
    delay_arrivals(monkeypatch)
    assert judge_emulated(Problem(**MANY_TILES), subject) == "error"


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "e4m3"])
@pytest.mark.usefixtures("run_emulated")
def test_wrong_factor_of_scores_fails(dtype, monkeypatch):
    monkeypatch.setattr(flash3_forward, "LOG2E", 1.0)
    assert judge_emulated(Problem(**SIZES, dtype=dtype, mask=CAUSAL)) == "fail"


HIDING_MASKS = [CAUSAL, BOTTOM_RIGHT, Spec.of("sliding_window", window=130),
                Spec.of("document", lengths=[120, 140])]  # fmt: skip


@pytest.mark.parametrize("rerun", [True, False])
@pytest.mark.parametrize("mask", HIDING_MASKS, ids=str)
def test_nonfinite_values_change_no_bit_where_they_are_hidden(
    mask, rerun, run_emulated, monkeypatch
):
    """Rows that do not see them and other columns keep their bits, thanks to the rerun.

    Rows that see one are NaN where those of FlashAttention-2 are.
    """
    if not rerun:  # keeps the bits of FlashAttention-2's careful launch everywhere
        ones = lambda *_, **__: lambda q, *_, **__: (q.new_ones(()), q.new_ones(()))  # noqa: E731
        monkeypatch.setattr(flash3_forward, "partial", ones)
    sizes = {"heads": 4, "kv_heads": 2, "query": 200, "kv": 260, "head_dim": 64}
    problem = Problem(**sizes, dtype="bf16", mask=mask)
    inputs = draw_inputs(problem)
    v = inputs.v.clone()
    v[:, 1, 150, 5:9] = torch.nan
    v[:, 0, 90, 7] = torch.inf
    clean, outputs = run_emulated(inputs), run_emulated(inputs.replace(v=v))
    marks = (~v.isfinite()).repeat_interleave(2, 1).double()
    sees = torch.einsum("qk,bhkd->bhqd", visible_by_mask(problem).double(), marks) > 0
    assert sees.any()
    assert not outputs.out[sees].isfinite().any()
    expected = Flash2().run(inputs.replace(v=v)).out[sees]
    assert torch.equal(outputs.out[sees].isnan(), expected.isnan())
    assert torch.equal(outputs.out[~sees], clean.out[~sees]) == rerun
    if rerun:
        assert torch.equal(outputs.lse, clean.lse)


@pytest.mark.parametrize("mask", HIDING_MASKS, ids=str)
def test_nan_key_changes_no_bit_of_rows_that_do_not_see_it(mask, run_emulated):
    problem = Problem(heads=2, query=200, kv=260, head_dim=64, dtype="bf16", mask=mask)
    inputs = draw_inputs(problem)
    k = inputs.k.clone()
    k[:, :, 100] = torch.nan
    clean, outputs = run_emulated(inputs), run_emulated(inputs.replace(k=k))
    sees = visible_by_mask(problem)[:, 100]
    assert outputs.out[:, :, sees].isnan().all()
    assert torch.equal(outputs.out[:, :, ~sees], clean.out[:, :, ~sees])
    assert torch.equal(outputs.lse[:, :, ~sees], clean.lse[:, :, ~sees])
