"""Calls a kernel in a process of its own, where it may crash, hang and corrupt memory.

This process never imports the kernel. It sends a Case; the kernel's process draws the inputs again,
calls the kernel, and sends bytes, whose shapes and dtypes are checked again here. The SHA-256 of
the inputs must agree in both processes before a call, and in the kernel's after it.

This is no sandbox. It protects against faults, and against code that replaces functions of torch.
Malicious code runs as the same user: it can search its memory for the key and answer in its
process's name, return a digest that it computed beforehand, or attach to this process. No verdict
on such a kernel can be trusted.

A process may die through the fault of an earlier call in it, or of the machine. A death that is
repeated is the kernel's fault; one that is not is reported as ``flaky``.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Self

from attncheck.core.errors import HostError
from attncheck.subjects.load import Entry
from attncheck.verify.call_conditions import PLAIN_CALL, CallConditions, judged_conditions
from attncheck.verify.executor import CallReport, Execution, Failure, Origin, Turn
from attncheck.verify.kernel_messages import (
    RemoteError,
    pack_inputs,
    read,
    remote_error,
    run_words,
    unpack_outputs,
)
from attncheck.verify.obligations import arithmetic_error, inputs_digest, output_bytes, output_error
from attncheck.verify.remote_kernel import KernelConnection, RemoteSubject
from attncheck.workers.process import Died

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Case, Problem
    from attncheck.subjects.capabilities.subject import Subject
    from attncheck.workers.transport import Frame


_MOST_CALLS = 10  # A run of more calls gets the time of 10: most calls take less than their limit.
_FATAL = {"crash", "timeout", "oom"}  # After these kinds the next question gets a new process.


class IsolatedExecutor:
    """An ``executor.Executor`` that calls a ``RemoteSubject`` in its process."""

    def __init__(self, connection: KernelConnection) -> None:
        self._connection = connection
        self._compiled: set[str] = set()
        self._unreported: Failure | None = None
        self._next: tuple[Subject, Case] | None = None
        self._answers: dict[tuple[int | None, Subject, str, Problem | None], Any] = {}
        self.compiling = 0.0  # seconds of all calls so far that compilers took

    def expect(self, subject: Subject, case: Case | None) -> None:
        """Have ``subject`` called on ``case`` right after the next question is answered.

        Its process does so while this one judges that answer, and the question on ``case`` then
        receives the result. None if the case is not known, or takes more than one call.
        """
        self._next = None if case is None else (subject, case)

    def absence(self, subject: Subject, device: str) -> str | None:
        """Return why ``subject`` can run nothing there; None if it can, or if asking fails."""
        reason = self._ask(subject, "absence", None, device)
        return reason if isinstance(reason, str) else None

    def concerns(self, subject: Subject, problem: Problem) -> bool:
        """Return whether to ask ``subject``; True if its process does not answer."""
        answer = self._ask(subject, "wanted", problem, self._connection.device)
        return answer if isinstance(answer, bool) else True

    def refusal(self, subject: Subject, problem: Problem, device: str) -> str | Failure | None:
        """Return why ``subject`` does not take ``problem``; a Failure if asking fails."""
        # A death in the last question is reported now: a new process would know nothing of it.
        answer = self._unreported or self._ask(subject, "refusal", problem, device)
        self._unreported = None
        return answer if isinstance(answer, str | Failure) else None

    def launches(
        self, subject: Subject, problem: Problem, device: str
    ) -> Mapping[str, Subject] | Failure:
        """Return its other launches; a Failure if asking fails."""
        try:
            return subject.launches(problem, device)
        except (Died, RemoteError) as error:
            return _failure(error)

    def run(
        self,
        subject: Subject,
        inputs: Inputs,
        *,
        origin: Origin | None = None,
        timed: bool = False,
        under: CallConditions = PLAIN_CALL,
    ) -> Execution | Failure:
        """Run ``subject`` on ``inputs``, which its process draws again from ``origin``.

        Without an origin the tensors are sent, each contiguous. Raise HostError if no process can
        be started.
        """
        words = run_words(origin, under, timed=timed, launch=_remote(subject).launch)
        new = self._connection.new
        calls = under.calls + under.window + timed
        result = self._run(subject, inputs, dict(words), calls=calls)
        if isinstance(result, Failure):
            is_final = result.kind in _FATAL  # The next question starts a new process.
        else:
            is_final = not (result.notes.wrong or result.notes.remark)
        if is_final or new or not under.state:
            return result
        # An earlier call's lasting change may be the cause: run it again in a new process.
        self._connection.end()
        return self._run(subject, inputs, words, calls=calls)

    def keep(self, subject: Subject, inputs: Inputs, *, graph: bool) -> Execution | Failure:
        """Run without an origin, and keep the call; its process is not replaced while it does."""
        words = run_words(None, PLAIN_CALL, launch=_remote(subject).launch)
        words |= {"kept": True, "graph": graph}
        return self._run(subject, inputs, words, calls=2)

    def time(self, problem: Problem) -> Turn | Failure:
        """Time one more call of the kept call for ``problem``, by its process's clock."""
        words, limit = {"problem": problem.to_json()}, self._connection.deadlines.call
        try:
            answer = self._connection.ask("time", words, seconds=limit, answered="timed")
        except (Died, RemoteError) as error:
            return _failure(error)
        try:
            turn = read(Turn, answer.words)
            if turn.seconds > 0:
                return turn
        except HostError:
            self._connection.kill()
        return Failure(kind="crash", message="what its process sent is no time")

    def forget(self) -> None:
        """Have its process drop kept calls; a process that died has none."""
        if self._connection.pid is not None:
            with suppress(Died):
                self._connection.ask("forget", {}, seconds=self._connection.deadlines.call)

    def _run(
        self, subject: Subject, inputs: Inputs, words: dict[str, Any], *, calls: int
    ) -> Execution | Failure:
        data = b""
        if "case" not in words:
            words["inputs"], data = pack_inputs(inputs)
        self._connection.problems[inputs.problem] = None
        seconds, limit = self._seconds(subject, inputs, calls=calls)
        try:
            most = output_bytes(inputs)
            answer = self._connection.ask("run", words, seconds=seconds, most=most, data=data)
        except Died as error:
            return _failure(error, f" ({limit})" if limit and error.kind == "timeout" else "")
        try:
            result = self._check_answer(answer, inputs)
        except HostError as error:
            # The position in its stream is unknown: the next question needs a new process.
            self._connection.kill()
            return Failure(kind="crash", message=f"what its process sent is no answer: {error}")
        # A process that lost its GPU or memory would fail the next question too.
        if isinstance(result, Failure) and result.kind in _FATAL:
            self._connection.kill()
        if "kept" not in words:  # A process that keeps calls must not be replaced.
            self._connection.count_case()
        if isinstance(result, Execution):
            self.compiling += result.compiling
            # The tiling came with the outputs; asking for it later would take a round trip.
            device = self._connection.device
            _remote(subject).remember_tiling(inputs.problem, device, result.tiling)
        self._call_next()
        return result

    def _call_next(self) -> None:
        """Send the call of the expected case, if the kernel takes it."""
        expected, self._next = self._next, None
        self._answers.clear()
        if expected is None or self._connection.new:
            return
        subject, case = expected
        device = self._connection.device
        # The answers are cached, because the question on the case asks them again.
        for what in ("wanted", "refusal"):
            answer = self._ask(subject, what, case.problem, device)
            if self._connection.pid is None:  # It died: the question starts a new process.
                return
            self._answers[self._connection.pid, subject, what, case.problem] = answer
            if answer not in (True, None):
                return
        self._connection.problems[case.problem] = None
        launch = _remote(subject).launch
        words = run_words(Origin(case=case), judged_conditions(case), launch=launch)
        self._connection.send("run", words, seconds=self._connection.deadlines.call)

    def _seconds(self, subject: Subject, inputs: Inputs, calls: int) -> tuple[float, str]:
        """Return ``Deadlines.of_run``, given what the process has compiled already."""
        if self._connection.new:  # A new process has compiled nothing.
            self._compiled.clear()
        # Compiled code depends on shapes and mods, not on the numbers.
        structure = inputs.problem.replace(seed=0, distribution="normal").id
        unseen = structure not in self._compiled
        self._compiled.add(structure)
        return self._connection.deadlines.of_run(
            min(calls, _MOST_CALLS),
            self._connection.device,
            new=self._connection.new,
            unseen=unseen,
            compiles=_remote(subject).compiles or self.compiling > 0,
        )

    def _check_answer(self, answer: Frame, inputs: Inputs) -> Execution | Failure:
        """Return the checked result of a run; raise HostError for an invalid answer."""
        if answer.kind != "ran":
            return _failure(remote_error(answer))
        report, digest = read(CallReport, answer.words.get("report")), inputs_digest(inputs)
        # Each process draws the inputs itself and only digests are sent: neither trusts the other.
        if answer.words.get("drawn") != digest:
            return Failure(kind="contract", message="in its process the Case has other inputs.")
        if report.inputs_digest != digest:
            return Failure(kind="mutation", message="wrote to its inputs.")
        # Checked again here, because the kernel could tamper with the checks in its own process.
        outputs = unpack_outputs(answer.words.get("outputs"), answer.data, inputs.device)
        error = output_error(outputs, inputs) or arithmetic_error(report.arithmetic, inputs)
        if error:
            return Failure(kind="contract", message=error)
        values = {each.name: getattr(report, each.name) for each in fields(report)}
        return Execution(outputs=outputs, **values)

    def _ask(self, subject: Subject, what: str, problem: Problem | None, device: str) -> Any:
        if (key := (self._connection.pid, subject, what, problem)) in self._answers:
            return self._answers[key]
        try:
            return _remote(subject).ask(what, problem, device)
        except (Died, RemoteError) as error:
            failure = _failure(error)
        self._unreported = failure if failure.kind in _FATAL else None
        return failure


class IsolatedKernel(KernelConnection):
    """A kernel in a process of its own with its executor; a context manager.

    Attributes:
        subject: The kernel, for every function that takes a Subject.
        executor: The executor that calls it.
    """

    def __init__(self, kernel: str, **where: Any) -> None:
        super().__init__(kernel, **where)
        self.executor = IsolatedExecutor(self)
        self.subject: Subject = RemoteSubject(self, self.description, self.executor)

    def entry(self) -> Entry:
        """Return the facts about the kernel before any trial; raise HostError as ``files``."""
        return read(Entry, _remote(self.subject).ask("entry", None, self.device))

    def files(self) -> tuple[str, ...]:
        """Return the files of modules in its process, except Python's own and installed ones.

        Raises:
            HostError: if the process does not answer.
        """
        names = _remote(self.subject).ask("files", None, self.device)
        return tuple(map(str, names)) if isinstance(names, list) else ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _failure(error: Died | RemoteError, more: str = "") -> Failure:
    return Failure(kind=error.kind, message=f"{error}{more}", trace=error.trace)


def _remote(subject: Subject) -> RemoteSubject:
    if not isinstance(subject, RemoteSubject):
        raise HostError(f"kernel {subject.name!r} is in this process: call it here.")
    return subject
