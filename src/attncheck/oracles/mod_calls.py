"""Calls of masks and score mods by the oracles: the original callables, elementwise.

Index tensors broadcast against each other, so that one call serves a whole tile, and a mask that
depends on two of the four indices is evaluated along two axes only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from attncheck.core.errors import ProblemError
from attncheck.mods.signatures import MaskMod, ScoreMod

# Errors of torch and Python if a callable supports 0-d indices only.
_BROADCAST_ERRORS = (RuntimeError, IndexError, TypeError, ValueError)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Indices:
    """Indices of a tile."""

    b: Tensor  # ``(batch, 1, 1, 1)``
    h: Tensor  # query heads, ``(1, heads, 1, 1)``
    q_idx: Tensor  # ``(1, 1, query, 1)``
    kv_idx: Tensor  # ``(1, 1, 1, kv)``

    @classmethod
    def of(
        cls, b: range, h: range, query: range, kv: range, device: torch.device | str = "cpu"
    ) -> Self:
        """Return the indices of four ranges."""
        axes = [torch.arange(r.start, r.stop, device=device) for r in (b, h, query, kv)]
        return cls(
            b=axes[0].view(-1, 1, 1, 1),
            h=axes[1].view(1, -1, 1, 1),
            q_idx=axes[2].view(1, 1, -1, 1),
            kv_idx=axes[3].view(1, 1, 1, -1),
        )

    @property
    def axes(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four tensors in the order of FlexAttention's signature."""
        return self.b, self.h, self.q_idx, self.kv_idx

    @property
    def shape(self) -> torch.Size:
        """``(batch, heads, query, kv)``."""
        return torch.Size(axis.numel() for axis in self.axes)


def call_mask(mask_mod: MaskMod, indices: Indices) -> Tensor:
    """Return the mask's visibility: bool with four axes of the indices' sizes, or of size 1.

    A callable that cannot broadcast is called under ``torch.vmap``, as FlexAttention does.
    """

    def broadcast() -> Tensor:
        return _four_axes(torch.as_tensor(mask_mod(*indices.axes)), indices)

    def mapped() -> Tensor:
        return _over_all_axes(mask_mod, 0)(*(axis.flatten() for axis in indices.axes))

    return _call_without_grad(broadcast, mapped).to(indices.b.device, torch.bool)


def call_score_mod(score_mod: ScoreMod, scores: Tensor, indices: Indices) -> Tensor:
    """Return the scores after a score mod, in the dtype and shape of ``scores`` (the indices').

    The result may be ``scores`` itself, or a view of a captured tensor.
    """

    def broadcast() -> Tensor:
        return _four_axes(score_mod(scores, *indices.axes), indices)

    def mapped() -> Tensor:
        axes = (axis.flatten() for axis in indices.axes)
        return _over_all_axes(score_mod, 1)(scores, *axes)

    return _expand(_call_without_grad(broadcast, mapped), scores)


def score_mod_slope(score_mod: ScoreMod, scores: Tensor, indices: Indices) -> Tensor:
    """Return the derivative of a score mod at ``scores``, in their dtype and shape."""
    _, slopes = call_score_mod_with_slope(score_mod, scores, indices)
    return torch.ones_like(scores) if slopes is None else slopes


def call_score_mod_with_slope(
    score_mod: ScoreMod, scores: Tensor, indices: Indices
) -> tuple[Tensor, Tensor | None]:
    """Return the scores after a score mod, as ``call_score_mod`` does, and its derivative.

    The derivative of each element is torch's autograd's: at a kink as torch defines it, and 0 if
    the result does not depend on the score. It is None if it is 1 everywhere because autograd
    passes the gradient through unchanged, as for a mod that only adds something.
    """

    def broadcast() -> Tensor:
        return _four_axes(score_mod(copy, *indices.axes), indices)

    def mapped() -> Tensor:
        axes = (axis.flatten() for axis in indices.axes)
        return _over_all_axes(score_mod, 1)(copy, *axes)

    with torch.enable_grad():
        variable = scores.detach().requires_grad_()
        # A score mod may write to its argument, which a leaf does not permit but its copy does.
        copy = variable.clone()
        after = _first_that_works(broadcast, mapped)
        if not after.requires_grad:
            return _expand(after, scores), torch.zeros_like(scores)
        try:
            # The sum needs no ``grad_outputs``, whose check costs torch half a second of imports.
            (slopes,) = torch.autograd.grad(after.sum(), variable, allow_unused=True)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            if "derivative" not in reason or "not implemented" not in reason:
                raise
            raise ProblemError(f"the score mod has no gradient, torch says: {reason}") from None
    if slopes is None:  # it depends on a captured parameter alone
        slopes = torch.zeros_like(scores)
    untouched = not any(slopes.stride()) and bool((slopes[..., :1] == 1).all())
    return _expand(after.detach(), scores), None if untouched else slopes


