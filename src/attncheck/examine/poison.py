"""What lies in memory that nobody has written: two patterns of which no byte agrees."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Fill", "Primed", "allocator_filled", "fill_free", "junk", "pattern", "primed"]

Fill = Literal["", "pattern", "inverse"]
"""Empty for whatever is there; else a pattern, or its inverse, of which every byte differs."""

_PERIOD = 65_521  # a prime: no row of a tensor is as long, and sees one pattern again and again
_SPREAD = 40_503  # between the patterns of two places
_BYTE = {"pattern": 0xA5, "inverse": 0x5A}  # where memory can be given one byte alone
_M_PERTURB = -6  # of mallopt(3)
_TORCH_FILLS = {  # flags of torch's allocator on a CPU
    "pattern": "FLAGS_caffe2_cpu_allocator_do_junk_fill",
    "inverse": "FLAGS_caffe2_cpu_allocator_do_zero_fill",
}
_MIB = 1 << 20
# A caching allocator has one pool for what is at most a MiB and one for all else.
_RECORDED = 1 << 16  # allocations of one call and more
_PRIMED = (_MIB,) * 32 + (32 * _MIB,) * 8


@functools.cache
def _table(device: str, fill: Fill) -> torch.Tensor:
    """Two periods of hashed bytes."""
    once = torch.frombuffer(
        bytearray(hashlib.shake_256(b"attncheck").digest(_PERIOD)), dtype=torch.uint8
    )
    twice = torch.cat([once, once])
    return (twice if fill == "pattern" else ~twice).to(device)


def pattern(place: int, size: int, device: torch.device, fill: Fill) -> torch.Tensor:
    """``size`` bytes that are a hash of where they lie.

    Args:
        place: Which of many places; another one has other bytes.
        size: How many.
        device: Where.
        fill: Which of the two.
    """
    table, start = _table(str(device), fill), place * _SPREAD % _PERIOD
    if size <= _PERIOD:
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
        yield flag is not None and all(_filled(size, fill) for size in (64, 480, 4096, _MIB))
    finally:
        if flag is not None:
            flag.value = False
        if mallopt is not None:
            mallopt(_M_PERTURB, 0)


def junk(elements: torch.Tensor) -> torch.Tensor:
    """Which elements, ``(elements, bytes)``, are the junk that torch's allocator fills with."""
    if not _junk():
        return torch.zeros(len(elements), dtype=torch.bool, device=elements.device)
    words = torch.frombuffer(bytearray(_junk()), dtype=torch.uint8).to(elements.device)
    words = words.view(-1, elements.shape[1])
    return (elements[:, None] == words).all(-1).any(-1)


@functools.cache
def _junk() -> bytes:
    """Eight bytes that torch's allocator fills with over and over; empty where it does not."""
    flag = _torch_flag("pattern")
    if flag is None:
        return b""
    before, flag.value = flag.value, True
    found = torch.empty(8, dtype=torch.uint8).numpy().tobytes()
    flag.value = before
    return found if all(found) else b""  # zeros are the other filling


def _mallopt() -> ctypes._NamedFuncPointer | None:
    try:
        found: ctypes._NamedFuncPointer = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another C library, or none to ask
        return None
    return found


@functools.cache
def _torch_flag(fill: Fill) -> ctypes.c_bool | None:
    """The flag by which torch's allocator fills; None where this build has none."""
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        return ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), _TORCH_FILLS[fill])
    except (OSError, ValueError):
        return None


def _filled(size: int, fill: Fill) -> bool:
    """Whether memory is filled that held something else until just now."""
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
        """Whether ``tensor`` lies in it, and nothing else has lain there since."""
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
