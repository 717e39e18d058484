"""The exact rule of probes: if a row's largest scores tie, out times their number is a count.

``docs/reference/probes.md`` proves that a right kernel's counts are off by less than a quarter,
and so never by a half.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.core.formats import FORMATS, spacing
from attncheck.probes import margins
from attncheck.probes.margins import HALF, QUARTER, USUAL_WEIGHT_ERRORS, WeightErrors
from attncheck.probes.probe_inputs import amplitudes
from attncheck.probes.wrong_rows import describe_wrong_row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.core.outputs import Outputs
    from attncheck.inputs.input_tensors import Inputs

    Row = tuple[int, int, int]

VisibleKeys = Callable[[range], torch.Tensor]
"""Query rows → the keys that they see: bool, broadcastable to ``(batch, heads, rows, kv)``."""

_SCORES_AT_A_TIME = 1 << 22
_VALUE_BITS = 3  # Significant bits of V that ``store_inputs`` holds exactly in every dtype.
_SEVERAL = 8  # Differences up to this many bf16 roundings are described as rounding or a factor.


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Rows whose counts are wrong, described by the first of them."""

    tensor: str  # ``out`` or ``lse``
    # The first wrong row and its wrong key: (batch, head, query, key); key −1 if none is
    # identified.
    place: tuple[int, int, int, int]
    dim: int  # column of out with the row's largest error; −1 in LSE
    value: float  # the kernel's number there
    expected: float  # the right number there
    what: str  # what is wrong with the row, in words: ``key 7 is missing``
    count: int  # number of wrong rows
    compared: int  # number of rows compared

    @property
    def message(self) -> str:
        """The finding in one line."""
        batch, head, query, _ = self.place
        where = f"{self.tensor}[{batch}, {head}, {query}"
        where += f", {self.dim}]" if self.tensor == "out" else "]"
        verb = "is" if self.count == 1 else "are"
        return (
            f"batch {batch}, head {head}, row {query}: {self.what} "
            f"({where} = {self.value:.9g}, but should be {self.expected:.9g}; "
            f"{self.count} of {self.compared} rows {verb} wrong)"
        )

    def __str__(self) -> str:
        return self.message


# ------------------------------------------------------------------ right results of rows


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TiedRows:
    """Right results of rows by counting, float64 ``(batch, heads, rows[, value_dim | kv])``."""

    query: range
    tied: torch.Tensor  # bool: the keys with the largest score that a row sees
    keys: torch.Tensor  # number of tied keys; 0 in rows that see none
    sums: torch.Tensor  # Σ of the tied keys' values
    # Largest |out − sums / keys| of an out that is rounded once. Infinite if ``keys`` is no power
    # of two, if P may be divided by a row sum that is none, or if a sum of values loses bits: then
    # only the error bound can judge.
    once: torch.Tensor
    unit: torch.Tensor  # values are whole multiples of it, ``(batch, heads, 1)``: ``amplitudes``
    lse: torch.Tensor  # right LSE
    # counts_out, counts_lse: bool: whether rounding moves the count by less than a quarter.
    counts_out: torch.Tensor
    counts_lse: torch.Tensor


