"""Kernels that are not linear in V, or for which a shift of the logits is more than a shift."""

from __future__ import annotations

import torch

from attncheck.core.outputs import Outputs
from attncheck.mods.spec import Spec
from attncheck.subjects.ideal import Ideal


class _After(Ideal):
    """Spoils right outputs."""

    def prepare(self, inputs):
        call = super().prepare(inputs)
        return lambda: self.spoiled(inputs, call())


class Biased(_After):
    """Adds a little."""

    name = "planted-biased"

    def spoiled(self, inputs, right):
        return Outputs((right.out + 2.0**-6).to(right.out.dtype), right.lse)


class FixedPoint(_After):
    """Out is rounded to whole multiples of a number."""

    name = "planted-fixed-point"

    def spoiled(self, inputs, right):
        return Outputs(((right.out * 256).round() / 256).to(right.out.dtype), right.lse)


class ClippedValues(Ideal):
    """Values beyond 1 are taken for 1."""

    name = "planted-clipped-values"

    def prepare(self, inputs):
        v = inputs.v.float().clamp(-1, 1).to(inputs.v.dtype)
        return super().prepare(inputs.replace(v=v))


class ZeroValuesArePadding(Ideal):
    """Keys whose values are 0 are left out of the softmax, as if they were padding."""

    name = "planted-zero-values-are-padding"

    def prepare(self, inputs):
        self.there = inputs.v.float().ne(0).any(-1).repeat_interleave(inputs.problem.group, 1)
        return super().prepare(inputs)

    def visible(self, mask, at):
        there = self.there[at.b, at.h, at.kv_idx]
        return super().visible(mask, at) & there


class MaximumFromZero(Ideal):
    """The running maximum starts at 0: nothing is left of scores far below."""

    name = "planted-maximum-from-zero"
    first_maximum = 0.0


class NoMaximum(Ideal):
    """exp of the scores as they are: far above 0 it overflows."""

    name = "planted-no-maximum"

    def prepare(self, inputs):
        call = super().prepare(inputs)

        def without():
            right = call()
            return Outputs(right.out.masked_fill((right.lse > 89)[..., None], torch.nan), right.lse)

        return without


class ScoresInBf16(Ideal):
    """q · k is kept in bf16."""

    name = "planted-scores-in-bf16"

    def scores(self, products):
        return products.bfloat16().float()


class Sentinel(Ideal):
    """Hidden scores are −300, which is low enough for most of what others are."""

    name = "planted-sentinel"
    hidden_score = -300.0


class LseWithoutMod(Ideal):
    """LSE is that of the scores before the score mod."""

    name = "planted-lse-without-mod"

    def prepare(self, inputs):
        call = super().prepare(inputs)
        plain = super().prepare(
            inputs.replace(problem=inputs.problem.replace(score=Spec.of("none")))
        )
        return lambda: Outputs(call().out, plain().lse)


class FirstHeadsMod(Ideal):
    """Every head has the score mod of head 0."""

    name = "planted-first-heads-mod"

    def prepare(self, inputs):
        score = inputs.problem.score
        if score.name == "expression":
            text = score.values["text"].replace("h", "0")
            score = Spec.of("expression", text=text)
        return super().prepare(inputs.replace(problem=inputs.problem.replace(score=score)))
