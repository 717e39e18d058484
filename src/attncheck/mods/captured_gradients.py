"""Gradients of the numbers that a score mod reads from captured float tensors, by autograd.

``captured_reads`` has them as traced expressions; oracles use this module, without a trace.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from attncheck.core.errors import ProblemError
from attncheck.mods.signatures import ScoreMod


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A read of a captured tensor at one place in a score mod's code."""

    tensor: Tensor  # the captured tensor
    places: Any  # the indices of the read; None for a tensor of one number
    read: Tensor  # the elements read, in the shape that the indices broadcast to
    value: Tensor  # ``read`` in the score's dtype, for each score; the mod computes with it

    def add(self, gradients: Tensor, to: Tensor) -> None:
        """Add ``gradients``, one per score, to those of the numbers read in ``to``, like tensor."""
        summed = gradients.sum_to_size(self.read.shape or (1,) * gradients.ndim)
        if self.places is None:
            to += summed.reshape(to.shape)
            return
        places = self.places if isinstance(self.places, tuple) else (self.places,)
        summed = summed.reshape(self.read.shape)
        if not all(isinstance(place, Tensor) for place in places):  # slices, whole numbers
            numbers = torch.arange(to.numel(), device=to.device).view(to.shape)
            to, places, summed = to.view(-1), (numbers[self.places].flatten(),), summed.flatten()
        to.index_put_(places, summed, accumulate=True)


def leaf_gradients(score_mod: ScoreMod, score: Tensor, *indices: Tensor) -> list[tuple[Leaf, Any]]:
    """Return every read, and the derivative of each score after the mod by the number read.

    It is None where no gradient passes through. Derivatives are torch's, in the score's dtype.

    Args:
        score_mod: The callable; its result must have the shape of the score.
        score: Scores before the mod, of the shape that the indices broadcast to.
        indices: b, h, q_idx and kv_idx.

    Raises:
        ProblemError: where the mod computes with a whole captured tensor, or works only on one
            index at a time.
    """
    own = score.detach().clone()  # a score mod may write to its score
    with torch.enable_grad(), _Reads((own, *indices)) as reads:
        try:
            after = score_mod(own, *indices)
        except ProblemError:
            raise
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            fact = str(error).partition("\n")[0]
            raise ProblemError(
                "the score mod cannot be called with all indices at once for the gradients of what "
                f"it reads, torch says: {fact}"
            ) from None
    leaves = reads.leaves
    if not leaves or not after.requires_grad:
        return [(leaf, None) for leaf in leaves]
    values = [leaf.value for leaf in leaves]
    slopes = torch.autograd.grad(after, values, torch.ones_like(after), allow_unused=True)
    return list(zip(leaves, slopes, strict=True))


def captured_tensors(score_mod: ScoreMod, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
    """Return the float tensors by which a score mod has a derivative, in the order of reading."""
    score = torch.full((1, 1, 1, 1), 0.5, dtype=torch.float64, device=device)
    indices = [torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device) for _ in range(4)]
    reads = leaf_gradients(score_mod, score, *indices)
    by_id = {id(leaf.tensor): leaf.tensor for leaf, slope in reads if slope is not None}
    return tuple(by_id.values())


