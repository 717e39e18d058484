"""No fp32 score mod is farther off than the analysis says, and the analysis says little more."""

import functools
import math
from importlib.util import find_spec

import mpmath
import pytest
import torch

from attncheck.core.formats import FORMATS, fp32, round_to, spacing
from attncheck.mods import mpmath_algebra
from attncheck.mods.expression import (
    LEAVES,
    OPERATIONS,
    Algebra,
    evaluate,
    node_dtypes,
    torch_algebra,
)
from attncheck.mods.operation_errors import KERNEL_FP32, TORCH_FP64, TRITON_ULP
from attncheck.mods.running_error import RADII, RunningError, undecided
from attncheck.mods.trace import trace_mask, trace_score

TABLE = torch.tensor([[1.0, -2.0, 3.5, 0.1], [0.2, 0.4, 7.0, -1.0]])
WIDE = TABLE.double()
SCORES = torch.cat([torch.arange(-16, 17) / 4, torch.tensor([1e-3, 2.0**-30, 40.0, 0.1])]).double()
KEYS = torch.arange(len(SCORES)) % 4

MODS = {
    "softcap": lambda s, k: 20.0 * torch.tanh(s / 20.0),
    "alibi": lambda s, k: s - fp32(0.3) * k,
    "number": lambda s, k: s - 0.3 * k,
    "temperature": lambda s, k: s / 3.0,
    "gate": lambda s, k: s * torch.sigmoid(1.5 * s),
    "exp": lambda s, k: torch.exp(s) - torch.exp2(s),
    "log": lambda s, k: torch.log(s.abs() + 0.25) * torch.log2(s.abs() + 0.5),
    "roots": lambda s, k: torch.sqrt(s.abs() + k) + torch.rsqrt(s.abs() + 0.25),
    "waves": lambda s, k: torch.sin(s) * torch.cos(s),
    "relu": lambda s, k: torch.relu(s) - torch.where(s < 0.5, s, 0.5),
    "clamp": lambda s, k: s.clamp(-3.3, 2.7) + torch.minimum(s, k.double().to(s.dtype)),
    "power": lambda s, k: s**3,
    "table": lambda s, k: s + TABLE[1, k],
    "table of float64": lambda s, k: s * WIDE[0, k],
    "fp32 inside": lambda s, k: s + s.to(torch.float32) / 3.0,
    "narrow": lambda s, k: s + (TABLE[0, k] * k / 7).tanh(),
    "isnan": lambda s, k: torch.where(torch.isnan(s), 0.0, s * 0.7),
    "polynomial": lambda s, k: ((s * 0.1 + 0.7) * s - 0.3) * s + 0.9,
}


@functools.cache
def traced(function):
    return trace_score(lambda score, b, h, q_idx, kv_idx: function(score, kv_idx))


def analysed(function, scores, radius=0.0, keys=0, **options):
    """The errors at scores, as ScoreModError's tensors of one axis."""
    scores = torch.as_tensor(scores, dtype=torch.float64).reshape(1, 1, -1)
    radii = torch.as_tensor(radius, dtype=torch.float64).expand(scores.shape)
    zero = torch.zeros(1, 1, 1, dtype=torch.int64)
    found = RunningError(traced(function), **options).at(
        scores, radii, zero, zero, zero, torch.as_tensor(keys).expand(scores.shape)
    )
    return [getattr(found, name)[0, 0] for name in ("radius", "own", "jump")]


def rounded_otherwise(expression, scores, keys, numbers):
    """Values where each operation in fp32 errs as far as it may, up or down, or less far."""
    exact, nodes = torch_algebra("cpu"), expression.structure.nodes
    dtypes = dict(zip(nodes, node_dtypes(expression), strict=True))

    def off(value, count):
        share = torch.rand(value.shape, generator=numbers, dtype=torch.float64) * 2.2 - 1.1
        return value + count * share.clamp(-1, 1) * spacing(value.abs(), FORMATS["fp32"])

    def rounded(value, count=0.5):
        held = (value == 0) | ((value.float() == value) & (count <= 0.5))
        return torch.where(held, value, off(value, count))

    def operand(place, value):
        node = nodes[place]
        if node.kind == "bool" or (node.kind == "float" and node.op not in LEAVES):
            return value
        return rounded(torch.as_tensor(value, dtype=torch.float64))

    def apply(node, *operands):
        if node.kind != "float" or dtypes[node] is None or node.op == "index":
            return exact.operations[node.op](node, *operands)
        operands = list(map(operand, node.operands, operands))
        if node.op == "cast":
            return operands[0]
        if count := KERNEL_FP32.argument_ulps.get(node.op, 0.0):
            operands = [off(each, count) for each in operands]
        value = OPERATIONS[node.op].torch(*operands)
        count = KERNEL_FP32.ulps.get(node.op, 0.0)
        return rounded(value, count) if count else value

    zero = torch.zeros((), dtype=torch.int64)
    return evaluate(expression, Algebra.of(exact.leaf, apply, {}), scores, zero, zero, zero, keys)


