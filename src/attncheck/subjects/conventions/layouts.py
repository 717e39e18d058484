"""Axes in which a kernel takes q, k and v and gives out and LSE: by batch, or packed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from attncheck.core.mod_spec import FULL, Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from attncheck.inputs.problem import Problem

    Change = Callable[[Tensor], Tensor]
    Shapes = Mapping[tuple[int, ...], Change]

Lengths = tuple[int, int]  # query rows and keys of one sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The change of attncheck's axes to a kernel's, and back, for one Problem."""

    queries: Change  # q ``(batch, heads, query, head_dim)`` → the kernel's
    keys: Change  # k or v ``(batch, kv_heads, kv, dim)`` → the kernel's
    # By the shape that its out may have, what brings it to ``(batch, heads, query, value_dim)``;
    # empty where it has these axes.
    out: Shapes
    out_axes: str  # names of its axes
    lse: Shapes  # by the shape that its LSE may have, what brings it to ``(batch, heads, query)``
    lse_axes: str  # names of its axes
    # For a script, expressions of ``q``, ``k``, ``v``, ``out`` and ``lse`` by these names.
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
        out={(batch, query, heads, problem.value_dim): lambda out: out.transpose(1, 2)},
        out_axes="batch, query, heads, dim",
        lse={(batch, heads, query): _same},
        lse_axes="batch, heads, query",
        texts={name: f"{name}.transpose(1, 2).contiguous()" for name in ("q", "k", "v")}
        | {"out": "out.transpose(1, 2)", "lse": "lse"},
    )


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _heads_inside(tensor: Tensor) -> Tensor:
    """Swap heads and rows: contiguous where the tensor was, as a caller's would be."""
    turned = tensor.transpose(1, 2)
    # A relation that gives strided inputs asks whether the kernel takes strides: they stay.
    return turned.contiguous() if tensor.is_contiguous() else turned


# ------------------------------------------------------------------ packed


@dataclass(frozen=True, slots=True)
class PackedProblem:
    """A Problem whose mask is: a row sees keys of its own part, of which ``rest`` hides some."""

    # For each sequence of the batch, query rows and keys of each of its parts.
    segments: list[list[Lengths]]
    # What hides keys within a part, a mask in the Problem's own indices; ``full`` where nothing
    # does.
    rest: Spec
    cut: bool  # whether the mask names the parts; else they are whole sequences

    def lengths(self) -> list[Lengths]:
        """Query rows and keys of all parts, in the order in which they are packed."""
        return [part for parts in self.segments for part in parts]

    def starts(self, side: int) -> list[int]:
        """Return where parts begin, and where the last one ends: of queries (0) or keys (1)."""
        return [0, *accumulate(part[side] for part in self.lengths())]

    def places(self) -> list[tuple[int, int, int]]:
        """Return b, the first q_idx and the first kv_idx of each part, as mods number them."""
        places = []
        for b, parts in enumerate(self.segments):
            row = key = 0
            for rows, keys in parts:
                places.append((b, row, key))
                row, key = row + rows, key + keys
        return places

    def leads(self) -> list[int]:
        """Return by how much the first kv_idx of each part is above its first q_idx."""
        return [key - row for _, row, key in self.places()]


def pack(problem: Problem) -> PackedProblem | None:
    """Pack a Problem; None where its mask names parts more than once."""
    parts = list(conjuncts(problem.mask))
    cuts = [part for part in parts if part.name in ("padding", "document", "documents")]
    rest = [part for part in parts if part not in cuts and part != FULL]
    # Two cuts end in different places, and a packed call has one list of ends.
    if len(cuts) > 1:
        return None
    segments = _segments(problem, cuts[0] if cuts else FULL)
    alone = rest[0] if rest else FULL
    # One mask that hides keys within documents stays itself: kernels know it by name.
    return PackedProblem(segments, alone if len(rest) < 2 else Spec.of("and", *rest), bool(cuts))


def conjuncts(mask: Spec) -> Iterator[Spec]:
    """Yield the masks of which ``mask`` is the ``and``, or itself."""
    if mask.name != "and":
        yield mask
        return
    for part in mask.parts:
        yield from conjuncts(part)


def without_padding(mask: Spec) -> Spec:
    """Return the mask within each sequence's own keys."""
    if mask.name == "padding":
        return FULL
    if mask.name != "and":
        return mask
    return Spec.of("and", *map(without_padding, mask.parts))


