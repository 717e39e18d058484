"""Layouts: the axes of a kernel's q, k, v, out and LSE, batched or packed."""

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
    """Conversions between attncheck's axes and a kernel's, for one Problem."""

    queries: Change  # converts q ``(batch, heads, query, head_dim)`` to the kernel's axes
    keys: Change  # converts k or v ``(batch, kv_heads, kv, dim)`` to the kernel's axes
    # For each valid shape of the kernel's out, the conversion to ``(batch, heads, query,
    # value_dim)``; empty if out has these axes.
    out: Shapes
    out_axes: str  # names of the axes of the kernel's out
    lse: Shapes  # for each valid shape of its LSE, the conversion to ``(batch, heads, query)``
    lse_axes: str  # names of the axes of the kernel's LSE
    # Source of the conversions in a script, by ``q``, ``k``, ``v``, ``out`` and ``lse``.
    texts: Mapping[str, str]


def bhsd(problem: Problem) -> Layout:
    """Return the layout ``(batch, heads, query, dim)``, which is attncheck's own."""
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
    """Return the layout ``(batch, query, heads, dim)`` with LSE ``(batch, heads, query)``."""
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
    """Swap the axes of heads and rows, and keep a contiguous tensor contiguous."""
    swapped = tensor.transpose(1, 2)
    # Strided inputs stay strided, because relations test whether the kernel supports strides.
    return swapped.contiguous() if tensor.is_contiguous() else swapped


# ------------------------------------------------------------------ packed


@dataclass(frozen=True, slots=True)
class PackedProblem:
    """The parts into which a mask cuts sequences: rows see only keys of their own part."""

    # For each sequence of the batch, the numbers of query rows and keys of each part.
    segments: list[list[Lengths]]
    rest: Spec  # the mask within the parts, in the Problem's own indices
    cut: bool  # whether the mask defines the parts; else they are whole sequences
    # The same mask, if its rows are counted so that each part's last row is that of its last key;
    # None if ``rest`` has no such form.
    aligned: Spec | None = None

    def lengths(self) -> list[Lengths]:
        """Return the numbers of query rows and keys of all parts, in packing order."""
        return [part for parts in self.segments for part in parts]

    def starts(self, side: int) -> list[int]:
        """Return the start of each part and the end of the last, in queries (0) or keys (1)."""
        return [0, *accumulate(part[side] for part in self.lengths())]

    def places(self) -> list[tuple[int, int, int]]:
        """Return b, the first q_idx and the first kv_idx of each part, in mods' indices."""
        places = []
        for b, parts in enumerate(self.segments):
            row = key = 0
            for rows, keys in parts:
                places.append((b, row, key))
                row, key = row + rows, key + keys
        return places

    def leads(self) -> list[int]:
        """Return the first kv_idx of each part minus its first q_idx."""
        return [key - row for _, row, key in self.places()]


def pack(problem: Problem) -> PackedProblem | None:
    """Return a Problem's parts; None if its mask defines parts more than once."""
    masks = list(conjuncts(problem.mask))
    aligned = [mask for mask in masks if mask.name in ("bottom_right", "documents_bottom_right")]
    cuts = [mask for mask in masks if mask.name in ("padding", "document", "documents")] + aligned
    rest = [mask for mask in masks if (mask not in cuts or mask in aligned) and mask != FULL]
    # Two cuts end in different places, but a packed call has one list of ends.
    if len(cuts) > 1:
        return None
    # A single mask is not wrapped in an ``and``, because kernels know it by name.
    whole = FULL if not rest else rest[0] if len(rest) == 1 else Spec.of("and", *rest)
    return PackedProblem(
        _segments(problem, cuts[0] if cuts else FULL),
        whole,
        cut=bool(cuts),
        aligned=aligned[0].parts[0] if aligned and len(rest) == 1 else None,
    )


def conjuncts(mask: Spec) -> Iterator[Spec]:
    """Yield the masks that ``mask`` combines by ``and``, or the mask itself."""
    if mask.name != "and":
        yield mask
        return
    for part in mask.parts:
        yield from conjuncts(part)


def without_padding(mask: Spec) -> Spec:
    """Return ``mask`` without the padding masks among its conjuncts."""
    if mask.name == "padding":
        return FULL
    if mask.name != "and":
        return mask
    return Spec.of("and", *map(without_padding, mask.parts))


