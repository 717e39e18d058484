"""Backwards that compute something else, behind a right forward: keys, rows, heads, deltas, slopes.

Faults as real kernels had them. One that is of a single kernel of the backward, as of the one that
makes dQ, is in the gradients that ``only`` names.
"""

# ruff: noqa: D102  # a method is the ideal kernel's; what is wrong with it the class says

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from wrong_structure import TILING

from attncheck.core.mod_spec import Spec
from attncheck.core.tensor_names import GRADIENTS, TensorName
from attncheck.subjects.conventions.torch_arithmetic import fp32_products
from attncheck.subjects.ideal import Ideal, Index, attention, with_gradients

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attncheck.core.outputs import Outputs
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.mods.signatures import MaskMod, ScoreMod
    from attncheck.subjects.capabilities.subject import Call

BY_ROWS: tuple[TensorName, ...] = ("dq",)
BY_KEYS: tuple[TensorName, ...] = ("dk", "dv")


class WrongBackward(Ideal):
    """The ideal kernel, its backward to be made wrong in one place; it declares what that does."""

    name = "planted"
    only: tuple[TensorName, ...] = GRADIENTS

    def __init__(self) -> None:
        super().__init__(TILING)

    def prepare(self, inputs: Inputs) -> Call:
        """The right forward, then the backward between three changes."""

        def call() -> Outputs:
            with torch.no_grad(), fp32_products("ieee"):
                forward = attention(Ideal(TILING), inputs)
                self.asked = inputs
                given = with_gradients(self, self.read(inputs), self.saved(inputs, forward))
                wrong = {n: x for n, x in given.gradients().items() if n in self.only}
                rest = () if set(GRADIENTS) == set(self.only) else GRADIENTS
                kept = with_gradients(Ideal(TILING), inputs, forward) if rest else forward
                return self.spoiled(inputs, dataclasses.replace(kept, **wrong))

        return call

    def read(self, inputs: Inputs) -> Inputs:
        """What the backward takes its inputs for."""
        return inputs

    def saved(self, inputs: Inputs, forward: Outputs) -> Outputs:
        """What it takes the forward's results for."""
        del inputs
        return forward

    def spoiled(self, inputs: Inputs, outputs: Outputs) -> Outputs:
        """What becomes of its outputs."""
        del inputs
        return outputs


def changed(outputs: Outputs, change: Callable[[Tensor], Tensor], *names: TensorName) -> Outputs:
    """``outputs`` with some gradients changed in fp32 and rounded to their dtype again."""
    given = outputs.gradients()
    new = {name: change(given[name].float()).to(given[name].dtype) for name in names}
    return dataclasses.replace(outputs, **new)


