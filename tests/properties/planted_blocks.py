"""Kernels that skip or do not mask a block that they should, or whose other launch is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from attncheck.inputs.problem import Problem
    from attncheck.mods.signatures import MaskMod
    from attncheck.subjects.capabilities.subject import Subject
    from attncheck.subjects.ideal import Index

BLOCK = 16


class Blocks(Ideal):
    """Tiles of which several fit a small problem."""

    def __init__(self) -> None:
        super().__init__(Tiling(block_query=BLOCK, block_kv=BLOCK))
        self.name = f"planted-{type(self).__name__}"


class OneBlockSkipped(Blocks):
    """Keys of the second block are not visited from the second block of rows."""

    def visible(self, mask: MaskMod, at: Index) -> torch.Tensor:
        skipped = (at.q_idx // BLOCK == 1) & (at.kv_idx // BLOCK == 1)
        return mask(at.b, at.h, at.q_idx, at.kv_idx) & ~skipped


class FirstKeyDecides(Blocks):
    """A block is whole to a row that sees its first key: what is partial is not masked."""

    def visible(self, mask: MaskMod, at: Index) -> torch.Tensor:
        return mask(at.b, at.h, at.q_idx, at.kv_idx // BLOCK * BLOCK)


class EmptyBlocksSeeOne(Blocks):
    """The first row of a block sees a key whatever the mask says: lists of no block are not."""

    def visible(self, mask: MaskMod, at: Index) -> torch.Tensor:
        first = (at.q_idx % BLOCK == 0) & (at.kv_idx == 0)
        return mask(at.b, at.h, at.q_idx, at.kv_idx) | first


class OtherLaunchWrong(Blocks):
    """Right as it is launched; in the second of its other launches a block is skipped."""

    def launches(self, problem: Problem, device: str) -> Mapping[str, Subject]:
        del problem, device
        return {"right": Ideal(Tiling(block_query=32, block_kv=32)), "wrong": OneBlockSkipped()}
