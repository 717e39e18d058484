"""Allocate tensors whose rows are far apart in reserved memory, and free cached GPU memory."""

from __future__ import annotations

import mmap
import sys

import torch

# Rows count as far apart if the storage has more elements than a 32-bit integer can count, and more
# than ``_STORAGE_RATIO`` times as many as the tensor.
_WIDE = 2**31
_STORAGE_RATIO = 16
# MAP_NORESERVE, which is missing in some versions of Python: pages are allocated when written.
_ON_DEMAND = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
# Share of a GPU's memory to keep free for other processes. A gate has dozens of processes on one
# GPU, whose unused caches would fill it, and a question with far rows takes up to half of it.
# Freeing a cache costs milliseconds.
_SPARE = 1 / 2
_MUCH = 1 / 4  # Share of a GPU's memory that other processes hold when they may be why it is full.


def has_far_rows(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a view of a much larger storage, with its rows far apart."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return elements > _WIDE and tensor.numel() * _STORAGE_RATIO < elements


def copy_far_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides in new memory; memory between the rows is not read."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    storage = reserve_memory(elements, tensor, copies=0)
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(tensor)


def reserve_memory(elements: int, like: torch.Tensor, *, copies: int = 1) -> torch.Tensor:
    """Return a flat tensor of ``elements`` numbers, with the dtype and device of ``like``.

    On a CPU it is zero, and pages are allocated only when they are written. On a GPU all of it is
    allocated, uninitialized.

    Args:
        copies: Further tensors of this size that a GPU must have room for: a kernel call makes one.

    Raises:
        MemoryError: if so many addresses cannot be reserved.
        torch.OutOfMemoryError: if a GPU has not enough free memory.
    """
    size = elements * like.element_size()
    if like.device.type != "cpu":
        _require((1 + copies) * size, like.device)
        return torch.empty(elements, dtype=like.dtype, device=like.device)
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _ON_DEMAND)
    except OSError as error:
        raise MemoryError(f"cannot allocate memory: {size} bytes of addresses.") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # otherwise each row could take a huge page of 2 MiB
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(like.dtype)


def release_cached_memory(device: str | torch.device) -> None:
    """Free GPU memory that this process caches but does not use."""
    if torch.device(device).type != "cpu":
        torch.cuda.empty_cache()


def release_scarce_memory(device: str | torch.device) -> None:
    """Call ``release_cached_memory`` if this process uses a GPU that has little free memory."""
    if _uses_gpu(device):
        free, total = torch.cuda.mem_get_info(device)
        if free < _SPARE * total:
            release_cached_memory(device)


def others_hold_memory(device: str | torch.device) -> bool:
    """Return whether other processes hold much memory of the GPU; False on a CPU or an unused GPU.

    The unused cache of this process is freed first.
    """
    if not _uses_gpu(device):
        return False
    release_cached_memory(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device) > _MUCH * total


def _uses_gpu(device: str | torch.device) -> bool:
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.device(device).type != "cpu" and bool(initialized)


def _require(size: int, device: torch.device) -> None:
    release_cached_memory(device)
    free, _ = torch.cuda.mem_get_info(device)
    if free < size:
        raise torch.OutOfMemoryError(f"{size >> 30} GiB are needed, and {free >> 30} are free.")
