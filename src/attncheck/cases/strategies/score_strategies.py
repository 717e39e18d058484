"""Strategies for score mods, expressions and compositions of masks and score mods.

Numbers are small, so that no integer exceeds 32 bits for indices below 2^24.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from attncheck.cases.strategies.mask_strategies import masks
from attncheck.cases.strategies.sizes import numbers
from attncheck.core.errors import require_known
from attncheck.core.mod_spec import NONE, Dimensions, Spec


def scores(*, names: Iterable[str] = ()) -> SearchStrategy[Spec]:
    """Score mods of the library, not composed, each at a few strengths.

    Args:
        names: Names of score mods, simplest first (default: all, from none on).

    Raises:
        UnknownName: for a name that is none of the library's plain score mods.
    """
    chosen = tuple(names) or tuple(_SCORES)
    require_known("score mod", chosen, _SCORES)
    return st.one_of([_SCORES[name] for name in chosen])


def captured_scores() -> SearchStrategy[Spec]:
    """Score mods that read tensors, alone and before or after a softcap or temperature.

    Shrinks to ``alibi``.
    """
    bending = scores(names=("temperature", "softcap"))
    # A softcap after the addition enters its gradient; one before it does not.
    chained = st.tuples(_ADDED, bending) | st.tuples(bending, _ADDED) | st.tuples(_ADDED, _ADDED)
    return _ADDED | _SCORES["offset"] | chained.map(lambda parts: Spec.of("chain", *parts))


_SCORES: dict[str, SearchStrategy[Spec]] = {
    NONE.name: st.just(NONE),
    "alibi": st.just(Spec.of("alibi")),
    "softcap": st.sampled_from((20.0, 1.5, 50.0)).map(lambda cap: Spec.of("softcap", cap=cap)),
    "temperature": st.sampled_from((2.0, 0.25)).map(
        lambda temperature: Spec.of("temperature", temperature=temperature)
    ),
    "relative_bias": st.integers(0, 8).map(
        lambda distance: Spec.of("relative_bias", distance=distance, seed=0)
    ),
    "bias": st.tuples(st.integers(0, 1), st.integers(0, 1)).map(
        lambda each: Spec.of("bias", seed=0, per_batch=each[0], per_head=each[1])
    ),
}
_ADDED = st.one_of([_SCORES[name] for name in ("alibi", "relative_bias", "bias")])
_SCORES["offset"] = st.tuples(_ADDED, st.sampled_from((1, 0, 33))).map(
    lambda drawn: Spec.of("offset", drawn[0], rows=drawn[1])
)


_FORWARD, _BACKWARD = ("q_idx", "kv_idx", "h", "b"), ("kv_idx", "q_idx", "h", "b")
_COMPARISONS = (">=", "<", "==", "!=", ">", "<=")
_DIVISORS = ("2", "3", "5", "16", "17")
_FACTORS = ("2", "3", "7")
_LARGEST_STEP = 33
_STRENGTHS = ("0.5", "0.125", "2.0")  # exact in fp32
_SCALES = (*_STRENGTHS, "-0.25")
_CAPS = ("8.0", "30.0")


def expressions(*, dimensions: Dimensions) -> SearchStrategy[Spec]:
    """Masks of up to three comparisons of indices, with the arithmetic that mods use.

    Shrinks to ``q_idx >= kv_idx``.

    Args:
        dimensions: Indices are compared with numbers up to the longer of query and kv.
    """
    return _conditions(max(dimensions.query, dimensions.kv)).map(_expression_spec)


def score_expressions() -> SearchStrategy[Spec]:
    """Score mods that keep scores finite and of similar size; shrinks to ``score``."""
    return _scores().map(_expression_spec)


def _expression_spec(text: str) -> Spec:
    return Spec.of("expression", text=text)


def _fill(pattern: str, *parts: SearchStrategy[str]) -> SearchStrategy[str]:
    """Fill ``pattern`` with drawn texts; those that are no name, number or call in parentheses."""
    return st.tuples(*parts).map(lambda texts: pattern.format(*map(_parenthesize, texts)))


def _parenthesize(text: str) -> str:
    if text in _SIGNS or isinstance(ast.parse(text, mode="eval").body, _ATOMS):
        return text
    return f"({text})"


_SIGNS = {"+", "-", "//", "%", "&", "|"}
_ATOMS = (ast.Name, ast.Constant, ast.Call, ast.UnaryOp)


@lru_cache(maxsize=256)
def _conditions(longest: int) -> SearchStrategy[str]:
    short = _comparisons(longest)
    index = st.sampled_from(_FORWARD)
    computed = _compare(_step_index(_step_index(index)), longest)
    joined = _fill("{} {} {}", short, st.sampled_from("&|"), short)
    return st.one_of(
        short, computed, joined, _fill("~{}", short | joined), _fill("{} & {}", short, joined)
    )


@lru_cache(maxsize=256)
def _comparisons(longest: int) -> SearchStrategy[str]:
    """Comparisons of an index, or one step from it, with another index or a number."""
    index = st.sampled_from(_FORWARD)
    return _compare(index | _step_index(index), longest)


def _compare(left: SearchStrategy[str], longest: int) -> SearchStrategy[str]:
    right = st.sampled_from(_BACKWARD) | numbers(0, longest).map(str)
    return st.tuples(left, st.sampled_from(_COMPARISONS), right).map(" ".join)


def _step_index(part: SearchStrategy[str]) -> SearchStrategy[str]:
    """Return expressions one operation away from ``part``."""
    other = st.sampled_from((*_BACKWARD[:3], "3", "16"))
    return st.one_of(
        _fill("{} {} {}", part, st.sampled_from(("//", "%")), st.sampled_from(_DIVISORS)),
        _fill("{} {} {}", part, st.sampled_from("+-"), numbers(1, _LARGEST_STEP).map(str)),
        _fill("{} * {}", part, st.sampled_from(_FACTORS)),
        _fill("abs({} - {})", part, other),
        st.tuples(_LIMITS, part, other).map(lambda texts: "{}({}, {})".format(*texts)),
    )


_LIMITS = st.sampled_from(("minimum", "maximum"))


@lru_cache(maxsize=1)
def _scores() -> SearchStrategy[str]:
    score = st.just("score")
    return st.one_of(score, _change_score(score), _change_score(_change_score(score)))


def _change_score(score: SearchStrategy[str]) -> SearchStrategy[str]:
    """Return expressions one operation away from ``score``."""
    strength, scale = st.sampled_from(_STRENGTHS), st.sampled_from(_SCALES)
    return st.one_of(
        _fill("{} * {}", score, scale),
        _fill("{} {} {} * {}", score, st.sampled_from("+-"), strength, st.sampled_from(_BIASES)),
        st.tuples(score, st.sampled_from(_CAPS)).map(_cap_score),
        st.tuples(_comparisons(_LARGEST_STEP), score, scale).map(_scale_where),
        st.tuples(_LIMITS, score, strength).map(lambda texts: "{}({}, {})".format(*texts)),
    )


def _cap_score(drawn: tuple[str, str]) -> str:
    score, cap = drawn
    return f"tanh({_parenthesize(score)} / {cap}) * {cap}"


def _scale_where(drawn: tuple[str, str, str]) -> str:
    condition, score, scale = drawn
    return f"where({condition}, {score}, {_parenthesize(score)} * {scale})"


# Integers up to 16, whatever the indices.
_BIASES = (
    *(f"{index} % {divisor}" for index in _BACKWARD for divisor in _DIVISORS),
    *("minimum(abs(q_idx - kv_idx), 16)", "(kv_idx - q_idx) % 7") * 5,
)


_DEEPEST = 3
_MOST_PARTS = 3
_BEYOND = 7  # Rows by which an offset exceeds kv.


def compositions(*, dimensions: Dimensions) -> SearchStrategy[Spec]:
    """``and``, ``or`` and ``not`` of the library's masks and of ``offsets``, up to three deep.

    Shrinks to ``and(full, full)``, which hides no key: a failure with it is not about masks.
    """
    return _nested(dimensions, _DEEPEST)


@lru_cache(maxsize=256)
def _nested(dimensions: Dimensions, deepest: int) -> SearchStrategy[Spec]:
    part = masks(dimensions=dimensions) | offsets(dimensions=dimensions)
    if deepest > 1:
        part |= _nested(dimensions, deepest - 1)
    # ``not`` draws unused parts too, or Hypothesis would take it for the simplest operator.
    parts = st.lists(part, min_size=2, max_size=_MOST_PARTS)
    return st.tuples(_OPERATORS, parts).map(
        lambda drawn: Spec.of(drawn[0], *drawn[1][: 1 if drawn[0] == "not" else _MOST_PARTS])
    )


def offsets(*, dimensions: Dimensions) -> SearchStrategy[Spec]:
    """``offset`` of a mask of the library, by 0 rows up to more than all keys.

    Shrinks to ``offset(full, rows=0)``.

    Args:
        dimensions: Dimensions of the Problem; the inner mask fits one with ``rows`` more rows.
    """
    return _offsets(dimensions)


@st.composite
def _offsets(draw: st.DrawFn, dimensions: Dimensions) -> Spec:
    kv = dimensions.kv
    rows = draw(numbers(0, max(dimensions.query, kv), kv, kv + _BEYOND))
    later = replace(dimensions, query=dimensions.query + rows)
    return Spec.of("offset", draw(masks(dimensions=later)), rows=rows)


_OPERATORS = st.sampled_from(("and", "or", "not", "and", "or"))


def score_chains() -> SearchStrategy[Spec]:
    """Two or three score mods one after another; shrinks to ``chain(none, none)``."""
    parts = st.lists(scores() | score_expressions(), min_size=2, max_size=_MOST_PARTS)
    return parts.map(lambda drawn: Spec.of("chain", *drawn))
