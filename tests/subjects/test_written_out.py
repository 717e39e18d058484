"""What is asked about a mask and a score mod before they are written out."""

from __future__ import annotations

import pytest

from attncheck.conventions import call_tensors
from attncheck.conventions.call_tensors import mask_size
from attncheck.inputs.problem import Problem
from attncheck.mods import library
from attncheck.mods.spec import Spec
from attncheck.subjects.torch_kernels import Sdpa

MASKS = {
    "full": Spec.of("full"),
    "causal": Spec.of("causal"),
    "window": Spec.of("sliding_window", window=7),
    "padding": Spec.of("padding", lengths=[3, 9]),
}
SCORES = {
    "none": library.NONE,
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
