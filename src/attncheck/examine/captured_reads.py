"""What the score mod of a Case reads of captured tensors, as the judge has to know it."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch

from attncheck.conditions import ReadConditions, ScoreModError
from attncheck.errors import TraceError
from attncheck.examine.allowances import on_keys
from attncheck.examine.evidence import analysis
from attncheck.mods.captured import reads
from attncheck.oracles.conditions import blocks, conditions

if TYPE_CHECKING:
    from torch import Tensor

    from attncheck.conditions import Conditions, Rows
    from attncheck.examine.evidence import Evidence
    from attncheck.judge.arithmetic import Arithmetic
    from attncheck.judge.scores import ScoreError
    from attncheck.mods.captured import Read

__all__ = ["CapturedReads", "where_seen"]


class CapturedReads:
    """Reads of a Case's score mod.

    Args:
        evidence: Of the Case.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._evidence, self._problem = evidence, evidence.case.problem

    @cached_property
    def all(self) -> tuple[Read, ...]:
        """None where their gradients are not asked for, or the score mod cannot be traced."""
        device = self._evidence.device
        if not self._problem.dcaptured:
            return ()
        try:
            return reads(self._problem.score_mod(device), device)
        except TraceError:
            return ()

    def conditions(
        self, arithmetic: Arithmetic, known: Conditions, scores: ScoreError
    ) -> list[ReadConditions]:
        """Every read in these rows, with the errors of its slope in this arithmetic."""
        at, seen = self._at(known), known.seen[..., : self._problem.kv]
        found = []
        for read in self.all:
            errors = analysis(read.slope, arithmetic)
            slope = read.slope.evaluate(*at).to(torch.float64)
            found.append(
                ReadConditions(
                    place=self._place(read, at),
                    slope=torch.where(seen, slope, 0.0),
                    error=where_seen(on_keys(errors, self._evidence, known, scores), known),
                )
            )
        return found

    @cached_property
    def numbers(self) -> Tensor:
        """Those that some seen score reads, ``(numbers,)`` bool; all where nothing is known."""
        inputs, truth = self._evidence.inputs, self._evidence.truth
        assert truth.dcaptured is not None, "asked of a Problem with dcaptured"
        if not self.all:
            return torch.ones_like(truth.dcaptured, dtype=torch.bool)
        found = torch.zeros_like(truth.dcaptured, dtype=torch.bool)
        for rows in blocks(self._problem, inputs.device):
            known = conditions(inputs, truth, rows)
            at, seen = self._at(known), known.seen[..., : self._problem.kv]
            for read in self.all:
                found[self._place(read, at)[seen]] = True
        return found

    def _place(self, read: Read, at: tuple[Tensor, ...]) -> Tensor:
        return (read.start + read.place.evaluate(*at)).expand(at[0].shape)

    def _at(self, known: Conditions) -> tuple[Tensor, ...]:
        """Scores before the mod, and b, h, q_idx and kv_idx, which broadcast to them."""
        indices = _indices(known.rows, self._problem.heads, self._problem.kv)
        return (known.products[..., : self._problem.kv], *indices)


def _indices(rows: Rows, heads: int, kv: int) -> tuple[Tensor, ...]:
    device = rows.query.device
    both = torch.arange(rows.heads.start, rows.heads.stop, device=device)[:, None, None]
    keys = torch.arange(kv, device=device)[None, None, :]
    return both // heads, both % heads, rows.query[None, :, None], keys


def where_seen(error: ScoreModError, known: Conditions) -> ScoreModError:
    """The same of errors on keys, sinks not, with none where a key is not seen."""
    seen = known.seen[..., : error.radius.shape[-1]]
    radius, own = (torch.where(seen, x, 0.0) for x in (error.radius, error.own))
    return ScoreModError(radius=radius, own=own, jump=error.jump & seen)