def iterate_tied_rows(
    inputs: Inputs, visible: VisibleKeys, *, errors: WeightErrors = USUAL_WEIGHT_ERRORS
) -> Iterator[TiedRows]:
    """Yield all rows, some at a time."""
    problem = inputs.problem
    q, k, v = inputs.promoted()
    k, v = (x.repeat_interleave(problem.group, dim=1) for x in (k, v))
    unit = amplitudes(problem).repeat_interleave(problem.group, dim=1).to(q.device)
    # Values are 3-bit integers times powers of two; ``finest`` is the last bit of the smallest.
    nonzero = v.abs().masked_fill(v == 0, torch.inf).flatten(2).amin(-1)
    finest = torch.pow(2.0, torch.frexp(nonzero)[1] - _VALUE_BITS).double()[..., None, None]
    step = max(1, _SCORES_AT_A_TIME // (problem.batch * problem.heads * problem.kv))
    for start in range(0, problem.query, step):
        query = range(start, min(start + step, problem.query))
        rows = q[:, :, query.start : query.stop]
        scores = rows @ k.mT * problem.scale
        seen = visible(query).expand_as(scores)
        largest = scores.masked_fill(~seen, -torch.inf).amax(-1, keepdim=True)
        top = torch.where(largest.isinf(), 0.0, largest)
        tied = seen & (scores == top)
        others = seen & ~tied
        # A score's rounding error depends on the magnitudes of its terms, not on their sum.
        terms = (rows.abs() @ k.mT.abs() * problem.scale).masked_fill(~tied, 0.0)
        terms = terms.amax(-1, keepdim=True)
        below = (scores - top).masked_fill(~others, -torch.inf)
        some = tied.any(-1)
        if problem.formats.products.significand < FORMATS["fp32"].significand:
            some = some & _tie_when_rounded(rows, k, tied)
        apart = some & (below.amax(-1) <= -margins.GAP)
        alone = some & ~others.any(-1)

        # With a last axis of 1 to broadcast against columns of V.
        number = tied.sum(-1, keepdim=True).double()
        sums, sizes = tied.double() @ v, tied.double() @ v.abs()
        rest = below.exp().sum(-1, keepdim=True)  # weights relative to one of the tied keys
        # 4ωM of the derivation; rounding to nearest at most doubles a small weight.
        moved = 4 * rest * v.abs().flatten(2).amax(-1)[..., None, None]
        units = unit[..., None, None]
        exact = sizes <= finest * 2.0**errors.bits
        counts = margins.is_countable(
            problem, sizes / units, number, terms, moved / units, errors, exact=exact
        ).all(-1)
        # The error before the output is rounded, and half an ulp of out.
        divisor = number.clamp(min=1.0)
        before = (sizes * margins.error_before_rounding(problem, terms, errors) + moved) / divisor
        half = spacing((sums / divisor).abs() + before, problem.formats.output) * HALF
        power_of_two = apart[..., None] & (torch.frexp(number)[0] == HALF) & exact
        if errors.divides:
            power_of_two = power_of_two & (errors.division(problem, number) == 0)
        keys = number.squeeze(-1)
        lse_off = keys * torch.expm1(margins.lse_error(keys, errors))
        yield TiedRows(
            query=query,
            tied=tied,
            keys=keys,
            sums=sums,
            once=torch.where(power_of_two, before + half, torch.inf),
            unit=unit[..., None],
            lse=(top + torch.log(number + rest)).squeeze(-1),
            counts_out=apart & counts,
            counts_lse=alone & (top == 0).squeeze(-1) & (lse_off < QUARTER),
        )


def _tie_when_rounded(q: torch.Tensor, k: torch.Tensor, tied: torch.Tensor) -> torch.Tensor:
    """Return whether scores still tie if q is rounded, bool ``(batch, heads, rows)``.

    In a kernel that rounds scale · q, scores may no longer tie unless they are sums of the same
    products, since three times a rounded number is not the rounded triple. This happens in the
    probe ``isolated``, where q has numbers of two magnitudes and k of one: if Σ q·k and Σ q·|q|·k
    tie, then so do the sums over either magnitude. In other probes tied keys have the same k.
    """
    squared = (q * q.abs()) @ k.mT
    highest = squared.masked_fill(~tied, -torch.inf).amax(-1)
    lowest = squared.masked_fill(~tied, torch.inf).amin(-1)
    return highest <= lowest


# ------------------------------------------------------------------ checks of a kernel's results


def check_tied_keys(
    inputs: Inputs,
    outputs: Outputs,
    visible: VisibleKeys,
    *,
    errors: WeightErrors = USUAL_WEIGHT_ERRORS,
) -> Finding | None:
    """Return a finding of the first row with a wrong count, by batch, head and row; None if none.

    Out: |out · keys − Σ of the tied keys' values| must be below half a unit of V; and if their
    number is a power of two, out must be the mean of their values, rounded once. LSE of rows whose
    scores are all 0: exp(LSE), the number of keys, must be off by less than a half. Rows where a
    right kernel's rounding could take more than a quarter are not compared.

    Args:
        outputs: A kernel's results, finite in every row that sees a key.
    """
    first: tuple[Row, str, TiedRows] | None = None
    count = compared = 0
    for rows in iterate_tied_rows(inputs, visible, errors=errors):
        wrong, compared_rows = _find_wrong(rows, outputs)
        both = wrong["out"] | wrong["lse"]
        count, compared = count + int(both.sum()), compared + int(compared_rows.sum())
        if first is None and bool(both.any()):
            b, h, i = both.nonzero()[0].tolist()
            first = ((b, h, i), "out" if bool(wrong["out"][b, h, i]) else "lse", rows)
    if first is None:
        return None
    at, tensor, rows = first
    b, h, query = at[0], at[1], rows.query[at[2]]
    out = outputs.out[b, h, query].double()
    lse = None if outputs.lse is None else float(outputs.lse[b, h, query])
    expected = rows.sums[at] / rows.keys[at]
    used = 0.0 if lse is None else float(rows.keys[at] * torch.exp(lse - rows.lse[at]))
    key, what = _rounded_twice(out, rows, at) or describe_wrong_row(
        inputs, (b, h, query), out, used, rows.tied[at]
    )
    dim = int((out - expected).abs().argmax())
    of_out = tensor == "out"
    return Finding(
        tensor=tensor,
        place=(b, h, query, key),
        dim=dim if of_out else -1,
        value=float(out[dim]) if of_out else lse or 0.0,
        expected=float(expected[dim]) if of_out else float(rows.lse[at]),
        what=what,
        count=count,
        compared=compared,
    )


def _find_wrong(rows: TiedRows, outputs: Outputs) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the rows that are wrong in out and in LSE, and the rows that are compared."""
    here = slice(rows.query.start, rows.query.stop)
    out = outputs.out[:, :, here].double()
    off = (out * rows.keys[..., None] - rows.sums).abs()
    counted = (off < HALF * rows.unit[..., None]).all(-1)
    mean = rows.sums / rows.keys.clamp(min=1.0)[..., None]
    rounded = (rows.once.isinf() | ((out - mean).abs() <= rows.once)).all(-1)
    wrong = {"out": (rows.counts_out & ~counted) | ~rounded}
    wrong["lse"] = torch.zeros_like(wrong["out"])
    compared = rows.counts_out | rows.once.isfinite().all(-1)
    if outputs.lse is not None:
        lse = outputs.lse[:, :, here].double()
        used = rows.keys * torch.exp(lse - rows.lse)
        wrong["lse"] = rows.counts_lse & ~((used - rows.keys).abs() < HALF)
        compared = compared | rows.counts_lse
    return wrong, compared


def _rounded_twice(out: torch.Tensor, rows: TiedRows, at: Row) -> tuple[int, str] | None:
    """Describe an out that is off only by several roundings or a factor near 1; None otherwise."""
    exact = rows.sums[at] / rows.keys[at]
    off = (out - exact).abs()
    near = bool((off <= _SEVERAL * FORMATS["bf16"].unit_roundoff * exact.abs()).all())
    if not near or not bool((off > rows.once[at]).any()):
        return None
    factor = float((out * exact).sum() / exact.square().sum())
    keys = int(rows.keys[at])
    mean = "the value of its key" if keys == 1 else f"the mean of the values of its {keys} keys"
    return -1, f"out is not {mean}, rounded once, but about {factor:.5g} times that"
