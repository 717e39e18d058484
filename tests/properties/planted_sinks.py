"""Kernels that have a sink, and not the one that they were given."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from attncheck.core.outputs import Outputs
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal

if TYPE_CHECKING:
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Problem
    from attncheck.subjects.capabilities.subject import Call


class OtherSinks(Ideal):
    """Ideal attention with other sinks."""

    def __init__(self) -> None:
        super().__init__(Tiling(block_query=16, block_kv=16))
        self.name = f"planted-{type(self).__name__}"

    def concerns(self, problem: Problem) -> bool:
        return problem.operation == "attention"

    def other(self, inputs: Inputs, sink: torch.Tensor) -> torch.Tensor:
        """fp32 ``(heads,)``."""
        raise NotImplementedError

    def prepare(self, inputs: Inputs) -> Call:
        if inputs.sink is None:
            return super().prepare(inputs)
        return super().prepare(inputs.replace(sink=self.other(inputs, inputs.sink).float()))


def without_sink(inputs: Inputs) -> Inputs:
    """The same of keys alone."""
    plain = inputs.problem.replace(sink=False)
    return dataclasses.replace(inputs, problem=plain, sink=None)


class Ignored(OtherSinks):
    """Takes it and leaves it."""

    def other(self, inputs, sink):
        return torch.full_like(sink, -math.inf)


class Scaled(OtherSinks):
    """Multiplied by the softmax scale, as if it were q·k."""

    def other(self, inputs, sink):
        return sink * inputs.problem.scale


class NextHeads(OtherSinks):
    """That of head h + 1."""

    def other(self, inputs, sink):
        return sink.roll(-1)


class TakenForLog2(OtherSinks):
    """Added to scores that are in log2 units already."""

    def other(self, inputs, sink):
        return sink * math.log(2)


class Twice(OtherSinks):
    """In each of two parts of the keys, and then in both."""

    def other(self, inputs, sink):
        return sink + math.log(2)


class Clamped(OtherSinks):
    """As exp(sink) is in fp32."""

    def other(self, inputs, sink):
        return sink.clamp(-87.0, 88.0)


class UnderTheScoreMod(OtherSinks):
    """The score mod changes it like a score of key 0."""

    def other(self, inputs, sink):
        none = torch.zeros_like(sink, dtype=torch.int64)
        heads = torch.arange(len(sink))
        return inputs.problem.score_mod()(sink, none, heads, none, none)


class OfTheFirstHead(OtherSinks):
    """One number for all heads."""

    def other(self, inputs, sink):
        return sink[:1].expand_as(sink).contiguous()


class OfAllKeys(OtherSinks):
    """Moved by the largest key, hidden or not."""

    def other(self, inputs, sink):
        return sink + inputs.k.float().abs().amax()


class PerKey(OtherSinks):
    """Once for each key."""

    def other(self, inputs, sink):
        return sink + math.log(inputs.problem.kv)


class NotInLse(Ideal):
    """LSE is of the keys alone."""

    name = "planted-NotInLse"

    def prepare(self, inputs: Inputs) -> Call:
        if inputs.sink is None:
            return super().prepare(inputs)
        right, alone = super().prepare(inputs), super().prepare(without_sink(inputs))
        return lambda: Outputs(right().out, alone().lse)


class EmptyRowsEmpty(Ideal):
    """LSE of a row that sees no key is −∞ all the same."""

    name = "planted-EmptyRowsEmpty"

    def prepare(self, inputs: Inputs) -> Call:
        if inputs.sink is None:
            return super().prepare(inputs)
        right, alone = super().prepare(inputs), super().prepare(without_sink(inputs))

        def call() -> Outputs:
            given, keys = right(), alone().lse
            return Outputs(given.out, torch.where(keys == -math.inf, keys, given.lse))

        return call
