"""What rows must give where equal largest scores share their whole weight, and how near."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from attncheck.formats import FORMATS, spacing
from attncheck.probes import margins
from attncheck.probes.kv_heads import amplitudes
from attncheck.probes.margins import HALF, USUAL, WeightErrors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.inputs import Inputs
    from attncheck.probes.finding import Seen
    from attncheck.problem import Problem

__all__ = ["TiedRows", "tied_rows"]

_SCORES_AT_A_TIME = 1 << 22


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TiedRows:
    """What rows must give by counting; axes ``(batch, heads, rows[, value_dim | kv])``, float64.

    Attributes:
        query: Which rows.
        tied: bool: the keys of the largest score that a row sees.
        keys: How many they are; 0 in rows that see none.
        sums: Σ of their values.
        once: Largest |out − sums / keys| where out is rounded once; infinite where ``keys`` is no
            power of two, so that a kernel that divides P first would round P.
        unit: What values are whole multiples of, ``(batch, heads, 1)``: ``kv_heads.amplitudes``.
        lse: What LSE must be.
        counts_out, counts_lse: bool: rounding cannot move the count by a quarter there.
    """

    query: range
    tied: torch.Tensor
    keys: torch.Tensor
    sums: torch.Tensor
    once: torch.Tensor
    unit: torch.Tensor
    lse: torch.Tensor
    counts_out: torch.Tensor
    counts_lse: torch.Tensor


def tied_rows(inputs: Inputs, seen: Seen, *, errors: WeightErrors = USUAL) -> Iterator[TiedRows]:
    """All rows, some at a time.

    Args:
        inputs: Of a probe.
        seen: What the mask shows.
        errors: Of the kernel's weights.
    """
    problem = inputs.problem
    q, k, v = inputs.promoted()
    k, v = (x.repeat_interleave(problem.group, dim=1) for x in (k, v))
    step = max(1, _SCORES_AT_A_TIME // (problem.batch * problem.heads * problem.kv))
    for start in range(0, problem.query, step):
        query = range(start, min(start + step, problem.query))
        rows = q[:, :, query.start : query.stop]
        scores = rows @ k.mT * problem.scale
        largest = _Largest.of(scores, seen(query).expand_as(scores), v)
        if problem.formats.products.significand < FORMATS["fp32"].significand:
            alike = _alike(rows, k, largest.tied)
            largest = replace(largest, apart=largest.apart & alike, alone=largest.alone & alike)
        yield largest.rows(problem, query, errors)


def _alike(q: torch.Tensor, k: torch.Tensor, tied: torch.Tensor) -> torch.Tensor:
    """Whether the scores of tied keys are sums of the same products, bool ``(batch, heads, rows)``.

    Else they tie no longer in a kernel that rounds scale · q, since three times a rounded number is
    not three times the number, rounded. It happens in ``isolated``, whose rows of q have numbers of
    two magnitudes and those of k of one: if Σ q·k and Σ q·|q|·k tie, then so do the sums of either
    magnitude. The keys that other probes tie have the same k.
    """
    squared = (q * q.abs()) @ k.mT
    highest = squared.masked_fill(~tied, -torch.inf).amax(-1)
    lowest = squared.masked_fill(~tied, torch.inf).amin(-1)
    return highest <= lowest


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Largest:
    """The largest scores of rows, and their values; a last axis of 1 where there is no other.

    Attributes:
        tied: bool ``(batch, heads, rows, kv)``.
        keys, top: How many they are, and their score; 0 where a row sees none.
        sums, sizes: Σ v and Σ |v| of them.
        rest: Σ of the others' weights relative to one of them.
        apart: bool: the others lie far enough below.
        alone: bool: there are no others.
        most: The largest |v|.
    """

    tied: torch.Tensor
    keys: torch.Tensor
    top: torch.Tensor
    sums: torch.Tensor
    sizes: torch.Tensor
    rest: torch.Tensor
    apart: torch.Tensor
    alone: torch.Tensor
    most: torch.Tensor

    @classmethod
    def of(cls, scores: torch.Tensor, seen: torch.Tensor, v: torch.Tensor) -> _Largest:
        largest = scores.masked_fill(~seen, -torch.inf).amax(-1, keepdim=True)
        top = torch.where(largest.isinf(), 0.0, largest)
        tied = seen & (scores == top)
        others = seen & ~tied
        below = (scores - top).masked_fill(~others, -torch.inf)
        return cls(
            tied=tied,
            keys=tied.sum(-1, keepdim=True).double(),
            top=top,
            sums=tied.double() @ v,
            sizes=tied.double() @ v.abs(),
            rest=below.exp().sum(-1, keepdim=True),
            apart=tied.any(-1) & (below.amax(-1) <= -margins.GAP),
            alone=tied.any(-1) & ~others.any(-1),
            most=v.abs().flatten(2).amax(-1)[..., None, None],
        )

    def rows(self, problem: Problem, query: range, errors: WeightErrors) -> TiedRows:
        unit = amplitudes(problem).repeat_interleave(problem.group, dim=1).to(self.top.device)
        moved = 2 * self.rest * self.most  # the derivation's 2ωM
        of_unit = (x / unit[..., None, None] for x in (self.sizes, moved))
        sizes, others = of_unit
        counts = margins.countable(problem, sizes, self.keys, self.top, others, errors)
        keys = self.keys.squeeze(-1)
        off = keys * torch.expm1(margins.lse_error(keys, errors))
        flat = self.alone & (self.top == 0).squeeze(-1)
        return TiedRows(
            query=query,
            tied=self.tied,
            keys=keys,
            sums=self.sums,
            once=self._once(problem, moved, errors),
            unit=unit[..., None],
            lse=(self.top + torch.log(self.keys + self.rest)).squeeze(-1),
            counts_out=self.apart & counts.all(-1),
            counts_lse=flat & (off < margins.QUARTER),
        )

    def _once(self, problem: Problem, moved: torch.Tensor, errors: WeightErrors) -> torch.Tensor:
        """Half a unit in the last place of out, and what comes before it."""
        asked = self.apart[..., None] & (torch.frexp(self.keys)[0] == HALF)
        some = self.keys.clamp(min=1.0)
        error = margins.error_before(problem, self.top, errors)
        before = (self.sizes * error + moved) / some
        half = spacing((self.sums / some).abs() + before, problem.formats.output) * HALF
        return torch.where(asked, before + half, torch.inf)
