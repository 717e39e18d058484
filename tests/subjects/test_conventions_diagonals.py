"""A window is what the mask says, on every small grid."""

import itertools
from functools import cache

import pytest
import torch
from tests.subjects import plain_kernels as plain

from attncheck.core.mod_spec import Dimensions, Spec
from attncheck.mods.library import build_mask
from attncheck.mods.masks import Band, band_of
from attncheck.subjects.conventions.window_masks import band_window

EDGES = [None, *range(-2, 3)]
LENGTHS = [(q, k) for q in range(4) for k in range(4)]


@cache
def seen_by(edges, query, kv):
    distance = torch.arange(kv) - torch.arange(query)[:, None]
    seen = torch.ones(query, kv, dtype=torch.bool)
    seen &= distance >= edges.least if edges.least is not None else seen
    seen &= distance <= edges.most if edges.most is not None else seen
    return seen.flatten().tolist()


@cache
def seen_through(edges, query, kv, bottom_right):
    at = kv - query if bottom_right else 0
    return plain.banded(query, kv, *edges, at).flatten().tolist()


def is_it(edges, wanted, sequences, bottom_right):
    return all(
        seen_through(edges, *lengths, bottom_right) == seen_by(wanted, *lengths)
        for lengths in sequences
    )


@pytest.mark.parametrize("bottom_right", [True, False])
def test_a_window_that_is_found_is_the_band_and_one_that_is_there_is_found(bottom_right):
    """In one sequence of up to 3 × 3, and in every pair of them."""
    found = 0
    for low, high in itertools.product(EDGES, EDGES):
        edges = Band(low, high)
        for sequences in [*itertools.combinations(LENGTHS, 2), *((one,) for one in LENGTHS)]:
            answer = band_window(edges, sequences, bottom_right=bottom_right)
            if answer is not None:
                found += 1
                assert is_it(answer, edges, sequences, bottom_right)
            elif low is None or high is None or low <= high:
                tried = itertools.product(range(-1, 6), repeat=2)
                assert not any(is_it(one, edges, sequences, bottom_right) for one in tried)
    assert found > 1000


@pytest.mark.parametrize("bottom_right", [True, False])
def test_a_lead_is_a_band_that_lies_elsewhere(bottom_right):
    """Where keys are counted on from ``lead`` the band is ``lead`` lower in a sequence's own."""
    found = 0
    for low, high, lead in itertools.product(EDGES, EDGES, (-2, 0, 3)):
        elsewhere = Band(*(None if edge is None else edge + lead for edge in (low, high)))
        for lengths in LENGTHS:
            plain = band_window(Band(low, high), [lengths], bottom_right=bottom_right)
            leads = {"bottom_right": bottom_right, "leads": [lead]}
            assert band_window(elsewhere, [lengths], **leads) == plain
            found += plain is not None
    assert found > 100


@pytest.mark.parametrize(
    "mask",
    [
        Spec.of("full"),
        Spec.of("causal"),
        Spec.of("causal_bottom_right"),
        Spec.of("sliding_window", window=3),
        Spec.of("sliding_window", window=0),
        Spec.of("and", Spec.of("sliding_window", window=3), Spec.of("causal_bottom_right")),
        Spec.of("offset", Spec.of("causal"), rows=2),
        Spec.of("offset", Spec.of("offset", Spec.of("causal_bottom_right"), rows=1), rows=2),
        Spec.of("offset", Spec.of("sliding_window", window=3), rows=2),
    ],
    ids=str,
)
@pytest.mark.parametrize(("query", "kv"), [(5, 5), (4, 7), (7, 4)])
def test_a_mask_is_the_band_that_it_is_said_to_be(mask, query, kv):
    dimensions = Dimensions(batch=1, heads=1, query=query, kv=kv)
    index = torch.arange(query)[:, None], torch.arange(kv)[None]
    zero = torch.zeros(1, 1, dtype=torch.int64)
    seen = build_mask(mask, dimensions)(zero, zero, *index).expand(query, kv)
    assert seen.flatten().tolist() == seen_by(band_of(mask, dimensions), query, kv)


@pytest.mark.parametrize(
    "mask",
    [Spec.of("prefix_lm", prefix=2), Spec.of("or", Spec.of("causal")), Spec.of("elsewhere.py::m")],
    ids=str,
)
def test_of_other_masks_nothing_is_said(mask):
    assert band_of(mask, Dimensions(batch=1, heads=1, query=4, kv=4)) is None
