"""Which traces are kept: of the library's mods, by code and closure, and of nobody else's."""

from __future__ import annotations

import pytest
import torch

from attncheck.core.errors import TraceError
from attncheck.mods import library, masks, scores
from attncheck.mods import masks as compose
from attncheck.mods.spec import Dimensions, Spec
from attncheck.mods.trace import trace_derivative, trace_mask, trace_score

FEW, MANY = Dimensions(batch=1, heads=2, query=5, kv=7), Dimensions(batch=2, heads=4, query=9, kv=9)


def built(dimensions: Dimensions, name: str, *parts: Spec, **arguments):
    return library.build_mask(Spec.of(name, *parts, **arguments), dimensions)


def test_a_library_mask_is_traced_once_whatever_the_lengths():
    assert trace_mask(built(FEW, "causal")) is trace_mask(built(MANY, "causal"))
    both = Spec.of("causal"), Spec.of("sliding_window", window=3)
    assert trace_mask(built(FEW, "and", *both)) is trace_mask(built(MANY, "and", *both))
    assert trace_mask(masks.causal) is not trace_score(scores.none)


def test_another_number_in_the_closure_is_another_trace():
    first, second = (trace_mask(masks.sliding_window(window)) for window in (3, 4))
    assert (first.captured, second.captured) == ((3,), (4,))
    assert trace_mask(masks.sliding_window(3)) is first
    bottom = [trace_mask(built(sizes, "causal_bottom_right")) for sizes in (FEW, MANY)]
    assert bottom[0].captured == (2,)
    assert bottom[0] is not bottom[1]


def test_numbers_that_are_equal_and_not_the_same_are_told_apart():
    kept = [trace_mask(masks.sliding_window(window)) for window in (1, True, 1.0)]
    assert len({id(expression) for expression in kept}) == 3


def test_tensors_are_compared_by_what_they_hold_now():
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    first = trace_mask(masks.padding(lengths))
    assert trace_mask(masks.padding(lengths.clone())) is first
    assert trace_mask(masks.padding(lengths.long())) is not first
    other = trace_mask(masks.padding(lengths + 1))
    assert other.captured[0].tolist() == [4, 6]
    assert first.captured[0].tolist() == [3, 5]


def test_derivatives_are_kept_like_traces():
    first = trace_derivative(scores.softcap(30.0))
    assert trace_derivative(scores.softcap(30.0)) is first
    assert trace_derivative(scores.softcap(31.0)) is not first
    assert first is not trace_score(scores.softcap(30.0))


def test_somebody_elses_mod_is_traced_every_time():
    reach = 3

    def near(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < reach

    def composed():
        return compose.and_masks(masks.causal, near)

    before = [trace_mask(mod).captured for mod in (near, composed())]
    reach = 4
    after = [trace_mask(mod).captured for mod in (near, composed())]
    assert (before, after) == ([(3,), (3,)], [(4,), (4,)])


def test_a_mod_that_cannot_be_traced_is_refused_each_time():
    for _ in range(2):
        with pytest.raises(TraceError, match="cannot be traced"):
            trace_mask(masks.sliding_window(None))
