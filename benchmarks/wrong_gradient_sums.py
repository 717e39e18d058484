"""Backwards that lose or mix up heads, sequences, strides, buffers, scales and sinks."""

# ruff: noqa: D102  # a method is the ideal kernel's; what is wrong with it the class says

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch
from wrong_gradients import BY_KEYS, BY_ROWS, WrongBackward, changed
from wrong_structure import TILING

from attncheck.subjects.ideal import Ideal

if TYPE_CHECKING:
    from torch import Tensor

    from attncheck.core.outputs import Outputs
    from attncheck.inputs.input_tensors import Inputs

_LOG2_E = math.log2(math.e)


class OneHeadOfTheGroup(WrongBackward):
    """dK and dV of shared keys are the first query head's: the others overwrite nothing."""

    only = BY_KEYS

    def heads(self, inputs: Inputs) -> Tensor:
        """Query heads whose part counts."""
        head = torch.arange(inputs.problem.heads, device=inputs.device)
        return head % inputs.problem.group == 0

    def read(self, inputs: Inputs) -> Inputs:
        assert inputs.dout is not None
        kept = self.heads(inputs)[:, None]
        dout = torch.where(kept[..., None], inputs.dout, torch.zeros_like(inputs.dout))
        return inputs.replace(dout=dout, dlse=None if inputs.dlse is None else inputs.dlse * kept)


class HeadLost(OneHeadOfTheGroup):
    """dK and dV lack the last query head's part."""

    def heads(self, inputs: Inputs) -> Tensor:
        head = torch.arange(inputs.problem.heads, device=inputs.device)
        return head < inputs.problem.heads - 1


class HeadsMeaned(WrongBackward):
    """dK and dV of shared keys are the mean over the query heads."""

    def spoiled(self, inputs: Inputs, outputs: Outputs) -> Outputs:
        return changed(outputs, lambda x: x / inputs.problem.group, *BY_KEYS)


class HeadsInterleaved(WrongBackward):
    """Query head h adds to key head h modulo their number."""

    def spoiled(self, inputs: Inputs, outputs: Outputs) -> Outputs:
        head = torch.arange(inputs.problem.heads, device=inputs.device)
        return _by_heads(inputs, outputs, head % inputs.problem.kv_heads)


