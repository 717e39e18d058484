"""Kernels that know where a key, a head or a sequence stands."""

from __future__ import annotations

import torch

from attncheck.core.outputs import Outputs
from attncheck.mods.spec import Spec
from attncheck.subjects.ideal import Ideal


class Reading(Ideal):
    """Reads other inputs than it is given."""

    def prepare(self, inputs):
        call = super().prepare(self.read(inputs))
        return lambda: self.given(inputs, call())

    def read(self, inputs):
        return inputs

    def given(self, inputs, outputs):
        del inputs
        return outputs


class WithoutLastKey(Reading):
    """Forgets the last key."""

    name = "planted-without-last-key"

    def inside(self, keys, kv):
        return keys < max(1, kv - 1)


class LaterKeysWeighMore(Reading):
    """A bias by the key's index that nobody asked for."""

    name = "planted-later-keys-weigh-more"

    def read(self, inputs):
        biased = Spec.of("expression", text="score + 0.25 * kv_idx")
        return inputs.replace(problem=inputs.problem.replace(score=biased))


class ValueOfNeighbour(Reading):
    """The values of keys 2m and 2m + 1 are exchanged."""

    name = "planted-value-of-neighbour"

    def read(self, inputs):
        pair = torch.arange(inputs.problem.kv) ^ 1
        return inputs.replace(v=inputs.v[:, :, pair.clamp(max=inputs.problem.kv - 1)])


class ModuloHead(Reading):
    """Head h reads key head h % kv_heads."""

    name = "planted-modulo-head"

    def read(self, inputs):
        problem = inputs.problem
        heads = torch.arange(problem.heads) % problem.kv_heads
        return inputs.replace(
            problem=problem.replace(kv_heads=problem.heads),
            k=inputs.k[:, heads],
            v=inputs.v[:, heads],
        )


class NextKeyHead(Reading):
    """Reads the values of the key head after its own."""

    name = "planted-next-key-head"

    def read(self, inputs):
        return inputs.replace(v=inputs.v.roll(-1, dims=1))


class LastHeadOff(Reading):
    """One bit too many in the last head."""

    name = "planted-last-head-off"

    def given(self, inputs, outputs):
        del inputs
        out = outputs.out.clone()
        out[:, -1] += out[:, -1].abs() * torch.finfo(out.dtype).eps
        return Outputs(out, outputs.lse)


class NextLength(Reading):
    """Takes the padded length of the sequence after its own."""

    name = "planted-next-length"

    def read(self, inputs):
        lengths = inputs.problem.mask.values["lengths"]
        turned = Spec.of("padding", lengths=[*lengths[1:], lengths[0]])
        return inputs.replace(problem=inputs.problem.replace(mask=turned))


class FirstKeys(Reading):
    """All sequences read the keys of the first one."""

    name = "planted-first-keys"

    def read(self, inputs):
        return inputs.replace(k=inputs.k[:1].expand_as(inputs.k))
