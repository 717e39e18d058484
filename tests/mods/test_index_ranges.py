"""``check_index_ranges`` refuses indices outside tensors, 32-bit overflow and division by 0."""

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import one_line

from attncheck.core.errors import ProblemError
from attncheck.core.mod_spec import Dimensions
from attncheck.mods import index_ranges
from attncheck.mods.index_ranges import check_index_ranges
from attncheck.mods.trace import trace_mask, trace_score

DIMENSIONS = Dimensions(batch=2, heads=3, query=9, kv=12)
TABLE = torch.arange(21)
PLANE = torch.zeros(3, 23)


def test_index_range_depends_on_problem_dimensions():
    expression = trace_mask(lambda b, h, q, k: TABLE[q + k] > 2)
    check_index_ranges(expression, Dimensions(batch=1, heads=1, query=11, kv=11))
    with pytest.raises(ProblemError, match="with 21 at"):
        check_index_ranges(expression, Dimensions(batch=1, heads=1, query=11, kv=12))


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 12), st.data())
@settings(deadline=None, max_examples=50)
def test_check_agrees_with_torch_indexing(chunk, query, kv, data):
    """Torch's own IndexError decides, for strips of any size: no false alarms, nothing missed."""
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
        patch.setattr(index_ranges, "_CHUNK", chunk)
        try:
            check_index_ranges(trace_mask(mod), dimensions)
            accepted = True
        except ProblemError:
            accepted = False
    assert accepted == inside


WIDE, EVEN = torch.tensor([2**40, -1]), torch.arange(9) * 2


def log_buckets(b, h, q, k):
    """T5's buckets: the logarithm of 0 is cast to a whole number, and then not chosen."""
    distance = (q - k).clamp(min=0)
    far = 8 + (torch.log(distance.float() / 8) / math.log(16) * 8).to(torch.int64)
    return torch.where(distance < 8, distance, torch.minimum(far, torch.tensor(15))) < 12


