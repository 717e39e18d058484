"""Measures the machine's peak rates, and reads the GPU's clock."""

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

_PRODUCT = {"cpu": 1024, "cuda": 8192}  # rows and columns of the multiplied matrices
_COPIED = {"cpu": 1 << 27, "cuda": 1 << 31}  # bytes of the copied tensor
_ROUNDS = {"cpu": 5, "cuda": 20}  # timed repeats
_NVML, _SM = "libnvidia-ml.so.1", 1  # NVML's library, and its NVML_CLOCK_SM


def machine_limits(dtypes: list[str], device: str) -> tuple[dict[str, float], float]:
    """Return operations per second of a large product by dtype, and bytes per second of a copy.

    Each byte counts twice, as read and as written. Dtypes without a product in torch are left out.
    """
    size, rounds, rates = _PRODUCT[device], _ROUNDS[device], {}
    for dtype in dtypes:
        with suppress(RuntimeError, ValueError, NotImplementedError):
            product = _product(dtype, size, device)
            with fp32_products(dtype):
                product()
                rates[dtype] = 2.0 * size**3 / medians({"": product}, device, rounds)[""]
    source = torch.ones(_COPIED[device], dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    seconds = medians({"": lambda: target.copy_(source)}, device, rounds)[""]
    return rates, 2 * source.numel() / seconds


def _product(dtype: str, size: int, device: str) -> Callable[[], object]:
    torch_dtype = DTYPES[dtype].storage.torch_dtype
    left, right = (torch.randn(size, size, device=device).to(torch_dtype) for _ in range(2))
    if not DTYPES[dtype].scaled:
        return lambda: left @ right
    one = torch.ones((), device=device)
    if dtype == "e5m2":  # cuBLAS does not multiply e5m2 by e5m2, only by e4m3
        right = right.to(torch.float8_e4m3fn)
    scaled: Callable[..., Any] = torch._scaled_mm
    return lambda: scaled(left, right.t(), one, one, out_dtype=torch.bfloat16)


def sm_clock(device: str) -> Callable[[], int | None]:
    """Return a function that reads the GPU's multiprocessor clock in MHz, or None if unavailable.

    It calls NVIDIA's management library, which comes with the driver, and takes 0.1 ms.
    """
    if device == "cpu":
        return lambda: None
    try:
        library, handle, clock = ctypes.CDLL(_NVML), ctypes.c_void_p(), ctypes.c_uint()
        # By UUID, because CUDA numbers only the GPUs visible to it, and the driver all.
        name = f"GPU-{torch.cuda.get_device_properties(0).uuid}".encode()
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)):
            return lambda: None
    except (OSError, AttributeError):
        return lambda: None

    def now() -> int | None:
        failed = library.nvmlDeviceGetClockInfo(handle, _SM, ctypes.byref(clock))
        return None if failed else clock.value

    return now
