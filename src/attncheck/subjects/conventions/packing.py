"""Problems as sequences one behind the other: ``(total, heads, dim)`` and where each begins."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from attncheck.mods.library import FULL
from attncheck.mods.spec import Spec
from attncheck.subjects.conventions.diagonals import Lengths
from attncheck.subjects.conventions.layouts import Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from attncheck.problem import Problem

__all__ = ["Packed", "packed", "packed_layout"]

Segments = list[list[Lengths]]
"""For each sequence of the batch, query rows and keys of each of its parts, in order."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A Problem whose mask is: a row sees keys of its own part, of which ``rest`` hides some.

    Attributes:
        segments: The parts.
        rest: What hides keys within a part, a mask in the Problem's own indices; ``full`` where
            nothing does.
        cut: Whether the mask names the parts; else they are whole sequences.
    """

    segments: Segments
    rest: Spec
    cut: bool

    def lengths(self) -> list[Lengths]:
        """Query rows and keys of all parts, in the order in which they are packed."""
        return [part for parts in self.segments for part in parts]

    def starts(self, side: int) -> list[int]:
        """Where each part begins, and where the last one ends: of queries (0) or keys (1)."""
        return [0, *accumulate(part[side] for part in self.lengths())]

    def places(self) -> list[tuple[int, int, int]]:
        """By which numbers the Problem's mods know each part: b, its first q_idx and kv_idx."""
        found = []
        for b, parts in enumerate(self.segments):
            row = key = 0
            for rows, keys in parts:
                found.append((b, row, key))
                row, key = row + rows, key + keys
        return found

    def leads(self) -> list[int]:
        """By how much the first kv_idx of each part is above its first q_idx."""
        return [key - row for _, row, key in self.places()]


def packed(problem: Problem) -> Packed | None:
    """The Problem packed; None where its mask names parts more than once."""
    parts = list(_conjuncts(problem.mask))
    cuts = [part for part in parts if part.name in _CUTS]
    rest = [part for part in parts if part.name not in _CUTS and part != FULL]
    if len(cuts) > 1:
        return None
    segments = _CUTS[cuts[0].name](problem, cuts[0]) if cuts else _whole(problem)
    return Packed(segments, _all_of(rest), bool(cuts))


def _all_of(parts: list[Spec]) -> Spec:
    if len(parts) < 2:
        return parts[0] if parts else FULL
    return Spec.of("and", *parts)


def _conjuncts(mask: Spec) -> Iterator[Spec]:
    if mask.name != "and":
        yield mask
    for part in mask.parts if mask.name == "and" else ():
        yield from _conjuncts(part)


def _whole(problem: Problem) -> Segments:
    return [[(problem.query, problem.kv)] for _ in range(problem.batch)]


def _padded(problem: Problem, padding: Spec) -> Segments:
    return [[(problem.query, length)] for length in _numbers(padding)]


def _document(problem: Problem, document: Spec) -> Segments:
    """A document's rows and keys, cut where those of the Problem end; the lengths may go beyond."""
    lengths = _numbers(document)
    rows, keys = (_cut(lengths, last) for last in (problem.query, problem.kv))
    return [list(zip(rows, keys, strict=True)) for _ in range(problem.batch)]


def _documents(problem: Problem, documents: Spec) -> Segments:
    """The same where a document's rows and keys are not as many."""
    rows = _cut(_numbers(documents, "query_lengths"), problem.query)
    keys = _cut(_numbers(documents, "kv_lengths"), problem.kv)
    return [list(zip(rows, keys, strict=True)) for _ in range(problem.batch)]


def _cut(lengths: tuple[int, ...], last: int) -> list[int]:
    """What of each length lies before ``last``."""
    ends = [min(end, last) for end in accumulate(lengths)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _numbers(spec: Spec, name: str = "lengths") -> tuple[int, ...]:
    lengths = spec.values[name]
    assert isinstance(lengths, tuple)
    return lengths


_CUTS: dict[str, Callable[[Problem, Spec], Segments]] = {
    "padding": _padded,
    "document": _document,
    "documents": _documents,
}


def packed_layout(problem: Problem) -> Layout:
    """``(total, heads, dim)``, with LSE ``(heads, total)``, or with total first.

    Every query row is in a part and the parts are in order, so packing moves no row; of the keys
    those of padding are left out. An LSE ``(parts, heads, longest)``, as flash-attn gave it before
    2.6, is cut to each part's rows.
    """
    found = packed(problem)
    assert found is not None, "asked of what can be packed"
    batch, heads, total = problem.batch, problem.heads, problem.batch * problem.query
    kept = [sum(kv for _, kv in parts) for parts in found.segments]
    rows = [part for part, _ in found.lengths()]
    return Layout(
        queries=lambda q: q.transpose(1, 2).flatten(0, 1).contiguous(),
        keys=lambda k: _kept(k, kept),
        out={
            (total, heads, problem.value_dim): lambda out: out.reshape(
                batch, -1, *out.shape[1:]
            ).transpose(1, 2)
        },
        out_axes="total, heads, dim",
        lse={
            (len(rows), heads, max(rows)): lambda lse: _by_batch(_unpadded(lse, rows), batch),
            (total, heads): lambda lse: _by_batch(lse.mT, batch),
            (heads, total): lambda lse: _by_batch(lse, batch),
        },
        lse_axes="heads, total",
        texts=_texts(problem, kept),
    )


def _texts(problem: Problem, kept: list[int]) -> dict[str, str]:
    """The same for a script."""
    kept_of = "torch.cat([row[:, :n] for row, n in zip({}, {}, strict=True)], 1)"
    keys = {name: kept_of.format(name, kept) for name in ("k", "v")}
    rows = f"{problem.batch}, {problem.query}"
    heads_first = f"(lse if len(lse) == {problem.heads} else lse.mT)"
    return {
        "q": "q.transpose(1, 2).flatten(0, 1).contiguous()",
        **{name: f"{text}.transpose(0, 1).contiguous()" for name, text in keys.items()},
        "out": f"out.reshape({rows}, *out.shape[1:]).transpose(1, 2)",
        "lse": f"{heads_first}.reshape(-1, {rows}).transpose(0, 1)",
    }


def _kept(k: Tensor, kept: list[int]) -> Tensor:
    """``(batch, kv_heads, kv, dim)`` → ``(total, kv_heads, dim)``."""
    parts = [row[:, :n] for row, n in zip(k, kept, strict=True)]
    return torch.cat(parts, 1).transpose(0, 1).contiguous()


def _by_batch(lse: Tensor, batch: int) -> Tensor:
    """``(heads, total)`` → ``(batch, heads, query)``."""
    return lse.reshape(len(lse), batch, -1).transpose(0, 1)


def _unpadded(lse: Tensor, rows: list[int]) -> Tensor:
    """``(parts, heads, longest)`` → ``(heads, total)``."""
    return torch.cat([part[:, :n] for part, n in zip(lse, rows, strict=True)], 1)
