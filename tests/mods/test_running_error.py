"""``RunningError`` bounds the fp32 error of score mods: nothing exceeds it, and it is tight."""

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
def trace(function):
    return trace_score(lambda score, b, h, q_idx, kv_idx: function(score, kv_idx))


def analyse(function, scores, radius=0.0, keys=0, **options):
    """The radius, own error and jumps at ``scores``, as tensors of one axis."""
    scores = torch.as_tensor(scores, dtype=torch.float64).reshape(1, 1, -1)
    radii = torch.as_tensor(radius, dtype=torch.float64).expand(scores.shape)
    zero = torch.zeros(1, 1, 1, dtype=torch.int64)
    error = RunningError(trace(function), **options).at(
        scores, radii, zero, zero, zero, torch.as_tensor(keys).expand(scores.shape)
    )
    return [getattr(error, name)[0, 0] for name in ("radius", "own", "jump")]


def evaluate_with_drawn_errors(expression, scores, keys, numbers):
    """Evaluate with a drawn error, up to the largest allowed, in every fp32 operation."""
    exact, nodes = torch_algebra("cpu"), expression.structure.nodes
    dtypes = dict(zip(nodes, node_dtypes(expression), strict=True))

    def perturbed(value, count):
        share = torch.rand(value.shape, generator=numbers, dtype=torch.float64) * 2.2 - 1.1
        return value + count * share.clamp(-1, 1) * spacing(value.abs(), FORMATS["fp32"])

    def rounded(value, count=0.5):
        exactly = (value == 0) | ((value.float() == value) & (count <= 0.5))
        return torch.where(exactly, value, perturbed(value, count))

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
            operands = [perturbed(each, count) for each in operands]
        value = OPERATIONS[node.op].torch(*operands)
        count = KERNEL_FP32.ulps.get(node.op, 0.0)
        return rounded(value, count) if count else value

    zero = torch.zeros((), dtype=torch.int64)
    return evaluate(expression, Algebra.of(exact.leaf, apply, {}), scores, zero, zero, zero, keys)


@pytest.mark.parametrize("function", MODS.values(), ids=MODS)
def test_bound_holds_and_is_nearly_reached(function):
    """Of 300 evaluations none exceeds the bound, and one comes within a factor of 2 and an ulp."""
    scores = round_to(SCORES, FORMATS["fp32"])
    exact = function(scores, KEYS).double()
    _, own, jump = analyse(function, scores, keys=KEYS)
    assert not jump.any()
    numbers, farthest = torch.Generator().manual_seed(1), torch.zeros_like(own)
    for _ in range(300):
        computed = evaluate_with_drawn_errors(trace(function), scores, KEYS, numbers)
        farthest = torch.maximum(farthest, (computed - exact).abs())
    assert bool((farthest <= own + 2.0**-126).all())
    # An ulp of slack: the analysis knows of inputs alone that they are exact, not of results.
    ulp = spacing(torch.maximum(exact, scores).abs().clamp(min=1.0), FORMATS["fp32"])
    assert bool((own <= 2 * farthest + ulp).all())


@pytest.mark.parametrize("function", MODS.values(), ids=MODS)
def test_bound_holds_for_inexact_scores(function):
    generator = torch.Generator().manual_seed(1)
    exact = torch.randn(4096, generator=generator, dtype=torch.float64) * 4
    keys = torch.arange(4096) % 4
    for size in (2.0**-23, 2.0**-12, 2.0**-4):
        radius = exact.abs() * size
        bound, own, _ = analyse(function, exact, radius, keys)
        assert bool((own <= bound).all())
        for share in (-1.0, 0.4, 1.0):
            scores = round_to(exact + share * (radius - exact.abs() * 2.0**-24), FORMATS["fp32"])
            computed = function(scores.float(), keys).double()
            error = (computed - function(exact, keys).double()).abs()
            assert bool((error <= bound).all())


