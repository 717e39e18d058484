"""A kernel with a capability table, judged by what its author declares in it."""

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


_ALIGNMENT = 16  # Bytes of the widest load of a GPU thread, to which torch aligns all memory.


class DeclaredButRefusedError(Exception):
    """Raised if a kernel refuses a Problem that its table declares as supported."""


class Declared(subject.Subject):
    """A Subject limited by its capability table.

    A Problem that the table excludes is unsupported, and the kernel is not called. A Problem that
    the table declares must be supported: if the kernel refuses it, the call raises, which is a
    failure. The kernel may refuse what the table does not mention, such as unusual strides, and its
    convention may refuse a combination of features that it supports one by one. A wrong number is
    always a fault.

    A table that was found by trying, and not declared, only limits the Problems that are asked; a
    refusal does not contradict it.

    Args:
        limits: One line that describes a table found by trying; empty for a declared table.
        admitted: Ids of Problems that are asked although the table excludes them.
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
        # A table may promise more or less than the kernel's class.
        if capabilities.promises is not None:
            self.promises = frozenset(cast("tuple[Promise, ...]", capabilities.promises))

    def absent(self, device: str) -> str | None:
        """Return the kernel's own answer, which a table cannot change."""
        return self.inner.absent(device)

    def concerns(self, problem: Problem) -> bool:
        """Return the kernel's own answer; False for gradients if its table denies them."""
        return self.inner.concerns(problem) and (self.backward or not problem.backward)

    def unsupported(self, problem: Problem, device: str) -> str | None:
        """Return why the table excludes ``problem``, or why the kernel refuses it and may do so."""
        outside = self.capabilities.refuses(problem, device)
        if outside and problem.id not in self._admitted:
            return self._limits or outside
        reason = self.inner.unsupported(problem, device)
        if reason and self._must_take(problem, device, reason) and self._by_itself(problem, device):
            return None  # ``prepare`` then raises DeclaredButRefusedError
        return reason

    def prepare(self, inputs: Inputs) -> subject.Call:
        """Return the kernel's call; raises DeclaredButRefusedError if it breaks a declaration."""
        problem, device = inputs.problem, inputs.device.type
        reason = self.inner.unsupported(problem, device)
        if reason:
            raise DeclaredButRefusedError(f"declared, but refused: {reason}")
        try:
            call = self.inner.prepare(inputs)
        except subject.Refused as error:
            raise self._refusal(inputs, error) from error

        def checked() -> Outputs:
            try:
                outputs = call()
            except subject.Refused as error:
                raise self._refusal(inputs, error) from error
            return self._with_declared_lse(outputs)

        return checked

    def written_call(self, problem: Problem) -> subject.WrittenCall | None:
        """Return the kernel's own call, which a table cannot change."""
        return self.inner.written_call(problem)

    def tiling(self, problem: Problem, device: str) -> subject.Tiling | None:
        """Return the kernel's own tiling."""
        return self.inner.tiling(problem, device)

    def arithmetic(self, problem: Problem, device: str) -> Arithmetic:
        """Return the kernel's or its convention's arithmetic, with the table's changes."""
        changes = self.capabilities.arithmetic_changes(problem, device)
        return replace(self.inner.arithmetic(problem, device), **changes)

    def _must_take(self, problem: Problem, device: str, reason: str) -> bool:
        """Return whether a refusal contradicts the table; lack of hardware or digits does not."""
        excused = isinstance(reason, subject.TooLarge | subject.Inexact) or (
            problem.dtype == "tf32" and device == "cpu"
        )
        return not excused and not self._limits and self.capabilities.declares(problem, device)

    def _by_itself(self, problem: Problem, device: str) -> bool:
        """Return whether the kernel refuses a feature of ``problem`` by itself.

        A table cannot express that only a combination is refused: for example, a causal flag may
        be a top-left mask only if the lengths are equal.
        """
        return any(self.inner.unsupported(one, device) for one in _with_one_feature(problem))

    def _refusal(self, inputs: Inputs, error: subject.Refused) -> Exception:
        # A refusal that contradicts the table is a failure and must not skip the case.
        must_take = self._must_take(inputs.problem, inputs.device.type, str(error))
        if must_take and _lies_as_usual(inputs):
            return DeclaredButRefusedError(f"declared, but refused: {error}")
        return error

    def _with_declared_lse(self, outputs: Outputs) -> Outputs:
        """Return outputs with the table's LSE; raises ValueError if the declared one is absent."""
        lse = self.capabilities.lse
        if lse is None or not isinstance(outputs, Outputs):
            return outputs
        # A kernel is not judged by an LSE that its table disclaims.
        if lse is False:
            return replace(outputs, lse=None)
        if outputs.lse is None:
            raise ValueError("its table says that it gives LSE, and it gave none")
        return outputs


def _lies_as_usual(inputs: Inputs) -> bool:
    """Return whether the tensors are contiguous and aligned; a table cannot declare the others."""
    tensors = (inputs.q, inputs.k, inputs.v, inputs.x, inputs.dout)
    return all(
        one is None or (one.is_contiguous() and one.data_ptr() % _ALIGNMENT == 0) for one in tensors
    )


def _with_one_feature(problem: Problem) -> Iterator[Problem]:
    """Yield the plainest Problem of these sizes, then variants with one feature of ``problem``."""
    if problem.operation == "softmax":
        yield problem
        return
    defaults: dict[str, Any] = {
        "scale": USUAL_SCALE,
        "mask": FULL,
        "score": NONE,
        "kv_heads": problem.heads,
    }
    plain = problem.replace(**defaults)
    longest = max(problem.query, problem.kv)
    yield plain
    for name in defaults:
        # With equal lengths, so that masks with a list of lengths still fit.
        yield plain.replace(query=longest, kv=longest, **{name: getattr(problem, name)})


def _summary(inner: subject.Subject, capabilities: Capabilities) -> str:
    """Return the kernel's summary, with the ways in which its table loosens the arithmetic."""
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
