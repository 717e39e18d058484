"""Kernels whose answer depends on the batch, on earlier calls or on luck; and softmaxes."""

from __future__ import annotations

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


class BatchDependent(Ideal):
    """Tiles are larger where there are several (batch, head) pairs: another order of sums."""

    name = "planted-BatchDependent"

    def tiling(self, problem: Problem, device: str) -> Tiling:
        block = 16 if problem.batch * problem.heads == 1 else 64
        return Tiling(block_query=16, block_kv=block)


class Unsteady(Ideal):
    """Every other call moves the last bit of LSE."""

    name = "planted-Unsteady"

    def __init__(self) -> None:
        super().__init__(Tiling(block_query=16, block_kv=16))
        self.calls = 0

    def prepare(self, inputs: Inputs) -> Call:
        right = super().prepare(inputs)

        def call() -> Outputs:
            self.calls += 1
            given = right()
            return Outputs(given.out, _moved(given.lse)) if self.calls % 2 else given

        return call


class Stateful(Ideal):
    """Keeps the strides and the scale of the first call of each shape."""

    name = "planted-Stateful"

    def __init__(self) -> None:
        super().__init__(Tiling(block_query=16, block_kv=16))
        self.scales: dict[str, float] = {}

    def prepare(self, inputs: Inputs) -> Call:
        problem = inputs.problem
        scale = self.scales.setdefault(problem.shape, problem.scale)
        return super().prepare(inputs.replace(problem=problem.replace(scale=scale)))


class LeavesTraces(Ideal):
    """A call after one with other inputs starts from what that one left."""

    name = "planted-LeavesTraces"

    def __init__(self) -> None:
        super().__init__(Tiling(block_query=16, block_kv=16))
        self.before: torch.Tensor | None = None

    def prepare(self, inputs: Inputs) -> Call:
        right = super().prepare(inputs)
        tensor = inputs.q if inputs.x is None else inputs.x

        def call() -> Outputs:
            clean = self.before is None or _same(self.before, tensor)
            self.before = tensor.clone()
            given = right()
            return given if clean else Outputs(given.out, _moved(given.lse))

        return call


class MaskKeptByShape(Ideal):
    """Applies the mask of the first call of these lengths to all calls of them."""

    name = "planted-MaskKeptByShape"

    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[tuple[int, int], Problem] = {}

    def prepare(self, inputs: Inputs) -> Call:
        problem = inputs.problem
        if problem.operation != "attention":
            return super().prepare(inputs)
        kept = self.masks.setdefault((problem.query, problem.kv), problem)
        return super().prepare(inputs.replace(problem=problem.replace(mask=kept.mask)))


class Softmax(Ideal):
    """One block that reads what is behind a row as 0, and sums it: of softmax alone."""

    name = "planted-Softmax"

    def concerns(self, problem: Problem) -> bool:
        return problem.operation == "softmax"

    def prepare(self, inputs: Inputs) -> Call:
        x = inputs.x
        assert x is not None

        def call() -> Outputs:
            columns = x.shape[-1]
            wide = 1 << (columns - 1).bit_length()
            padded = torch.nn.functional.pad(x.float(), (0, wide - columns))
            out = torch.softmax(padded, -1)[..., :columns]
            return Outputs(out.to(x.dtype), torch.logsumexp(padded, -1))

        return call


class SoftmaxWithoutMaximum(Softmax):
    """exp(x) over its sum."""

    name = "planted-SoftmaxWithoutMaximum"

    def prepare(self, inputs: Inputs) -> Call:
        x = inputs.x
        assert x is not None

        def call() -> Outputs:
            e = x.float().exp()
            total = e.sum(-1)
            return Outputs((e / total[..., None]).to(x.dtype), total.log())

        return call


def _moved(lse: torch.Tensor | None) -> torch.Tensor:
    assert lse is not None
    return torch.nextafter(lse, torch.full_like(lse, math.inf))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and bool(torch.equal(one, other))


class SoftmaxLoopFloor(Softmax):
    """Columns behind the last whole tile of 16 do not enter the sum."""

    name = "planted-SoftmaxLoopFloor"

    def prepare(self, inputs: Inputs) -> Call:
        x = inputs.x
        assert x is not None

        def call() -> Outputs:
            columns = x.shape[-1]
            seen = columns if columns < 16 else columns // 16 * 16
            scores = x.float()
            lse = scores[..., :seen].logsumexp(-1)
            return Outputs((scores - lse[..., None]).exp().to(x.dtype), lse)

        return call


class LastRowBlind(Softmax):
    """The last row of all is computed with another order of sums: its LSE has another last bit."""

    name = "planted-LastRowBlind"

    def prepare(self, inputs: Inputs) -> Call:
        right = Ideal.prepare(self, inputs)

        def call() -> Outputs:
            given = right()
            lse = given.lse.clone()
            lse[-1, -1, -1] = _moved(given.lse)[-1, -1, -1]
            return Outputs(given.out, lse)

        return call
