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


def cells(**changes):
    asked = {
        "dtypes": ["bf16"],
        "variants": ["causal"],
        "shapes": ["1x4x64x16"],
        "distributions": ["normal"],
        "seed": 0,
    }
    return plan_cells(**(asked | changes))


def test_a_shape_says_everything():
    shape = Shape.parse("2x16/4x1024/4096x128/64")
    assert (shape.batch, shape.heads, shape.kv_heads) == (2, 16, 4)
    assert (shape.query, shape.kv, shape.head_dim, shape.value_dim) == (1024, 4096, 128, 64)


def test_what_a_shape_leaves_out():
    shape = Shape.parse("1x4x256x64")
    assert (shape.kv, shape.value_dim, shape.head_counts()) == (256, 64, (4, 2))


@pytest.mark.parametrize(
    ("heads", "counts"),
    [(1, (1,)), (2, (2, 1)), (3, (3, 1)), (4, (4, 2)), (16, (16, 4)), (5, (5, 1))],
)
def test_open_heads_are_measured_both_ways(heads, counts):
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
def test_a_shape_that_is_none(text):
    with pytest.raises(ProblemError, match="BATCHxHEADSxLENGTHxDIM"):
        Shape.parse(text)


@pytest.mark.parametrize(
    "text", ["0x4x64x16", "1x0x64x16", "1x4x0x16", "1x4/3x64x16", "1x4x64x257", "1x4x64x0"]
)
def test_impossible_shapes(text):
    with pytest.raises(ProblemError):
        cells(shapes=[text])


def test_every_variant_fits_every_length():
    for length in ("1", "2", "3", "5/2", "2/5", "128"):
        for variants in ([], list(VARIANTS)):
            made = cells(variants=variants, shapes=[f"1x1x{length}x4"])
            assert [c.variant for c in made] == list(VARIANTS)
        made = cells(variants=[ALL], shapes=[f"1x1x{length}x4"])
        assert [c.variant for c in made] == [*VARIANTS, *OPTIONAL_VARIANTS]


ATTENTION = [name for name in VARIANTS if name != "softmax"]
DOCUMENTS = Spec.of("document", lengths=[32, 16, 8, 8])
NONE, FULL, CAUSAL = Spec.of("none"), Spec.of("full"), Spec.of("causal")


