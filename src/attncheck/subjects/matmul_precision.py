"""How torch multiplies fp32 matrices: a process-wide setting, set around one call and put back."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Products", "fp32_products"]

Products = Literal["ieee", "tf32"]

# torch's older, coarser names for the same setting.
_LEGACY: dict[Products, str] = {"ieee": "highest", "tf32": "high"}


@contextlib.contextmanager
def fp32_products(products: Products) -> Iterator[None]:
    """Inside, torch multiplies fp32 matrices exactly as fp32 (``ieee``) or in ``tf32``.

    Sets the older process-wide setting as well as the newer ones for each backend: parts of torch
    still read the older one, and refuse to when the two disagree (torch 2.9–2.13). Everything is
    as before afterwards, an unset backend included.
    """
    cuda = torch.backends.cuda.matmul
    mkldnn = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # a module made at import
    before = (cuda.fp32_precision, mkldnn.fp32_precision)
    legacy = _legacy_precision()
    try:
        _set_legacy(_LEGACY[products])
        yield
    finally:
        _set_legacy(legacy)
        cuda.fp32_precision, mkldnn.fp32_precision = before


def _legacy_precision() -> str:
    """The older setting; torch refuses to name it after tf32 came through a newer one alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 warns that the older setting is old
        try:
            return torch.get_float32_matmul_precision()
        except RuntimeError:
            return "highest"


def _set_legacy(precision: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 warns that the older setting is old
        torch.set_float32_matmul_precision(precision)
