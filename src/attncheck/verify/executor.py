"""Executors, through which every kernel is called.

A kernel runs in this process (``InProcess``) or in one of its own (``isolated.IsolatedExecutor``).
Whatever it raises or returns comes back as data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from attncheck.core.declared_arithmetic import Arithmetic
from attncheck.core.outputs import Outputs
from attncheck.core.source_files import error_line, first_line, kernel_frames, kernel_place
from attncheck.subjects.capabilities.subject import ContractViolation, Refused, Tiling
from attncheck.verify.call_conditions import (
    PLAIN_CALL,
    CallConditions,
    CallNotes,
    ConditionedCall,
    EarlierCalls,
)
from attncheck.verify.further_calls import copy_outputs, synchronize
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

    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Case, Problem
    from attncheck.subjects.capabilities.subject import Call, Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The reason why there are no outputs."""

    # ``error``: the kernel raised. ``refused``: it does not take these inputs, as it said before
    # or raised ``subject.Refused``. ``contract``: its outputs have a wrong form. ``alias``: they
    # share memory with the inputs. ``mutation``: it wrote to its inputs. ``oom``: no memory was
    # left. ``crash``, ``timeout``: its process died, or did not answer in time.
    kind: str
    message: str  # one line
    # If it raised, the frames from the kernel's first one on, a line each. If its process died, the
    # end of its standard error.
    trace: str = ""


def out_of_memory(error: Exception) -> bool:
    """Return whether ``error`` says that an allocation failed, on the host or on a GPU."""
    has_class = isinstance(error, MemoryError | torch.OutOfMemoryError)
    # torch raises a bare RuntimeError if an allocation fails on the CPU or in the driver.
    text = str(error) if isinstance(error, RuntimeError) else ""
    return has_class or "allocate memory" in text or "CUDA error: out of memory" in text


LACKED = "out of memory for"
"""Start of the reason of a Record if the judge ran out of memory, not the kernel."""


def lacked_memory(error: Exception, what: str) -> Failure:
    """Return a Failure: no memory was left for ``what``; raise ``error`` if of another kind."""
    if not out_of_memory(error):
        raise error
    return Failure(kind="error", message=f"{LACKED} {what}")


def lost_gpu() -> str:
    """Return the error that every CUDA call in this process now raises; empty if CUDA works.

    After an illegal or misaligned address, or a failed launch, every later call repeats its error.
    """
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


ENDS_CALLER = "which no `except Exception` of its caller catches"
"""End of the message if a kernel raised a BaseException that ends a program, as SystemExit."""


def failure(error: BaseException) -> Failure:
    """Return what foreign code raised as a Failure."""
    line = first_line(error)
    if isinstance(error, Refused):
        return Failure(kind="refused", message=line)
    if isinstance(error, ContractViolation):
        return Failure(kind=error.rule, message=f"{line}." if line else error.rule)
    message = f"{error_line(error)}{kernel_place(error)}"
    if not isinstance(error, Exception):
        message += f", {ENDS_CALLER}"
    trace = "\n".join(kernel_frames(error))
    is_oom = bool(line) and isinstance(error, Exception) and out_of_memory(error)
    is_oom = is_oom or isinstance(error, MemoryError)  # Python's own has no message.
    return Failure(kind="oom" if is_oom else "error", message=message, trace=trace)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The source of inputs, from which another process draws equal ones."""

    case: Case
    run: int = 0  # number of the run among those of its question; 0 if there is only one


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReport:
    """The kernel's declarations about the outputs of a call, and observations around it."""

    seconds: float | None  # median time of one call; None if it was not timed
    tiling: Tiling | None  # the declared tiles
    arithmetic: Arithmetic  # the declared arithmetic, or the one assumed
    notes: CallNotes = dataclasses.field(default_factory=CallNotes)  # observations around the call
    # ``obligations.inputs_digest`` of the inputs after the call; empty if not requested.
    inputs_digest: str = ""
    compiling: float = 0.0  # seconds that compilers took in its calls; 0 if not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution(CallReport):
    """Outputs of a call, with the report on it."""

    outputs: Outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The time of one call, where calls of several kernels take turns."""

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

    def refusal(self, subject: Subject, problem: Problem, device: str) -> Failure | None:
        """Return why ``subject`` does not take ``problem``; None if it does.

        The kind is ``refused``, or another if asking fails.
        """
        ...

    def launches(
        self, subject: Subject, problem: Problem, device: str
    ) -> Mapping[str, Subject] | Failure:
        """Return the kernel's other launches (``Subject.launches``)."""
        ...

    def run(
        self,
        subject: Subject,
        inputs: Inputs,
        *,
        origin: Origin | None = None,
        under: CallConditions = PLAIN_CALL,
    ) -> Execution | Failure:
        """Run ``subject`` on ``inputs``; return what the kernel raises as a Failure.

        Args:
            origin: Source of the inputs, for executors that draw them in another process.
        """
        ...


_Answer = TypeVar("_Answer")
_NO_CAPTURED = "it gives no gradients of the tensors that a score mod reads"


