"""Faults of a backward, as real kernels had them, planted on the ideal one behind its forward.

Not here, for a single call of an ideal kernel on contiguous tensors has no place for them:
gradients of a bias or of dropout, offsets beyond 2^31, grids beyond 65,535, races proper, and what
depends on the calls before (``properties/test_backward.py`` asks that). Strides, stale buffers,
lost updates and NaN from memory beyond the rows are what such a kernel would have given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import wrong_gradient_arithmetic as arithmetic
import wrong_gradient_sums as sums
import wrong_gradients as structure

from attncheck.core.mod_spec import Spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from wrong_gradients import WrongBackward

__all__ = ["DTYPES", "FAULTS", "KINDS", "GradientFault"]

DTYPES = ("fp32", "tf32", "fp16", "bf16")
_FINE = ("fp32", "tf32", "fp16")  # where bf16 is coarser than the storage format

_CORNER = Spec.of("causal_bottom_right")
KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "full": lambda kv: {"query": kv // 2 + 3},
    "LSE": lambda kv: {"query": kv // 2 + 3, "dlse": True},
    "causal": lambda kv: {"query": kv - kv // 5, "mask": _CORNER},
    "empty rows": lambda kv: {"query": kv + kv // 5, "mask": _CORNER},
    "unseen keys": lambda kv: {"query": kv - kv // 5, "mask": Spec.of("causal")},
    "window": lambda kv: {"mask": Spec.of("sliding_window", window=max(2, kv // 4))},
    "softcap": lambda kv: {"query": kv // 2 + 3, "score": Spec.of("softcap", cap=20.0)},
    "alibi": lambda _: {"mask": Spec.of("causal"), "score": Spec.of("alibi")},
    "sink": lambda kv: {"query": kv // 2 + 3, "batch": 2, "sink": True, "dlse": True},
    "far below 0": lambda kv: {"query": kv // 2 + 3, "distribution": "negative_logits"},
    "wide values": lambda kv: {"query": kv // 2 + 3, "wide": True},
}
"""What a Problem of so many keys has besides; ``wide``: values twice as wide as keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFault:
    """A fault and the problems that concern it.

    Attributes:
        name: Row of the table.
        kernel: The planted kernel.
        kind: A name of ``KINDS``.
        dtypes: Where it is a fault.
    """

    name: str
    kernel: type[WrongBackward]
    kind: str = "full"
    dtypes: tuple[str, ...] = DTYPES

    @property
    def summary(self) -> str:
        """One line."""
        return (self.kernel.__doc__ or "").rstrip(".")


def _fault(
    name: str, kernel: type[WrongBackward], kind: str = "full", dtypes: tuple[str, ...] = DTYPES
) -> GradientFault:
    return GradientFault(name=name, kernel=kernel, kind=kind, dtypes=dtypes)


