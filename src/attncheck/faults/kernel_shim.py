"""Put a kernel of ours in place of somebody's function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from attncheck.core.errors import AttncheckError
from attncheck.core.mod_spec import FULL, Spec
from attncheck.core.outputs import Outputs, same_numbers
from attncheck.diagnose.user_tensors import UserTensors
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Problem
from attncheck.subjects.capabilities.subject import Refused, Subject
from attncheck.subjects.conventions.declarations import parse_call
from attncheck.subjects.conventions.parse import ParsedCall, UnreadableCall


@dataclass(frozen=True, slots=True, kw_only=True)
class ShimSettings:
    """Kernels that stand in for a function."""

    kernel: Subject  # what is called
    # The same without a fault, to see whether a call shows it; None for the right one.
    right: Subject | None
    convention: str  # how the function is called
    # Gets (kind, of what): ``called``, ``left`` with a reason where the function itself was
    # called, ``shown`` where the two kernels differed.
    log_event: Callable[[str, str], None]


def make_shim(function: Callable[..., Any], settings: ShimSettings) -> Callable[..., Any]:
    """Return a stand-in that calls ``function`` itself where no kernel takes the call."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            call = parse_call(settings.convention, function, args, kwargs)
            shimmed = _ShimmedCall(call, settings)
            outputs = shimmed.outputs()
        # No Problem describes such a call: the author's own function answers it.
        except (UnreadableCall, Refused, AttncheckError) as reason:
            settings.log_event("left", str(reason))
            return function(*args, **kwargs)
        return call.returned(outputs)

    return called


class _ShimmedCall:
    """One call that the kernel answers; raises AttncheckError for what no Problem is."""

    def __init__(self, call: ParsedCall, settings: ShimSettings) -> None:
        self._call, self._settings = call, settings
        mod = None if isinstance(call.mask, Spec) else call.mask
        score = None if isinstance(call.score, Spec) else call.score
        self._tensors = UserTensors(
            q=call.q,
            k=call.k,
            v=call.v,
            mask=mod,
            score_mod=score,
            scale=call.scale,
            sink=call.sink,
        )
        # Our backward gives autograd the gradients of q, k and v alone.
        if call.sink is not None and call.sink.requires_grad:
            raise UnreadableCall("its sink has a gradient")

    def outputs(self) -> Outputs:
        """Return out and LSE, through which autograd finds its way back."""
        with self._inputs() as inputs:
            problem, device = inputs.problem, inputs.device.type
            self._check(problem, device)
            # A kernel without a backward must not be called where one will be asked for.
            leaves = (self._call.q, self._call.k, self._call.v)
            if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves):
                self._check(problem.replace(backward=True), device)
        self._settings.log_event("called", "")  # what it raises from here on is the kernel's
        out, lse = _Attention.apply(self, *leaves)  # type: ignore[no-untyped-call]  # torch's
        return Outputs(out, lse)

    def run(self, loss: tuple[torch.Tensor, torch.Tensor | None] | None = None) -> Outputs:
        """Return what the kernel gives, with gradients for those of a loss by out and LSE."""
        with self._inputs() as plain:
            inputs = plain if loss is None else _with_loss(plain, *loss)
            outputs = self._settings.kernel.run(inputs)
            right = self._settings.right
            # A fault that no call shows cannot be caught, and is not held against the tests.
            if right is not None and not _same_bits(outputs, right.run(inputs)):
                self._settings.log_event("shown", "")
        return outputs

    def _check(self, problem: Problem, device: str) -> None:
        kernel = self._settings.kernel
        if not kernel.concerns(problem):
            raise UnreadableCall(f"{problem} does not concern {kernel.name}")
        reason = kernel.absent(device) or kernel.unsupported(problem, device)
        if reason:
            raise UnreadableCall(reason)

    @contextmanager
    def _inputs(self) -> Iterator[Inputs]:
        """Yield the call's tensors; the library's mods by name, as kernels know them."""
        call = self._call
        with self._tensors.inputs() as inputs:
            changes: dict[str, Any] = {}
            if isinstance(call.mask, Spec) and call.mask != FULL:
                changes["mask"] = call.mask
            if isinstance(call.score, Spec):
                changes["score"] = call.score
            problem = inputs.problem.replace(**changes) if changes else inputs.problem
            yield inputs.replace(problem=problem)


def _with_loss(inputs: Inputs, dout: torch.Tensor, dlse: torch.Tensor | None) -> Inputs:
    problem = inputs.problem.replace(backward=True, dlse=dlse is not None)
    return inputs.replace(problem=problem, dout=dout, dlse=None if dlse is None else dlse.float())


def _same_bits(outputs: Outputs, right: Outputs) -> bool:
    """Return whether all bits that there are are the same; NaN is NaN."""
    others = right.tensors()
    return all(same_numbers(one, others[name]) for name, one in outputs.tensors().items())


class _Attention(torch.autograd.Function):
    """A kernel of ours to autograd: its backward computes all once more."""

    @staticmethod
    def forward(ctx: Any, shimmed: _ShimmedCall, *leaves: torch.Tensor) -> tuple[torch.Tensor, Any]:
        # Arguments for autograd's sake alone: the call has the same tensors.
        del leaves
        ctx.shimmed = shimmed
        # None says that LSE has no gradient; zeros would ask the kernel for one.
        ctx.set_materialize_grads(False)
        outputs = shimmed.run()
        return outputs.out, outputs.lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        q, _, v = (getattr(ctx.shimmed._call, name) for name in "qkv")  # this module's
        if dout is None:
            dout = q.new_zeros((*q.shape[:3], v.shape[3]))
        outputs = ctx.shimmed.run((dout, dlse))
        return None, outputs.dq, outputs.dk, outputs.dv
