"""What fits: a kernel that writes a whole score matrix out says so before it is asked to."""

from __future__ import annotations

import os

__all__ = ["TooLarge", "too_large"]


class TooLarge(str):
    """A reason that lies in the machine, and not in the kernel."""

    __slots__ = ()


def too_large(what: str, size: int, device: str) -> TooLarge | None:
    """Why ``what`` of ``size`` bytes cannot be, in one line; None where ``device`` can hold it."""
    there = _memory(device)
    if size <= there:
        return None
    return TooLarge(f"its {what} would take {size / 2**30:,.0f} GiB of {there / 2**30:,.0f} GiB")


def _memory(device: str) -> int:
    if device == "cuda":
        import torch

        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
