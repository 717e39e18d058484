"""Masks and score mods as text: they compute what the text says; bad text is refused."""

import ast
import operator
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from tests.messages import one_line

from attncheck.cases import strategies
from attncheck.core.errors import ProblemError
from attncheck.core.formats import fp32
from attncheck.core.mod_spec import Dimensions, Spec
from attncheck.inputs.problem import Case, Problem
from attncheck.mods import formula, library
from attncheck.mods.index_ranges import check_index_ranges
from attncheck.mods.trace import trace_mask, trace_score
from attncheck.subjects.capabilities import named_kernels
from attncheck.verify.evidence_builder import EvidenceBuilder

DIMENSIONS = Dimensions(batch=2, heads=3, query=5, kv=7)
AXES = [
    torch.arange(size).reshape([-1 if axis == own else 1 for own in range(4)])
    for axis, size in enumerate((2, 3, 5, 7))
]
SHAPE = (2, 3, 5, 7)
SCORES = torch.linspace(-30.0, 30.0, 210, dtype=torch.float64).reshape(SHAPE)

# Each text, and the same mask by hand in Python on whole numbers.
MASKS = {
    "q_idx >= kv_idx": lambda b, h, i, j: i >= j,
    "q_idx < kv_idx": lambda b, h, i, j: i < j,
    "q_idx > 2": lambda b, h, i, j: i > 2,
    "(b == 1) | (kv_idx != h)": lambda b, h, i, j: b == 1 or j != h,
    "~(q_idx % 3 <= kv_idx)": lambda b, h, i, j: i % 3 > j,
    "(q_idx - kv_idx) % 3 == 1": lambda b, h, i, j: (i - j) % 3 == 1,
    "(q_idx - kv_idx) // 2 == -1": lambda b, h, i, j: i - j in {-1, -2},
    "(q_idx - kv_idx) % -3 == -1": lambda b, h, i, j: (i - j) % 3 == 2,
    "(kv_idx - 4) // -2 > -h": lambda b, h, i, j: -((j - 4) / 2) // 1 > -h,
    "(q_idx <= 3) & (abs(q_idx - kv_idx) < 2)": lambda b, h, i, j: i <= 3 and -2 < i - j < 2,
    "minimum(q_idx, 3) * 2 >= kv_idx": lambda b, h, i, j: 2 * (i if i < 3 else 3) >= j,
    "maximum(2, kv_idx) == maximum(q_idx, h)": lambda b, h, i, j: max(2, j) == max(i, h),
    "-(kv_idx + 2 * 3 - 7) == b - h": lambda b, h, i, j: 1 - j == b - h,
}


def visible(text):
    """Whether the mask ``text`` shows each key to each row, at all indices."""
    mask = library.build_mask(Spec.of("expression", text=text), DIMENSIONS)
    return mask(*AXES).expand(SHAPE)


def matches_hand_version(text):
    expected = [MASKS[text](*place) for place in np.ndindex(*SHAPE)]
    return visible(text).flatten().tolist() == expected


@pytest.mark.parametrize("text", MASKS)
def test_mask_text_matches_hand_written_function(text):
    assert matches_hand_version(text)


PLANTED = [
    ("_COMPARISONS", ast.GtE, ">"),
    ("_COMPARISONS", ast.Lt, "<="),
    ("_COMPARISONS", ast.NotEq, "=="),
    ("_LOGIC", ast.BitAnd, "|"),
    ("_LOGIC", ast.BitOr, "&"),
    ("_ARITHMETIC", ast.Mod, ("//", operator.mod)),
    ("_ARITHMETIC", ast.FloorDiv, ("%", operator.floordiv)),
    ("_ARITHMETIC", ast.Sub, ("+", operator.sub)),
]


@pytest.mark.parametrize(("table", "node", "other"), PLANTED, ids=lambda v: str(v)[:30])
def test_wrong_operator_is_detected(monkeypatch, empty_cache, table, node, other):
    monkeypatch.setitem(getattr(formula, table), node, other)
    assert not all(map(matches_hand_version, MASKS))


@pytest.fixture
def empty_cache():
    """Forget parsed formulas, so that none hides a planted fault or outlives it."""
    formula.mask_formula_code.cache_clear()
    yield
    formula.mask_formula_code.cache_clear()


