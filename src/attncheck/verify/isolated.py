"""A kernel in a process of its own: it may crash, hang and scribble there.

This process never imports the kernel. It sends a Case; the other one draws the inputs anew, calls
the kernel, and sends bytes, of which shapes and dtypes are looked at again here. Inputs have the
same SHA-256 in both before a call, and in the other one after it.

This is no sandbox. It holds against faults, and against code that puts its own functions in the
place of torch's. Code that means to deceive runs as the same user: it can look for the key in its
own memory and answer in its process's name, give back a digest that it computed beforehand, or
attach to this process. Nothing here says of such a kernel that it is right.

What a process dies of may be the fault of an earlier call in it, or of the machine. Twice wrong is
the kernel's; once is ``flaky``, and says so.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from attncheck.core.errors import HostError
from attncheck.subjects.load import Entry
from attncheck.verify.call_conditions import PLAIN_CALL, CallConditions, judged_conditions
from attncheck.verify.executor import Execution, Failure, Origin, Turn
from attncheck.verify.kernel_messages import (
    CallReport,
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


_MOST_CALLS = 10  # that a question which makes more has time for: most are not as long as allowed
_FATAL = {"crash", "timeout", "oom"}  # whatever a process says then, the next question has another


class IsolatedExecutor:
    """Calls a ``Remote`` where it is; an ``executor.Executor``."""

    def __init__(self, connection: KernelConnection) -> None:
        self._connection = connection
        self._compiled: set[str] = set()
        self._unheard: Failure | None = None
        self._next: tuple[Subject, Case] | None = None
        self._answers: dict[tuple[int | None, Subject, str, Problem | None], Any] = {}
        self.compiling = 0.0  # seconds of all calls so far that compilers took

    def expect(self, subject: Subject, case: Case | None) -> None:
        """Call ``subject`` on ``case`` too, once the question that comes first is answered.

        Its process does so while this one judges that answer; the next question receives what it
        gave. None where what comes next is not known, or is more than one call.
        """
        self._next = None if case is None else (subject, case)

    def absence(self, subject: Subject, device: str) -> str | None:
        """Return why ``subject`` can run nothing there; what asking breaks, ``refusal`` tells."""
        reason = self._ask(subject, "absence", None, device)
        return reason if isinstance(reason, str) else None

    def concerns(self, subject: Subject, problem: Problem) -> bool:
        """Return whether to ask ``subject``; also where its process cannot say so."""
        answer = self._ask(subject, "wanted", problem, self._connection.device)
        return answer if isinstance(answer, bool) else True

    def refusal(self, subject: Subject, problem: Problem, device: str) -> str | Failure | None:
        """Return why ``subject`` does not take ``problem``; a Failure where even asking fails."""
        # Asked again, a new process would know nothing of what the last one died of.
        answer = self._unheard or self._ask(subject, "refusal", problem, device)
        self._unheard = None
        return answer if isinstance(answer, str | Failure) else None

    def launches(
        self, subject: Subject, problem: Problem, device: str
    ) -> Mapping[str, Subject] | Failure:
        """Its other launches; a Failure where even asking fails."""
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
        """``subject`` on inputs that its process draws from ``origin``, and that are ``inputs``.

        Without an origin the tensors travel, each contiguous; raises HostError where no process can
        be had.
        """
        words, new = _run_words(subject, origin, under, timed=timed), self._connection.new
        calls = under.calls + under.window + timed
        result = self._run(subject, inputs, dict(words), calls=calls)
        if isinstance(result, Failure):
            final = result.kind in _FATAL  # who asks starts a new one itself
        else:
            final = not (result.notes.wrong or result.notes.remark)
        if final or new or not under.state:
            return result
        # What earlier calls changed there, nobody can surely put right: it may be no fault of this.
        self._connection.end()
        return self._run(subject, inputs, words, calls=calls)

    def keep(self, subject: Subject, inputs: Inputs, *, graph: bool) -> Execution | Failure:
        """As ``run`` without an origin; its process keeps the call, and is not replaced by then."""
        words = _run_words(subject, None, PLAIN_CALL) | {"kept": True, "graph": graph}
        return self._run(subject, inputs, words, calls=2)

    def time(self, problem: Problem) -> Turn | Failure:
        """One more call there, by its own clock."""
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
        """Let its process forget what it keeps; one that died has."""
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
            result = self._checked_answer(answer, inputs)
        except HostError as error:
            # Nobody knows where its stream is: the next question needs a new process.
            self._connection.kill()
            return Failure(kind="crash", message=f"what its process sent is no answer: {error}")
        # A process that has lost its GPU or its memory would fail the next question for it.
        if isinstance(result, Failure) and result.kind in _FATAL:
            self._connection.kill()
        if "kept" not in words:  # else a process that has done enough would end with what it keeps
            self._connection.count_case()
        if isinstance(result, Execution):
            self.compiling += result.compiling
            # It came with the outputs: asked later it would cost a round trip.
            device = self._connection.device
            _remote(subject).remember_tiling(inputs.problem, device, result.tiling)
        self._call_next()
        return result

    def _call_next(self) -> None:
        """Send what is expected next, if the kernel takes it."""
        expected, self._next = self._next, None
        self._answers.clear()
        if expected is None or self._connection.new:
            return
        subject, case = expected
        device = self._connection.device
        # Remembered: the question that comes asks them again.
        for what in ("wanted", "refusal"):
            answer = self._ask(subject, what, case.problem, device)
            if self._connection.pid is None:  # it died: the question is to start another
                return
            self._answers[self._connection.pid, subject, what, case.problem] = answer
            if answer not in (True, None):
                return
        self._connection.problems[case.problem] = None
        words = _run_words(subject, Origin(case=case), judged_conditions(case))
        self._connection.send("run", words, seconds=self._connection.deadlines.call)

    def _seconds(self, subject: Subject, inputs: Inputs, calls: int) -> tuple[float, str]:
        """As ``Deadlines.of_run``; of what is compiled already the process remembers."""
        if self._connection.new:  # what was compiled is gone with the process that did
            self._compiled.clear()
        # Other numbers of the same shapes and mods run what is compiled already.
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

    def _checked_answer(self, answer: Frame, inputs: Inputs) -> Execution | Failure:
        """Return what came, checked; raises HostError for what is no answer."""
        if answer.kind != "ran":
            return _failure(remote_error(answer))
        report, mine = read(CallReport, answer.words.get("report")), inputs_digest(inputs)
        # Both processes draw the inputs, and digests alone travel: neither has to trust the other.
        if report.drawn != mine:
            return Failure(kind="contract", message="in its process the Case has other inputs.")
        if report.left != mine:
            return Failure(kind="mutation", message="wrote to its inputs.")
        # Checked here too, because the kernel shares its process with the checks over there.
        outputs = unpack_outputs(answer.words.get("outputs"), answer.data, inputs.device)
        unlike = output_error(outputs, inputs) or arithmetic_error(report.arithmetic, inputs)
        if unlike:
            return Failure(kind="contract", message=unlike)
        return Execution(
            outputs=outputs,
            seconds=report.seconds,
            tiling=report.tiling,
            arithmetic=report.arithmetic,
            notes=report.notes,
            left=mine,
            compiling=report.compiling,
        )

    def _ask(self, subject: Subject, what: str, problem: Problem | None, device: str) -> Any:
        if (known := (self._connection.pid, subject, what, problem)) in self._answers:
            return self._answers[known]
        try:
            return _remote(subject).ask(what, problem, device)
        except (Died, RemoteError) as error:
            failed = _failure(error)
        self._unheard = failed if failed.kind in _FATAL else None
        return failed


class IsolatedKernel(KernelConnection):
    """One kernel in one process of its own, and who calls it there; a context manager.

    Attributes:
        subject: The kernel, for every function here that takes one.
        executor: How those call it.
    """

    def __init__(self, kernel: str, **where: Any) -> None:
        super().__init__(kernel, **where)
        self.executor = IsolatedExecutor(self)
        self.subject: Subject = RemoteSubject(self, self.description, self.executor)

    def entry(self) -> Entry:
        """Return what is known of the kernel before it is tried; raises HostError as ``files``."""
        return read(Entry, _remote(self.subject).ask("entry", None, self.device))

    def files(self) -> tuple[str, ...]:
        """Of which files its process has modules, but for Python's own and installed ones.

        Raises:
            HostError: when it does not say so.
        """
        names = _remote(self.subject).ask("files", None, self.device)
        return tuple(map(str, names)) if isinstance(names, list) else ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _failure(error: Died | RemoteError, more: str = "") -> Failure:
    return Failure(kind=error.kind, message=f"{error}{more}", trace=error.trace)


def _run_words(
    subject: Subject, origin: Origin | None, under: CallConditions, *, timed: bool = False
) -> dict[str, Any]:
    return run_words(origin, under, timed=timed, launch=_remote(subject).launch)


def _remote(subject: Subject) -> RemoteSubject:
    if not isinstance(subject, RemoteSubject):
        raise HostError(f"kernel {subject.name!r} is in this process: call it here.")
    return subject
