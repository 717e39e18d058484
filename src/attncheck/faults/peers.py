"""The rules by which other projects accept an attention kernel, applied as their files have them.

Read in November 2026. Every rule gets the float64 truth in place of the peer's own reference, which
can only help it. Their literals decide nothing of ours. Of gradients: ``gradient_peers``.

=================  ===============================================================================
allclose(1e-2)     triton.testing.assert_close's defaults: atol 1e-2, rtol 0
2×                 Dao-AILab/flash-attention, tests: max error ≤ 2× (3× with softcap) that of the
                   same formula in the kernel's own dtype, + 2 max |(ref + 0.3 − 0.3) − ref|
1.1× mean          pytorch/pytorch, test/inductor/test_flex_attention.py: mean error ≤ 1.1× (10× in
                   fp32) that of eager flex_attention in the same dtype
=================  ===============================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from attncheck import oracles
from attncheck.formats import FORMATS, round_to
from attncheck.mods import library
from attncheck.subjects.ideal import Ideal
from attncheck.subjects.matmul_precision import fp32_products
from attncheck.subjects.sdpa import attention_mask

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs

__all__ = ["ALLCLOSE", "RULES", "Given", "elementwise", "mean", "scored", "times"]

ALLCLOSE = dict.fromkeys(("fp32", "fp16", "bf16"), (1e-2, 0.0))
"""atol and rtol by the output's dtype."""

_CAPPED = 3.0  # flash-attention's factor in place of 2 where the scores have a cap


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
        products = self._product(q, self._rounded(k * scale).mT)
        return self._weighted(self._rounded(scored(self.inputs, products)), v)

    @cached_property
    def eager(self) -> torch.Tensor:
        """flex_attention's eager formula: q·k in the dtype, softmax in fp32."""
        q, k, v = self._operands
        products = self._product(q, k.mT) * self.inputs.problem.scale
        return self._weighted(scored(self.inputs, products), v)

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
        if (sink := self.inputs.sink) is not None:
            beside = sink.float()[:, None, None].expand(*scores.shape[:3], 1)
            p = torch.softmax(torch.cat([scores, beside], -1), -1)[..., :-1]
        else:
            p = torch.softmax(scores, -1)
        p = self._rounded(torch.nan_to_num(p))
        if self.inputs.problem.formats.scaled:  # FlashAttention-3: intermediate_dtype
            p = Ideal().operand(p, self.inputs.problem.formats.weights)
        return self._product(p, v)


def scored(inputs: Inputs, products: torch.Tensor) -> torch.Tensor:
    """``products`` (batch, heads, query, kv) through the score mod of the problem."""
    problem = inputs.problem
    if problem.score == library.NONE:
        return products
    sizes = (problem.batch, problem.heads, problem.query, problem.kv)
    indices = [
        torch.arange(size, device=products.device).view([-1 if i == n else 1 for i in range(4)])
        for n, size in enumerate(sizes)
    ]
    mod = problem.score_mod(str(products.device))
    return mod(products, *indices).to(products.dtype)


def _size(values: torch.Tensor) -> torch.Tensor:
    return values.float().abs().to(values.dtype)


def elementwise(table: dict[str, tuple[float, float]]) -> Callable[[Outputs, Given], bool]:
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


def times(factor: float) -> Callable[[Outputs, Given], bool]:
    """Max error ≤ ``factor`` × that of ``Given.unfused``, and a little more."""

    def accepts(got: Outputs, given: Given) -> bool:
        ref = given.out
        floor = 2 * ((ref + 0.3 - 0.3) - ref).abs().max().double()
        allowed = factor * (given.unfused.to(ref.dtype) - ref).abs().max().double() + floor
        return bool((got.out - ref).abs().max().double() <= allowed)

    return accepts


def mean(got: Outputs, given: Given) -> bool:
    """Mean error ≤ 1.1× (10× in fp32) that of ``Given.eager``."""
    factor = 10.0 if given.out.dtype == torch.float32 else 1.1
    error, reference = ((x.double() - given.truth.out).abs().mean() for x in (got.out, given.eager))
    return bool(error <= factor * reference)


def _twice(got: Outputs, given: Given) -> bool:
    capped = "softcap" in {part.name for part in given.inputs.problem.score.walk()}
    return times(_CAPPED if capped else 2.0)(got, given)


RULES: dict[str, Callable[[Outputs, Given], bool]] = {
    "allclose(1e-2)": elementwise(ALLCLOSE),
    "2×": _twice,
    "1.1× mean": mean,
}
"""Those of which a report of faults tells."""
