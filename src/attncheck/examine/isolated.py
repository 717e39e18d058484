"""Calls a kernel in a process of its own: it may crash, hang and scribble there.

This process never imports the kernel. It sends a Case; the other one draws the inputs anew, calls
the kernel, and sends bytes, of which shapes and dtypes are looked at again here. Inputs have the
same SHA-256 in both before a call, and in the other one after it.

This is no sandbox. It holds against faults, and against code that puts its own functions in the
place of torch's. Code that means to deceive runs as the same user: it can look for the key in its
own memory and answer in its process's name, give back a digest that it computed beforehand, or
attach to this process. Nothing here says of such a kernel that it is right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from attncheck.errors import UsageError
from attncheck.examine.circumstances import PLAIN, Circumstances, Noted
from attncheck.examine.connection import Connection, Deadlines, Died, HostError
from attncheck.examine.executor import Execution, Failure, Origin
from attncheck.examine.obligations import bytes_owed, digest, misdeclared, unowed
from attncheck.examine.packed import unpacked
from attncheck.examine.remote import Raised, Remote, arithmetic_of, failed, tiling_of
from attncheck.examine.spelled import read, spelled

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from attncheck.examine.frames import Frame
    from attncheck.inputs import Inputs
    from attncheck.problem import Problem
    from attncheck.subjects.contract import Subject

__all__ = ["Deadlines", "Died", "Host", "HostError", "Isolated"]

_MOST_CALLS = 10  # that a question which makes more has time for: most are not as long as allowed
_FATAL = {"crash", "timeout", "oom"}  # whatever a process says then, the next question has another


class Isolated:
    """Calls a ``Remote`` where it is; an ``executor.Executor``.

    Args:
        connection: To the kernel's process.

    Attributes:
        compiling: Seconds of all calls so far that compilers took.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._compiled: set[str] = set()
        self.compiling = 0.0

    def absence(self, subject: Subject, device: str) -> str | None:
        """Why ``subject`` can run nothing there; what asking does to it, ``refusal`` tells."""
        found = self._asked(subject, "absence", None, device)
        return found if isinstance(found, str) else None

    def concerns(self, subject: Subject, problem: Problem) -> bool:
        """Whether to ask ``subject``; also where its process cannot say so."""
        found = self._asked(subject, "wanted", problem, self._connection.device)
        return found if isinstance(found, bool) else True

    def refusal(self, subject: Subject, problem: Problem, device: str) -> str | Failure | None:
        """Why ``subject`` does not take ``problem``; a Failure where even asking fails."""
        found = self._asked(subject, "refusal", problem, device)
        return found if isinstance(found, str | Failure) else None

    def launches(
        self, subject: Subject, problem: Problem, device: str
    ) -> Mapping[str, Subject] | Failure:
        """Its other launches; a Failure where even asking fails."""
        try:
            return subject.launches(problem, device)
        except (Died, Raised) as error:
            return Failure(kind=error.kind, message=str(error), trace=error.trace)

    def run(
        self,
        subject: Subject,
        inputs: Inputs,
        *,
        origin: Origin | None = None,
        timed: bool = False,
        under: Circumstances = PLAIN,
    ) -> Execution | Failure:
        """``subject`` on inputs that its process draws from ``origin``, and that are ``inputs``.

        Raises:
            HostError: without an origin, or where no process can be had.
        """
        if origin is None:
            raise HostError("inputs without a Case cannot be drawn in another process.")
        if under.state and not self._connection.new:
            self._connection.end()  # what earlier calls changed there, nobody can surely put right
        words = {
            "case": origin.case.to_json(),
            "run": origin.run,
            "under": spelled(under),
            "timed": timed,
            "launch": _remote(subject).launch,
        }
        seconds = self._seconds(inputs, calls=under.calls + under.window + timed)
        try:
            answer = self._connection.ask("run", words, seconds=seconds, most=bytes_owed(inputs))
        except Died as error:
            return Failure(kind=error.kind, message=str(error), trace=error.trace)
        try:
            found = self._received(answer, inputs)
        except HostError as error:
            self._connection.kill()
            return Failure(kind="crash", message=f"what its process sent is no answer: {error}")
        if isinstance(found, Failure) and found.kind in _FATAL:
            self._connection.kill()
        self._connection.count_case()
        if isinstance(found, Execution):
            self.compiling += found.compiling
            _remote(subject).learn(inputs.problem, inputs.device.type, found.tiling)
        return found

    def _seconds(self, inputs: Inputs, calls: int) -> float:
        """Until a question is given up: longer where it has to be compiled first."""
        if self._connection.new:  # what was compiled is gone with the process that did
            self._compiled.clear()
        structure = inputs.problem.replace(seed=0, distribution="normal").id
        unseen = structure not in self._compiled and inputs.device.type == "cuda"
        self._compiled.add(structure)
        deadlines = self._connection.deadlines
        found = deadlines.call * min(calls, _MOST_CALLS)
        found += deadlines.imports if self._connection.new else 0.0
        return max(deadlines.compile, found) if unseen else found

    def _received(self, answer: Frame, inputs: Inputs) -> Execution | Failure:
        """What came, looked at; raises HostError for what is no answer."""
        if answer.kind != "ran":
            said = failed(answer)
            return Failure(kind=said.kind, message=str(said), trace=said.trace)
        words, mine = answer.words, digest(inputs)
        if words.get("drawn") != mine:
            return Failure(kind="contract", message="in its process the Case has other inputs.")
        if words.get("left") != mine:
            return Failure(kind="mutation", message="wrote to its inputs.")
        outputs = unpacked(words.get("outputs"), answer.data, inputs.device)
        arithmetic = arithmetic_of(words.get("arithmetic"))
        unlike = unowed(outputs, inputs) or misdeclared(arithmetic, inputs)
        if unlike:
            return Failure(kind="contract", message=unlike)
        return Execution(
            outputs=outputs,
            seconds=_number(words.get("seconds")),
            tiling=tiling_of(words.get("tiling")),
            arithmetic=arithmetic,
            noted=_noted(words.get("noted")),
            left=mine,
            compiling=_number(words.get("compiling")) or 0.0,
        )

    def _asked(self, subject: Subject, what: str, problem: Problem | None, device: str) -> Any:
        try:
            return _remote(subject).asked(what, problem, device)
        except (Died, Raised) as error:
            return Failure(kind=error.kind, message=str(error), trace=error.trace)


