"""Mods drawn at random over the vocabulary: trace, error bound and Triton agree with them."""

import functools
from collections.abc import Callable

import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st
from tests.mods.sample_mods import replace_operation
from torch import Tensor

from attncheck.core.formats import FORMATS
from attncheck.core.mod_spec import Dimensions
from attncheck.mods.operation_errors import Arithmetic
from attncheck.mods.running_error import RunningError
from attncheck.mods.trace import count_disagreements, trace_mask, trace_score

DIMENSIONS = Dimensions(batch=2, heads=3, query=13, kv=21)
TABLE = torch.arange(3 * 64, dtype=torch.float32).reshape(3, 64).cos()
WHOLE_TABLE = torch.arange(64) * 7 % 11
FLAGS = torch.arange(64) % 3 == 0

# A drawn term: its text, and the function of (score, b, h, q_idx, kv_idx) that computes it.
Term = tuple[str, "Callable[..., Tensor]"]


def leaf(text, value):
    return text, value


def apply(name, function, *terms):
    text = f"{name}({', '.join(term[0] for term in terms)})"
    return text, lambda *inputs: function(*(term[1](*inputs) for term in terms))


def without_zero(divisor):
    """Replace 0, by which torch refuses to divide whole numbers."""
    return torch.where(divisor == 0, 3, divisor)


def column(index):
    return index % 64


INDICES = [
    leaf(name, lambda s, b, h, q, k, place=place: (b, h, q, k)[place])
    for place, name in enumerate(("b", "h", "q", "k"))
]
WHOLE_OF_TWO = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a % 1000 * (b % 1000),
    "floor_divide": lambda a, b: a // without_zero(b),
    "remainder": lambda a, b: a % without_zero(b),
    "fmod": lambda a, b: torch.fmod(a, without_zero(b)),
    "cut": lambda a, b: torch.div(a, without_zero(b), rounding_mode="trunc"),
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "left_shift": lambda a, b: a % 1000 << b % 8,
    "right_shift": lambda a, b: a >> b % 8,
}
WHOLE_OF_ONE = {
    "neg": lambda a: -a,
    "abs": torch.abs,
    "not": lambda a: ~a,
    "sign": torch.sign,
    "square": lambda a: (a % 1000) ** 2,
    "relu": torch.relu,
    "add 5": lambda a: a + 5,
    "from 9": lambda a: 9 - a,
    "by 4": lambda a: a // 4,
    "mod -3": lambda a: a % -3,
    "read": lambda a: WHOLE_TABLE[column(a)],
    "clamp": lambda a: a.clamp(-7, 9),
}
REAL_OF_TWO = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "floor_divide": torch.floor_divide,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
}
REAL_OF_ONE = {
    **{
        name: getattr(torch, name)
        for name in ("neg", "abs", "tanh", "sigmoid", "exp", "exp2", "log", "log2", "sqrt", "rsqrt")
    },
    **{name: getattr(torch, name) for name in ("sin", "cos", "floor", "ceil", "sign", "trunc")},
    **{name: getattr(torch, name) for name in ("relu", "square", "reciprocal", "frac")},
    "scale": lambda a: a * 0.37,
    "cube": lambda a: a**3,
    "clamp": lambda a: torch.clamp(a, -3.5, 8),
    "from 2.5": lambda a: 2.5 - a,
}
COMPARISONS = {name: getattr(torch, name) for name in ("ge", "gt", "le", "lt", "eq", "ne")}
TRUTH_OF_TWO = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "eq": torch.eq,
    "logical_and": torch.logical_and,
    "sum": torch.add,
    "product": torch.mul,
}


def operations(table, *parts):
    return st.tuples(st.sampled_from(sorted(table)), *parts).map(
        lambda drawn: apply(drawn[0], table[drawn[0]], *drawn[1:])
    )


def choice(condition, parts):
    drawn = st.tuples(condition, parts, parts)
    return drawn.map(lambda terms: apply("where", torch.where, *terms))


@functools.cache
def wholes(depth):
    """Whole numbers: trees of at most ``depth`` levels of operations."""
    if depth == 0:
        return st.sampled_from(INDICES)
    parts = wholes(depth - 1)
    return st.one_of(
        parts,
        operations(WHOLE_OF_ONE, parts),
        operations(WHOLE_OF_TWO, parts, parts),
        choice(truths(depth - 1), parts),
        truths(depth - 1).map(lambda of: apply("long", lambda a: a.long(), of)),
    )


@functools.cache
def reals(depth):
    """Real numbers, all float64, likewise."""
    if depth == 0:
        return st.just(leaf("score", lambda s, b, h, q, k: s))
    parts = reals(depth - 1)
    return st.one_of(
        parts,
        operations(REAL_OF_ONE, parts),
        operations(REAL_OF_TWO, parts, parts),
        choice(truths(depth - 1), parts),
        wholes(depth - 1).map(lambda of: apply("double", lambda a: a.double(), of)),
        st.tuples(st.sampled_from(INDICES[:2]), wholes(depth - 1)).map(
            lambda of: apply("table", lambda h, a: TABLE[h, column(a)].double(), *of)
        ),
    )


