"""Kernels for which what means the same is not the same."""

from __future__ import annotations

import dataclasses
import math

import torch

from attncheck.core.outputs import Outputs
from attncheck.inputs.problem import Problem
from attncheck.mods.spec import Spec
from attncheck.subjects.ideal import Ideal


class _Before(Ideal):
    """Spoils the question."""

    def prepare(self, inputs):
        return super().prepare(self.spoiled(inputs, inputs.problem))


class _After(Ideal):
    """Spoils right outputs."""

    def prepare(self, inputs):
        call = super().prepare(inputs)
        return lambda: self.spoiled(inputs, call())


class ShortWindow(_Before):
    """One key less than the window."""

    name = "planted-short-window"

    def spoiled(self, inputs, problem):
        if problem.mask.name != "sliding_window":
            return inputs
        mask = Spec.of("sliding_window", window=problem.mask.values["window"] - 1)
        return inputs.replace(problem=problem.replace(mask=mask))


class OverflowingWindow(Ideal):
    """Adds the window to a key's index in 32 bits."""

    name = "planted-overflowing-window"

    def prepare(self, inputs):
        self.window = inputs.problem.mask.values.get("window")
        return super().prepare(inputs)

    def visible(self, mask, at):
        if self.window is None:
            return super().visible(mask, at)
        end = at.kv_idx.int() + torch.tensor(self.window, dtype=torch.int32)
        return (at.q_idx < end) & (at.q_idx >= at.kv_idx)


class _OtherPrefix(_Before):
    by = 0

    def spoiled(self, inputs, problem):
        if problem.mask.name != "prefix_lm":
            return inputs
        prefix = problem.mask.values["prefix"] + self.by
        mask = Spec.of("prefix_lm", prefix=max(0, prefix))
        return inputs.replace(problem=problem.replace(mask=mask))


class LongPrefix(_OtherPrefix):
    """One key too many."""

    name = "planted-long-prefix"
    by = 1


class ShortPrefix(_OtherPrefix):
    """One key too few."""

    name = "planted-short-prefix"
    by = -1


class FixedCap(_Before):
    """A cap of 1, whatever the cap."""

    name = "planted-fixed-cap"

    def spoiled(self, inputs, problem):
        if problem.score.name != "softcap":
            return inputs
        return inputs.replace(problem=problem.replace(score=Spec.of("softcap", cap=1.0)))


class _TanhOfExponentials(Problem):
    __slots__ = ()

    def score_mod(self, device="cpu"):
        cap = self.score.values["cap"]
        return lambda score, *_: cap * (1 - 2 / ((2 * score / cap).exp() + 1))


class CancellingTanh(_Before):
    """tanh x = 1 − 2/(e^2x + 1), which is 0 for small x."""

    name = "planted-cancelling-tanh"

    def spoiled(self, inputs, problem):
        if problem.score.name != "softcap":
            return inputs
        fields = {f.name: getattr(problem, f.name) for f in dataclasses.fields(Problem)}
        return inputs.replace(problem=_TanhOfExponentials(**fields))


class InterleavedHeads(_Before):
    """Query head h reads key head h % kv_heads."""

    name = "planted-interleaved-heads"

    def spoiled(self, inputs, problem):
        order = torch.arange(problem.heads) % problem.kv_heads
        scales = inputs.descale
        if scales is not None:
            scales = type(scales)(q=scales.q[:, order], k=scales.k[:, order], v=scales.v[:, order])
        return inputs.replace(
            problem=problem.replace(kv_heads=problem.heads),
            k=inputs.k[:, order],
            v=inputs.v[:, order],
            descale=scales,
        )


class ScaleOfItsOwn(_Before):
    """1/√head_dim, whatever the scale."""

    name = "planted-scale-of-its-own"

    def spoiled(self, inputs, problem):
        return inputs.replace(problem=problem.replace(scale=1 / math.sqrt(problem.head_dim)))


class ClippedScores(Ideal):
    """q·k within ±2."""

    name = "planted-clipped-scores"

    def scores(self, products):
        return products.clamp(-2, 2)


class Trace(_After):
    """A trace of the first column in the last one."""

    name = "planted-trace"

    def spoiled(self, inputs, right):
        out = right.out.clone()
        out[..., -1] += out[..., 0] * 2.0**-30
        return Outputs(out, right.lse)


class _OneDescale(_Before):
    ignored = ""

    def spoiled(self, inputs, problem):
        ones = {self.ignored: torch.ones_like(getattr(inputs.descale, self.ignored))}
        return inputs.replace(descale=dataclasses.replace(inputs.descale, **ones))


class WithoutQueryDescale(_OneDescale):
    name = "planted-without-query-descale"
    ignored = "q"


class WithoutKeyDescale(_OneDescale):
    name = "planted-without-key-descale"
    ignored = "k"


class WithoutValueDescale(_OneDescale):
    name = "planted-without-value-descale"
    ignored = "v"