class NoDelta(WrongBackward):
    """delta is not taken off dP; dLSE is."""

    def delta(self, dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
        return super().delta(dout, torch.zeros_like(out), dlse)


class DeltaOfTheFirstHead(WrongBackward):
    """The last head reads the first one's delta."""

    def delta(self, dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
        delta = super().delta(dout, out, dlse).clone()
        delta[:, -1] = delta[:, 0]
        return delta


class DeltaPaddedElsewhere(WrongBackward):
    """delta is written at offsets of rows padded to 64, and read at those padded to 128."""

    def delta(self, dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
        delta = super().delta(dout, out, dlse).flatten(0, 1)
        heads, rows = delta.shape
        buffer = delta.new_zeros(heads * (rows + 128))
        at = torch.arange(rows, device=delta.device)
        first = torch.arange(heads, device=delta.device)[:, None]
        buffer[(first * (rows + -rows % 64) + at).flatten()] = delta.flatten()
        return buffer[first * (rows + -rows % 128) + at].view(dout.shape[:3])


class LseLossIgnored(WrongBackward):
    """The loss's gradient with respect to LSE is dropped."""

    def delta(self, dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
        del dlse
        return super().delta(dout, out, None)


class LseLossNegated(WrongBackward):
    """dLSE is added to delta instead of taken off."""

    def delta(self, dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
        return super().delta(dout, out, None if dlse is None else -dlse)


class MaskForgotten(WrongBackward):
    """Recomputed weights are not masked."""

    def visible_again(self, mask: MaskMod, at: Index) -> Tensor:
        return torch.ones_like(mask(at.b, at.h, at.q_idx, at.kv_idx))


class MaskForgottenByRows(MaskForgotten):
    """The kernel that makes dQ does not mask."""

    only = BY_ROWS


class MaskForgottenByKeys(MaskForgotten):
    """The kernel that makes dK and dV does not mask."""

    only = BY_KEYS


class AlwaysCausal(WrongBackward):
    """The backward is causal, whatever the forward was."""

    def visible_again(self, mask: MaskMod, at: Index) -> Tensor:
        seen = self.visible(mask, at)
        problem = self.asked.problem
        return seen & (at.q_idx + problem.kv - problem.query >= at.kv_idx)


class CausalPlus(WrongBackward):
    """Row i sees the key after its own, in the backward alone."""

    def visible_again(self, mask: MaskMod, at: Index) -> Tensor:
        return super().visible_again(mask, dataclasses.replace(at, q_idx=at.q_idx + 1))


class CausalMinus(WrongBackward):
    """Row i does not see its own key, in the backward alone."""

    def visible_again(self, mask: MaskMod, at: Index) -> Tensor:
        return super().visible_again(mask, dataclasses.replace(at, q_idx=at.q_idx - 1))


class TopLeft(WrongBackward):
    """The backward is causal from the top left corner, the forward from the bottom right."""

    def visible_again(self, mask: MaskMod, at: Index) -> Tensor:
        del mask
        return at.q_idx >= at.kv_idx


class WindowForgotten(TopLeft):
    """Of a window the backward masks the causal half alone."""


class WindowPlus(WrongBackward):
    """The backward's window is one key longer."""

    def read(self, inputs: Inputs) -> Inputs:
        window = inputs.problem.mask.values["window"]
        assert isinstance(window, int)
        mask = Spec.of("sliding_window", window=window + 1)
        return inputs.replace(problem=inputs.problem.replace(mask=mask))


class TailUnmasked(WrongBackward):
    """Keys beyond the last, which are zeros, have weights exp(0 − LSE)."""

    def inside(self, keys: Tensor, kv: int) -> Tensor:
        del kv
        return torch.ones_like(keys, dtype=torch.bool)


class LastKeyLost(WrongBackward):
    """The last key has no part in the backward."""

    def visible_again(self, mask: MaskMod, at: Index) -> Tensor:
        return super().visible_again(mask, at) & (at.kv_idx < self.asked.problem.kv - 1)


class LastRowLost(WrongBackward):
    """The last row has no part in dK and dV."""

    only = BY_KEYS

    def visible_again(self, mask: MaskMod, at: Index) -> Tensor:
        return super().visible_again(mask, at) & (at.q_idx < self.asked.problem.query - 1)


class KeyTileSkipped(WrongBackward):
    """dQ's loop over the keys ends a tile early where the last is not whole."""

    only = BY_ROWS

    def visible_again(self, mask: MaskMod, at: Index) -> Tensor:
        whole = self.asked.problem.kv // TILING.block_kv * TILING.block_kv
        return super().visible_again(mask, at) & (at.kv_idx < whole)


class RowTileSkipped(KeyTileSkipped):
    """dK's and dV's loop over the rows ends a tile early where the last is not whole."""

    only = BY_KEYS

    def visible_again(self, mask: MaskMod, at: Index) -> Tensor:
        whole = self.asked.problem.query // TILING.block_query * TILING.block_query
        return self.visible(mask, at) & (at.q_idx < whole)


class FirstRowTileSkipped(WrongBackward):
    """dK's and dV's loop over the rows begins a tile late."""

    only = BY_KEYS

    def visible_again(self, mask: MaskMod, at: Index) -> Tensor:
        return super().visible_again(mask, at) & (at.q_idx >= TILING.block_query)


class LostUpdate(WrongBackward):
    """One tile's addition to one head's dQ is lost to another program's, as without atomics."""

    only = BY_ROWS

    def visible_again(self, mask: MaskMod, at: Index) -> Tensor:
        problem, size = self.asked.problem, TILING.block_query
        tile = (problem.query - 1) // size
        lost = (at.h == problem.heads - 1) & (at.q_idx // size == tile) & (at.kv_idx < size)
        return super().visible_again(mask, at) & ~lost


class SlopeForgotten(WrongBackward):
    """The gradient of scores is not multiplied by the score mod's derivative."""

    def slope(self, score: ScoreMod, x: Tensor, at: Index) -> Tensor:
        del score, at
        return torch.ones_like(x)


class SlopeOfModified(WrongBackward):
    """The score mod's derivative is taken at the score after the mod."""

    def slope(self, score: ScoreMod, x: Tensor, at: Index) -> Tensor:
        after = score(x, at.b, at.h, at.q_idx, at.kv_idx).to(x.dtype)
        return super().slope(score, after, at)


class SlopeNotSquared(WrongBackward):
    """A softcap's derivative is 1 − |tanh|, not 1 − tanh²."""

    def slope(self, score: ScoreMod, x: Tensor, at: Index) -> Tensor:
        return 1 - (1 - super().slope(score, x, at)).clamp(min=0).sqrt()


class SlopeBeforeDelta(WrongBackward):
    """dP is multiplied by the score mod's derivative before delta is taken off."""

    def dscores(self, p: Tensor, dp: Tensor, delta: Tensor) -> Tensor:
        self.tile_of = p, dp, delta
        return torch.ones_like(p)

    def slope(self, score: ScoreMod, x: Tensor, at: Index) -> Tensor:
        p, dp, delta = self.tile_of
        return p * (dp * super().slope(score, x, at) - delta)


class ScoreModForgotten(WrongBackward):
    """P is recomputed from scores without the score mod."""

    def read(self, inputs: Inputs) -> Inputs:
        return inputs.replace(problem=inputs.problem.replace(score=Spec.of("none")))