# The functions in NumPy: Python's own ``eval`` on arrays is a second reading of the same text.
NUMPY_FUNCTIONS = {
    "minimum": np.minimum,
    "maximum": np.maximum,
    "where": np.where,
    "abs": np.abs,
    # torch's tanh, for the same bits: the test compares its argument.
    "tanh": lambda x: torch.tanh(torch.from_numpy(np.ascontiguousarray(x))).numpy(),
}
ARRAYS = dict(zip(("b", "h", "q_idx", "kv_idx"), (axis.numpy() for axis in AXES), strict=True))


@given(spec=strategies.expressions(dimensions=DIMENSIONS))
@settings(max_examples=25, deadline=None, database=None)
def test_drawn_mask_matches_numpy_evaluation(spec):
    text = str(spec.values["text"])
    expected = eval(text, NUMPY_FUNCTIONS, ARRAYS)  # noqa: S307  (drawn by our own grammar)
    assert np.array_equal(visible(text), np.broadcast_to(expected, SHAPE))
    traced = trace_mask(library.build_mask(spec, DIMENSIONS))
    assert np.array_equal(traced.evaluate(*AXES).expand(SHAPE), np.broadcast_to(expected, SHAPE))
    check_index_ranges(traced, DIMENSIONS)


@given(spec=strategies.score_expressions())
@settings(max_examples=25, deadline=None, database=None)
def test_drawn_score_mod_matches_numpy_evaluation(spec):
    text = str(spec.values["text"])
    expected = eval(text, NUMPY_FUNCTIONS, ARRAYS | {"score": SCORES.numpy()})  # noqa: S307  (as above)
    mod = library.build_score(spec, DIMENSIONS)
    assert np.array_equal(mod(SCORES, *AXES).numpy(), expected)
    traced = trace_score(mod)
    assert np.array_equal(traced.evaluate(SCORES, *AXES).numpy(), expected)
    check_index_ranges(traced, DIMENSIONS)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("score + kv_idx * 0.5", Fraction(2**24 + 1, 2)),
        ("score + 0.1 * kv_idx", float(2**24 + 1) * fp32(0.1)),
        ("score + where(kv_idx > 3, kv_idx, 0.5)", 2**24 + 1),
        ("score + maximum(kv_idx, 0.5)", 2**24 + 1),
        ("score + where(kv_idx > 3, 0.1, 1)", fp32(0.1)),
        ("score + (kv_idx - 1) / 3", 2**24 / 3.0),
        ("score + 0.1 * 3", fp32(fp32(0.1) * 3)),
        ("score + 16777217 * 1.0", 2**24),  # a real number, of fp32
    ],
)
def test_arithmetic_is_in_score_dtype(text, value):
    """In float64 no index is rounded to fp32, but constants are the fp32 numbers of a kernel."""
    mod = formula.formula_score(text, Dimensions(batch=1, heads=1, query=1, kv=2**24 + 2))
    zero = torch.zeros(1, dtype=torch.int64)
    result = mod(torch.zeros(1, dtype=torch.float64), zero, zero, zero, zero + 2**24 + 1)
    assert result.dtype is torch.float64
    assert result.item() == value