def _segments(problem: Problem, cut: Spec) -> list[list[Lengths]]:
    """Query rows and keys of each part, for each sequence."""
    # Padding cuts a sequence once: all of its rows, and the keys that are there.
    if cut.name == "padding":
        return [[(problem.query, length)] for length in _numbers(cut, "lengths")]
    if cut == FULL:
        return [[(problem.query, problem.kv)]] * problem.batch
    named = ("lengths", "lengths") if cut.name == "document" else ("query_lengths", "kv_lengths")
    # Documents may go beyond the Problem's own lengths: they are cut where those end.
    rows = _clipped(_numbers(cut, named[0]), problem.query)
    keys = _clipped(_numbers(cut, named[1]), problem.kv)
    return [list(zip(rows, keys, strict=True))] * problem.batch


def _numbers(spec: Spec, name: str) -> tuple[int, ...]:
    lengths = spec.values[name]
    assert isinstance(lengths, tuple)
    return lengths


def _clipped(lengths: tuple[int, ...], last: int) -> list[int]:
    """Return what of each length lies before ``last``."""
    ends = [min(end, last) for end in accumulate(lengths)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _packed_rows(tensor: Tensor, kept: list[int]) -> Tensor:
    """Return the first rows of each sequence as ``(total, heads, dim)``; strides that it has stay.

    Of several sequences the order of the axes in memory.
    """
    if len(kept) == 1 and not tensor.is_contiguous():
        return tensor[0, :, : kept[0]].transpose(0, 1)
    parts = [row[:, :n] for row, n in zip(tensor, kept, strict=True)]
    packed = torch.cat(parts, 1).transpose(0, 1)
    axes = [0, 1, 2]
    if not tensor.is_contiguous():
        axes.sort(key=lambda axis: -tensor.stride((2, 1, 3)[axis]))
    return packed.permute(axes).contiguous().permute([axes.index(axis) for axis in range(3)])


def packed_layout(problem: Problem) -> Layout:
    """``(total, heads, dim)``, with LSE ``(heads, total)``, or with total first.

    Every query row is in a part and the parts are in order, so packing moves no row; of the keys
    those of padding are left out. An LSE ``(parts, heads, longest)``, as flash-attn gave it before
    2.6, is cut to each part's rows.
    """
    packed = pack(problem)
    assert packed is not None, "the convention has refused what cannot be packed"
    batch, heads, total = problem.batch, problem.heads, problem.batch * problem.query
    # Keys beyond the last part are padding: a packed kernel never gets them.
    kept = [sum(kv for _, kv in parts) for parts in packed.segments]
    rows = [part for part, _ in packed.lengths()]

    def out(packed_out: Tensor) -> Tensor:
        return packed_out.reshape(batch, -1, *packed_out.shape[1:]).transpose(1, 2)

    def lse(heads_first: Tensor) -> Tensor:
        return heads_first.reshape(len(heads_first), batch, -1).transpose(0, 1)

    def padded_lse(by_part: Tensor) -> Tensor:
        return lse(torch.cat([part[:, :n] for part, n in zip(by_part, rows, strict=True)], 1))

    kept_of = "torch.cat([row[:, :n] for row, n in zip({}, {}, strict=True)], 1)"
    shape = f"{batch}, {problem.query}"
    return Layout(
        queries=lambda q: _packed_rows(q, [problem.query] * batch),
        keys=lambda k: _packed_rows(k, kept),
        out={(total, heads, problem.value_dim): out},
        out_axes="total, heads, dim",
        # The last wins where two shapes are the same: as many rows as heads, say.
        lse={
            (len(rows), heads, max(rows)): padded_lse,
            (total, heads): lambda total_first: lse(total_first.mT),
            (heads, total): lse,
        },
        lse_axes="heads, total",
        texts={
            "q": "q.transpose(1, 2).flatten(0, 1).contiguous()",
            "k": f"{kept_of.format('k', kept)}.transpose(0, 1).contiguous()",
            "v": f"{kept_of.format('v', kept)}.transpose(0, 1).contiguous()",
            "out": f"out.reshape({shape}, *out.shape[1:]).transpose(1, 2)",
            "lse": f"(lse if len(lse) == {heads} else lse.mT).reshape(-1, {shape}).transpose(0, 1)",
        },
    )
