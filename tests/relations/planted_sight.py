"""Kernels that see what they should not, or make something of nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from attncheck.core.outputs import Outputs
from attncheck.subjects.ideal import Ideal


class LongerWindow(Ideal):
    """One key more on the side of the past."""

    name = "planted-longer-window"

    def visible(self, mask, at):
        return mask(at.b, at.h, at.q_idx, at.kv_idx) | mask(at.b, at.h, at.q_idx, at.kv_idx + 1)


class OtherHeadsMask(Ideal):
    """Every head sees what head 0 sees."""

    name = "planted-other-heads-mask"

    def visible(self, mask, at):
        return mask(at.b, torch.zeros_like(at.h), at.q_idx, at.kv_idx)


class Sentinel(Ideal):
    """Hidden scores are −12, which is low enough for most of what others are."""

    name = "planted-sentinel"
    hidden_score = -12.0


class _After(Ideal):
    """Spoils right outputs."""

    def prepare(self, inputs):
        call = super().prepare(inputs)
        return lambda: self.spoiled(inputs, call())


class Leaky(_After):
    """Every value arrives in every row as 0 · value: nothing, unless it is not finite."""

    name = "planted-leaky"

    def spoiled(self, inputs, right):
        leak = (inputs.v.float() * 0.0).sum(2, keepdim=True)
        leak = leak.repeat_interleave(inputs.problem.group, 1)
        return Outputs((right.out + leak).to(right.out.dtype), right.lse)


class Overflowing(_After):
    """q · k of every key in fp32 before the mask is multiplied: inf · 0 is NaN."""

    name = "planted-overflowing"

    def spoiled(self, inputs, right):
        largest = inputs.k.float().abs().amax((2, 3)) * 2.0**100
        leak = (largest * 0.0).repeat_interleave(inputs.problem.group, 1)
        return Outputs(right.out, right.lse + leak[..., None])


class MeanOfNothing(_After):
    """Rows that see no key give the mean of V, as a finite sentinel makes it."""

    name = "planted-mean-of-nothing"

    def spoiled(self, inputs, right):
        mean = inputs.v.float().mean(2, keepdim=True).repeat_interleave(inputs.problem.group, 1)
        dead = torch.isneginf(right.lse)[..., None]
        return Outputs(torch.where(dead, mean, right.out.float()).to(right.out.dtype), right.lse)


class NothingIsNan(_After):
    """0 / 0 in rows that see no key."""

    name = "planted-nothing-is-nan"

    def spoiled(self, inputs, right):
        dead = torch.isneginf(right.lse)[..., None]
        return Outputs(right.out.masked_fill(dead, torch.nan), right.lse)


class LowestLse(_After):
    """The logarithm of nothing is a finite number."""

    name = "planted-lowest-lse"

    def spoiled(self, inputs, right):
        return Outputs(right.out, right.lse.clamp(min=-1e9))


class DividedByAll(_After):
    """Divided by the number of keys, seen or not."""

    name = "planted-divided-by-all"

    def spoiled(self, inputs, right):
        share = right.lse.exp().clamp(max=inputs.problem.kv) / inputs.problem.kv
        return Outputs((right.out * share[..., None]).to(right.out.dtype), right.lse)


class BaseTwo(_After):
    """LSE in base 2."""

    name = "planted-base-two"

    def spoiled(self, inputs, right):
        return Outputs(right.out, right.lse / math.log(2.0))


class WithoutLastKey(Ideal):
    """Forgets the last key."""

    name = "planted-without-last-key"

    def inside(self, keys, kv):
        return keys < max(1, kv - 1)


class SwappedValues(Ideal):
    """The values of keys 2m and 2m + 1 are exchanged."""

    name = "planted-swapped-values"

    def prepare(self, inputs):
        pair = (torch.arange(inputs.problem.kv) ^ 1).clamp(max=inputs.problem.kv - 1)
        return super().prepare(inputs.replace(v=inputs.v[:, :, pair]))


class OutThroughBf16(_After):
    """Out has been bf16 on its way."""

    name = "planted-out-through-bf16"

    def spoiled(self, inputs, right):
        return Outputs(right.out.bfloat16().to(right.out.dtype), right.lse)


class LaterRow(Ideal):
    """Each row is told to be one further than it is."""

    name = "planted-later-row"

    def visible(self, mask, at):
        return super().visible(mask, replace(at, q_idx=at.q_idx + 1))
