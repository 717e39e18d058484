"""Strategies for mask and score mod expressions: what they draw and shrink to."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import torch

from attncheck.cases import strategies
from attncheck.core.mod_spec import Dimensions, Spec
from attncheck.mods.library import build_mask, build_score, check_mask

if TYPE_CHECKING:
    from collections.abc import Callable

DIMENSIONS = Dimensions(batch=2, heads=3, query=40, kv=50)
INDICES = [
    torch.arange(size).reshape([-1 if axis == own else 1 for own in range(4)])
    for axis, size in enumerate((2, 3, 40, 50))
]


def text(spec: Spec) -> str:
    return str(spec.values["text"])


def test_masks_are_valid_and_use_every_name_and_operator(draw) -> None:
    specs = draw(strategies.expressions(dimensions=DIMENSIONS), 300)
    long = Dimensions(batch=8, heads=64, query=2**23, kv=2**23)
    for spec in specs:
        check_mask(spec, long)
    masks = [build_mask(spec, DIMENSIONS)(*INDICES) for spec in specs]
    partial = [0 < float(mask.float().mean()) < 1 for mask in masks]
    assert sum(partial) > len(specs) / 2  # the others show every key, or none
    words = {word for spec in specs for word in re.findall(r"\w+|[^\w\s()]+", text(spec))}
    assert words >= {"b", "h", "q_idx", "kv_idx", "abs", "minimum", "maximum"}
    assert words >= {"+", "-", "*", "//", "%", ">=", ">", "<=", "<", "==", "!=", "&", "|", "~"}


def test_score_mods_are_valid_and_keep_scores_bounded(draw) -> None:
    specs = draw(strategies.score_expressions(), 300)
    scores = torch.linspace(-1e4, 1e4, 50, dtype=torch.float64).expand(2, 3, 40, 50)
    for spec in specs:
        modified = build_score(spec, DIMENSIONS)(scores, *INDICES)
        assert modified.dtype is torch.float64
        assert float(modified.abs().max()) <= 4e4 + 100, spec  # doubled twice, and two biases
    words = {word for spec in specs for word in re.findall(r"[a-z_]+|[^\w\s().]+", text(spec))}
    assert words >= {"score", "tanh", "where", "minimum", "maximum", "abs", "kv_idx", "+", "-", "*"}
    assert len({text(spec) for spec in specs}) > 120


MASKS: dict[str, tuple[str, str]] = {
    "": ("", "q_idx >= kv_idx"),
    "a remainder": ("%", "q_idx % 2 >= kv_idx"),
    "a quotient": ("//", "q_idx // 2 >= kv_idx"),
    "a distance": ("abs(q_idx - kv_idx)", "abs(q_idx - kv_idx) >= kv_idx"),
    "heads": ("h", "h >= kv_idx"),
    "and": ("&", "(q_idx >= kv_idx) & (q_idx >= kv_idx)"),
    "or": ("|", "(q_idx >= kv_idx) | (q_idx >= kv_idx)"),
    "not": ("~", "~(q_idx >= kv_idx)"),
    "equal": ("==", "q_idx == kv_idx"),
}


@pytest.mark.parametrize("cause", MASKS)
def test_mask_shrinks_to_its_cause(shrink, cause: str) -> None:
    substring, expected = MASKS[cause]
    words = {substring} if substring.isidentifier() else set()

    def wanted(spec: Spec) -> bool:
        return substring in text(spec) and words <= set(re.findall(r"\w+", text(spec)))

    assert text(shrink(strategies.expressions(dimensions=DIMENSIONS), wanted)) == expected


SCORES: dict[str, tuple[Callable[[str], bool], str]] = {
    "any": (lambda _: True, "score"),
    "tanh": (lambda t: "tanh" in t, "tanh(score / 8.0) * 8.0"),
    "where": (lambda t: "where" in t, "where(q_idx >= kv_idx, score, score * 0.5)"),
    "a bias": (lambda t: "score +" in t, "score + 0.5 * (kv_idx % 2)"),
    "a product": (lambda t: "*" in t, "score * 0.5"),
    "two": (
        lambda t: "tanh" in t and "+" in t and "where" not in t,
        "(tanh(score / 8.0) * 8.0) + 0.5 * (kv_idx % 2)",
    ),
}


@pytest.mark.parametrize("cause", SCORES)
def test_score_mod_shrinks_to_its_cause(shrink, cause: str) -> None:
    wanted, expected = SCORES[cause]
    spec = shrink(strategies.score_expressions(), lambda spec: wanted(text(spec)))
    assert text(spec) == expected
