"""Our Triton decode kernel as a subject: few query rows, the keys in splits that are merged."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from attncheck.subjects.flash import Flash

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from attncheck.inputs import Inputs
    from attncheck.judge.arithmetic import Arithmetic
    from attncheck.kernels.launch import KernelPages, Launch
    from attncheck.problem import Problem
    from attncheck.subjects.contract import Subject, Tiling

__all__ = ["MOST_ROWS", "Decode", "splits_of"]

MOST_ROWS = 128
"""Query rows times heads of a group: what one program was meant for."""

_SMALLEST_BLOCK = 16  # rows of a tensor core's product
# Rows and columns for which fewer warps are enough; fp32's products take many registers.
_SMALL_BLOCK, _SMALL_DIM, _SMALL_WARPS = 32, 128, 4
_SPLIT_BLOCKS = 4  # of keys, at least, on a GPU: below it a split costs more than it brings
_MOST_SPLITS = 64  # on a GPU: what is merged stays little beside the keys
_MOST_SPLITS_INTERPRETED = 3
_OTHER_SPLITS = (1, 2, 3, 7)


class Decode(Flash):
    """Split-KV decoding; interpreted where there is no GPU.

    It does not promise ``batch``: the rows of a tile are all those that read one kv head, and its
    size, and with it the order of sums, depends on how many heads share that.

    Args:
        splits: Into how many parts it cuts the keys, where not as many as it chooses itself.
    """

    name = "triton-decode"
    summary = "our decode kernel in Triton: up to 128 rows a kv head, keys in splits merged by LSE"
    promises = frozenset({"repeat", "layout", "hidden"})

    def __init__(self, splits: int | None = None) -> None:
        self._splits = splits

    def concerns(self, problem: Problem) -> bool:
        """Whether it is attention, paged or not."""
        return super().concerns(problem.replace(paging=None))

    def unsupported(self, problem: Problem, device: str) -> str | None:
        """Takes up to ``MOST_ROWS`` rows a kv head, and else what the other forwards take."""
        rows = problem.query * problem.group
        if rows > MOST_ROWS:
            return f"query · group = {rows}: it is for decoding, at most {MOST_ROWS}"
        # A program is of a kv head.
        return super().unsupported(problem.replace(heads=problem.kv_heads), device)

    def launch(self, problem: Problem, device: str) -> Launch:
        """A block of rows as small as they are, and as many splits as ``splits_of`` says."""
        chosen = super().launch(problem, device)
        rows = min(problem.query * problem.group, MOST_ROWS)
        block = max(_SMALLEST_BLOCK, 1 << (rows - 1).bit_length())
        if device != "cpu":  # there a larger one would spill
            block = min(block, chosen.block_query)
        narrow = block <= _SMALL_BLOCK and problem.dtype != "fp32"
        narrow = narrow and max(problem.head_dim, problem.value_dim) <= _SMALL_DIM
        return dataclasses.replace(
            chosen,
            block_query=block,
            warps=min(chosen.warps, _SMALL_WARPS) if narrow else chosen.warps,
            splits=self._splits or splits_of(problem.kv, chosen.block_kv, device),
        )

    def tiling(self, problem: Problem, device: str) -> Tiling | None:
        """Its tile sizes; none where parts are merged, each with weights relative to its maximum.

        The ideal kernel, which rounds as a tiling says, has no such parts.
        """
        return super().tiling(problem, device) if self._parts(problem, device) == 1 else None

    def launches(self, problem: Problem, device: str) -> Mapping[str, Subject]:
        """With 1, 2, 3 and 7 splits, and with one more than there are blocks of keys."""
        own = self.launch(problem, device)
        counts = dict.fromkeys((*_OTHER_SPLITS, _blocks(problem.kv, own.block_kv) + 1))
        return {
            f"{count} split{'s' * (count > 1)}": type(self)(count)
            for count in counts
            if count != own.splits
        }

    def arithmetic(self, problem: Problem, device: str) -> Arithmetic:
        """That of the other forwards, and its splits; a sink is merged as one more."""
        assumed = super().arithmetic(problem, device)
        return dataclasses.replace(assumed, splits=self._parts(problem, device))

    def _parts(self, problem: Problem, device: str) -> int:
        return self.launch(problem, device).splits + problem.sink

    def stored(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, KernelPages | None]:
        """K, v and their pages: those of a Problem with paging, as a cache holds them."""
        if inputs.problem.paging is None:
            return super().stored(inputs)
        from attncheck.kernels.launch import KernelPages
        from attncheck.subjects.pages import cached

        cache = cached(inputs)
        return cache.k, cache.v, KernelPages(cache.table.table, cache.table.size)

    def forward(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """``kernels.decode_forward.decode_forward``."""
        from attncheck.kernels import decode_forward

        return decode_forward.decode_forward


def splits_of(kv: int, block_kv: int, device: str) -> int:
    """Into how many splits ``kv`` keys are cut: by their number alone, whatever the batch.

    On a GPU one for each 4 blocks of keys, at most 64. In the interpreter, where a split costs what
    a block does, one a block, at most 3: enough to be merged.
    """
    blocks = _blocks(kv, block_kv)
    if device == "cpu":
        return min(blocks, _MOST_SPLITS_INTERPRETED)
    return max(1, min(blocks // _SPLIT_BLOCKS, _MOST_SPLITS))


def _blocks(kv: int, block_kv: int) -> int:
    return -(-kv // block_kv)
