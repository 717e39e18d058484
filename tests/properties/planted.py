"""Kernels with one planted fault each, and one without: ``--kernel tests/…/planted.py::wide``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from attncheck.core.outputs import Outputs
from attncheck.inputs.problem import Problem
from attncheck.subjects.ideal import Ideal
from attncheck.subjects.triton_flash import Flash2

if TYPE_CHECKING:
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.mods.signatures import MaskMod
    from attncheck.subjects.capabilities.subject import Call


class Right(Ideal):
    name = "planted-nothing"


class Wide(Ideal):
    """One key too many."""

    name = "planted-wide"

    def visible(self, mask: MaskMod, at) -> torch.Tensor:
        return at.q_idx + 1 >= at.kv_idx


class Strict(Ideal):
    """Drops the diagonal."""

    name = "planted-strict"

    def visible(self, mask: MaskMod, at) -> torch.Tensor:
        return mask(at.b, at.h, at.q_idx, at.kv_idx) & (at.q_idx != at.kv_idx)


class _OneKeyMore(Problem):
    __slots__ = ()

    def mask_mod(self, device: str = "cpu") -> MaskMod:
        return lambda b, h, q_idx, kv_idx: q_idx + 1 >= kv_idx


class WideFlash2(Flash2):
    """One key too many in the mask that the Triton kernel gets."""

    name = "planted-wide-flash2"

    def prepare(self, inputs: Inputs) -> Call:
        fields = {f.name: getattr(inputs.problem, f.name) for f in dataclasses.fields(Problem)}
        return super().prepare(inputs.replace(problem=_OneKeyMore(**fields)))


class _After(Ideal):
    """Spoils right outputs."""

    def prepare(self, inputs: Inputs) -> Call:
        call = super().prepare(inputs)
        return lambda: self.spoiled(inputs, call())

    def spoiled(self, inputs: Inputs, right: Outputs) -> Outputs:
        raise NotImplementedError


class Leaky(_After):
    """Hidden values arrive as 0 · value: nothing, unless it is not finite."""

    name = "planted-leaky"

    def spoiled(self, inputs: Inputs, right: Outputs) -> Outputs:
        leak = (inputs.v * 0.0).sum(2, keepdim=True)
        leak = leak.repeat_interleave(inputs.problem.group, 1)
        return Outputs(right.out + leak, right.lse)


class LeakyLse(_After):
    """The largest key of all, hidden or not, moves the LSE and nothing else."""

    name = "planted-leaky-lse"

    def spoiled(self, inputs: Inputs, right: Outputs) -> Outputs:
        assert right.lse is not None
        return Outputs(right.out, right.lse + 1e-3 * inputs.k.float().abs().amax())


class WrongHead(_After):
    """Row 0 from kv head h % kv_heads instead of h // group."""

    name = "planted-wrong-head"

    def spoiled(self, inputs: Inputs, right: Outputs) -> Outputs:
        problem, out = inputs.problem, right.out.clone()
        heads = torch.arange(problem.heads) % problem.kv_heads
        out[:, :, 0] = inputs.v[:, heads, 0]
        return Outputs(out, right.lse)


class Biased(_After):
    """Adds a little."""

    name = "planted-biased"

    def spoiled(self, inputs: Inputs, right: Outputs) -> Outputs:
        return Outputs(right.out + 2.0**-20, right.lse)


class Restless(_After):
    """Another last bit in every second call."""

    name = "planted-restless"

    calls = 0

    def spoiled(self, inputs: Inputs, right: Outputs) -> Outputs:
        self.calls += 1
        assert right.lse is not None
        lse = torch.nextafter(right.lse, torch.full_like(right.lse, torch.inf))
        return right if self.calls % 2 else Outputs(right.out, lse)


class Reusing(_After):
    """Writes every result to the same buffer, and another one each time."""

    name = "planted-reusing"

    def __init__(self) -> None:
        super().__init__()
        self.buffers: dict[tuple[int, ...], torch.Tensor] = {}
        self.calls = 0

    def spoiled(self, inputs: Inputs, right: Outputs) -> Outputs:
        self.calls += 1
        buffer = self.buffers.setdefault(tuple(right.out.shape), torch.empty_like(right.out))
        buffer.copy_(right.out + self.calls)
        return Outputs(buffer)


class Raising(_After):
    """Fails on two or more keys."""

    name = "planted-raising"

    def spoiled(self, inputs: Inputs, right: Outputs) -> Outputs:
        if inputs.problem.kv > 1:
            raise RuntimeError("illegal memory access")
        return right


class Picky(Ideal):
    """Takes nothing."""

    name = "planted-picky"

    def unsupported(self, problem: Problem, device: str) -> str | None:
        return "head_dim must be 512"


class Absent(Ideal):
    name = "planted-absent"

    def absent(self, device: str) -> str | None:
        return "it needs a quantum computer"


class Unmakeable(Ideal):
    name = "planted-unmakeable"

    def __init__(self) -> None:
        raise ValueError("no licence")


right, wide, strict, wide_flash2 = Right(), Wide(), Strict(), WideFlash2()
not_a_subject = 3
