"""Tensors whose rows lie far apart in reserved memory."""

from __future__ import annotations

import mmap
import sys

import torch

# What a 32-bit integer cannot count. A tensor of so much memory has most of it between its rows, or
# it is a large one, which is copied whole.
_WIDE = 2**31
_MOSTLY_BETWEEN = 16
# Python has no name for it everywhere: pages are no promise before they are written.
_ON_DEMAND = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
# The part of a GPU that is left to whoever asks for memory next. A gate has dozens of processes on
# one GPU: what each caches and does not use would fill it. To get it back costs milliseconds.
_SPARE = 1 / 4


def has_far_rows(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a view of much more memory than it has elements."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return elements > _WIDE and tensor.numel() * _MOSTLY_BETWEEN < elements


def copy_far_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, as far apart, in memory of their own; what lies between is not read."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = reserve_memory(elements, tensor, copies=0)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(tensor)


def reserve_memory(elements: int, like: torch.Tensor, *, copies: int = 1) -> torch.Tensor:
    """Flat memory of so many elements, of the dtype and on the device of ``like``.

    Of a CPU a page is taken when it is written: all others are zeros, and cost nothing. A GPU has
    no such pages: all of it is taken, and holds anything.

    Args:
        copies: How many of it a GPU must have room for besides: one is made for each call.

    Raises:
        MemoryError: where there is not so much to be reserved.
        torch.OutOfMemoryError: where a GPU has not so much free.
    """
    size = elements * like.element_size()
    if like.device.type != "cpu":
        _require((1 + copies) * size, like.device)
        return torch.empty(elements, dtype=like.dtype, device=like.device)
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _ON_DEMAND)
    except OSError as error:
        raise MemoryError(f"cannot allocate memory: {size} bytes of addresses.") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # else each row may take 2 MiB
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(like.dtype)


def release_cached_memory(device: str | torch.device) -> None:
    """Give back what this process keeps of a GPU's memory and does not use, for others to use."""
    if torch.device(device).type != "cpu":
        torch.cuda.empty_cache()


def release_scarce_memory(device: str | torch.device) -> None:
    """As ``release_cached_memory``, where a GPU that this process uses has little memory free."""
    if _uses_gpu(device):
        free, total = torch.cuda.mem_get_info(device)
        if free < _SPARE * total:
            release_cached_memory(device)


def others_hold_memory(device: str | torch.device) -> bool:
    """Return whether others hold much of the memory of a GPU that this process uses; not a CPU's.

    What this process caches and does not use is given back first.
    """
    if not _uses_gpu(device):
        return False
    release_cached_memory(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device) > _SPARE * total


def _uses_gpu(device: str | torch.device) -> bool:
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.device(device).type != "cpu" and bool(initialized)


def _require(size: int, device: torch.device) -> None:
    release_cached_memory(device)
    free, _ = torch.cuda.mem_get_info(device)
    if free < size:
        raise torch.OutOfMemoryError(f"{size >> 30} GiB are needed, and {free >> 30} are free.")
