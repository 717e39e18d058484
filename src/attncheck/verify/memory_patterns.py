"""Memory with guard bands around it, filled with one of two patterns of which no byte agrees."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.dlpack import from_dlpack

from attncheck.core import strided_alloc
from attncheck.inputs.input_tensors import Inputs

Fill = Literal["", "pattern", "inverse"]
"""Empty for whatever is there; else a pattern, or its inverse, of which every byte differs."""

_PERIOD = 65_521  # a prime: no row of a tensor is as long, and sees one pattern again and again
_AT_HAND = 32  # periods that need no copy: the widest band and most tensors are shorter
_SPREAD = 40_503  # between the patterns of two places
_BYTE = {"pattern": 0xA5, "inverse": 0x5A}  # where memory can be given one byte alone
_M_PERTURB = -6  # of mallopt(3)
_TORCH_FILLS = {  # flags of torch's allocator on a CPU
    "pattern": "FLAGS_caffe2_cpu_allocator_do_junk_fill",
    "inverse": "FLAGS_caffe2_cpu_allocator_do_zero_fill",
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIB = 1 << 20
# A caching allocator has one pool for what is at most a MiB and one for all else.
_RECORDED = 1 << 16  # allocations of one call and more
_PRIMED = (_MIB,) * 32 + (32 * _MIB,) * 8


@functools.cache
def _table(device: str, fill: Fill) -> torch.Tensor:
    """Hashed bytes of one period, over and over."""
    once = torch.frombuffer(
        bytearray(hashlib.shake_256(b"attncheck").digest(_PERIOD)), dtype=torch.uint8
    )
    often = once.repeat(1 + _AT_HAND)
    return (often if fill == "pattern" else ~often).to(device)


def pattern(place: int, size: int, device: torch.device, fill: Fill) -> torch.Tensor:
    """``size`` bytes that are a hash of where they lie.

    Args:
        place: Which of many places; another one has other bytes.
    """
    table, start = _table(str(device), fill), place * _SPREAD % _PERIOD
    if size <= _AT_HAND * _PERIOD:
        return table[start : start + size]
    return table[start : start + _PERIOD].repeat(math.ceil(size / _PERIOD))[:size]


@contextlib.contextmanager
def allocator_filled(fill: Fill) -> Iterator[bool]:
    """Within, torch fills what it allocates on the CPU, whoever asks it; whether it does.

    With ``pattern`` that is junk (see ``junk``), with ``inverse`` zeros. glibc fills what others
    allocate with one byte, but where it gives a small piece that was just freed (glibc 2.38 also
    of aligned memory): of what is not torch's nothing is certain.
    """
    if not fill:
        yield False
        return
    mallopt, flag = _mallopt(), _torch_flag(fill)
    if mallopt is not None:
        mallopt(_M_PERTURB, _BYTE[fill] ^ 0xFF)  # it fills with the complement of what it is told
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
    """Return which elements, ``(elements, bytes)``, are the junk of torch's allocator."""
    if not _junk():
        return torch.zeros(len(elements), dtype=torch.bool, device=elements.device)
    as_integer = _INTEGERS[elements.shape[1]]  # one comparison an element, not one a byte
    words = torch.frombuffer(bytearray(_junk()), dtype=as_integer).to(elements.device)
    return torch.isin(elements.contiguous().view(as_integer)[:, 0], words)


@functools.cache
def _junk() -> bytes:
    """Eight bytes that torch's allocator fills with over and over; empty where it does not."""
    flag = _torch_flag("pattern")
    if flag is None:
        return b""
    before, flag.value = flag.value, True
    filling = torch.empty(8, dtype=torch.uint8).numpy().tobytes()
    flag.value = before
    return filling if all(filling) else b""  # zeros are the other filling


def _mallopt() -> ctypes._NamedFuncPointer | None:
    try:
        function: ctypes._NamedFuncPointer = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another C library, or none to ask
        return None
    return function


@functools.cache
def _torch_flag(fill: Fill) -> ctypes.c_bool | None:
    """The flag by which torch's allocator fills; None where this build has none."""
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        return ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), _TORCH_FILLS[fill])
    except (OSError, ValueError):
        return None


@functools.cache
def _fills(fill: Fill) -> bool:
    """Return whether this build of torch heeds its flag, which is on: small or large."""
    return all(_filled(size, fill) for size in (64, 480, 4096, _MIB))


