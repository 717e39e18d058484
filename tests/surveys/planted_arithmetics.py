"""Ideal kernels whose arithmetic is not what they declare."""

from __future__ import annotations

import dataclasses

import torch

from attncheck.core.formats import FORMATS
from attncheck.subjects.capabilities.subject import Refused, Subject, Tiling
from attncheck.subjects.ideal import Ideal

NARROW = Tiling(block_query=128, block_kv=32)
"""Keys of a tile that are not the columns of q: P is told by its shape."""


class Misdeclared(Subject):
    """Computes as one kernel and declares what another one does."""

    name = "misdeclared"
    summary = "declares what it does not"

    def __init__(self, runs, declares=None):
        self._runs, self._declares = runs, declares or Ideal(runs.tiling(None, "cpu"))

    def unsupported(self, problem, device):
        return self._runs.unsupported(problem, device)

    def prepare(self, inputs):
        return self._runs.prepare(inputs)

    def tiling(self, problem, device):
        return self._declares.tiling(problem, device)

    def arithmetic(self, problem, device):
        return self._declares.arithmetic(problem, device)


class PIn(Ideal):
    def __init__(self, dtype):
        super().__init__(NARROW)
        self._dtype = dtype

    def operand(self, values, fmt):
        if values.shape[-1] == NARROW.block_kv:
            return values.to(self._dtype).float()
        return super().operand(values, fmt)


class PTruncated(Ideal):
    def __init__(self):
        super().__init__(NARROW)

    def operand(self, values, fmt):
        if values.shape[-1] == NARROW.block_kv:
            return (values.contiguous().view(torch.int32) & -(1 << 16)).view(torch.float32)
        return super().operand(values, fmt)


class SumsRoundedP(Ideal):
    def row_sum(self, p, problem, scale):
        return self.operand(p * scale, problem.formats.weights).sum(-1) / scale


class ScoresInBf16(Ideal):
    def scores(self, products):
        return products.bfloat16().float()


class ValuesIn16Bits(Ideal):
    """Sixteen significant bits, truncated, of O."""

    def added(self, running, part):
        total = running + part
        if total.dim() < 4:
            return total
        return (total.contiguous().view(torch.int32) & -(1 << 8)).view(torch.float32)


class FiniteSentinel(Ideal):
    hidden_score = -1e4


class LargeSentinel(Ideal):
    hidden_score = -1e30


class LowestSentinel(Ideal):
    hidden_score = torch.finfo(torch.float32).min


class FlushesToZero(Ideal):
    def operand(self, values, fmt):
        held = super().operand(values, fmt)
        return torch.where(held.abs() < 2.0**fmt.min_exponent, 0.0, held)


class ShortExp(Ideal):
    """exp2 to ten bits."""

    def exp2(self, exponent):
        significand, power = torch.frexp(super().exp2(exponent))
        return torch.ldexp(torch.round(significand * 2**10) / 2**10, power)


class ReadsTf32(Ideal):
    def operand(self, values, fmt):
        return super().operand(values, FORMATS["tf32"])


class Unscaled(Ideal):
    def weights_scale(self, problem):
        return 1.0


class WithoutLse(Ideal):
    def prepare(self, inputs):
        call = super().prepare(inputs)
        return lambda: dataclasses.replace(call(), lse=None)


class Short(Ideal):
    """Takes no mask, and no more than 128 keys."""

    def unsupported(self, problem, device):
        return "more than 128 keys" if problem.kv > 128 else None

    def prepare(self, inputs):
        if inputs.problem.mask.name != "full":
            raise Refused("no masks")
        return super().prepare(inputs)


class GivesNan(Ideal):
    def prepare(self, inputs):
        call = super().prepare(inputs)
        return lambda: dataclasses.replace(call(), out=call().out * float("nan"))


class Raises(Ideal):
    def prepare(self, inputs):
        raise RuntimeError("out of order")
