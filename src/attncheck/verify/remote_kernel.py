"""A kernel in a process of its own; a new process takes the place of one that died."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import msgspec

from attncheck.core.declared_arithmetic import Arithmetic
from attncheck.core.errors import HostError, UsageError
from attncheck.inputs.problem import PROMISES
from attncheck.subjects.capabilities.subject import Call, Subject, Tiling, WrittenCall
from attncheck.verify.kernel_messages import Description, read, remote_error
from attncheck.workers.process import KERNEL_SERVER, Died, Worker
from attncheck.workers.transport import Frame

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Problem
    from attncheck.subjects.terms import Terms
    from attncheck.verify.executor import KeepingExecutor

_MOST_CASES = 500  # then a process is replaced: what a kernel leaves behind adds up
_MOST_GROWTH = 4 << 30  # bytes of memory that a process may hold beyond what it held at first
_MOST_TILINGS = 256  # that are remembered
_LEAST_TO_LOAD = 4.0  # seconds: a file may import other packages, whatever a call may take
_LARGEST = 1 << 40  # bytes of an answer that nobody waits for
_REQUESTS = {
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
    """Seconds that a kernel's process may take."""

    start: float = 120.0  # to start Python and import torch, before anything of the kernel's runs
    load: float = 120.0  # to import the kernel, or mods
    call: float = 60.0  # to answer one question: to draw the inputs and call the kernel
    # So many more the first time in a process: torch imports half of itself then.
    imports: float = 30.0
    compile: float = 180.0  # to do the same for the first time with these shapes and mods on a GPU
    close: float = 5.0  # to end by itself
    typed: bool = False  # by somebody, who means it

    @classmethod
    def of(cls, seconds: float | None) -> Self:
        """Return those of calls that may take so long; the usual ones where nobody says."""
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
        """Return the seconds after which a run is given up, and which limit that is where two are.

        On a GPU a first call may compile. Who typed a limit means that too, unless the kernel is
        known to compile: then the first call of these shapes has the usual time.

        Args:
            calls: How many the run makes.
            device: ``cpu`` or ``cuda``.
            new: Whether nothing was asked in this process before.
            unseen: Whether shapes and mods are new to it.
            compiles: Whether the kernel is known to compile, or was seen to.
        """
        seconds = self.call * calls + (self.imports if new else 0.0)
        if device != "cuda" or not unseen:
            return seconds, ""
        if compiles or not self.typed:
            seconds = max(self.compile, seconds)
            return seconds, "the limit of a first call, which compiles"
        return seconds, "of a kernel that compiles at its first call type a longer --timeout"