@pytest.mark.parametrize("function", MODS.values(), ids=MODS)
def test_every_right_evaluation_is_within_it_and_hardly_anything_else(function):
    """Of many evaluations none is beyond the radius, and one comes near it."""
    scores = round_to(SCORES, FORMATS["fp32"])
    exact = function(scores, KEYS).double()
    _, own, jump = analysed(function, scores, keys=KEYS)
    assert not jump.any()
    numbers, farthest = torch.Generator().manual_seed(1), torch.zeros_like(own)
    for _ in range(300):
        other = rounded_otherwise(traced(function), scores, KEYS, numbers)
        farthest = torch.maximum(farthest, (other - exact).abs())
    assert bool((farthest <= own + 2.0**-126).all())
    # An ulp more: what comes out exactly is known to be so of numbers that came in alone.
    ulp = spacing(torch.maximum(exact, scores).abs().clamp(min=1.0), FORMATS["fp32"])
    assert bool((own <= 2 * farthest + ulp).all())


@pytest.mark.parametrize("function", MODS.values(), ids=MODS)
def test_scores_that_are_off_stay_within_it(function):
    generator = torch.Generator().manual_seed(1)
    exact = torch.randn(4096, generator=generator, dtype=torch.float64) * 4
    keys = torch.arange(4096) % 4
    for size in (2.0**-23, 2.0**-12, 2.0**-4):
        radius = exact.abs() * size
        found, own, _ = analysed(function, exact, radius, keys)
        assert bool((own <= found).all())
        for share in (-1.0, 0.4, 1.0):
            given = round_to(exact + share * (radius - exact.abs() * 2.0**-24), FORMATS["fp32"])
            computed = function(given.float(), keys).double()
            error = (computed - function(exact, keys).double()).abs()
            assert bool((error <= found).all())


def test_softcap_by_hand():
    """20 tanh(x / 20): x/20 is off by r/20 and two ulps, tanh by its slope and 4.5, 20· by half."""
    cap, x, r = 20.0, 11.0, 1e-3
    (radius,), (own,), _ = analysed(MODS["softcap"], [x], r)
    inner = math.ldexp(1, -24)  # an ulp of 0.55, and of tanh 0.55 = 0.5005
    slope = 1 - math.tanh(x / cap) ** 2
    by_score = cap * (math.tanh((x + r) / cap) - math.tanh(x / cap))
    by_hand = cap * (slope * 2 * inner + 4.5 * inner) + 2.0**-21  # half an ulp of 10.01
    # Higher terms of tanh: its second derivative is below 1, of a step of r/20 + 2 ulps.
    second = cap * (r / cap + 2 * inner) ** 2
    assert abs(float(own) - by_hand) <= by_hand * 2.0**-15 + second * 2.0**-10
    assert abs(float(radius) - by_score - by_hand) <= by_hand * 2.0**-15 + second + r * 2.0**-15


def test_a_coarse_tanh_counts():
    (fine,), (coarse,) = (
        analysed(MODS["softcap"], [11.0], tanh_error=error)[1] for error in (0.0, 2.0**-11)
    )
    assert float(coarse) >= 20 * math.tanh(11 / 20) * 2.0**-11 > 100 * float(fine)


def test_a_cap_in_bf16_is_beyond_it():
    """A planted fault: the radius is not so wide that it would pass."""
    scores = round_to(SCORES[SCORES.abs() > 1], FORMATS["fp32"])
    own = analysed(lambda s, k: 20.1 * torch.tanh(s / 20.1), scores)[1]
    wrong = 20.125 * torch.tanh(scores / 20.125)
    right = 20.1 * torch.tanh(scores / 20.1)
    assert bool(((wrong - right).abs() > own).any())


