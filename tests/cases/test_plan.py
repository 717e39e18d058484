"""Plans of ``attncheck rmse``: shapes as typed, and the cells of variants, dtypes and shapes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from attncheck.cases.variants import (
    ALL,
    DEFAULT_SHAPES,
    OPTIONAL_VARIANTS,
    VARIANTS,
    Shape,
    Variant,
    plan_cells,
)
from attncheck.cli.rmse import rmse
from attncheck.core.errors import ProblemError, UnknownName
from attncheck.core.mod_spec import Spec
from attncheck.core.paged_layout import Paging
from attncheck.inputs.problem import Problem


def plan(**changes):
    defaults = {
        "dtypes": ["bf16"],
        "variants": ["causal"],
        "shapes": ["1x4x64x16"],
        "distributions": ["normal"],
        "seed": 0,
    }
    return plan_cells(**(defaults | changes))


def set_memory(monkeypatch, size):
    """Make this machine have ``size`` bytes of memory."""
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": size}.get)


def test_shape_parses_every_size():
    shape = Shape.parse("2x16/4x1024/4096x128/64")
    assert (shape.batch, shape.heads, shape.kv_heads) == (2, 16, 4)
    assert (shape.query, shape.kv, shape.head_dim, shape.value_dim) == (1024, 4096, 128, 64)


def test_shape_fills_in_omitted_sizes():
    shape = Shape.parse("1x4x256x64")
    assert (shape.kv, shape.value_dim, shape.head_counts()) == (256, 64, (4, 2))


@pytest.mark.parametrize(
    ("heads", "counts"),
    [(1, (1,)), (2, (2, 1)), (3, (3, 1)), (4, (4, 2)), (16, (16, 4)), (5, (5, 1))],
)
def test_heads_without_kv_heads_are_planned_as_mha_and_gqa(heads, counts):
    assert Shape.parse(f"1x{heads}x8x8").head_counts() == counts


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4x64",
        "1x4x64",
        "ax4x64x16",
        "1x4/0x64x16",
        "1x4x64x16x2",
        "1 x4x64x16",
        "1x1x" + "9" * 5000 + "x1",
    ],
)
def test_malformed_shape_is_refused(text):
    with pytest.raises(ProblemError, match="BATCHxHEADSxLENGTHxDIM"):
        Shape.parse(text)


@pytest.mark.parametrize(
    "text", ["0x4x64x16", "1x0x64x16", "1x4x0x16", "1x4/3x64x16", "1x4x64x257", "1x4x64x0"]
)
def test_impossible_shape_is_refused(text):
    with pytest.raises(ProblemError):
        plan(shapes=[text])


@pytest.mark.parametrize("length", ["1", "2", "3", "5/2", "2/5", "128"])
def test_every_variant_fits_every_length(length):
    for variants, expected in (
        ([], [*VARIANTS]),
        ([*VARIANTS], [*VARIANTS]),
        ([ALL], [*VARIANTS, *OPTIONAL_VARIANTS]),
    ):
        cells = plan(variants=variants, shapes=[f"1x1x{length}x4"])
        assert [c.variant for c in cells] == expected


ATTENTION = [name for name in VARIANTS if name != "softmax"]
DOCUMENTS = Spec.of("document", lengths=[32, 16, 8, 8])
NONE, FULL, CAUSAL = Spec.of("none"), Spec.of("full"), Spec.of("causal")


@pytest.mark.parametrize(
    ("lengths", "window", "prefix"), [("64/24", 6, 6), ("24/64", 16, 16), ("64/3", 1, 0)]
)
def test_default_variants_scale_with_the_lengths(lengths, window, prefix):
    """Windows and prefixes are parts of the keys; documents cover the longer of the two lengths."""
    cells = plan(variants=ATTENTION, shapes=[f"1x1x{lengths}x4"])
    assert {c.variant: (c.problem.mask, c.problem.score) for c in cells} == {
        "full": (FULL, NONE),
        "causal": (CAUSAL, NONE),
        "alibi": (CAUSAL, Spec.of("alibi")),
        "sliding_window": (Spec.of("sliding_window", window=window), NONE),
        "prefix_lm": (Spec.of("prefix_lm", prefix=prefix), NONE),
        "softcap": (FULL, Spec.of("softcap", cap=20.0)),
        "document": (DOCUMENTS, NONE),
    }


@pytest.mark.parametrize(
    ("lengths", "canvas", "kernel", "tile", "documents"),
    [
        ("64/24", [8, 8], [3, 3], [8, 8], ([32, 16, 8, 8], [6, 12, 3, 3])),
        ("24/64", [8, 8], [3, 3], [8, 8], ([12, 6, 3, 3], [16, 32, 8, 8])),
        ("100", [4, 25], [3, 7], [4, 8], ([50, 25, 12, 13], [25, 50, 12, 13])),
        ("7", [1, 7], [1, 3], [1, 7], ([3, 1, 0, 3], [1, 3, 0, 3])),
    ],
)
def test_optional_variants_scale_with_the_lengths(lengths, canvas, kernel, tile, documents):
    """A canvas has a cell for each position of the longer of the two lengths."""
    window = {"canvas": canvas, "kernel": kernel}
    queries, keys = documents
    cells = plan(variants=list(OPTIONAL_VARIANTS), shapes=[f"1x1x{lengths}x4"])
    bottom_right = Spec.of("causal_bottom_right")
    distance = int(lengths.rpartition("/")[2]) // 4
    assert {c.variant: (c.problem.mask, c.problem.score) for c in cells} == {
        "neighborhood": (Spec.of("neighborhood", **window), NONE),
        "neighborhood_tiled": (Spec.of("neighborhood_tiled", **window, tile=tile), NONE),
        "neighborhood_morton": (Spec.of("neighborhood_morton", **window), NONE),
        "bias": (FULL, Spec.of("bias", seed=0, per_batch=0, per_head=0)),
        "relative_bias": (CAUSAL, Spec.of("relative_bias", distance=distance, seed=0)),
        "varlen": (Spec.of("documents", query_lengths=queries, kv_lengths=keys), NONE),
        "sink": (CAUSAL, NONE),
        "paged": (CAUSAL, NONE),
        "decode": (bottom_right, NONE),
        "paged_decode": (bottom_right, NONE),
    }
    assert canvas[0] * canvas[1] == max(cells[0].problem.query, cells[0].problem.kv)


@pytest.mark.parametrize("backward", [False, True])
def test_only_the_backward_of_relative_bias_asks_for_captured_gradients(backward):
    cells = plan(variants=[ALL], shapes=["1x1x64x4"], backward=backward)
    captured = {c.variant for c in cells if c.problem.dcaptured}
    assert captured == ({"relative_bias"} if backward else set())


def test_only_their_variants_have_sinks_pages_and_few_rows():
    problems = {c.variant: c.problem for c in plan(variants=[ALL], shapes=["1x1x256x4"])}
    assert [name for name, problem in problems.items() if problem.sink] == ["sink"]
    pages = {name: problem.paging for name, problem in problems.items() if problem.paging}
    assert pages == dict.fromkeys(("paged", "paged_decode"), Paging(size=64, seed=1))
    few = {name: (p.query, p.kv) for name, p in problems.items() if p.query < p.kv}
    assert few == {"decode": (4, 256), "paged_decode": (4, 256)}
    (small,) = plan(variants=["paged"], shapes=["1x1x255x4"])
    assert small.problem.paging == Paging(size=16, seed=1)
    (single,) = plan(variants=["decode"], shapes=["1x1x1/9x4"])
    assert single.problem.query == 1


def test_all_absorbs_named_variants_and_omits_softmax_in_fp8():
    cells = plan(variants=["causal", ALL], dtypes=["e4m3"])
    assert {c.variant for c in cells} == {*ATTENTION, *OPTIONAL_VARIANTS}


def test_cell_has_the_requested_problem():
    (cell,) = plan(
        dtypes=["fp16"], shapes=["2x6/3x64/24x16/8"], distributions=["sink"], variants=["causal"]
    )
    assert cell.problem == Problem(
        batch=2,
        heads=6,
        kv_heads=3,
        query=64,
        kv=24,
        head_dim=16,
        value_dim=8,
        dtype="fp16",
        mask=CAUSAL,
        distribution="sink",
    )
    assert plan(seed=5)[0].problem.seed == 5


def test_default_plan_is_every_variant_with_mha_and_gqa():
    cells = plan(variants=[], shapes=[DEFAULT_SHAPES["cpu"]])
    attention = [c.problem for c in cells if c.variant != "softmax"]
    (softmax,) = (c.problem for c in cells if c.variant == "softmax")
    assert len(attention) == 2 * len(ATTENTION)
    assert {p.group for p in attention} == {1, 2}
    # Three digits of RMSE need at least 2^16 outputs.
    assert all(p.heads * p.query * p.value_dim >= 2**16 for p in attention)
    assert softmax.query * softmax.kv >= 2**16


def test_help_names_the_default_shapes():
    (option,) = (one for one in rmse.params if one.name == "shapes")
    assert "default: {cpu} on a CPU, {cuda} on a GPU".format(**DEFAULT_SHAPES) in option.help


def test_manual_lists_every_variant_with_its_summary():
    manual = (Path(__file__).parents[2] / "docs" / "reference" / "rmse.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", manual, re.MULTILINE)
    known = VARIANTS | OPTIONAL_VARIANTS
    listed = [(name, summary) for name, summary in rows if name in known and summary]
    assert listed[: len(known)] == [(v.name, v.summary) for v in known.values()]


def test_repeated_dtype_is_planned_once():
    assert len(plan(dtypes=["bf16", "bf16"])) == 2  # MHA and GQA, once each


def test_unknown_variant_lists_the_valid_ones():
    with pytest.raises(
        UnknownName,
        match=r"'casual' is not known: did you mean 'causal'\? Choose from al",
    ):
        plan(variants=["casual"])


def test_shape_beyond_memory_is_refused():
    with pytest.raises(
        ProblemError, match="GiB for inputs and outputs in float64; this machine has"
    ):
        plan(shapes=["1000x1000x1000000x64"])


@pytest.mark.parametrize(
    ("size", "arguments", "message"),
    [
        # q and out, k and v, of three sequences
        (
            8 * 3 * (4 * 64 * (16 + 8) + 2 * 24 * (16 + 8)),
            {"shapes": ["3x4/2x64/24x16/8"]},
            "this machine has",
        ),
        # the same and their gradients
        (
            8 * 2 * (4 * 64 * 32 + 2 * 24 * 32),
            {"shapes": ["1x4/2x64/24x16"], "backward": True},
            "this machine has",
        ),
        # x and out
        (
            8 * 2 * 64 * 24,
            {"variants": ["softmax"], "shapes": ["3x4/2x64/24x16/8"]},
            "B1 H1 R64 C24 needs",
        ),
    ],
    ids=["forward", "backward", "softmax"],
)
def test_tensors_in_float64_may_fill_the_memory_to_the_byte(monkeypatch, size, arguments, message):
    set_memory(monkeypatch, size)
    assert plan(**arguments)
    set_memory(monkeypatch, size - 1)
    with pytest.raises(ProblemError, match=message):
        plan(**arguments)


@pytest.mark.parametrize("shape", ["2x16/4x64/24x16/8", "2x16x64/24x16", "1x1x64/24x1"])
def test_softmax_is_one_cell_of_query_rows_and_kv_columns(shape):
    (cell,) = plan(variants=["softmax"], shapes=[shape], seed=3)
    assert cell.problem == Problem(operation="softmax", query=64, kv=24, seed=3)


@pytest.mark.parametrize("dtype", ["tf32", "e4m3", "e5m2"])
def test_softmax_is_omitted_in_dtypes_without_it_and_refused_by_name(dtype):
    assert [c.variant for c in plan(dtypes=[dtype], variants=[])] == [
        name for name in ATTENTION for _ in ("MHA", "GQA")
    ]
    with pytest.raises(ProblemError, match=f"softmax has no dtype '{dtype}': choose from fp32, "):
        plan(dtypes=[dtype], variants=["full", "softmax"])


def test_softmax_is_omitted_for_distributions_without_scores_and_refused_by_name():
    cells = plan(distributions=["ones_v", "sink"], variants=[])
    assert [c.problem.distribution for c in cells if c.variant == "softmax"] == ["sink"]
    assert {c.variant for c in cells if c.problem.distribution == "ones_v"} == set(ATTENTION)
    with pytest.raises(ProblemError, match="'ones_v' has no scores for softmax"):
        plan(distributions=["ones_v"], variants=["softmax"])


def test_backward_plans_every_variant_with_gradients():
    cells = plan(variants=[], backward=True)
    assert [c.variant for c in cells] == [name for name in ATTENTION for _ in ("MHA", "GQA")]
    assert all(c.problem.backward and not c.problem.dlse for c in cells)
    everything = {c.variant for c in plan(variants=[ALL], backward=True)}
    assert everything == {*ATTENTION, *OPTIONAL_VARIANTS} - {"paged", "paged_decode"}
    forward = plan(variants=[])
    assert not any(c.problem.backward for c in forward)
    attention = [c for c in forward if c.variant != "softmax"]
    assert [c.asking(backward=True) for c in attention] == cells
    assert [c.asking(backward=False) for c in cells] == attention


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"variants": ["softmax"]}, "backward=True has no meaning for softmax"),
        ({"variants": ["paged"]}, "there are no gradients of keys in pages"),
        ({"dtypes": ["e4m3"]}, "there are no gradients in e4m3"),
        ({"variants": [], "dtypes": ["bf16", "e5m2"]}, "there are no gradients in e5m2"),
    ],
)
def test_named_variant_or_dtype_without_gradients_is_refused_in_a_backward(arguments, message):
    with pytest.raises(ProblemError, match=message):
        plan(**arguments, backward=True)


@pytest.mark.parametrize("variants", [[], ["full"], ["softmax"]])
def test_unknown_distribution_is_refused_with_any_variants(variants):
    with pytest.raises(UnknownName, match="distribution 'cauchy' is not known"):
        plan(distributions=["cauchy"], variants=variants)


@pytest.mark.parametrize("variants", [[], ["full"], ["softmax"]])
def test_fp64_is_refused_with_any_variants(variants):
    with pytest.raises(UnknownName) as error:
        plan(dtypes=["fp64"], variants=variants)
    assert str(error.value) == (
        "dtype 'fp64' is not known: choose from bf16, e4m3, e5m2, fp16, fp32, tf32."
    )


def test_own_variant_replaces_all_others():
    own = Variant(name="mine", summary="as typed", mods=lambda _: (CAUSAL, Spec.of("alibi")))
    cells = plan(variants=[], own=own)
    assert [(c.variant, c.problem.group) for c in cells] == [("mine", 1), ("mine", 2)]
    assert {(c.problem.mask, c.problem.score) for c in cells} == {(CAUSAL, Spec.of("alibi"))}
