"""Masks written out once, and which Problems share a trace."""

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
def test_torch_is_asked_about_a_tensor_like_the_mask(mask, score, dtype):
    problem = small(mask=MASKS[mask], score=SCORES[score], dtype=dtype)
    made, like = (f(problem, "cpu") for f in (Sdpa("math")._mask, Sdpa("math")._like_its_mask))
    if made is None or like is None:
        assert made is like
        return
    assert (like.shape, like.dtype, like.stride()) == (made.shape, made.dtype, made.stride())
    assert made.shape == mask_size(problem, "cpu")


def test_what_a_name_of_a_file_means_is_not_kept(monkeypatch):
    """Next time it may mean something else; what the library's mean is asked once."""
    made = []
    count = call_tensors.once_for_mods(made.append)
    for built_in in (library.BUILT_IN, library.BUILT_IN - {"alibi"}):
        monkeypatch.setattr(library, "BUILT_IN", built_in)
        for seed in (1, 2):
            problem = small(score=Spec.of("alibi"), seed=seed)
            count(call_tensors.ModKey.of(problem, "cpu", "mask", "score"))
    assert len(made) == 3


MASK = Spec.of("padding", lengths=[5])
PROBLEM = Problem(query=6, kv=9, mask=MASK, score=Spec.of("softcap", cap=20.0))
READERS = (kernel_mods.mask_expression, kernel_mods.score_expression, kernel_mods.slope_expression)


@pytest.fixture
def nothing_kept():
    """No trace kept from before, and none that was checked by a stand-in kept for later."""
    kept = (kernel_mods._mask, kernel_mods._score)
    for each in kept:
        each.forget()
    yield
    for each in kept:
        each.forget()


@pytest.mark.parametrize("read", READERS)
def test_dtype_seed_and_head_dim_are_not_a_mods(read):
    other = PROBLEM.replace(dtype="fp32", seed=3, head_dim=16, scale=USUAL_SCALE)
    assert read(PROBLEM, "cpu") is read(other, "cpu")


@pytest.mark.parametrize("read", READERS[:2])
@pytest.mark.parametrize("change", [{"kv": 10}, {"query": 7}, {"heads": 2, "kv_heads": 2}])
@pytest.mark.usefixtures("nothing_kept")
def test_a_trace_that_dimensions_share_is_checked_in_each(monkeypatch, read, change):
    """The library's mods have one trace whatever the lengths: what it says there is asked anew."""
    asked = []

    def checked(_, __, dimensions, **___):
        asked.append(dimensions)
        return 0

    monkeypatch.setattr(trace, "count_disagreements", checked)
    problems = [PROBLEM, PROBLEM.replace(**change)]
    for problem in [*problems, *problems]:
        read(problem, "cpu")
    assert asked == [problem.dimensions for problem in problems]


def test_dimensions_are_a_masks():
    bottom = PROBLEM.replace(mask=Spec.of("causal_bottom_right"))
    first, second = (kernel_mods.mask_expression(bottom.replace(kv=kv), "cpu") for kv in (9, 10))
    assert (first.captured, second.captured) == ((3,), (4,))


def test_numbers_are_a_mods():
    other = PROBLEM.replace(mask=Spec.of("padding", lengths=[4]))
    assert kernel_mods.mask_expression(PROBLEM, "cpu") is not kernel_mods.mask_expression(
        other, "cpu"
    )


def test_a_wrong_trace_is_refused_each_time_with_the_problem_it_was_asked_for(monkeypatch):
    monkeypatch.setattr(trace, "count_disagreements", lambda *_, **__: 3)
    problems = [PROBLEM.replace(query=61, seed=seed) for seed in (1, 2)]
    for problem in problems:
        with pytest.raises(TraceError, match=f"at 3 sampled indices of .*seed {problem.seed}"):
            kernel_mods.mask_expression(problem, "cpu")
