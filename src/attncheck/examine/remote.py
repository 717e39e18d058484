"""The Subject that stands for a kernel in another process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncheck.errors import UsageError
from attncheck.examine.connection import HostError
from attncheck.examine.spelled import read
from attncheck.judge.arithmetic import Arithmetic
from attncheck.question import PROMISES
from attncheck.subjects.contract import Subject, Tiling

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attncheck.examine.connection import Connection
    from attncheck.examine.frames import Frame
    from attncheck.inputs import Inputs
    from attncheck.problem import Problem
    from attncheck.subjects.contract import Call

__all__ = ["Raised", "Remote", "described"]

_FLAGS = ("triton", "sinks", "backward", "captured", "promises_gradients")
_KNOWN = 256  # tilings that are remembered


class Raised(HostError):
    """What a kernel raised when it was asked something in its process.

    Attributes:
        kind: As of ``executor.Failure``.
        trace: The traceback there.
    """

    def __init__(self, kind: str, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.kind, self.trace = kind, trace


class Remote(Subject):
    """A kernel in another process: says what that one says of it, and is called by ``Isolated``.

    Args:
        connection: To its process.
        words: What the process says of it.
        launch: The name of one of its launches, and the Problem that it is of; None for its own.

    Raises:
        HostError: for a description that is none; and asked anything, when its process died.
    """

    def __init__(
        self,
        connection: Connection,
        words: dict[str, Any],
        launch: tuple[str, Problem] | None = None,
    ) -> None:
        self.connection = connection
        self.launch = None if launch is None else {"name": launch[0], "of": launch[1].to_json()}
        self._tilings: dict[tuple[str, str], Tiling | None] = {}
        said = _checked(words)
        self.name, self.summary = said["name"], said["summary"]
        self.promises = frozenset(each for each in PROMISES if each in said["promises"])
        self.triton, self.sinks, self.backward = said["triton"], said["sinks"], said["backward"]
        self.captured = said["captured"]
        self.promises_gradients = said["promises_gradients"]

    def absent(self, device: str) -> str | None:
        """As the kernel says."""
        return _reason(self.asked("absent", None, device))

    def concerns(self, problem: Problem) -> bool:
        """As the kernel says."""
        return bool(self.asked("concerns", problem, self.connection.device))

    def unsupported(self, problem: Problem, device: str) -> str | None:
        """As the kernel says."""
        return _reason(self.asked("unsupported", problem, device))

    def prepare(self, inputs: Inputs) -> Call:
        """Nothing: raises HostError. ``Isolated`` calls it where it is."""
        del inputs
        raise HostError(f"kernel {self.name!r} is in another process: call it by its executor.")

    def tiling(self, problem: Problem, device: str) -> Tiling | None:
        """As the kernel says."""
        asked = problem.id, device
        if asked not in self._tilings:
            self.learn(problem, device, tiling_of(self.asked("tiling", problem, device)))
        return self._tilings[asked]

    def learn(self, problem: Problem, device: str, tiling: Tiling | None) -> None:
        """Remember what the kernel said of its tiling."""
        if len(self._tilings) >= _KNOWN:
            self._tilings.clear()
        self._tilings[problem.id, device] = tiling

    def launches(self, problem: Problem, device: str) -> Mapping[str, Subject]:
        """As the kernel says, each in the same process."""
        found = self.asked("launches", problem, device)
        if not isinstance(found, dict):
            raise HostError("what came are no launches.")
        return {
            name: Remote(self.connection, words, (name, problem)) for name, words in found.items()
        }

    def arithmetic(self, problem: Problem, device: str) -> Arithmetic:
        """As the kernel says."""
        return arithmetic_of(self.asked("arithmetic", problem, device))

    def asked(self, what: str, problem: Problem | None, device: str) -> Any:
        """What the kernel answers when it is asked ``what``.

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
        answer = self.connection.ask("ask", words, seconds=self.connection.deadlines.call)
        if answer.kind != "answer":
            raise failed(answer)
        return answer.words.get("value")


def described(subject: Subject) -> dict[str, Any]:
    """What a kernel's process says of it."""
    flags = {name: bool(getattr(subject, name)) for name in _FLAGS}
    promises = sorted(str(promise) for promise in subject.promises)
    return {"name": subject.name, "summary": subject.summary, "promises": promises, **flags}


def failed(answer: Frame) -> Raised:
    """An answer that is none."""
    words = {name: str(answer.words.get(name, "")) for name in ("kind", "message", "trace")}
    return Raised(words["kind"], words["message"], words["trace"])


def tiling_of(words: Any) -> Tiling | None:
    """The tiling that came; raises HostError for what is none."""
    return None if words is None else _read(Tiling, words)


def arithmetic_of(words: Any) -> Arithmetic:
    """The arithmetic that came; raises HostError for what is none."""
    found: Arithmetic = _read(Arithmetic, words)
    return found


def _read(kind: Any, words: Any) -> Any:
    try:
        return read(kind, words)
    except UsageError as error:
        raise HostError(str(error)) from None


def _reason(value: Any) -> str | None:
    return None if value is None else str(value)


def _checked(words: Any) -> dict[str, Any]:
    names = {"name": str, "summary": str, "promises": list, **dict.fromkeys(_FLAGS, bool)}
    if not isinstance(words, dict) or set(words) != set(names):
        raise HostError("what came is no description of a kernel.")
    if any(type(words[name]) is not kind for name, kind in names.items()):
        raise HostError("what came is no description of a kernel.")
    return words