@pytest.mark.parametrize("op", sorted(RADII))
def test_without_a_rule_of_its_own_an_operation_would_be_beyond_it(monkeypatch, op):
    """A planted fault in the analysis: operands' errors do not reach the result."""
    monkeypatch.setitem(RADII, op, lambda result, *operands: torch.zeros_like(result))
    functions = {
        "add": lambda s, k: s + s,
        "sub": lambda s, k: 0.1 - s,
        "mul": lambda s, k: s * s,
        "div": lambda s, k: 1.0 / s,
        "neg": lambda s, k: -s,
        "minimum": lambda s, k: torch.minimum(s, s * 0 + 3.0),
        "maximum": lambda s, k: torch.maximum(s, s * 0 - 3.0),
        "floor_divide": lambda s, k: s // 0.3,
        "remainder": lambda s, k: s % 0.3,
        "sign": lambda s, k: torch.sign(s - 1.5),
    }
    function = functions.get(op, lambda s, k: getattr(torch, op)(s))
    exact = torch.linspace(0.7, 2.3, 801, dtype=torch.float64)
    found, _, _ = analysed(function, exact, 2.0**-8)
    ends = [function(exact + sign * 2.0**-8, 0) - function(exact, 0) for sign in (-1, 1)]
    assert bool((torch.maximum(ends[0].abs(), ends[1].abs()) > found).any())


JUMPS = {
    "where": lambda s, k: torch.where(s > 0.5, 2 * s, s),
    "not": lambda s, k: torch.where(~(s > 0.5), s, 2 * s),
    "and": lambda s, k: torch.where((s > 0.5) & (k == 0), 2 * s, s),
    "or": lambda s, k: torch.where((s > 0.5) | (k > 0), 2 * s, s),
    "xor": lambda s, k: torch.where((s > 0.5) ^ (k > 0), 2 * s, s),
    "counted": lambda s, k: s + (s > 0.5) * 3.0,
    "floor": lambda s, k: torch.floor(s * 2),
    "ceil": lambda s, k: torch.ceil(s * 2),
    "sign": lambda s, k: torch.sign(s - 0.5),
    "floor_divide": lambda s, k: s // 0.5,
    "remainder": lambda s, k: s % 0.5,
    "whole": lambda s, k: s + (s * 2).to(torch.int64),
    "bits": lambda s, k: s + ((s * 2).to(torch.int64) & 1),
    "read": lambda s, k: s + TABLE[0, (s * 2).to(torch.int64) + k],
    "chosen whole": lambda s, k: s + torch.where(s > 0.5, k + 1, k),
    "truth": lambda s, k: torch.where((s - 0.5).floor().bool(), s, -s),
}


@pytest.mark.parametrize("function", JUMPS.values(), ids=JUMPS)
def test_a_jump_is_said_within_the_radius_and_not_beyond(function):
    radius = 2.0**-10
    scores = torch.tensor([0.5 - 3 * radius, 0.5 - radius / 2, 0.5 + radius / 2, 0.5 + 3 * radius])
    found, own, jump = analysed(function, scores, radius)
    assert jump.tolist() == [False, True, True, False]
    assert not analysed(function, scores, 0.0)[2].any()
    other = [function(score, torch.tensor(0)) for score in scores.double().flip(0)]
    exact = [function(score, torch.tensor(0)) for score in scores.double()]
    gap = abs(float(other[1]) - float(exact[1])) - 4 * radius
    assert gap > 0.25  # there is a jump
    assert bool((found[1:3] >= gap).all())
    assert bool((found[[0, 3]] < 4 * radius).all())
    assert bool((own[[0, 3]] < 2.0**-20).all())


@pytest.mark.parametrize("name", ["and", "or"])
def test_what_is_decided_by_the_other_operand_does_not_jump(name):
    assert not analysed(JUMPS[name], 0.5, 2.0**-10, keys=1)[2].any()


@pytest.mark.parametrize("name", ["relu", "clamp", "isnan"])
def test_what_is_continuous_does_not_jump(name):
    radius = 2.0**-10
    scores = torch.linspace(-4, 4, 8193)
    found, _, jump = analysed(MODS[name], scores, radius)
    assert not jump.any()
    # The slope, and at a kink that of either side: two such terms, and one with both sides.
    assert float(found.max()) <= 3 * radius * (1 + 2.0**-10)


def test_where_a_kernel_may_see_what_the_mod_hides_nothing_is_known():
    def hides(s, k):
        return torch.where(s > 0.5, s, -math.inf)

    scores = torch.tensor([0.25, 0.5, 0.75])
    found, own, jump = analysed(hides, scores, 2.0**-10)
    assert jump.tolist() == [False, True, False]
    assert found.isinf().tolist() == [False, True, False]
    assert float(found[0]) == 0  # −∞ on both sides
    assert own.tolist() == [0, 0, 0]


