from __future__ import annotations

import pytest

from attncheck.errors import ProblemError, UnknownName
from attncheck.runner.plan import DEFAULT_SHAPES, VARIANTS, Shape, plan


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


def test_the_default_is_every_variant_both_ways():
    made = cells(variants=list(VARIANTS), shapes=[DEFAULT_SHAPES["cpu"]])
    assert len(made) == 2 * len(VARIANTS)
    assert {c.problem.group for c in made} == {1, 2}
    # three digits of RMSE want at least 2^16 outputs
    assert all(c.problem.heads * c.problem.query * c.problem.value_dim >= 2**16 for c in made)


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
