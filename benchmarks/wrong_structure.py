"""Kernels that compute something else: keys, rescaling, scale, heads, empty and negative rows."""

# ruff: noqa: D102  # a method is the ideal kernel's; what is wrong with it the class says

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal, Index

if TYPE_CHECKING:
    from attncheck.core.declared_arithmetic import Arithmetic
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Problem
    from attncheck.mods.signatures import MaskMod
    from attncheck.subjects.capabilities.subject import Call

TILING = Tiling(block_query=64, block_kv=64)


class Planted(Ideal):
    """The ideal kernel, to be made wrong in one place; it declares what the ideal kernel does."""

    name = "planted"
    lazy = 0.0

    def __init__(self, tiling: Tiling = TILING) -> None:
        super().__init__(replace(tiling, lazy_rescale=self.lazy))

    def prepare(self, inputs: Inputs) -> Call:
        """The ideal kernel's call between two changes."""
        self.problem = inputs.problem
        self.tiles_done = 0
        call = super().prepare(self.changed(inputs))

        def between() -> Outputs:
            self.tiles_done = 0
            return self.spoiled(call())

        return between

    def arithmetic(self, problem: Problem, device: str) -> Arithmetic:
        """The right kernel's, whatever the fault makes of it."""
        return Ideal(self.tiling(problem, device)).arithmetic(problem, device)

    def changed(self, inputs: Inputs) -> Inputs:
        """What the kernel takes its inputs for."""
        return inputs

    def spoiled(self, outputs: Outputs) -> Outputs:
        """What becomes of its outputs."""
        return outputs


class CausalPlus(Planted):
    """Row i sees the key after its own."""

    def visible(self, mask: MaskMod, at: Index) -> torch.Tensor:
        return super().visible(mask, replace(at, q_idx=at.q_idx + 1))


class CausalMinus(Planted):
    """Row i does not see its own key."""

    def visible(self, mask: MaskMod, at: Index) -> torch.Tensor:
        return super().visible(mask, replace(at, q_idx=at.q_idx - 1))


class WindowPlus(Planted):
    """A window one key longer."""

    by = 1

    def changed(self, inputs: Inputs) -> Inputs:
        window = int(inputs.problem.mask.values["window"]) + self.by
        mask = Spec.of("sliding_window", window=window)
        return inputs.replace(problem=inputs.problem.replace(mask=mask))


class WindowMinus(WindowPlus):
    """A window one key shorter."""

    by = -1


class KeyDropped(Planted):
    """No row sees one key of the middle."""

    def visible(self, mask: MaskMod, at: Index) -> torch.Tensor:
        return super().visible(mask, at) & (at.kv_idx != self.problem.kv // 2)


class PaddingCounted(Planted):
    """The keys beyond the last are zeros that take part."""

    def inside(self, keys: torch.Tensor, kv: int) -> torch.Tensor:
        del kv
        return torch.ones_like(keys, dtype=torch.bool)


class LastTileUnmasked(Planted):
    """Every row sees all of the last tile of keys."""

    def visible(self, mask: MaskMod, at: Index) -> torch.Tensor:
        last = (self.problem.kv - 1) // TILING.block_kv * TILING.block_kv
        return super().visible(mask, at) | (at.kv_idx >= last)


class TopLeft(Planted):
    """Causal from the top left corner where the bottom right is asked for."""

    def visible(self, mask: MaskMod, at: Index) -> torch.Tensor:
        del mask
        return at.q_idx >= at.kv_idx


class Unrescaled(Planted):
    """O or the row sum keeps its size when the maximum moves."""

    axes = 4
    tile: int | None = None

    def rescaled(self, running: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
        self.tiles_done += running.dim() == 3  # the sum comes first
        now = self.tile is None or self.tiles_done - 1 == self.tile
        return running if now and running.dim() == self.axes else super().rescaled(running, alpha)


class AlphaSkipped(Unrescaled):
    """O is never rescaled."""


class AlphaSkippedOnce(Unrescaled):
    """O is not rescaled at the second tile."""

    tile = 1


class SumSkipped(Unrescaled):
    """The row sum is never rescaled."""

    axes = 3


class SumSkippedOnce(SumSkipped):
    """The row sum is not rescaled at the second tile."""

    tile = 1


class ScaleOff(Planted):
    """The softmax scale is 1 % too large."""

    def changed(self, inputs: Inputs) -> Inputs:
        scale = self.scale_of(inputs.problem)
        return inputs.replace(problem=inputs.problem.replace(scale=scale))

    def scale_of(self, problem: Problem) -> float:
        return problem.scale * 1.01


class ScaleByDim(ScaleOff):
    """Scores are divided by D instead of √D."""

    def scale_of(self, problem: Problem) -> float:
        return problem.scale / math.sqrt(problem.head_dim)


class LseBaseTwo(Planted):
    """LSE is a logarithm to base 2."""

    def spoiled(self, outputs: Outputs) -> Outputs:
        assert outputs.lse is not None
        return Outputs(outputs.out, outputs.lse * self.log2_e)


class MaximumFromZero(Planted):
    """The running maximum starts at 0."""

    first_maximum = 0.0


class FiniteMask(Planted):
    """Hidden keys get the score −64, which is more than some scores."""

    @property
    def hidden_score(self) -> float:  # type: ignore[override]  # in units of q·k
        return -64.0 / self.problem.scale


class NegativeRowsEmpty(Planted):
    """A row whose scores lie below −64 is taken for one that sees no key."""

    def spoiled(self, outputs: Outputs) -> Outputs:
        assert outputs.lse is not None
        empty = outputs.lse < -64.0
        out = torch.where(empty[..., None], 0.0, outputs.out.float()).to(outputs.out.dtype)
        return Outputs(out, torch.where(empty, -math.inf, outputs.lse))


class OneHead(Planted):
    """The last of eight heads reads the first one's values."""

    def changed(self, inputs: Inputs) -> Inputs:
        v = inputs.v.clone()
        v[:, -1] = v[:, 0]
        return inputs.replace(v=v)


class OutSmaller(Planted):
    """O is multiplied by 0.999 before it is rounded."""

    def normalised(self, out: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return super().normalised(out, total) * 0.999
