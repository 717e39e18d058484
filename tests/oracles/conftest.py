"""Error bounds for two evaluations of one problem, a slow reference oracle, and planted faults."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import mpmath
import numpy as np
import pytest
import torch

from attncheck import oracles
from attncheck.cases.variants import VARIANTS, Shape
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.mods.mpmath_algebra import MPMATH
from attncheck.oracles.float64_numbers import Float64
from attncheck.oracles.mp_numbers import Mp
from attncheck.oracles.recurrence_steps import Scores
from attncheck.oracles.streaming_forward import Blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from attncheck.core.outputs import Outputs
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.oracles.mp_numbers import ManyDigits
    from attncheck.oracles.recurrence_steps import Result

UNIT = 2.0**-53
# value_dim ≠ head_dim; 9 > 4 leaves a window's last rows without keys.
SHAPES = ["2x4/2x5/7x4/3", "1x2/1x9/4x3/5"]
SMALL = Blocks(rows=24, query=4, query_most=8, kv=8, cell=4)  # many tiles in a tiny problem


PLANTED = tomllib.loads(Path(__file__).with_name("planted_faults.toml").read_text())
"""Kind of recurrence → name of a fault → the text of the source that it replaces."""


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Many small calls: threads of torch would wait for one another."""


def draw_variant(name: str, shape: str, **fields: object) -> Inputs:
    """Inputs of the variant ``name`` in a shape of ``SHAPES``."""
    parsed = Shape.parse(shape)
    return draw_inputs(Problem(**VARIANTS[name].fields(parsed, parsed.kv_heads), **fields))


class CoarseExp(Float64):
    """A planted fault: exponentials in fp32."""

    def exp(self, array: torch.Tensor) -> torch.Tensor:
        return array.float().exp().double()


def make_numbers(system: str, *evaluators: str, digits: int = 30) -> Any:
    """An ``Mp`` or ``Ball`` with these of a mod's evaluators: score, slope, captures."""
    if system == "Mp":
        return Mp(digits, *(getattr(MPMATH, name) for name in evaluators))
    pytest.importorskip("flint")
    from attncheck.mods.ball_algebra import BALLS
    from attncheck.oracles.ball_numbers import BITS, Ball

    return Ball(BITS, *(getattr(BALLS, name) for name in evaluators))


def assert_balls_contain(balls: Iterable[Any], numbers: Iterable[Any], mp: Mp) -> None:
    """Assert that balls are small and contain the numbers of ``mp``, up to fifty decimals."""
    for ball, number in zip(balls, numbers, strict=True):
        assert float(ball.rad()) <= 2.0**-90
        middle = mp.context.mpf(ball.mid().str(50, radius=False))
        # The radius is rounded up to a float64, the decimals are truncated after fifty.
        assert abs(middle - number) <= float(ball.rad()) * (1 + 2.0**-50) + 1e-48


def _finest_bit(values: torch.Tensor, bits: int) -> int:
    """A g such that all values, of ``bits`` significant bits, are multiples of 2^g."""
    magnitudes = values[values.isfinite() & (values != 0)].abs()
    return math.frexp(magnitudes.min().item())[1] - bits if magnitudes.numel() else 0


@dataclass(frozen=True)
class Allowance:
    """First-order error bounds that hold for every oracle, in units of roundoff (2^-53 in float64).

    A score: D + 1 roundings of Σ|q·k| unless the products are provably exact (the finest bit of
    any product against the largest sum), one for the scale, three for a score mod (its operations
    on numbers of the score's size). A weight: the score's error, one rounding of score − maximum
    (≤ 2·size), three of the change of base (likewise), 3|score − maximum| for the telescoped chain
    of rescales, 4 for each of at most ``kv`` rescales, 4 for its own exponential.
    FlashAttention-1 needs the most for each: an exponential, products with l and with it, and a
    division by l; the error of l itself cancels, as the next block multiplies by the l that this
    one divided by. Out: the weights' error and ``kv`` additions, in numerator and denominator, and
    a division; relative to Σ p|v|, in softmax to p. LSE: the weights' error and ``kv`` additions,
    the logarithm and one addition.

    Attributes:
        weight: The relative error of a weight, in units.
        out: The error of out relative to Σ p|v|, in units.
        spread: Σ p|v|, ``(batch, heads, query, value_dim)``; of softmax p.
        kv: The number of additions in a row.
    """

    weight: float
    out: float
    spread: torch.Tensor
    kv: int

    @classmethod
    def of(cls, inputs: Inputs, rescales: int | None = None) -> Allowance:
        problem = inputs.problem
        if problem.operation == "softmax":
            scores, products = inputs.scores(), 0.0
            size = scores[scores.isfinite()].abs().max().item()
            spread = oracles.truth(inputs).out
        else:
            size, products = _scores(inputs)
            spread = oracles.dense(inputs.replace(v=inputs.v.abs())).out
        blocks = problem.kv if rescales is None else rescales
        weight = problem.scale * products + (1 + 3 + 2 + 3 * 2 + 3 * 2) * size + 4 * blocks + 4
        # A subnormal weight is rounded to the spacing of the subnormal numbers.
        return cls(weight, 2 * (weight + problem.kv) + 1, spread.clamp(min=2.0**-1022), problem.kv)

    def misses(self, one: Outputs, other: Outputs, sides: int = 2) -> list[str]:
        """What differs by more than the errors of ``sides`` evaluations; −∞ and 0 must be equal."""
        assert one.lse is not None
        assert other.lse is not None
        messages = []
        unit = sides * UNIT
        if not bool(_within((one.out - other.out).abs(), unit * self.out * self.spread).all()):
            worst = ((one.out - other.out).abs() / self.spread / UNIT).max().item()
            messages.append(f"out: {worst:.1f} units, allowed {sides * self.out:.1f}")
        same = one.lse == other.lse
        allowed = unit * (self.weight + self.kv + 2 + 2 * other.lse.abs())
        if not bool((same | _within((one.lse - other.lse).abs(), allowed)).all()):
            messages.append(f"lse: {(one.lse - other.lse).abs().max().item() / UNIT:.1f} units")
        return messages

    def misses_in_many_digits(
        self, mp: Mp, one: Result[ManyDigits], other: Result[ManyDigits]
    ) -> list[str]:
        """The same for two evaluations in the digits of ``mp``, whose unit is 2^-precision."""
        unit = 2 * mp.context.ldexp(1, -mp.context.prec)
        of_lse = [self.weight + self.kv + 2 + 2 * abs(lse) for lse in other.lse.flat]
        parts = {
            "out": (one.out, other.out, (self.out * self.spread).flatten().tolist()),
            "lse": (one.lse, other.lse, of_lse),
        }
        return [
            f"{name}: {mp.context.nstr(abs(x - y), 5)}, allowed {mp.context.nstr(unit * units, 5)}"
            for name, (ones, others, allowed) in parts.items()
            for x, y, units in zip(ones.flat, others.flat, allowed, strict=True)
            if x != y and not abs(x - y) <= unit * units < math.inf
        ]


