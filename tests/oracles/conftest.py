"""How far two float64 evaluations of one problem may lie apart, and an oracle that is only slow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mpmath
import pytest
import torch

from attncheck import oracles
from attncheck.oracles.numbers import Float64
from attncheck.oracles.scores import Scores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs

UNIT = 2.0**-53


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products only; two threads on a busy machine wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _finest_bit(values: torch.Tensor) -> int:
    """A g with every value a multiple of 2^g, by the format's precision."""
    magnitudes = values[values.isfinite() & (values != 0)].abs()
    if not magnitudes.numel():
        return 0
    significand = round(1 - math.log2(torch.finfo(values.dtype).eps))
    return math.frexp(magnitudes.min().item())[1] - significand


@dataclass(frozen=True)
class Allowance:
    """First-order error bounds of any of the oracles, in units of 2^-53.

    A score: D + 1 roundings of Σ|q·k| unless the products are provably exact (the finest bit of
    any product against the largest sum), one for the scale, three for a score mod (its operations
    on numbers of the score's size). A weight: the score's error, one rounding of score − maximum
    (≤ 2·size), three of the change of base (idem), 3|score − maximum| for the telescoped chain of
    rescales, 2 for each of at most ``kv`` rescales' own exponentials and products, 2 for its own.
    Out: the weights' error and ``kv`` additions, above and below the line, and a division; relative
    to Σ p|v|. LSE: the weights' error and ``kv`` additions, the logarithm and one addition.

    Attributes:
        weight: Units of a weight's relative error.
        out: Units relative to Σ p|v|.
        spread: Σ p|v|, ``(batch, heads, query, value_dim)``.
        kv: Additions of a row.
    """

    weight: float
    out: float
    spread: torch.Tensor
    kv: int

    @classmethod
    def of(cls, inputs: Inputs, rescales: int | None = None) -> Allowance:
        problem = inputs.problem
        everything = range(problem.query), range(problem.kv)
        scores = Scores.of(Float64(), inputs)
        q, k, _ = inputs.promoted()
        k = k.repeat_interleave(problem.group, dim=1)
        after, _ = scores(q, k, *everything)
        before = problem.scale * (q @ k.mT)
        size = torch.cat([before.flatten(), after[after.isfinite()]]).abs().max().item()
        mass = (q.abs() @ k.abs().mT).max().item()
        finest = _finest_bit(inputs.q) + _finest_bit(inputs.k)
        products = 0.0 if mass < 2.0 ** (53 + finest) else (problem.head_dim + 1) * mass
        blocks = problem.kv if rescales is None else rescales
        weight = problem.scale * products + (1 + 3 + 2 + 3 * 2 + 3 * 2) * size + 2 * blocks + 2
        spread = oracles.dense(inputs.replace(v=inputs.v.abs())).out
        return cls(weight, 2 * (weight + problem.kv) + 1, spread, problem.kv)

    def misses(self, one: Outputs, other: Outputs, sides: int = 2) -> list[str]:
        """What differs by more than ``sides`` evaluations may; exact −∞ and 0 must be equal."""
        assert one.lse is not None
        assert other.lse is not None
        found = []
        unit = sides * UNIT
        if not bool(((one.out - other.out).abs() <= unit * self.out * self.spread).all()):
            worst = ((one.out - other.out).abs() / self.spread / UNIT).max().item()
            found.append(f"out: {worst:.1f} units, allowed {sides * self.out:.1f}")
        same = one.lse == other.lse
        allowed = unit * (self.weight + self.kv + 2 + 2 * other.lse.abs())
        if not bool((same | ((one.lse - other.lse).abs() <= allowed)).all()):
            found.append(f"lse: {(one.lse - other.lse).abs().max().item() / UNIT:.1f} units")
        return found


@pytest.fixture
def allowance() -> Callable[..., Allowance]:
    """Of Inputs."""
    return Allowance.of


def _python_loop(
    inputs: Inputs,
    sees: Callable[[int, int, int, int], bool],
    score: Callable[[mpmath.mpf, int, int, int, int], mpmath.mpf],
) -> Outputs:
    from attncheck.outputs import Outputs

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
def python_loop() -> Callable[..., Outputs]:
    """Attention in 160 bits by four nested loops; the mask and score are Python on integers."""
    return _python_loop
