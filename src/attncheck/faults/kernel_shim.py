"""Put one of attncheck's kernels in place of a user's function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from attncheck.core.errors import AttncheckError
from attncheck.core.mod_spec import Spec
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

    kernel: Subject  # the kernel that is called
    # The kernel without its fault, to see whether a call shows the fault; None where it has none.
    right: Subject | None
    convention: str  # how the function is called
    # Gets (kind, detail): ``called``, ``left`` with a reason where the function itself was called,
    # ``shown`` where the two kernels differed.
    log_event: Callable[[str, str], None]


def make_shim(function: Callable[..., Any], settings: ShimSettings) -> Callable[..., Any]:
    """Return a stand-in that calls ``function`` itself where no kernel supports the call."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            call = parse_call(settings.convention, function, args, kwargs)
            shimmed = _ShimmedCall(call, settings)
            outputs = shimmed.outputs()
        # No Problem describes such a call, so the author's own function takes it.
        except (UnreadableCall, Refused, AttncheckError) as reason:
            settings.log_event("left", str(reason))
            return function(*args, **kwargs)
        return call.returned(outputs)

    return called


class _ShimmedCall:
    """One call that the kernel takes; raises AttncheckError if no Problem describes it."""

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
        # The backward below gives autograd the gradients of q, k and v alone.
        if call.sink is not None and call.sink.requires_grad:
            raise UnreadableCall("its sink has a gradient")

    def outputs(self) -> Outputs:
        """Return out and LSE, connected to q, k and v in autograd's graph."""
        with self._inputs() as inputs:
            problem, device = inputs.problem, inputs.device.type
            self._check(problem, device)
            # A kernel without a backward must not be called where a backward may follow.
            leaves = (self._call.q, self._call.k, self._call.v)
            if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves):
                self._check(problem.replace(backward=True), device)
        self._settings.log_event("called", "")  # From here on exceptions are the kernel's.
        out, lse = _Attention.apply(self, *leaves)  # type: ignore[no-untyped-call]  # torch's
        return Outputs(out, lse)

    def run(self, loss: tuple[torch.Tensor, torch.Tensor | None] | None = None) -> Outputs:
        """Return the kernel's outputs, with gradients if ``loss`` gives those of out and LSE."""
        with self._inputs() as plain:
            inputs = plain if loss is None else _with_loss(plain, *loss)
            outputs = self._settings.kernel.run(inputs)
            right = self._settings.right
            # Tests cannot catch a fault that no call shows, and are not blamed for it.
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
        """Yield the call's Inputs; the library's mods keep the names that kernels know."""
        call = self._call
        with self._tensors.inputs() as inputs:
            mods = {"mask": call.mask, "score": call.score}
            named = {name: mod for name, mod in mods.items() if isinstance(mod, Spec)}
            yield inputs.replace(problem=inputs.problem.replace(**named))


def _with_loss(inputs: Inputs, dout: torch.Tensor, dlse: torch.Tensor | None) -> Inputs:
    problem = inputs.problem.replace(backward=True, dlse=dlse is not None)
    return inputs.replace(problem=problem, dout=dout, dlse=None if dlse is None else dlse.float())


def _same_bits(outputs: Outputs, right: Outputs) -> bool:
    """Return whether all tensors of ``outputs`` equal those of ``right``; NaN equals NaN."""
    others = right.tensors()
    return all(same_numbers(one, others[name]) for name, one in outputs.tensors().items())


class _Attention(torch.autograd.Function):
    """A kernel as an autograd function; its backward runs the forward once more."""

    @staticmethod
    def forward(ctx: Any, shimmed: _ShimmedCall, *leaves: torch.Tensor) -> tuple[torch.Tensor, Any]:
        # Autograd needs these arguments; the call holds the same tensors.
        del leaves
        ctx.shimmed = shimmed
        # LSE without a gradient gets None: zeros would make the kernel compute one.
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
