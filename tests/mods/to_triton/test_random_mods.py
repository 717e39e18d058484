"""Callables drawn at random over the vocabulary: the trace gives their float64 values exactly."""

import functools
from collections.abc import Callable

import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st
from tests.mods.sample_mods import planted
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

# A drawn term is a pair of its text and what computes it from (score, b, h, q_idx, kv_idx).
Term = tuple[str, "Callable[..., Tensor]"]


def leaf(text, value):
    return text, value


def applied(name, function, *terms):
    text = f"{name}({', '.join(term[0] for term in terms)})"
    return text, lambda *inputs: function(*(term[1](*inputs) for term in terms))


def safe(divisor):
    """No zero: torch raises for whole numbers."""
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
    "floor_divide": lambda a, b: a // safe(b),
    "remainder": lambda a, b: a % safe(b),
    "fmod": lambda a, b: torch.fmod(a, safe(b)),
    "cut": lambda a, b: torch.div(a, safe(b), rounding_mode="trunc"),
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
        lambda drawn: applied(drawn[0], table[drawn[0]], *drawn[1:])
    )


def choice(condition, parts):
    drawn = st.tuples(condition, parts, parts)
    return drawn.map(lambda terms: applied("where", torch.where, *terms))


@functools.cache
def wholes(depth):
    """Whole numbers of at most ``depth`` operations on one another."""
    if depth == 0:
        return st.sampled_from(INDICES)
    parts = wholes(depth - 1)
    return st.one_of(
        parts,
        operations(WHOLE_OF_ONE, parts),
        operations(WHOLE_OF_TWO, parts, parts),
        choice(truths(depth - 1), parts),
        truths(depth - 1).map(lambda of: applied("long", lambda a: a.long(), of)),
    )


@functools.cache
def reals(depth):
    """Real numbers, likewise; all are float64."""
    if depth == 0:
        return st.just(leaf("score", lambda s, b, h, q, k: s))
    parts = reals(depth - 1)
    return st.one_of(
        parts,
        operations(REAL_OF_ONE, parts),
        operations(REAL_OF_TWO, parts, parts),
        choice(truths(depth - 1), parts),
        wholes(depth - 1).map(lambda of: applied("double", lambda a: a.double(), of)),
        st.tuples(st.sampled_from(INDICES[:2]), wholes(depth - 1)).map(
            lambda of: applied("table", lambda h, a: TABLE[h, column(a)].double(), *of)
        ),
    )


@functools.cache
def truths(depth):
    """Truth values, likewise."""
    if depth == 0:
        return st.sampled_from(INDICES).map(
            lambda of: applied("flag", lambda a: FLAGS[column(a)], of)
        )
    parts = truths(depth - 1)
    return st.one_of(
        parts,
        operations(COMPARISONS, wholes(depth - 1), wholes(depth - 1)),
        operations(COMPARISONS, reals(depth - 1), reals(depth - 1)),
        operations(TRUTH_OF_TWO, parts, parts),
        parts.map(lambda of: applied("not", lambda a: ~a, of)),
        wholes(depth - 1).map(lambda of: applied("flag", lambda a: FLAGS[column(a)], of)),
        wholes(depth - 1).map(lambda of: applied("bool", lambda a: a.bool(), of)),
    )


@given(term=reals(4))
@settings(max_examples=40, deadline=None)
def test_a_drawn_score_mod_is_traced_exactly(term):
    def mod(*inputs):
        return term[1](*inputs).to(inputs[0].dtype)

    assert count_disagreements(trace_score(mod), mod, DIMENSIONS, samples=64) == 0, term[0]


PLACES = [torch.arange(24).view(1, 1, -1) % size for size in (2, 3, 13, 21)]


def beyond(analysis, expression, seed):
    """Where fp32 scores, exact or a little off, are farther off after the mod than is said."""
    drawn = torch.Generator().manual_seed(seed)
    scores = torch.randn(1, 1, 24, generator=drawn).mul(3)
    scores[..., :6] = torch.tensor([0.0, 1.0, -1.0, 2.5, -3.5, 8.0])
    off = torch.arange(24) % 2 * 2.0**-20
    exact, radius = scores.double(), scores.double().abs() * off
    found = analysis.at(exact, radius, *PLACES)
    right = expression.evaluate(exact, *PLACES).double()
    given = scores * (1 + (torch.rand(1, 1, 24, generator=drawn) - 0.5) * off)
    computed = expression.evaluate(given, *PLACES).double()
    alike = (computed == right) | right.isnan() | found.radius.isinf()
    return ~alike & ~((computed - right).abs() <= found.radius)


@given(term=reals(4), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_a_drawn_score_mod_in_fp32_stays_within_its_running_error(term, seed):
    expression = trace_score(lambda *inputs: term[1](*inputs).to(inputs[0].dtype))
    assert not beyond(RunningError(expression), expression, seed).any(), term[0]


def test_a_running_error_without_its_roundings_is_found_out():
    """A planted fault in the analysis: fp32 rounds nothing."""
    exact = Arithmetic(format=FORMATS["fp32"], ulps={})

    def told(case):
        expression = trace_score(lambda *inputs: case[0][1](*inputs).to(inputs[0].dtype))
        return bool(beyond(RunningError(expression, arithmetic=exact), expression, case[1]).any())

    find(st.tuples(reals(1), st.just(0)), told, settings=settings(deadline=None))


@given(term=truths(4))
@settings(max_examples=40, deadline=None)
def test_a_drawn_mask_is_traced_exactly(term):
    def mod(*indices):
        return term[1](indices[0] * 0.25 - 1.0, *indices)

    assert count_disagreements(trace_mask(mod), mod, DIMENSIONS, samples=64) == 0, term[0]


@given(term=wholes(3))
@settings(max_examples=40, deadline=None)
def test_drawn_whole_numbers_are_the_same_in_triton(term, grid):
    """int32 holds all of depth 3, and fp32 what is left of them below 2^23."""

    def mod(*inputs):
        return inputs[0] + term[1](*inputs) % 2**23

    zero = torch.zeros(grid.shape)
    assert torch.equal(grid.scored(mod, zero)[grid.existing], grid.inside(mod, zero)), term[0]


def test_a_planted_operation_is_found_and_shrinks_to_it():
    """floor_divide for remainder, in drawn mods: the smallest that shows it has one remainder."""

    def traced(term):
        def mod(*inputs):
            return term[1](*inputs).to(inputs[0].dtype)

        return trace_score(mod), mod

    def differs(term):
        expression, mod = traced(term)
        wrong = planted(expression, "remainder", "floor_divide")
        return count_disagreements(wrong, mod, DIMENSIONS, samples=64) > 0

    # A truth value of a whole number has a remainder of its own: a drawn start may end there.
    once = settings(max_examples=500, deadline=None, database=None, derandomize=True)
    term = find(reals(4), differs, settings=once)
    operations = [node.op for node in traced(term)[0].structure.nodes]
    assert operations.count("remainder") == 1, term[0]
