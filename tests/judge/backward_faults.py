"""Faults of a backward, planted in ``backward_kernels.Backward``."""

import torch
from tests.judge import backward_kernels as kernels

from attncheck.inputs.problem import Problem

Backward = kernels.Backward


class NoDelta(Backward):
    """delta is not taken off; dLSE is."""

    def delta(self, dout, out):
        return torch.zeros_like(super().delta(dout, out))


class DeltaInBf16(Backward):
    def delta(self, dout, out):
        return super().delta(dout, out).bfloat16().float()


class LseInBf16(Backward):
    """What the backward reads; what the forward gives is right."""

    def saved_lse(self, lse):
        return lse.bfloat16().float()


class NoDlse(Backward):
    def loss(self, inputs):
        dout, dlse = super().loss(inputs)
        return dout, torch.zeros_like(dlse)


class DkWithoutScale(Backward):
    def key_scale(self, scale):
        del scale
        return 1.0


class TileSkipped(Backward):
    """The last tile of queries has no part in any sum."""

    def query_tiles(self, length):
        found = super().query_tiles(length)
        return found[1:] if self.reverse else found[:-1]


class LastRowDropped(Backward):
    def query_tiles(self, length):
        return super().query_tiles(length - 1)


class CausalIgnored(Backward):
    """By the backward alone."""

    def seen(self, problem: Problem):
        return torch.ones_like(super().seen(problem))


class NoSlope(Backward):
    def slope(self, mod, scores, at):
        return torch.ones_like(scores)


class HeadDropped(Backward):
    """Key heads have the gradient of the first head of their group alone."""

    def by_group(self, x, problem: Problem):
        return x.unflatten(1, (problem.kv_heads, problem.group))[:, :, 0]


FAULTS = (
    NoDelta,
    DeltaInBf16,
    LseInBf16,
    NoDlse,
    DkWithoutScale,
    TileSkipped,
    LastRowDropped,
    CausalIgnored,
    HeadDropped,
)
