"""A kernel with its capability table: judged by what its author declares."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from attncheck.core.formats import Format
from attncheck.core.mod_spec import FULL, NONE
from attncheck.core.outputs import Outputs
from attncheck.inputs.problem import USUAL_SCALE, Problem
from attncheck.subjects.capabilities import subject

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.core.declared_arithmetic import Arithmetic
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Promise
    from attncheck.subjects.capabilities.capability_table import Capabilities


class DeclaredButRefusedError(Exception):
    """The table says that the kernel takes a Problem, and the kernel says that it does not."""


class Declared(subject.Subject):
    """A Subject within its table.

    What the table has no place for is unsupported, and the kernel is not called. What it declares
    the kernel must take: where the kernel refuses it all the same, the call raises, which is a
    failure. What the table is silent on the kernel may refuse, and its convention what it can say
    one by one and not together. A wrong number is a fault anywhere.

    A table that was found by trying, and that nobody has declared, only limits what is asked: a
    refusal contradicts nothing.

    Args:
        limits: Of a table that was found: what it says, in a line. Empty of one that is declared.
        admitted: Ids of Problems that are asked although the table has no place for them.
    """

    def __init__(
        self,
        inner: subject.Subject,
        capabilities: Capabilities,
        name: str,
        *,
        limits: str = "",
        admitted: frozenset[str] = frozenset(),
    ) -> None:
        self.inner = inner
        self.capabilities = capabilities
        self._limits, self._admitted = limits, admitted
        self.name = name
        self.summary = _summary(inner, capabilities)
        self.triton = inner.triton
        self.sinks = inner.sinks
        self.backward = inner.backward and capabilities.backward is not False
        self.captured = inner.captured
        self.promises = inner.promises
        self.promises_gradients = inner.promises_gradients
        self.conventions = inner.conventions if limits else ()
        # A table may promise more or less than the kernel's class does.
        if capabilities.promises is not None:
            self.promises = frozenset(cast("tuple[Promise, ...]", capabilities.promises))

    def absent(self, device: str) -> str | None:
        """Return what the kernel says: no table changes the machine."""
        return self.inner.absent(device)

    def concerns(self, problem: Problem) -> bool:
        """Return what the kernel says; False of gradients that its table says it has not."""
        return self.inner.concerns(problem) and (self.backward or not problem.backward)

    def unsupported(self, problem: Problem, device: str) -> str | None:
        """Return why the table has no place for it, or what the kernel may refuse and does."""
        outside = self.capabilities.refuses(problem, device)
        if outside and problem.id not in self._admitted:
            return self._limits or outside
        reason = self.inner.unsupported(problem, device)
        if reason and self._must_take(problem, device, reason) and self._alone(problem, device):
            return None  # the call raises then: declared, but refused
        return reason

    def prepare(self, inputs: Inputs) -> subject.Call:
        """The kernel's call; raises DeclaredButRefusedError for what it must take and does not."""
        problem, device = inputs.problem, inputs.device.type
        reason = self.inner.unsupported(problem, device)
        if reason:
            raise DeclaredButRefusedError(f"declared, but refused: {reason}")
        try:
            call = self.inner.prepare(inputs)
        except subject.Refused as error:
            raise self._refusal(problem, device, error) from error

        def checked() -> Outputs:
            try:
                outputs = call()
            except subject.Refused as error:
                raise self._refusal(problem, device, error) from error
            return self._with_declared_lse(outputs)

        return checked

    def written_call(self, problem: Problem) -> subject.WrittenCall | None:
        """Return how the kernel is called: a table changes no call."""
        return self.inner.written_call(problem)

    def tiling(self, problem: Problem, device: str) -> subject.Tiling | None:
        """Return the kernel's own tiling."""
        return self.inner.tiling(problem, device)

    def arithmetic(self, problem: Problem, device: str) -> Arithmetic:
        """The kernel's or its convention's, with what the table says of it."""
        changes = self.capabilities.arithmetic_changes(problem, device)
        return replace(self.inner.arithmetic(problem, device), **changes)

    def _must_take(self, problem: Problem, device: str, reason: str) -> bool:
        """Return whether a refusal contradicts the table; what a machine lacks does not."""
        machine = isinstance(reason, subject.TooLarge) or (
            problem.dtype == "tf32" and device == "cpu"
        )
        return not machine and not self._limits and self.capabilities.declares(problem, device)

    def _alone(self, problem: Problem, device: str) -> bool:
        """Return whether one thing in ``problem`` is refused by itself.

        A table has no place for what is only refused together, as where a causal flag is no
        top-left mask unless the lengths are equal.
        """
        return any(self.inner.unsupported(one, device) for one in _one_by_one(problem))

    def _refusal(self, problem: Problem, device: str, error: subject.Refused) -> Exception:
        # Its refusal contradicts the table: a failure, and no reason to skip the case.
        if self._must_take(problem, device, str(error)):
            return DeclaredButRefusedError(f"declared, but refused: {error}")
        return error

    def _with_declared_lse(self, outputs: Outputs) -> Outputs:
        """Raise ValueError where the table has one and the kernel gave none."""
        lse = self.capabilities.lse
        if lse is None or not isinstance(outputs, Outputs):
            return outputs
        # One that it gives all the same is nothing that it stands for.
        if lse is False:
            return replace(outputs, lse=None)
        if outputs.lse is None:
            raise ValueError("its table says that it gives LSE, and it gave none")
        return outputs


def _one_by_one(problem: Problem) -> Iterator[Problem]:
    """The plainest Problem of the same sizes, with one thing of ``problem`` each."""
    if problem.operation == "softmax":
        yield problem
        return
    usual: dict[str, Any] = {
        "scale": USUAL_SCALE,
        "mask": FULL,
        "score": NONE,
        "kv_heads": problem.heads,
    }
    plain = problem.replace(**usual)
    longest = max(problem.query, problem.kv)
    yield plain
    for name in usual:
        # Of equal lengths, so that lists of lengths still fit.
        yield plain.replace(query=longest, kv=longest, **{name: getattr(problem, name)})


def _summary(inner: subject.Subject, capabilities: Capabilities) -> str:
    """The kernel's own line, and in what the table lets it be less accurate than is usual."""
    looser = capabilities.arithmetic.looser()
    for override in capabilities.override:
        looser |= override.arithmetic.looser()
    if not looser:
        return inner.summary
    listed = ", ".join(
        f"{name}={value.name if isinstance(value, Format) else f'{value:g}'}"
        for name, value in looser.items()
    )
    return f"{inner.summary}; declares looser arithmetic: {listed}"
