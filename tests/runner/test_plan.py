from __future__ import annotations

from pathlib import Path

import pytest

from attncheck.errors import ProblemError, UnknownName
from attncheck.mods.spec import Spec
from attncheck.problem import Problem
from attncheck.runner import plan as plan_room
from attncheck.runner.measure import measure
from attncheck.runner.plan import DEFAULT_SHAPES, VARIANTS, Shape, plan
from attncheck.subjects.ideal import Ideal
from attncheck.subjects.sdpa import Sdpa


def cells(**changes):
    asked = {
        "dtypes": ["bf16"],
        "variants": ["causal"],
        "shapes": ["1x4x64x16"],
        "distributions": ["normal"],
        "seed": 0,
    }
    return plan(**(asked | changes))


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
        made = cells(variants=list(VARIANTS), shapes=[f"1x1x{length}x4"])
        assert [c.variant for c in made] == list(VARIANTS)


DOCUMENTS = Spec.of("document", lengths=[32, 16, 8, 8])
NONE, FULL, CAUSAL = Spec.of("none"), Spec.of("full"), Spec.of("causal")


@pytest.mark.parametrize(
    ("lengths", "window", "prefix"), [("64/24", 6, 6), ("24/64", 16, 16), ("64/3", 1, 0)]
)
def test_what_each_variant_is(lengths, window, prefix):
    """Parts of the keys; documents cover the longer of the two lengths."""
    made = cells(variants=list(VARIANTS), shapes=[f"1x1x{lengths}x4"])
    assert {c.variant: (c.problem.mask, c.problem.score) for c in made} == {
        "full": (FULL, NONE),
        "causal": (CAUSAL, NONE),
        "alibi": (CAUSAL, Spec.of("alibi")),
        "sliding_window": (Spec.of("sliding_window", window=window), NONE),
        "prefix_lm": (Spec.of("prefix_lm", prefix=prefix), NONE),
        "softcap": (FULL, Spec.of("softcap", cap=20.0)),
        "document": (DOCUMENTS, NONE),
    }


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
    made = cells(variants=list(VARIANTS), shapes=[DEFAULT_SHAPES["cpu"]])
    assert len(made) == 2 * len(VARIANTS)
    assert {c.problem.group for c in made} == {1, 2}
    # three digits of RMSE want at least 2^16 outputs
    assert all(c.problem.heads * c.problem.query * c.problem.value_dim >= 2**16 for c in made)


def test_the_manual_names_the_default_shapes():
    manual = (Path(__file__).parents[2] / "docs" / "rmse.md").read_text()
    said = "default: {cpu} on a CPU, {cuda} on a GPU".format(**DEFAULT_SHAPES)
    assert said in manual


def test_nothing_twice():
    assert len(cells(dtypes=["bf16", "bf16"])) == 2  # MHA and GQA, once each


def test_an_unknown_variant_lists_the_valid_ones():
    with pytest.raises(
        UnknownName, match="'casual' is not known: choose from alibi, causal, document"
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
    monkeypatch.setattr(plan_room.os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": size}.get)
    assert cells(shapes=shapes)
    monkeypatch.setattr(plan_room.os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": size - 1}.get)
    with pytest.raises(ProblemError, match="this machine has"):
        cells(shapes=shapes)


def test_a_kernel_that_is_absent_is_named_once_and_run_nowhere():
    subjects, seen = [Ideal(), Sdpa("cudnn")], []
    made = cells(shapes=["1x2x5x4"], variants=["full", "causal"])
    report = measure(made, subjects, device="cpu", command="asked", done=seen.append)
    assert report.command == "asked"
    assert report.kernels == {s.name: s.summary for s in subjects}
    assert report.absent == {"sdpa-cudnn": "needs a CUDA GPU"}
    assert list(report.records) == seen
    assert [(r.variant, r.heads, r.kernel) for r in seen] == [
        (variant, heads, "ideal") for variant in ("full", "causal") for heads in ("MHA", "MQA")
    ]
    assert {r.environment for r in seen} == set(report.environments)
