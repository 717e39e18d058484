"""Faults of a backward, planted by overriding methods of ``backward_kernels.Backward``."""

import torch
from tests.judge import backward_kernels as kernels

from attncheck.inputs.problem import Problem

Backward = kernels.Backward


class NoDelta(Backward):
    """delta is not subtracted; dLSE still is."""

    def delta(self, dout, out):
        return torch.zeros_like(super().delta(dout, out))


class DeltaInBf16(Backward):
    def delta(self, dout, out):
        return super().delta(dout, out).bfloat16().float()


class LseInBf16(Backward):
    """The backward reads a rounded LSE; the forward still returns the right one."""

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
    """The last tile of queries is left out of every sum."""

    def query_tiles(self, length):
        tiles = super().query_tiles(length)
        return tiles[1:] if self.reverse else tiles[:-1]


class LastRowDropped(Backward):
    def query_tiles(self, length):
        return super().query_tiles(length - 1)


class CausalIgnored(Backward):
    """The backward alone ignores the mask."""

    def seen(self, problem: Problem):
        return torch.ones_like(super().seen(problem))


class NoSlope(Backward):
    def slope(self, mod, scores, at):
        return torch.ones_like(scores)


class HeadDropped(Backward):
    """Key heads get the gradient of the first query head of their group alone."""

    def sum_group(self, x, problem: Problem):
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
