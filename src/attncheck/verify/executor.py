"""Calls a kernel: everything that runs one goes through here.

In this process (``InProcess``) or in one of the kernel's own (``isolated.Isolated``). Whatever it
raises or returns comes back as data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from attncheck.core.outputs import Outputs
from attncheck.core.source_files import error_line, first_line
from attncheck.subjects.capabilities.subject import ContractViolation, Refused
from attncheck.verify.call_conditions import (
    PLAIN_CALL,
    CallConditions,
    CallNotes,
    EarlierCalls,
    under_conditions,
)
from attncheck.verify.further_calls import synchronize
from attncheck.verify.obligations import (
    aliased_input,
    arithmetic_error,
    inputs_digest,
    output_error,
    written_input,
)
from attncheck.verify.process_effects import State, process_state
from attncheck.verify.timing import Clock, Stopwatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from attncheck.core.declared_arithmetic import Arithmetic
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Case, Problem
    from attncheck.subjects.capabilities.subject import Call, Subject, Tiling


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The reason why there are no outputs."""

    # ``error`` when the kernel raised; ``refused`` when it said, only as it was called, that it
    # does not take its inputs (``subject.Refused``); ``contract`` when what it returned is not
    # what was asked for, ``alias`` when that lies in the memory of its inputs, ``mutation`` when
    # it wrote to them; ``oom`` when no memory was left; ``crash`` and ``timeout`` when its
    # process died or did not answer in time.
    kind: str
    message: str  # one line
    trace: str = ""  # the traceback, for who asks for it


def out_of_memory(error: Exception) -> bool:
    """Return whether ``error`` says that an allocation failed, on the host or on a GPU."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    # torch has no class of its own for a failed allocation on the CPU, nor for one by the driver.
    text = str(error) if isinstance(error, RuntimeError) else ""
    return known or "allocate memory" in text or "CUDA error: out of memory" in text


LACKED = "out of memory for"
"""Begins the reason of a Record where the judge had no memory, not the kernel."""


def lacked_memory(error: Exception, what: str) -> Failure:
    """Return that the judge had no memory for ``what``; an ``error`` of another kind is raised."""
    if not out_of_memory(error):
        raise error
    return Failure(kind="error", message=f"{LACKED} {what}")


def lost_gpu() -> str:
    """Return the error that CUDA raises in this process from now on; empty where it works.

    An illegal or a misaligned address, or a failed launch, ends every later call with its words.
    """
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


ENDS_CALLER = "which no `except Exception` of its caller catches"
"""Of a failure by what is raised to end a program, such as SystemExit."""


def failure(error: BaseException) -> Failure:
    """Return what somebody's code raised, as data."""
    line = first_line(error)
    if isinstance(error, Refused):
        return Failure(kind="refused", message=line)
    if isinstance(error, ContractViolation):
        return Failure(kind=error.rule, message=f"{line}." if line else error.rule)
    message = error_line(error)
    if not isinstance(error, Exception):
        message += f", {ENDS_CALLER}"
    trace = "".join(traceback.format_exception(error))
    lacks = bool(line) and isinstance(error, Exception) and out_of_memory(error)
    lacks = lacks or isinstance(error, MemoryError)  # Python's says nothing
    return Failure(kind="oom" if lacks else "error", message=message, trace=trace)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The source of inputs, so that another process draws the same."""

    case: Case
    run: int = 0  # which of the runs that its question asks for; 0 where there is one


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """The outcome of a call: outputs, and what the kernel declares of them."""

    outputs: Outputs
    seconds: float | None  # median time of one call; None when it was not timed
    tiling: Tiling | None  # what it declares of its tiles
    arithmetic: Arithmetic  # the arithmetic that it declares, or that is assumed of it
    notes: CallNotes = dataclasses.field(default_factory=CallNotes)  # what was seen around the call
    # ``obligations.inputs_digest`` of what it read, afterwards; empty where nobody asked.
    left: str = ""
    compiling: float = 0.0  # seconds of its calls that compilers took; 0 where nobody listened


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One call of several kernels' that take turns."""

    seconds: float
    clock: Clock


