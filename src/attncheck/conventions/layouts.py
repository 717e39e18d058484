"""Axes in which a kernel takes q, k and v and gives out and LSE: by batch, or packed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, repeat
from typing import TYPE_CHECKING

import torch

from attncheck.mods.library import FULL
from attncheck.mods.masks import shifted_dimensions
from attncheck.mods.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor

    from attncheck.inputs.problem import Problem
    from attncheck.mods.spec import Dimensions

    Change = Callable[[Tensor], Tensor]

    Shapes = Mapping[tuple[int, ...], Change]

__all__ = [
    "Band",
    "Layout",
    "Lengths",
    "PackedProblem",
    "band_window",
    "bhsd",
    "bshd",
    "diagonal_offset",
    "mask_band",
    "pack",
    "packed_layout",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How tensors in attncheck's axes become a kernel's, and come back, for one Problem.

    Attributes:
        queries: q ``(batch, heads, query, head_dim)`` → the kernel's.
        keys: k or v ``(batch, kv_heads, kv, dim)`` → the kernel's.
        out: By the shape that its out may have, what brings it to ``(batch, heads, query,
            value_dim)``; empty where it has these axes.
        out_axes: Names of its axes.
        lse: By the shape that its LSE may have, what brings it to ``(batch, heads, query)``.
        lse_axes: Names of its axes.
        texts: For a script, expressions of ``q``, ``k``, ``v``, ``out`` and ``lse`` by these names.
    """

    queries: Change
    keys: Change
    out: Shapes
    out_axes: str
    lse: Shapes
    lse_axes: str
    texts: Mapping[str, str]


def bhsd(problem: Problem) -> Layout:
    """``(batch, heads, query, dim)``, attncheck's own."""
    del problem
    return Layout(
        queries=_same,
        keys=_same,
        out={},
        out_axes="batch, heads, query, dim",
        lse={},
        lse_axes="batch, heads, query",
        texts={name: name for name in ("q", "k", "v", "out", "lse")},
    )


def bshd(problem: Problem) -> Layout:
    """``(batch, query, heads, dim)``, with LSE ``(batch, heads, query)``."""
    batch, heads, query = problem.batch, problem.heads, problem.query
    return Layout(
        queries=_heads_inside,
        keys=_heads_inside,
        out={(batch, query, heads, problem.value_dim): _heads_outside},
        out_axes="batch, query, heads, dim",
        lse={(batch, heads, query): _same},
        lse_axes="batch, heads, query",
        texts={name: f"{name}.transpose(1, 2).contiguous()" for name in ("q", "k", "v")}
        | {"out": "out.transpose(1, 2)", "lse": "lse"},
    )


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _heads_inside(tensor: Tensor) -> Tensor:
    """Contiguous where the tensor was, as a caller's would be; else a view with its strides."""
    turned = tensor.transpose(1, 2)
    return turned.contiguous() if tensor.is_contiguous() else turned


def _heads_outside(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2)


Lengths = tuple[int, int]
"""Query rows and keys of one sequence."""


@dataclass(frozen=True, slots=True)
class Band:
    """Row i sees the keys j with ``low <= j - i <= high``; None is no limit."""

    low: int | None = None
    high: int | None = None

    def __and__(self, other: Band) -> Band:
        """What both show."""
        lows = [b.low for b in (self, other) if b.low is not None]
        highs = [b.high for b in (self, other) if b.high is not None]
        return Band(max(lows, default=None), min(highs, default=None))


def _window(spec: Spec, dimensions: Dimensions) -> Band:
    del dimensions
    size = spec.values["window"]
    assert isinstance(size, int)
    return Band(1 - size, 0)


_BANDS: dict[str, Callable[[Spec, Dimensions], Band]] = {
    "full": lambda _spec, _dimensions: Band(),
    "causal": lambda _spec, _dimensions: Band(high=0),
    "causal_bottom_right": lambda _spec, dims: Band(high=dims.kv - dims.query),
    "sliding_window": _window,
}


