"""Fault models of wrong places of reads and writes: heads, batches, strides, and offsets."""

from __future__ import annotations

import dataclasses
import math
from itertools import accumulate, pairwise, permutations, product
from typing import TYPE_CHECKING, Any

import torch

from attncheck.core.outputs import Outputs
from attncheck.fault_models.fault_model import (
    Form,
    ModelTable,
    Parameters,
    Prediction,
    has_mask,
    is_attention,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from attncheck.fault_models.exact_attention import ExactAttention
    from attncheck.inputs.problem import Problem

Whole = tuple[Outputs, Parameters]

MODELS = ModelTable("mapping")

_model = MODELS.model


def contiguous(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


def read_with_strides(
    tensor: Tensor, stride: tuple[int, ...], shape: tuple[int, ...] | None = None
) -> Iterator[Tensor]:
    """Yield the tensor read with other strides; beyond its memory the last number, or else 0.

    Args:
        stride: A stride for each axis.
        shape: Shape to read; the tensor's own by default.
    """
    values, inside = read_strided(tensor, stride, shape)
    yield values
    if not bool(inside.all()):
        yield torch.where(inside, values, torch.zeros((), dtype=values.dtype))


def places(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[Tensor]:
    """Return offsets along each axis, in elements: int64 that broadcast to ``shape`` together."""
    steps = []
    for axis, (length, step) in enumerate(zip(shape, stride, strict=True)):
        along = [-1 if other == axis else 1 for other in range(len(shape))]
        steps.append((torch.arange(length) * step).view(along))
    return steps


def total(steps: Iterable[Tensor]) -> Tensor:
    """Return the sum of offsets along axes."""
    return sum(steps, torch.zeros((), dtype=torch.int64))


def read_strided(
    tensor: Tensor, stride: tuple[int, ...], shape: tuple[int, ...] | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``read_at`` of a tensor read with other strides, in its own shape by default."""
    return read_at(tensor, total(places(shape or tuple(tensor.shape), stride)))


def read_at(tensor: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers at offsets ``at``, clamped, and which offsets are within the memory."""
    # A view may begin within its memory: a wrong index may also read what lies before the view.
    at = at + int(tensor.storage_offset())
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    values = tensor.as_strided((size,), (1,), 0)[at.clamp(0, size - 1)]
    return values, (at >= 0) & (at < size)


def wider(tensor: Tensor, axis: int, length: int) -> Iterator[Tensor]:
    """Yield the tensor with another length of one axis, read on into the memory behind it."""
    shape = list(tensor.shape)
    shape[axis] = length
    yield from read_with_strides(tensor, tensor.stride(), tuple(shape))


def with_keys(
    call: ExactAttention, k: Tensor, v: Tensor, **parameters: str | int
) -> Iterator[Whole]:
    """Yield outputs with other k and v ``(batch, heads, kv, …)``: both, and each alone."""
    # Kernels compute the indices of keys and values separately: one may be right.
    for whose in ("keys and values", "keys", "values"):
        x = call.q @ k.mT * call.scale if "keys" in whose else None
        outputs = call.attend(x=x, v=v if "values" in whose else None)
        yield outputs, parameters | {"of": whose}


def _has_key_heads(problem: Problem) -> bool:
    return is_attention(problem) and problem.kv_heads > 1


def _key_heads(call: ExactAttention, **others: Tensor) -> Iterator[Whole]:
    """Yield outputs with other key heads, given for each query head, by the form's name."""
    _, k, v = call.inputs.promoted()
    for name, heads in others.items():
        parameters = {"head": name.replace("_", " ")} if len(others) > 1 else {}
        yield from with_keys(call, k[:, heads], v[:, heads], **parameters)


@_model(applies=lambda problem: _has_key_heads(problem) and problem.group > 1)
def kv_heads_interleaved(call: ExactAttention) -> Iterator[Form]:
    """Query head h reads key head h mod kv_heads, not h // group."""
    problem, h = call.problem, call.h.flatten()
    for heads in (h % problem.kv_heads, (h % problem.group) % problem.kv_heads):
        yield from _key_heads(call, other=heads)


@_model(applies=_has_key_heads)
def kv_heads_first(call: ExactAttention) -> Iterator[Prediction]:
    """Every query head reads the first key head."""
    for outputs, parameters in _key_heads(call, first=0 * call.h.flatten()):
        yield Prediction(outputs=outputs, parameters=parameters)
        # The fault may exist only where query heads share a key head.
        some = outputs if call.problem.group > 1 else call.exact
        yield Prediction(outputs=some, parameters={**parameters, "when": "heads are shared"})


@_model(applies=_has_key_heads)
def heads_swapped(call: ExactAttention) -> Iterator[Form]:
    """Query heads read each other's key heads."""
    last, h = call.problem.kv_heads - 1, call.h.flatten()
    own, bits = h // call.problem.group, call.problem.heads.bit_length() - 1
    yield from _key_heads(
        call,
        in_reverse_order=last - own,
        the_next=(own + 1) % (last + 1),
        the_one_before=(own - 1) % (last + 1),
        by_number=h.clamp(max=last),
        by_a_shift=(h * (last + 1) >> bits).clamp(max=last),
    )


def _batched(problem: Problem) -> bool:
    return is_attention(problem) and problem.batch > 1


@_model(applies=_batched)
def batches_swapped(call: ExactAttention) -> Iterator[Form]:
    """Sequences of a batch read each other's keys."""
    count = call.problem.batch
    b = torch.arange(count)
    for name, of in {"in reverse order": count - 1 - b, "the next": (b + 1) % count}.items():
        yield from with_keys(call, call.k[of], call.v[of], batch=name)


@_model(
    # With pages the first sequence's pages are read, which a model of pages covers.
    applies=lambda problem: _batched(problem) and problem.paging is None,
)
def batch_first(call: ExactAttention) -> Iterator[Form]:
    """Every sequence of a batch reads the keys of the first."""
    of = torch.zeros(call.problem.batch, dtype=torch.int64)
    yield from with_keys(call, call.k[of], call.v[of])


@_model(applies=is_attention)
def operand_swapped(call: ExactAttention) -> Iterator[Form]:
    """One of q, k and v is read in place of another."""
    by_query_head = {"q": call.q, "k": call.k, "v": call.v}
    for mine, other in permutations("qkv", 2):
        # With k and v repeated for query heads: the other operand of the same head is read.
        if by_query_head[mine].shape == by_query_head[other].shape:
            yield attending(call, {mine: by_query_head[other]}), {"of": f"{other} for {mine}"}
        for read, inside in read_in_place(*(getattr(call.inputs, name) for name in (mine, other))):
            # The memory behind the other tensor is unknown.
            if bool(inside.all()):
                yield _with_inputs(call, {mine: read}, of=f"{other} for {mine}")
            elif mine == "q":
                outputs, parameters = _with_inputs(call, {mine: read}, of=f"{other} for {mine}")
                behind = ~inside.all(-1)[:, :, call.rows]
                yield Prediction(outputs=outputs, parameters=parameters, free=behind)


def read_in_place(own: Tensor, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``other`` read with the offsets of ``own``, and which offsets are within ``other``.

    Both are assumed contiguous, with heads before rows, or rows before heads.
    """
    for axes in ((0, 1, 2, 3), (0, 2, 1, 3)):
        size = other.numel()
        at = torch.arange(own.numel()).view(own.permute(axes).shape)
        values = other.permute(axes).flatten()[at.clamp(max=size - 1)]
        yield values.permute(axes), (at < size).permute(axes)


INDICES: dict[str, tuple[int, ...]] = {
    "sequence": (0,),
    "head": (1,),
    "row": (2,),
    "column": (3,),
    "sequence and head": (0, 1),
    "sequence and row": (0, 2),
    "sequence, head and row": (0, 1, 2),
}
"""Axes of q, k and v that an index, or a combined index, runs over; keys are rows of k and v."""


INDEX_NAMES = ("sequence", "head", "row")


def same_along(tensor: Tensor, axes: tuple[int, ...], number: int) -> Tensor:
    """Return a tensor with one slice of ``axes`` everywhere: at ``number`` of the last, else 0."""
    same = tensor
    for axis in axes:
        same = same.narrow(axis, number if axis == axes[-1] else 0, 1)
    return same.expand(tensor.shape)


@_model(applies=is_attention)
def index_missing(call: ExactAttention) -> Iterator[Form]:
    """An index is missing where q, k or v is read: all that it tells apart get the same numbers."""
    # Without its index everything is the first; if only its stride is left, the second.
    for number, (names, axes) in product((0, 1), INDICES.items()):
        for whose in ("q", "k", "v", "kv"):
            own: dict[str, Tensor] = {name: getattr(call, name) for name in whose}
            # Keys of the first head or sequence have models of their own.
            if whose != "q" and number == 0 and names in {"sequence", "head"}:
                continue
            # With one key for all, scores are alike, which has a model of its own.
            if whose == "k" and 2 in axes:
                continue
            if all(number < x.shape[axes[-1]] for x in own.values()):
                read = {name: same_along(x, axes, number) for name, x in own.items()}
                yield attending(call, read), {"of": ", ".join(whose), "index": names}


@_model(applies=is_attention)
def stride_of_another_axis(call: ExactAttention) -> Iterator[Form]:
    """An index of q, k or v is multiplied by the stride of another axis, or by none."""
    # Tensors are assumed contiguous, with heads before rows, or rows before heads; pages are not.
    names = "qkv" if call.problem.paging is None else "q"
    for whose, order in product(names, _ORDERS):
        tensor: Tensor = getattr(call.inputs, whose).permute(order).contiguous()
        shape, own = tuple(tensor.shape), tensor.stride()
        for axis in range(3):
            parameters = {"of": whose, "index": INDEX_NAMES[order[axis]]}
            if shape[axis] == 1:
                yield call.exact, parameters
                continue
            # An index without a stride has that of the columns.
            for other in {*own} - {own[axis]}:
                read, inside = read_strided(tensor, (*own[:axis], other, *own[axis + 1 :]))
                if bool(inside.all()):
                    yield _with_inputs(call, {whose: read.permute(order)})[0], parameters
        # One index for all rows of all sequences, as in packed sequences.
        rows = order.index(2)
        for other in {*own} - {own[rows]} if rows == 1 else ():
            read, inside = read_strided(tensor, (shape[1] * other, other, *own[2:]))
            if bool(inside.all()):
                parameters = {"of": whose, "index": "sequence and row"}
                yield _with_inputs(call, {whose: read.permute(order)})[0], parameters


def key_counts(problem: Problem) -> tuple[int, ...]:
    """Return the number of keys of each sequence by a mask of lengths; all without one."""
    lengths: tuple[int, ...] = (problem.kv,) * problem.batch
    for spec in problem.mask.walk():
        if spec.name in {"padding", "bottom_right"}:
            padding_lengths: Any = spec.values["lengths"]
            lengths = tuple(map(min, lengths, padding_lengths))
    return lengths


@dataclasses.dataclass(frozen=True, slots=True)
class PackedSequence:
    """A sequence, or document, of a packed call: where its rows and keys begin, and their numbers.

    Rows and keys are counted through all sequences of the batch.
    """

    row: int
    rows: int
    key: int
    keys: int


DOCUMENT_LENGTHS = {
    "document": ("lengths", "lengths"),
    "documents": ("query_lengths", "kv_lengths"),
    "documents_bottom_right": ("query_lengths", "kv_lengths"),
}
"""Masks of documents, with their arguments: numbers of rows, and of keys."""


def packed_sequences(problem: Problem) -> list[PackedSequence]:
    """Return the sequences of a Problem in the order in which a packed call has them."""
    every = [(problem.query, keys) for keys in key_counts(problem)]
    for spec in problem.mask.walk():
        if spec.name in DOCUMENT_LENGTHS:
            of_rows, of_keys = DOCUMENT_LENGTHS[spec.name]
            rows_of = _clipped(spec.values[of_rows], problem.query)
            every = [*zip(rows_of, _clipped(spec.values[of_keys], problem.kv), strict=True)]
            every *= problem.batch
    parts, row, key = [], 0, 0
    for rows, keys in every:
        parts.append(PackedSequence(row, rows, key, keys))
        row, key = row + rows, key + keys
    return parts


def _clipped(lengths: Any, last: int) -> list[int]:
    """Return documents' lengths within the Problem, beyond which they may extend."""
    ends = [0, *(min(end, last) for end in accumulate(lengths))]
    return [end - start for start, end in pairwise(ends)]


def _packs_several(problem: Problem) -> bool:
    return problem.batch > 1 or has_mask(*DOCUMENT_LENGTHS)(problem)


@_model(applies=lambda problem: is_attention(problem) and _packs_several(problem))
def rows_where_keys_begin(call: ExactAttention) -> Iterator[Form]:
    """A sequence's rows of out or LSE are written where its keys begin in packed memory, not its
    rows.
    """
    problem, exact = call.problem, call.exact
    parts = packed_sequences(problem)
    count = problem.batch * problem.query
    # Documents may leave rows out, which no packed call has.
    if not call.whole or sum(part.rows for part in parts) != count:
        return

    def moved(tensor: Tensor, before: float, *, clamped: bool) -> Tensor:
        flat = tensor.transpose(0, 1).flatten(1, 2)  # (heads, rows of all sequences[, value_dim])
        memory = torch.full_like(flat, before)
        for part in parts:
            at = min(part.key, count - part.rows) if clamped else part.key
            inside = max(0, min(part.rows, count - at))
            memory[:, at : at + inside] = flat[:, part.row : part.row + inside]
        shape = (len(memory), problem.batch, problem.query, *memory.shape[2:])
        return memory.view(shape).transpose(0, 1)

    assert exact.lse is not None, "as it was made"
    for clamped in (False, True):
        out = moved(exact.out, 0.0, clamped=clamped)
        for before in (-math.inf, 0.0):
            lse = moved(exact.lse, before, clamped=clamped)
            yield Outputs(exact.out, lse), {"of": "LSE"}
            yield Outputs(out, lse), {"of": "out and LSE"}
        yield Outputs(out, exact.lse), {"of": "out"}


_WHOSE = ("q", "k", "v", "kv", "qkv")
_PARTS = (1, 2, 3, 4, 8)  # numbers of splits of the keys
_ORDERS = ((0, 1, 2, 3), (0, 2, 1, 3))
"""Orders of axes: heads before rows, or rows before heads."""


@_model(applies=lambda problem: is_attention(problem) and problem.paging is None)
def index_of_another_axis(call: ExactAttention) -> Iterator[Form]:
    """Where q, k or v is read one index is in another's place, or has the wrong sign."""
    problem = call.problem
    if call.inputs.descale is not None:  # Numbers read elsewhere have other descales.
        return
    key_head, keys = call.h // problem.group, torch.arange(problem.kv).view(1, 1, -1, 1)
    of_heads = {"the query head": call.h, "the key head": key_head, "the sequence": call.b}
    of_heads["its place in its group"] = call.h % problem.group
    of_heads["its sequence by groups"] = call.b // problem.group
    others = {
        0: {
            "the query head": call.h,
            "the key head": key_head,
            "its sequence by groups": call.b // problem.group,
        },
        1: of_heads,
        2: {"the query head": call.h, "the sequence": call.b},
    }
    tensors = dict(zip("qkv", call.inputs.promoted(), strict=True))
    own_rows = {"q": call.i, "k": keys, "v": keys}
    for order, whose in product(_ORDERS, _WHOSE):
        memory = {name: tensors[name].permute(order).contiguous() for name in whose}
        for axis, of in others.items():
            for name, other in {**of, "of the wrong sign": None}.items():
                read, inside = {}, True
                for one in whose:
                    index = [call.b, call.h if one == "q" else key_head, own_rows[one]]
                    index[axis] = -index[axis] if other is None else other
                    index.append(torch.arange(tensors[one].shape[3]))
                    stride = memory[one].stride()
                    at = total(index[n] * step for n, step in zip(order, stride, strict=True))
                    read[one], in_memory = read_at(memory[one], at)
                    shape = (*call.shape[:2], own_rows[one].numel(), tensors[one].shape[3])
                    read[one] = read[one].expand(shape)
                    inside = inside and bool(in_memory.all())
                words = {"of": ", ".join(whose), "index": INDEX_NAMES[axis], "instead": name}
                # Memory outside the tensor is unknown.
                if inside:
                    yield attending(call, read), words


@_model(applies=is_attention)
def load_transposed(call: ExactAttention) -> Iterator[Form]:
    """A row index stands where a column's belongs, or the reverse, in a load or in what bounds it:
    a vector is spread along the other axis of a tile.
    """
    for whose in ("q", "k", "v", "kv"):
        # Only square tiles can be transposed.
        dims = {getattr(call, name).shape[-1] for name in whose}
        wide = 1 << (max(dims) - 1).bit_length()
        if len(dims) > 1 or wide not in (*call.row_tiles, *call.key_tiles):
            continue
        forms: dict[str, dict[str, Tensor]] = {}
        for name in whose:
            own: Tensor = call.every_q if name == "q" else getattr(call, name)
            row, column = torch.arange(own.shape[2])[:, None], torch.arange(own.shape[3])
            place, start = row % wide, row // wide * wide
            ends = torch.tensor(key_counts(call.problem)).view(-1, 1, 1, 1)
            of_row = own[:, :, row, place.clamp(max=own.shape[3] - 1)].expand(own.shape)
            for form, read in {
                **transposed_load(own, wide),
                "columns by rows": torch.where(place < own.shape[3], of_row, 0.0),
                "the end of the columns": own * (place < own.shape[3]),
                "the end of each sequence": own * (start + column < ends),
            }.items():
                forms.setdefault(form, {})[name] = read[:, :, call.rows] if name == "q" else read
        for form, read in forms.items():
            yield attending(call, read), {"of": ", ".join(whose), "which": form}


def transposed_load(own: Tensor, wide: int) -> dict[str, Tensor]:
    """Return tiles of ``wide`` rows and columns as read, by the part that is transposed."""
    row, column = torch.arange(own.shape[2])[:, None], torch.arange(own.shape[3])
    start, last = row // wide * wide, own.shape[2] - 1
    inside = start + column <= last
    of_column = own[:, :, (start + column).clamp(max=last), column.expand_as(inside)]
    return {
        "rows by columns": torch.where(inside, of_column, 0.0),
        "the tile": _transposed(own, wide),
        "the end of the rows": own * inside,
    }


def _transposed(tensor: Tensor, size: int) -> Tensor:
    """Return a tensor with each square tile transposed; padded with 0."""
    *_, rows, columns = tensor.shape
    padded = torch.nn.functional.pad(tensor, (0, size - columns, 0, -rows % size))
    tiles = padded.view(*tensor.shape[:2], -1, size, size).mT
    return tiles.reshape(*tensor.shape[:2], -1, size)[:, :, :rows, :columns]


@_model(applies=is_attention)
def scores_alike(call: ExactAttention) -> Iterator[Form]:
    """Every key of a row scores alike: Q or K is read as 0, or one key stands for all."""
    for score in (0.0, call.scale):
        yield call.attend(x=torch.full_like(call.x, score))
    for number, (names, axes) in product((0, 1), INDICES.items()):
        if 2 in axes and all(number < call.k.shape[axis] for axis in axes):
            k = same_along(call.k, axes, number)
            yield attending(call, {"k": k}), {"index": names}


@_model(applies=is_attention)
def last_row_as_zero(call: ExactAttention) -> Iterator[Form]:
    """The last row of q, k or v, or that of each split of the keys, is read as 0: its load ends one
    too early.
    """
    for whose, length in {
        "q": call.problem.query,
        "k": call.problem.kv,
        "v": call.problem.kv,
    }.items():
        rows = call.rows if whose == "q" else torch.arange(length)
        inside = (rows < length - 1)[:, None]
        yield attending(call, {whose: getattr(call, whose) * inside}), {"of": whose}
    kv = call.problem.kv
    for count in _PARTS:
        # The last split may be shorter than the others.
        length = -(-kv // count)
        j = torch.arange(kv)
        inside = ((j % length < length - 1) & (j < kv - 1))[:, None]
        for names in ("kv",) if count == 1 else ("k", "v", "kv"):
            read = {name: getattr(call, name) * inside for name in names}
            yield attending(call, read), {"of": ", ".join(names), "each of": str(count)}


@_model(applies=is_attention)
def first_tile_again(call: ExactAttention) -> Iterator[Form]:
    """The first tile is read again in place of every other: its pointer, or index, does not move
    on.
    """
    # With a single tile this is right.
    yield from _read_again(call, lambda i, size: i % size, lambda size: -(-call.problem.kv // size))


@_model(applies=is_attention)
def first_of_tile_again(call: ExactAttention) -> Iterator[Form]:
    """The first row, or key, of each tile stands for all of it: the index within it is missing."""
    yield from _read_again(call, lambda i, size: i // size * size, lambda size: size)


def _read_again(
    call: ExactAttention, place: Callable[[Tensor, int], Tensor], times: Callable[[int], int]
) -> Iterator[Form]:
    """Yield outputs where some keys, or rows, are read in place of all others.

    Args:
        place: (an index, the size of a tile) → the index that is read.
        times: (the size of a tile) → how often each key is read.
    """
    for size in call.key_tiles:
        keys = place(torch.arange(call.problem.kv), size)
        for names in ("k", "v", "kv"):
            read = {name: getattr(call, name)[:, :, keys] for name in names}
            yield attending(call, read), {"of": ", ".join(names), "tile": size}
        # The mask may be applied at that place, too: the key then counts as often as it is read.
        own = place(call.j, size) == call.j
        outputs = call.attend(s=call.s + math.log(times(size)), seen=call.seen & own)
        yield outputs, {"of": "all", "tile": size}
    for size in call.row_tiles:
        rows = place(torch.arange(call.problem.query), size)[call.rows]
        yield attending(call, {"q": call.every_q[:, :, rows]}), {"of": "q", "tile": size}


def attending(call: ExactAttention, read: dict[str, Tensor]) -> Outputs:
    """Return outputs with other q, k or v ``(batch, heads, …)``, repeated for query heads."""
    q, k = read.get("q", call.q), read.get("k", call.k)
    x = q @ k.mT * call.scale if {"q", "k"} & {*read} else None
    return call.attend(x=x, v=read.get("v"))


@_model(applies=lambda problem: problem.heads > 1)
def query_heads_swapped(call: ExactAttention) -> Iterator[Form]:
    """The output of one head is that of another, or its LSE is."""
    problem, exact = call.problem, call.exact
    heads, h = problem.heads, torch.arange(problem.heads)
    for name, of in {
        "in reverse order": heads - 1 - h,
        "the next": (h + 1) % heads,
        "the first": 0 * h,
        "by groups": h.view(problem.kv_heads, -1).T.flatten(),
        "by key heads": h.view(-1, problem.kv_heads).T.flatten(),
    }.items():
        lse = call.parts.lse[:, of]
        # Kernels compute the indices of out and LSE separately: one may be right.
        for whose, outputs in {
            "out and LSE": Outputs(exact.out[:, of], lse),
            "out": Outputs(exact.out[:, of], exact.lse),
            "LSE": Outputs(exact.out, lse),
        }.items():
            yield outputs, {"of": whose, "head": name}
            # Where heads of a group stand for rows, as in decoding.
            if name.startswith("by"):
                single = outputs if problem.query == 1 else exact
                yield single, {"of": whose, "head": name, "when": "one row"}


@_model(applies=is_attention)
def contiguous_assumed(call: ExactAttention) -> Iterator[Form]:
    """A tensor is read as if it were contiguous: its strides are not looked at."""
    names = ("q", "k", "v")
    # Some tensors may be right, as they have the others' strides by chance: try these sets.
    for wrong in (names, ("q",), ("k",), ("v",), ("k", "v")):
        read = {}
        for name in wrong:
            tensor = getattr(call.inputs, name)
            stride = contiguous(tensor.shape)
            # A contiguous tensor does not show this fault.
            if stride != tensor.stride():
                read[name] = list(read_with_strides(tensor, stride))
        for way in range(max(map(len, read.values()), default=0)):
            yield _with_inputs(call, {name: ways[way % len(ways)] for name, ways in read.items()})


@_model(applies=is_attention)
def values_of_keys_strides(call: ExactAttention) -> Iterator[Form]:
    """An input is read with the strides of another."""
    for name, other in (("v", "k"), ("k", "v"), ("k", "q"), ("v", "q")):
        own, strides = getattr(call.inputs, name), getattr(call.inputs, other).stride()
        if strides != own.stride():
            for read in read_with_strides(own, strides):
                yield _with_inputs(call, {name: read}, of=f"{name} by the strides of {other}")


def _with_inputs(
    call: ExactAttention, changed: dict[str, Tensor], of: str = ""
) -> tuple[Outputs, dict[str, str]]:
    read = dataclasses.replace(call.inputs, **changed)  # type: ignore[arg-type]  # q, k and v
    q, k, v = read.promoted()
    k, v = call.by_query_head(k), call.by_query_head(v)
    x = q[:, :, call.rows] @ k.mT * call.scale
    return call.attend(x=x, v=v), {"of": of or ", ".join(changed)}


@_model(applies=lambda problem: is_attention(problem) and problem.heads > 1 and problem.query > 1)
def out_transposed(call: ExactAttention) -> Iterator[Form]:
    """The output is written in another layout: heads and rows are exchanged."""
    if call.whole:
        exact = call.exact
        out = exact.out.transpose(1, 2).reshape(exact.out.shape)
        yield Outputs(out, exact.lse)


@_model(applies=is_attention)
def columns_swapped(call: ExactAttention) -> Iterator[Form]:
    """The columns of v, or of the output, are in another order."""
    exact, v = call.exact, call.v
    halves = v.shape[-1] // 2
    yield Outputs(exact.out.flip(-1), exact.lse)
    yield Outputs(exact.out.roll(halves, -1), exact.lse)


@_model(applies=is_attention)
def columns_missing(call: ExactAttention) -> Iterator[Form]:
    """Columns of the values beyond the head dim, or of the head dim beyond that of the values, are
    not read.
    """
    problem, exact = call.problem, call.exact
    dims = (problem.head_dim, problem.value_dim)
    # The kernel may be compiled for one dim, or for the power of two below; or it may read one
    # column too few, or whole blocks alone, or the same number whatever the dim.
    bounds = {"the smaller dim": {min(dims)}, "all but one": {dim - 1 for dim in dims}}
    bounds["a power of two"] = {1 << (dim.bit_length() - 1) for dim in dims}
    for block in _BLOCKS:
        bounds[f"whole blocks of {block}"] = {dim // block * block for dim in dims}
    bounds |= {f"always {count}": {count} for count in (64, 128)}
    for bound, columns in ((name, n) for name, some in bounds.items() for n in sorted(some - {0})):
        is_read = torch.arange(problem.value_dim) < columns
        x = call.q[..., :columns] @ call.k[..., :columns].mT * call.scale
        # One bound may hold for both head dim and value dim.
        for of, (outputs, most) in {
            "values": (Outputs(torch.where(is_read, exact.out, 0.0), exact.lse), dims[1]),
            "q and k": (call.attend(x=x), dims[0]),
            "all": (call.attend(x=x, v=call.v * is_read), max(dims)),
        }.items():
            one = outputs if columns < most else exact
            yield one, {"columns": columns, "of": of, "bound": bound}


_FAR = 2**31
_BLOCKS = (8, 16, 32, 64)  # columns of the blocks in which a head dim is read


def _columns(problem: Problem) -> tuple[int, ...]:
    """Return numbers of columns above ``head_dim`` that a kernel may read."""
    dim = problem.head_dim
    # The width of a tile is a power of two, or a multiple of a block.
    some = {1 << (dim - 1).bit_length(), *(-(-dim // block) * block for block in _BLOCKS)}
    # Or one column too many, if the tile has room for it.
    some |= {dim + 1} if dim & (dim - 1) else set()
    return tuple(sorted(columns for columns in some if columns > dim))


@_model(applies=lambda problem: is_attention(problem) and bool(_columns(problem)))
def head_dim_padding_read(call: ExactAttention) -> Iterator[Form]:
    """Columns behind the head dim are read from memory, where they are other rows, and have a part
    in the scores.
    """
    inputs, problem = call.inputs, call.problem
    for columns in _columns(problem):
        as_wide = problem.replace(head_dim=columns, value_dim=problem.value_dim)
        both = (wider(x, 3, columns) for x in (inputs.q, inputs.k))
        for read in zip(*both, strict=False):
            wide = dataclasses.replace(inputs, problem=as_wide, q=read[0], k=read[1])
            q, k, _ = wide.promoted()
            x = q[:, :, call.rows] @ call.by_query_head(k).mT * call.scale
            yield call.attend(x=x), {"columns": columns}


@_model(applies=is_attention)
def offsets_of_32_bits(call: ExactAttention) -> Iterator[Form]:
    """Offsets are 32-bit integers: a row 2³¹ elements or more behind the first is read
    elsewhere.
    """
    for name in ("q", "k", "v"):
        tensor: Tensor = getattr(call.inputs, name)
        axes = zip(tensor.shape, tensor.stride(), strict=True)
        if sum((length - 1) * step for length, step in axes) < _FAR:
            continue
        # Either the offsets along each axis wrap, or their sum does.
        for each in (True, False):
            yield _with_inputs(call, {name: _read_wrapped(tensor, each=each)})


def _read_wrapped(tensor: Tensor, *, each: bool) -> Tensor:
    """Return the tensor read with int32 offsets: those along each axis wrap, or their sum."""
    steps = places(tuple(tensor.shape), tensor.stride())
    at = total(map(_wrap, steps)) if each else _wrap(total(steps))
    values, inside = read_at(tensor, at)
    return torch.where(inside, values, torch.zeros((), dtype=values.dtype))


def _wrap(offsets: Tensor) -> Tensor:
    """Return offsets wrapped to int32."""
    return offsets.to(torch.int32).long()


def _halves(call: ExactAttention) -> Iterator[tuple[dict[str, str | int], Tensor]]:
    """Yield parameters and rows (1, 1, rows) that a missing second launch should have written."""
    query = call.problem.query
    half = query // 2
    # Each launch may write one half of all rows, or every other tile.
    number = call.i[..., 0]
    for name, first in {"the first half": number < half, "the last half": number >= half}.items():
        yield {"rows": name}, first
    for size in call.row_tiles:
        if size < query:
            for late in (False, True):
                yield {"tile": size}, (number // size % 2 == int(late))


@_model(order=1, family="memory")
def half_unwritten(call: ExactAttention) -> Iterator[Form]:
    """Half of the rows are never written: what was in the memory of out is left there."""
    exact = call.exact
    shape = call.parts.lse.shape
    for parameters, rows in _halves(call):
        unwritten = rows.expand(shape)
        if bool(unwritten.any()) and not bool(unwritten.all()):  # Else it would explain anything.
            yield Prediction(outputs=exact, parameters=parameters, free=unwritten)