class Host:
    """One kernel in one process of its own; a context manager.

    Args:
        kernel: As ``subjects.load.load`` takes it.
        convention: A name of a calling convention; empty for the first that fits.
        device: ``cpu`` or ``cuda``.
        gpu: What the process sees of the GPUs (``CUDA_VISIBLE_DEVICES``); empty for what this one
            sees.
        deadlines: How long it may take.
        folder: Its working directory; empty for this one's.
        paths: Where it and what it starts look for modules first, before this process's places.

    Attributes:
        subject: The kernel, for every function here that takes one.
        executor: How those call it.

    Raises:
        UsageError: where there is no such kernel.
        HostError: where it cannot be loaded for another reason: ``Died`` where its process crashed.
    """

    def __init__(
        self,
        kernel: str,
        *,
        convention: str = "",
        device: str = "cpu",
        gpu: str = "",
        deadlines: Deadlines | None = None,
        folder: str = "",
        paths: tuple[str, ...] = (),
    ) -> None:
        self._connection = Connection(
            kernel,
            convention=convention,
            device=device,
            gpu=gpu,
            deadlines=deadlines or Deadlines(),
            folder=folder,
            paths=paths,
        )
        self.subject = Remote(self._connection, self._connection.described)
        self.executor = Isolated(self._connection)

    @property
    def started(self) -> int:
        """Processes so far."""
        return self._connection.started

    @property
    def pid(self) -> int | None:
        """The number of the process; None while there is none."""
        return self._connection.pid

    def files(self) -> tuple[str, ...]:
        """Of which files its process has modules, but for Python's own and installed ones.

        Raises:
            HostError: when it does not say so.
        """
        found = self.subject.asked("files", None, self._connection.device)
        return tuple(map(str, found)) if isinstance(found, list) else ()

    def fresh(self) -> None:
        """Let the process end: whatever is asked next is asked of a new one."""
        self._connection.end()

    def close(self) -> None:
        """Let the process end, and kill all that it started."""
        self._connection.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _remote(subject: Subject) -> Remote:
    if not isinstance(subject, Remote):
        raise HostError(f"kernel {subject.name!r} is in this process: call it here.")
    return subject


def _number(value: Any) -> float | None:
    if value is not None and type(value) not in {int, float}:
        raise HostError("a time that is no number.")
    return None if value is None else float(value)


def _noted(words: Any) -> Noted:
    try:
        return read(Noted, words)
    except UsageError as error:
        raise HostError(str(error)) from None
