"""The exact rule: where equal largest scores share a row's whole weight, out counts their values.

``docs/probes.md`` proves that a right kernel's counts are off by less than a quarter, and so never
by a half.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attncheck.formats import FORMATS
from attncheck.probes.finding import Finding
from attncheck.probes.margins import HALF, USUAL, WeightErrors
from attncheck.probes.tied_rows import TiedRows, tied_rows
from attncheck.probes.wrong_keys import what_is_wrong

if TYPE_CHECKING:
    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.probes.finding import Seen

__all__ = ["tied_keys"]

_SEVERAL = 8  # bf16 roundings: a smaller difference is told as one of rounding or of a factor


def tied_keys(
    inputs: Inputs, outputs: Outputs, seen: Seen, *, errors: WeightErrors = USUAL
) -> Finding | None:
    """The first row, by batch, head and row, whose counts are wrong; None where none is.

    Args:
        inputs: Of a probe.
        outputs: What a kernel gave, finite in every row that sees a key.
        seen: What the mask shows.
        errors: Of the kernel's weights.

    Out: |out · keys − Σ of the tied keys' values| must be below half a unit of V; and where their
    number is a power of two, out must be the mean of their values, rounded once. LSE, of rows
    whose scores are all 0: exp(LSE), the number of keys, must be off by less than a half. A row is
    not asked where a right kernel's rounding could use more than a quarter.
    """
    first: tuple[tuple[int, int, int], str, TiedRows] | None = None
    count = compared = 0
    for rows in tied_rows(inputs, seen, errors=errors):
        wrong, asked = _wrong(rows, outputs)
        both = wrong["out"] | wrong["lse"]
        count, compared = count + int(both.sum()), compared + int(asked.sum())
        for place in both.nonzero().tolist()[:1] if first is None else []:
            b, h, i = place
            tensor = "out" if bool(wrong["out"][b, h, i]) else "lse"
            first = ((b, h, i), tensor, rows)
    if first is None:
        return None
    return _finding(inputs, outputs, *first, count=count, compared=compared)


def _wrong(rows: TiedRows, outputs: Outputs) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    here = slice(rows.query.start, rows.query.stop)
    out = outputs.out[:, :, here].double()
    off = (out * rows.keys[..., None] - rows.sums).abs()
    counted = (off < HALF * rows.unit[..., None]).all(-1)
    mean = rows.sums / rows.keys.clamp(min=1.0)[..., None]
    rounded = (rows.once.isinf() | ((out - mean).abs() <= rows.once)).all(-1)
    wrong = {"out": (rows.counts_out & ~counted) | ~rounded}
    wrong["lse"] = torch.zeros_like(wrong["out"])
    asked = rows.counts_out | rows.once.isfinite().all(-1)
    if outputs.lse is not None:
        lse = outputs.lse[:, :, here].double()
        used = rows.keys * torch.exp(lse - rows.lse)
        wrong["lse"] = rows.counts_lse & ~((used - rows.keys).abs() < HALF)
        asked = asked | rows.counts_lse
    return wrong, asked


def _finding(
    inputs: Inputs,
    outputs: Outputs,
    place: tuple[int, int, int],
    tensor: str,
    rows: TiedRows,
    *,
    count: int,
    compared: int,
) -> Finding:
    b, h, i = place
    query = rows.query[i]
    at = (b, h, i)
    out = outputs.out[b, h, query].double()
    lse = None if outputs.lse is None else float(outputs.lse[b, h, query])
    expected = rows.sums[at] / rows.keys[at]
    dim = int((out - expected).abs().argmax())
    used = 0.0 if lse is None else float(rows.keys[at] * torch.exp(lse - rows.lse[at]))
    key, what = _rounded_twice(out, rows, at) or what_is_wrong(
        inputs, (b, h, query), out, used, rows.tied[at]
    )
    got = (float(out[dim]), float(expected[dim])) if tensor == "out" else (lse, float(rows.lse[at]))
    return Finding(
        tensor=tensor,
        place=(b, h, query, key),
        dim=dim if tensor == "out" else -1,
        value=float(got[0] or 0.0),
        expected=got[1],
        what=what,
        count=count,
        compared=compared,
    )


def _rounded_twice(
    out: torch.Tensor, rows: TiedRows, at: tuple[int, int, int]
) -> tuple[int, str] | None:
    """That out is nearly right: by several roundings, or by a factor near 1."""
    exact = rows.sums[at] / rows.keys[at]
    off = (out - exact).abs()
    near = bool((off <= _SEVERAL * FORMATS["bf16"].unit_roundoff * exact.abs()).all())
    if not near or not bool((off > rows.once[at]).any()):
        return None
    factor = float((out * exact).sum() / exact.square().sum())
    keys = int(rows.keys[at])
    mean = "the value of its key" if keys == 1 else f"the mean of the values of its {keys} keys"
    return -1, f"out is not {mean}, rounded once, but about {factor:.5g} times that"