def _segments(problem: Problem, cut: Spec) -> list[list[Lengths]]:
    """Return the numbers of query rows and keys of each part, for each sequence."""
    # With padding each sequence is one part: all of its rows, and the keys before the padding.
    if cut.name in {"padding", "bottom_right"}:
        return [[(problem.query, length)] for length in _numbers(cut, "lengths")]
    if cut == FULL:
        return [[(problem.query, problem.kv)]] * problem.batch
    names = ("lengths", "lengths") if cut.name == "document" else ("query_lengths", "kv_lengths")
    # Documents may extend beyond the Problem's own lengths, where they are clipped.
    rows = _clip(_numbers(cut, names[0]), problem.query)
    keys = _clip(_numbers(cut, names[1]), problem.kv)
    return [list(zip(rows, keys, strict=True))] * problem.batch


def _numbers(spec: Spec, name: str) -> tuple[int, ...]:
    lengths = spec.values[name]
    assert isinstance(lengths, tuple)
    return lengths


def _clip(lengths: tuple[int, ...], last: int) -> list[int]:
    """Return consecutive ``lengths``, cut off at position ``last``."""
    ends = [min(end, last) for end in accumulate(lengths)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _packed_rows(tensor: Tensor, lengths: list[int]) -> Tensor:
    """Return the first rows of each sequence, ``(total, heads, dim)``.

    A single sequence keeps its strides, several keep the order of their axes in memory.
    """
    if len(lengths) == 1 and not tensor.is_contiguous():
        return tensor[0, :, : lengths[0]].transpose(0, 1)
    parts = [row[:, :n] for row, n in zip(tensor, lengths, strict=True)]
    packed = torch.cat(parts, 1).transpose(0, 1)
    axes = [0, 1, 2]
    if not tensor.is_contiguous():
        axes.sort(key=lambda axis: -tensor.stride((2, 1, 3)[axis]))
    return packed.permute(axes).contiguous().permute([axes.index(axis) for axis in range(3)])


def packed_layout(problem: Problem) -> Layout:
    """Return the layout ``(total, heads, dim)`` with LSE ``(heads, total)`` or ``(total, heads)``.

    Every query row is in a part and the parts are in order, so packing moves no row; padding keys
    are left out. An LSE ``(parts, heads, longest)``, as flash-attn returned before 2.6, is cut to
    each part's rows.
    """
    packed = pack(problem)
    assert packed is not None, "the convention has refused what cannot be packed"
    batch, heads, total = problem.batch, problem.heads, problem.batch * problem.query
    # Keys after the last part are padding, which a packed kernel does not get.
    key_counts = [sum(kv for _, kv in parts) for parts in packed.segments]
    rows = [part for part, _ in packed.lengths()]

    def out(packed_out: Tensor) -> Tensor:
        return packed_out.reshape(batch, -1, *packed_out.shape[1:]).transpose(1, 2)

    def lse(heads_first: Tensor) -> Tensor:
        return heads_first.reshape(len(heads_first), batch, -1).transpose(0, 1)

    def padded_lse(by_part: Tensor) -> Tensor:
        return lse(torch.cat([part[:, :n] for part, n in zip(by_part, rows, strict=True)], 1))

    rows_of = "torch.cat([row[:, :n] for row, n in zip({}, {}, strict=True)], 1)"
    shape = f"{batch}, {problem.query}"
    return Layout(
        queries=lambda q: _packed_rows(q, [problem.query] * batch),
        keys=lambda k: _packed_rows(k, key_counts),
        out={(total, heads, problem.value_dim): out},
        out_axes="total, heads, dim",
        # The last of equal shapes wins, as with equal numbers of rows and heads.
        lse={
            (len(rows), heads, max(rows)): padded_lse,
            (total, heads): lambda total_first: lse(total_first.mT),
            (heads, total): lse,
        },
        lse_axes="heads, total",
        texts={
            "q": "q.transpose(1, 2).flatten(0, 1).contiguous()",
            "k": f"{rows_of.format('k', key_counts)}.transpose(0, 1).contiguous()",
            "v": f"{rows_of.format('v', key_counts)}.transpose(0, 1).contiguous()",
            "out": f"out.reshape({shape}, *out.shape[1:]).transpose(1, 2)",
            "lse": f"(lse if len(lse) == {heads} else lse.mT).reshape(-1, {shape}).transpose(0, 1)",
        },
    )
