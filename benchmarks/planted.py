"""Faults of real kernels, planted in the ideal kernel; each is a subclass without switches.

A fault that only rounds would be a legitimate design if the kernel declared it.
"""

from __future__ import annotations

from dataclasses import dataclass

import wrong_arithmetic as arithmetic
import wrong_structure as structure
from wrong_structure import TILING, Planted

from attncheck.core.mod_spec import Spec

__all__ = ["DTYPES", "FAULTS", "MASKS", "TILING", "Fault", "Planted"]

DTYPES = ("fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2")
FP8 = ("e4m3", "e5m2")
MASKS = {  # a window is aligned top-left, so it needs equal lengths
    "full": lambda _: Spec.of("full"),
    "causal": lambda _: Spec.of("causal_bottom_right"),
    "window": lambda kv: Spec.of("sliding_window", window=max(2, kv // 4)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault and the problems on which it shows.

    Attributes:
        name: Row of the table.
        kernel: The kernel with the fault.
        mask: A name of ``MASKS``.
        dtypes: The dtypes in which it is a fault.
        heads: Numbers of query and key heads.
    """

    name: str
    kernel: type[Planted]
    mask: str = "full"
    dtypes: tuple[str, ...] = DTYPES
    heads: tuple[int, int] = (2, 1)

    @property
    def summary(self) -> str:
        """The kernel's docstring as one line."""
        return (self.kernel.__doc__ or "").rstrip(".")


def _fault(name: str, kernel: type[Planted], mask: str = "full", *dtypes: str) -> Fault:
    heads = (8, 8) if kernel is structure.OneHead else (2, 1)
    return Fault(name=name, kernel=kernel, mask=mask, dtypes=dtypes or DTYPES, heads=heads)


FAULTS: tuple[Fault, ...] = (
    _fault("causal +1", structure.CausalPlus, "causal"),
    _fault("causal -1", structure.CausalMinus, "causal"),
    _fault("window +1", structure.WindowPlus, "window"),
    _fault("window -1", structure.WindowMinus, "window"),
    _fault("one key dropped", structure.KeyDropped),
    _fault("last tile unmasked", structure.LastTileUnmasked, "causal"),
    _fault("padding counted", structure.PaddingCounted),
    _fault("top-left for bottom-right", structure.TopLeft, "causal"),
    _fault("alpha skipped", structure.AlphaSkipped),
    _fault("alpha skipped once", structure.AlphaSkippedOnce),
    _fault("l skipped", structure.SumSkipped),
    _fault("l skipped once", structure.SumSkippedOnce),
    _fault("scale 1 % off", structure.ScaleOff),
    _fault("1/D for 1/√D", structure.ScaleByDim),
    _fault("LSE in base 2", structure.LseBaseTwo),
    _fault("S in bf16", arithmetic.ScoresInBf16),
    _fault("Q in bf16", arithmetic.QueryInBf16, "full", "fp32", "tf32", "fp16", "bf16"),
    _fault("O in bf16", arithmetic.OutInBf16),
    _fault("O in fp16", arithmetic.OutInFp16, "full", "fp32", "tf32", "fp16", "bf16", "e4m3"),
    _fault("row sum in fp16", arithmetic.SumInFp16),
    _fault("rounded P in the sum", arithmetic.RoundedInSum, "full", "tf32", "fp16", "bf16", *FP8),
    _fault("tf32 for fp32", arithmetic.Tf32ForFp32, "full", "fp32"),
    _fault("exp2 off by 2^-10", arithmetic.Exp2Off),
    _fault("log2 e in bf16", arithmetic.Log2eInBf16),
    _fault("14-bit accumulators", arithmetic.FourteenBits),
    _fault("fp8 saturation", arithmetic.Saturating, "full", *FP8),
    _fault("no fp8 prescale", arithmetic.NoPrescale, "full", *FP8),
    _fault("m from 0", structure.MaximumFromZero),
    _fault("finite mask value", structure.FiniteMask, "causal"),
    _fault("all-negative rows", structure.NegativeRowsEmpty),
    _fault("one head of eight", structure.OneHead),
    _fault("output × 0.999", structure.OutSmaller),
)