def test_what_is_exact_stays_exact():
    for function in (
        lambda s, k: s,
        lambda s, k: -s.abs(),
        lambda s, k: torch.where(k > 1, s, -math.inf),
        lambda s, k: torch.maximum(s, 2.0 * k),
    ):
        _, own, _ = analysed(function, SCORES, keys=KEYS)
        assert bool((own == 0).all())


def test_beyond_the_largest_number_nothing_is_known():
    found, own, _ = analysed(lambda s, k: torch.exp(s), [88.0, 89.0, 800.0])
    assert own.isinf().tolist() == [False, True, False]  # e^800 is infinite on both sides
    hidden = torch.finfo(torch.float32).min
    found, _, _ = analysed(lambda s, k: s + hidden, [-3.0, 3.0], 2.0**-20)
    assert bool(found.isfinite().all())
    found, _, _ = analysed(lambda s, k: s + 2 * hidden, [3.0])
    assert bool(found.isinf().all())


def test_where_a_divisor_may_be_zero_nothing_is_known():
    found, own, _ = analysed(lambda s, k: 1 / s, [0.001, 0.5], 0.01)
    assert found.isinf().tolist() == [True, False]
    assert bool(own.isfinite().all())
    found, own, _ = analysed(lambda s, k: 1 % torch.floor(s), [1.01, 2.5], 0.1)
    assert found.isinf().tolist() == [True, False]  # floor(1.01 ± 0.1) may be 0
    assert own.tolist() == [0, 0]
    found, _, _ = analysed(lambda s, k: torch.log(s), [0.001, 0.5], 0.01)
    assert found.isinf().tolist() == [True, False]


def test_an_index_that_may_be_off_by_one_reaches_the_neighbours():
    def mod(s, k):
        return s * 0 + TABLE[1, (k * 0.1 * 10.0).floor().to(torch.int64)]

    _, own, jump = analysed(mod, torch.zeros(4), keys=torch.arange(4))
    # 0.1 · 10 is 1 or a little less or more: 0 is safe.
    assert jump.tolist() == [False, True, True, True]
    for key, neighbours in ((1, (0.2, 7.0)), (2, (0.4, -1.0)), (3, (7.0,))):
        gap = max(abs(float(TABLE[1, key]) - fp32(value)) for value in neighbours)
        assert gap <= float(own[key]) <= gap + 2.0**-20  # and half an ulp of the sum


def test_the_oracle_itself_is_analysed_in_float64():
    scores = round_to(SCORES, FORMATS["fp32"])
    for name, function in MODS.items():
        kernel = analysed(function, scores, keys=KEYS)[1]
        oracle = analysed(function, scores, keys=KEYS, arithmetic=TORCH_FP64)[1]
        assert bool((oracle <= kernel * 2.0**-26).all()), name


def test_what_the_oracle_computes_in_float32_is_no_real_number():
    """It belongs to the mod, unless the mod is taken for one of real numbers."""
    function, scores = MODS["narrow"], round_to(SCORES, FORMATS["fp32"])
    mod, reals = (
        analysed(function, scores, keys=KEYS, arithmetic=TORCH_FP64, of_reals=taken)[1]
        for taken in (False, True)
    )
    assert float(mod.max()) < 2.0**-45 < 2.0**-30 < float(reals.max()) < 2.0**-18


def test_a_comparison_that_rounding_may_turn_is_undecided():
    keys = torch.arange(6)
    for mask, expected in (
        (lambda b, h, q, k: k * 0.1 < 0.3, [3]),
        (lambda b, h, q, k: ~(k * 0.1 < 0.3) & (k > 3), []),
        (lambda b, h, q, k: (k // 2 == 1) ^ (k % 3 == 0), []),
    ):
        either = undecided(trace_mask(mask), keys * 0, keys * 0, keys * 0, keys)
        assert either.expand(6).nonzero().flatten().tolist() == expected


def test_every_algebra_of_real_numbers_has_every_operation():
    real, compared = set(RADII), {"ge", "gt", "le", "lt", "eq", "ne"}
    others = {"where", "index", "cast", "left_shift", "right_shift", "and", "or", "xor", "not"}
    assert real | compared | others == set(OPERATIONS)
    assert set(TRITON_ULP) - real == {"cast", "number"}
    assert set(mpmath_algebra._real_functions(mpmath.MPContext())) == real | compared
    if find_spec("flint"):
        from attncheck.mods import ball_algebra

        assert set(ball_algebra._REAL) == real
