"""Checks rows that see no key as declared, then sets them to 0 and -∞ for the judge."""

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
from attncheck.subjects.conventions.call_tensors import index_tensors

_AT_A_TIME = 2**24  # elements of a mask computed at a time


class WrongEmptyRows(Exception):
    """Raised if rows that see no key are not as the kernel declares, in one line."""


def empty_rows(problem: Problem, device: str | torch.device = "cpu") -> torch.Tensor:
    """Return which rows see no key, bool ``(batch, heads, query)``."""
    shape = (problem.batch, problem.heads, problem.query)
    mask = problem.mask_mod(str(device))
    dead = torch.ones(shape, dtype=torch.bool, device=device)
    # The whole mask of a long Problem may not fit into memory.
    step = max(1, _AT_A_TIME // math.prod(shape))
    for start in range(0, problem.kv, step):
        keys = range(start, min(start + step, problem.kv))
        seen = mask(*index_tensors(problem, device, range(problem.query), keys))
        dead &= ~seen.view(*(1,) * (4 - seen.dim()), *seen.shape).any(-1)
        # With most masks no row is empty, which the first step already shows.
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
    """Return ``outputs`` with 0 and -∞ in rows that see no key, once these are checked.

    Args:
        outputs: The kernel's outputs; returned unchanged if their shape or device is wrong, which
            the executor reports. Gradients are never changed.
        inputs: The kernel's inputs.
        how: ``zero``: out is 0, which is left to the judge. ``nan``: all of out is NaN (a plain
            softmax), and LSE NaN or one of ``empty_lse``. ``mean``: out is the mean of all keys'
            values up to rounding (a finite sentinel in place of -∞), and LSE anything.
            ``unspecified``: anything.
        empty_lse: The valid values of LSE there: -∞ or ∞.
        dead: The rows that ``empty_rows`` returns, if already computed.

    Raises:
        WrongEmptyRows: for rows that see no key and are not as declared.
    """
    out, lse = outputs.out, outputs.lse
    # The executor's message for a wrong shape is better.
    if not _is_complete(outputs, inputs):
        return outputs
    if dead is None:
        dead = empty_rows(inputs.problem, inputs.device)
    if not bool(dead.any()):
        return outputs

    def without(lse: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor | None:
        return None if lse is None else torch.where(rows, torch.full_like(lse, -math.inf), lse)

    # The judge itself compares out with 0, so only the kernel's LSE of empty rows is changed.
    if how == "zero":
        valid = dead if lse is None else dead & _is_among(lse, empty_lse)
        return dataclasses.replace(outputs, lse=without(lse, valid))
    right, expected = _right_rows(how, out, inputs)
    _require_none("out", out, dead & ~right, expected)
    if how == "nan" and lse is not None:
        wrong = dead & ~(lse.isnan() | _is_among(lse, empty_lse))
        _require_none("lse", lse, wrong, "NaN or -inf")
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


def _require_none(name: str, tensor: torch.Tensor, wrong: torch.Tensor, expected: str) -> None:
    if not bool(wrong.any()):
        return
    b, h, q = (int(i) for i in wrong.nonzero()[0])
    value = tensor[b, h, q].flatten()[0].item()
    raise WrongEmptyRows(
        f"{name}[{b}, {h}, {q}] begins with {value:g}, but the row sees no key and should be "
        f"{expected}, as declared: {int(wrong.sum())} rows are not"
    )


def _right_rows(how: str, out: torch.Tensor, inputs: Inputs) -> tuple[torch.Tensor, str]:
    """Return which rows would be right if they were empty, and a description of that."""
    if how == "nan":
        return out.isnan().all(-1), "NaN"
    if how == "unspecified":
        return torch.ones_like(out[..., 0], dtype=torch.bool), "anything"
    mean = inputs.promoted()[2].repeat_interleave(inputs.problem.group, dim=1).mean(2, keepdim=True)
    allowed = mean_allowance(inputs)
    # A mean of ∞ or NaN has no neighbourhood, so any result counts as right.
    near = ((out.double() - mean).abs() <= allowed) | ~mean.isfinite() | ~allowed.isfinite()
    return near.all(-1), "the mean of V"


def mean_allowance(inputs: Inputs) -> torch.Tensor:
    """Return the allowed distance from the mean of V, float64 ``(batch, heads, 1, value_dim)``.

    All scores of the row are equal, so every weight is exp(0) = 1 in exact arithmetic. With u the
    unit roundoff of fp32, n keys, and A the mean of abs(V):

    * a weight, in P·V and in the row sum: exp2 is within ``exp2_ulps`` ulps of 2u each; rescaled at
      most n times with 3 roundings each; divided by the sum, 2 roundings; rounded to the weights'
      format, u_w, or by half of its smallest spacing if the weight is already divided, 1/n, and
      below the smallest normal number. The relative error is at most
      w = (2·exp2_ulps + 3n + 2)·u + u_w + n·spacing/2, in numerator and denominator: 2w/(1 - w);
    * the sum of n products: d = ``Accumulator.det(n)``, B1 and B2 of the manual; the sum of n
      weights has at most the same error: 2d/(1 - d). V is read with the products' error u_p;
    * together e = (1 + 2w/(1 - w))·(1 + 2d/(1 - d))·(1 + u_p) - 1, times A;
    * the last division, and half an ulp of the output's format at the largest possible result.

    The mean itself is computed in float64, whose error n·2^-53 is added to e.
    """

    def both(error: float) -> float:  # in numerator and denominator; unbounded from 1 on
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
