"""How many bits of q and of v a product reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.examine.fingerprint.grids import STEPS, Grid, coarsest
from attncheck.examine.fingerprint.scene import DIM, blank, scene
from attncheck.formats import dtype_named

if TYPE_CHECKING:
    from attncheck.examine.fingerprint.asker import Asker

__all__ = ["of_q", "of_v"]

_GONE = -256.0  # log2 of a weight that no format has


def of_q(asker: Asker) -> Grid | None:
    """Bits of q: of which x the operand 1 + x · 2^-b keeps a trace.

    Key b has the score 2^b − 2^b (1 + x · 2^-b) = −x in the rows of b.

    Raises:
        Unanswered: where there are no outputs.
    """
    places, steps = _exponents(asker.dtype)
    q, k, v = blank()
    for turn, b in enumerate(places):
        k[0, 1 + turn, :2] = k.new_tensor((-(2.0**b), 2.0**b))
        v[0, 1 + turn, turn] = 1.0
    q[..., 1] = 1.0
    for row in range(q.shape[1]):
        b = places[row // steps % len(places)]
        q[0, row, 0] = 1.0 + row % steps * 2.0**-b
    # A scale of 1: where its square root is multiplied into q and k, nothing is rounded.
    out = asker.finite(scene(asker.dtype, q, k, v, scale=1.0)).out[0]
    return coarsest(
        (b, out[turn * steps : (turn + 1) * steps, turn].tolist()) for turn, b in enumerate(places)
    )


def of_v(asker: Asker) -> Grid | None:
    """Bits of v: one key has all the weight, and what comes out of 1 + x · 2^-b is looked at.

    Raises:
        Unanswered: where there are no outputs.
    """
    places, steps = _exponents(asker.dtype)
    each = DIM // STEPS
    heads = -(-len(places) // each)
    q, k, v = blank(heads)
    q[..., 0], k[:, 1:, 0] = 1.0, _GONE
    for turn, b in enumerate(places):
        for x in range(steps):
            v[turn // each, 0, turn % each * STEPS + x] = 1.0 + x * 2.0**-b
    out = asker.finite(scene(asker.dtype, q, k, v)).out
    return coarsest(
        (b, out[turn // each, 0, turn % each * STEPS :][:steps].tolist())
        for turn, b in enumerate(places)
    )


def _exponents(dtype: str) -> tuple[list[int], int]:
    """Those b for which 1 + x · 2^-b is stored, to the format's last bit; and how many x there are.

    Of 3 bits 1 + x/4 for four x, of others eight.
    """
    bits = dtype_named(dtype).storage.significand
    if bits < STEPS.bit_length():
        return [bits - 1], 2 ** (bits - 1)
    return list(range(3 + bits % 2, bits, 2)), STEPS