class Executor(Protocol):
    """A way to ask and call a kernel."""

    def absence(self, subject: Subject, device: str) -> str | None:
        """Return why ``subject`` can run nothing on ``device``; None if it can or asking raises."""
        ...

    def concerns(self, subject: Subject, problem: Problem) -> bool:
        """Return whether ``problem`` is a question for ``subject`` at all."""
        ...

    def refusal(self, subject: Subject, problem: Problem, device: str) -> str | Failure | None:
        """Return why ``subject`` does not take ``problem``; None if it does."""
        ...

    def launches(
        self, subject: Subject, problem: Problem, device: str
    ) -> Mapping[str, Subject] | Failure:
        """The same kernel launched otherwise (``Subject.launches``)."""
        ...

    def run(
        self,
        subject: Subject,
        inputs: Inputs,
        *,
        origin: Origin | None = None,
        timed: bool = False,
        under: CallConditions = PLAIN_CALL,
    ) -> Execution | Failure:
        """``subject`` on ``inputs``; never raises what the kernel raised.

        Args:
            origin: Where they are from: for who draws them anew elsewhere.
            timed: Whether it is called until its median time is known.
        """
        ...


class KeepingExecutor(Executor, Protocol):
    """An executor that keeps calls, so that those of several kernels can take turns."""

    def keep(self, subject: Subject, inputs: Inputs, *, graph: bool) -> Execution | Failure:
        """As ``run``; its call is kept for ``time`` until ``forget``.

        Args:
            graph: Whether it is timed in a CUDA graph, if it can be captured.
        """
        ...

    def time(self, problem: Problem) -> Turn | Failure:
        """One more call of what is kept of ``problem``."""
        ...

    def forget(self) -> None:
        """Keep no call any more, and nothing that it holds."""
        ...


_NO_CAPTURED = "it gives no gradients of the tensors that a score mod reads"