FAULTS: tuple[GradientFault, ...] = (
    _fault("delta missing", structure.NoDelta),
    _fault("delta of another head", structure.DeltaOfTheFirstHead),
    _fault("delta at other offsets", structure.DeltaPaddedElsewhere),
    _fault("dLSE ignored", structure.LseLossIgnored, "LSE"),
    _fault("dLSE negated", structure.LseLossNegated, "LSE"),
    _fault("mask forgotten", structure.MaskForgotten, "causal"),
    _fault("mask forgotten for dQ", structure.MaskForgottenByRows, "causal"),
    _fault("mask forgotten for dK, dV", structure.MaskForgottenByKeys, "causal"),
    _fault("always causal", structure.AlwaysCausal),
    _fault("causal +1", structure.CausalPlus, "causal"),
    _fault("causal -1", structure.CausalMinus, "causal"),
    _fault("top-left for bottom-right", structure.TopLeft, "causal"),
    _fault("window forgotten", structure.WindowForgotten, "window"),
    _fault("window +1", structure.WindowPlus, "window"),
    _fault("tail columns unmasked", structure.TailUnmasked, "far below 0"),
    _fault("last key lost", structure.LastKeyLost),
    _fault("last row lost", structure.LastRowLost),
    _fault("key tile skipped", structure.KeyTileSkipped),
    _fault("row tile skipped", structure.RowTileSkipped),
    _fault("first row tile skipped", structure.FirstRowTileSkipped, "causal"),
    _fault("lost update of dQ", structure.LostUpdate),
    _fault("slope forgotten", structure.SlopeForgotten, "softcap"),
    _fault("slope at the modified score", structure.SlopeOfModified, "softcap"),
    _fault("slope 1 - |tanh|", structure.SlopeNotSquared, "softcap"),
    _fault("slope before delta", structure.SlopeBeforeDelta, "softcap"),
    _fault("ALiBi forgotten", structure.ScoreModForgotten, "alibi"),
    _fault("softcap forgotten", structure.ScoreModForgotten, "softcap"),
    _fault("one head of a group", sums.OneHeadOfTheGroup),
    _fault("last head lost", sums.HeadLost),
    _fault("mean of a group", sums.HeadsMeaned),
    _fault("heads interleaved", sums.HeadsInterleaved),
    _fault("heads rounded apart", sums.HeadsRounded),
    _fault("key heads swapped", sums.KeyHeadsSwapped),
    _fault("dO of another head", sums.LossOfTheFirstHead),
    _fault("dO by other strides", sums.LossHeadsLast),
    _fault("values as wide as keys", sums.ValueExtent, "wide values"),
    _fault("dK unscaled", sums.DkUnscaled),
    _fault("dK scaled twice", sums.DkScaledTwice),
    _fault("dQ unscaled", sums.DqUnscaled),
    _fault("dQ scaled twice", sums.DqScaledTwice),
    _fault("scaled by log2 e", sums.ScaledByLog2e),
    _fault("dQ × 0.999", sums.DqSmaller),
    _fault("dQ added twice", sums.AddedTwice),
    _fault("dQ not cleared", sums.NotCleared),
    _fault("NaN of empty rows", sums.DeadRowsPoison, "empty rows"),
    _fault("NaN of padding rows", sums.PaddingRowsPoison),
    _fault("empty rows unwritten", sums.DeadRowsUnwritten, "empty rows"),
    _fault("unseen keys unwritten", sums.UnseenKeysUnwritten, "unseen keys"),
    _fault("sink constant", sums.SinkConstant, "sink"),
    _fault("sink negated", sums.SinkNegated, "sink"),
    _fault("sink of one sequence", sums.SinkOfOneSequence, "sink"),
    _fault("sink not in LSE", sums.SinkNotInLse, "sink"),
    _fault("LSE taken for base 2", arithmetic.LseInBaseTwo),
    _fault("LSE in base 2", arithmetic.LseFromBaseTwo),
    _fault("2^(s - LSE)", arithmetic.PowersOfTwo),
    _fault("scale 1 % off", arithmetic.ScaleOff),
    _fault("LSE in bf16", arithmetic.LseInBf16),
    _fault("LSE in fp16", arithmetic.LseInFp16),
    _fault("delta in bf16", arithmetic.DeltaInBf16),
    _fault("delta of O in bf16", arithmetic.DeltaOfBf16Out, "full", _FINE),
    _fault("dO in bf16", arithmetic.LossInBf16, "full", _FINE),
    _fault("dP in bf16", arithmetic.ValueProductsInBf16),
    _fault("dS in bf16", arithmetic.ScoreGradientsInBf16, "full", _FINE),
    _fault("P in bf16", arithmetic.WeightsInBf16, "full", _FINE),
    _fault("k prescaled in bf16", arithmetic.KeysPrescaled),
    _fault("dQ kept in bf16", arithmetic.QueryGradientsKept),
    _fault("dQ kept in fp16", arithmetic.QueryGradientsKeptFp16),
    _fault("dK, dV kept in bf16", arithmetic.KeyGradientsKept),
    _fault("dK, dV kept in fp16", arithmetic.KeyGradientsKeptFp16),
    _fault("tf32 for fp32", arithmetic.Tf32ForFp32, "full", ("fp32",)),
    _fault("exp2 off by 2^-10", arithmetic.Exp2Off),
    _fault("log2 e in bf16", arithmetic.Log2eInBf16),
    _fault("gradients through bf16", arithmetic.ThroughBf16, "full", _FINE),
)
