"""What the machine does at best, and how fast its clock runs meanwhile."""

from __future__ import annotations

import subprocess
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attncheck.core.formats import DTYPES
from attncheck.subjects.conventions.torch_arithmetic import fp32_products
from attncheck.verify.timing import medians

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PRODUCT = {"cpu": 1024, "cuda": 8192}  # rows and columns
_COPIED = {"cpu": 1 << 27, "cuda": 1 << 31}  # bytes
_ROUNDS = {"cpu": 5, "cuda": 20}
_EVERY = 100  # ms between two looks at the clock


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


@contextmanager
def watched_clocks(device: str) -> Iterator[Callable[[], tuple[int, int] | None]]:
    """Yield what gives the lowest and the highest MHz of the GPU since it was last called.

    By ``nvidia-smi``, which looks ten times a second until the end; None where it does not say.
    """
    if device == "cpu":
        yield lambda: None
        return
    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    which = [f"--id=GPU-{uuid}"] if uuid else []
    ask = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", *which]
    # Read by another descriptor: one that both share has one place in the file.
    with tempfile.NamedTemporaryFile("w") as written, Path(written.name).open() as seen:
        watcher = None
        with suppress(OSError):
            watcher = subprocess.Popen(  # noqa: S603  # of our own making, and no shell
                [*ask, f"--loop-ms={_EVERY}"], stdout=written, stderr=subprocess.DEVNULL
            )

        def since() -> tuple[int, int] | None:
            numbers = [int(line) for line in seen.read().split() if line.isdecimal()]
            return (min(numbers), max(numbers)) if numbers else None

        try:
            yield since
        finally:
            if watcher is not None:
                watcher.kill()
                watcher.wait()