def mask_band(mask: Spec, dimensions: Dimensions) -> Band | None:
    """The mask as a band; None where it is none, or nobody says so."""
    if mask.name == "offset":
        return _later(mask, dimensions)
    if mask.name != "and":
        known = _BANDS.get(mask.name)
        return known(mask, dimensions) if known else None
    whole = Band()
    for part in mask.parts:
        one = mask_band(part, dimensions)
        if one is None:
            return None
        whole &= one
    return whole


def _later(mask: Spec, dimensions: Dimensions) -> Band | None:
    """Of rows that are further than their index says: the part's band, moved."""
    rows = mask.values["rows"]
    assert isinstance(rows, int)
    found = mask_band(mask.parts[0], shifted_dimensions(mask.values, dimensions))
    if found is None:
        return None
    low, high = (None if limit is None else limit + rows for limit in (found.low, found.high))
    return Band(low, high)


def diagonal_offset(lengths: Lengths, *, bottom_right: bool) -> int:
    """``j - i`` on the diagonal: 0 where it is aligned top-left, else what ends in the corner."""
    query, kv = lengths
    return kv - query if bottom_right else 0


def band_window(
    seen: Band,
    sequences: Iterable[Lengths],
    *,
    bottom_right: bool,
    leads: Iterable[int] | None = None,
) -> tuple[int, int] | None:
    """``(left, right)`` with which a kernel's window is ``seen`` in every sequence.

    Row i of such a window sees the keys ``i + offset - left`` to ``i + offset + right``; -1 is no
    limit. None where no window is it: the diagonal lies elsewhere, or differs between sequences.

    Args:
        seen: The band, in indices that may count on through several sequences.
        sequences: Their lengths.
        bottom_right: How the window is aligned.
        leads: By how much the index of a sequence's first key is above that of its first row, for
            each; None: by nothing.
    """
    alive = [
        (query - lead, kv + lead, diagonal_offset((query, kv), bottom_right=bottom_right) + lead)
        for (query, kv), lead in zip(sequences, repeat(0) if leads is None else leads, strict=False)
        if min(query, kv) > 0  # others see nothing
    ]
    low, high = seen.low, seen.high
    # Of a window's left edge everything is mirrored: rows for keys, and signs.
    left = _edge(None if low is None else -low, [(query, -at) for query, _, at in alive])
    right = _edge(high, [(kv, at) for _, kv, at in alive])
    return None if left is None or right is None else (left, right)


def _edge(limit: int | None, sequences: list[tuple[int, int]]) -> int | None:
    """The number for ``limit`` that holds in all sequences of (first index beyond, offset)."""
    if limit is None:
        return -1
    exact = [limit - at for _, at in sequences if limit >= at]
    for edge in [*exact, -1]:
        if all(_holds(edge, limit, end, at) for end, at in sequences):
            return edge
    return None


def _holds(edge: int, limit: int, end: int, at: int) -> bool:
    """Whether a window's ``edge`` shows what ``limit`` does: both may be beyond the last key."""
    beyond = limit >= end - 1
    if edge < 0:
        return beyond
    return edge + at == limit or (beyond and edge + at >= end - 1)


Segments = list[list[Lengths]]
"""For each sequence of the batch, query rows and keys of each of its parts, in order."""


@dataclass(frozen=True, slots=True)
class PackedProblem:
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


def pack(problem: Problem) -> PackedProblem | None:
    """The Problem packed; None where its mask names parts more than once."""
    parts = list(_conjuncts(problem.mask))
    cuts = [part for part in parts if part.name in _CUTS]
    rest = [part for part in parts if part.name not in _CUTS and part != FULL]
    if len(cuts) > 1:
        return None
    segments = _CUTS[cuts[0].name](problem, cuts[0]) if cuts else _whole(problem)
    return PackedProblem(segments, _all_of(rest), bool(cuts))


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
    found = pack(problem)
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