class InProcess:
    """Calls the kernel in this process: quick, and only as safe as the kernel.

    Args:
        digests: Whether Executions have the digest of the inputs after the call, so that another
            process can compare it.
    """

    def __init__(self, *, digests: bool = False) -> None:
        self._digests = digests
        self._first: dict[str, State] = {}  # by device type: before its first call here
        self._earlier = EarlierCalls()
        self._watches: dict[Problem, Stopwatch] = {}

    def absence(self, subject: Subject, device: str) -> str | None:
        """Return why ``subject`` can run nothing here; None if it can, or if asking raises."""
        answer = _answer_of(lambda: subject.absent(device))
        return None if isinstance(answer, Failure) else answer

    def concerns(self, subject: Subject, problem: Problem) -> bool:
        """Return whether to ask ``subject``; True if that raises, which ``refusal`` will report."""
        answer = _answer_of(lambda: subject.concerns(problem))
        return True if isinstance(answer, Failure) else answer

    def refusal(self, subject: Subject, problem: Problem, device: str) -> Failure | None:
        """Return why ``subject`` does not take ``problem``, or what asking raises."""

        def ask() -> str | None:
            lacks = _NO_CAPTURED if problem.dcaptured and not subject.captured else None
            return subject.absent(device) or lacks or subject.unsupported(problem, device)

        reason = _answer_of(ask)
        if isinstance(reason, Failure):
            return reason
        # ``unsupported`` may be a user's, and give False or True.
        return Failure(kind="refused", message=str(reason)) if reason else None

    def launches(
        self, subject: Subject, problem: Problem, device: str
    ) -> Mapping[str, Subject] | Failure:
        """Return its other launches; a Failure if asking raises."""
        return _answer_of(lambda: subject.launches(problem, device))

    def run(
        self,
        subject: Subject,
        inputs: Inputs,
        *,
        origin: Origin | None = None,
        under: CallConditions = PLAIN_CALL,
    ) -> Execution | Failure:
        """Run ``subject`` on a copy of ``inputs``.

        Warnings are no failures, even if the caller turns warnings into errors.
        """
        del origin

        def time(call: Call) -> float | None:
            return Stopwatch(call, inputs.device).median() if under.timed else None

        return self._run(subject, inputs, under, time)

    def keep(self, subject: Subject, inputs: Inputs, *, graph: bool) -> Execution | Failure:
        """Run as ``run``, and keep the call for ``time`` until ``forget``.

        Args:
            graph: Whether it is timed in a CUDA graph, if it can be captured.
        """

        def keep_watch(call: Call) -> None:
            watch = Stopwatch(call, inputs.device, graph=graph)
            self._watches[inputs.problem] = watch

        return self._run(subject, inputs, PLAIN_CALL, keep_watch)

    def time(self, problem: Problem) -> Turn | Failure:
        """Time one more call of the kept call for ``problem``."""

        def ask() -> Turn:
            watch = self._watches[problem]
            return Turn(seconds=watch.seconds(), clock=watch.clock)

        return _answer_of(ask)

    def forget(self) -> None:
        """Drop all kept calls, and the memory that they hold."""
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
        first_state = self._first[device.type]
        if under.turn <= 1:  # A new sequence, or no sequence.
            self._earlier = EarlierCalls()
        try:
            with (
                _show_warnings(),
                ConditionedCall(under, device, first_state, self._earlier).on() as around,
            ):
                copies = around.copied(inputs)
                call = subject.prepare(copies)
                outputs = call()
                synchronize(device)
                broken = _output_failure(outputs, inputs, copies)
                if not broken:
                    around.returned(outputs)
                    # Copied, because further calls may reuse the memory that the kernel returned.
                    outputs = around.again(subject, call, inputs, copy_outputs(outputs))
                seconds = None if broken else time(call)
                tiling = subject.tiling(inputs.problem, device.type)
                arithmetic = subject.arithmetic(inputs.problem, device.type)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  # foreign code may raise anything
            return failure(error)
        # Checked last, because further calls may write to the inputs too.
        broken = broken or _input_failure(copies, inputs, arithmetic)
        return broken or Execution(
            outputs=outputs,
            seconds=seconds,
            tiling=tiling,
            arithmetic=arithmetic,
            notes=around.notes,
            inputs_digest=inputs_digest(copies) if self._digests else "",
        )


def _answer_of(ask: Callable[[], _Answer]) -> _Answer | Failure:
    """Return what foreign code answers; a Failure if it raises."""
    try:
        return ask()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  # foreign code may raise anything
        return failure(error)


def _output_failure(outputs: Outputs, inputs: Inputs, copies: Inputs) -> Failure | None:
    """Return the Failure if outputs have a wrong form or share memory with ``copies``."""
    wrong_form = output_error(outputs, inputs)
    if wrong_form:
        return Failure(kind="contract", message=wrong_form)
    alias = aliased_input(outputs, copies)
    return Failure(kind="alias", message=alias) if alias else None


def _input_failure(copies: Inputs, inputs: Inputs, arithmetic: object) -> Failure | None:
    """Return the Failure if the kernel changed its inputs or declares a wrong arithmetic."""
    mutation = written_input(copies, inputs)
    if mutation:
        return Failure(kind="mutation", message=mutation)
    wrong_arithmetic = arithmetic_error(arithmetic, inputs)
    return Failure(kind="contract", message=wrong_arithmetic) if wrong_arithmetic else None


@contextlib.contextmanager
def _show_warnings() -> Iterator[None]:
    """Show warnings within the context, even if the caller turns them into errors.

    torch's come from any of its threads, once per process: in the first backward, for example,
    cuBLAS warns that its thread had no CUDA context (torch 2.11), whichever test that is in.
    """
    filters = list(warnings.filters)
    if all(action != "error" for action, *_ in filters):
        yield  # catch_warnings would forget which warnings were shown already.
        return
    with warnings.catch_warnings():
        warnings.resetwarnings()  # It also invalidates caches of earlier filters.
        for action, *rest in reversed(filters):
            shown_action = "default" if action == "error" else action
            warnings.filters.insert(0, (shown_action, *rest))  # type: ignore[attr-defined]  # it is a list
        yield
