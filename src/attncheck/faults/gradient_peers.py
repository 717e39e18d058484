"""The rules by which other projects accept gradients, applied to dQ, dK, dV as their files do.

As in ``peers``, with the float64 truth in place of the peer's own reference. flash-attention
asks its rule of 16-bit gradients only; here it is asked in fp32 and tf32 too.

=================  ===============================================================================
allclose(1e-2)     triton.testing.assert_close's defaults: atol 1e-2, rtol 0
2×                 Dao-AILab/flash-attention, hopper/test_flash_attn.py: max error ≤ 2× (with
                   softcap 3× and 3e-4 more) that of the same formula in the kernel's own dtype,
                   + 2 max |(ref + 0.3 − 0.3) − ref|
1.1× mean          pytorch/pytorch, test/inductor/test_flex_attention.py, _check_out_and_grad: mean
                   error ≤ 1.1× (10× in fp32) that of eager attention in the same dtype
=================  ===============================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from attncheck.faults.peers import ALLCLOSE
from attncheck.formats import FORMATS, round_to
from attncheck.mods import library
from attncheck.subjects.ideal import Ideal
from attncheck.subjects.ideal_attention import Index
from attncheck.subjects.ideal_gradients import slope
from attncheck.subjects.matmul_precision import fp32_products
from attncheck.subjects.sdpa import attention_mask

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.tensor_names import TensorName

    Gradients = dict[TensorName, Tensor]

__all__ = ["RULES", "GivenGradients", "elementwise"]

_COMPARED: tuple[TensorName, ...] = ("dq", "dk", "dv")


@dataclass(frozen=True)
class GivenGradients:
    """What a peer knows of a problem before it sees a kernel's gradients.

    Attributes:
        inputs: The tensors.
        truth: Gradients in float64.
    """

    inputs: Inputs
    truth: Outputs

    @cached_property
    def exact(self) -> Gradients:
        """The truth in the storage dtype; a sink's gradient, which no peer asks about, is not."""
        fmt = self.inputs.problem.formats.output
        given = self.truth.gradients()
        return {name: round_to(given[name], fmt).to(fmt.torch_dtype) for name in _COMPARED}

    @cached_property
    def unfused(self) -> Gradients:
        """Autograd of attention_ref(upcast=False, reorder_ops=True): each result is rounded."""
        inputs, problem = self.inputs, self.inputs.problem
        assert inputs.dout is not None
        q, k, v = (self._rounded(x.float()) for x in (inputs.q, inputs.k, inputs.v))
        k, v = (x.repeat_interleave(problem.group, 1) for x in (k, v))
        scaled, dout = self._rounded(k * problem.scale), inputs.dout.float()
        p, slopes = self._weights(self._product(q, scaled.mT))
        dp = self._product(dout, v.mT)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True))
        if inputs.dlse is not None:
            ds = ds + p * inputs.dlse[..., None]
        ds = self._rounded(self._rounded(ds) * slopes)
        dk = self._rounded(self._product(ds.mT, q) * problem.scale)
        return {
            "dq": self._product(ds, scaled),
            "dk": self._of_keys(dk),
            "dv": self._of_keys(self._product(p.mT, dout)),
        }

    def _weights(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """P without a sink, and the slopes of the score mod."""
        inputs, problem = self.inputs, self.inputs.problem
        slopes = torch.ones_like(scores)
        if problem.score != library.NONE:
            sizes = (problem.batch, problem.heads, problem.query, problem.kv)
            indices = (torch.arange(n, device=scores.device) for n in sizes)
            shaped = (
                x.view([-1 if i == n else 1 for i in range(4)]) for n, x in enumerate(indices)
            )
            b, h, row, key = shaped
            mod = problem.score_mod(str(scores.device))
            slopes = slope(mod, scores, Index(b=b, h=h, q_idx=row, kv_idx=key))
            scores = self._rounded(mod(scores, b, h, row, key).to(scores.dtype))
        scores = torch.where(attention_mask(problem, str(scores.device)), scores, -torch.inf)
        if inputs.sink is None:
            return self._rounded(torch.nan_to_num(torch.softmax(scores, -1))), slopes
        sink = inputs.sink[:, None, None].expand(*scores.shape[:3], 1)
        p = torch.softmax(torch.cat([scores, sink], -1), -1)
        return self._rounded(torch.nan_to_num(p[..., :-1])), slopes

    def _of_keys(self, gradient: Tensor) -> Tensor:
        """Summed over the heads of a group, in the storage dtype at last."""
        problem = self.inputs.problem
        batch, _, keys, dim = gradient.shape
        parts = gradient.reshape(batch, problem.kv_heads, problem.group, keys, dim)
        return self._rounded(parts.sum(2))

    def _rounded(self, x: Tensor) -> Tensor:
        return x.to(self.inputs.problem.formats.output.torch_dtype).float()

    def _product(self, rows: Tensor, columns: Tensor) -> Tensor:
        if self.inputs.problem.dtype == "tf32":
            rows, columns = (Ideal().operand(x, FORMATS["tf32"]) for x in (rows, columns))
        with fp32_products("ieee"):
            return self._rounded(rows @ columns)


def elementwise(
    table: dict[str, tuple[float, float]],
) -> Callable[[Outputs, GivenGradients], bool]:
    """|got − expected| ≤ atol + rtol |expected| by dtype; NaN is never close."""

    def accepts(got: Outputs, given: GivenGradients) -> bool:
        atol, rtol = table[given.inputs.problem.formats.output.name]
        mine = got.gradients()
        return all(
            torch.allclose(mine[name].double(), exact.double(), atol=atol, rtol=rtol)
            for name, exact in given.exact.items()
        )

    return accepts


def _twice(got: Outputs, given: GivenGradients) -> bool:
    capped = "softcap" in {part.name for part in given.inputs.problem.score.walk()}
    factor, more = (3.0, 3e-4) if capped else (2.0, 0.0)
    mine = got.gradients()

    def accepts(name: TensorName, ref: Tensor) -> bool:
        floor = 2 * ((ref + 0.3 - 0.3) - ref).abs().max().double() + more
        allowed = factor * _largest(given.unfused[name].to(ref.dtype), ref) + floor
        return bool(_largest(mine[name], ref) <= allowed)

    return all(accepts(name, ref) for name, ref in given.exact.items())


def _largest(one: Tensor, other: Tensor) -> Tensor:
    return (one - other).abs().max().double()


def _mean(got: Outputs, given: GivenGradients) -> bool:
    factor = 10.0 if given.inputs.problem.formats.output.name == "fp32" else 1.1
    mine, exact = got.gradients(), given.truth.gradients()

    def accepts(name: TensorName) -> bool:
        error, reference = (
            (x[name].double() - exact[name]).abs().mean() for x in (mine, given.unfused)
        )
        return bool(error <= factor * reference)

    return all(accepts(name) for name in _COMPARED)


RULES: dict[str, Callable[[Outputs, GivenGradients], bool]] = {
    "allclose(1e-2)": elementwise(ALLCLOSE),
    "2×": _twice,
    "1.1× mean": _mean,
}
