"""Score mods, expressions and compositions of masks and score mods.

Numbers are small: with an index below 2^24 no whole number leaves 32 bits.
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
        names: Which, simplest first (default: all, from none on).

    Raises:
        UnknownName: for a name that is none of the library's plain score mods.
    """
    chosen = tuple(names) or tuple(_SCORES)
    require_known("score mod", chosen, _SCORES)
    return st.one_of([_SCORES[name] for name in chosen])


def captured_scores() -> SearchStrategy[Spec]:
    """Score mods that read numbers from tensors, alone and before or behind one that bends scores.

    Shrinks to ``alibi``.
    """
    bent = scores(names=("temperature", "softcap"))
    # A bend behind what adds has a part in its gradient; one before it has none.
    chained = st.tuples(_ADDED, bent) | st.tuples(bent, _ADDED) | st.tuples(_ADDED, _ADDED)
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
    """Return what is one operation away from ``part``."""
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
    """Return what is one operation away from ``score``."""
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


_DEEPEST = 3
_MOST_PARTS = 3
_BEYOND = 7  # rows behind the last key


def compositions(*, dimensions: Dimensions) -> SearchStrategy[Spec]:
    """``and``, ``or`` and ``not`` of the library's masks, up to three one inside the other.

    Among the masks are such of later rows (``offsets``).

    Shrinks to ``and(full, full)``, which is no mask at all: what fails with it has nothing to do
    with masks.
    """
    return _nested(dimensions, _DEEPEST)


@lru_cache(maxsize=256)
def _nested(dimensions: Dimensions, deepest: int) -> SearchStrategy[Spec]:
    part = masks(dimensions=dimensions) | offsets(dimensions=dimensions)
    if deepest > 1:
        part |= _nested(dimensions, deepest - 1)
    # ``not`` leaves out what was drawn for others: with fewer choices it would be the simplest.
    parts = st.lists(part, min_size=2, max_size=_MOST_PARTS)
    return st.tuples(_KINDS, parts).map(
        lambda drawn: Spec.of(drawn[0], *drawn[1][: 1 if drawn[0] == "not" else _MOST_PARTS])
    )


def offsets(*, dimensions: Dimensions) -> SearchStrategy[Spec]:
    """``offset`` of a mask of the library: rows 0 to beyond all keys later.

    Shrinks to ``offset(full, rows=0)``.

    Args:
        dimensions: Of the rows that are asked; the part fits the longer problem.
    """
    return _offsets(dimensions)


@st.composite
def _offsets(draw: st.DrawFn, dimensions: Dimensions) -> Spec:
    kv = dimensions.kv
    rows = draw(numbers(0, max(dimensions.query, kv), kv, kv + _BEYOND))
    later = replace(dimensions, query=dimensions.query + rows)
    return Spec.of("offset", draw(masks(dimensions=later)), rows=rows)


_KINDS = st.sampled_from(("and", "or", "not", "and", "or"))


def score_chains() -> SearchStrategy[Spec]:
    """Two or three score mods one after another; shrinks to ``chain(none, none)``."""
    parts = st.lists(scores() | score_expressions(), min_size=2, max_size=_MOST_PARTS)
    return parts.map(lambda drawn: Spec.of("chain", *drawn))