class CapturedSums:
    """Gradients of a score mod's captured numbers, summed over scores in several parts."""

    def __init__(
        self, score_mod: ScoreMod, device: torch.device | str, dtype: torch.dtype = torch.float64
    ) -> None:
        self._score_mod = score_mod
        tensors = captured_tensors(score_mod, device)
        sizes = [tensor.numel() for tensor in tensors]
        # ``(numbers,)``: the tensors concatenated, each flattened row-major.
        self.sums = torch.zeros(sum(sizes), dtype=dtype, device=device)
        parts = zip(tensors, torch.split(self.sums, sizes), strict=True)
        self._sums_of = {id(tensor): part.view(tensor.shape) for tensor, part in parts}
        self._tensors = tensors  # kept alive, so that no other tensor gets their ids

    def add(self, score: Tensor, at: tuple[Tensor, ...], factors: Tensor, where: Tensor) -> None:
        """Add ``factors`` times the mod's derivative to the number that each score reads.

        Args:
            score: Before the mod, of this object's dtype, ``(batch, heads, query, kv)``.
            at: b, h, q_idx and kv_idx, which broadcast to that shape.
            factors: Of that shape.
            where: Bool, of that shape; False elements add nothing, even if they are NaN.
        """
        for leaf, slope in leaf_gradients(self._score_mod, score, *at):
            if slope is not None:
                # Select rather than multiply by 0: a hidden NaN times 0 is NaN.
                leaf.add(torch.where(where, factors * slope, 0.0), self._sums_of[id(leaf.tensor)])


_CASTS = (Tensor.to, Tensor.type, Tensor.float, Tensor.half, Tensor.bfloat16)


@dataclass(eq=False)
class _Reads(TorchFunctionMode):
    """A mode in which reads of captured float tensors return leaves of the score's dtype and shape.

    A captured tensor is one that is no argument and no result of a call.
    """

    arguments: tuple[Tensor, ...]  # the mod's own, the score first
    leaves: list[Leaf] = field(default_factory=list)  # the reads so far

    def __post_init__(self) -> None:
        super().__init__()
        # Hold the tensors too: the id of a deleted tensor may be reused.
        self._locals = {id(tensor): tensor for tensor in self.arguments}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__getitem__ and self._is_captured(args[0]):
            result: Any = self._leaf(args[0], args[1], func(*args))
        elif any(self._is_captured(leaf) for leaf in tree_leaves((args, kwargs))):
            result = self._call_on_captured(func, args, kwargs)
        else:
            result = self._cast(func, args, func(*args, **kwargs))
        self._locals |= {id(leaf): leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        return result

    def _call_on_captured(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call ``func`` with captured tensors; one-number tensors become leaves if it computes.

        Functions that compute are never called twice, since they may write to their arguments.
        """
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if self._is_captured(leaf)]
        whole = next((leaf for leaf in leaves if leaf.numel() > 1), None)
        if whole is None:
            # A tensor of one number is read by the computation itself, without an index.
            substituted = tree_map_only(Tensor, self._number, (args, kwargs))
            result = func(*substituted[0], **substituted[1])
            if _is_real(result):
                return self._cast(func, substituted[0], result)
        result = func(*args, **kwargs)
        if whole is not None and _is_real(result):
            raise ProblemError(
                f"the score mod computes with a whole tensor of shape {tuple(whole.shape)}: "
                "there are gradients of what it reads of one."
            )
        return result

    def _cast(self, func: Any, args: Any, result: Any) -> Any:
        """Keep the score's dtype in casts of floats that require gradients, so none is rounded."""
        if func in _CASTS and args[0].requires_grad and result.is_floating_point():
            return args[0].to(self.arguments[0].dtype)
        return result

    def _is_captured(self, value: object) -> bool:
        return _is_real(value) and id(value) not in self._locals

    def _number(self, tensor: Tensor) -> Tensor:
        return self._leaf(tensor, None, tensor) if self._is_captured(tensor) else tensor

    def _leaf(self, tensor: Tensor, places: Any, read: Tensor) -> Tensor:
        # Without a graph its slope would silently be 0.
        if not torch.is_grad_enabled():
            raise ProblemError(
                "the score mod reads a tensor under torch.no_grad(): "
                "what its gradient is depends on who differentiates."
            )
        score = self.arguments[0]
        value = read.detach().to(score).expand(score.shape).requires_grad_()
        self.leaves.append(Leaf(tensor, places, read.detach(), value))
        return value


def _is_real(result: object) -> bool:
    return isinstance(result, Tensor) and result.is_floating_point()