@functools.cache
def truths(depth):
    """Truth values, likewise."""
    if depth == 0:
        return st.sampled_from(INDICES).map(
            lambda of: apply("flag", lambda a: FLAGS[column(a)], of)
        )
    parts = truths(depth - 1)
    return st.one_of(
        parts,
        operations(COMPARISONS, wholes(depth - 1), wholes(depth - 1)),
        operations(COMPARISONS, reals(depth - 1), reals(depth - 1)),
        operations(TRUTH_OF_TWO, parts, parts),
        parts.map(lambda of: apply("not", lambda a: ~a, of)),
        wholes(depth - 1).map(lambda of: apply("flag", lambda a: FLAGS[column(a)], of)),
        wholes(depth - 1).map(lambda of: apply("bool", lambda a: a.bool(), of)),
    )


@given(term=reals(4))
@settings(max_examples=40, deadline=None)
def test_drawn_score_mod_is_traced_exactly(term):
    def mod(*inputs):
        return term[1](*inputs).to(inputs[0].dtype)

    assert count_disagreements(trace_score(mod), mod, DIMENSIONS, samples=64) == 0, term[0]


PLACES = [torch.arange(24).view(1, 1, -1) % size for size in (2, 3, 13, 21)]


def exceeds_bound(analysis, expression, seed):
    """Where fp32 scores, half of them inexact, err more after the mod than the analysis allows."""
    drawn = torch.Generator().manual_seed(seed)
    scores = torch.randn(1, 1, 24, generator=drawn).mul(3)
    scores[..., :6] = torch.tensor([0.0, 1.0, -1.0, 2.5, -3.5, 8.0])
    relative = torch.arange(24) % 2 * 2.0**-20
    exact, radius = scores.double(), scores.double().abs() * relative
    bound = analysis.at(exact, radius, *PLACES)
    expected = expression.evaluate(exact, *PLACES).double()
    perturbed = scores * (1 + (torch.rand(1, 1, 24, generator=drawn) - 0.5) * relative)
    computed = expression.evaluate(perturbed, *PLACES).double()
    excused = (computed == expected) | expected.isnan() | bound.radius.isinf()
    return ~excused & ~((computed - expected).abs() <= bound.radius)


@given(term=reals(4), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_drawn_score_mod_in_fp32_stays_within_running_error(term, seed):
    expression = trace_score(lambda *inputs: term[1](*inputs).to(inputs[0].dtype))
    assert not exceeds_bound(RunningError(expression), expression, seed).any(), term[0]


def test_error_analysis_without_rounding_is_detected():
    """A planted fault in the analysis: fp32 rounds nothing."""
    exact = Arithmetic(format=FORMATS["fp32"], ulps={})

    def is_detected(case):
        expression = trace_score(lambda *inputs: case[0][1](*inputs).to(inputs[0].dtype))
        analysis = RunningError(expression, arithmetic=exact)
        return bool(exceeds_bound(analysis, expression, case[1]).any())

    find(st.tuples(reals(1), st.just(0)), is_detected, settings=settings(deadline=None))


@given(term=truths(4))
@settings(max_examples=40, deadline=None)
def test_drawn_mask_is_traced_exactly(term):
    def mod(*indices):
        return term[1](indices[0] * 0.25 - 1.0, *indices)

    assert count_disagreements(trace_mask(mod), mod, DIMENSIONS, samples=64) == 0, term[0]


@given(term=wholes(3))
@settings(max_examples=40, deadline=None)
def test_drawn_whole_number_is_the_same_in_triton(term, grid):
    """Of depth 3 all fit in int32, and their remainders below 2^23 in fp32."""

    def mod(*inputs):
        return inputs[0] + term[1](*inputs) % 2**23

    zero = torch.zeros(grid.shape)
    assert torch.equal(grid.scored(mod, zero)[grid.existing], grid.inside(mod, zero)), term[0]


def test_wrong_operation_is_found_and_shrinks_to_one_remainder():
    """A planted fault, floor_divide for remainder: the smallest mod that shows it has only one."""

    def traced(term):
        def mod(*inputs):
            return term[1](*inputs).to(inputs[0].dtype)

        return trace_score(mod), mod

    def differs(term):
        expression, mod = traced(term)
        wrong = replace_operation(expression, "remainder", "floor_divide")
        return count_disagreements(wrong, mod, DIMENSIONS, samples=64) > 0

    # A truth value of a whole number has a remainder of its own: a drawn start may end there.
    once = settings(max_examples=500, deadline=None, database=None, derandomize=True)
    term = find(reals(4), differs, settings=once)
    operations = [node.op for node in traced(term)[0].structure.nodes]
    assert operations.count("remainder") == 1, term[0]
