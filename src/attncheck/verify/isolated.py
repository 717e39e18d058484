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
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import msgspec

from attncheck.core.declared_arithmetic import Arithmetic
from attncheck.core.errors import HostError, UsageError
from attncheck.inputs.problem import PROMISES
from attncheck.subjects.capabilities.subject import Call, Subject, Tiling, WrittenCall
from attncheck.subjects.load import Entry
from attncheck.verify.call_conditions import PLAIN_CALL, CallConditions, judged_conditions
from attncheck.verify.executor import CallReport, Execution, Failure, Origin, Turn
from attncheck.verify.kernel_messages import (
    Description,
    RemoteError,
    pack_inputs,
    read,
    remote_error,
    run_words,
    unpack_outputs,
)
from attncheck.verify.obligations import arithmetic_error, inputs_digest, output_bytes, output_error
from attncheck.workers.process import KERNEL_SERVER, Died, Worker
from attncheck.workers.transport import Frame

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Case, Problem
    from attncheck.subjects.terms import Terms

_MOST_CASES = 500  # Calls per process; then it is replaced, because a kernel's leftovers add up.
_MOST_GROWTH = 4 << 30  # Bytes of memory that a process may hold beyond its first measurement.
_MOST_CALLS = 10  # A run of more calls gets the time of 10: most calls take less than their limit.
_MOST_TILINGS = 256  # Tilings cached per kernel.
_LEAST_TO_LOAD = 4.0  # Seconds for loading, whatever the limit of a call: a file imports packages.
_LARGEST = 1 << 40  # Bytes: in effect no limit, for an answer that is discarded.
_FATAL = {"crash", "timeout", "oom"}  # After these kinds the next question gets a new process.
_REQUESTS = {  # Completes the message that a process did not answer.
    "start": "whether it had started",
    "mods": "what its mods are",
    "load": "what the kernel is",
    "hold": "what the kernel is, on other terms",
    "ask": "a question about a problem",
    "run": "with outputs",
    "time": "how long a call took",
    "forget": "that it keeps no call",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Time limits of a kernel's process, in seconds."""

    start: float = 120.0  # to start Python and import torch, before any code of the kernel runs
    load: float = 120.0  # to import the kernel, or mods
    call: float = 60.0  # to answer one question: to draw the inputs and call the kernel
    # Additional time of a process's first call, in which torch imports much of itself.
    imports: float = 30.0
    compile: float = 180.0  # to answer a first question with these shapes and mods on a GPU
    close: float = 5.0  # to end by itself
    typed: bool = False  # whether a user set the limit of a call

    @classmethod
    def of(cls, seconds: float | None) -> Self:
        """Return deadlines for calls of at most ``seconds``; the default ones if None or 0."""
        if not seconds:
            return cls()
        usual = cls()
        return cls(
            load=min(usual.load, max(seconds, _LEAST_TO_LOAD)),
            call=seconds,
            imports=0.0,
            compile=max(seconds, usual.compile),
            typed=True,
        )

    def of_run(
        self, calls: int, device: str, *, new: bool, unseen: bool, compiles: bool
    ) -> tuple[float, str]:
        """Return the seconds after which a run is killed, and a note on that limit for messages.

        On a GPU a first call may compile. A limit that the user typed holds for it too, unless the
        kernel is known to compile: then the first call with these shapes has the compile limit.

        Args:
            calls: Number of calls in the run.
            device: ``cpu`` or ``cuda``.
            new: Whether the process has not yet been asked anything.
            unseen: Whether the process has not yet run these shapes and mods.
            compiles: Whether the kernel is known to compile, or has compiled before.
        """
        seconds = self.call * calls + (self.imports if new else 0.0)
        if device != "cuda" or not unseen:
            return seconds, ""
        if compiles or not self.typed:
            seconds = max(self.compile, seconds)
            return seconds, "the limit of a first call, which compiles"
        return seconds, "of a kernel that compiles at its first call type a longer --timeout"


class IsolatedKernel:
    """A kernel in a process of its own, which is replaced by a new one if it dies.

    It is a context manager, which ends the process.

    Args:
        kernel: As ``subjects.load.load_subject`` takes it.
        convention: Name of a calling convention; empty for the first that fits.
        gpu: The process's ``CUDA_VISIBLE_DEVICES``; empty for this process's.
        deadlines: Time limits.
        folder: Its working directory, which file references are relative to; empty for this
            process's.
        paths: Folders in which it and its children look for modules first.
        worker: The first process, if one was started ahead of time, with this process's folder and
            environment; if it echoes, later processes do too.
        mods: The ``mask`` and the ``score`` of a file that Problems will name, ``FILE.py::NAME``,
            and the file of a ``recording``.

    Attributes:
        subject: The kernel, for every function that takes a Subject.
        executor: The executor that calls it.
        problems: Problems that the process has been asked, in order.
        started: Number of processes so far.

    Raises:
        UsageError: if there is no such kernel.
        HostError: if it cannot be loaded for another reason; ``Died`` if its process crashed.
    """

    def __init__(  # noqa: PLR0913  # where a process runs, and what in it
        self,
        kernel: str,
        *,
        convention: str = "",
        device: str = "cpu",
        gpu: str = "",
        deadlines: Deadlines | None = None,
        folder: str = "",
        paths: tuple[str, ...] = (),
        worker: Worker | None = None,
        mods: Mapping[str, str] | None = None,
    ) -> None:
        self._mods = mods or {}
        self.device, self.deadlines = device, deadlines or Deadlines()
        self._words = {"kernel": kernel, "convention": convention, "device": device}
        self._new_worker = partial(
            Worker,
            KERNEL_SERVER,
            environment={"CUDA_VISIBLE_DEVICES": gpu} if gpu else {},
            folder=folder,
            paths=paths,
            echo=False if worker is None else worker.echoes,
        )
        self._worker: Worker | None = None
        self._terms: dict[str, Any] | None = None
        self._ahead = worker
        self._sent: tuple[Worker, str, dict[str, Any]] | None = None
        self.started, self._cases, self._memory_at_first = 0, 0, 0
        self.problems: dict[Problem, None] = {}
        self.executor = IsolatedExecutor(self)
        self.subject: Subject = RemoteSubject(self, self._start())

    @property
    def pid(self) -> int | None:
        """The process's id; None while there is no process."""
        return None if self._worker is None else self._worker.pid

    @property
    def new(self) -> bool:
        """True while no question has called the kernel in its process."""
        return self._worker is None or self._cases == 0

    def ask(
        self,
        kind: str,
        words: dict[str, Any],
        *,
        seconds: float,
        most: int = 0,
        data: bytes = b"",
        answered: str = "",
    ) -> Frame:
        """Return the answer to a question.

        Args:
            seconds: Time after which the process is killed.
            most: Bytes beside JSON that the answer may have.
            data: Bytes beside JSON of the question.
            answered: The kind of answer expected; empty for any.

        Raises:
            Died: if there is no answer. The next question starts another process.
            RemoteError: for an answer of another kind: asking raised in the process.
            HostError: if no process can be started, which is not the kernel's fault.
        """
        if self._worker is None:
            try:
                self._start()
            except UsageError as error:
                # It loaded before, so the kernel has changed, not what the user typed.
                raise Died("crash", f"loaded once more it said: {error}") from None
        answer = self._exchange(kind, words, seconds, most, data)
        if answered and answer.kind != answered:
            raise remote_error(answer)
        return answer

    def send(self, kind: str, words: dict[str, Any], *, seconds: float) -> None:
        """Send a question ahead; ``ask`` receives its answer if it asks the same next."""
        if self._worker is not None:
            self._sent = self._worker, kind, words
            with suppress(Died):  # ``ask`` raises it again.
                self._worker.send(Frame(kind=kind, words=words), seconds=seconds)

    def hold(self, terms: Terms) -> dict[str, Any]:
        """Put the kernel on other terms, also in later processes; return its new description.

        Raises:
            Died, RemoteError: if its process does not answer, or if asking raised there.
            UsageError: for terms that the kernel cannot be asked on.
        """
        self._terms = msgspec.to_builtins(terms)
        if self._worker is None:
            return self._start()
        answer = self._exchange("hold", self._terms, self.deadlines.load)
        if answer.kind == "usage":
            raise UsageError(str(answer.words.get("message")))
        if answer.kind != "described":
            raise remote_error(answer)
        return answer.words

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

    def count_case(self) -> None:
        """Count one more call; end the process after too many calls or too much growth."""
        self._cases += 1
        if self._worker is None:
            return
        # The process of a leaking kernel is ended before it takes the judge's memory.
        grown = self._worker.memory > self._memory_at_first + _MOST_GROWTH
        if self._cases >= _MOST_CASES or grown:
            self.end()

    def end(self) -> None:
        """Let the process end; the next question starts another."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end(self.deadlines.close)

    close = end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def kill(self) -> None:
        """Kill the process at once; the next question starts another."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill(self.deadlines.close)

    def _start(self) -> dict[str, Any]:
        import torch

        ahead, self._ahead = self._ahead, None
        self._worker = ahead or self._new_worker()
        self.started, self._cases, self.problems = self.started + 1, 0, {}
        try:
            self._exchange("start", {}, self.deadlines.start)
        except Died as error:  # No code of the kernel has run: the machine's fault, or ours.
            raise HostError(f"no process of its own can be had: {error}") from None
        # Torch is loaded and the kernel is not: growth from here on is due to the kernel.
        self._memory_at_first = self._worker.memory
        # As many threads as here, because sums on a CPU depend on their number.
        words = {**self._words, "threads": torch.get_num_threads()}
        if self._mods:
            try:
                load_mods(self._worker, self._mods, self.device, self.deadlines.load)
            except Died as error:
                named = " and ".join(map(repr, self._mods.values()))
                raise UsageError(f"{named}: as it was loaded, {error}") from None
        answer = self._exchange("load", words, self.deadlines.load)
        if answer.kind == "described" and self._terms is not None:
            answer = self._exchange("hold", self._terms, self.deadlines.load)
        if answer.kind == "described":
            return answer.words
        self.kill()
        message = str(answer.words.get("message"))
        if answer.words.get("kind") == "error":  # Reading the file itself raised.
            message = f"as it was read, it raised {message}"
            raise UsageError(f"kernel {self._words['kernel']!r}: {message}")
        raise (UsageError if answer.kind == "usage" else HostError)(message)

    def _exchange(
        self, kind: str, words: dict[str, Any], seconds: float, most: int = 0, data: bytes = b""
    ) -> Frame:
        assert self._worker is not None
        frame: Frame | None = Frame(kind=kind, words=words, data=data)
        sent, self._sent = self._sent, None
        try:
            if sent == (self._worker, kind, words):
                frame = None
            elif sent is not None and sent[0] is self._worker:  # Its answer was not received.
                try:
                    self._worker.exchange(None, seconds=seconds, most=_LARGEST, what="with outputs")
                except Died:  # It died of a question that is not asked now.
                    self._start()
            return self._worker.exchange(frame, seconds=seconds, most=most, what=_REQUESTS[kind])
        except BaseException:  # The process died, or an interrupt killed it.
            self._worker = None
            raise


def load_mods(worker: Worker, mods: Mapping[str, str], device: str, seconds: float) -> None:
    """Have a started process load mods, before this process does.

    Args:
        worker: The process; it is killed if the mods cannot be loaded.
        mods: The ``mask``, the ``score``, a ``recording``, or all mods of a ``file``.
        device: ``cpu`` or ``cuda``.
        seconds: Time limit.

    Raises:
        UsageError: if they cannot be loaded.
        Died: if the process dies of it.
    """
    frame = Frame(kind="mods", words={**mods, "device": device})
    answer = worker.exchange(frame, seconds=seconds, most=0, what=_REQUESTS["mods"])
    if answer.kind != "loaded":
        worker.kill(Deadlines().close)
        raise UsageError(str(answer.words.get("message")))


class RemoteSubject(Subject):
    """A stand-in for a kernel in another process, called through ``IsolatedExecutor``.

    Args:
        words: The process's description of the kernel.
        launch: Name and Problem of one of the kernel's launches; None for its usual launch.

    Raises:
        HostError: for an invalid description; any method raises it too if the process died.
    """

    compiles: bool

    def __init__(
        self,
        host: IsolatedKernel,
        words: dict[str, Any],
        launch: tuple[str, Problem] | None = None,
    ) -> None:
        self.host, self.executor = host, host.executor
        self.launch = None if launch is None else {"name": launch[0], "of": launch[1].to_json()}
        self._tilings: dict[tuple[str, str], Tiling | None] = {}
        self.terms: Terms | None = None  # its present terms
        self._describe(words)

    def hold(self, terms: Terms) -> None:
        """Put the kernel on other terms; raise as ``IsolatedKernel.hold``."""
        self.terms = terms
        self._tilings.clear()
        self._describe(self.host.hold(terms))

    def _describe(self, words: dict[str, Any]) -> None:
        description = read(Description, words)
        for name in msgspec.structs.asdict(description).keys() - {"promises", "has_launches"}:
            setattr(self, name, getattr(description, name))
        # Unknown promises are dropped: no check could use them.
        self.promises = frozenset(each for each in PROMISES if each in description.promises)
        self._has_launches = description.has_launches

    @property
    def has_launches(self) -> bool:
        """Whether the kernel's class overrides ``launches``."""
        return self._has_launches

    def absent(self, device: str) -> str | None:
        """Return why the kernel can run nothing on ``device``; None if it can."""
        return _text(self.ask("absent", None, device))

    def concerns(self, problem: Problem) -> bool:
        """Return whether ``problem`` is a question for the kernel at all."""
        return bool(self.ask("concerns", problem, self.host.device))

    def unsupported(self, problem: Problem, device: str) -> str | None:
        """Return why the kernel does not take ``problem``; None if it does."""
        return _text(self.ask("unsupported", problem, device))

    def prepare(self, inputs: Inputs) -> Call:
        """Raise HostError: only ``IsolatedExecutor`` can call the kernel."""
        del inputs
        raise HostError(f"kernel {self.name!r} is in another process: call it by its executor.")

    def tiling(self, problem: Problem, device: str) -> Tiling | None:
        """Return the tiling that the kernel declares; None if it declares none."""
        key = problem.id, device
        if key not in self._tilings:
            words = self.ask("tiling", problem, device)
            tiling = None if words is None else read(Tiling, words)
            self.remember_tiling(problem, device, tiling)
        return self._tilings[key]

    def remember_tiling(self, problem: Problem, device: str, tiling: Tiling | None) -> None:
        """Cache the tiling that the kernel declares for a Problem."""
        if len(self._tilings) >= _MOST_TILINGS:
            self._tilings.clear()
        self._tilings[problem.id, device] = tiling

    def written_call(self, problem: Problem) -> WrittenCall | None:
        """Return the call of the kernel as source text; None if it has none."""
        words = self.ask("written_call", problem, self.host.device)
        return None if words is None else read(WrittenCall, words)

    def launches(self, problem: Problem, device: str) -> Mapping[str, Subject]:
        """Return the kernel's other launches by name, all in its process."""
        descriptions = self.ask("launches", problem, device)
        if not isinstance(descriptions, dict):
            raise HostError("what came are no launches.")
        return {
            name: RemoteSubject(self.host, words, (name, problem))
            for name, words in descriptions.items()
        }

    def arithmetic(self, problem: Problem, device: str) -> Arithmetic:
        """Return the arithmetic that the kernel declares."""
        return read(Arithmetic, self.ask("arithmetic", problem, device))

    def ask(self, what: str, problem: Problem | None, device: str) -> Any:
        """Return the kernel's answer to the question ``what``.

        Raises:
            Died: if its process did not answer.
            RemoteError: if asking raised there.
        """
        words = {
            "what": what,
            "problem": None if problem is None else problem.to_json(),
            "device": device,
            "launch": self.launch,
        }
        seconds = self.host.deadlines.call
        return self.host.ask("ask", words, seconds=seconds, answered="answer").words["value"]


class IsolatedExecutor:
    """An ``executor.Executor`` that calls a ``RemoteSubject`` in its process."""

    def __init__(self, host: IsolatedKernel) -> None:
        self._host = host
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
        answer = self._ask(subject, "wanted", problem, self._host.device)
        return answer if isinstance(answer, bool) else True

    def refusal(self, subject: Subject, problem: Problem, device: str) -> Failure | None:
        """Return why ``subject`` does not take ``problem``, or why asking fails."""
        # A death in the last question is reported now: a new process would know nothing of it.
        answer = self._unreported or self._ask(subject, "refusal", problem, device)
        self._unreported = None
        return answer if isinstance(answer, Failure) else None

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
        under: CallConditions = PLAIN_CALL,
    ) -> Execution | Failure:
        """Run ``subject`` on ``inputs``, which its process draws again from ``origin``.

        Without an origin the tensors are sent, each contiguous. Raise HostError if no process can
        be started.
        """
        words = run_words(origin, under, launch=_remote(subject).launch)
        new = self._host.new
        calls = under.calls + under.window + under.timed
        result = self._run(subject, inputs, dict(words), calls=calls)
        if isinstance(result, Failure):
            is_final = result.kind in _FATAL  # The next question starts a new process.
        else:
            is_final = not (result.notes.wrong or result.notes.remark)
        if is_final or new or not under.state:
            return result
        # An earlier call's lasting change may be the cause: run it again in a new process.
        self._host.end()
        return self._run(subject, inputs, words, calls=calls)

    def keep(self, subject: Subject, inputs: Inputs, *, graph: bool) -> Execution | Failure:
        """Run without an origin, and keep the call; its process is not replaced while it does."""
        words = run_words(None, PLAIN_CALL, launch=_remote(subject).launch)
        words |= {"kept": True, "graph": graph}
        return self._run(subject, inputs, words, calls=2)

    def time(self, problem: Problem) -> Turn | Failure:
        """Time one more call of the kept call for ``problem``, by its process's clock."""
        words, limit = {"problem": problem.to_json()}, self._host.deadlines.call
        try:
            answer = self._host.ask("time", words, seconds=limit, answered="timed")
        except (Died, RemoteError) as error:
            return _failure(error)
        try:
            turn = read(Turn, answer.words)
            if turn.seconds > 0:
                return turn
        except HostError:
            self._host.kill()
        return Failure(kind="crash", message="what its process sent is no time")

    def forget(self) -> None:
        """Have its process drop kept calls; a process that died has none."""
        if self._host.pid is not None:
            with suppress(Died):
                self._host.ask("forget", {}, seconds=self._host.deadlines.call)

    def _run(
        self, subject: Subject, inputs: Inputs, words: dict[str, Any], *, calls: int
    ) -> Execution | Failure:
        data = b""
        if "case" not in words:
            words["inputs"], data = pack_inputs(inputs)
        self._host.problems[inputs.problem] = None
        seconds, limit = self._seconds(subject, inputs, calls=calls)
        try:
            most = output_bytes(inputs)
            answer = self._host.ask("run", words, seconds=seconds, most=most, data=data)
        except Died as error:
            return _failure(error, f" ({limit})" if limit and error.kind == "timeout" else "")
        try:
            result = self._check_answer(answer, inputs)
        except HostError as error:
            # The position in its stream is unknown: the next question needs a new process.
            self._host.kill()
            return Failure(kind="crash", message=f"what its process sent is no answer: {error}")
        # A process that lost its GPU or memory would fail the next question too.
        if isinstance(result, Failure) and result.kind in _FATAL:
            self._host.kill()
        if "kept" not in words:  # A process that keeps calls must not be replaced.
            self._host.count_case()
        if isinstance(result, Execution):
            self.compiling += result.compiling
            # The tiling came with the outputs; asking for it later would take a round trip.
            device = self._host.device
            _remote(subject).remember_tiling(inputs.problem, device, result.tiling)
        self._call_next()
        return result

    def _call_next(self) -> None:
        """Send the call of the expected case, if the kernel takes it."""
        expected, self._next = self._next, None
        self._answers.clear()
        if expected is None or self._host.new:
            return
        subject, case = expected
        device = self._host.device
        # The answers are cached, because the question on the case asks them again.
        for what in ("wanted", "refusal"):
            answer = self._ask(subject, what, case.problem, device)
            if self._host.pid is None:  # It died: the question starts a new process.
                return
            self._answers[self._host.pid, subject, what, case.problem] = answer
            if answer not in (True, None):
                return
        self._host.problems[case.problem] = None
        launch = _remote(subject).launch
        words = run_words(Origin(case=case), judged_conditions(case), launch=launch)
        self._host.send("run", words, seconds=self._host.deadlines.call)

    def _seconds(self, subject: Subject, inputs: Inputs, calls: int) -> tuple[float, str]:
        """Return ``Deadlines.of_run``, given what the process has compiled already."""
        if self._host.new:  # A new process has compiled nothing.
            self._compiled.clear()
        # Compiled code depends on shapes and mods, not on the numbers.
        structure = inputs.problem.replace(seed=0, distribution="normal").id
        unseen = structure not in self._compiled
        self._compiled.add(structure)
        return self._host.deadlines.of_run(
            min(calls, _MOST_CALLS),
            self._host.device,
            new=self._host.new,
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
        if (key := (self._host.pid, subject, what, problem)) in self._answers:
            return self._answers[key]
        try:
            return _remote(subject).ask(what, problem, device)
        except (Died, RemoteError) as error:
            failure = _failure(error)
        self._unreported = failure if failure.kind in _FATAL else None
        return failure


def _failure(error: Died | RemoteError, more: str = "") -> Failure:
    return Failure(kind=error.kind, message=f"{error}{more}", trace=error.trace)


def _remote(subject: Subject) -> RemoteSubject:
    if not isinstance(subject, RemoteSubject):
        raise HostError(f"kernel {subject.name!r} is in this process: call it here.")
    return subject


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
