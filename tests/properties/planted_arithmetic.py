"""Kernels with a slip in the online softmax, in its tails, or in what they write at the end."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attncheck.core.outputs import Outputs
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal

if TYPE_CHECKING:
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.mods.signatures import MaskMod
    from attncheck.subjects.capabilities.subject import Call
    from attncheck.subjects.ideal import Index

LN2 = math.log(2.0)


class Slipping(Ideal):
    """Tiles of ``block``, of which several fit a small problem."""

    block = 16

    def __init__(self) -> None:
        super().__init__(Tiling(block_query=self.block, block_kv=self.block))
        self.name = f"planted-{type(self).__name__}"


class TailKeysAtZero(Slipping):
    """Keys that are not there have the score 0, and exp(0 − m) enters the row sum."""

    def inside(self, keys: torch.Tensor, kv: int) -> torch.Tensor:
        return torch.ones_like(keys, dtype=torch.bool)


class TailKeysAtZero32(TailKeysAtZero):
    """The same in tiles of 32."""

    block = 32


class LoopFloor(Slipping):
    """Keys of the last tile are not visited, unless it is whole or the only one."""

    def inside(self, keys: torch.Tensor, kv: int) -> torch.Tensor:
        return keys < (kv if kv < self.block else kv // self.block * self.block)


class LoopFloor32(LoopFloor):
    """The same in tiles of 32."""

    block = 32


class NotRescaled(Slipping):
    """Sum and output are not rescaled when the maximum moves: right within one tile."""

    def rescaled(self, running: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
        return running


class MaskSkippedWhenWhole(Slipping):
    """No mask where kv is a whole number of tiles: the fast path."""

    def visible(self, mask: MaskMod, at: Index) -> torch.Tensor:
        seen = mask(at.b, at.h, at.q_idx, at.kv_idx)
        # In the last, ragged tile the padding keys are asked about as the last key.
        whole = bool(at.kv_idx.unique().numel() == self.block)
        return torch.ones_like(seen) if whole else seen


class MaximumFromZero(Slipping):
    """The running maximum starts at 0: a row of very negative scores is 0 divided by 0."""

    first_maximum = 0.0


class Sentinel(Slipping):
    """A hidden key has the score −1e6, and a row that sees none the mean of all values."""

    hidden_score = -1.0e6


class RoundedScores(Slipping):
    """q·k is kept in fp16."""

    def scores(self, products: torch.Tensor) -> torch.Tensor:
        return products.half().float()


class RoundedWeights(Slipping):
    """P in e4m3, whatever the dtype is."""

    def operand(self, values: torch.Tensor, fmt) -> torch.Tensor:
        values = super().operand(values, fmt)
        if values.dim() == 4 and values.shape[-1] == self.block:
            return values.to(torch.float8_e4m3fn).float()
        return values


class Spoiling(Slipping):
    """Spoils right outputs."""

    def prepare(self, inputs: Inputs) -> Call:
        call = super().prepare(inputs)
        return lambda: self.spoiled(inputs, call())

    def spoiled(self, inputs: Inputs, right: Outputs) -> Outputs:
        raise NotImplementedError


class Base2Lse(Spoiling):
    """LSE in base 2."""

    def spoiled(self, inputs: Inputs, right: Outputs) -> Outputs:
        assert right.lse is not None
        return Outputs(right.out, right.lse / LN2)


class UnscaledLse(Spoiling):
    """LSE of scores that are not scaled: the scale is multiplied in once too often."""

    def spoiled(self, inputs: Inputs, right: Outputs) -> Outputs:
        assert right.lse is not None
        return Outputs(right.out, right.lse * inputs.problem.scale)


class _EmptyRows(Spoiling):
    """Writes something else for rows that see no key."""

    def spoiled(self, inputs: Inputs, right: Outputs) -> Outputs:
        assert right.lse is not None
        return self.written(inputs, right, torch.isneginf(right.lse))

    def written(self, inputs: Inputs, right: Outputs, empty: torch.Tensor) -> Outputs:
        raise NotImplementedError


class EmptyRowsNan(_EmptyRows):
    """0 / 0."""

    def written(self, inputs: Inputs, right: Outputs, empty: torch.Tensor) -> Outputs:
        return Outputs(right.out.masked_fill(empty[..., None], math.nan), right.lse)


class EmptyRowsMean(_EmptyRows):
    """The mean of all values."""

    def written(self, inputs: Inputs, right: Outputs, empty: torch.Tensor) -> Outputs:
        mean = inputs.v.float().mean(2, keepdim=True).to(right.out.dtype)
        mean = mean.repeat_interleave(inputs.problem.group, 1).expand_as(right.out)
        return Outputs(torch.where(empty[..., None], mean, right.out), right.lse)


class EmptyRowsLseInf(_EmptyRows):
    """LSE +∞."""

    def written(self, inputs: Inputs, right: Outputs, empty: torch.Tensor) -> Outputs:
        assert right.lse is not None
        return Outputs(right.out, right.lse.masked_fill(empty, math.inf))


class LastColumnLost(Spoiling):
    """Value dims that are no power of two lose their last column."""

    def spoiled(self, inputs: Inputs, right: Outputs) -> Outputs:
        out = right.out.clone()
        dim = inputs.problem.value_dim
        if dim & (dim - 1):
            out[..., -1] = 0.0
        return Outputs(out, right.lse)


class HeadsApart(Spoiling):
    """The last bit of LSE depends on the number of the head and of the sequence."""

    def spoiled(self, inputs: Inputs, right: Outputs) -> Outputs:
        assert right.lse is not None
        lse = right.lse.clone()
        up = torch.full_like(lse, math.inf)
        lse[:, 1:] = torch.nextafter(lse, up)[:, 1:]
        lse[1:] = torch.nextafter(lse, up)[1:]
        return Outputs(right.out, lse)


class HiddenTimesZero(Spoiling):
    """Hidden values arrive as 0 · value: nothing, unless it is not finite."""

    def spoiled(self, inputs: Inputs, right: Outputs) -> Outputs:
        leak = (inputs.v.float() * 0.0).sum(2, keepdim=True)
        leak = leak.repeat_interleave(inputs.problem.group, 1)
        return Outputs((right.out.float() + leak).to(right.out.dtype), right.lse)


class HiddenKeysOverflow(Spoiling):
    """A hidden score beyond fp32 spoils the maximum, and with it the row."""

    def spoiled(self, inputs: Inputs, right: Outputs) -> Outputs:
        k = inputs.k.float().repeat_interleave(inputs.problem.group, 1)
        products = inputs.q.float() @ k.mT * 1.0e30
        leak = torch.where(products.isinf().any(-1), math.nan, 0.0)
        return Outputs((right.out.float() + leak[..., None]).to(right.out.dtype), right.lse)


class Biased(Spoiling):
    """Adds a little to every element."""

    def spoiled(self, inputs: Inputs, right: Outputs) -> Outputs:
        return Outputs((right.out.float() + 2.0**-20).to(right.out.dtype), right.lse)


class OutRoundedTwice(Slipping):
    """O in fp16 on its way to out."""

    def normalised(self, out: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return super().normalised(out, total).half().float()


class OutSaturates(Spoiling):
    """Out is cut off at ±1/2."""

    def spoiled(self, inputs: Inputs, right: Outputs) -> Outputs:
        return Outputs(right.out.float().clamp(-0.5, 0.5).to(right.out.dtype), right.lse)
