"""Whether subnormal numbers that are stored are read as 0."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attncheck.examine.fingerprint.scene import LN2, ROWS, blank, scene
from attncheck.formats import dtype_named

if TYPE_CHECKING:
    from attncheck.examine.fingerprint.asker import Asker

__all__ = ["flushed"]


def flushed(asker: Asker) -> tuple[str, ...]:
    """Which of q, k and v (or out) are 0 where they are subnormal.

    q of one head and k of another are half of the smallest normal number, and the product with a
    large one makes a score of −1 beside one of 0: the same weight where it was flushed. Then v is
    the subnormal one, in all keys.

    Raises:
        Unanswered: where there are no outputs.
    """
    found = [name for name in ("q", "k") if _flushed_factor(asker, name)]
    fmt = dtype_named(asker.dtype).storage
    q, k, v = blank(1)
    v[0, :, 0] = 2.0 ** (fmt.min_exponent - 1)
    v[0, :, 1] = 1.0  # in fp8 it keeps the descale what it is
    if fmt.saturates:
        v[0, :, 1] = 2.0 ** _top(fmt.max)
    out = asker.ask(scene(asker.dtype, q, k, v)).out
    if bool((out[0, :, 0] == 0).all()):
        found.append("v or out")
    return tuple(found)


def _flushed_factor(asker: Asker, name: str) -> bool:
    fmt = dtype_named(asker.dtype).storage
    small, large = 2.0 ** (fmt.min_exponent - 1), 2.0 ** min(100, _top(fmt.max))
    q, k, v = blank()
    # The large one is there in any case: fp8 keeps its descale.
    q[0, :, 0], k[0, 1:, 0] = (small, -large) if name == "q" else (large, -small)
    q[0, :, 1] = k[0, :, 2] = large
    v[0, 0, 0], v[0, 1, 1] = 1.0, 1.0
    out = asker.ask(scene(asker.dtype, q, k, v, scale=LN2 / (small * large))).out[0, ROWS // 2]
    return bool(out[0] == out[1])


def _top(largest: float) -> int:
    return math.floor(math.log2(largest))
