"""Right backwards stay within the bounds of gradients, and planted faults exceed them."""

from dataclasses import replace

import pytest
import torch
from tests.judge import backward_faults as faults
from tests.judge import backward_unfused as unfused

from attncheck.core.conditions import ScoreModError
from attncheck.core.declared_arithmetic import default_arithmetic
from attncheck.core.formats import DTYPES, FORMATS
from attncheck.core.mod_spec import Spec
from attncheck.inputs.distributions import DISTRIBUTIONS
from attncheck.inputs.problem import Problem
from attncheck.mods.running_error import RunningError
from attncheck.mods.trace import trace_derivative, trace_score

pytestmark = pytest.mark.usefixtures("one_thread")

Backward, Unfused, error_shares = faults.Backward, unfused.Unfused, faults.kernels.error_shares

NAMES = ("fp32", "tf32", "fp16", "bf16")
CAUSAL, LAST = Spec.of("causal"), Spec.of("causal_bottom_right")
SOFTCAP = Spec.of("softcap", cap=3.0)
TANH = 2.0**-22  # torch's fp32 tanh, as the kernels here take it


def problem(query, kv, dim, heads=1, kv_heads=1, **more) -> Problem:
    sizes = {"query": query, "kv": kv, "head_dim": dim, "heads": heads, "kv_heads": kv_heads}
    return Problem(**sizes | {"batch": 2, "backward": True} | more)


SHAPES = (
    lambda **more: problem(1, 1, 16, **more),
    lambda **more: problem(33, 2, 16, 2, 1, dlse=True, **more),
    lambda **more: problem(65, 65, 32, 4, 2, mask=CAUSAL, dlse=True, **more),
    lambda **more: problem(40, 37, 64, 2, 2, mask=LAST, sink=True, dlse=True, **more),
    lambda **more: problem(40, 37, 64, 2, 2, mask=LAST, dlse=True, **more),
    lambda **more: problem(7, 130, 17, 2, 1, sink=True, **more),
    lambda **more: problem(50, 60, 24, mask=Spec.of("sliding_window", window=8), **more),
)
# The shapes each distribution is drawn in: three a distribution, so that every shape occurs.
DRAWN = [
    (name, number, SHAPES[number])
    for first, name in enumerate(DISTRIBUTIONS)
    for number in sorted({(first + step) % len(SHAPES) for step in (0, 2, 3)})
]
RIGHT = {
    "plain": Backward(),
    "reversed": Backward(block_query=16, block_kv=128, reverse=True, natural=True, truncate=True),
    "delta first": Backward(block_query=64, block_kv=16, delta_first=True),
    "rounded P twice": Backward(block_query=16, rereads=True),
    "in parts": Backward(block_query=16, block_kv=16, parts=True),
}


@pytest.mark.parametrize("kernel", RIGHT)
@pytest.mark.parametrize("name", NAMES)
def test_right_backward_stays_within_the_bounds(name, kernel):
    # The plain kernel runs every draw, each other kernel a different third.
    part = slice(None) if kernel == "plain" else slice(list(RIGHT).index(kernel) % 3, None, 3)
    for distribution, number, shape in DRAWN[part]:
        case = shape(dtype=name, distribution=distribution, seed=number)
        shares = error_shares(RIGHT[kernel], case)
        assert max(shares.values()) <= 1, (shares, str(case))


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_hidden_lse_gets_the_bound_of_the_forward(name):
    for number, shape in enumerate(SHAPES):
        case = shape(dtype=name, seed=number)
        hidden, exposed = (error_shares(Backward(), case, exposes_lse=e) for e in (False, True))
        assert max(hidden.values()) <= 1
        assert hidden.keys() == exposed.keys()


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    "kernel",
    [Unfused(), Unfused(rounds_products=False, rounds_heads=False, scaled=False)],
    ids=["rounds everything", "rounds P and dS"],
)
def test_unfused_backward_stays_within_its_declared_arithmetic(kernel, name):
    for distribution, number, shape in DRAWN[::2]:
        case = shape(dtype=name, distribution=distribution, seed=number)
        shares = error_shares(kernel, case, kernel.arithmetic(case))
        assert max(shares.values()) <= 1, (shares, str(case))


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_unfused_backward_exceeds_the_bounds_of_a_fused_one(name):
    """Otherwise the declared facts of an unfused backward would allow nothing more."""
    case = SHAPES[2](dtype=name)
    assert error_shares(Unfused(), case)["dq"] > 1