@pytest.mark.parametrize(
    ("lengths", "window", "prefix"), [("64/24", 6, 6), ("24/64", 16, 16), ("64/3", 1, 0)]
)
def test_what_each_variant_is(lengths, window, prefix):
    """Parts of the keys; documents cover the longer of the two lengths."""
    made = cells(variants=ATTENTION, shapes=[f"1x1x{lengths}x4"])
    assert {c.variant: (c.problem.mask, c.problem.score) for c in made} == {
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
def test_what_each_further_variant_is(lengths, canvas, kernel, tile, documents):
    """A canvas has a cell for each position of the longer of the two lengths."""
    window = {"canvas": canvas, "kernel": kernel}
    queries, keys = documents
    made = cells(variants=list(OPTIONAL_VARIANTS), shapes=[f"1x1x{lengths}x4"])
    asked = {c.variant: (c.problem.mask, c.problem.score) for c in made}
    bottom_right = Spec.of("causal_bottom_right")
    assert asked == {
        "neighborhood": (Spec.of("neighborhood", **window), NONE),
        "neighborhood_tiled": (Spec.of("neighborhood_tiled", **window, tile=tile), NONE),
        "neighborhood_morton": (Spec.of("neighborhood_morton", **window), NONE),
        "bias": (FULL, Spec.of("bias", seed=0, per_batch=0, per_head=0)),
        "relative_bias": (CAUSAL, Spec.of("relative_bias", distance=keys_of(lengths) // 4, seed=0)),
        "varlen": (Spec.of("documents", query_lengths=queries, kv_lengths=keys), NONE),
        "sink": (CAUSAL, NONE),
        "paged": (CAUSAL, NONE),
        "decode": (bottom_right, NONE),
        "paged_decode": (bottom_right, NONE),
    }
    assert canvas[0] * canvas[1] == max(made[0].problem.query, made[0].problem.kv)


def keys_of(lengths: str) -> int:
    return int(lengths.rpartition("/")[2])


def test_a_backward_asks_for_what_is_read_in_its_variant_alone():
    for backward in (False, True):
        made = cells(variants=[ALL], shapes=["1x1x64x4"], backward=backward)
        asked = {c.variant for c in made if c.problem.dcaptured}
        assert asked == ({"relative_bias"} if backward else set())


def test_sinks_pages_and_few_rows_are_those_of_their_variants():
    made = {c.variant: c.problem for c in cells(variants=[ALL], shapes=["1x1x256x4"])}
    assert [name for name, problem in made.items() if problem.sink] == ["sink"]
    pages = {name: problem.paging for name, problem in made.items() if problem.paging}
    assert pages == dict.fromkeys(("paged", "paged_decode"), Paging(size=64, seed=1))
    few = {name: (p.query, p.kv) for name, p in made.items() if p.query < p.kv}
    assert few == {"decode": (4, 256), "paged_decode": (4, 256)}
    (small,) = cells(variants=["paged"], shapes=["1x1x255x4"])
    assert small.problem.paging == Paging(size=16, seed=1)
    (single,) = cells(variants=["decode"], shapes=["1x1x1/9x4"])
    assert single.problem.query == 1


def test_all_takes_in_what_is_named_beside_it_and_leaves_out_what_does_not_exist():
    made = cells(variants=["causal", ALL], dtypes=["e4m3"])
    assert {c.variant for c in made} == {*ATTENTION, *OPTIONAL_VARIANTS}
    made = cells(variants=[ALL])
    assert list(dict.fromkeys(c.variant for c in made)) == [*VARIANTS, *OPTIONAL_VARIANTS]


def test_a_cell_is_what_was_asked_for():
    (cell,) = cells(
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
    assert cells(seed=5)[0].problem.seed == 5


def test_the_default_is_every_variant_both_ways():
    made = cells(variants=[], shapes=[DEFAULT_SHAPES["cpu"]])
    attention = [c.problem for c in made if c.variant != "softmax"]
    (softmax,) = (c.problem for c in made if c.variant == "softmax")
    assert len(attention) == 2 * len(ATTENTION)
    assert {p.group for p in attention} == {1, 2}
    # three digits of RMSE want at least 2^16 outputs
    assert all(p.heads * p.query * p.value_dim >= 2**16 for p in attention)
    assert softmax.query * softmax.kv >= 2**16


def test_the_help_names_the_default_shapes():
    (option,) = (one for one in rmse.params if one.name == "shapes")
    assert "default: {cpu} on a CPU, {cuda} on a GPU".format(**DEFAULT_SHAPES) in option.help


def test_the_manual_names_every_variant_with_what_it_is():
    manual = (Path(__file__).parents[2] / "docs" / "reference" / "rmse.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", manual, re.MULTILINE)
    known = VARIANTS | OPTIONAL_VARIANTS
    said = [(name, summary) for name, summary in rows if name in known and summary]
    assert said[: len(known)] == [(v.name, v.summary) for v in known.values()]


def test_nothing_twice():
    assert len(cells(dtypes=["bf16", "bf16"])) == 2  # MHA and GQA, once each


def test_an_unknown_variant_lists_the_valid_ones():
    with pytest.raises(
        UnknownName,
        match=r"'casual' is not known: did you mean 'causal'\? Choose from al",
    ):
        cells(variants=["casual"])


def test_what_cannot_fit_is_refused_beforehand():
    with pytest.raises(
        ProblemError, match="GiB for inputs and outputs in float64; this machine has"
    ):
        cells(shapes=["1000x1000x1000000x64"])


def test_what_fits_to_the_byte_is_planned(monkeypatch):
    q_and_out, k_and_v = 4 * 64 * (16 + 8), 2 * 24 * (16 + 8)
    size = 8 * 3 * (q_and_out + k_and_v)  # float64
    shapes = ["3x4/2x64/24x16/8"]
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": size}.get)
    assert cells(shapes=shapes)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": size - 1}.get)
    with pytest.raises(ProblemError, match="this machine has"):
        cells(shapes=shapes)


def test_softmax_is_query_rows_of_kv_columns_once_however_many_heads():
    for shape in ("2x16/4x64/24x16/8", "2x16x64/24x16", "1x1x64/24x1"):
        (cell,) = cells(variants=["softmax"], shapes=[shape], seed=3)
        assert cell.problem == Problem(operation="softmax", query=64, kv=24, seed=3)


@pytest.mark.parametrize("dtype", ["tf32", "e4m3", "e5m2"])
def test_softmax_is_left_out_of_dtypes_without_it_and_an_error_when_asked_for(dtype):
    assert [c.variant for c in cells(dtypes=[dtype], variants=[])] == [
        name for name in ATTENTION for _ in ("MHA", "GQA")
    ]
    with pytest.raises(ProblemError, match=f"softmax has no dtype '{dtype}': choose from fp32, "):
        cells(dtypes=[dtype], variants=["full", "softmax"])


def test_softmax_is_left_out_of_distributions_without_it_and_an_error_when_asked_for():
    made = cells(distributions=["ones_v", "sink"], variants=[])
    assert [c.problem.distribution for c in made if c.variant == "softmax"] == ["sink"]
    assert {c.variant for c in made if c.problem.distribution == "ones_v"} == set(ATTENTION)
    with pytest.raises(ProblemError, match="'ones_v' has no scores for softmax"):
        cells(distributions=["ones_v"], variants=["softmax"])


def test_gradients_are_asked_of_every_variant_that_has_some():
    made = cells(variants=[], backward=True)
    assert [c.variant for c in made] == [name for name in ATTENTION for _ in ("MHA", "GQA")]
    assert all(c.problem.backward and not c.problem.dlse for c in made)
    everything = {c.variant for c in cells(variants=[ALL], backward=True)}
    assert everything == {*ATTENTION, *OPTIONAL_VARIANTS} - {"paged", "paged_decode"}
    forward = cells(variants=[])
    assert not any(c.problem.backward for c in forward)
    with_some = [c for c in forward if c.variant != "softmax"]
    assert [c.asking(backward=True) for c in with_some] == made
    assert [c.asking(backward=False) for c in made] == with_some


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"variants": ["softmax"]}, "backward=True has no meaning for softmax"),
        ({"variants": ["paged"]}, "there are no gradients of keys in pages"),
        ({"dtypes": ["e4m3"]}, "there are no gradients in e4m3"),
        ({"variants": [], "dtypes": ["bf16", "e5m2"]}, "there are no gradients in e5m2"),
    ],
)
def test_gradients_that_there_are_not_are_refused_when_asked_for(asked, says):
    with pytest.raises(ProblemError, match=says):
        cells(**asked, backward=True)


