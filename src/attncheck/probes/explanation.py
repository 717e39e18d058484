"""What would best explain a row that is off: one key left out, one too many, a factor, a scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.probes.margins import HALF, QUARTER

if TYPE_CHECKING:
    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs

__all__ = ["explained"]

_STEPS = 12  # each moves the scale by a factor of e at most


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Row:
    """One row, exactly: float64. ``value_dim + 1`` is out's columns and LSE.

    Attributes:
        score: scale · q·k of every key, seen or not, ``(kv,)``.
        seen: bool ``(kv,)``: what the row sees.
        v: Values of its key head, ``(kv, value_dim)``.
        out, lse: The exact result.
        error: What the kernel gave less that, in units of what rounding allows,
            ``(value_dim + 1,)``; 0 for an LSE that is not exposed.
        unit: 1 / what rounding allows, as long.
    """

    score: torch.Tensor
    seen: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    error: torch.Tensor
    unit: torch.Tensor

    @property
    def odds(self) -> torch.Tensor:
        """Natural logarithm of the weights, ``(kv,)``."""
        return self.score - self.lse

    def left(self, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """How much of the error is left after these changes of out and LSE.

        Of out, in parts of its size and no less than rounding leaves; or of LSE, if that is more.
        """
        moved = torch.cat([out, lse[..., None]], dim=-1) * self.unit
        rest = self.error - moved
        sizes = (self.error[:-1].norm(), self.error[-1].abs())
        least = (math.sqrt(len(self.error)), 1.0)
        parts = (rest[..., :-1].norm(dim=-1), rest[..., -1].abs())
        of_out, of_lse = (
            part / size.clamp(min=low) for part, size, low in zip(parts, sizes, least, strict=True)
        )
        return torch.maximum(of_out, of_lse)

    def fitted(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[float, float]:
        """The multiple of these changes that leaves least, and how much that is."""
        moved = torch.cat([out, lse[..., None]], dim=-1) * self.unit
        square = float(moved.square().sum())
        times = float((self.error * moved).sum()) / square if square else 0.0
        return times, float(self.left(times * out, times * lse))


def explained(
    inputs: Inputs,
    given: Outputs,
    truth: Outputs,
    allowed: Outputs,
    seen: torch.Tensor,
    place: tuple[int, int, int],
) -> tuple[int, str]:
    """A key and what happened to it, in words; −1 and other words where no single key explains it.

    Args:
        inputs: Of a probe.
        given: What the kernel gave.
        truth: What it must be, float64.
        allowed: What rounding allows, float64.
        seen: bool ``(kv,)``: what the row sees.
        place: (batch, head, row).

    Each hypothesis moves the row's exact out and LSE in a way of its own. That after which least of
    the error is left, in units of what rounding allows, explains it if less than half is left.
    """
    row = _row(inputs, given, truth, allowed, seen, place)
    if not bool(row.error.isfinite().all()):
        return -1, "explained by nothing that is finite"
    # What says all of LSE must say it better than what merely has the right size.
    groups = (((_base,), QUARTER * QUARTER), ((_one_key,), HALF), ((_factor, _scale), QUARTER))
    for tried, most in groups:
        left, key, said = min((one(row) for one in tried), key=lambda one: one[0])
        if left < most:
            return key, f"explained best by {said}"
    if bool((row.error[:-1].abs() <= 1.0).all()):
        off = float(row.error[-1] / row.unit[-1])
        return -1, f"right in out, and its LSE is {off:+.5g} off"
    return -1, "explained by no single key, factor or scale"


def _row(
    inputs: Inputs,
    given: Outputs,
    truth: Outputs,
    allowed: Outputs,
    seen: torch.Tensor,
    place: tuple[int, int, int],
) -> _Row:
    b, h, _ = place
    q, k, v = inputs.promoted()
    own = (b, h // inputs.problem.group)
    assert truth.lse is not None, "the oracle always gives LSE"
    assert allowed.lse is not None, "and so do the bounds"
    lse = truth.lse[place]
    given_lse = lse if given.lse is None else given.lse[place].double()
    error = torch.cat([given.out[place].double() - truth.out[place], (given_lse - lse)[None]])
    size = torch.cat([allowed.out[place], allowed.lse[place][None]])
    # Where nothing at all is allowed, as little as anywhere in the row.
    least = size[size > 0].amin() if bool((size > 0).any()) else torch.ones_like(lse)
    unit = 1.0 / size.clamp(min=float(least))
    return _Row(
        score=k[own] @ q[place] * inputs.problem.scale,
        seen=seen,
        v=v[own],
        out=truth.out[place],
        lse=lse,
        error=error * unit,
        unit=unit,
    )


def _one_key(row: _Row) -> tuple[float, int, str]:
    """Leaving out key j moves out by w(out − v)/(1 − w) and LSE by ln(1 − w).

    One more moves them by w(v − out)/(1 + w) and ln(1 + w).
    """
    weight = row.odds.exp()
    alone = row.seen & (weight >= 1.0)
    kept = torch.where(row.seen & ~alone, weight, 0.0)
    factor = torch.where(row.seen, -kept / (1 - kept), torch.sigmoid(row.odds))
    lse = torch.where(row.seen, torch.log1p(-kept), torch.nn.functional.softplus(row.odds))
    left = row.left(factor[:, None] * (row.v - row.out), lse).masked_fill(alone, math.inf)
    key = int(left.argmin())
    seen = bool(row.seen[key])
    said = f"key {key} left out" if seen else f"key {key}, which the row must not see"
    return float(left[key]), key, said


def _factor(row: _Row) -> tuple[float, int, str]:
    times, left = row.fitted(row.out, torch.zeros_like(row.lse))
    return left, -1, f"a factor of {1 + times:.6g} on out"


def _scale(row: _Row) -> tuple[float, int, str]:
    """Gauss and Newton's steps to the scale that leaves least, then what that truly leaves.

    The derivatives by its logarithm: Σ w·score·(v − out), and Σ w·score of LSE.
    """
    factor, left = 1.0, math.inf
    for _ in range(_STEPS):
        score = (row.score * factor).masked_fill(~row.seen, -math.inf)
        weight, lse = torch.softmax(score, -1), torch.logsumexp(score, -1)
        out = weight @ row.v
        moved = torch.cat([out - row.out, (lse - row.lse)[None]])
        left = float(row.left(moved[:-1], moved[-1]))
        pull = weight * torch.where(row.seen, score, 0.0)
        slope = torch.cat([pull @ (row.v - out), pull.sum()[None]]) * row.unit
        square = float(slope.square().sum())
        if left == 0.0 or not 0.0 < square < math.inf:
            break
        step = float(((row.error - moved * row.unit) * slope).sum()) / square
        factor *= math.exp(min(max(step, -1.0), 1.0))
    return left, -1, f"scores about {factor:.4g} times as large"


def _base(row: _Row) -> tuple[float, int, str]:
    lse = row.lse * (math.log2(math.e) - 1.0)
    return float(row.left(torch.zeros_like(row.out), lse)), -1, "an LSE to base 2"
