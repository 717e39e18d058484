"""A recorded call as a Problem: its numbers are a distribution, its mask one of the library's."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from attncheck.distributions import DISTRIBUTIONS, Distribution, Sizes
from attncheck.errors import ProblemError
from attncheck.mods.library import FULL, MASKS, NONE, SCORES, Entry
from attncheck.mods.spec import Spec
from attncheck.mods.tables import reader
from attncheck.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from attncheck.distributions import Drawn
    from attncheck.draws import Draws
    from attncheck.mods.signatures import MaskMod, ScoreMod
    from attncheck.mods.spec import Dimensions
    from attncheck.recordings.schema import Call

__all__ = ["Recording", "sizes_problem"]


def sizes_problem(call: Call) -> Problem:
    """A Problem of the call's sizes, dtype and scale; raises ProblemError where there is none."""
    if call.scale is not None and not call.scale > 0:  # Problem takes 0 for the default
        raise ProblemError(f"scale={call.scale!r} must be a positive number in the range of fp32.")
    return Problem(
        batch=call.batch,
        heads=call.heads,
        kv_heads=call.kv_heads,
        query=call.query,
        kv=call.kv,
        head_dim=call.head_dim,
        value_dim=call.value_dim,
        dtype=call.dtype,
        scale=call.scale or 0.0,
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Recording:
    """One recorded call.

    Attributes:
        file: Name of the file it was read from, without its folder.
        call: What is said of it.
        q: ``(batch, heads, query, head_dim)``.
        k: ``(batch, kv_heads, kv, head_dim)``.
        v: ``(batch, kv_heads, kv, value_dim)``.
        mask: ``(batch or 1, heads or 1, query or 1, kv or 1)``: bool (True: seen), or what is
            added to the scores; None where the call's kind of mask needs no tensor.
    """

    file: str
    call: Call
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None

    @cached_property
    def name(self) -> str:
        """File, call and eight hexadecimal digits of the SHA-256 of all its tensors.

        Its distribution and its mask or score mod go by this name, so that a Problem with it has
        the same id wherever the same numbers were read, and never another's.
        """
        digest = hashlib.sha256()
        for name, tensor in self._tensors().items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        return f"{self.file}:{self.call.name}@{digest.hexdigest()[:8]}"

    def problem(self, dtype: str | None = None) -> Problem:
        """The call as a Problem.

        Its distribution gives the recorded numbers (``register`` makes it known), which
        ``inputs.draw`` rounds to ``dtype``: in the recorded dtype they are the recorded bits.

        An additive mask is a score mod that adds it, and −∞ hides a key; one of nothing but 0 and
        −∞ is the bool mask that it means. A mask that hides nothing is ``full``.

        Args:
            dtype: A name of ``formats.DTYPES`` (default: the recorded one).
        """
        mask, score = self._mods()
        return sizes_problem(self.call).replace(
            dtype=dtype or self.call.dtype, mask=mask, score=score, distribution=self.name
        )

    def register(self) -> None:
        """Make the names that its Problem holds known to this process."""
        DISTRIBUTIONS[self.name] = Distribution(
            name=self.name, summary=f"recorded: {self.call.name} of {self.file}", draw=self._drawn
        )
        mask, score = self._mods()
        summary = f"recorded with {self.call.name} of {self.file}"
        if mask.name == self.name:
            MASKS[self.name] = Entry(summary=summary, build=self._mask_mod)
        if score.name == self.name:
            SCORES[self.name] = Entry(summary=summary, build=self._score_mod)

    def _tensors(self) -> dict[str, Tensor]:
        named = {"q": self.q, "k": self.k, "v": self.v}
        return named if self.mask is None else named | {"mask": self.mask}

    @cached_property
    def _visible(self) -> Tensor | None:
        """The mask as a bool one; None if there is none, or it is more than that."""
        if self.mask is None or self.mask.dtype is torch.bool:
            return self.mask
        seen = self.mask == 0
        return seen if bool((seen | torch.isneginf(self.mask)).all()) else None

    def _mods(self) -> tuple[Spec, Spec]:
        if self.mask is None:
            return (FULL if self.call.mask == "none" else Spec.of(self.call.mask)), NONE
        if self._visible is None:
            return FULL, Spec.of(self.name)
        return (FULL if bool(self._visible.all()) else Spec.of(self.name)), NONE

    def _drawn(self, draws: Draws, sizes: Sizes) -> Drawn:
        recorded = tuple(tuple(tensor.shape) for tensor in (self.q, self.k, self.v))
        if (sizes.q, sizes.k, sizes.v) != recorded:
            raise ProblemError(
                f"distribution {self.name!r} is recorded for q, k, v of shapes {recorded}: "
                f"it has none of {(sizes.q, sizes.k, sizes.v)}."
            )
        if draws.seed != 0:
            raise ProblemError(
                f"distribution {self.name!r} is recorded, there is one draw of it: "
                f"seed={draws.seed} must be 0."
            )
        # Copies: what is drawn may be written to.
        q, k, v = (
            tensor.to(torch.float64, copy=True).numpy() for tensor in (self.q, self.k, self.v)
        )
        return q, k, v

    def _mask_mod(self, _: object, dimensions: Dimensions, device: str) -> MaskMod:
        assert self._visible is not None
        table = self._fitting(self._visible, dimensions).to(device)
        read = reader(table)

        def recorded_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return read(b, h, q_idx, kv_idx)

        return recorded_mask

    def _score_mod(self, _: object, dimensions: Dimensions, device: str) -> ScoreMod:
        assert self.mask is not None
        # fp32 holds fp16 and bf16, and is what a traced mod may capture.
        read = reader(self._fitting(self.mask, dimensions).to(device, torch.float32))

        def recorded_bias(
            score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
        ) -> Tensor:
            return score + read(b, h, q_idx, kv_idx).to(score.dtype)

        return recorded_bias

    def _fitting(self, table: Tensor, dims: Dimensions) -> Tensor:
        sizes = (dims.batch, dims.heads, dims.query, dims.kv)
        if any(have not in {1, size} for have, size in zip(table.shape, sizes, strict=True)):
            raise ProblemError(
                f"the mask of {self.name!r} is recorded with shape {tuple(table.shape)}: it does "
                f"not fit scores of shape {sizes}."
            )
        return table