@pytest.mark.parametrize(
    "mod",
    [
        lambda b, h, q, k: TABLE[(q - k).clamp(-10, 10) + 10] > 2,
        lambda b, h, q, k: TABLE[torch.minimum(k // 5000, q % 7) * 2] > 2,
        log_buckets,
    ],
    ids=["clamped", "least", "log buckets"],
)
def test_ranges_alone_settle_clamped_indices(mod, monkeypatch):
    """No index is enumerated (``index_parts`` is missing), so that 100,000 keys cost nothing."""
    monkeypatch.setattr(index_ranges, "index_parts", None)
    long = Dimensions(batch=64, heads=128, query=100_000, kv=100_000)
    check_index_ranges(trace_mask(mod), long)


WITHIN = {
    "sum": lambda b, h, q, k: TABLE[q + k] > 2,
    "negative": lambda b, h, q, k: TABLE[q - k] > 2,
    "from the end": lambda b, h, q, k: TABLE[-21 + k] > 2,
    "clamped": lambda b, h, q, k: TABLE[(q * 1000).clamp(-21, 20)] > 2,
    "floored": lambda b, h, q, k: TABLE[(q - 9 * k) // 6] > 2,
    "remainder": lambda b, h, q, k: TABLE[(q * k) % 21] > 2,
    "by a table": lambda b, h, q, k: TABLE[TABLE[q + k]] > 2,
    "where": lambda b, h, q, k: TABLE[torch.where(q > k, q - k, 0)] > 2,
    "bits of an index": lambda b, h, q, k: TABLE[(q ^ k) & 15] > 2,
    "through reals": lambda b, h, q, k: TABLE[(q * 1.5).to(torch.int64)] > 2,
    "two axes": lambda b, h, q, k: PLANE[h, k - q + 11] > 2,
    "of no input": lambda b, h, q, k: TABLE[torch.tensor([20])] + q > 2,
    # 0 … 16, and never odd
    "distances that do not occur": lambda b, h, q, k: (
        TABLE[torch.where(EVEN[q] % 2 == 0, 0, 50)] > 2
    ),
    # in 32 bits
    "the largest": lambda b, h, q, k: q + (2**31 - 9) > k,
    "the smallest": lambda b, h, q, k: -q - (2**31 - 8) < k,
    "half left out": lambda b, h, q, k: torch.where(k < 4, k * k, 0) > 3,
    "a wide table that is compared": lambda b, h, q, k: WIDE[k % 2] == WIDE[q % 2],
    "compared with a wide number": lambda b, h, q, k: q < 2**40,
    "bits": lambda b, h, q, k: ((q & k) | (q ^ k) | (k << 3) | (q >> 2)) > ~q,
    "log buckets": log_buckets,
    # divisors
    "by what is not 0": lambda b, h, q, k: q // (k + 1) > 1,
    "by what is below 0": lambda b, h, q, k: q % (k - 12) > 1,
    "by what is odd": lambda b, h, q, k: q // ((2 * k - 11) * (2 * q + 1)) > 1,
}
WITHIN_OF_SCORES = {
    "clamped": lambda s, b, h, q, k: s + PLANE[h, (s * 3.0).to(torch.int64).clamp(0, 22)],
    "any whole number": lambda s, b, h, q, k: s + (s.to(torch.int64) * 5 + q) % 7,
    "a clamped divisor": lambda s, b, h, q, k: s + q // s.to(torch.int64).clamp(min=1),
}


@pytest.mark.parametrize(
    "traced",
    [*map(trace_mask, WITHIN.values()), *map(trace_score, WITHIN_OF_SCORES.values())],
    ids=[*WITHIN, *WITHIN_OF_SCORES],
)
def test_indices_in_range_are_accepted(traced):
    check_index_ranges(traced, DIMENSIONS)


INDEXES = "mask 'mine' indexes axis {} of its tensor of shape ("
COMPUTES, DIVIDES = "mask 'mine' computes ", "mask 'mine' divides whole numbers, "
# The mod, the axis (or the start of the message), the number, and the first index with it.
REFUSED = {
    "sum": (lambda b, h, q, k: TABLE[q + k + 2] > 2, 0, 21, (0, 0, 8, 11)),
    "below": (lambda b, h, q, k: TABLE[q - 2 * k] > 2, 0, -22, (0, 0, 0, 11)),
    "one sequence": (lambda b, h, q, k: TABLE[20 * b + q] > 2, 0, 21, (1, 0, 1, 0)),
    "one head": (lambda b, h, q, k: TABLE[h * 10 + k // 11] > 2, 0, 21, (0, 2, 0, 11)),
    "by a table": (lambda b, h, q, k: TABLE[TABLE[q + k] * 3] > 2, 0, 21, (0, 0, 0, 7)),
    "through reals": (lambda b, h, q, k: TABLE[(k * 2.0).to(torch.int64)] > 2, 0, 22, None),
    "second axis": (lambda b, h, q, k: PLANE[h, k - q + 12] > 2, 1, 23, (0, 0, 0, 11)),
    "first axis": (lambda b, h, q, k: PLANE[h + b, 0 * k] > 2, 0, 3, (1, 2, 0, 0)),
    "product": (
        lambda b, h, q, k: (q * 100003 * 100003) % 7 == 0,
        COMPUTES,
        100003**2,
        (0, 0, 1, 0),
    ),
    "sum beyond": (lambda b, h, q, k: (q + 2**31 - 9) > k, COMPUTES, 2**31 - 1 + 1, None),
    "shift": (lambda b, h, q, k: (1 << (k * 4)) > q, COMPUTES, 2**32, (0, 0, 0, 8)),
    "far shift": (lambda b, h, q, k: (k << 62) % 7 == 0, COMPUTES, 2**62, (0, 0, 0, 1)),
    "one place": (
        lambda b, h, q, k: torch.where((q == 7) & (k == 5) & (h == 2), 2**31 - 1, q) + b > k,
        COMPUTES,
        2**31,
        (1, 2, 7, 5),
    ),
    "negative": (
        lambda b, h, q, k: -k.clamp(max=4) * 2**29 - q < 0,
        COMPUTES,
        -(2**31) - 1,
        (0, 0, 1, 4),
    ),
    "from reals": (lambda b, h, q, k: (k * 3e8).to(torch.int64) > q, COMPUTES, None, (0, 0, 0, 8)),
    "a table's element": (lambda b, h, q, k: WIDE[k % 2] + q > 3, COMPUTES, 2**40, (0, 0, 0, 0)),
    "a cast that wraps": (
        lambda b, h, q, k: WIDE[k % 2].to(torch.int32) + q > 3,
        COMPUTES,
        2**40,
        None,
    ),
    "left out": (lambda b, h, q, k: torch.where(k < 4, k << (q * 4), 0) > 3, COMPUTES, None, None),
    "//": (lambda b, h, q, k: q // (k - 5) > 1, DIVIDES, 0, (0, 0, 0, 5)),
    "%": (lambda b, h, q, k: q % (k - q - 3) > 1, DIVIDES, 0, (0, 0, 0, 3)),
    "by 0 of a table": (
        lambda b, h, q, k: k // (TABLE[q + k] - 19) > 1,
        DIVIDES,
        0,
        (0, 0, 8, 11),
    ),
    "computed": (
        lambda b, h, q, k: q // ((k - 3) * (k - 4) - 6 * h) > 1,
        DIVIDES,
        0,
        (0, 0, 0, 3),
    ),
}
HINTS = {
    COMPUTES: "kernels compute whole numbers in 32 bits, −2147483648 … 2147483647.",
    DIVIDES: ": torch refuses that",
}


@pytest.mark.parametrize(("mod", "axis_or_start", "number", "place"), REFUSED.values(), ids=REFUSED)
def test_out_of_range_value_is_reported_with_its_index(mod, axis_or_start, number, place):
    start = INDEXES.format(axis_or_start) if axis_or_start not in HINTS else axis_or_start
    number = "" if number is None else number
    quoted = {COMPUTES: f" = {number}", DIVIDES: f" by {number}"}.get(
        axis_or_start, f" with {number}"
    )
    place = f" at (b, h, q_idx, kv_idx) = {'' if place is None else place}"
    sizes = (
        DIMENSIONS if axis_or_start != COMPUTES else Dimensions(batch=2, heads=3, query=10, kv=12)
    )
    with one_line(ProblemError, quoted, start=start, match=re.escape(place)) as error:
        check_index_ranges(trace_mask(mod), sizes, "mask 'mine'")
    assert HINTS.get(axis_or_start, "") in str(error.value)


@pytest.mark.parametrize(
    ("mod", "message"),
    [
        (
            lambda s, b, h, q, k: s + PLANE[h, (s * 3.0).to(torch.int64)],
            "depends on the score: clamp it to 0 … 22 as a whole number",
        ),
        (
            lambda s, b, h, q, k: s + q // (s.to(torch.int64) + 1),
            "depends on the score: clamp that to 1 or more",
        ),
    ],
    ids=["index", "divisor"],
)
def test_index_or_divisor_from_score_must_be_clamped(mod, message):
    with one_line(ProblemError, message):
        check_index_ranges(trace_score(mod), DIMENSIONS)
