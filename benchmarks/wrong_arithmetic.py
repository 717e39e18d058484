"""Kernels that round what they do not declare to round."""

# ruff: noqa: D102  # a method is the ideal kernel's; what is wrong with it the class says

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from wrong_structure import Planted

from attncheck.core.formats import FORMATS

if TYPE_CHECKING:
    from attncheck.core.formats import Format
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Problem


def rounded(values: torch.Tensor, name: str) -> torch.Tensor:
    """fp32 values in a format; beyond it infinite."""
    return values.to(FORMATS[name].torch_dtype).float()


class ScoresInBf16(Planted):
    """q·k is kept in bf16."""

    def scores(self, products: torch.Tensor) -> torch.Tensor:
        return rounded(products, "bf16")


class QueryInBf16(Planted):
    """scale · q is rounded to bf16 before the product."""

    def changed(self, inputs: Inputs) -> Inputs:
        scaled = rounded(inputs.q.float() * inputs.problem.scale, "bf16").to(inputs.q.dtype)
        return inputs.replace(problem=inputs.problem.replace(scale=1.0), q=scaled)


class OutInBf16(Planted):
    """O is kept in bf16 from tile to tile."""

    kept = "bf16"

    def added(self, running: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        total = super().added(running, part)
        return rounded(total, self.kept) if total.dim() == 4 else total


class OutInFp16(OutInBf16):
    """O is kept in fp16 from tile to tile."""

    kept = "fp16"


class SumInFp16(Planted):
    """The row sum is kept in fp16."""

    def row_sum(self, p: torch.Tensor, problem: Problem, scale: float) -> torch.Tensor:
        return rounded(super().row_sum(p, problem, scale), "fp16")

    def added(self, running: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        total = super().added(running, part)
        return rounded(total, "fp16") if total.dim() == 3 else total


class RoundedInSum(Planted):
    """The row sum takes the rounded P, which is not declared."""

    def row_sum(self, p: torch.Tensor, problem: Problem, scale: float) -> torch.Tensor:
        return self.operand(p * scale, problem.formats.weights).sum(-1) / scale


class Tf32ForFp32(Planted):
    """Products read fp32 operands in tf32."""

    def operand(self, values: torch.Tensor, fmt: Format) -> torch.Tensor:
        return super().operand(values, FORMATS["tf32"] if fmt.name == "fp32" else fmt)


class Exp2Off(Planted):
    """exp2 is wrong by up to 2^-10, as a short polynomial of the fraction is."""

    def exp2(self, exponent: torch.Tensor) -> torch.Tensor:
        exact = super().exp2(exponent).double()
        fraction = torch.nan_to_num(exponent.double() - exponent.double().floor())
        return (exact * (1 + 2.0**-10 * torch.sin(2 * math.pi * fraction))).float()


class Log2eInBf16(Planted):
    """log2 e is rounded to bf16."""

    log2_e = 1.4453125


class FourteenBits(Planted):
    """Sums of products keep 14 bits after every 32 of them."""

    def product(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(rows.shape[0], rows.shape[1], columns.shape[2], device=rows.device)
        for start in range(0, rows.shape[2], 32):
            step = slice(start, start + 32)
            total = total + torch.bmm(rows[:, :, step], columns[:, step])
            significand, exponent = torch.frexp(total)
            total = torch.ldexp(torch.trunc(significand * 2.0**14) / 2.0**14, exponent)
        return total


class Saturating(Planted):
    """A lazy maximum lets P reach 2^8, and P is scaled as if it were at most 1."""

    lazy = 8.0

    def weights_scale(self, problem: Problem) -> float:
        return problem.formats.weights_scale


class NoPrescale(Planted):
    """P is rounded to fp8 as it is, without the scale that it declares."""

    def weights_scale(self, problem: Problem) -> float:
        del problem
        return 1.0
