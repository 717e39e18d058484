"""What the machine does at best, and how fast its clock runs meanwhile."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from attncheck.core.formats import DTYPES
from attncheck.subjects.conventions.torch_arithmetic import fp32_products
from attncheck.verify.timing import medians

if TYPE_CHECKING:
    from collections.abc import Callable

_PRODUCT = {"cpu": 1024, "cuda": 8192}  # rows and columns
_COPIED = {"cpu": 1 << 27, "cuda": 1 << 31}  # bytes
_ROUNDS = {"cpu": 5, "cuda": 20}
_NVML, _SM = "libnvidia-ml.so.1", 1


def machine_limits(dtypes: list[str], device: str) -> tuple[dict[str, float], float]:
    """Return operations a second of a large product in each dtype, and bytes a second of a copy.

    Bytes count as read and as written. A dtype in which torch has no product is left out.
    """
    size, rounds, rates = _PRODUCT[device], _ROUNDS[device], {}
    for dtype in dtypes:
        with suppress(RuntimeError, ValueError, NotImplementedError):
            product = _product(dtype, size, device)
            with fp32_products("tf32" if dtype == "tf32" else "ieee"):
                product()
                rates[dtype] = 2.0 * size**3 / medians({"": product}, device, rounds)[""]
    source = torch.ones(_COPIED[device], dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    seconds = medians({"": lambda: target.copy_(source)}, device, rounds)[""]
    return rates, 2 * source.numel() / seconds


def _product(dtype: str, size: int, device: str) -> Callable[[], object]:
    kind = DTYPES[dtype].storage.torch_dtype
    left, right = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
    if not DTYPES[dtype].scaled:
        return lambda: left @ right
    one = torch.ones((), device=device)
    if dtype == "e5m2":  # cuBLAS multiplies it by e4m3 alone
        right = right.to(torch.float8_e4m3fn)
    scaled: Callable[..., Any] = torch._scaled_mm
    return lambda: scaled(left, right.t(), one, one, out_dtype=torch.bfloat16)


def sm_clock(device: str) -> Callable[[], int | None]:
    """Return what reads the MHz of the GPU's multiprocessors now; None where nobody says.

    By NVIDIA's management library, which comes with the driver: a tenth of a millisecond.
    """
    if device == "cpu":
        return lambda: None
    try:
        library, handle, clock = ctypes.CDLL(_NVML), ctypes.c_void_p(), ctypes.c_uint()
        # By its name, since CUDA counts those that it is shown, and the driver all.
        name = f"GPU-{torch.cuda.get_device_properties(0).uuid}".encode()
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)):
            return lambda: None
    except (OSError, AttributeError):
        return lambda: None

    def now() -> int | None:
        failed = library.nvmlDeviceGetClockInfo(handle, _SM, ctypes.byref(clock))
        return None if failed else clock.value

    return now