def test_softcap_bound_matches_hand_calculation():
    """20 tanh(x / 20): x/20 is off by r/20 and two ulps, tanh by its slope and 4.5, 20· by half."""
    cap, x, r = 20.0, 11.0, 1e-3
    (radius,), (own,), _ = analyse(MODS["softcap"], [x], r)
    inner = math.ldexp(1, -24)  # an ulp of 0.55, and of tanh 0.55 = 0.5005
    slope = 1 - math.tanh(x / cap) ** 2
    by_score = cap * (math.tanh((x + r) / cap) - math.tanh(x / cap))
    by_hand = cap * (slope * 2 * inner + 4.5 * inner) + 2.0**-21  # half an ulp of 10.01
    # Higher terms of tanh: its second derivative is below 1, of a step of r/20 + 2 ulps.
    second = cap * (r / cap + 2 * inner) ** 2
    assert abs(float(own) - by_hand) <= by_hand * 2.0**-15 + second * 2.0**-10
    assert abs(float(radius) - by_score - by_hand) <= by_hand * 2.0**-15 + second + r * 2.0**-15


def test_declared_tanh_error_enters_bound():
    (fine,), (coarse,) = (
        analyse(MODS["softcap"], [11.0], tanh_error=error)[1] for error in (0.0, 2.0**-11)
    )
    assert float(coarse) >= 20 * math.tanh(11 / 20) * 2.0**-11 > 100 * float(fine)


def test_cap_rounded_to_bf16_exceeds_bound():
    """A planted fault: the bound is not so wide that it would pass."""
    scores = round_to(SCORES[SCORES.abs() > 1], FORMATS["fp32"])
    own = analyse(lambda s, k: 20.1 * torch.tanh(s / 20.1), scores)[1]
    wrong = 20.125 * torch.tanh(scores / 20.125)
    right = 20.1 * torch.tanh(scores / 20.1)
    assert bool(((wrong - right).abs() > own).any())


@pytest.mark.parametrize("op", sorted(RADII))
def test_missing_operand_error_is_detected(monkeypatch, op):
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
    bound, _, _ = analyse(function, exact, 2.0**-8)
    ends = [function(exact + sign * 2.0**-8, 0) - function(exact, 0) for sign in (-1, 1)]
    assert bool((torch.maximum(ends[0].abs(), ends[1].abs()) > bound).any())


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
def test_jump_is_reported_within_radius_only(function):
    radius = 2.0**-10
    scores = torch.tensor([0.5 - 3 * radius, 0.5 - radius / 2, 0.5 + radius / 2, 0.5 + 3 * radius])
    bound, own, jump = analyse(function, scores, radius)
    assert jump.tolist() == [False, True, True, False]
    assert not analyse(function, scores, 0.0)[2].any()
    other = [function(score, torch.tensor(0)) for score in scores.double().flip(0)]
    exact = [function(score, torch.tensor(0)) for score in scores.double()]
    gap = abs(float(other[1]) - float(exact[1])) - 4 * radius
    assert gap > 0.25  # there is a jump
    assert bool((bound[1:3] >= gap).all())
    assert bool((bound[[0, 3]] < 4 * radius).all())
    assert bool((own[[0, 3]] < 2.0**-20).all())


@pytest.mark.parametrize("name", ["and", "or"])
def test_condition_decided_by_other_operand_does_not_jump(name):
    assert not analyse(JUMPS[name], 0.5, 2.0**-10, keys=1)[2].any()


@pytest.mark.parametrize("name", ["relu", "clamp", "isnan"])
def test_continuous_mod_does_not_jump(name):
    radius = 2.0**-10
    scores = torch.linspace(-4, 4, 8193)
    bound, _, jump = analyse(MODS[name], scores, radius)
    assert not jump.any()
    # The slope, at a kink that of either side: two such terms, and one with both sides.
    assert float(bound.max()) <= 3 * radius * (1 + 2.0**-10)


def test_bound_is_infinite_where_score_may_be_hidden():
    def hides(s, k):
        return torch.where(s > 0.5, s, -math.inf)

    scores = torch.tensor([0.25, 0.5, 0.75])
    bound, own, jump = analyse(hides, scores, 2.0**-10)
    assert jump.tolist() == [False, True, False]
    assert bound.isinf().tolist() == [False, True, False]
    assert float(bound[0]) == 0  # −∞ on both sides
    assert own.tolist() == [0, 0, 0]


def test_exact_operations_have_no_error():
    for function in (
        lambda s, k: s,
        lambda s, k: -s.abs(),
        lambda s, k: torch.where(k > 1, s, -math.inf),
        lambda s, k: torch.maximum(s, 2.0 * k),
    ):
        _, own, _ = analyse(function, SCORES, keys=KEYS)
        assert bool((own == 0).all())


