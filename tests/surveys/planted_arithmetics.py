"""Ideal kernels whose arithmetic is not the declared one."""

from dataclasses import replace

import torch
from tests.planted_kernels.other_steps import stepping
from tests.planted_kernels.outputs_given import spoiled

from attncheck.core.formats import FORMATS
from attncheck.subjects.capabilities.subject import Refused, Subject, Tiling
from attncheck.subjects.ideal import Ideal

NARROW = Tiling(block_query=128, block_kv=32)
"""A tile has fewer keys than q has columns, so that P is recognised by its shape."""


class Misdeclared(Subject):
    """Computes as one kernel and declares another one's arithmetic."""

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


def without_bits(x, count):
    """Truncates fp32 numbers by setting their last ``count`` bits to 0."""
    return (x.contiguous().view(torch.int32) & -(1 << count)).view(torch.float32)


def change_weights(change):
    def operand(self, values, fmt):
        is_p = values.shape[-1] == NARROW.block_kv
        return change(values) if is_p else Ideal.operand(self, values, fmt)

    return stepping(NARROW, operand=operand)


def round_weights(dtype):
    return change_weights(lambda p: p.to(dtype).float())


def rounded_row_sum(self, p, problem, scale):
    return self.operand(p * scale, problem.formats.weights).sum(-1) / scale


def truncate_out(_, running, part):
    """Truncates the running sum of O to 16 bits; the row sum keeps fp32."""
    total = running + part
    return total if total.dim() < 4 else without_bits(total, 8)


def flush_subnormals(self, values, fmt):
    rounded = Ideal.operand(self, values, fmt)
    return torch.where(rounded.abs() < 2.0**fmt.min_exponent, 0.0, rounded)


def exp2_of_10_bits(self, exponent):
    significand, power = torch.frexp(Ideal.exp2(self, exponent))
    return torch.ldexp(torch.round(significand * 2**10) / 2**10, power)


def without_masks(self, inputs):
    if inputs.problem.mask.name != "full":
        raise Refused("no masks")
    return Ideal.prepare(self, inputs)


def raises(*_):
    raise RuntimeError("out of order")


P_TRUNCATED = change_weights(lambda p: without_bits(p, 16))
P_UNSCALED = stepping(weights_scale=lambda *_: 1.0)
SUMS_ROUNDED_P = stepping(row_sum=rounded_row_sum)
SCORES_IN_BF16 = stepping(scores=lambda _, products: products.bfloat16().float())
OUT_OF_16_BITS = stepping(added=truncate_out)
FLUSHES_TO_ZERO = stepping(operand=flush_subnormals)
SHORT_EXP = stepping(exp2=exp2_of_10_bits)
READS_TF32 = stepping(operand=lambda self, x, _: Ideal.operand(self, x, FORMATS["tf32"]))
WITHOUT_LSE = spoiled(lambda _, right: replace(right, lse=None))
GIVES_NAN = spoiled(lambda _, right: replace(right, out=right.out * float("nan")))
RAISES = stepping(prepare=raises)
# Takes no mask, and no more than 128 keys.
SHORT = stepping(
    prepare=without_masks,
    unsupported=lambda _, problem, device: "more than 128 keys" if problem.kv > 128 else None,
)


def sentinel(score):
    return stepping(hidden_score=score)
