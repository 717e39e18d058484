"""Kernels for which a part of a Problem, asked alone, is not what it is in the whole."""

from __future__ import annotations

import math

import torch

from attncheck.core.outputs import Outputs
from attncheck.mods.spec import Spec
from attncheck.subjects.ideal import Ideal


class _After(Ideal):
    """Spoils right outputs."""

    def prepare(self, inputs):
        call = super().prepare(inputs)
        return lambda: self.spoiled(inputs, call())


class LseInBits(_After):
    """LSE to the base 2."""

    name = "planted-lse-in-bits"

    def spoiled(self, inputs, right):
        return Outputs(right.out, right.lse / math.log(2))


class LseOfPadding(_After):
    """LSE counts the zeros up to a whole tile of 16 keys."""

    name = "planted-lse-of-padding"

    def spoiled(self, inputs, right):
        zeros = -inputs.problem.kv % 16
        nothing = torch.full_like(right.lse, math.log(zeros) if zeros else -math.inf)
        return Outputs(right.out, torch.logaddexp(right.lse, nothing))


class WithoutLse(_After):
    """Right, and gives no LSE."""

    name = "planted-without-lse"

    def spoiled(self, inputs, right):
        return Outputs(right.out)


class WithoutLastKey(Ideal):
    """The last key is never seen."""

    name = "planted-without-last-key"

    def prepare(self, inputs):
        self.last = inputs.problem.kv - 1
        return super().prepare(inputs)

    def visible(self, mask, at):
        return super().visible(mask, at) & (at.kv_idx != self.last)


class TopLeft(Ideal):
    """The bottom-right causal mask aligned top-left."""

    name = "planted-top-left"

    def prepare(self, inputs):
        if inputs.problem.mask.name == "causal_bottom_right":
            return super().prepare(
                inputs.replace(problem=inputs.problem.replace(mask=Spec.of("causal")))
            )
        return super().prepare(inputs)


class FromRowZero(Ideal):
    """Decodes as if its first row were row 0: the mask is asked without its offset."""

    name = "planted-from-row-zero"

    def prepare(self, inputs):
        problem = inputs.problem
        if problem.mask.name == "offset":
            problem = problem.replace(mask=problem.mask.parts[0])
        return super().prepare(inputs.replace(problem=problem))


class ScoredFromRowZero(Ideal):
    """The same of the score mod alone."""

    name = "planted-scored-from-row-zero"

    def prepare(self, inputs):
        problem = inputs.problem
        if problem.score.name == "offset":
            problem = problem.replace(score=problem.score.parts[0])
        return super().prepare(inputs.replace(problem=problem))


class Neighbours(Ideal):
    """A row sees the last key of the document before its own."""

    name = "planted-neighbours"

    def prepare(self, inputs):
        self.last = inputs.problem.kv - 1
        return super().prepare(inputs)

    def visible(self, mask, at):
        later = (at.kv_idx + 1).clamp(max=self.last)
        return super().visible(mask, at) | mask(at.b, at.h, at.q_idx, later)


class SameLengths(Ideal):
    """A document's keys are as many as its rows, from the number of its first row on."""

    name = "planted-same-lengths"

    def prepare(self, inputs):
        problem = inputs.problem
        if problem.mask.name == "documents":
            lengths = list(problem.mask.values["query_lengths"])
            lengths[-1] += problem.kv
            problem = problem.replace(mask=Spec.of("document", lengths=lengths))
        return super().prepare(inputs.replace(problem=problem))


class MeanOfNothing(_After):
    """A row that sees no key gives the mean of all values."""

    name = "planted-mean-of-nothing"

    def spoiled(self, inputs, right):
        mean = inputs.v.float().mean(2, keepdim=True).repeat_interleave(inputs.problem.group, 1)
        nothing = torch.isneginf(right.lse)[..., None]
        return Outputs(torch.where(nothing, mean.to(right.out.dtype), right.out), right.lse)


class FirstLength(Ideal):
    """Every sequence has the mask of the first."""

    name = "planted-first-length"

    def visible(self, mask, at):
        return mask(at.b * 0, at.h, at.q_idx, at.kv_idx)


class LargeBatch(_After):
    """Another last bit of LSE where there are several sequences."""

    name = "planted-large-batch"

    def spoiled(self, inputs, right):
        if inputs.problem.batch == 1:
            return right
        return Outputs(right.out, torch.nextafter(right.lse, torch.full_like(right.lse, math.inf)))


class UnpromisedLargeBatch(LargeBatch):
    """That, and it says so."""

    promises = frozenset({"repeat", "hidden"})