@pytest.mark.parametrize("width", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_score_mod_keeps_score_dtype(width, dtype):
    mod = formula.formula_score("where(h == 1, 2, 0.5) * kv_idx / 3 + score", DIMENSIONS)
    assert mod(SCORES.to(dtype), *(axis.to(width) for axis in AXES)).dtype is dtype


MAY_BE = "there are + - * // % - abs, comparisons, & | ~, minimum, maximum, in scores / tanh where."
JOINED = "join comparisons, as (b < h) & (h < 3)."
DIVISOR = "a divisor is a number other than 0."
COMPUTES = "computes with a truth value: compare, join, or choose with those."
BAD_MASKS = {
    "q_idx": "gives a whole number: a mask compares, as in q_idx >= kv_idx.",
    "q_idx % h < 3": f"column 1: `q_idx % h` divides by h: {DIVISOR}",
    "b + q_idx // 0 < 3": f"column 5: `q_idx // 0` divides by 0: {DIVISOR}",
    "q_idx / 2 < 3": "column 1: `q_idx / 2` is a real number: in a mask divide with //, which "
    "rounds down.",
    "1 < 2": "column 1: `1 < 2` compares two numbers: compare an index, or leave it out.",
    "b >= h & h > 2": f"column 1: `b >= h & h > 2` compares twice: {JOINED}",
    "(b < h) & h": f"column 1: `(b < h) & h` takes a number for a truth value: {JOINED}",
    "~b": f"column 1: `~b` takes a number for a truth value: {JOINED}",
    "(b < h) + 1 > 0": f"column 1: `(b < h) + 1` {COMPUTES}",
    "-(b < h)": f"column 1: `-(b < h)` {COMPUTES}",
    "b == (b < h)": f"column 1: `b == (b < h)` {COMPUTES}",
    "row < 3": "column 1: `row` is not known: choose from b, h, q_idx, kv_idx.",
    "b < 2.5": "column 5: `2.5` is no number of it: write whole numbers.",
    "b < True": "column 5: `True` is no number of it: write whole numbers.",
    "score < b": "column 1: `score` is not known: choose from b, h, q_idx, kv_idx.",
    "where(b < h, b, h) < 3": "column 1: `where` is no function of it: choose from abs, minimum, "
    "maximum.",
    "abs(b, h) < 3": "column 1: `abs(b, h)` has other arguments: abs takes 1, without names.",
    "minimum(b, x=h) < 3": "column 1: `minimum(b, x=h)` has other arguments: minimum takes 2, "
    "without names.",
    "q_idx and b": f"column 1: `q_idx and b` is not in the vocabulary: {MAY_BE}",
    "not q_idx": f"column 1: `not q_idx` is not in the vocabulary: {MAY_BE}",
    "b ** 2 < 3": f"column 1: `b ** 2` is not in the vocabulary: {MAY_BE}",
    "b is h": f"column 1: `b is h` is not in the vocabulary: {MAY_BE}",
    "[b][0] < 1": f"column 1: `[b][0]` is not in the vocabulary: {MAY_BE}",
    "__import__('os') < 1": "column 1: `__import__` is no function of it: choose from abs, "
    "minimum, maximum.",
    "b.__class__ == h": f"column 1: `b.__class__` is not in the vocabulary: {MAY_BE}",
    "b <": "is no expression: write one, as q_idx >= kv_idx.",
    "(" * 100 + "b": "is no expression: write one, as q_idx >= kv_idx.",
    "-" * 60 + "b < 3": "is nested deeper than 24 operations.",
    "q_idx * 999999999 < 3": "column 1: `q_idx * 999999999` may be 3999999996: whole numbers are "
    "of 32 bits in kernels.",
    "b < 4294967296": "column 5: `4294967296` may be 4294967296: whole numbers are of 32 bits in "
    "kernels.",
    "b < 2147483647 * 2": "column 5: `2147483647 * 2` may be 4294967294: whole numbers are of 32 "
    "bits in kernels.",
}
BAD_SCORES = {
    "kv_idx": "does not read score: a score mod begins with it, as in score + kv_idx.",
    "score > 3": "gives a truth value: a score mod gives a number, as in score * 0.5.",
    "score / 0": f"column 1: `score / 0` divides by 0: {DIVISOR}",
    "score / 1e-60": f"column 1: `score / 1e-60` divides by 1e-60: {DIVISOR}",
    "score / kv_idx": f"column 1: `score / kv_idx` divides by kv_idx: {DIVISOR}",
    "score // 2": "column 1: `score // 2` takes // of a real number: // is for whole ones.",
    "score * 1e39": "column 9: `1e+39` is 1e+39: a number is one that fp32 holds.",
    "score * tanh(2)": "column 9: `tanh(2)` is a number: write it as one.",
    "where(b, score, 1)": f"column 1: `where(b, score, 1)` takes a number for a truth value: "
    f"{JOINED}",
    "score * 2j": "column 9: `2j` is no number of it: write whole and real numbers.",
    "exp(score)": "column 1: `exp` is no function of it: choose from abs, minimum, maximum, tanh, "
    "where.",
}


@pytest.mark.parametrize("text", BAD_MASKS | BAD_SCORES)
def test_invalid_text_is_refused_with_exact_message(text):
    check = library.check_mask if text in BAD_MASKS else library.check_score
    message = (BAD_MASKS | BAD_SCORES)[text]
    with one_line(ProblemError, whole=f"expression.text={text!r}: {message}"):
        check(Spec.of("expression", text=text), DIMENSIONS)


@pytest.mark.parametrize("text", [3, "", " b < h", "b < h ", "b <\nh", "b < é", "b" * 201, (1,)])
def test_text_must_be_one_short_ascii_line(text):
    with pytest.raises(ProblemError, match="must be one line of at most 200 ASCII") as error:
        library.check_mask(Spec.of("expression", text=text), DIMENSIONS)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 350


@pytest.mark.parametrize(
    "text",
    [
        "where(score > 0, 1, 2)",
        "where(score > 0, 1, 2) * 0.5",
        "where(score > 0, 1, 2) / 4",
        "where(score > 0, 1, 2) - kv_idx",
        "where(score > 0, 3, kv_idx) % 2",
    ],
)
def test_score_read_only_in_condition_is_accepted(text):
    library.check_score(Spec.of("expression", text=text), DIMENSIONS)


def test_32_bit_range_depends_on_problem_lengths():
    cubed = Spec.of("expression", text="q_idx * q_idx * q_idx >= kv_idx")
    library.check_mask(cubed, Dimensions(batch=1, heads=1, query=1291, kv=9))
    with pytest.raises(ProblemError, match="may be 2151685171: whole numbers are of 32 bits"):
        library.check_mask(cubed, Dimensions(batch=1, heads=1, query=1292, kv=9))


@pytest.mark.parametrize(
    "text", ["abs(q_idx - kv_idx) * 536870911 >= 0", "(q_idx - 4) * (kv_idx - 6) * 89478485 > 0"]
)
def test_32_bit_range_covers_every_corner(text):
    """The texts fit in 32 bits at the corners of (5, 5), and exceed them at those of (11, 11)."""
    spec = Spec.of("expression", text=text)
    library.check_mask(spec, Dimensions(batch=1, heads=1, query=5, kv=5))
    with pytest.raises(ProblemError, match="32 bits"):
        library.check_mask(spec, Dimensions(batch=1, heads=1, query=11, kv=11))


def test_expression_spec_in_json_and_problem_summary():
    mask = Spec.of("expression", text="q_idx % 3 <= kv_idx")
    halved = Spec.of("chain", Spec.of("alibi"), Spec.of("expression", text="score * 0.5"))
    problem = Problem(query=5, head_dim=4, mask=mask, score=halved)
    assert str(problem) == (
        "bf16 expression(q_idx%3<=kv_idx) chain(alibi, expression(score*0.5)) "
        "B1 H1 Q5 K5 D4 normal seed 0"
    )
    assert mask.to_json() == {"name": "expression", "text": "q_idx % 3 <= kv_idx"}
    read_back = Problem.from_json(problem.to_json())
    assert read_back == problem
    assert read_back.id == problem.id


@pytest.mark.parametrize(
    "text",
    [
        "score + 0.1 * (kv_idx % 3)",
        "where(q_idx % 2 == 0, score, -score * 0.5)",
        "tanh(maximum(score, -2) / 8) * 8",
        "minimum(score, kv_idx / 3) - abs(score) * 0.25",
    ],
)
def test_allowed_error_of_expression_score_is_finite(text):
    """An operation unknown to the error analysis allows an infinite error: no kernel could fail."""
    problem = Problem(
        query=9,
        kv=17,
        head_dim=16,
        mask=Spec.of("expression", text="q_idx % 5 <= kv_idx"),
        score=Spec.of("expression", text=text),
    )
    subject = named_kernels.subject_named("triton-flash2")
    allowance = EvidenceBuilder(Case(problem=problem), "cpu").allowance(
        subject.arithmetic(problem, "cpu")
    )
    assert bool(torch.isfinite(allowance.out).all())
    assert bool(torch.isfinite(allowance.lse).all())
    assert allowance.jumps == 0
