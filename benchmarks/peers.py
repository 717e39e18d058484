"""The rules by which other projects accept an attention kernel, applied as their files have them.

Read in November 2026. Every rule gets the float64 truth in place of the peer's own reference, which
can only help it. Rules of single elements judge LSE too, which most of the peers do not.

=================  ===============================================================================
allclose(1e-2)     triton.testing.assert_close's defaults: atol 1e-2, rtol 0
torch              torch.testing.assert_close's defaults by dtype
gpucheck           Akasxh/gpucheck, src/gpucheck/assertions/tolerances.py, _DEFAULT_TOLERANCES
2×, 3×             Dao-AILab/flash-attention, tests: max error ≤ 2× (3× with softcap) that of the
                   same formula in the kernel's own dtype, + 2 max |(ref + 0.3 − 0.3) − ref|
1.1× mean          pytorch/pytorch, test/inductor/test_flex_attention.py: mean error ≤ 1.1× (10× in
                   fp32) that of eager flex_attention in the same dtype
ε·Σp|v|            uxlfoundation/oneDNN, tests/benchdnn/sdpa/sdpa.cpp, setup_cmp: the floor of an
                   element alone (ε the output's; e4m3's where all inputs are fp8)
oneDNN             the same or a relative error of 8 (1 + n) ε, as the file has it
=================  ===============================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from attncheck import oracles
from attncheck.formats import FORMATS, round_to
from attncheck.subjects.ideal import Ideal
from attncheck.subjects.matmul_precision import fp32_products
from attncheck.subjects.sdpa import attention_mask

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs

__all__ = ["PEERS", "Given"]

_TORCH = {"fp32": (1e-5, 1.3e-6), "fp16": (1e-5, 1e-3), "bf16": (1e-5, 1.6e-2)}
_GPUCHECK = {"fp32": (1e-4, 1e-4), "fp16": (1e-2, 1e-2), "bf16": (5e-2, 5e-2)}
_ALLCLOSE = dict.fromkeys(_TORCH, (1e-2, 0.0))


@dataclass(frozen=True)
class Given:
    """What a peer knows of a problem before it sees a kernel's outputs.

    Attributes:
        inputs: The tensors.
        truth: Out and LSE in float64.
    """

    inputs: Inputs
    truth: Outputs

    @cached_property
    def out(self) -> torch.Tensor:
        """The truth in the output's dtype."""
        output = self.inputs.problem.formats.output
        return round_to(self.truth.out, output).to(output.torch_dtype)

    @cached_property
    def magnitude(self) -> torch.Tensor:
        """Σ p |v|, float64 like out."""
        return oracles.truth(self.inputs.replace(v=_size(self.inputs.v))).out

    @cached_property
    def unfused(self) -> torch.Tensor:
        """flash-attention's attention_ref(upcast=False, reorder_ops=True): each result rounded."""
        q, k, v = self._operands
        scale = self.inputs.problem.scale
        return self._weighted(self._product(q, self._rounded(k * scale).mT), v)

    @cached_property
    def eager(self) -> torch.Tensor:
        """flex_attention's eager formula: q·k in the dtype, softmax in fp32."""
        q, k, v = self._operands
        return self._weighted(self._product(q, k.mT) * self.inputs.problem.scale, v)

    @cached_property
    def _operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = (self._rounded(x.float()) for x in self.inputs.promoted())
        group = self.inputs.problem.group
        return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.inputs.problem.formats.output.torch_dtype).float()

    def _product(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """A matrix product as the dtype has it, rounded to it."""
        if self.inputs.problem.dtype == "tf32":
            rows, columns = (Ideal().operand(x, FORMATS["tf32"]) for x in (rows, columns))
        with fp32_products("ieee"):
            return self._rounded(rows @ columns)

    def _weighted(self, scores: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen = attention_mask(self.inputs.problem, str(self.inputs.device))
        scores = torch.where(seen, scores, -torch.inf)
        p = self._rounded(torch.nan_to_num(torch.softmax(scores, -1)))
        if self.inputs.problem.formats.scaled:  # FlashAttention-3: intermediate_dtype
            p = Ideal().operand(p, self.inputs.problem.formats.weights)
        return self._product(p, v)


def _size(values: torch.Tensor) -> torch.Tensor:
    return values.float().abs().to(values.dtype)


def _elementwise(table: dict[str, tuple[float, float]]) -> Callable[[Outputs, Given], bool]:
    """|got − expected| ≤ atol + rtol |expected| by dtype; NaN is never close."""

    def accepts(got: Outputs, given: Given) -> bool:
        output = given.inputs.problem.formats.output.name
        close = [_close(got.out, given.out, table[output])]
        if got.lse is not None and given.truth.lse is not None:
            close.append(_close(got.lse, given.truth.lse.float(), table["fp32"]))
        return all(close)

    return accepts


def _close(got: torch.Tensor, expected: torch.Tensor, tolerance: tuple[float, float]) -> bool:
    atol, rtol = tolerance
    return torch.allclose(got.double(), expected.double(), atol=atol, rtol=rtol)


def _times(factor: float) -> Callable[[Outputs, Given], bool]:
    def accepts(got: Outputs, given: Given) -> bool:
        ref = given.out
        floor = 2 * ((ref + 0.3 - 0.3) - ref).abs().max().double()
        allowed = factor * (given.unfused.to(ref.dtype) - ref).abs().max().double() + floor
        return bool((got.out - ref).abs().max().double() <= allowed)

    return accepts


def _mean(got: Outputs, given: Given) -> bool:
    factor = 10.0 if given.out.dtype == torch.float32 else 1.1
    error, reference = ((x.double() - given.truth.out).abs().mean() for x in (got.out, given.eager))
    return bool(error <= factor * reference)


def _epsilon(given: Given) -> float:
    formats = given.inputs.problem.formats
    return 2 * (FORMATS["e4m3"] if formats.scaled else formats.output).unit_roundoff


def _floor(got: Outputs, given: Given) -> torch.Tensor:
    error = (got.out.double() - given.truth.out).abs()
    return error <= _epsilon(given) * given.magnitude


def _condition(got: Outputs, given: Given) -> bool:
    return bool(_floor(got, given).all())


def _onednn(got: Outputs, given: Given) -> bool:
    output = given.inputs.problem.formats.output
    relative = 8 * (1 + given.inputs.problem.kv) * 2 * output.unit_roundoff
    near = (got.out.double() - given.truth.out).abs() <= relative * given.truth.out.abs()
    return bool((near | _floor(got, given)).all())


PEERS: dict[str, Callable[[Outputs, Given], bool]] = {
    "allclose(1e-2)": _elementwise(_ALLCLOSE),
    "torch": _elementwise(_TORCH),
    "gpucheck": _elementwise(_GPUCHECK),
    "2×": _times(2.0),
    "3×": _times(3.0),
    "1.1× mean": _mean,
    "ε·Σp|v|": _condition,
    "oneDNN": _onednn,
}
