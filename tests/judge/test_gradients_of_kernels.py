"""Right backwards keep to the bounds of gradients, whatever they round; planted faults do not."""

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

Backward, Unfused, shares = faults.Backward, unfused.Unfused, faults.kernels.shares

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
# Which of them a distribution is drawn in: each in three, each of them in some.
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
def test_a_right_backward_is_within(name, kernel):
    # The plain one in all of them, every other in a third of its own.
    part = slice(None) if kernel == "plain" else slice(list(RIGHT).index(kernel) % 3, None, 3)
    for distribution, number, shape in DRAWN[part]:
        asked = shape(dtype=name, distribution=distribution, seed=number)
        found = shares(RIGHT[kernel], asked)
        assert max(found.values()) <= 1, (found, str(asked))


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_an_lse_that_is_not_exposed_has_the_bound_of_the_forward(name):
    for number, shape in enumerate(SHAPES):
        asked = shape(dtype=name, seed=number)
        hidden, exposed = (shares(Backward(), asked, exposes_lse=e) for e in (False, True))
        assert max(hidden.values()) <= 1
        assert hidden.keys() == exposed.keys()


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    "kernel",
    [Unfused(), Unfused(rounds_products=False, rounds_heads=False, scaled=False)],
    ids=["rounds everything", "rounds P and dS"],
)
def test_a_backward_that_is_not_fused_is_within_what_it_declares(kernel, name):
    for distribution, number, shape in DRAWN[::2]:
        asked = shape(dtype=name, distribution=distribution, seed=number)
        found = shares(kernel, asked, kernel.arithmetic(asked))
        assert max(found.values()) <= 1, (found, str(asked))


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_a_backward_that_is_not_fused_is_beyond_what_a_fused_one_may(name):
    """So that the facts say something."""
    asked = SHAPES[2](dtype=name)
    assert shares(Unfused(), asked)["dq"] > 1


@pytest.mark.parametrize(("fact", "keys"), [("rereads", 2), ("parts", 1)])
def test_a_fused_backward_is_beyond_what_it_does_not_declare(fact, keys):
    """Few keys: little else is rounded. Of one key alone P is 1, which no rounding moves."""
    asked, plain = problem(160, keys, 16, 4, 1, dtype="bf16"), default_arithmetic(DTYPES["bf16"])
    if keys == 1:
        plain = replace(plain, weights=FORMATS["fp32"])
    found = [
        max(shares(Backward(block_query=16, **{fact: True}), each, plain).values())
        for each in (asked.replace(seed=seed) for seed in range(12))
    ]
    assert max(found) > 1


def errors_of(asked: Problem):
    """Errors of a score mod and of its slope, by the running error analysis of both."""
    mod = asked.score_mod("cpu")
    analyses = [RunningError(each, TANH) for each in (trace_score(mod), trace_derivative(mod))]

    def at(known, scores):
        forward, kv = known.known, asked.kv
        rows, seen = forward.rows, forward.seen[..., :kv]
        heads = torch.arange(rows.heads.start, rows.heads.stop)[:, None, None]
        where = (heads // asked.heads, heads % asked.heads, rows.query[None, :, None])
        where = (*where, torch.arange(kv)[None, None])
        found = []
        for analysis in analyses:
            one = analysis.at(forward.products[..., :kv], scores.radius[..., :kv], *where)
            parts = (torch.where(seen, x, 0.0) for x in (one.radius, one.own))
            radius, own = (torch.nn.functional.pad(x, (0, int(forward.has_sink))) for x in parts)
            found.append(ScoreModError(radius=radius, own=own, jump=radius < 0))
        if forward.has_sink:
            found[0].radius[..., -1] = scores.radius[..., -1]
        return found

    return at


@pytest.mark.parametrize("name", NAMES)
def test_a_slope_counts_with_its_error(name):
    """And a kernel that leaves it out is found."""
    for distribution, shape in (("normal", SHAPES[1]), ("large_logits", SHAPES[5])):
        asked = shape(dtype=name, distribution=distribution, score=SOFTCAP)
        errors = errors_of(asked)
        found = shares(Backward(), asked, mods=errors)
        assert max(found.values()) <= 1, (found, str(asked))
        wrong = shares(faults.NoSlope(), asked, mods=errors)
        assert max(wrong["dq"], wrong["dk"]) > 1


SEEN_BY_NO_BOUND = {("tf32", faults.DeltaInBf16)}
"""delta rounded to 8 bits beside dS rounded to 10, truncated: rounding explains as much."""


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_a_planted_fault_is_beyond_the_bound(name, fault):
    if (name, fault) in SEEN_BY_NO_BOUND:
        return
    asked = problem(96, 96, 64, 4, 2, dtype=name, mask=CAUSAL, dlse=True)
    assert max(shares(Backward(), asked).values()) <= 1
    assert max(shares(fault(), asked).values()) > 1


@pytest.mark.parametrize("name", NAMES)
def test_what_must_be_zero_has_no_bound_but_zero(name):
    """A row that sees no key, and a backward that gives it something."""

    class Noise(Backward):
        def finished(self, inputs, given, dq, dk, dv, delta):
            dq = dq + 2.0**-20
            return super().finished(inputs, given, dq, dk, dv, delta)

    asked = SHAPES[4](dtype=name, seed=1)
    assert shares(Noise(), asked)["dq"] == torch.inf