@pytest.mark.parametrize(("fact", "keys"), [("rereads", 2), ("parts", 1)])
def test_fused_backward_exceeds_the_bounds_without_its_declared_fact(fact, keys):
    """Few keys, so that little else is rounded; with one key P is 1, which no rounding moves."""
    case, plain = problem(160, keys, 16, 4, 1, dtype="bf16"), default_arithmetic(DTYPES["bf16"])
    if keys == 1:
        plain = replace(plain, weights=FORMATS["fp32"])
    shares = [
        max(error_shares(Backward(block_query=16, **{fact: True}), each, plain).values())
        for each in (case.replace(seed=seed) for seed in range(12))
    ]
    assert max(shares) > 1


def score_mod_errors(case: Problem):
    """Errors of a score mod and of its slope, by the running error analysis of both."""
    mod = case.score_mod("cpu")
    analyses = [RunningError(each, TANH) for each in (trace_score(mod), trace_derivative(mod))]

    def at(known, scores):
        forward, kv = known.known, case.kv
        rows, seen = forward.rows, forward.seen[..., :kv]
        heads = torch.arange(rows.heads.start, rows.heads.stop)[:, None, None]
        indices = (heads // case.heads, heads % case.heads, rows.query[None, :, None])
        indices = (*indices, torch.arange(kv)[None, None])
        errors = []
        for analysis in analyses:
            error = analysis.at(forward.products[..., :kv], scores.radius[..., :kv], *indices)
            parts = (torch.where(seen, x, 0.0) for x in (error.radius, error.own))
            radius, own = (torch.nn.functional.pad(x, (0, int(forward.has_sink))) for x in parts)
            errors.append(ScoreModError(radius=radius, own=own, jump=radius < 0))
        if forward.has_sink:
            errors[0].radius[..., -1] = scores.radius[..., -1]
        return errors

    return at


@pytest.mark.parametrize("name", NAMES)
def test_bounds_include_the_slope_of_a_score_mod(name):
    """A right kernel stays within them, and a kernel that leaves the slope out does not."""
    for distribution, shape in (("normal", SHAPES[1]), ("large_logits", SHAPES[5])):
        case = shape(dtype=name, distribution=distribution, score=SOFTCAP)
        errors = score_mod_errors(case)
        shares = error_shares(Backward(), case, mods=errors)
        assert max(shares.values()) <= 1, (shares, str(case))
        wrong = error_shares(faults.NoSlope(), case, mods=errors)
        assert max(wrong["dq"], wrong["dk"]) > 1


HIDDEN_BY_ROUNDING = {("tf32", faults.DeltaInBf16)}
"""delta rounded to 8 bits moves no more than dS truncated to 10 bits may."""


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pytest.param(name, fault, id=f"{name}-{fault.__name__}")
        for name in NAMES
        for fault in faults.FAULTS
        if (name, fault) not in HIDDEN_BY_ROUNDING
    ],
)
def test_planted_fault_exceeds_the_bounds(name, fault):
    case = problem(96, 96, 64, 4, 2, dtype=name, mask=CAUSAL, dlse=True)
    assert max(error_shares(Backward(), case).values()) <= 1
    assert max(error_shares(fault(), case).values()) > 1


@pytest.mark.parametrize("name", NAMES)
def test_gradient_of_an_empty_row_must_be_exactly_zero(name):
    """A row without visible keys is allowed no error at all."""

    class Noise(Backward):
        def finish(self, inputs, outputs, dq, dk, dv, delta):
            dq = dq + 2.0**-20
            return super().finish(inputs, outputs, dq, dk, dv, delta)

    case = SHAPES[4](dtype=name, seed=1)
    assert error_shares(Noise(), case)["dq"] == torch.inf