class KernelConnection:
    """Requests to one kernel in a process of its own.

    Args:
        kernel: As ``subjects.load.load_subject`` takes it.
        convention: A name of a calling convention; empty for the first that fits.
        gpu: What the process sees of the GPUs (``CUDA_VISIBLE_DEVICES``); empty for what this one
            sees.
        deadlines: How long it may take.
        folder: Its working directory, which references to files are relative to; empty for this
            one's.
        paths: Where it and what it starts look for modules first, before this process's places.
        worker: The first process, where one was started ahead of time, here and with nothing
            special; where it echoes, those after it do.
        mods: The ``mask`` and the ``score`` of a file that Problems will name, ``FILE.py::NAME``,
            and the file of a ``recording``.

    Attributes:
        description: What the process says of the kernel.
        problems: Problems that the process has been asked, the first ones first.
        started: Processes so far.

    Raises:
        UsageError: where there is no such kernel.
        HostError: where it cannot be loaded for another reason: ``Died`` where its process crashed.
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
        self._environment = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
        self._folder, self._paths = folder, paths
        self._worker: Worker | None = None
        self._terms: dict[str, Any] | None = None
        self._ahead, self._echo = worker, worker is not None and worker.echoes
        self._sent: tuple[Worker, str, dict[str, Any]] | None = None
        self.started, self._cases, self._memory_at_first = 0, 0, 0
        self.problems: dict[Problem, None] = {}
        self.description = self._start()

    @property
    def pid(self) -> int | None:
        """The number of the process; None while there is none."""
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
            seconds: Until it is killed.
            most: Bytes beside JSON that an answer may have.
            data: Those of the question.
            answered: The kind of the answer that is wanted; empty for any.

        Raises:
            Died: when there is none. The next question starts another process.
            RemoteError: for an answer of another kind: asking raised there.
            HostError: when no process can be had, of which the kernel knows nothing.
        """
        if self._worker is None:
            try:
                self._start()
            except UsageError as error:
                # It was loaded before: what has changed is the kernel, not what the user typed.
                raise Died("crash", f"loaded once more it said: {error}") from None
        answer = self._exchange(kind, words, seconds, most, data)
        if answered and answer.kind != answered:
            raise remote_error(answer)
        return answer

    def send(self, kind: str, words: dict[str, Any], *, seconds: float) -> None:
        """Send a question of which ``ask`` receives the answer, where it is the next."""
        if self._worker is not None:
            self._sent = self._worker, kind, words
            with suppress(Died):  # which asking raises again
                self._worker.send(Frame(kind=kind, words=words), seconds=seconds)

    def hold(self, terms: Terms) -> dict[str, Any]:
        """Ask the kernel on other terms from now on, also in later processes; it says what it is.

        Raises:
            Died, RemoteError: when its process does not answer, or asking raised there.
            UsageError: for terms on which it cannot be asked.
        """
        self._terms = msgspec.to_builtins(terms)
        if self._worker is None:
            self.description = self._start()
            return self.description
        answer = self._exchange("hold", self._terms, self.deadlines.load)
        if answer.kind == "usage":
            raise UsageError(str(answer.words.get("message")))
        if answer.kind != "described":
            raise remote_error(answer)
        self.description = answer.words
        return self.description

    def count_case(self) -> None:
        """Count one more call; a process that has done enough is let go."""
        self._cases += 1
        if self._worker is None:
            return
        # A kernel that leaks is let go before it takes the memory of the judge.
        grown = self._worker.memory > self._memory_at_first + _MOST_GROWTH
        if self._cases >= _MOST_CASES or grown:
            self.end()

    def end(self) -> None:
        """Let the process end; the next question starts another."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end(self.deadlines.close)

    close = end

    def kill(self) -> None:
        """The same, at once."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill(self.deadlines.close)

    def _start(self) -> dict[str, Any]:
        import torch

        ahead, self._ahead = self._ahead, None
        self._worker = ahead or Worker(
            KERNEL_SERVER,
            environment=self._environment,
            folder=self._folder,
            paths=self._paths,
            echo=self._echo,
        )
        self.started, self._cases, self.problems = self.started + 1, 0, {}
        try:
            self._exchange("start", {}, self.deadlines.start)
        except Died as error:  # before anything of the kernel's runs: the machine's fault, or ours
            raise HostError(f"no process of its own can be had: {error}") from None
        # With torch, and with nothing of the kernel's yet: the rest is what the kernel holds.
        self._memory_at_first = self._worker.memory
        # As many threads as here, because sums on a CPU depend on how many share them.
        words = {**self._words, "threads": torch.get_num_threads()}
        answer = Frame(kind="described", words={})
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
        if answer.words.get("kind") == "error":  # not even its names can be read
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
            elif sent is not None and sent[0] is self._worker:  # nobody has waited for it
                try:
                    self._worker.exchange(None, seconds=seconds, most=_LARGEST, what="with outputs")
                except Died:  # of what it was not asked
                    self._start()
            return self._worker.exchange(frame, seconds=seconds, most=most, what=_REQUESTS[kind])
        except BaseException:  # it died, or we were interrupted: it is killed
            self._worker = None
            raise


def load_mods(worker: Worker, mods: Mapping[str, str], device: str, seconds: float) -> None:
    """Have a process that has started load mods, before this one does.

    Args:
        worker: The process; it ends where they cannot be loaded.
        mods: The ``mask``, the ``score``, a ``recording``, or all of a ``file``.
        device: ``cpu`` or ``cuda``.
        seconds: That it may take.

    Raises:
        UsageError: where they cannot be.
        Died: when the process dies of it.
    """
    frame = Frame(kind="mods", words={**mods, "device": device})
    answer = worker.exchange(frame, seconds=seconds, most=0, what=_REQUESTS["mods"])
    if answer.kind != "loaded":
        worker.kill(Deadlines().close)
        raise UsageError(str(answer.words.get("message")))


