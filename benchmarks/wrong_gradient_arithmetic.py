"""Backwards that round what they do not declare to round, or take a logarithm in another base."""

# ruff: noqa: D102  # a method is the ideal kernel's; what is wrong with it the class says

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch
from wrong_arithmetic import rounded
from wrong_gradients import BY_KEYS, BY_ROWS, WrongBackward, changed

from attncheck.core.formats import FORMATS

if TYPE_CHECKING:
    from torch import Tensor

    from attncheck.core.formats import Format
    from attncheck.core.outputs import Outputs
    from attncheck.inputs.input_tensors import Inputs


class LseInBaseTwo(WrongBackward):
    """P is recomputed from a natural LSE taken for one in base 2."""

    def saved(self, inputs: Inputs, forward: Outputs) -> Outputs:
        del inputs
        assert forward.lse is not None
        return dataclasses.replace(forward, lse=forward.lse * math.log(2))


class LseFromBaseTwo(WrongBackward):
    """P is recomputed from an LSE multiplied by log2 e twice."""

    def saved(self, inputs: Inputs, forward: Outputs) -> Outputs:
        del inputs
        assert forward.lse is not None
        return dataclasses.replace(forward, lse=forward.lse * math.log2(math.e))


class PowersOfTwo(WrongBackward):
    """P is recomputed as 2^(s − LSE)."""

    def exp2(self, exponent: Tensor) -> Tensor:
        return super().exp2(exponent * math.log(2))


class LseInBf16(WrongBackward):
    """LSE is saved in bf16."""

    kept = "bf16"

    def saved(self, inputs: Inputs, forward: Outputs) -> Outputs:
        del inputs
        assert forward.lse is not None
        return dataclasses.replace(forward, lse=rounded(forward.lse, self.kept))


class LseInFp16(LseInBf16):
    """LSE is saved in fp16."""

    kept = "fp16"


class DeltaInBf16(WrongBackward):
    """delta is rounded to bf16."""

    def delta(self, dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
        return rounded(super().delta(dout, out, dlse), "bf16")


class DeltaOfBf16Out(WrongBackward):
    """delta is of an O rounded to bf16, which is not the O that is given."""

    def delta(self, dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
        return super().delta(dout, rounded(out, "bf16"), dlse)


class LossInBf16(WrongBackward):
    """dO is read in bf16."""

    def read(self, inputs: Inputs) -> Inputs:
        assert inputs.dout is not None
        return inputs.replace(dout=rounded(inputs.dout.float(), "bf16").to(inputs.dout.dtype))


class ValueProductsInBf16(WrongBackward):
    """dP is rounded to bf16 before delta is taken off, and not declared so."""

    def dscores(self, p: Tensor, dp: Tensor, delta: Tensor) -> Tensor:
        return super().dscores(p, rounded(dp, "bf16"), delta)


class ScoreGradientsInBf16(WrongBackward):
    """dS is rounded to bf16."""

    def dscores(self, p: Tensor, dp: Tensor, delta: Tensor) -> Tensor:
        return rounded(super().dscores(p, dp, delta), "bf16")


class WeightsInBf16(WrongBackward):
    """P is rounded to bf16 as it is recomputed."""

    def exp2(self, exponent: Tensor) -> Tensor:
        return rounded(super().exp2(exponent), "bf16")


class KeysPrescaled(WrongBackward):
    """The backward reads scale · k rounded to bf16, the forward k."""

    def read(self, inputs: Inputs) -> Inputs:
        scaled = rounded(inputs.k.float() * inputs.problem.scale, "bf16").to(inputs.k.dtype)
        return inputs.replace(problem=inputs.problem.replace(scale=1.0), k=scaled)

    def spoiled(self, inputs: Inputs, outputs: Outputs) -> Outputs:
        """The scale is in k, and so in dQ; dK gets it here."""
        return changed(outputs, lambda dk: dk * inputs.problem.scale, "dk")


class ScaleOff(WrongBackward):
    """The backward's softmax scale is 1 % too large."""

    def read(self, inputs: Inputs) -> Inputs:
        scale = inputs.problem.scale * 1.01
        return inputs.replace(problem=inputs.problem.replace(scale=scale))


class QueryGradientsKept(WrongBackward):
    """dQ is kept in bf16 from tile to tile."""

    only = BY_ROWS
    kept = "bf16"

    def gradient_added(self, running: Tensor, part: Tensor) -> Tensor:
        return rounded(super().gradient_added(running, part), self.kept)


class QueryGradientsKeptFp16(QueryGradientsKept):
    """dQ is kept in fp16 from tile to tile."""

    kept = "fp16"


class KeyGradientsKept(QueryGradientsKept):
    """dK and dV are kept in bf16 from tile to tile."""

    only = BY_KEYS


class KeyGradientsKeptFp16(KeyGradientsKept):
    """dK and dV are kept in fp16 from tile to tile."""

    kept = "fp16"


class Tf32ForFp32(WrongBackward):
    """The backward's products read fp32 operands in tf32."""

    def operand(self, values: Tensor, fmt: Format) -> Tensor:
        return super().operand(values, FORMATS["tf32"] if fmt.name == "fp32" else fmt)


class Exp2Off(WrongBackward):
    """The backward's exp2 is wrong by up to 2^-10, as a short polynomial of the fraction is."""

    def exp2(self, exponent: Tensor) -> Tensor:
        exact = super().exp2(exponent).double()
        fraction = torch.nan_to_num(exponent.double() - exponent.double().floor())
        return (exact * (1 + 2.0**-10 * torch.sin(2 * math.pi * fraction))).float()


class Log2eInBf16(WrongBackward):
    """The backward's log2 e is rounded to bf16."""

    log2_e = 1.4453125


class ThroughBf16(WrongBackward):
    """Gradients are rounded to bf16 on their way."""

    def spoiled(self, inputs: Inputs, outputs: Outputs) -> Outputs:
        del inputs
        names = [name for name in outputs.gradients() if name != "dsink"]
        return changed(outputs, lambda x: rounded(x, "bf16"), *names)
