"""The contract of a kernel under examination: the Subject, and how it refuses."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from attncheck.core.declared_arithmetic import Arithmetic, default_arithmetic
from attncheck.core.mod_spec import NONE

if TYPE_CHECKING:
    from attncheck.core.outputs import Outputs
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Problem, Promise

__all__ = ["Subject"]


Call = Callable[[], "Outputs"]
CompilerName = Literal["", "triton", "torch", "cudnn"]
"""Whose compiler works at a kernel's first call; empty for none's."""


class Refused(Exception):
    """Raised by a call: the kernel says that it does not take its inputs, and why, in one line.

    For kernels that nobody can ask beforehand. It means the same as a reason of ``unsupported``.
    """


class ContractViolation(Exception):
    """Raised by a call: what came back, or became of the inputs, is wrong; one line.

    For who brings it into attncheck's own form, and so sees what an executor cannot.

    Attributes:
        rule: ``contract``, or ``mutation`` where it wrote to its inputs.
    """

    rule = "contract"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCall:
    """A call of a function as Python source, without attncheck."""

    # It defines ``call(kernel, q, k, v)``; None where an argument cannot be said.
    source: str | None
    convention: str  # how the function is called
    empty_row: str  # what it gives for a row that sees no key, as ``ConventionOptions`` say
    triton: bool  # whether it uses Triton


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """The walk of a FlashAttention kernel over the keys."""

    block_query: int  # query rows per program
    block_kv: int  # keys per step
    reverse: bool = False  # whether the last key block comes first
    # The running maximum moves only when it grows by more than this, in log2 units; 0 moves it
    # always. Of FlashAttention-2 alone.
    lazy_rescale: float = 0.0
    # What a step's weights are relative to: the running maximum (``flash2``), or the step's own,
    # with O normalised after each step (``flash1``).
    recurrence: Literal["flash2", "flash1"] = "flash2"

    def __str__(self) -> str:
        order = " reverse" if self.reverse else ""
        lazy = f" lazy {self.lazy_rescale:g}" if self.lazy_rescale else ""
        other = f" {self.recurrence}" if self.recurrence != "flash2" else ""
        return f"{self.block_query}×{self.block_kv}{order}{lazy}{other}"


class Subject(ABC):
    """A kernel under examination, and how to call it.

    Attributes:
        name: What it is called on the command line and in every report.
        summary: One line for ``attncheck list``.
        triton: Whether it is written in Triton, and so interpreted on a CPU.
        promises: What it promises of its bits (names in ``PROMISES``); what it does not promise is
            asked within bounds, or not at all.
        sinks: Whether it takes a Problem's sink.
        backward: Whether it gives gradients where a Problem asks for them.
        captured: Whether among them are those of the numbers that a score mod reads from tensors,
            where a Problem asks for them (``dcaptured``). Such a Problem is refused for the others.
        conventions: Of a function that nobody has declared anything of: those by which it may be
            called, its own first; what it takes is found by trying. Empty of any other kernel.
        promises_gradients: Whether ``promises`` holds of its gradients too. Many that promise the
            bits of out add gradients up in whatever order programs end.
    """

    name: str
    summary: str
    triton: bool = False
    # What any kernel does; the same bits in another batch or layout are more.
    promises: frozenset[Promise] = frozenset({"repeat", "hidden"})
    sinks: bool = False
    backward: bool = False
    captured: bool = False
    promises_gradients: bool = False
    conventions: tuple[str, ...] = ()

    @property
    def compiler(self) -> CompilerName:
        """Whose compiler its first call on a GPU waits for; empty for none's."""
        return "triton" if self.triton else ""

    def absent(self, device: str) -> str | None:
        """Return why it can run nothing on ``device`` (``cpu`` or ``cuda``); None if it can."""
        del device
        return None

    def concerns(self, problem: Problem) -> bool:
        """Return whether ``problem`` is a question for this kernel at all.

        A kernel for attention is not asked about softmax, nor one without pages, sinks or gradients
        about those: no cell, no row, no reason. What a reader would expect it to take, and it does
        not, is for ``unsupported``.
        """
        # Pages and softmax are for kernels that say so themselves.
        if problem.operation != "attention" or problem.paging is not None:
            return False
        return (self.sinks or not problem.sink) and (self.backward or not problem.backward)

    @abstractmethod
    def unsupported(self, problem: Problem, device: str) -> str | None:
        """Return why it does not take ``problem`` on ``device``, in one line; None if it does.

        A convention that could pass the Problem only by rounding a number of it again says so
        here.
        """

    @abstractmethod
    def prepare(self, inputs: Inputs) -> Call:
        """Bring ``inputs`` into the kernel's own form; the returned call is the kernel alone.

        Only that call is timed. Every call computes anew and may be repeated.
        """

    def run(self, inputs: Inputs) -> Outputs:
        """Outputs on ``inputs``: out, LSE if exposed, and gradients where they are asked for."""
        return self.prepare(inputs)()

    def tiling(self, problem: Problem, device: str) -> Tiling | None:
        """The tiling it uses on ``problem``, where it is known and declared."""
        del problem, device
        return None

    @property
    def has_launches(self) -> bool:
        """Whether it says of other launches at all, as its class alone can tell."""
        return type(self).launches is not Subject.launches

    def written_call(self, problem: Problem) -> WrittenCall | None:
        """Return how a script calls it on ``problem``; None where it needs attncheck for that."""
        del problem
        return None

    def launches(self, problem: Problem, device: str) -> Mapping[str, Subject]:
        """Return the same kernel launched otherwise, by names that say how; none for one launch.

        Other tiles or another number of splits, say: what a caller never chooses and what must not
        matter beyond rounding. Each is a Subject of its own, with its own tiling and arithmetic.
        """
        del problem, device
        return {}

    def arithmetic(self, problem: Problem, device: str) -> Arithmetic:
        """The arithmetic by which it is judged on ``problem``.

        What is assumed of any kernel of these dtypes on this device, unless it declares another;
        finer steps and a lazy maximum are taken from the tiling that it declares.
        """
        # By the device's generation: tensor cores of each add up in their own way.
        assumed = default_arithmetic(problem.formats, capability(device))
        tiling = self.tiling(problem, device)
        if tiling is None:
            return assumed
        return replace(
            assumed,
            # Longer steps round less often than is assumed: only shorter ones loosen the bound.
            block_kv=min(assumed.block_kv, tiling.block_kv),
            lazy_rescale=tiling.lazy_rescale,
            divides_each_step=tiling.recurrence == "flash1",
        )


