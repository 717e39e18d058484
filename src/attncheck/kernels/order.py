"""Which blocks of rows a program of our forward owns, and which it does again, on the device.

Blocks are counted in the order of their start, over all heads of all sequences.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The body of a Triton function is another language: its arguments have no Python types.

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["asked", "place", "turns_of"]


@triton.jit
def turns_of(again_ptr, mine, every):
    """How many of ``every`` block a careful program has to look at: mostly none.

    256 of them at a time: one after the other they would take longer than what is to be done.
    """
    apart = tl.num_programs(0)
    most = 0
    for first in range(mine, every, 256 * apart):
        number = first + tl.arange(0, 256) * apart
        found = tl.load(again_ptr + number, mask=number < every, other=0)
        most = tl.maximum(most, tl.max(found, 0))
    return most * tl.cdiv(every - mine, apart)


@triton.jit
def asked(again_ptr, number, CAREFUL: tl.constexpr):
    """Whether a launch does a block: the careful one, only what was not finite without care."""
    wanted = True
    if CAREFUL:
        wanted = tl.load(again_ptr + number) != 0
    return wanted


@triton.jit
def place(number, blocks, together):
    """Block of rows, and batch and head, of what starts as ``number``.

    The last block first: under a causal mask it is the longest, and the short ones fill the end.
    Four heads side by side: of one alone they would be too few, and K and V of all of them do not
    stay in the L2 cache.
    """
    leading = number // (4 * blocks) * 4
    heads_here = tl.minimum(4, together - leading)
    within = number % (4 * blocks)
    return blocks - 1 - within // heads_here, leading + within % heads_here
