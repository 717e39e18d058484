"""Whether the row sum takes the rounded P."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.examine.fingerprint.scene import GROUP, blank, every, scene
from attncheck.formats import dtype_named

if TYPE_CHECKING:
    from attncheck.examine.fingerprint.asker import Asker
    from attncheck.examine.fingerprint.grids import Grid

__all__ = ["sums_rounded"]

_VANISHES = -32.0  # log2: less than an fp32 sum of 64 notices


def sums_rounded(asker: Asker, held: Grid) -> bool | None:
    """Whether rows that differ by what rounding P takes off have the same sum; None: hidden.

    In each group a key of weight 1 and 14 of (1 + δ)/2, which P of ``held`` bits holds as 1/2:
    δ = 0 in even rows and just below 2^-bits in odd ones. The sums are 64 and 64 (1 + 7δ/8).

    Raises:
        Unanswered: where there are no outputs.
    """
    q, k, v = blank()
    q[..., 0] = 1.0
    q[:, 1::2, 1] = 1.25 * 2.0**-held.bits
    for offset in range(1, GROUP - 1):
        k[0, every(offset), 0], k[0, every(offset), 1] = -1.0, 1.0
    k[0, every(GROUP - 1), 0] = _VANISHES
    v[0, every(0), 0] = 1.0
    told = asker.finite(scene(asker.dtype, q, k, v))
    if told.out[0, 0, 0] != told.out[0, 1, 0]:
        return False
    if told.lse is not None:
        return bool(told.lse[0, 0] == told.lse[0, 1])
    # 1/8 and 1/8 · (1 − 7δ/8): more than half of the distance between neighbours of so many bits.
    return True if held.bits <= dtype_named(asker.dtype).output.significand else None
