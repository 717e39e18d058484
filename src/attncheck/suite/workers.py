"""One GPU for each process of pytest-xdist."""

from __future__ import annotations

import os

__all__ = ["choose_gpu"]

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def choose_gpu() -> None:
    """In worker N of pytest-xdist, leave GPU N modulo their number visible; else nothing.

    Before CUDA is used: kernels then see one device, and need not know which it is. Where
    somebody's code has used CUDA already, it becomes the current one.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if not worker.startswith("gw"):
        return
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        return
    index = int(worker.removeprefix("gw")) % count
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's own gap
        torch.cuda.set_device(index)
        return
    visible = [name for name in os.environ.get(_VISIBLE, "").split(",") if name]
    os.environ[_VISIBLE] = visible[index] if visible else str(index)
