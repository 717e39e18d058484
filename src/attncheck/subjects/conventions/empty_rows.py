"""Rows that see no key: checked as declared, then brought to 0 and -∞ for the judge."""

from __future__ import annotations

import dataclasses
import math

import torch

from attncheck.core.declared_arithmetic import default_arithmetic
from attncheck.core.formats import spacing
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Problem
from attncheck.subjects.capabilities.subject import capability

_AT_A_TIME = 2**24  # elements of a mask


class WrongEmptyRows(Exception):
    """Rows that see no key are not what the kernel is declared to give; in one line."""


def empty_rows(problem: Problem, device: str | torch.device = "cpu") -> torch.Tensor:
    """Rows that see no key, bool ``(batch, heads, query)``: by the mask's own callable."""
    at = (
        torch.arange(problem.batch, device=device).view(-1, 1, 1, 1),
        torch.arange(problem.heads, device=device).view(1, -1, 1, 1),
        torch.arange(problem.query, device=device).view(1, 1, -1, 1),
    )
    shape = (problem.batch, problem.heads, problem.query)
    mask = problem.mask_mod(str(device))
    dead = torch.ones(shape, dtype=torch.bool, device=device)
    # The whole mask of a long Problem may be larger than the memory.
    step = max(1, _AT_A_TIME // math.prod(shape))
    for start in range(0, problem.kv, step):
        keys = torch.arange(start, min(start + step, problem.kv), device=device)
        seen = mask(*at, keys.view(1, 1, 1, -1))
        dead &= ~seen.view(*(1,) * (4 - seen.dim()), *seen.shape).any(-1)
        # Most masks leave no row empty: one step of keys is enough to know.
        if not bool(dead.any()):
            break
    return dead


def settle_empty_rows(
    outputs: Outputs,
    inputs: Inputs,
    how: str,
    empty_lse: tuple[float, ...] = (-math.inf,),
    dead: torch.Tensor | None = None,
) -> Outputs:
    """``outputs`` with 0 and -∞ in rows that see no key, where they are what they should be.

    Args:
        outputs: Of the kernel; returned as they are where their shape or device is wrong, which
            the executor says. Gradients are.
        inputs: What it was given.
        how: ``zero``: out is 0, which is left to the judge. ``nan``: all of out is NaN (a plain
            softmax), and LSE NaN or one of ``empty_lse``. ``mean``: out is the mean of all keys'
            values up to rounding (a finite sentinel in place of -∞), and LSE anything.
            ``unspecified``: anything.
        empty_lse: What LSE may be there; -∞ or ∞.
        dead: The rows, where ``empty_rows`` has found them already.

    Raises:
        WrongEmptyRows: for rows that see no key and are something else.
    """
    out, lse = outputs.out, outputs.lse
    # A wrong shape is said by the executor, in better words.
    if not _is_complete(outputs, inputs):
        return outputs
    if dead is None:
        dead = empty_rows(inputs.problem, inputs.device)
    if not bool(dead.any()):
        return outputs

    def without(lse: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor | None:
        return None if lse is None else torch.where(rows, torch.full_like(lse, -math.inf), lse)

    # The judge compares out with 0 itself: only the way to say "no key" in LSE is settled.
    if how == "zero":
        of_no_key = dead if lse is None else dead & _is_among(lse, empty_lse)
        return dataclasses.replace(outputs, lse=without(lse, of_no_key))
    right, wanted = _right_rows(how, out, inputs)
    _require("out", out, dead & ~right, wanted)
    if how == "nan" and lse is not None:
        wrong = dead & ~(lse.isnan() | _is_among(lse, empty_lse))
        _require("lse", lse, wrong, "NaN or -inf")
    settled = torch.where(dead[..., None], torch.zeros_like(out), out)
    return dataclasses.replace(outputs, out=settled, lse=without(lse, dead))


def _is_complete(outputs: Outputs, inputs: Inputs) -> bool:
    problem = inputs.problem
    rows = (problem.batch, problem.heads, problem.query)
    for tensor, shape in ((outputs.out, (*rows, problem.value_dim)), (outputs.lse, rows)):
        if tensor is None and shape == rows:
            continue
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != shape:
            return False
        if tensor.device != inputs.device or not tensor.is_floating_point():
            return False
    return True


def _is_among(lse: torch.Tensor, values: tuple[float, ...]) -> torch.Tensor:
    among = torch.zeros_like(lse, dtype=torch.bool)
    for value in values:
        among |= lse == value
    return among


def _require(name: str, tensor: torch.Tensor, wrong: torch.Tensor, wanted: str) -> None:
    if not bool(wrong.any()):
        return
    b, h, q = (int(i) for i in wrong.nonzero()[0])
    value = tensor[b, h, q].flatten()[0].item()
    raise WrongEmptyRows(
        f"{name}[{b}, {h}, {q}] begins with {value:g}, but the row sees no key and should be "
        f"{wanted}, as declared: {int(wrong.sum())} rows are not"
    )


def _right_rows(how: str, out: torch.Tensor, inputs: Inputs) -> tuple[torch.Tensor, str]:
    """Rows that are as declared, were they empty, and what that is."""
    if how == "nan":
        return out.isnan().all(-1), "NaN"
    if how == "unspecified":
        return torch.ones_like(out[..., 0], dtype=torch.bool), "anything"
    mean = inputs.promoted()[2].repeat_interleave(inputs.problem.group, dim=1).mean(2, keepdim=True)
    allowed = mean_allowance(inputs)
    # A mean of ∞ or NaN has no neighbourhood: nothing can be said of such a row.
    near = ((out.double() - mean).abs() <= allowed) | ~mean.isfinite() | ~allowed.isfinite()
    return near.all(-1), "the mean of V"


def mean_allowance(inputs: Inputs) -> torch.Tensor:
    """Allowed distance from the mean of V: float64 ``(batch, heads, 1, value_dim)``.

    All scores of the row are one number, so every weight is exp(0) = 1 in exact arithmetic. With u
    the unit roundoff of fp32, n keys, and A the mean of abs(V):

    * a weight, as P·V takes it and as the row sum takes it: exp2 is within ``exp2_ulps`` ulps, 2u
      each; rescaled at most n times, 3 roundings each; divided by the sum, 2 roundings; rounded to
      the weights' format, u_w, or by half of its smallest spacing where it is 1/n, already divided,
      and below the smallest normal number: of n weights that add up to 1. Relatively at most
      w = (2·exp2_ulps + 3n + 2)·u + u_w + n·spacing/2, above the line and below: 2w/(1 - w);
    * the sum of n products: d = ``Accumulator.det(n)``, B1 and B2 of the manual; of n weights the
      same at most: 2d/(1 - d). V is read with the products' error u_p;
    * together e = (1 + 2w/(1 - w))·(1 + 2d/(1 - d))·(1 + u_p) - 1 times A, of all terms' magnitude;
    * the last division, and half an ulp of the output's format at the largest that may come out.

    The mean itself is computed in float64: n·2^-53, which is added to e.
    """

    def both(error: float) -> float:  # of a numerator and a denominator; without bound from 1 on
        return 1 + 2 * error / (1 - error) if error < 1 else math.inf

    problem = inputs.problem
    arithmetic = default_arithmetic(problem.formats, capability(inputs.device.type))
    n = problem.kv
    unit = arithmetic.unit
    weight = (2 * arithmetic.exp2_ulps + 3 * n + 2) * unit + arithmetic.weights_error
    weight += n * arithmetic.weights.subnormal_spacing / 2
    summed = arithmetic.values.det(float(n))
    ratio = both(weight) * both(summed) * (1 + arithmetic.operand_error)
    relative = ratio - 1 + n * 2.0**-53
    values = inputs.promoted()[2].repeat_interleave(problem.group, dim=1)
    size = values.abs().mean(2, keepdim=True)
    inner = relative * size
    largest = values.mean(2, keepdim=True).abs() + inner
    return inner + 2 * unit * largest + spacing(largest, arithmetic.output) / 2
