"""An index outside its captured tensor is found wherever it is, and nothing else is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.errors import ProblemError
from attncheck.mods import index_ranges
from attncheck.mods.index_ranges import check_index_ranges
from attncheck.mods.spec import Dimensions
from attncheck.mods.trace import trace_mask, trace_score

DIMENSIONS = Dimensions(batch=2, heads=3, query=9, kv=12)
TABLE = torch.arange(21)
PLANE = torch.zeros(3, 23)

INSIDE = {
    "sum": lambda b, h, q, k: TABLE[q + k] > 2,
    "negative": lambda b, h, q, k: TABLE[q - k] > 2,
    "from the end": lambda b, h, q, k: TABLE[-21 + k] > 2,
    "clamped": lambda b, h, q, k: TABLE[(q * 1000).clamp(-21, 20)] > 2,
    "floored": lambda b, h, q, k: TABLE[(q - 9 * k) // 6] > 2,
    "remainder": lambda b, h, q, k: TABLE[(q * k) % 21] > 2,
    "by a table": lambda b, h, q, k: TABLE[TABLE[q + k]] > 2,
    "where": lambda b, h, q, k: TABLE[torch.where(q > k, q - k, 0)] > 2,
    "bits": lambda b, h, q, k: TABLE[(q ^ k) & 15] > 2,
    "through reals": lambda b, h, q, k: TABLE[(q * 1.5).to(torch.int64)] > 2,
    "two axes": lambda b, h, q, k: PLANE[h, k - q + 11] > 2,
    "of no input": lambda b, h, q, k: TABLE[torch.tensor([20])] + q > 2,
}


@pytest.mark.parametrize("mod", INSIDE.values(), ids=INSIDE)
def test_what_is_inside_passes(mod):
    check_index_ranges(trace_mask(mod), DIMENSIONS)


OUTSIDE = {
    "sum": (lambda b, h, q, k: TABLE[q + k + 2] > 2, 0, 21, (0, 0, 8, 11)),
    "below": (lambda b, h, q, k: TABLE[q - 2 * k] > 2, 0, -22, (0, 0, 0, 11)),
    "one sequence": (lambda b, h, q, k: TABLE[20 * b + q] > 2, 0, 21, (1, 0, 1, 0)),
    "one head": (lambda b, h, q, k: TABLE[h * 10 + k // 11] > 2, 0, 21, (0, 2, 0, 11)),
    "by a table": (lambda b, h, q, k: TABLE[TABLE[q + k] * 3] > 2, 0, 21, (0, 0, 0, 7)),
    "through reals": (lambda b, h, q, k: TABLE[(k * 2.0).to(torch.int64)] > 2, 0, 22, None),
    "second axis": (lambda b, h, q, k: PLANE[h, k - q + 12] > 2, 1, 23, (0, 0, 0, 11)),
    "first axis": (lambda b, h, q, k: PLANE[h + b, 0 * k] > 2, 0, 3, (1, 2, 0, 0)),
}


@pytest.mark.parametrize(("mod", "axis", "index", "place"), OUTSIDE.values(), ids=OUTSIDE)
def test_what_is_outside_is_named_with_its_place(mod, axis, index, place):
    with pytest.raises(ProblemError) as error:
        check_index_ranges(trace_mask(mod), DIMENSIONS, "mask 'mine'")
    said = str(error.value)
    assert said.startswith(f"mask 'mine' indexes axis {axis} of its tensor of shape (")
    assert f" with {index} at (b, h, q_idx, kv_idx) = {'' if place is None else place}" in said
    assert "\n" not in said


def test_dimensions_decide():
    expression = trace_mask(lambda b, h, q, k: TABLE[q + k] > 2)
    check_index_ranges(expression, Dimensions(batch=1, heads=1, query=11, kv=11))
    with pytest.raises(ProblemError, match="with 21 at"):
        check_index_ranges(expression, Dimensions(batch=1, heads=1, query=11, kv=12))


def test_an_index_made_of_the_score_must_be_clamped():
    def clamped(score, b, h, q, k):
        return score + PLANE[h, (score * 3.0).to(torch.int64).clamp(0, 22)]

    def free(score, b, h, q, k):
        return score + PLANE[h, (score * 3.0).to(torch.int64)]

    check_index_ranges(trace_score(clamped), DIMENSIONS)
    with pytest.raises(ProblemError, match=r"depends on the score: clamp it to 0 … 22\."):
        check_index_ranges(trace_score(free), DIMENSIONS)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 12), st.data())
@settings(deadline=None, max_examples=50)
def test_it_is_exact(at_a_time, query, kv, data):
    """In strips of any size, and whatever the ranges say: torch's own index is the judge."""
    a, c, m = (data.draw(st.integers(-3, 3), label=name) for name in ("a", "c", "m"))
    dimensions = Dimensions(batch=1, heads=2, query=query, kv=kv)

    def mod(b, h, q, k):
        return TABLE[a * q + c * k * (h + 1) + 8 + (m * q) % 5] > 2

    axes = [torch.arange(n) for n in (1, 2, query, kv)]
    indices = [x.view([-1 if i == j else 1 for j in range(4)]) for i, x in enumerate(axes)]
    try:
        mod(*indices)
        inside = True
    except IndexError:
        inside = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_ranges, "_AT_A_TIME", at_a_time)
        try:
            check_index_ranges(trace_mask(mod), dimensions)
            said_inside = True
        except ProblemError:
            said_inside = False
    assert said_inside == inside


def test_ranges_alone_settle_what_is_clamped(monkeypatch):
    """A hundred thousand keys cost nothing where the index is clamped into its tensor."""
    monkeypatch.setattr(index_ranges, "_strips", None)
    long = Dimensions(batch=64, heads=128, query=100_000, kv=100_000)
    for mod in (
        lambda b, h, q, k: TABLE[(q - k).clamp(-10, 10) + 10] > 2,
        lambda b, h, q, k: TABLE[torch.minimum(k // 5000, q % 7) * 2] > 2,
    ):
        check_index_ranges(trace_mask(mod), long)
