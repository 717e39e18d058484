"""Kernels that read other memory than that of their inputs, or that remember."""

from __future__ import annotations

import torch

from attncheck.core.outputs import Outputs
from attncheck.mods.spec import Spec
from attncheck.subjects.ideal import Ideal


def memory(tensor):
    """All that a tensor is a view of, in one row."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((size,), (1,), 0)


class _Elsewhere(Ideal):
    """Reads every tensor by ``read``."""

    def prepare(self, inputs):
        q, k, v = map(self.read, (inputs.q, inputs.k, inputs.v))
        return super().prepare(inputs.replace(q=q, k=k, v=v))


class Flat(_Elsewhere):
    """Takes every tensor for contiguous; after the end of memory there are zeros."""

    name = "planted-flat"

    def read(self, tensor):
        read = tensor.new_zeros(tensor.numel())
        there = memory(tensor)[: tensor.numel()]
        read[: len(there)] = there
        return read.view(tensor.shape)


class FromTheStart(_Elsewhere):
    """Takes every tensor to begin with its memory."""

    name = "planted-from-the-start"

    def read(self, tensor):
        return tensor.as_strided(tensor.shape, tensor.stride(), 0)


class Wrapped(_Elsewhere):
    """Counts rows' elements in an int32."""

    name = "planted-wrapped"

    def prepare(self, inputs):
        if inputs.dout is not None:
            inputs = inputs.replace(dout=self.read(inputs.dout))
        return super().prepare(inputs)

    def read(self, tensor):
        at = torch.tensor(tensor.storage_offset())
        for axis, (length, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            steps = (torch.arange(length) * stride).int().long()
            at = at + steps.view([-1 if each == axis else 1 for each in range(4)])
        return memory(tensor)[at]


class WholeVectors(_Elsewhere):
    """Multiplies what follows a row by 0, and adds it to the row."""

    name = "planted-whole-vectors"

    def read(self, tensor):
        there = memory(tensor).float()
        index = torch.arange(len(there)).as_strided(
            tensor.shape, tensor.stride(), tensor.storage_offset()
        )
        after = there[(index[..., -1:] + 1).clamp(max=len(there) - 1)]
        return (tensor.float() + 0.0 * after).to(tensor.dtype)


class Leftover(Ideal):
    """A little of the call before."""

    name = "planted-leftover"

    def __init__(self):
        super().__init__()
        self.before = 0.0

    def prepare(self, inputs):
        call = super().prepare(inputs)

        def spoiled():
            right = call()
            lse = right.lse + self.before
            self.before = float(right.out.float().abs().mean())
            return Outputs(right.out, lse)

        return spoiled


class StalePadding(Ideal):
    """Keys are kept in a buffer of 16 that is never cleared, and all 16 are seen."""

    name = "planted-stale-padding"

    def __init__(self):
        super().__init__()
        self.kept = {}

    def prepare(self, inputs):
        k, v = (self.buffered(name, getattr(inputs, name)) for name in "kv")
        whole = inputs.problem.replace(kv=16, mask=Spec.of("full"))
        return super().prepare(inputs.replace(problem=whole, k=k, v=v))

    def buffered(self, name, tensor):
        batch, heads, length, dim = tensor.shape
        if name not in self.kept:
            self.kept[name] = tensor.new_zeros((batch, heads, 16, dim))
        self.kept[name][:, :, :length] = tensor
        return self.kept[name].clone()
