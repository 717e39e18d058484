"""Which sizes, numbers and gradients a Problem may ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncheck.errors import ProblemError
from attncheck.formats import DTYPES, FORMATS
from attncheck.paging import Paging

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "LARGEST_HEAD_DIM",
    "check_gradients",
    "check_memory",
    "check_scale",
    "check_seed",
    "check_sizes",
    "is_number",
]

LARGEST_HEAD_DIM = 256
_LARGEST_SEED = 2**63 - 1


def is_number(value: object) -> bool:
    """Whether it is a real number, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_sizes(sizes: Mapping[str, Any]) -> None:
    """Raises ProblemError unless each is a size, and heads share key heads evenly."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ProblemError(f"{name}={value!r} must be a whole number of at least 1.")
    if sizes["heads"] % sizes["kv_heads"]:
        raise ProblemError(
            f"kv_heads={sizes['kv_heads']} does not divide heads={sizes['heads']}: "
            "each key head serves the same number of query heads."
        )
    for name in ("head_dim", "value_dim"):
        if sizes.get(name, 0) > LARGEST_HEAD_DIM:
            raise ProblemError(f"{name}={sizes[name]} must be 1–{LARGEST_HEAD_DIM}.")


def check_seed(seed: object) -> None:
    """Raises ProblemError unless it is a seed."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ProblemError(f"seed={seed!r} must be a whole number.")
    if not 0 <= seed <= _LARGEST_SEED:
        raise ProblemError(f"seed={seed} must be from 0 to 2**63 − 1.")


def check_scale(scale: Any) -> None:
    """Raises ProblemError unless it is 0, for the default, or a positive number of fp32."""
    fmt = FORMATS["fp32"]
    # One that fp32 rounds to 0 would come back from JSON as the default.
    if not is_number(scale) or not (scale == 0 or fmt.subnormal_spacing <= scale <= fmt.max):
        raise ProblemError(f"scale={scale!r} must be a positive number in the range of fp32.")


def check_memory(*, sink: object, paging: object) -> None:
    """Raises ProblemError for a sink or pages that are none."""
    if not isinstance(sink, bool):
        raise ProblemError(f"sink={sink!r} must be true or false.")
    if paging is not None and not isinstance(paging, Paging):
        raise ProblemError(f"paging={paging!r} must be a Paging or None.")


def check_gradients(asked: Mapping[str, object], dtype: str, paging: Paging | None) -> None:
    """Raises ProblemError for gradients that there are not.

    Args:
        asked: ``backward``, and what is asked of a backward alone, by name.
        dtype: A name of ``formats.DTYPES``.
        paging: How keys lie in memory.
    """
    for name, value in asked.items():
        if not isinstance(value, bool):
            raise ProblemError(f"{name}={value!r} must be true or false.")
    for name, value in asked.items():
        if value and not asked["backward"]:
            raise ProblemError(f"{name}=True has no meaning without backward=True.")
    if asked["backward"] and DTYPES[dtype].scaled:
        raise ProblemError(
            f"there are no gradients in {dtype}: nothing says which descales they have."
        )
    if asked["backward"] and paging is not None:
        raise ProblemError("there are no gradients of keys in pages.")
