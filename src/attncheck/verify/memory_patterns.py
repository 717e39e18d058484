"""Memory between guard bands, filled with one of two byte patterns that differ in every byte."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.dlpack import from_dlpack

from attncheck.core import strided_alloc
from attncheck.core.quiet_mode import QuietMode
from attncheck.inputs.input_tensors import Inputs

Fill = Literal["", "pattern", "inverse"]
"""Empty to leave memory as it is; else a byte pattern, or its bitwise inverse."""

_PERIOD = 65_521  # Bytes; prime, so that the pattern does not repeat in step with a tensor's rows.
_TABLE_PERIODS = 32  # Periods in the table: the widest band and most tensors are slices of it.
_PLACE_STEP = 40_503  # Bytes by which the pattern of one place is shifted against the previous one.
_BYTE = {"pattern": 0xA5, "inverse": 0x5A}  # For memory that can only be filled with one byte.
_M_PERTURB = -6  # M_PERTURB of glibc's mallopt(3).
_TORCH_FILLS = {  # Flags of torch's CPU allocator in libc10.so.
    "pattern": "FLAGS_caffe2_cpu_allocator_do_junk_fill",
    "inverse": "FLAGS_caffe2_cpu_allocator_do_zero_fill",
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIB = 1 << 20
_RECORDED = 1 << 16  # Events in torch's memory history; one call makes fewer.
# Bytes. torch's caching allocator has one pool for requests up to 1 MiB and one for larger ones.
_PRIMED = (_MIB,) * 32 + (32 * _MIB,) * 8


@functools.cache
def _table(device: str, fill: Fill) -> torch.Tensor:
    """Return hashed bytes of one period, repeated."""
    period = torch.frombuffer(
        bytearray(hashlib.shake_256(b"attncheck").digest(_PERIOD)), dtype=torch.uint8
    )
    repeated = period.repeat(1 + _TABLE_PERIODS)
    return (repeated if fill == "pattern" else ~repeated).to(device)


def pattern(place: int, size: int, device: torch.device, fill: Fill) -> torch.Tensor:
    """Return ``size`` bytes of the pattern, hashed from their position.

    Args:
        place: A number that selects the bytes; two places have different ones.
    """
    table, start = _table(str(device), fill), place * _PLACE_STEP % _PERIOD
    if size <= _TABLE_PERIODS * _PERIOD:
        return table[start : start + size]
    return table[start : start + _PERIOD].repeat(math.ceil(size / _PERIOD))[:size]


@contextlib.contextmanager
def allocator_filled(fill: Fill) -> Iterator[bool]:
    """Have torch fill all memory that it allocates on the CPU; yield whether this build does.

    ``pattern`` fills with junk (see ``junk``), ``inverse`` with zeros. Memory that others allocate
    is filled by glibc with one byte, except small pieces that were just freed (in glibc 2.38 also
    aligned memory), so nothing is certain about memory that is not torch's.
    """
    if not fill:
        yield False
        return
    mallopt, flag = _mallopt(), _torch_flag(fill)
    if mallopt is not None:
        mallopt(_M_PERTURB, _BYTE[fill] ^ 0xFF)  # glibc fills with the complement.
    if flag is not None:
        flag.value = True
    try:
        yield flag is not None and _fills(fill)
    finally:
        if flag is not None:
            flag.value = False
        if mallopt is not None:
            mallopt(_M_PERTURB, 0)


def junk(elements: torch.Tensor) -> torch.Tensor:
    """Return which of ``elements``, ``(elements, bytes)``, hold the junk of torch's allocator."""
    if not _junk():
        return torch.zeros(len(elements), dtype=torch.bool, device=elements.device)
    as_integer = _INTEGERS[elements.shape[1]]  # One comparison per element, not per byte.
    words = torch.frombuffer(bytearray(_junk()), dtype=as_integer).to(elements.device)
    return torch.isin(elements.contiguous().view(as_integer)[:, 0], words)


@functools.cache
def _junk() -> bytes:
    """Return the eight bytes that torch's allocator fills memory with; empty if it does not."""
    flag = _torch_flag("pattern")
    if flag is None:
        return b""
    before, flag.value = flag.value, True
    filling = torch.empty(8, dtype=torch.uint8).numpy().tobytes()
    flag.value = before
    return filling if all(filling) else b""  # Junk has no zero byte.


def _mallopt() -> ctypes._NamedFuncPointer | None:
    try:
        function: ctypes._NamedFuncPointer = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # The C library is not glibc.
        return None
    return function


@functools.cache
def _torch_flag(fill: Fill) -> ctypes.c_bool | None:
    """Return the flag of torch's allocator for ``fill``; None if this build has none."""
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        return ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), _TORCH_FILLS[fill])
    except (OSError, ValueError):
        return None