class HeadsRounded(WrongBackward):
    """Each query head's dK and dV is rounded to the storage format before they are added in it."""

    def spoiled(self, inputs: Inputs, outputs: Outputs) -> Outputs:
        head = torch.arange(inputs.problem.heads, device=inputs.device)
        return _by_heads(inputs, outputs, head // inputs.problem.group)


def _by_heads(inputs: Inputs, outputs: Outputs, to: Tensor) -> Outputs:
    """Of dK and dV the rounded sums of every query head's own, rounded; of those ``to`` each."""
    problem = inputs.problem
    own = inputs.replace(
        problem=problem.replace(kv_heads=problem.heads),
        k=inputs.k.repeat_interleave(problem.group, 1),
        v=inputs.v.repeat_interleave(problem.group, 1),
    )
    alone = Ideal(TILING).run(own).gradients()

    def added(parts: Tensor, like: Tensor) -> Tensor:
        total = torch.zeros_like(like)
        for head, key_head in enumerate(to.tolist()):
            total[:, key_head] += parts[:, head]
        return total

    given = outputs.gradients()
    return dataclasses.replace(outputs, **{n: added(alone[n], given[n]) for n in BY_KEYS})


class KeyHeadsSwapped(WrongBackward):
    """dK of the first and the last key head are exchanged."""

    def spoiled(self, inputs: Inputs, outputs: Outputs) -> Outputs:
        order = list(range(inputs.problem.kv_heads))
        order[0], order[-1] = order[-1], order[0]
        return changed(outputs, lambda dk: dk[:, order], "dk")


class LossOfTheFirstHead(WrongBackward):
    """The last query head reads the first one's dO."""

    def read(self, inputs: Inputs) -> Inputs:
        assert inputs.dout is not None
        dout = inputs.dout.clone()
        dout[:, -1] = dout[:, 0]
        return inputs.replace(dout=dout)


class LossHeadsLast(WrongBackward):
    """dO is read by the strides of another layout: (batch, query, heads, dim)."""

    def read(self, inputs: Inputs) -> Inputs:
        assert inputs.dout is not None
        batch, heads, rows, dim = inputs.dout.shape
        other = inputs.dout.reshape(batch, rows, heads, dim).transpose(1, 2)
        return inputs.replace(dout=other.contiguous())


class ValueExtent(WrongBackward):
    """Tiles of dO and V are as wide as those of q: what is beyond is left out, of dV unwritten."""

    def read(self, inputs: Inputs) -> Inputs:
        assert inputs.dout is not None
        inside = torch.arange(inputs.problem.value_dim, device=inputs.device)
        narrow = inside < inputs.problem.head_dim
        dout = torch.where(narrow, inputs.dout, torch.zeros_like(inputs.dout))
        return inputs.replace(dout=dout)

    def delta(self, dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
        assert self.asked.dout is not None
        del dout  # delta is another kernel's, and whole
        return super().delta(self.asked.dout.float(), out, dlse)


class DkUnscaled(WrongBackward):
    """dK is not multiplied by the softmax scale."""

    def spoiled(self, inputs: Inputs, outputs: Outputs) -> Outputs:
        return changed(outputs, lambda dk: dk / inputs.problem.scale, "dk")


class DkScaledTwice(WrongBackward):
    """dK is multiplied by the softmax scale twice."""

    def spoiled(self, inputs: Inputs, outputs: Outputs) -> Outputs:
        return changed(outputs, lambda dk: dk * inputs.problem.scale, "dk")


class DqUnscaled(WrongBackward):
    """dQ is not multiplied by the softmax scale."""

    def spoiled(self, inputs: Inputs, outputs: Outputs) -> Outputs:
        return changed(outputs, lambda dq: dq / inputs.problem.scale, "dq")


class DqScaledTwice(WrongBackward):
    """dQ is multiplied by the softmax scale twice."""

    def spoiled(self, inputs: Inputs, outputs: Outputs) -> Outputs:
        return changed(outputs, lambda dq: dq * inputs.problem.scale, "dq")


class ScaledByLog2e(WrongBackward):
    """dQ and dK are multiplied by scale · log2 e, the factor of scores in base 2."""

    def scaled(self, total: Tensor, scale: Tensor) -> Tensor:
        return super().scaled(total, scale * _LOG2_E)


class DqSmaller(WrongBackward):
    """dQ is multiplied by 0.999 before it is rounded."""

    only = BY_ROWS

    def scaled(self, total: Tensor, scale: Tensor) -> Tensor:
        return super().scaled(total, scale) * 0.999


class AddedTwice(WrongBackward):
    """dQ is added to what an earlier run of the same kernel left: autotuning ran it before."""

    def spoiled(self, inputs: Inputs, outputs: Outputs) -> Outputs:
        del inputs
        return changed(outputs, lambda dq: dq + dq, "dq")


class NotCleared(WrongBackward):
    """dQ is added to what its memory held: another head's dQ."""

    def spoiled(self, inputs: Inputs, outputs: Outputs) -> Outputs:
        del inputs
        return changed(outputs, lambda dq: dq + dq.roll(1, 1), "dq")


class DeadRowsPoison(WrongBackward):
    """exp(s + ∞) of a row that sees no key is NaN in dK and dV of every key of its head."""

    def spoiled(self, inputs: Inputs, outputs: Outputs) -> Outputs:
        problem, lse = inputs.problem, outputs.lse
        assert lse is not None
        dead = torch.isneginf(lse).any(-1).view(problem.batch, problem.kv_heads, problem.group)
        return _poisoned(outputs, dead.any(-1))


class PaddingRowsPoison(WrongBackward):
    """LSE and delta of the rows beyond the last are uninitialised, and NaN reaches dK and dV."""

    def spoiled(self, inputs: Inputs, outputs: Outputs) -> Outputs:
        problem = inputs.problem
        ragged = bool(problem.query % TILING.block_query)
        shape = (problem.batch, problem.kv_heads)
        return _poisoned(outputs, torch.full(shape, ragged, device=inputs.device))


def _poisoned(outputs: Outputs, which: Tensor) -> Outputs:
    """NaN in dK and dV of some key heads, ``(batch, kv_heads)``."""
    where = which[..., None, None]
    return changed(outputs, lambda x: torch.where(where, math.nan, x), *BY_KEYS)


class DeadRowsUnwritten(WrongBackward):
    """dQ of rows that see no key stays what its memory held."""

    def spoiled(self, inputs: Inputs, outputs: Outputs) -> Outputs:
        del inputs
        assert outputs.lse is not None
        dead = torch.isneginf(outputs.lse)[..., None]
        return changed(outputs, lambda dq: torch.where(dead, 2.0**-10, dq), "dq")


class UnseenKeysUnwritten(WrongBackward):
    """dK and dV of keys that no row sees stay what their memory held."""

    def spoiled(self, inputs: Inputs, outputs: Outputs) -> Outputs:
        del inputs
        unseen = (outputs.gradients()["dv"] == 0).all(-1, keepdim=True)
        return changed(outputs, lambda x: torch.where(unseen, 2.0**-10, x), *BY_KEYS)


class SinkConstant(WrongBackward):
    """A sink is taken for a constant."""

    def spoiled(self, inputs: Inputs, outputs: Outputs) -> Outputs:
        del inputs
        return changed(outputs, torch.zeros_like, "dsink")


class SinkNegated(WrongBackward):
    """A sink's gradient has the other sign."""

    def spoiled(self, inputs: Inputs, outputs: Outputs) -> Outputs:
        del inputs
        return changed(outputs, torch.neg, "dsink")


class SinkOfOneSequence(WrongBackward):
    """A sink's gradient is that of the first sequence alone."""

    only = ("dsink",)

    def read(self, inputs: Inputs) -> Inputs:
        assert inputs.dout is not None
        dout = inputs.dout.clone()
        dout[1:] = 0
        dlse = None if inputs.dlse is None else inputs.dlse.clone()
        if dlse is not None:
            dlse[1:] = 0
        return inputs.replace(dout=dout, dlse=dlse)


class SinkNotInLse(WrongBackward):
    """P is recomputed from an LSE without the sink."""

    def saved(self, inputs: Inputs, forward: Outputs) -> Outputs:
        assert inputs.sink is not None
        assert forward.lse is not None
        lse = forward.lse.double()
        rest = lse + torch.log1p(-torch.exp(inputs.sink.double()[:, None] - lse).clamp(max=1))
        return dataclasses.replace(forward, lse=rest.float())