class InProcess:
    """Calls the kernel in this very process: quick, and only as safe as the kernel.

    Args:
        digests: Whether Executions say what the inputs were afterwards: for who asks from another
            process, and looks at them itself.
    """

    def __init__(self, *, digests: bool = False) -> None:
        self._digests = digests
        self._first: dict[str, State] = {}  # by device: before the first call that was made here
        self._earlier = EarlierCalls()
        self._watches: dict[Problem, Stopwatch] = {}

    def absence(self, subject: Subject, device: str) -> str | None:
        """Return why ``subject`` can run nothing here; what asking raises, ``refusal`` says."""
        try:
            return subject.absent(device)
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001  # foreign code may raise anything
            return None

    def concerns(self, subject: Subject, problem: Problem) -> bool:
        """Return whether to ask ``subject``; True where it cannot say, and ``refusal`` tells."""
        try:
            return subject.concerns(problem)
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001  # foreign code may raise anything
            return True

    def refusal(self, subject: Subject, problem: Problem, device: str) -> str | Failure | None:
        """Return why ``subject`` does not take ``problem``; a Failure when even asking raises."""
        try:
            lacks = _NO_CAPTURED if problem.dcaptured and not subject.captured else None
            return subject.absent(device) or lacks or subject.unsupported(problem, device)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  # foreign code may raise anything
            return failure(error)

    def launches(
        self, subject: Subject, problem: Problem, device: str
    ) -> Mapping[str, Subject] | Failure:
        """Its other launches; a Failure when even asking raises."""
        try:
            return subject.launches(problem, device)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  # foreign code may raise anything
            return failure(error)

    def run(
        self,
        subject: Subject,
        inputs: Inputs,
        *,
        origin: Origin | None = None,
        timed: bool = False,
        under: CallConditions = PLAIN_CALL,
    ) -> Execution | Failure:
        """``subject`` on a copy of ``inputs``; with ``timed``, until the median is known.

        What it warns of is no failure, also where the caller made errors of warnings.
        """
        del origin

        def time(call: Call) -> float | None:
            return Stopwatch(call, inputs.device).median() if timed else None

        return self._run(subject, inputs, under, time)

    def keep(self, subject: Subject, inputs: Inputs, *, graph: bool) -> Execution | Failure:
        """As ``run``; its call is kept for ``time`` until ``forget``."""

        def kept(call: Call) -> None:
            watch = Stopwatch(call, inputs.device, graph=graph)
            self._watches[inputs.problem] = watch

        return self._run(subject, inputs, PLAIN_CALL, kept)

    def time(self, problem: Problem) -> Turn | Failure:
        """One more call of what is kept of ``problem``."""
        try:
            watch = self._watches[problem]
            return Turn(seconds=watch.seconds(), clock=watch.clock)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  # foreign code may raise anything
            return failure(error)

    def forget(self) -> None:
        """Keep no call any more, and nothing that it holds."""
        self._watches.clear()

    def _run(
        self,
        subject: Subject,
        inputs: Inputs,
        under: CallConditions,
        time: Callable[[Call], float | None],
    ) -> Execution | Failure:
        device = inputs.device
        if device.type not in self._first:
            self._first[device.type] = process_state(device)
        first = self._first[device.type]
        if under.turn <= 1:  # another sequence, or none
            self._earlier = EarlierCalls()
        try:
            with (
                _harmless_warnings(),
                under_conditions(under, device, first, self._earlier) as around,
            ):
                copies = around.copied(inputs)
                call = subject.prepare(copies)
                outputs = call()
                synchronize(device)
                broken = _output_failure(outputs, inputs, copies)
                if not broken:
                    around.returned(outputs)
                    # In memory of their own, because further calls may use the kernel's anew.
                    tensors = outputs.tensors().items()
                    outputs = Outputs(**{name: tensor.clone() for name, tensor in tensors})
                    outputs = around.again(subject, call, inputs, outputs)
                seconds = None if broken else time(call)
                tiling = subject.tiling(inputs.problem, device.type)
                arithmetic = subject.arithmetic(inputs.problem, device.type)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  # foreign code may raise anything
            return failure(error)
        # Last of all, because further calls may write to the inputs too.
        broken = broken or _input_failure(copies, inputs, arithmetic)
        return broken or Execution(
            outputs=outputs,
            seconds=seconds,
            tiling=tiling,
            arithmetic=arithmetic,
            notes=around.notes,
            left=inputs_digest(copies) if self._digests else "",
        )


def _output_failure(outputs: Outputs, inputs: Inputs, copies: Inputs) -> Failure | None:
    """Return the Failure of what came of a call on ``copies``, a copy of ``inputs``."""
    unlike = output_error(outputs, inputs)
    if unlike:
        return Failure(kind="contract", message=unlike)
    shared = aliased_input(outputs, copies)
    return Failure(kind="alias", message=shared) if shared else None


def _input_failure(copies: Inputs, inputs: Inputs, arithmetic: object) -> Failure | None:
    """Return the Failure of what a kernel left of its inputs, or declares."""
    changed = written_input(copies, inputs)
    if changed:
        return Failure(kind="mutation", message=changed)
    undeclared = arithmetic_error(arithmetic, inputs)
    return Failure(kind="contract", message=undeclared) if undeclared else None


@contextlib.contextmanager
def _harmless_warnings() -> Iterator[None]:
    """Show warnings that the caller makes errors of: within, they raise nothing.

    torch's own come from any of its threads, once in a process: cuBLAS says in the first backward
    that its thread had no CUDA context (torch 2.11), in whichever test that happens to be.
    """
    filters = list(warnings.filters)
    if all(action != "error" for action, *_ in filters):
        yield  # to enter and leave forgets which warnings were shown once
        return
    with warnings.catch_warnings():
        warnings.resetwarnings()  # and nothing is remembered of the filters there were
        for action, *rest in reversed(filters):
            shown = "default" if action == "error" else action
            warnings.filters.insert(0, (shown, *rest))  # type: ignore[attr-defined]  # it is a list
        yield