@functools.cache
def _fills(fill: Fill) -> bool:
    """Return whether torch fills small and large allocations while its flag is set."""
    return all(_fills_reused(size, fill) for size in (64, 480, 4096, _MIB))


def _fills_reused(size: int, fill: Fill) -> bool:
    """Return whether an allocation of ``size`` bytes is filled that likely reuses freed memory."""
    torch.full((size,), 1, dtype=torch.uint8)
    reused = torch.empty(size, dtype=torch.uint8)
    return bool(junk(reused.view(-1, 8)).all() if fill == "pattern" else (reused == 0).all())


def fill_free(device: torch.device, fill: Fill) -> list[tuple[int, int]]:
    """Fill the caching allocator's free memory for the current stream, and new memory beside it.

    Returns:
        Address ranges of the filled memory, in which the next allocations on this stream lie.
    """
    torch.cuda.empty_cache()
    blocks: list[torch.Tensor] = []
    # Dispatch modes would allocate elsewhere. Running out of memory is fine: all free is filled.
    with _disable_current_modes(), contextlib.suppress(torch.OutOfMemoryError):
        for size in (*_free(device), *_PRIMED):
            blocks.append(torch.empty(size, dtype=torch.uint8, device=device))
            blocks[-1].fill_(_BYTE[fill])
    torch.cuda.synchronize(device)
    return [(each.data_ptr(), each.data_ptr() + each.numel()) for each in blocks]