class RemoteSubject(Subject):
    """A kernel in another process: it says what that one says; ``IsolatedExecutor`` calls it.

    Args:
        words: What the process says of it.
        launch: The name of one of its launches, and the Problem that it is of; None for its own.

    Raises:
        HostError: for a description that is none; and asked anything, when its process died.
    """

    compiles: bool

    def __init__(
        self,
        connection: KernelConnection,
        words: dict[str, Any],
        executor: KeepingExecutor,
        launch: tuple[str, Problem] | None = None,
    ) -> None:
        self.connection, self.executor = connection, executor
        self.launch = None if launch is None else {"name": launch[0], "of": launch[1].to_json()}
        self._tilings: dict[tuple[str, str], Tiling | None] = {}
        self.terms: Terms | None = None  # on which it was asked last
        self._describe(words)

    def hold(self, terms: Terms) -> None:
        """Ask it on other terms from now on; raises as ``KernelConnection.hold``."""
        self.terms = terms
        self._tilings.clear()
        self._describe(self.connection.hold(terms))

    def _describe(self, words: dict[str, Any]) -> None:
        description = read(Description, words)
        for name in msgspec.structs.asdict(description).keys() - {"promises", "has_launches"}:
            setattr(self, name, getattr(description, name))
        # A word that is no promise of ours is dropped: no check could rest on it.
        self.promises = frozenset(each for each in PROMISES if each in description.promises)
        self._has_launches = description.has_launches

    @property
    def has_launches(self) -> bool:
        """As the kernel says."""
        return self._has_launches

    def fresh(self) -> None:
        """Let its process end: whatever is asked next is asked of a new one."""
        self.connection.end()

    def absent(self, device: str) -> str | None:
        """As the kernel says."""
        return _text(self.ask("absent", None, device))

    def concerns(self, problem: Problem) -> bool:
        """As the kernel says."""
        return bool(self.ask("concerns", problem, self.connection.device))

    def unsupported(self, problem: Problem, device: str) -> str | None:
        """As the kernel says."""
        return _text(self.ask("unsupported", problem, device))

    def prepare(self, inputs: Inputs) -> Call:
        """Nothing: raises HostError. ``IsolatedExecutor`` calls it where it is."""
        del inputs
        raise HostError(f"kernel {self.name!r} is in another process: call it by its executor.")

    def tiling(self, problem: Problem, device: str) -> Tiling | None:
        """As the kernel says."""
        key = problem.id, device
        if key not in self._tilings:
            words = self.ask("tiling", problem, device)
            tiling = None if words is None else read(Tiling, words)
            self.remember_tiling(problem, device, tiling)
        return self._tilings[key]

    def remember_tiling(self, problem: Problem, device: str, tiling: Tiling | None) -> None:
        """Remember what the kernel said of its tiling."""
        if len(self._tilings) >= _MOST_TILINGS:
            self._tilings.clear()
        self._tilings[problem.id, device] = tiling

    def written_call(self, problem: Problem) -> WrittenCall | None:
        """As the kernel says."""
        words = self.ask("written_call", problem, self.connection.device)
        return None if words is None else read(WrittenCall, words)

    def launches(self, problem: Problem, device: str) -> Mapping[str, Subject]:
        """As the kernel says, each in the same process."""
        descriptions = self.ask("launches", problem, device)
        if not isinstance(descriptions, dict):
            raise HostError("what came are no launches.")
        return {
            name: RemoteSubject(self.connection, words, self.executor, (name, problem))
            for name, words in descriptions.items()
        }

    def arithmetic(self, problem: Problem, device: str) -> Arithmetic:
        """As the kernel says."""
        return read(Arithmetic, self.ask("arithmetic", problem, device))

    def ask(self, what: str, problem: Problem | None, device: str) -> Any:
        """Return what the kernel answers when it is asked ``what``.

        Raises:
            Died: when its process did not answer.
            Raised: when asking raised there.
        """
        words = {
            "what": what,
            "problem": None if problem is None else problem.to_json(),
            "device": device,
            "launch": self.launch,
        }
        seconds = self.connection.deadlines.call
        return self.connection.ask("ask", words, seconds=seconds, answered="answer").words["value"]


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
