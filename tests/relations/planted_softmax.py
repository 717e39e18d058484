"""Softmax kernels with one fault each."""

from __future__ import annotations

import torch

from attncheck.core.outputs import Outputs
from attncheck.subjects.ideal import Ideal


class _After(Ideal):
    """Spoils right outputs."""

    def prepare(self, inputs):
        call = super().prepare(inputs)
        return lambda: self.spoiled(inputs, call())


class NoMaximum(_After):
    """exp of the scores as they are: far above 0 it overflows, far below all are 0."""

    name = "planted-no-maximum"

    def spoiled(self, inputs, right):
        e = inputs.x.float().exp()
        return Outputs((e / e.sum(-1, keepdim=True)).to(right.out.dtype), right.lse)


class RelativeLse(_After):
    """LSE is relative to the row's maximum."""

    name = "planted-relative-lse"

    def spoiled(self, inputs, right):
        return Outputs(right.out, right.lse - inputs.x.float().amax(-1))


class LastColumnTwice(_After):
    """The last column is in the sum twice, as where a tail is read again."""

    name = "planted-last-column-twice"

    def spoiled(self, inputs, right):
        out = right.out.float()
        return Outputs((out / (1 + out[..., -1:])).to(right.out.dtype), right.lse)


class PairsShareAMaximum(_After):
    """Rows 2m and 2m + 1 of a tile subtract one maximum: right, but to the last bit."""

    name = "planted-pairs-share-a-maximum"

    def spoiled(self, inputs, right):
        rows = inputs.x.float().flatten(0, 2)
        first = torch.arange(len(rows)) // 2 * 2
        second = (first + 1).clamp(max=len(rows) - 1)
        top = torch.maximum(rows[first], rows[second]).amax(-1, keepdim=True)
        e = (rows - top).exp()
        out = (e / e.sum(-1, keepdim=True)).view(right.out.shape)
        return Outputs(out.to(right.out.dtype), right.lse)


class PreviousRow(_After):
    """The last row of a head is that of the head before."""

    name = "planted-previous-row"

    def spoiled(self, inputs, right):
        out = right.out.clone()
        out[:, 1:, -1] = right.out[:, :-1, -1]
        return Outputs(out, right.lse)
