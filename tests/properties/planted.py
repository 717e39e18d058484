"""Kernels with a planted fault each, and one without, for ``--kernel tests/…/planted.py::wide``."""

import dataclasses

import torch

from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Problem
from attncheck.mods.signatures import MaskMod
from attncheck.subjects.capabilities.subject import Call
from attncheck.subjects.ideal import Ideal
from attncheck.subjects.triton_flash import Flash2


class Right(Ideal):
    name = "planted-nothing"


class Wide(Ideal):
    """A causal mask one key too wide."""

    name = "planted-wide"

    def visible(self, mask: MaskMod, at) -> torch.Tensor:
        return at.q_idx + 1 >= at.kv_idx


class Strict(Ideal):
    """A mask without its diagonal."""

    name = "planted-strict"

    def visible(self, mask: MaskMod, at) -> torch.Tensor:
        return mask(at.b, at.h, at.q_idx, at.kv_idx) & (at.q_idx != at.kv_idx)


class _OneKeyMore(Problem):
    __slots__ = ()

    def mask_mod(self, device: str = "cpu") -> MaskMod:
        return lambda b, h, q_idx, kv_idx: q_idx + 1 >= kv_idx


class WideFlash2(Flash2):
    """A Triton kernel whose causal mask is one key too wide."""

    name = "planted-wide-flash2"

    def prepare(self, inputs: Inputs) -> Call:
        fields = {f.name: getattr(inputs.problem, f.name) for f in dataclasses.fields(Problem)}
        return super().prepare(inputs.replace(problem=_OneKeyMore(**fields)))


class Raising(Ideal):
    """Raises on two or more keys."""

    name = "planted-raising"

    def prepare(self, inputs: Inputs) -> Call:
        if inputs.problem.kv > 1:
            raise RuntimeError("illegal memory access")
        return super().prepare(inputs)


class Picky(Ideal):
    """Refuses every problem."""

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