def _free(device: torch.device) -> list[int]:
    """Return the sizes of free blocks between used ones, which the allocator hands out first."""
    number = torch.cuda.current_device() if device.index is None else device.index
    stream = torch.cuda.current_stream(device).cuda_stream
    sizes: list[int] = []
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]  # torch's
        if (segment["device"], segment["stream"]) != (number, stream):
            continue
        for block in segment["blocks"]:
            size = block["size"] if block["state"] == "inactive" else 0
            if segment["segment_type"] == "small":
                sizes += [_MIB] * (size // _MIB) + [size % _MIB] * (size % _MIB > 0)
            elif size > _MIB:
                sizes.append(size)
    return sizes


class Primed:
    """Free GPU memory that holds a pattern and is handed out next by the caching allocator.

    Allocations are recorded until ``close``, because a piece that is allocated a second time may
    hold what was written to it the first time.
    """

    def __init__(self, device: torch.device, fill: Fill) -> None:
        self._device = device
        self._ranges = fill_free(device, fill)
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=_RECORDED)
        self._before = len(self._allocation_history())

    def close(self) -> None:
        """Stop recording allocations."""
        torch.cuda.memory._record_memory_history(None)

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` was the only allocation in its primed memory so far."""
        start = tensor.untyped_storage().data_ptr()
        end = start + tensor.untyped_storage().nbytes()
        recorded = self._allocation_history()
        since = [
            each
            for each in recorded[self._before :]
            if each["action"] == "alloc"
            and each["addr"] < end
            and start < each["addr"] + each["size"]
        ]
        inside = any(low <= start and end <= high for low, high in self._merged_ranges())
        return inside and len(since) == 1 and len(recorded) < _RECORDED

    def _merged_ranges(self) -> list[tuple[int, int]]:
        """Return the address ranges, adjacent ones merged."""
        merged: list[tuple[int, int]] = []
        for low, high in sorted(self._ranges):
            touches = bool(merged) and merged[-1][1] == low
            merged.append((merged.pop()[0] if touches else low, high))
        return merged

    def _allocation_history(self) -> list[dict[str, Any]]:
        number = self._device.index
        number = torch.cuda.current_device() if number is None else number
        return list(torch.cuda.memory._snapshot()["device_traces"][number])


ALIGNED = 4096  # Bytes: a page, and a multiple of the 512 bytes of the GPU's allocator.
_NARROWEST, _WIDEST = 1 << 16, 1 << 22  # Bytes of a guard band.
BEYOND = "out-of-bounds write"
_MOST, _MOST_NARROW = 2 << 30, 1 << 28  # Bytes guarded at a time, with a fill and without.

aten = torch.ops.aten
_UNWRITTEN = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
_FILLED = {
    aten.zeros.default,
    aten.zeros_like.default,
    aten.new_zeros.default,
    aten.ones.default,
    aten.ones_like.default,
    aten.new_ones.default,
    aten.full.default,
    aten.full_like.default,
    aten.new_full.default,
}
_COPIED = {
    aten.clone.default,
    aten._to_copy.default,
    aten.constant_pad_nd.default,
    aten.cat.default,
    aten.stack.default,
}

# Bound before any kernel is loaded, since a kernel may replace ``torch.equal``.
_equal = torch.equal


@dataclass(slots=True, eq=False)
class Placed:
    """Memory of one tensor, with a guard band before and after it."""

    buffer: torch.Tensor  # the bands and the memory between them, in bytes
    # start, end: the range of the tensor's bytes in ``buffer``.
    start: int
    end: int
    place: int  # selects the bytes of the bands, see ``pattern``
    label: str  # names the tensor in a message
    original: torch.Tensor | None = None  # an input's bytes; None for memory that may be written
    seen_by: StorageWeakRef | None = None  # storage of the tensor, once there is one
    late: bool = False  # whether a torch operator wrote it elsewhere and it was copied here

    @property
    def inside(self) -> torch.Tensor:
        """The bytes between the bands."""
        return self.buffer[self.start : self.end]

    @property
    def free(self) -> bool:
        """True once the tensor and all its views are deleted."""
        return self.seen_by is not None and gone(self.seen_by)


class GuardBands(QuietMode):  # type: ignore[no-untyped-call]  # torch's
    """A dispatch mode that allocates tensors between guard bands and fills them with a pattern.

    Without ``fill`` only bands are filled. Bytes are compared as integers, so that NaNs compare.
    Allocations of compiled graphs and of C++ are not seen: ``place_of`` tells which tensors are.

    Args:
        memory: Memory of earlier calls. Its free pieces are reused, first come first served as in a
            caching allocator, so that a call finds its tensors where the last call had its own.
            None if all memory is to be new.
    """

    def __init__(
        self, fill: Fill, device: torch.device, memory: list[Placed] | None = None
    ) -> None:
        super().__init__()
        self._fill, self._device, self._memory = fill, device, memory
        self._most = _MOST if fill else _MOST_NARROW
        self._placed: list[Placed] = []
        self._inputs: list[Placed] = []
        self._bytes = 0
        self._wrong = self.unchecked = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the operator's result, moved to guarded memory if the operator allocated it."""
        del types
        result = func(*args, **(kwargs or {}))
        # Copying every intermediate result would take ten times as long.
        if not self._fill and func not in _UNWRITTEN and func not in _FILLED:
            return result
        # While make_fx traces a mod, our copies would become steps of the traced mod.
        traced = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
        # A custom operator has already run: guarding its result now would detect nothing.
        if traced or getattr(func, "namespace", "") != "aten":
            return result
        several = isinstance(result, tuple | list)
        tensors = list(result) if several else [result]
        if any(map(self._is_guardable, tensors)):
            read = {_memory_of(each) for each in tree_leaves((args, kwargs))}
            for i, each in enumerate(tensors):
                if self._is_guardable(each) and _memory_of(each) not in read:  # Others are views.
                    tensors[i] = self._move_between_bands(each, func)
        return type(result)(tensors) if several else tensors[0]

    def copied(self, inputs: Inputs) -> Inputs:
        """Return a copy of ``inputs`` between guard bands, with the same strides and gaps."""
        tensors = {name: self._copy_of(name, t) for name, t in inputs.tensors().items()}
        return Inputs.of(inputs.problem, tensors)

    def place_of(self, name: str, tensor: torch.Tensor) -> Placed | None:
        """Return the guarded memory in which an output lies, labelled ``name``; None if none."""
        at = tensor.data_ptr()
        for placed in (*self._placed, *self._inputs):
            if 0 <= at - placed.buffer.data_ptr() - placed.start < placed.end - placed.start:
                if placed.original is None:
                    placed.label = f"its output {name}"
                return placed
        return None

    def look(self) -> str:
        """Return the first fault found so far, in one line, and stop guarding earlier allocations.

        Empty if nothing was written out of bounds.
        """
        for placed in (*self._inputs, *self._placed):
            self._wrong = self._wrong or self._fault_in(placed)
        self._placed, self._bytes = [], 0
        return self._wrong

    def _look_at_free(self) -> None:
        """Check the memory of deleted tensors, and stop guarding it."""
        for placed in self._placed:
            if placed.free:
                self._wrong = self._wrong or self._fault_in(placed)
        self._placed = [placed for placed in self._placed if not placed.free]
        self._bytes = sum(len(placed.buffer) for placed in self._placed)

    def _is_guardable(self, new: object) -> bool:
        if type(new) is not torch.Tensor or new.layout != torch.strided:
            return False  # For example a compiler's fake tensor.
        if new.device.type != self._device.type or not new.numel():
            return False
        if new.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.unchecked = "what is allocated in a CUDA graph has no guard bands"
            return False
        return new.device.type == "cuda" or not torch.cuda.is_available() or not new.is_pinned()

    def _move_between_bands(self, result: torch.Tensor, func: object) -> torch.Tensor:
        late = func not in _UNWRITTEN | _FILLED | _COPIED
        if late and result.device.type != "cpu":  # Only a CPU's heap can be corrupted.
            return result
        size = result.untyped_storage().nbytes()
        if self._bytes + size > self._most:
            self._look_at_free()
        if self._bytes + size > self._most:
            self.unchecked = f"beyond {self._most >> 20} MiB of allocations nothing has guard bands"
            return result
        shape, dtype = tuple(result.shape), str(result.dtype).removeprefix("torch.")
        placed = self._place(size, f"a tensor {shape} of {dtype} that it allocated", result.device)
        self._placed.append(placed)
        placed.late = late
        if func not in _UNWRITTEN:
            placed.inside.copy_(placed.inside.new_empty(0).set_(result.untyped_storage()))
            return _tensor(placed, result)
        if self._fill:
            inside = pattern(size, size, result.device, self._fill)
            placed.inside.copy_(inside & 1 if result.dtype == torch.bool else inside)
        return _tensor(placed, result)

    def _copy_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.untyped_storage().nbytes()
        if not size:
            return tensor.clone()
        # The gaps between far rows are gibibytes: too large to fill.
        if strided_alloc.has_far_rows(tensor):
            return strided_alloc.copy_far_rows(tensor)
        placed = self._place(size, f"its input {name}", tensor.device)
        self._inputs.append(placed)
        whole = tensor.as_strided((size // tensor.element_size(),), (1,), 0)
        _tensor(placed, whole).copy_(whole)
        placed.original = placed.inside.clone()
        return _tensor(placed, tensor)

    def _place(self, size: int, label: str, device: torch.device) -> Placed:
        """Return new or reused memory for ``size`` bytes, its bands filled."""
        band = min(max(round_up(size), _NARROWEST), _WIDEST) if self._fill else ALIGNED
        whole = band + round_up(size) + band
        placed = next((one for one in self._memory or () if one.place == size and one.free), None)
        if placed is None:
            buffer = torch.empty(whole + ALIGNED, dtype=torch.uint8, device=device)
            first = -buffer.data_ptr() % ALIGNED
            placed = Placed(
                buffer=buffer[first : first + whole],
                start=band,
                end=band + size,
                place=size,  # Not an address, so that runs with one pattern get the same bytes.
                label=label,
            )
            if self._memory is not None:
                self._memory.append(placed)
        elif placed in self._placed:
            self._wrong = self._wrong or self._fault_in(placed)  # Its bands are refilled below.
            self._placed.remove(placed)
        placed.label, placed.original, placed.seen_by, placed.late = label, None, None, False
        for part, bytes_ in self._bands(placed):
            part.copy_(bytes_)
        self._bytes += whole
        return placed

    def _bands(self, placed: Placed) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """Return the band before ``placed`` and the one after, each with its expected bytes."""
        bands = placed.buffer[: placed.start], placed.buffer[placed.end :]
        return [
            (band, pattern(placed.place + 1 + i, len(band), band.device, self._fill))
            for i, band in enumerate(bands)
        ]

    def _fault_in(self, placed: Placed) -> str:
        for side, band in zip(("before", "after"), self._bands(placed), strict=True):
            if not _equal(*band):
                changed = (band[0] != band[1]).nonzero().flatten()
                distance = (
                    f"the last {len(band[0]) - 1 - int(changed[-1])} bytes ahead"
                    if side == "before"
                    else f"the first {int(changed[0])} bytes behind"
                )
                return f"{BEYOND}: {count_bytes(band)} {side} {placed.label}, {distance}"
        if placed.original is not None and not _equal(placed.inside, placed.original):
            count = count_bytes((placed.inside, placed.original))
            return f"wrote {count} between elements of {placed.label}"
        return ""


def weak_ref(tensor: torch.Tensor) -> StorageWeakRef:
    """Return a weak reference to the memory of ``tensor`` and its views, for ``gone``."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch's


def gone(memory: StorageWeakRef) -> bool:
    """Return whether every tensor in that memory is deleted."""
    return bool(memory.expired())  # type: ignore[no-untyped-call]  # torch's


def _memory_of(each: object) -> int | None:
    """Return a number that identifies a tensor's storage; None for anything else."""
    if isinstance(each, torch.Tensor) and each.layout == torch.strided:
        number: int = each.untyped_storage()._cdata
        return number
    return None


def _tensor(placed: Placed, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor laid out as ``like`` in ``placed``, whose storage excludes the bands."""
    inner = from_dlpack(torch._C._to_dlpack(placed.inside))
    placed.seen_by = weak_ref(inner)
    return inner.view(like.dtype).as_strided(like.shape, like.stride(), like.storage_offset())


def round_up(size: int) -> int:
    """Return ``size`` in whole pages."""
    return -(-size // ALIGNED) * ALIGNED


def count_bytes(band: tuple[torch.Tensor, torch.Tensor]) -> str:
    """Return in words how many bytes of a band changed."""
    count = int((band[0] != band[1]).sum())
    return "1 byte" if count == 1 else f"{count} bytes"