def test_a_backward_needs_twice_the_memory(monkeypatch):
    size = 2 * 8 * (4 * 64 * 32 + 2 * 24 * 32)
    asked = {"shapes": ["1x4/2x64/24x16"], "backward": True}
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": size}.get)
    assert cells(**asked)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": size - 1}.get)
    with pytest.raises(ProblemError, match="this machine has"):
        cells(**asked)


def test_an_unknown_distribution_is_told_whatever_the_variants():
    for variants in ([], ["softmax"], ["full"]):
        with pytest.raises(UnknownName, match="distribution 'cauchy' is not known"):
            cells(distributions=["cauchy"], variants=variants)


@pytest.mark.parametrize("variants", [[], ["full"], ["softmax"]])
def test_kernels_are_not_measured_in_fp64(variants):
    with pytest.raises(UnknownName) as error:
        cells(dtypes=["fp64"], variants=variants)
    assert str(error.value) == (
        "dtype 'fp64' is not known: choose from bf16, e4m3, e5m2, fp16, fp32, tf32."
    )


def test_a_softmax_that_fits_to_the_byte_is_planned(monkeypatch):
    size = 8 * 2 * 64 * 24  # x and out in float64
    asked = {"variants": ["softmax"], "shapes": ["3x4/2x64/24x16/8"]}
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": size}.get)
    assert cells(**asked)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": size - 1}.get)
    with pytest.raises(ProblemError, match="B1 H1 R64 C24 needs"):
        cells(**asked)


def test_a_variant_of_ones_own_takes_the_place_of_all():
    own = Variant(name="mine", summary="as typed", mods=lambda _: (CAUSAL, Spec.of("alibi")))
    made = cells(variants=[], own=own)
    assert [(c.variant, c.problem.group) for c in made] == [("mine", 1), ("mine", 2)]
    assert {(c.problem.mask, c.problem.score) for c in made} == {(CAUSAL, Spec.of("alibi"))}
