"""How many bits q·k and P·V are added up in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.examine.fingerprint.grids import STEPS, Grid, coarsest
from attncheck.examine.fingerprint.scene import DIM, GROUP, blank, every, scene

if TYPE_CHECKING:
    import torch

    from attncheck.examine.fingerprint.asker import Asker

__all__ = ["of_scores", "of_values"]

_SPLIT = 13  # q holds 2^b up to here, beyond it a column of k brings 2^13: e4m3 has both
_SCORES = range(3, 28, 2)
# Columns of q and k that hold 2^b, small and large, and x: beside each other, far apart, and the
# other way about.
_PLACES = ((0, 2, 1), (0, 2, DIM - 1), (DIM - 1, DIM - 3, 0))


def of_scores(asker: Asker) -> Grid | None:
    """Bits of q·k: row by row, of which x = 0 … 7 the sum 2^b + x keeps a trace.

    Key x of each group has the score 2^b + x in the row of b. What is held as the same number has
    the same weight.

    Raises:
        Unanswered: where there are no outputs.
    """
    q, k, v = blank(len(_PLACES))
    for head, (low, high, small) in enumerate(_PLACES):
        k[head, :, low], k[head, :, high], q[head, :, small] = 1.0, 2.0**_SPLIT, 1.0
        for row in range(q.shape[1]):
            b = _SCORES[row % len(_SCORES)]
            column, less = (low, 0) if b <= _SPLIT else (high, _SPLIT)
            q[head, row, column] = 2.0 ** (b - less)
        for key in range(k.shape[1]):
            k[head, key, small] = key % GROUP % STEPS
        for x in range(STEPS):
            v[head, x, x] = 1.0
    told = asker.ask(scene(asker.dtype, q, k, v))
    return coarsest(
        (b, told.out[head, row, :STEPS].tolist())
        for head in range(len(_PLACES))
        for row, b in enumerate(_SCORES)
    )


_HALF = GROUP // 2  # keys of a group that have weight 1; the others have 2^-6, which e4m3 holds
_LIGHT, _VANISHES = -6.0, -32.0
_SHARES = 2 * _HALF  # keys that hold a share of 1.5 · 2^b each: those of two groups
# The first group of those that hold +, that of x, and the first of those that hold −: + and x meet
# before + and − do, from whichever end.
_ORDERS = ((0, 4, 6), (1, 0, 6))
_UNUSED = 3 * GROUP + _HALF - 1  # makes of a row sum of 65 one of 64: dividing by it is exact
_LOW, _HIGH = range(3, 10, 2), range(11, 26, 2)
_EACH = DIM // STEPS  # exponents of a head


def of_values(asker: Asker) -> Grid | None:
    """Bits of P·V: of which x the sum 1.5 · 2^b + x − 1.5 · 2^b keeps a trace.

    Sixteen keys of weight 1 hold 1.5 · 2^b together, and sixteen others take it off again; one of
    weight 2^-6 holds 64 x. Each (b, x) has a column, up to a power of two.

    Raises:
        Unanswered: where there are no outputs.
    """
    ladders = [(order, ladder) for order in _ORDERS for ladder in (_LOW, _HIGH)]
    q, k, v = blank(len(ladders))
    q[..., 0] = 1.0
    for offset in range(_HALF, GROUP):
        k[:, every(offset), 0] = _LIGHT
    k[:, _UNUSED, 0] = _VANISHES
    for head, ((plus, light, minus), ladder) in enumerate(ladders):
        # Of the small ones what is stored is larger: they share a scale with x.
        unit = 2.0 ** (2 if ladder is _LOW else -8)
        for turn, b in enumerate(ladder):
            columns = slice(turn * STEPS, (turn + 1) * STEPS)
            part = 1.5 * 2.0**b * unit * 2.0**_LIGHT / _SHARES
            for first, sign in ((plus, 1), (minus, -1)):
                for start in (first * GROUP, (first + 1) * GROUP):
                    v[head, start : start + _HALF, columns] = sign * part
            v[head, light * GROUP + _HALF, columns] = v.new_tensor(range(STEPS)) * unit
    told = asker.ask(scene(asker.dtype, q, k, v))
    return coarsest(_steps(told.out, [ladder for _, ladder in ladders]))


def _steps(out: torch.Tensor, ladders: list[range]) -> list[tuple[int, list[float]]]:
    return [
        (b, out[head, 0, turn * STEPS : (turn + 1) * STEPS].tolist())
        for head, ladder in enumerate(ladders)
        for turn, b in enumerate(ladder)
    ]
