"""Kernels whose forward is right and whose backward is not."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal

if TYPE_CHECKING:
    from attncheck.core.outputs import Outputs
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.mods.signatures import MaskMod, ScoreMod
    from attncheck.subjects.capabilities.subject import Call
    from attncheck.subjects.ideal import Index


class WrongBackward(Ideal):
    """Ideal attention with other gradients."""

    def __init__(self) -> None:
        super().__init__(Tiling(block_query=16, block_kv=16))
        self.name = f"planted-{type(self).__name__}"

    def other(self, inputs: Inputs, given: Outputs) -> Outputs:
        """What is given in place of what is right."""
        del inputs
        return given

    def prepare(self, inputs: Inputs) -> Call:
        right = super().prepare(inputs)
        return lambda: self.other(inputs, right())


class NoDelta(WrongBackward):
    """The row's own sum is not taken off."""

    def delta(self, dout, out, dlse):
        return torch.zeros_like(super().delta(dout, out, dlse))


class LseLossIgnored(WrongBackward):
    """The loss's gradient with respect to LSE is dropped."""

    def delta(self, dout, out, dlse):
        return super().delta(dout, out, None)


class MaskForgotten(WrongBackward):
    """Recomputed weights are not masked."""

    def visible_again(self, mask: MaskMod, at: Index) -> torch.Tensor:
        return torch.ones_like(mask(at.b, at.h, at.q_idx, at.kv_idx))


class WindowForgotten(WrongBackward):
    """Of a window only its causal half is masked."""

    def visible_again(self, mask: MaskMod, at: Index) -> torch.Tensor:
        return (at.q_idx >= at.kv_idx) & (at.b >= 0) & (at.h >= 0)


class HiddenTimesZero(WrongBackward):
    """Every key adds to dQ as 0 times it: nothing, unless it is NaN."""

    def other(self, inputs: Inputs, given: Outputs) -> Outputs:
        nothing = (inputs.k * 0.0).sum(2, keepdim=True)
        nothing = nothing.repeat_interleave(inputs.problem.group, dim=1)
        return _changed(given, "dq", lambda dq: dq + nothing)


class SlopeForgotten(WrongBackward):
    """Scores have gradients as if there were no score mod."""

    def slope(self, score: ScoreMod, x: torch.Tensor, at: Index) -> torch.Tensor:
        return torch.ones_like(x)


class KeysNotScaled(WrongBackward):
    """The gradient of k lacks the softmax scale."""

    def other(self, inputs: Inputs, given: Outputs) -> Outputs:
        return _changed(given, "dk", lambda dk: dk / inputs.problem.scale)


class FirstOfTheGroup(WrongBackward):
    """The gradient of a shared key head is that of the first query head that reads it."""

    def other(self, inputs: Inputs, given: Outputs) -> Outputs:
        problem = inputs.problem
        if not problem.backward or problem.group == 1:
            return given
        first = torch.arange(problem.heads, device=inputs.device) % problem.group == 0
        dout = torch.where(first[:, None, None], inputs.dout, torch.zeros_like(inputs.dout))
        dlse = None if inputs.dlse is None else inputs.dlse * first[:, None]
        alone = Ideal(Tiling(block_query=16, block_kv=16)).run(
            dataclasses.replace(inputs, dout=dout, dlse=dlse)
        )
        return dataclasses.replace(given, dk=alone.dk, dv=alone.dv)


class SinkWithoutGradient(WrongBackward):
    """A sink is taken for a constant."""

    def other(self, inputs: Inputs, given: Outputs) -> Outputs:
        return _changed(given, "dsink", torch.zeros_like)


class WrongCaptured(WrongBackward):
    """Right, but for what the numbers that a score mod reads have for gradients."""

    def prepare(self, inputs: Inputs) -> Call:
        self.score = inputs.problem.score_mod(str(inputs.device))
        return super().prepare(inputs)


class CapturedSlopeForgotten(WrongCaptured):
    """As if a cap or a temperature behind what is read were none."""

    def capture(self, sums, x, at, ds, seen):
        super().capture(sums, x, at, ds / self.slope(self.score, x, at), seen)


