"""Right kernels of many designs, in plain torch: tiles, splits, P divided early, short sums."""

import math
from dataclasses import dataclass, replace

import torch

from attncheck.core.declared_arithmetic import Accumulator
from attncheck.core.formats import FORMATS, round_to
from attncheck.core.outputs import Outputs
from attncheck.subjects.ideal import Ideal
from attncheck.verify.run_case import mask_rows

FP16_SUMS = Accumulator(name="fp16", format=FORMATS["fp16"])


@dataclass(frozen=True)
class Design:
    """How a right kernel computes the same sums.

    Attributes:
        tile: Keys per step.
        renormalises: Whether P is divided by the running sum of its tile, and O kept divided.
        splits: Parts of the keys that are computed separately and merged through LSE.
        base: Of the exponents: 2, or e.
        short: Whether O is kept, and added to key by key, in fp16.
        scaled: Whether an fp8 P is scaled.
    """

    tile: int
    renormalises: bool = False
    splits: int = 1
    base: float = 2.0
    short: bool = False
    scaled: bool = True

    def attend(self, inputs):
        """Compute out and LSE, in fp32 unless the design says otherwise."""
        problem = inputs.problem
        q, k, v = (tensor.float() for tensor in inputs.promoted())
        k, v = (tensor.repeat_interleave(problem.group, dim=1) for tensor in (k, v))
        unit = 1.0 if self.base == math.e else 1 / math.log(self.base)
        seen = mask_rows(problem)(range(problem.query)).expand(*q.shape[:3], problem.kv)
        scores = (q @ k.mT * (problem.scale * unit)).masked_fill(~seen, -math.inf)
        chunk = -(-problem.kv // self.splits)
        parts = [self._part(scores[..., at : at + chunk], v[:, :, at : at + chunk], problem)
                 for at in range(0, problem.kv, chunk)]  # fmt: skip
        lse = torch.stack([part for _, part in parts])
        whole = lse.max(0).values + torch.log(
            torch.exp(lse - lse.max(0).values.masked_fill(lse.max(0).values.isinf(), 0)).sum(0)
        )
        share = torch.exp(lse - whole.masked_fill(whole.isinf(), 0))[..., None]
        out = sum(part * part_share for (part, _), part_share in zip(parts, share, strict=True))
        output = problem.formats.output
        return Outputs(round_to(out.double(), output).to(output.torch_dtype), whole)

    def _part(self, scores, v, problem):
        """Compute the normalised out and the natural LSE of some keys."""
        power = torch.exp if self.base == math.e else torch.exp2
        rows = scores.shape[:3]
        top, total = torch.full(rows, -math.inf), torch.zeros(rows)
        out = torch.zeros(*rows, v.shape[-1], dtype=torch.float16 if self.short else torch.float32)
        for at in range(0, scores.shape[-1], self.tile):
            part = scores[..., at : at + self.tile]
            highest = torch.maximum(top, part.amax(-1))
            finite = highest.masked_fill(highest.isinf(), 0)
            p, alpha = power(part - finite[..., None]), power(top - finite)
            added = total * alpha + p.sum(-1)
            if self.renormalises:
                divisor = torch.where(added == 0, 1, added)
                p, alpha = p / divisor[..., None], total * alpha / divisor
            top, total = highest, added
            out = (out.float() * alpha[..., None]).to(out.dtype)
            fmt = problem.formats
            scale = fmt.weights_scale if self.scaled else 1.0
            p = (round_to(p.double() * scale, fmt.weights) / scale).float()
            if self.short:
                for key in range(p.shape[-1]):
                    out = (out.float() + p[..., key, None] * v[:, :, None, at + key]).half()
            else:
                out = out + p @ v[:, :, at : at + self.tile]
        if not self.renormalises:
            out = out.float() / torch.where(total == 0, 1, total)[..., None]
        lse = top * (1.0 if self.base == math.e else math.log(2)) + torch.log(total)
        return out.float(), lse.masked_fill(total == 0, -math.inf)


class DesignedKernel(Ideal):
    """A subject of a design; it declares what is assumed of a plain function, and short sums."""

    name = "of a design"

    def __init__(self, design):
        super().__init__()
        self.design = design

    def tiling(self, problem, device):
        """None: its steps are not the ideal kernel's."""

    def arithmetic(self, problem, device):
        """That of a plain function, with this design's divisions, splits and sums."""
        declared = replace(
            super().arithmetic(problem, device),
            normalised_weights=self.design.renormalises,
            splits=self.design.splits,
            block_kv=min(self.design.tile, 16),
        )
        if not self.design.scaled:
            declared = replace(declared, weights_scale=1.0)
        return replace(declared, values=FP16_SUMS) if self.design.short else declared

    def prepare(self, inputs):
        return lambda: self.design.attend(inputs)
