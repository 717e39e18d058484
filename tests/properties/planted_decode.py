"""Kernels for decoding with faults: in how splits are merged, and in what their mods are asked."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attncheck.core.outputs import Outputs
from attncheck.subjects.ideal import Ideal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attncheck.core.mod_spec import Spec
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Problem
    from attncheck.subjects.capabilities.subject import Call, Subject, Tiling

SPLIT = 16  # keys


class Splits(Ideal):
    """Right, of finite values: attention over every 16 keys in float64, merged by LSE."""

    name = "planted-Splits"
    sinks = False

    def tiling(self, problem: Problem, device: str) -> Tiling | None:
        del problem, device
        return None

    def prepare(self, inputs: Inputs) -> Call:
        if inputs.problem.operation != "attention":
            return super().prepare(inputs)
        return lambda: self.run_splits(inputs)

    def run_splits(self, inputs: Inputs) -> Outputs:
        starts = range(0, inputs.problem.kv, SPLIT)
        parts = [self.part(inputs, start) for start in starts]
        out, lse = self.merged(*(torch.stack(each) for each in zip(*parts, strict=True)))
        return Outputs(out.to(inputs.problem.formats.output.torch_dtype), lse.float())

    def part(self, inputs: Inputs, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Out and LSE of the keys of one split."""
        problem = inputs.problem
        q, k, v = inputs.promoted()
        k, v = (
            tensor[:, :, start : start + SPLIT].repeat_interleave(problem.group, dim=1)
            for tensor in (k, v)
        )
        sizes = (problem.batch, problem.heads, problem.query, k.shape[2])
        b, h, row, key = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
        scores = problem.score_mod()(q @ k.mT * problem.scale, b, h, row, key + start)
        seen = problem.mask_mod()(b, h, row, self.key(key, start)).expand(sizes)
        scores = torch.where(seen, scores, -math.inf)
        lse = scores.logsumexp(-1)
        weights = torch.where(seen, (scores - lse[..., None]).exp(), 0.0)
        return weights @ v, lse

    def key(self, key: torch.Tensor, start: int) -> torch.Tensor:
        """What the mask is asked about a key of a split."""
        return key + start

    def merged(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of what the splits give, stacked."""
        total = lse.logsumexp(0)
        weights = torch.where(lse == -math.inf, 0.0, (lse - total).exp())
        return (weights[..., None] * out).sum(0), total


class MergedWithoutWeights(Splits):
    """Out is the mean of the splits'."""

    name = "planted-MergedWithoutWeights"

    def merged(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return out.mean(0), super().merged(out, lse)[1]


class EmptySplitCounts(Splits):
    """A split of which a row sees nothing has LSE 0, as if it had summed up one."""

    name = "planted-EmptySplitCounts"

    def merged(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().merged(out, torch.where(lse == -math.inf, 0.0, lse))


class LastSplitDropped(Splits):
    """The last of several splits is not merged."""

    name = "planted-LastSplitDropped"

    def merged(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = max(1, len(lse) - 1)
        return super().merged(out[:kept], lse[:kept])


class LocalKeys(Splits):
    """The mask is asked about a key's place in its split."""

    name = "planted-LocalKeys"

    def key(self, key: torch.Tensor, start: int) -> torch.Tensor:
        del start
        return key


class OtherLaunchDropsKeys(Splits):
    """Right as it launches itself, and not in the splits that it may have."""

    name = "planted-OtherLaunchDropsKeys"

    def launches(self, problem: Problem, device: str) -> Mapping[str, Subject]:
        del problem, device
        return {"one split": Splits(), "splits": LastSplitDropped()}


class OffsetForgotten(Ideal):
    """The mask is asked about row 0 and on, not about the rows behind earlier ones."""

    name = "planted-OffsetForgotten"

    def prepare(self, inputs: Inputs) -> Call:
        problem = inputs.problem
        return super().prepare(inputs.replace(problem=problem.replace(mask=_plain(problem.mask))))


class ScoreOffsetForgotten(Ideal):
    """The same of the score mod."""

    name = "planted-ScoreOffsetForgotten"

    def prepare(self, inputs: Inputs) -> Call:
        problem = inputs.problem
        return super().prepare(inputs.replace(problem=problem.replace(score=_plain(problem.score))))


def _plain(mod: Spec) -> Spec:
    return mod.parts[0] if mod.name == "offset" else mod