class CapturedOfAnotherHead(WrongCaptured):
    """What a head reads is the next one's."""

    def capture(self, sums, x, at, ds, seen):
        further = (at.h + 1) % (int(at.h.max()) + 1)
        super().capture(sums, x, dataclasses.replace(at, h=further), ds, seen)


class CapturedOfOneSequence(WrongCaptured):
    """The first sequence's alone are added up."""

    def capture(self, sums, x, at, ds, seen):
        super().capture(sums, x, at, ds * (at.b == 0), seen)


class CapturedWithoutDelta(WrongCaptured):
    """The row's own sum is not taken off."""

    def dscores(self, p, dp, delta):
        self.without = p * dp
        return super().dscores(p, dp, delta)

    def capture(self, sums, x, at, ds, seen):
        super().capture(sums, x, at, torch.where(seen, self.without, 0.0), seen)


class CapturedTwice(WrongCaptured):
    """A block of rows is done again, and its part is added once more."""

    def capture(self, sums, x, at, ds, seen):
        super().capture(sums, x, at, ds * torch.where(at.q_idx < 16, 2.0, 1.0), seen)


class NotCleared(WrongBackward):
    """Gradients are added to what is in their memory."""

    def other(self, inputs: Inputs, given: Outputs) -> Outputs:
        return _changed(given, "dq", lambda dq: dq + 2.0**-6)


class LseInValues(WrongBackward):
    """The loss's part of LSE goes to the values too."""

    def other(self, inputs: Inputs, given: Outputs) -> Outputs:
        if inputs.dlse is None:
            return given
        return _changed(given, "dv", lambda dv: dv + float(inputs.dlse.abs().sum()))


class LastKeyLost(WrongBackward):
    """The last key has no part in the gradient of q."""

    def visible_again(self, mask: MaskMod, at: Index) -> torch.Tensor:
        last = at.kv_idx == at.kv_idx.max()
        return self.visible(mask, at) & ~last


class UnseenKeysLeft(WrongBackward):
    """Keys that no row sees keep what their memory held."""

    def other(self, inputs: Inputs, given: Outputs) -> Outputs:
        def left(dv: torch.Tensor) -> torch.Tensor:
            unseen = (dv == 0).all(-1, keepdim=True)
            return torch.where(unseen, torch.full_like(dv, 2.0**-6), dv)

        return _changed(given, "dv", left)


class HeadsApart(WrongBackward):
    """The second head, and the second sequence, differ from the first."""

    def other(self, inputs: Inputs, given: Outputs) -> Outputs:
        def apart(dq: torch.Tensor) -> torch.Tensor:
            batch, heads = (torch.arange(n, device=dq.device) for n in dq.shape[:2])
            place = batch[:, None] + heads
            return dq * (1 + place / 8).to(dq.dtype)[..., None, None]

        return _changed(given, "dq", apart)


class LossAsContiguous(WrongBackward):
    """Reads dOut by strides that follow from its shape."""

    def prepare(self, inputs: Inputs) -> Call:
        dout = inputs.dout
        if dout is None or dout.is_contiguous():
            return super().prepare(inputs)
        memory = torch.empty(0, dtype=dout.dtype).set_(dout.untyped_storage())
        behind = memory[dout.storage_offset() :][: dout.numel()]
        read = torch.full((dout.numel(),), 7.0).to(dout)  # something lies beyond it too
        read[: len(behind)] = behind.nan_to_num(7.0)
        return super().prepare(inputs.replace(dout=read.view(dout.shape)))


class Unsteady(WrongBackward):
    """Every other call gives the gradient of k otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def other(self, inputs: Inputs, given: Outputs) -> Outputs:
        self.calls += 1
        return _changed(given, "dk", lambda dk: dk * (1 + self.calls % 2))


class LeavesTraces(WrongBackward):
    """The gradient of v begins with a part of the last call's."""

    def __init__(self) -> None:
        super().__init__()
        self.last = 0.0

    def other(self, inputs: Inputs, given: Outputs) -> Outputs:
        if given.dv is None:
            return given
        before, self.last = self.last, float(given.dv.float().abs().max())
        return _changed(given, "dv", lambda dv: dv + before)


def _changed(given: Outputs, name: str, change) -> Outputs:
    tensor = getattr(given, name)
    return given if tensor is None else dataclasses.replace(given, **{name: change(tensor)})
