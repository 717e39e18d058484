"""Bounds of the gradients that are sums over rows, heads and sequences: B37–B40 of the manual."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.formats import FORMATS
from attncheck.judge.accumulators import FP32, FP64
from attncheck.judge.gradients.rows import query_operand
from attncheck.judge.gradients.sums import OUTPUT, PARTS, in_parts, rounded, settled
from attncheck.judge.spacing import half_ulp

if TYPE_CHECKING:
    from attncheck.judge.accumulators import Accumulator
    from attncheck.judge.arithmetic import Arithmetic
    from attncheck.judge.gradients.rows import RowGradients
    from attncheck.judge.gradients.sums import Sums

__all__ = ["HEADS", "KeyBounds", "KeyGradients"]

HEADS = "rounding of heads"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KeyBounds:
    """Bounds of |error|, float64; infinite where nothing is known, 0 for keys that no row sees.

    Attributes:
        dk: ``(batch, kv_heads, kv, head_dim)``.
        dv: ``(batch, kv_heads, kv, value_dim)``.
        dsink: ``(heads,)``; None without a sink.
        dcaptured: ``(numbers,)``; None where no captured numbers are asked about.
        dk_terms: What ``dk`` is made of, by name, each of its shape; they sum to it.
        dv_terms: What ``dv`` is made of.
        dsink_terms: What ``dsink`` is made of; empty without a sink.
        dcaptured_terms: What ``dcaptured`` is made of; empty without.
    """

    dk: torch.Tensor
    dv: torch.Tensor
    dsink: torch.Tensor | None
    dcaptured: torch.Tensor | None
    dk_terms: dict[str, torch.Tensor]
    dv_terms: dict[str, torch.Tensor]
    dsink_terms: dict[str, torch.Tensor]
    dcaptured_terms: dict[str, torch.Tensor]


class KeyGradients:
    """Adds up the parts of all rows of a Problem, every row of every head once, in any order.

    Args:
        arithmetic: What the kernel declares.
        batch: Sequences.
        heads: Query heads of each.
        kv_heads: Key heads of each.
        query: Rows of each head.
    """

    def __init__(
        self, arithmetic: Arithmetic, *, batch: int, heads: int, kv_heads: int, query: int
    ) -> None:
        self._arithmetic, self._query = arithmetic, query
        self._batch, self._heads, self._group = batch, heads, heads // kv_heads
        self._scale = 0.0
        self._sums: dict[str, Sums] = {}

    def add(self, rows: RowGradients) -> None:
        """The parts of some rows."""
        self._scale = rows.scale
        heads = torch.arange(rows.rows.heads.start, rows.rows.heads.stop, device=rows.dq.device)
        apart = self._arithmetic.sums_rounded_heads
        self._add("dk", rows.dk, heads if apart else heads // self._group)
        self._add("dv", rows.dv, heads if apart else heads // self._group)
        if rows.dsink is not None:
            self._add("dsink", rows.dsink, heads % self._heads)
        if rows.dcaptured is not None:  # summed by number already
            before = self._sums.get("dcaptured")
            found = rows.dcaptured
            self._sums["dcaptured"] = found if before is None else before.plus(found)

    def finished(
        self,
        dk: torch.Tensor,
        dv: torch.Tensor,
        dsink: torch.Tensor | None = None,
        dcaptured: torch.Tensor | None = None,
    ) -> KeyBounds:
        """The bounds, once every row has been added.

        Args:
            dk: Exact, float64 ``(batch, kv_heads, kv, head_dim)``.
            dv: Exact, ``(batch, kv_heads, kv, value_dim)``.
            dsink: Exact, ``(heads,)``, of a Problem with a sink.
            dcaptured: Exact, ``(numbers,)``, where rows were added with reads.
        """
        operand = query_operand(self._arithmetic), self._arithmetic.operand_error
        dk_bound, dk_terms = self._of_keys("dk", dk, self._scale, operand[0])
        dv_bound, dv_terms = self._of_keys("dv", dv, 1.0, operand[1])
        sink, sink_terms = self._in_fp32("dsink", dsink)
        captured, captured_terms = self._in_fp32("dcaptured", dcaptured)
        return KeyBounds(
            dk=dk_bound,
            dv=dv_bound,
            dsink=sink,
            dcaptured=captured,
            dk_terms=dk_terms,
            dv_terms=dv_terms,
            dsink_terms=sink_terms,
            dcaptured_terms=captured_terms,
        )

    def _add(self, name: str, part: Sums, to: torch.Tensor) -> None:
        of_sinks = name == "dsink"
        apart = self._arithmetic.sums_rounded_heads
        whole = self._heads * (1 if of_sinks else self._batch)
        count = whole if of_sinks or apart else whole // self._group
        found = part.spread(to, count)
        before = self._sums.get(name)
        self._sums[name] = found if before is None else before.plus(found)

    def _of_keys(
        self, name: str, exact: torch.Tensor, scale: float, operand: float
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """B37 and B39, in the shape of ``exact``."""
        sums, arithmetic = self._sums[name], self._arithmetic
        accumulator = arithmetic.values
        steps = self._steps(sums, accumulator)
        terms = sums.terms(arithmetic, accumulator, scale=scale, operand=operand, steps=steps)
        seen, unknown = sums.taken > 0, sums.unknown
        if arithmetic.sums_rounded_heads:
            assert sums.exact is not None, "rows keep it where heads are rounded"
            terms = self._of_heads(scale * sums.exact, terms)
            seen, unknown = (_by_group(x, self._group).any(1) for x in (seen, unknown))
        if arithmetic.dkv_parts > 1:
            terms[PARTS] = self._of_parts(scale * sums.size, terms)
        flat = exact.flatten(0, 1)
        terms[OUTPUT] = rounded(flat, terms, arithmetic.output)
        bound, terms = settled(terms, ~(seen | unknown)[..., None], unknown[..., None])
        return bound.view(exact.shape), {n: term.view(exact.shape) for n, term in terms.items()}

    def _of_heads(
        self, exact: torch.Tensor, terms: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """B39: each head's sum rounded, and the sums of heads added in the output format."""
        output = self._arithmetic.output
        terms[HEADS] = rounded(exact, terms, output)
        size = exact.abs() + sum(terms.values())
        terms = {n: _by_group(term, self._group).sum(1) for n, term in terms.items()}
        size = _by_group(size, self._group).sum(1)
        # Partial sums are rounded at most half an ulp of the largest they can be.
        terms[HEADS] = terms[HEADS] + (self._group - 1) * half_ulp(
            size * (1 + output.unit_roundoff) ** self._group, output
        )
        return terms

    def _of_parts(self, size: torch.Tensor, terms: dict[str, torch.Tensor]) -> torch.Tensor:
        """B39: added up part after part in the output format."""
        if self._arithmetic.sums_rounded_heads:
            size = _by_group(size, self._group).sum(1)
        return in_parts(size, terms, self._arithmetic.dkv_parts, self._arithmetic.output)

    def _steps(self, sums: Sums, accumulator: Accumulator) -> torch.Tensor | None:
        """Steps of a truncating accumulator in which a key is seen: at most all of its tiles'."""
        if accumulator.block is None:
            return None
        heads = 1 if self._arithmetic.sums_rounded_heads else self._group
        return sums.taken.clamp(max=heads * math.ceil(self._query / accumulator.block))

    def _in_fp32(
        self, name: str, exact: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """B38 and B40: summed in fp32 and given in fp32, whatever the products are."""
        if exact is None:
            return None, {}
        sums, arithmetic = self._sums[name], self._arithmetic
        fp64 = arithmetic.computes.name == "fp64"
        terms = sums.terms(arithmetic, FP64 if fp64 else FP32)
        output = FORMATS["fp64"] if fp64 else FORMATS["fp32"]
        terms[OUTPUT] = rounded(exact.view_as(sums.moved), terms, output)
        # Every row sees a sink; a number may be read by no score that counts.
        unread = (sums.taken == 0) & ~sums.unknown & (name == "dcaptured")
        bound, terms = settled(terms, unread[..., None], sums.unknown[..., None])
        return bound.flatten(), {name: term.flatten() for name, term in terms.items()}


def _by_group(x: torch.Tensor, group: int) -> torch.Tensor:
    """``(heads, …)`` as ``(key heads, group, …)``."""
    return x.reshape(-1, group, *x.shape[1:])
