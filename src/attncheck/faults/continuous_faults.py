"""Faults of the ideal kernel of any size: steps with a number in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attncheck.core.errors import look_up
from attncheck.core.formats import DTYPES, FORMATS
from attncheck.fault_models.steps import Steps
from attncheck.subjects.ideal import Ideal

_STEPS_OF_OCTAVE = 4
_SMALLEST = 30  # octaves below 1; fp32 resolves 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuousFault:
    """A fault of any size."""

    id: str  # words with hyphens
    summary: str  # what the kernel does wrong, in one line
    # ``ε``, which grows with the fault, or ``bits``, of which fewer are worse.
    unit: Literal["ε", "bits"]
    steps: Callable[[float], Steps]  # size → the changed steps of the ideal kernel

    def sizes(self, dtype: str) -> tuple[float, ...]:
        """Return sizes from the largest fault down: quarters of an octave from 1, or whole bits.

        Bits end where none are lost: of P with those of the dtype's product, of an accumulator with
        those of fp32.
        """
        if self.unit == "ε":
            return tuple(
                2.0 ** (-n / _STEPS_OF_OCTAVE) for n in range(_SMALLEST * _STEPS_OF_OCTAVE)
            )
        # P is rounded to the dtype as it is read; sums are kept in fp32.
        exact = DTYPES[dtype].weights if self.id == "weights-of-few-bits" else FORMATS["fp32"]
        return tuple(range(1, exact.significand))

    def kernel(self, size: float) -> Ideal:
        """Return the ideal kernel with the fault of one size."""
        # The source need not be copied: steps of any size are set on the kernel itself.
        kernel = Ideal()
        kernel.steps = self.steps(size)
        kernel.name = f"{self.id}={size:g}"
        return kernel


def _few_bits(bits: float) -> Callable[[Tensor], Tensor]:
    """Return a rounding of finite fp32 numbers to ``bits`` bits, in float64 (Veltkamp 1968)."""
    # x·s − (x·s − x) keeps the leading bits of x, for s = 2^(53 − bits) + 1.
    splitter = 2.0 ** (53 - bits) + 1

    def rounded(x: Tensor) -> Tensor:
        wide = x.double() * splitter
        return torch.where(x.isfinite(), (wide - (wide - x)).float(), x)

    return rounded


CONTINUOUS_FAULTS = {
    fault.id: fault
    for fault in (
        ContinuousFault(
            id="scale-off",
            summary="the softmax scale is 1 + ε times its own",
            unit="ε",
            steps=lambda size: Steps(scale=lambda problem: problem.scale * (1 + size)),
        ),
        ContinuousFault(
            id="first-key-heavier",
            summary="the first key's weight is 1 + ε times its own",
            unit="ε",
            steps=lambda size: Steps(first_weight=1 + size),
        ),
        ContinuousFault(
            id="weights-of-few-bits",
            summary="P has few bits as P·V reads it",
            unit="bits",
            steps=lambda bits: Steps(weights=_few_bits(bits)),
        ),
        ContinuousFault(
            id="sums-of-few-bits",
            summary="O has few bits after each tile of keys",
            unit="bits",
            steps=lambda bits: Steps(kept_out=_few_bits(bits)),
        ),
    )
}
"""Every continuous fault, by id."""


def continuous_fault_named(name: str) -> ContinuousFault:
    """Return the continuous fault ``name``; raise UnknownName with the valid names."""
    return look_up("continuous fault", name, CONTINUOUS_FAULTS)
