"""The interface of a kernel under examination: Subject, and the errors that its calls raise."""

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
"""The compiler that runs at a kernel's first call; empty: none."""


class Refused(Exception):
    """Raised by a call if the kernel refuses its inputs, with the reason in one line.

    For kernels that cannot tell beforehand. It means the same as a reason from ``unsupported``.
    """


class ContractViolation(Exception):
    """Raised by a call whose results are malformed or that wrote to its inputs; one line.

    For adapters that convert inputs and results, and so see what an executor cannot.

    Attributes:
        rule: ``contract``, or ``mutation`` if the kernel wrote to its inputs.
    """

    rule = "contract"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCall:
    """Python source that calls a function without attncheck."""

    # It defines ``call(kernel, q, k, v)``; None if an argument cannot be written as source.
    source: str | None
    convention: str  # how the function is called
    empty_row: str  # result of a row that sees no key, as in ``ConventionOptions``
    triton: bool  # whether it uses Triton


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """The walk of a FlashAttention kernel over the keys."""

    block_query: int  # query rows per program
    block_kv: int  # keys per step
    reverse: bool = False  # whether the last key block comes first
    # The running maximum is raised only if it grows by more than this, in log2 units; 0 always
    # raises it. Only for FlashAttention-2.
    lazy_rescale: float = 0.0
    # ``flash2``: a step's weights are relative to the running maximum; ``flash1``: to the step's
    # own maximum, and O is normalised after each step.
    recurrence: Literal["flash2", "flash1"] = "flash2"

    def __str__(self) -> str:
        order = " reverse" if self.reverse else ""
        lazy = f" lazy {self.lazy_rescale:g}" if self.lazy_rescale else ""
        other = f" {self.recurrence}" if self.recurrence != "flash2" else ""
        return f"{self.block_query}×{self.block_kv}{order}{lazy}{other}"


class Subject(ABC):
    """A kernel under examination, and how to call it.

    Attributes:
        name: Its name on the command line and in every report.
        summary: One line for ``attncheck list``.
        triton: Whether it is written in Triton, and so interpreted on a CPU.
        promises: When its bits must be equal (names in ``PROMISES``); without a promise, results
            are compared within bounds, or not at all.
        sinks: Whether it supports a Problem's sink.
        backward: Whether it returns gradients if a Problem requests them.
        captured: Whether it also returns gradients of tensors that a score mod reads
            (``dcaptured``). Without this, Problems that request them are refused.
        float_mask: Whether it gets additive score mods as a floating-point ``attn_mask``; many
            functions take boolean masks alone.
        conventions: For a function without declarations: the conventions by which it may be
            called, its own first, to find by trying what it accepts. Empty for any other kernel.
        promises_gradients: Whether ``promises`` holds for gradients too. Many kernels with
            deterministic outputs add gradients up in the order in which programs end.
    """

    name: str
    summary: str
    triton: bool = False
    # Every kernel must keep these; equal bits in another batch or layout are a further promise.
    promises: frozenset[Promise] = frozenset({"repeat", "hidden"})
    sinks: bool = False
    backward: bool = False
    captured: bool = False
    float_mask: bool = False
    promises_gradients: bool = False
    conventions: tuple[str, ...] = ()

    @property
    def compiler(self) -> CompilerName:
        """The compiler that its first call on a GPU waits for; empty: none."""
        return "triton" if self.triton else ""

    def absent(self, device: str) -> str | None:
        """Return why it cannot run at all on ``device`` (``cpu`` or ``cuda``); None if it can."""
        del device
        return None

    def concerns(self, problem: Problem) -> bool:
        """Return whether ``problem`` is relevant to this kernel at all.

        Softmax is irrelevant to an attention kernel, and so are pages, sinks or gradients to one
        without them: reports then omit the Problem. What a reader would expect to be supported, but
        is not, is for ``unsupported``.
        """
        # Kernels for pages or softmax override this method.
        if problem.operation != "attention" or problem.paging is not None:
            return False
        return (self.sinks or not problem.sink) and (self.backward or not problem.backward)

    @abstractmethod
    def unsupported(self, problem: Problem, device: str) -> str | None:
        """Return why it does not support ``problem`` on ``device``, in one line; None if it does.

        A convention that would have to round one of the Problem's numbers to pass it refuses here.
        """

    @abstractmethod
    def prepare(self, inputs: Inputs) -> Call:
        """Convert ``inputs`` to the kernel's own form, and return a call of the kernel alone.

        Only that call is timed. It may be repeated, and computes everything anew each time.
        """

    def run(self, inputs: Inputs) -> Outputs:
        """Return the outputs on ``inputs``: out, LSE if exposed, and gradients if requested."""
        return self.prepare(inputs)()

    def tiling(self, problem: Problem, device: str) -> Tiling | None:
        """Return the kernel's tiling for ``problem``; None if it is not known."""
        del problem, device
        return None

    @property
    def has_launches(self) -> bool:
        """Whether its class overrides ``launches``."""
        return type(self).launches is not Subject.launches

    def written_call(self, problem: Problem) -> WrittenCall | None:
        """Return source that calls it on ``problem``; None if that needs attncheck."""
        del problem
        return None

    def launches(self, problem: Problem, device: str) -> Mapping[str, Subject]:
        """Return the same kernel with other launch parameters, by names that describe them.

        These are tiles or numbers of splits, for example, which callers never choose and which may
        only affect rounding. Each is a Subject with its own tiling and arithmetic.
        """
        del problem, device
        return {}

    def arithmetic(self, problem: Problem, device: str) -> Arithmetic:
        """Return the arithmetic by which it is judged on ``problem``.

        The default is that of any kernel of these dtypes on this device, with shorter steps and a
        lazy maximum from the declared tiling.
        """
        # The device's generation matters: each has its own way of summing in tensor cores.
        assumed = default_arithmetic(problem.formats, capability(device))
        tiling = self.tiling(problem, device)
        if tiling is None:
            return assumed
        return replace(
            assumed,
            # Longer steps round less often than assumed; only shorter ones loosen the bound.
            block_kv=min(assumed.block_kv, tiling.block_kv),
            lazy_rescale=tiling.lazy_rescale,
            divides_each_step=tiling.recurrence == "flash1",
        )


def with_full_tanh(assumed: Arithmetic, problem: Problem) -> Arithmetic:
    """Return the arithmetic of a kernel that does not approximate tanh in score mods."""
    # Without a score mod it stays unchanged, so that kernels share one arithmetic and its bound.
    return assumed if problem.score == NONE else replace(assumed, tanh_error=0.0)


def capability(device: str) -> tuple[int, int] | None:
    """Return the CUDA compute capability of ``device``; None for a CPU."""
    import torch

    return None if device == "cpu" else torch.cuda.get_device_capability()


class TooLarge(str):
    """A reason for a refusal that lies in the machine's memory and not in the kernel."""

    __slots__ = ()


class Inexact(str):
    """A reason for a refusal that lies in the numbers of one Problem: a tensor would round them."""

    __slots__ = ()


def memory_refusal(what: str, size: int, device: str) -> TooLarge | None:
    """Return why ``device`` cannot hold ``what`` of ``size`` bytes, in one line; None if it can."""
    # The total, not the free memory: the answer must not depend on the moment. On a CPU it is the
    # whole machine's, which kernels share.
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device == "cuda":
        import torch

        memory = torch.cuda.get_device_properties(0).total_memory
    if size <= memory:
        return None
    return TooLarge(f"its {what} would take {size / 2**30:,.0f} GiB of {memory / 2**30:,.0f} GiB")