def _within(differences: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """False where ``allowed`` is ∞, as for an LSE of −∞: otherwise any difference would pass."""
    return (differences <= allowed) & allowed.isfinite()


def _scores(inputs: Inputs) -> tuple[float, float]:
    """The size of the largest score, and the error of the products of q and k in units."""
    problem = inputs.problem
    scores = Scores.of(Float64(), inputs)
    q, k, _ = inputs.promoted()
    k = k.repeat_interleave(problem.group, dim=1)
    after, _ = scores(q, k, range(problem.query), range(problem.kv))
    before = problem.scale * (q @ k.mT)
    size = torch.cat([before.flatten(), after[after.isfinite()]]).abs().max().item()
    mass = (q.abs() @ k.abs().mT).max().item()
    formats = problem.formats
    bits = formats.storage.significand + (24 if formats.scaled else 0)  # a descale is fp32
    finest = sum(_finest_bit(tensor, bits) for tensor in inputs.promoted()[:2])
    return size, 0.0 if mass < 2.0 ** (53 + finest) else (problem.head_dim + 1) * mass


def _relative_distance(
    mp: Mp, inputs: Inputs, one: Result[ManyDigits], other: Result[ManyDigits]
) -> float:
    """log10 of the largest difference: of out relative to Σ p|v|, of LSE to max(1, |LSE|).

    ∞ if a difference is not finite, or is not 0 although the size it is relative to is 0.
    """
    spread = mp.exact(Allowance.of(inputs).spread)
    sizes = np.array([max(1, abs(lse)) for lse in other.lse.flat], dtype=object)
    differences = [
        abs(x - y) / size if size and abs(x - y) < math.inf and size < math.inf else math.inf
        for ones, others, unit in ((one.out, other.out, spread), (one.lse, other.lse, sizes))
        for x, y, size in zip(ones.flat, others.flat, unit.flat, strict=True)
        if x != y
    ]
    largest = max(differences, default=0)
    return float(mp.context.log10(largest)) if largest else -math.inf


@pytest.fixture
def relative_distance():
    return _relative_distance


def _plant(module: ModuleType, right: str, wrong: str) -> ModuleType:
    assert module.__file__ is not None
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert source.count(right) == 1, right
    copy = ModuleType(module.__name__)
    exec(compile(source.replace(right, wrong), module.__file__, "exec"), copy.__dict__)  # noqa: S102  # our own source
    return copy


@pytest.fixture
def plant():
    """``plant(module, right, wrong)``: a copy with one text, which occurs once, replaced."""
    return _plant


@pytest.fixture
def allowance():
    return Allowance.of


def _python_loop(
    inputs: Inputs,
    sees: Callable[[int, int, int, int], bool],
    score: Callable[[mpmath.mpf, int, int, int, int], mpmath.mpf],
) -> Outputs:
    from attncheck.core.outputs import Outputs

    p = inputs.problem
    q, k, v = (tensor.tolist() for tensor in inputs.promoted())
    out = torch.zeros(p.batch, p.heads, p.query, p.value_dim, dtype=torch.float64)
    lse = torch.full((p.batch, p.heads, p.query), -math.inf, dtype=torch.float64)
    with mpmath.workprec(160):
        for b in range(p.batch):
            for h in range(p.heads):
                keys, values = k[b][h * p.kv_heads // p.heads], v[b][h * p.kv_heads // p.heads]
                for i in range(p.query):
                    weights = {
                        j: mpmath.exp(score(mpmath.fdot(q[b][h][i], keys[j]) * p.scale, b, h, i, j))
                        for j in range(p.kv)
                        if sees(b, h, i, j)
                    }
                    if not weights:
                        continue
                    total = mpmath.fsum(weights.values())
                    lse[b, h, i] = float(mpmath.log(total))
                    for d in range(p.value_dim):
                        terms = (w * values[j][d] for j, w in weights.items())
                        out[b, h, i, d] = float(mpmath.fsum(terms) / total)
    return Outputs(out, lse)


@pytest.fixture
def python_loop():
    """Attention in 160 bits by nested loops; mask and score mod are plain Python functions."""
    return _python_loop
