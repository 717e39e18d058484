"""What a kernel gives for rows that see no key: checked, then brought to 0 and -∞ for the judge."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from attncheck.capabilities.subject import capability
from attncheck.core.formats import spacing
from attncheck.judge.declared_arithmetic import default

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.core.outputs import Outputs
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Problem

__all__ = ["WrongEmptyRows", "empty_rows", "mean_allowance", "settle_empty_rows"]


class WrongEmptyRows(Exception):
    """Rows that see no key are not what the kernel is declared to give; in one line."""


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
        dead: The rows, where ``empty_rows`` has been asked already.

    Raises:
        EmptyRowsWrong: for rows that see no key and are something else.
    """
    out, lse = outputs.out, outputs.lse
    if not _whole(outputs, inputs):
        return outputs
    if dead is None:
        dead = empty_rows(inputs.problem, inputs.device)
    if not bool(dead.any()):
        return outputs
    if how == "zero":
        lse = None if lse is None else _plain(lse, dead & _among(lse, empty_lse))
        return dataclasses.replace(outputs, lse=lse)
    _check(how, outputs, inputs, dead, empty_lse)
    return dataclasses.replace(
        outputs,
        out=torch.where(dead[..., None], torch.zeros_like(out), out),
        lse=None if lse is None else _plain(lse, dead),
    )


def empty_rows(problem: Problem, device: str | torch.device = "cpu") -> torch.Tensor:
    """Which rows see no key, bool ``(batch, heads, query)``: by the mask's own callable."""
    at = (
        torch.arange(problem.batch, device=device).view(-1, 1, 1, 1),
        torch.arange(problem.heads, device=device).view(1, -1, 1, 1),
        torch.arange(problem.query, device=device).view(1, 1, -1, 1),
    )
    shape = (problem.batch, problem.heads, problem.query)
    mask = problem.mask_mod(str(device))
    dead = torch.ones(shape, dtype=torch.bool, device=device)
    step = max(1, _AT_A_TIME // math.prod(shape))
    for start in range(0, problem.kv, step):
        keys = torch.arange(start, min(start + step, problem.kv), device=device)
        dead &= ~_wide(mask(*at, keys.view(1, 1, 1, -1))).any(-1)
        if not bool(dead.any()):
            break
    return dead


# Mask elements held at a time.
_AT_A_TIME = 2**24


def _wide(seen: torch.Tensor) -> torch.Tensor:
    return seen.view(*(1,) * (4 - seen.dim()), *seen.shape)


def _whole(outputs: Outputs, inputs: Inputs) -> bool:
    """Whether there is something to look at."""
    problem = inputs.problem
    rows = (problem.batch, problem.heads, problem.query)
    wanted = {"out": (*rows, problem.value_dim), "lse": rows}
    for name, shape in wanted.items():
        tensor = getattr(outputs, name)
        if name == "lse" and tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != shape:
            return False
        if tensor.device != inputs.device or not tensor.is_floating_point():
            return False
    return True


def _plain(lse: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    return torch.where(where, torch.full_like(lse, -math.inf), lse)


def _among(lse: torch.Tensor, values: tuple[float, ...]) -> torch.Tensor:
    found = torch.zeros_like(lse, dtype=torch.bool)
    for value in values:
        found |= lse == value
    return found


def _check(
    how: str,
    outputs: Outputs,
    inputs: Inputs,
    dead: torch.Tensor,
    empty_lse: tuple[float, ...],
) -> None:
    right, wanted = _RULES[how](outputs.out, inputs)
    wrong = dead & ~right
    if bool(wrong.any()):
        raise WrongEmptyRows(_said("out", outputs.out, wrong, wanted))
    lse = outputs.lse
    if how == "nan" and lse is not None:
        wrong = dead & ~(lse.isnan() | _among(lse, empty_lse))
        if bool(wrong.any()):
            raise WrongEmptyRows(_said("lse", lse, wrong, "NaN or -inf"))


def _said(name: str, tensor: torch.Tensor, wrong: torch.Tensor, wanted: str) -> str:
    b, h, q = (int(i) for i in wrong.nonzero()[0])
    value = tensor[b, h, q].flatten()[0].item()
    return (
        f"{name}[{b}, {h}, {q}] begins with {value:g}, but the row sees no key and should be "
        f"{wanted}, as declared: {int(wrong.sum())} rows are not"
    )


def _all_nan(out: torch.Tensor, inputs: Inputs) -> tuple[torch.Tensor, str]:
    del inputs
    return out.isnan().all(-1), "NaN"


def _mean(out: torch.Tensor, inputs: Inputs) -> tuple[torch.Tensor, str]:
    """Within ``mean_allowance`` of the float64 mean; where V is not finite it is not asked."""
    problem = inputs.problem
    values = inputs.promoted()[2].repeat_interleave(problem.group, dim=1)
    mean = values.mean(2, keepdim=True)
    allowed = mean_allowance(inputs)
    near = ((out.double() - mean).abs() <= allowed) | ~mean.isfinite() | ~allowed.isfinite()
    return near.all(-1), "the mean of V"


def mean_allowance(inputs: Inputs) -> torch.Tensor:
    """How far a right kernel may be from the mean of V: float64 ``(batch, heads, 1, value_dim)``.

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
    problem = inputs.problem
    arithmetic = default(problem.formats, capability(inputs.device.type))
    n = problem.kv
    unit = arithmetic.unit
    weight = (2 * arithmetic.exp2_ulps + 3 * n + 2) * unit + arithmetic.weights_error
    weight += n * arithmetic.weights.subnormal_spacing / 2
    summed = arithmetic.values.det(float(n))
    ratio = _both(weight) * _both(summed) * (1 + arithmetic.operand_error)
    relative = ratio - 1 + n * 2.0**-53
    values = inputs.promoted()[2].repeat_interleave(problem.group, dim=1)
    size = values.abs().mean(2, keepdim=True)
    inner = relative * size
    largest = values.mean(2, keepdim=True).abs() + inner
    return inner + 2 * unit * largest + spacing(largest, arithmetic.output) / 2


def _both(error: float) -> float:
    """Of a numerator and a denominator that are each off by ``error``; without bound from 1 on."""
    return 1 + 2 * error / (1 - error) if error < 1 else math.inf


def _anything(out: torch.Tensor, inputs: Inputs) -> tuple[torch.Tensor, str]:
    del inputs
    return torch.ones_like(out[..., 0], dtype=torch.bool), "anything"


_RULES: dict[str, Callable[[torch.Tensor, Inputs], tuple[torch.Tensor, str]]] = {
    "nan": _all_nan,
    "mean": _mean,
    "unspecified": _anything,
}
