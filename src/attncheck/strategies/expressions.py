"""Masks and score mods beyond the library, as text (``mods.written``), valid by construction.

Numbers are small: with an index below 2^24 no whole number leaves 32 bits.
"""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from hypothesis import strategies as st

from attncheck.mods.spec import Dimensions, Spec
from attncheck.strategies.lengths import numbers

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["expressions", "score_expressions"]

Texts: TypeAlias = "SearchStrategy[str]"

_FORWARD, _BACKWARD = ("q_idx", "kv_idx", "h", "b"), ("kv_idx", "q_idx", "h", "b")
_COMPARISONS = (">=", "<", "==", "!=", ">", "<=")
_DIVISORS = ("2", "3", "5", "16", "17")
_FACTORS = ("2", "3", "7")
_LARGEST_STEP = 33
_STRENGTHS = ("0.5", "0.125", "2.0")  # fp32 holds them
_SCALES = (*_STRENGTHS, "-0.25")
_CAPS = ("8.0", "30.0")


def expressions(*, dimensions: Dimensions) -> SearchStrategy[Spec]:
    """Masks of up to three comparisons of indices, computed with as mods do.

    Shrinks to ``q_idx >= kv_idx``.

    Args:
        dimensions: Numbers that it compares with are up to the longer of query and kv.
    """
    return _conditions(max(dimensions.query, dimensions.kv)).map(_written)


def score_expressions() -> SearchStrategy[Spec]:
    """Score mods that keep scores finite, and about as large as they are; shrinks to ``score``."""
    return _scores().map(_written)


def _written(text: str) -> Spec:
    return Spec.of("expression", text=text)


def _filled(pattern: str, *parts: SearchStrategy[str]) -> SearchStrategy[str]:
    """``pattern`` with drawn texts; a part that is more than a name or a call in parentheses."""
    return st.tuples(*parts).map(lambda texts: pattern.format(*map(_atom, texts)))


def _atom(text: str) -> str:
    if text in _SIGNS or isinstance(ast.parse(text, mode="eval").body, _ATOMS):
        return text
    return f"({text})"


_SIGNS = {"+", "-", "//", "%", "&", "|"}
_ATOMS = (ast.Name, ast.Constant, ast.Call, ast.UnaryOp)


@lru_cache(maxsize=256)
def _conditions(longest: int) -> SearchStrategy[str]:
    short = _comparisons(longest)
    index = st.sampled_from(_FORWARD)
    computed = _compared(_stepped(_stepped(index)), longest)
    joined = _filled("{} {} {}", short, st.sampled_from("&|"), short)
    return st.one_of(
        short, computed, joined, _filled("~{}", short | joined), _filled("{} & {}", short, joined)
    )


@lru_cache(maxsize=256)
def _comparisons(longest: int) -> SearchStrategy[str]:
    """Of an index, or what one step makes of it, with another index or a number."""
    index = st.sampled_from(_FORWARD)
    return _compared(index | _stepped(index), longest)


def _compared(left: SearchStrategy[str], longest: int) -> SearchStrategy[str]:
    right = st.sampled_from(_BACKWARD) | numbers(0, longest).map(str)
    return st.tuples(left, st.sampled_from(_COMPARISONS), right).map(" ".join)


def _stepped(part: SearchStrategy[str]) -> SearchStrategy[str]:
    """What is one operation away from ``part``."""
    other = st.sampled_from((*_BACKWARD[:3], "3", "16"))
    return st.one_of(
        _filled("{} {} {}", part, st.sampled_from(("//", "%")), st.sampled_from(_DIVISORS)),
        _filled("{} {} {}", part, st.sampled_from("+-"), numbers(1, _LARGEST_STEP).map(str)),
        _filled("{} * {}", part, st.sampled_from(_FACTORS)),
        _filled("abs({} - {})", part, other),
        st.tuples(_LIMITS, part, other).map(lambda texts: "{}({}, {})".format(*texts)),
    )


_LIMITS = st.sampled_from(("minimum", "maximum"))


@lru_cache(maxsize=1)
def _scores() -> SearchStrategy[str]:
    score = st.just("score")
    return st.one_of(score, _changed(score), _changed(_changed(score)))


def _changed(score: SearchStrategy[str]) -> SearchStrategy[str]:
    """What is one operation away from ``score``."""
    strength, scale = st.sampled_from(_STRENGTHS), st.sampled_from(_SCALES)
    return st.one_of(
        _filled("{} * {}", score, scale),
        _filled("{} {} {} * {}", score, st.sampled_from("+-"), strength, st.sampled_from(_BIASES)),
        st.tuples(score, st.sampled_from(_CAPS)).map(_capped),
        st.tuples(_comparisons(_LARGEST_STEP), score, scale).map(_chosen),
        st.tuples(_LIMITS, score, strength).map(lambda texts: "{}({}, {})".format(*texts)),
    )


def _capped(drawn: tuple[str, str]) -> str:
    score, cap = drawn
    return f"tanh({_atom(score)} / {cap}) * {cap}"


def _chosen(drawn: tuple[str, str, str]) -> str:
    condition, score, scale = drawn
    return f"where({condition}, {score}, {_atom(score)} * {scale})"


# Whole numbers up to 16 whatever the indices.
_BIASES = (
    *(f"{index} % {divisor}" for index in _BACKWARD for divisor in _DIVISORS),
    *("minimum(abs(q_idx - kv_idx), 16)", "(kv_idx - q_idx) % 7") * 5,
)