def _filled(size: int, fill: Fill) -> bool:
    """Return whether memory is filled that held something else until just now."""
    torch.full((size,), 1, dtype=torch.uint8)
    made = torch.empty(size, dtype=torch.uint8)
    return bool(junk(made.view(-1, 8)).all() if fill == "pattern" else (made == 0).all())


def fill_free(device: torch.device, fill: Fill) -> list[tuple[int, int]]:
    """Fill what the caching allocator of a GPU has free for the current stream, and more.

    Returns:
        Where that memory is; what is allocated next on this stream lies in it.
    """
    torch.cuda.empty_cache()
    held: list[torch.Tensor] = []
    # A mode that allocates elsewhere is not to see this, and what runs out of memory has enough.
    with _disable_current_modes(), contextlib.suppress(torch.OutOfMemoryError):
        for size in (*_free(device), *_PRIMED):
            held.append(torch.empty(size, dtype=torch.uint8, device=device))
            held[-1].fill_(_BYTE[fill])
    torch.cuda.synchronize(device)
    return [(each.data_ptr(), each.data_ptr() + each.numel()) for each in held]


def _free(device: torch.device) -> list[int]:
    """Sizes of the free pieces between others in use, which are given away before all others."""
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
    """Memory of a GPU that holds a pattern, and is free: what is allocated next lies in it.

    What is allocated is recorded until ``close``: a piece that was given away twice may hold, the
    second time, what was written to it after the first.
    """

    def __init__(self, device: torch.device, fill: Fill) -> None:
        self._device = device
        self._ranges = fill_free(device, fill)
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=_RECORDED)
        self._before = len(self._recorded())

    def close(self) -> None:
        """Record no more."""
        torch.cuda.memory._record_memory_history(None)

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` lies in it, and nothing else has lain there since."""
        start = tensor.untyped_storage().data_ptr()
        end = start + tensor.untyped_storage().nbytes()
        recorded = self._recorded()
        since = [
            each
            for each in recorded[self._before :]
            if each["action"] == "alloc"
            and each["addr"] < end
            and start < each["addr"] + each["size"]
        ]
        inside = any(low <= start and end <= high for low, high in self._joined())
        return inside and len(since) == 1 and len(recorded) < _RECORDED

    def _joined(self) -> list[tuple[int, int]]:
        """Its ranges, those that touch as one."""
        joined: list[tuple[int, int]] = []
        for low, high in sorted(self._ranges):
            touches = bool(joined) and joined[-1][1] == low
            joined.append((joined.pop()[0] if touches else low, high))
        return joined

    def _recorded(self) -> list[dict[str, Any]]:
        number = self._device.index
        number = torch.cuda.current_device() if number is None else number
        return list(torch.cuda.memory._snapshot()["device_traces"][number])


def primed(device: torch.device, fill: Fill) -> Primed | None:
    """The caching allocator of ``device`` primed with ``fill``; None where there is none."""
    return Primed(device, fill) if fill and device.type == "cuda" else None


_ALIGNED = 4096  # keeps the 512 bytes of a GPU's allocator, and a page
_NARROWEST, _WIDEST = 1 << 16, 1 << 22
BEYOND = "out-of-bounds write"
_MOST, _MOST_NARROW = 2 << 30, 1 << 28  # bytes under guard at a time

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

# Bound before any kernel is loaded, which might bind the name to something else.
_equal = torch.equal


@dataclass(slots=True, eq=False)
class Placed:
    """One tensor's memory, with a band before and after it."""

    buffer: torch.Tensor  # all of it, in bytes
    # start, end: where between the bands the tensor's bytes are.
    start: int
    end: int
    place: int  # what the bands' bytes are hashed from
    label: str  # what it is, for a message
    original: torch.Tensor | None = None  # of an input what it held; None of what may be written
    seen_by: StorageWeakRef | None = None  # the memory of the tensor in it, once there is one
    late: bool = False  # whether an operator of torch's allocated it elsewhere, and wrote it there

    @property
    def inside(self) -> torch.Tensor:
        """What lies between the bands."""
        return self.buffer[self.start : self.end]

    @property
    def free(self) -> bool:
        """True once the tensor in it, and every view of that, is gone."""
        return self.seen_by is not None and gone(self.seen_by)


class QuietMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """A mode under which a kernel is called as it always is, compiled graphs and all."""

    # FlexAttention is one; it is called as it is, and what it allocates inside is its own affair.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A kernel that compiles a graph does so here too: it is to be called as it always is."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports its compiler and Triton, and the interpreter has to be on by then."""
        return False


class GuardBands(QuietMode):  # type: ignore[no-untyped-call]  # torch's
    """While it is on, tensors are allocated between guard bands, and poisoned.

    Both hold bytes that are a hash of the place, compared as integers: a NaN is a number like any.
    A compiled graph allocates for itself, and so does C++: ``holds`` says which tensors lie here.

    Args:
        memory: Of earlier calls. What is free of it is given away again, first come first served,
            as a caching allocator does: then a call finds its tensors where the last one had its
            own. None where all memory is new.
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
        """The operator's result, in guarded memory where it allocated it."""
        del types
        made = func(*args, **(kwargs or {}))
        # Copies of all that is worked out on the way would take ten times as long.
        if not self._fill and func not in _UNWRITTEN and func not in _FILLED:
            return made
        # What make_fx traces are steps of a mod's, and our copies would be steps of it too.
        traced = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
        # An operator of somebody's own has written where it may not by now, if it has at all.
        if traced or getattr(func, "namespace", "") != "aten":
            return made
        several = isinstance(made, tuple | list)
        tensors = list(made) if several else [made]
        if any(map(self._ours, tensors)):
            read = {_memory_of(each) for each in tree_leaves((args, kwargs))}
            for i, each in enumerate(tensors):
                if self._ours(each) and _memory_of(each) not in read:  # else it is no new memory
                    tensors[i] = self._guarded(each, func)
        return type(made)(tensors) if several else tensors[0]

    def copied(self, inputs: Inputs) -> Inputs:
        """The same numbers between guard bands, laid out alike: strides, gaps and all."""
        tensors = {name: self._copied(name, t) for name, t in inputs.tensors().items()}
        return Inputs.of(inputs.problem, tensors)

    def place_of(self, name: str, tensor: torch.Tensor) -> Placed | None:
        """Where an output lies between guard bands, called by its ``name`` from now on."""
        at = tensor.data_ptr()
        for placed in (*self._placed, *self._inputs):
            if 0 <= at - placed.buffer.data_ptr() - placed.start < placed.end - placed.start:
                if placed.original is None:
                    placed.label = f"its output {name}"
                return placed
        return None

    def look(self) -> str:
        """Return what was written where nobody may; what was allocated so far is then forgotten.

        Empty where nothing was. The first fault that was ever found is told again.
        """
        for placed in (*self._inputs, *self._placed):
            self._wrong = self._wrong or self._written(placed)
        self._placed, self._bytes = [], 0
        return self._wrong

    def _look_at_free(self) -> None:
        """Look at what nobody holds any more, and guard it no longer."""
        for placed in self._placed:
            if placed.free:
                self._wrong = self._wrong or self._written(placed)
        self._placed = [placed for placed in self._placed if not placed.free]
        self._bytes = sum(len(placed.buffer) for placed in self._placed)

    def _ours(self, made: object) -> bool:
        if type(made) is not torch.Tensor or made.layout != torch.strided:
            return False  # a fake tensor of a compiler's, say
        if made.device.type != self._device.type or not made.numel():
            return False
        if made.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.unchecked = "what is allocated in a CUDA graph has no guard bands"
            return False
        return made.device.type == "cuda" or not torch.cuda.is_available() or not made.is_pinned()

    def _guarded(self, made: torch.Tensor, func: object) -> torch.Tensor:
        late = func not in _UNWRITTEN | _FILLED | _COPIED
        if late and made.device.type != "cpu":  # no heap breaks there
            return made
        size = made.untyped_storage().nbytes()
        if self._bytes + size > self._most:
            self._look_at_free()
        if self._bytes + size > self._most:
            self.unchecked = f"beyond {self._most >> 20} MiB of allocations nothing has guard bands"
            return made
        shape, dtype = tuple(made.shape), str(made.dtype).removeprefix("torch.")
        placed = self._place(size, f"a tensor {shape} of {dtype} that it allocated", made.device)
        self._placed.append(placed)
        placed.late = late
        if func not in _UNWRITTEN:
            placed.inside.copy_(placed.inside.new_empty(0).set_(made.untyped_storage()))
            return _tensor(placed, made)
        if self._fill:
            inside = pattern(size, size, made.device, self._fill)
            placed.inside.copy_(inside & 1 if made.dtype == torch.bool else inside)
        return _tensor(placed, made)

    def _copied(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.untyped_storage().nbytes()
        if not size:
            return tensor.clone()
        if strided_alloc.has_far_rows(
            tensor
        ):  # gibibytes between its rows are no bands that one can fill
            return strided_alloc.copy_far_rows(tensor)
        placed = self._place(size, f"its input {name}", tensor.device)
        self._inputs.append(placed)
        whole = tensor.as_strided((size // tensor.element_size(),), (1,), 0)
        _tensor(placed, whole).copy_(whole)
        placed.original = placed.inside.clone()
        return _tensor(placed, tensor)

    def _place(self, size: int, label: str, device: torch.device) -> Placed:
        """New or free memory for ``size`` bytes, its bands filled."""
        band = min(max(_rounded(size), _NARROWEST), _WIDEST) if self._fill else _ALIGNED
        whole = band + _rounded(size) + band
        placed = next((one for one in self._memory or () if one.place == size and one.free), None)
        if placed is None:
            buffer = torch.empty(whole + _ALIGNED, dtype=torch.uint8, device=device)
            first = -buffer.data_ptr() % _ALIGNED
            placed = Placed(
                buffer=buffer[first : first + whole],
                start=band,
                end=band + size,
                place=size,  # and no address: another run with this pattern finds the same bytes
                label=label,
            )
            if self._memory is not None:
                self._memory.append(placed)
        elif placed in self._placed:
            self._wrong = self._wrong or self._written(placed)  # its bands are filled anew
            self._placed.remove(placed)
        placed.label, placed.original, placed.seen_by, placed.late = label, None, None, False
        for part, bytes_ in self._bands(placed):
            part.copy_(bytes_)
        self._bytes += whole
        return placed

    def _bands(self, placed: Placed) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """Both bands of ``placed``, the first in full and the second, with what they must hold."""
        bands = placed.buffer[: placed.start], placed.buffer[placed.end :]
        return [
            (band, pattern(placed.place + 1 + i, len(band), band.device, self._fill))
            for i, band in enumerate(bands)
        ]

    def _written(self, placed: Placed) -> str:
        before, after = self._bands(placed)
        if not _equal(*before):
            at = len(before[0]) - 1 - _first(before, lambda places: places[-1])
            return (
                f"{BEYOND}: {count_bytes(before)} before {placed.label}, the last {at} bytes ahead"
            )
        if not _equal(*after):
            at = _first(after, lambda places: places[0])
            return (
                f"{BEYOND}: {count_bytes(after)} after {placed.label}, the first {at} bytes behind"
            )
        if placed.original is not None and not _equal(placed.inside, placed.original):
            count = count_bytes((placed.inside, placed.original))
            return f"wrote {count} between elements of {placed.label}"
        return ""


def weakly(tensor: torch.Tensor) -> StorageWeakRef:
    """Return what says when the memory of ``tensor``, and of every view of it, is ``gone``."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch's


def gone(memory: StorageWeakRef) -> bool:
    """Return whether nobody holds that memory any more."""
    return bool(memory.expired())  # type: ignore[no-untyped-call]  # torch's


def _memory_of(each: object) -> int | None:
    """What identifies the memory that a tensor lies in; None of anything else."""
    if isinstance(each, torch.Tensor) and each.layout == torch.strided:
        number: int = each.untyped_storage()._cdata
        return number
    return None


def _tensor(placed: Placed, like: torch.Tensor) -> torch.Tensor:
    """The memory of ``placed`` as a tensor laid out as ``like``, which knows of no bands."""
    alone = from_dlpack(torch._C._to_dlpack(placed.inside))
    placed.seen_by = weakly(alone)
    return alone.view(like.dtype).as_strided(like.shape, like.stride(), like.storage_offset())


def _rounded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _first(
    band: tuple[torch.Tensor, torch.Tensor], which: Callable[[torch.Tensor], torch.Tensor]
) -> int:
    return int(which((band[0] != band[1]).nonzero().flatten()))


def count_bytes(band: tuple[torch.Tensor, torch.Tensor]) -> str:
    """Return in words how many bytes of a band differ from what they were."""
    count = int((band[0] != band[1]).sum())
    return "1 byte" if count == 1 else f"{count} bytes"