def test_bound_is_infinite_at_overflow():
    bound, own, _ = analyse(lambda s, k: torch.exp(s), [88.0, 89.0, 800.0])
    assert own.isinf().tolist() == [False, True, False]  # e^800 is infinite on both sides
    hidden = torch.finfo(torch.float32).min
    bound, _, _ = analyse(lambda s, k: s + hidden, [-3.0, 3.0], 2.0**-20)
    assert bool(bound.isfinite().all())
    bound, _, _ = analyse(lambda s, k: s + 2 * hidden, [3.0])
    assert bool(bound.isinf().all())


def test_bound_is_infinite_where_divisor_may_be_zero():
    bound, own, _ = analyse(lambda s, k: 1 / s, [0.001, 0.5], 0.01)
    assert bound.isinf().tolist() == [True, False]
    assert bool(own.isfinite().all())
    bound, own, _ = analyse(lambda s, k: 1 % torch.floor(s), [1.01, 2.5], 0.1)
    assert bound.isinf().tolist() == [True, False]  # floor(1.01 ± 0.1) may be 0
    assert own.tolist() == [0, 0]
    bound, _, _ = analyse(lambda s, k: torch.log(s), [0.001, 0.5], 0.01)
    assert bound.isinf().tolist() == [True, False]


def test_inexact_index_includes_neighbouring_elements():
    def mod(s, k):
        return s * 0 + TABLE[1, (k * 0.1 * 10.0).floor().to(torch.int64)]

    _, own, jump = analyse(mod, torch.zeros(4), keys=torch.arange(4))
    # k · 0.1 · 10 is k or a little less or more; 0 is exact.
    assert jump.tolist() == [False, True, True, True]
    for key, neighbours in ((1, (0.2, 7.0)), (2, (0.4, -1.0)), (3, (7.0,))):
        gap = max(abs(float(TABLE[1, key]) - fp32(value)) for value in neighbours)
        assert gap <= float(own[key]) <= gap + 2.0**-20  # and half an ulp of the sum


def test_oracle_error_in_float64_is_far_smaller():
    scores = round_to(SCORES, FORMATS["fp32"])
    for name, function in MODS.items():
        kernel = analyse(function, scores, keys=KEYS)[1]
        oracle = analyse(function, scores, keys=KEYS, arithmetic=TORCH_FP64)[1]
        assert bool((oracle <= kernel * 2.0**-26).all()), name


def test_fp32_step_of_oracle_counts_only_against_real_numbers():
    """A mod's own fp32 operations define it, unless it is taken for one of real numbers."""
    function, scores = MODS["narrow"], round_to(SCORES, FORMATS["fp32"])
    mod, reals = (
        analyse(function, scores, keys=KEYS, arithmetic=TORCH_FP64, of_reals=taken)[1]
        for taken in (False, True)
    )
    assert float(mod.max()) < 2.0**-45 < 2.0**-30 < float(reals.max()) < 2.0**-18


def test_comparison_within_rounding_is_undecided():
    keys = torch.arange(6)
    for mask, expected in (
        (lambda b, h, q, k: k * 0.1 < 0.3, [3]),
        (lambda b, h, q, k: ~(k * 0.1 < 0.3) & (k > 3), []),
        (lambda b, h, q, k: (k // 2 == 1) ^ (k % 3 == 0), []),
    ):
        may_differ = undecided(trace_mask(mask), keys * 0, keys * 0, keys * 0, keys)
        assert may_differ.expand(6).nonzero().flatten().tolist() == expected


def test_every_algebra_implements_every_operation():
    real, compared = set(RADII), {"ge", "gt", "le", "lt", "eq", "ne"}
    others = {"where", "index", "cast", "left_shift", "right_shift", "and", "or", "xor", "not"}
    assert real | compared | others == set(OPERATIONS)
    assert set(TRITON_ULP) - real == {"cast", "number"}
    assert set(mpmath_algebra._real_functions(mpmath.MPContext())) == real | compared
    if find_spec("flint"):
        from attncheck.mods import ball_algebra

        assert set(ball_algebra._REAL) == real
