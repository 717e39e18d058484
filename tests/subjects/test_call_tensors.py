"""Mask tensors of a call, and which Problems share the trace of a mask or score mod."""

import pytest

from attncheck.core.errors import TraceError
from attncheck.core.mod_spec import NONE, Spec
from attncheck.inputs.problem import USUAL_SCALE, Problem
from attncheck.mods import library, trace
from attncheck.subjects import kernel_mods
from attncheck.subjects.conventions import call_tensors
from attncheck.subjects.conventions.call_tensors import mask_size
from attncheck.subjects.torch_kernels import Sdpa

MASKS = {
    "full": Spec.of("full"),
    "causal": Spec.of("causal"),
    "window": Spec.of("sliding_window", window=7),
    "padding": Spec.of("padding", lengths=[3, 9]),
}
SCORES = {
    "none": NONE,
    "alibi": Spec.of("alibi"),
    "bias": Spec.of("relative_bias", distance=8, seed=0),
    "expression": Spec.of("expression", text="score + 0.1 * q_idx"),
}


def small(**changes) -> Problem:
    return Problem(**({"batch": 2, "heads": 4, "query": 6, "kv": 9, "head_dim": 8} | changes))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_placeholder_mask_has_the_layout_of_the_mask(mask, score, dtype):
    """torch is asked whether it supports a Problem with the placeholder in place of the mask."""
    problem = small(mask=MASKS[mask], score=SCORES[score], dtype=dtype)
    built, like = (f(problem, "cpu") for f in (Sdpa("math")._mask, Sdpa("math")._like_its_mask))
    if built is None or like is None:
        assert built is like
        return
    assert (like.shape, like.dtype, like.stride()) == (built.shape, built.dtype, built.stride())
    assert built.shape == mask_size(problem, "cpu")


def test_only_mods_of_the_library_are_cached(monkeypatch):
    """A name of a file may mean another mod next time."""
    keys = []
    record_once = call_tensors.once_for_mods(keys.append)
    for built_in in (library.BUILT_IN, library.BUILT_IN - {"alibi"}):
        monkeypatch.setattr(library, "BUILT_IN", built_in)
        for seed in (1, 2):
            problem = small(score=Spec.of("alibi"), seed=seed)
            record_once(call_tensors.ModKey.of(problem, "cpu", "mask", "score"))
    assert len(keys) == 3


MASK = Spec.of("padding", lengths=[5])
PROBLEM = Problem(query=6, kv=9, mask=MASK, score=Spec.of("softcap", cap=20.0))
READERS = (kernel_mods.mask_expression, kernel_mods.score_expression, kernel_mods.slope_expression)


@pytest.fixture
def empty_trace_cache():
    """Forget earlier traces, and afterwards those that a test checked with a stand-in."""
    caches = (kernel_mods._mask, kernel_mods._score)
    for cache in caches:
        cache.forget()
    yield
    for cache in caches:
        cache.forget()


@pytest.mark.parametrize("read", READERS)
def test_problems_of_another_dtype_seed_or_head_dim_share_a_trace(read):
    other = PROBLEM.replace(dtype="fp32", seed=3, head_dim=16, scale=USUAL_SCALE)
    assert read(PROBLEM, "cpu") is read(other, "cpu")


@pytest.mark.parametrize("read", READERS[:2])
@pytest.mark.parametrize("change", [{"kv": 10}, {"query": 7}, {"heads": 2, "kv_heads": 2}])
@pytest.mark.usefixtures("empty_trace_cache")
def test_shared_trace_is_checked_once_for_each_dimensions(monkeypatch, read, change):
    """A library mod has one trace for all lengths; it is compared with the mod at each of them."""
    checked = []

    def record_check(_, __, dimensions, **___):
        checked.append(dimensions)
        return 0

    monkeypatch.setattr(trace, "count_disagreements", record_check)
    problems = [PROBLEM, PROBLEM.replace(**change)]
    for problem in [*problems, *problems]:
        read(problem, "cpu")
    assert checked == [problem.dimensions for problem in problems]


def test_trace_of_a_mask_captures_the_dimensions():
    bottom = PROBLEM.replace(mask=Spec.of("causal_bottom_right"))
    first, second = (kernel_mods.mask_expression(bottom.replace(kv=kv), "cpu") for kv in (9, 10))
    assert (first.captured, second.captured) == ((3,), (4,))


def test_masks_with_other_numbers_do_not_share_a_trace():
    other = PROBLEM.replace(mask=Spec.of("padding", lengths=[4]))
    assert kernel_mods.mask_expression(PROBLEM, "cpu") is not kernel_mods.mask_expression(
        other, "cpu"
    )


def test_wrong_trace_is_refused_each_time_with_the_problem_of_the_call(monkeypatch):
    monkeypatch.setattr(trace, "count_disagreements", lambda *_, **__: 3)
    problems = [PROBLEM.replace(query=61, seed=seed) for seed in (1, 2)]
    for problem in problems:
        with pytest.raises(TraceError, match=f"at 3 sampled indices of .*seed {problem.seed}"):
            kernel_mods.mask_expression(problem, "cpu")