def with_full_tanh(assumed: Arithmetic, problem: Problem) -> Arithmetic:
    """Of a kernel whose score mod calls no approximation of tanh: no error beyond a mod's own."""
    # Without a score mod nothing calls it, and one arithmetic is one bound for many kernels.
    return assumed if problem.score == NONE else replace(assumed, tanh_error=0.0)


def capability(device: str) -> tuple[int, int] | None:
    """CUDA compute capability of ``device``; None on a CPU."""
    import torch

    return None if device == "cpu" else torch.cuda.get_device_capability()


class TooLarge(str):
    """A reason that lies in the machine, and not in the kernel."""

    __slots__ = ()


def memory_refusal(what: str, size: int, device: str) -> TooLarge | None:
    """Return why ``device`` cannot hold ``what`` of ``size`` bytes, in one line; None if it can."""
    there = _memory(device)
    # Of all memory, not of what is free: whether it fits must not depend on the moment.
    if size <= there:
        return None
    return TooLarge(f"its {what} would take {size / 2**30:,.0f} GiB of {there / 2**30:,.0f} GiB")


def _memory(device: str) -> int:
    if device == "cuda":
        import torch

        return torch.cuda.get_device_properties(0).total_memory
    # By the system itself, without a package: kernels on a CPU share what it has.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