def _expand(after: Tensor, scores: Tensor) -> Tensor:
    return after.to(scores.dtype).expand(scores.shape)


def is_identity(score_mod: ScoreMod, device: torch.device | str) -> bool:
    """Return whether a score mod returns its argument itself, without writing to it."""
    # One element is enough: a mod that returns its argument does so for every index.
    first = Indices.of(*(range(1),) * 4, device=device)
    score = torch.zeros(1, 1, 1, 1, dtype=torch.float64, device=device)
    unwritten = score._version
    same = call_score_mod(score_mod, score, first).data_ptr() == score.data_ptr()
    return same and score._version == unwritten


def _call_without_grad(broadcast: Callable[[], Tensor], mapped: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad():  # a mod may capture a parameter
        return _first_that_works(broadcast, mapped)


def _first_that_works(broadcast: Callable[[], Tensor], mapped: Callable[[], Tensor]) -> Tensor:
    try:
        return broadcast()
    except _BROADCAST_ERRORS:
        return mapped()


def _four_axes(result: Tensor, indices: Indices) -> Tensor:
    result.expand(indices.shape)  # raises RuntimeError where the mod's result does not broadcast
    return result[(None,) * (4 - result.dim())]


def _over_all_axes(mod: Callable[..., Tensor], scores: int) -> Callable[..., Tensor]:
    """Return ``mod``, a function of 0-d arguments, mapped over (batch, heads, query, kv).

    Args:
        scores: Number of leading arguments with all four axes: 1 for a score mod, 0 for a mask.
    """
    # Innermost axis first, so that the outermost vmap is over the batch.
    for axis in (3, 2, 1, 0):
        of_indices = tuple(0 if other == axis else None for other in range(4))
        mod = torch.vmap(mod, in_dims=(0,) * scores + of_indices)
    return mod


def seen_by_blocks(seen: Tensor, rows: int, keys: int) -> tuple[Tensor, Tensor]:
    """Return whether blocks of a mask show any key, and whether they show all.

    Args:
        seen: Bool ``(batch, heads, rows, keys)``; expanded axes are read once.
        rows: Rows of a block; the last block may have fewer.
        keys: Keys of a block; the last block may have fewer.

    Returns:
        Bool, broadcastable to ``(batch, heads, blocks of rows, blocks of keys)``.
    """
    unexpanded = seen[tuple(slice(None) if step else slice(1) for step in seen.stride())]
    some = every = unexpanded
    if unexpanded.shape[3] > 1:
        word = torch.int64 if keys % torch.int64.itemsize == 0 else torch.int8
        # Eight bytes at a time, and both in one pass: reading the mask takes a GPU the longest.
        padded = _pad_to_blocks(unexpanded, 3, keys).contiguous()
        padded = padded.clone() if padded.storage_offset() % word.itemsize else padded
        words = padded.view(word).view(*padded.shape[:3], -1, keys // word.itemsize)
        least, most = torch.aminmax(words, dim=4)
        some, every = most != 0, least == int.from_bytes(b"\1" * word.itemsize, "little")
    if unexpanded.shape[2] > 1:
        both = (_pad_to_blocks(x, 2, rows) for x in (some, every))
        some, every = (x.reshape(*x.shape[:2], -1, rows, x.shape[3]) for x in both)
        some, every = some.any(3), every.all(3)
    return some, every


def _pad_to_blocks(x: Tensor, axis: int, size: int) -> Tensor:
    """Return ``x`` with its last slice repeated up to whole blocks, whose classes do not change."""
    padding = [*x.shape]
    padding[axis] = -x.shape[axis] % size
    return torch.cat([x, x.narrow(axis, -1, 1).expand(padding)], axis) if padding[axis] else x
