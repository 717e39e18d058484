"""Gradients of what several scores read, where each is stored and none is added."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attncheck.mods.leaves import captured_tensors, leaf_gradients

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attncheck.hypotheses.backward import Backward
    from attncheck.mods.leaves import Leaf

__all__ = ["last_stored"]


def last_stored(of: Backward, dz: Tensor, rows: int, keys: int) -> Iterator[Tensor]:
    """What each number has of the last score that wrote to it, in the orders of programs there are.

    A program owns a block of rows of one head and walks over tiles of keys. Programs start with the
    first block of rows or with the last, in each head or in all. A tile is written row by row, or
    as matrix units leave it: a thread has two keys beside one another, and all threads write the
    first of theirs before the second, or the second before the first.

    Args:
        of: The backward.
        dz: Gradients of the scores after the mod.
        rows: Of a tile.
        keys: Likewise.
    """
    given, problem = of.given, of.given.problem
    at = (given.b, given.h, given.i, given.j)
    read = [one for one in leaf_gradients(given.score, given.x, *at) if one[1] is not None]
    if any(leaf.places is None or leaf.read.shape[2:] != dz.shape[2:] for leaf, _ in read):
        return  # a tile sums what it has of one number before it writes
    block, tile = given.i // rows, given.j // keys
    head, heads = given.b * problem.heads + given.h, problem.batch * problem.heads
    blocks, tiles = -(-problem.query // rows), -(-problem.kv // keys)
    in_tile = (given.i % rows) * keys + given.j % keys
    orders = [in_tile, *((2 * keys * rows) * half + in_tile for half in _halves(given.j))]
    for row_block in (blocks - 1 - block, block):
        for program in (row_block * heads + head, head * blocks + row_block):
            for order in orders:
                when = (program * tiles + tile) * (4 * rows * keys) + order
                yield _stored(of, dz, read, when)


def _halves(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Which of a thread's two keys it writes later."""
    return keys % 2, 1 - keys % 2


def _stored(of: Backward, dz: Tensor, read: list[tuple[Leaf, Tensor]], when: Tensor) -> Tensor:
    """All numbers, each the one that was written last."""
    given, found = of.given, []
    for tensor in captured_tensors(given.score):
        mine = torch.zeros(tensor.numel(), dtype=torch.float64)
        for leaf, slope in read:
            if leaf.tensor is tensor:
                terms = torch.where(given.seen, dz * slope, 0.0)
                numbers = torch.arange(tensor.numel()).view(tensor.shape)[leaf.places]
                _store(mine, numbers.expand(dz.shape), terms, when.expand(dz.shape))
        found.append(mine)
    return torch.cat(found)


def _store(to: Tensor, numbers: Tensor, terms: Tensor, when: Tensor) -> None:
    """Each number's last of ``terms``; one of 0 is not written."""
    written = terms != 0
    numbers, terms, when = numbers[written], terms[written], when[written]
    last = torch.full(to.shape, -1, dtype=torch.int64)
    last.scatter_reduce_(0, numbers, when, "amax")
    stays = when == last[numbers]
    to[numbers[stays]] = terms[stays]
