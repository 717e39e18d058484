"""The ideal kernel with one fault each, which the class says: a row of the page's table."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Descale
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal

TILING = Tiling(block_query=32, block_kv=32)


class Planted(Ideal):
    name = "planted"
    tile = TILING

    def __init__(self):
        super().__init__(self.tile)

    def arithmetic(self, problem, device):
        """What the ideal kernel declares."""
        return Ideal(TILING).arithmetic(problem, device)

    def prepare(self, inputs):
        self.problem = inputs.problem
        call = super().prepare(self.changed(inputs))
        return lambda: self.spoiled(call())

    def changed(self, inputs):
        return inputs

    def spoiled(self, outputs):
        return outputs


class CausalPlus(Planted):
    """a causal row sees the key after its own"""

    def visible(self, mask, at):
        return super().visible(mask, replace(at, q_idx=at.q_idx + 1))


class CausalMinus(Planted):
    """a causal row does not see its own key"""

    def visible(self, mask, at):
        return super().visible(mask, replace(at, q_idx=at.q_idx - 1))


class WindowPlus(Planted):
    """a window one key longer"""

    by = 1

    def changed(self, inputs):
        window = inputs.problem.mask.values["window"] + self.by
        mask = Spec.of("sliding_window", window=window)
        return inputs.replace(problem=inputs.problem.replace(mask=mask))


class WindowMinus(WindowPlus):
    """a window one key shorter"""

    by = -1


class KeyDropped(Planted):
    """one key dropped"""

    key = 21

    def visible(self, mask, at):
        return super().visible(mask, at) & (at.kv_idx != self.key)


class KeyTwice(Planted):
    """a key read in place of its neighbour"""

    def changed(self, inputs):
        k, v = inputs.k.clone(), inputs.v.clone()
        k[:, :, 21], v[:, :, 21] = k[:, :, 22], v[:, :, 22]
        return inputs.replace(k=k, v=v)


class LastTileUnmasked(Planted):
    """the last tile unmasked"""

    def visible(self, mask, at):
        last = (self.problem.kv - 1) // self.tile.block_kv * self.tile.block_kv
        return super().visible(mask, at) | (at.kv_idx >= last)


class PaddingCounted(Planted):
    """zeros beyond the last key take part"""

    def inside(self, keys, kv):
        return torch.ones_like(keys, dtype=torch.bool)


class TopLeft(Planted):
    """causal from the top left for the bottom right"""

    def visible(self, mask, at):
        return at.q_idx >= at.kv_idx


def turned(inputs, axis):
    """Keys and values of the next key head or batch."""
    k, v = (torch.roll(x, -1, axis) for x in (inputs.k, inputs.v))
    descale = inputs.descale
    if descale is not None:
        kept = {name: torch.roll(getattr(descale, name), -1, axis) for name in "kv"}
        descale = Descale(q=descale.q, **kept)
    return inputs.replace(k=k, v=v, descale=descale)


class WrongKvHead(Planted):
    """keys and values of the next key head"""

    def changed(self, inputs):
        return turned(inputs, 1)


class WrongBatch(Planted):
    """keys and values of the next sequence"""

    def changed(self, inputs):
        return turned(inputs, 0)


class OneHeadWrong(Planted):
    """one head has the out of another"""

    def spoiled(self, outputs):
        out = outputs.out.clone()
        out[:, -1] = out[:, -1 - self.problem.group]
        return Outputs(out, outputs.lse)


class WrongColumn(Planted):
    """q read from its second column on"""

    def changed(self, inputs):
        return inputs.replace(q=torch.roll(inputs.q, -1, -1))


class DescaleOfFirstHead(Planted):
    """the first key head's descale for all"""

    def changed(self, inputs):
        descale = inputs.descale
        first = {name: getattr(descale, name)[:, :1].expand_as(descale.q) for name in "qkv"}
        return inputs.replace(descale=Descale(**{n: x.contiguous() for n, x in first.items()}))


class MaximumFromZero(Planted):
    """the maximum starts at 0"""

    first_maximum = 0.0


class NoMaximum(Planted):
    """no maximum subtracted"""

    first_maximum = 0.0

    def spoiled(self, outputs):
        overflown = outputs.lse > math.log(torch.finfo(torch.float32).max)
        out = torch.where(overflown[..., None], math.nan, outputs.out.float())
        return Outputs(out.to(outputs.out.dtype), outputs.lse)


class AlphaSkipped(Planted):
    """O never rescaled"""

    def rescaled(self, running, alpha):
        return running if running.dim() == 4 else super().rescaled(running, alpha)


class SumNotRescaled(Planted):
    """the row sum never rescaled"""

    def rescaled(self, running, alpha):
        return running if running.dim() == 3 else super().rescaled(running, alpha)


class SumSkipped(Planted):
    """O not divided by the row sum"""

    def normalised(self, out, total):
        return out


class ScaleOff(Planted):
    """the scale 1 % off"""

    by = 1.01

    def changed(self, inputs):
        return inputs.replace(problem=inputs.problem.replace(scale=inputs.problem.scale * self.by))


class BaseTwo(Planted):
    """log2 e missing"""

    by = math.log(2.0)

    changed = ScaleOff.changed


class Saturating(Planted):
    """P in fp8 saturates while the maximum lags"""

    tile = replace(TILING, lazy_rescale=8.0)

    def weights_scale(self, problem):
        return problem.formats.weights_scale


class NoPrescale(Planted):
    """P in fp8 not scaled"""

    def weights_scale(self, problem):
        return 1.0


class Smaller(Planted):
    """O times 0.999"""

    def normalised(self, out, total):
        return super().normalised(out, total) * 0.999


class LseInBaseTwo(Planted):
    """LSE to base 2"""

    def spoiled(self, outputs):
        return Outputs(outputs.out, outputs.lse * math.log2(math.e))


class Silent(Planted):
    """No LSE."""

    def spoiled(self, outputs):
        return Outputs(outputs.out)


class OutInBf16(Planted):
    """O kept in bf16 from tile to tile"""

    kept = torch.bfloat16

    def added(self, running, part):
        total = super().added(running, part)
        return total.to(self.kept).float() if total.dim() == 4 else total


class OutInFp16(OutInBf16):
    """O kept in fp16 from tile to tile"""

    kept = torch.float16


class CoarseExp(Planted):
    """exp2 is 5e-5 too small, also of 0, as torch 2.13's is in 16 bits on the CPU."""

    def exp2(self, exponent):
        return super().exp2(exponent) * (1 - 5e-5)


class DeclaredExp(CoarseExp):
    """The same, and says so."""

    def arithmetic(self, problem, device):
        return replace(super().arithmetic(problem, device), exp2_ulps=1024.0)
