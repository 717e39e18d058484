"""Kernels with a slip in what fp8 alone has: descales, and P scaled before it is rounded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attncheck.inputs.input_tensors import Descale
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal

if TYPE_CHECKING:
    from attncheck.core.declared_arithmetic import Arithmetic
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Problem
    from attncheck.subjects.capabilities.subject import Call


class Descaled(Ideal):
    """Reads other descales than it is given."""

    def __init__(self) -> None:
        super().__init__(Tiling(block_query=16, block_kv=16))
        self.name = f"planted-{type(self).__name__}"

    def prepare(self, inputs: Inputs) -> Call:
        if inputs.descale is None:
            return super().prepare(inputs)
        given = {name: getattr(inputs.descale, name) for name in "qkv"}
        return super().prepare(inputs.replace(descale=Descale(**given | self.other(given))))

    def other(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {}


class WithoutValueDescale(Descaled):
    """V's descale is left out."""

    def other(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"v": torch.ones_like(given["v"])}


class QueryDescaleTwice(Descaled):
    """q's descale is multiplied in once too often."""

    def other(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"q": given["q"] ** 2}


class FirstSequencesDescale(Descaled):
    """The descales of the first sequence for all."""

    def other(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: scale[:1].expand_as(scale) for name, scale in given.items()}


class NextHeadsKeyDescale(Descaled):
    """k's descale is that of the next kv head."""

    def other(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"k": given["k"].roll(1, 1)}


class NextHeadsValueDescale(Descaled):
    """V's descale is that of the next kv head."""

    def other(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"v": given["v"].roll(1, 1)}


class WeightsNotScaled(Descaled):
    """P is rounded as it is: what is below the format's smallest number is lost."""

    def weights_scale(self, problem: Problem) -> float:
        return 1.0

    def arithmetic(self, problem: Problem, device: str) -> Arithmetic:
        """As of a kernel that scales it."""
        return Ideal(self.tiling(problem, device)).arithmetic(problem, device)


class PagedFirstDescale(FirstSequencesDescale):
    """The same, and keys in pages: the ideal kernel reads them where they were drawn."""

    def concerns(self, problem: Problem) -> bool:
        return problem.paging is not None


class SinkDescaled(Descaled):
    """The sink is multiplied by the descales of q and k, as if it were a score."""

    def prepare(self, inputs: Inputs) -> Call:
        if inputs.descale is None or inputs.sink is None:
            return super().prepare(inputs)
        products = (inputs.descale.q * inputs.descale.k)[0]
        heads = products.repeat_interleave(inputs.problem.group)
        return super().prepare(inputs.replace(sink=inputs.sink * heads))
