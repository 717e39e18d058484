"""Windows of flash-attn's convention for diagonal bands of masks, on every small grid."""

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
def band_mask(band, query, kv):
    distance = torch.arange(kv) - torch.arange(query)[:, None]
    seen = torch.ones(query, kv, dtype=torch.bool)
    seen &= distance >= band.least if band.least is not None else seen
    seen &= distance <= band.most if band.most is not None else seen
    return seen.flatten().tolist()


@cache
def window_mask(window, query, kv, bottom_right):
    at = kv - query if bottom_right else 0
    return plain.banded(query, kv, *window, at).flatten().tolist()


def is_band(window, band, sequences, bottom_right):
    """Whether the window is the band in every sequence."""
    return all(
        window_mask(window, *lengths, bottom_right) == band_mask(band, *lengths)
        for lengths in sequences
    )


@pytest.mark.parametrize("bottom_right", [True, False])
def test_window_is_found_exactly_where_one_is_the_band(bottom_right):
    """In every sequence of up to 3 × 3 and every pair of them."""
    windows = 0
    for low, high in itertools.product(EDGES, EDGES):
        band = Band(low, high)
        for sequences in [*itertools.combinations(LENGTHS, 2), *((one,) for one in LENGTHS)]:
            window = band_window(band, sequences, bottom_right=bottom_right)
            if window is not None:
                windows += 1
                assert is_band(window, band, sequences, bottom_right)
            elif low is None or high is None or low <= high:
                others = itertools.product(range(-1, 6), repeat=2)
                assert not any(is_band(one, band, sequences, bottom_right) for one in others)
    assert windows > 1000


@pytest.mark.parametrize("bottom_right", [True, False])
def test_lead_shifts_the_band(bottom_right):
    """Where keys are counted from ``lead``, the band is ``lead`` lower within the sequence."""
    windows = 0
    for low, high, lead in itertools.product(EDGES, EDGES, (-2, 0, 3)):
        shifted = Band(*(None if edge is None else edge + lead for edge in (low, high)))
        for lengths in LENGTHS:
            window = band_window(Band(low, high), [lengths], bottom_right=bottom_right)
            leads = {"bottom_right": bottom_right, "leads": [lead]}
            assert band_window(shifted, [lengths], **leads) == window
            windows += window is not None
    assert windows > 100


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
        Spec.of("bottom_right", Spec.of("causal"), lengths=[3]),
        Spec.of("bottom_right", Spec.of("sliding_window", window=2), lengths=[4]),
    ],
    ids=str,
)
@pytest.mark.parametrize(("query", "kv"), [(5, 5), (4, 7), (7, 4)])
def test_band_of_a_mask_is_the_mask(mask, query, kv):
    dimensions = Dimensions(batch=1, heads=1, query=query, kv=kv)
    index = torch.arange(query)[:, None], torch.arange(kv)[None]
    zero = torch.zeros(1, 1, dtype=torch.int64)
    seen = build_mask(mask, dimensions)(zero, zero, *index).expand(query, kv)
    assert seen.flatten().tolist() == band_mask(band_of(mask, dimensions), query, kv)


@pytest.mark.parametrize(
    "mask",
    [Spec.of("prefix_lm", prefix=2), Spec.of("or", Spec.of("causal")), Spec.of("elsewhere.py::m")],
    ids=str,
)
def test_other_masks_have_no_band(mask):
    assert band_of(mask, Dimensions(batch=1, heads=1, query=4, kv=4)) is None
