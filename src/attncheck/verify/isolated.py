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

import dataclasses
import functools
import math
import types
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

import torch
from msgspec.structs import replace

from attncheck.capabilities.subject import Subject, Tiling
from attncheck.core.errors import UsageError
from attncheck.core.formats import FORMATS, Format
from attncheck.core.outputs import AXES, Outputs
from attncheck.inputs.question_parameters import PROMISES
from attncheck.judge.declared_arithmetic import Arithmetic
from attncheck.records.record import FAILED_STATUSES
from attncheck.verify.call_conditions import PLAIN_CALL, CallConditions, CallNotes
from attncheck.verify.executor import Execution, Failure, Origin
from attncheck.verify.obligations import arithmetic_error, inputs_digest, output_bytes, output_error
from attncheck.workers.process import Connection, Deadlines, Died, HostError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

    from attncheck.capabilities.subject import Call
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Problem
    from attncheck.records.record import Record, Status
    from attncheck.workers.transport import Frame

__all__ = [
    "Deadlines",
    "Died",
    "HostError",
    "IsolatedExecutor",
    "IsolatedKernel",
    "RemoteError",
    "RemoteSubject",
    "confirm_death",
    "described",
    "from_fields",
    "pack_outputs",
    "to_fields",
    "unpack_outputs",
]


_Dataclass = TypeVar("_Dataclass")


def to_fields(value: Any) -> Any:
    """A dataclass as a JSON object, formats by their names.

    Raises:
        UsageError: for what JSON cannot say, and for a format that is none of attncheck's.
    """
    if isinstance(value, Format):
        if FORMATS.get(value.name) != value:
            raise UsageError(f"{value.name!r} is no format of attncheck's.")
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_fields(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if value is not None and type(value) not in {bool, int, float, str}:
        raise UsageError(f"{type(value).__name__} is no number, word or flag.")
    return value


def from_fields(kind: type[_Dataclass], words: Any) -> _Dataclass:
    """What ``spelled`` wrote of a dataclass of this kind.

    Raises:
        UsageError: for anything else: a field too many or too few, or of another type.
    """
    assert dataclasses.is_dataclass(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    if not isinstance(words, dict) or sorted(words) != sorted(names):
        raise UsageError(f"what came is no {kind.__name__}.")
    types_of = _types(kind)
    try:
        found = kind(**{name: _value(types_of[name], words[name], name) for name in names})
    except (TypeError, ValueError) as error:
        raise UsageError(f"what came is no {kind.__name__}: {error}") from None
    return found


@functools.cache
def _types(kind: type) -> dict[str, Any]:
    """The types of its fields; to look them up takes longer than to read it."""
    return get_type_hints(kind)


def _value(kind: Any, value: Any, name: str) -> Any:
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
    elif get_origin(kind) is types.UnionType:
        if value is None and type(None) in get_args(kind):
            return None
        (kind,) = (each for each in get_args(kind) if each is not type(None))
        return _value(kind, value, name)
    elif kind is Format:
        if isinstance(value, str) and value in FORMATS:
            return FORMATS[value]
    elif dataclasses.is_dataclass(kind):
        return from_fields(kind, value)  # type: ignore[arg-type]  # it is a class
    elif type(value) is kind or (kind is float and type(value) is int):
        return value
    raise UsageError(f"{name} is of no type that it may be of.")


_DTYPES = {str(fmt.torch_dtype): fmt.torch_dtype for fmt in FORMATS.values()}


def pack_outputs(outputs: Outputs) -> tuple[list[list[Any]], bytes]:
    """``[name, dtype, shape]`` of each tensor, and the bits of all, row-major."""
    about: list[list[Any]] = []
    parts = []
    for name, tensor in outputs.tensors().items():
        about.append([name, str(tensor.dtype), list(tensor.shape)])
        flat = tensor.detach().cpu().contiguous().flatten()
        parts.append(flat.view(torch.uint8).numpy().tobytes())
    return about, b"".join(parts)


def unpack_outputs(about: Any, data: bytes | bytearray, device: torch.device) -> Outputs:
    """What ``packed`` was given, on ``device``; raises HostError for anything else."""
    found: dict[str, torch.Tensor] = {}
    at = 0
    for name, dtype, shape in _each(about):
        count = math.prod(shape) * dtype.itemsize
        if name in found or at + count > len(data):
            raise HostError("tensors of more bytes than came.")
        bits = torch.frombuffer(bytearray(data[at : at + count]) or bytearray(1), dtype=torch.uint8)
        found[name] = bits[:count].view(dtype).reshape(shape).to(device)
        at += count
    if at != len(data) or "out" not in found:
        raise HostError("tensors of fewer bytes than came, or no out.")
    return Outputs(**found)


def _each(about: Any) -> Iterator[tuple[str, torch.dtype, list[int]]]:
    if not isinstance(about, list):
        raise HostError("what came is no list of tensors.")
    for one in about:
        if not (isinstance(one, list) and len(one) == 3):
            raise HostError("what came is no tensor.")
        name, dtype, shape = one
        if name not in AXES or dtype not in _DTYPES or not _is_shape(shape):
            raise HostError("what came is no tensor of a kernel's.")
        yield name, _DTYPES[dtype], shape


def _is_shape(shape: Any) -> bool:
    if not isinstance(shape, list) or len(shape) > 4:
        return False
    return all(type(size) is int and size >= 0 for size in shape)


_FLAGS = ("triton", "sinks", "backward", "captured", "promises_gradients")
_KNOWN = 256  # tilings that are remembered


class RemoteError(HostError):
    """What a kernel raised when it was asked something in its process.

    Attributes:
        kind: As of ``executor.Failure``.
        trace: The traceback there.
    """

    def __init__(self, kind: str, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.kind, self.trace = kind, trace


class RemoteSubject(Subject):
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
            name: RemoteSubject(self.connection, words, (name, problem))
            for name, words in found.items()
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


def failed(answer: Frame) -> RemoteError:
    """An answer that is none."""
    words = {name: str(answer.words.get(name, "")) for name in ("kind", "message", "trace")}
    return RemoteError(words["kind"], words["message"], words["trace"])


def tiling_of(words: Any) -> Tiling | None:
    """The tiling that came; raises HostError for what is none."""
    return None if words is None else _read(Tiling, words)


def arithmetic_of(words: Any) -> Arithmetic:
    """The arithmetic that came; raises HostError for what is none."""
    found: Arithmetic = _read(Arithmetic, words)
    return found


def _read(kind: Any, words: Any) -> Any:
    try:
        return from_fields(kind, words)
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


_MOST_CALLS = 10  # that a question which makes more has time for: most are not as long as allowed
_FATAL = {"crash", "timeout", "oom"}  # whatever a process says then, the next question has another


class IsolatedExecutor:
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
        except (Died, RemoteError) as error:
            return Failure(kind=error.kind, message=str(error), trace=error.trace)

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
            "under": to_fields(under),
            "timed": timed,
            "launch": _remote(subject).launch,
        }
        seconds = self._seconds(inputs, calls=under.calls + under.window + timed)
        try:
            answer = self._connection.ask("run", words, seconds=seconds, most=output_bytes(inputs))
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
        words, mine = answer.words, inputs_digest(inputs)
        if words.get("drawn") != mine:
            return Failure(kind="contract", message="in its process the Case has other inputs.")
        if words.get("left") != mine:
            return Failure(kind="mutation", message="wrote to its inputs.")
        outputs = unpack_outputs(words.get("outputs"), answer.data, inputs.device)
        arithmetic = arithmetic_of(words.get("arithmetic"))
        unlike = output_error(outputs, inputs) or arithmetic_error(arithmetic, inputs)
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
        except (Died, RemoteError) as error:
            return Failure(kind=error.kind, message=str(error), trace=error.trace)


class IsolatedKernel:
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
        self.subject = RemoteSubject(self._connection, self._connection.described)
        self.executor = IsolatedExecutor(self._connection)

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


def _remote(subject: Subject) -> RemoteSubject:
    if not isinstance(subject, RemoteSubject):
        raise HostError(f"kernel {subject.name!r} is in this process: call it here.")
    return subject


def _number(value: Any) -> float | None:
    if value is not None and type(value) not in {int, float}:
        raise HostError("a time that is no number.")
    return None if value is None else float(value)


def _noted(words: Any) -> CallNotes:
    try:
        return from_fields(CallNotes, words)
    except UsageError as error:
        raise HostError(str(error)) from None


_DEATHS: frozenset[Status] = frozenset({"crash", "timeout", "oom"})


def confirm_death(host: IsolatedKernel, ask: Callable[[], Record]) -> tuple[Record, int]:
    """The Record that ``ask`` gives, and how often it was asked.

    Args:
        host: Of the kernel that is asked.
        ask: Asks one Case of ``host.subject`` by ``host.executor``.
    """
    first = ask()
    if first.status not in _DEATHS:
        return first, 1
    host.fresh()
    second = ask()
    if second.status == first.status:
        return second, 2
    again = f"asked once more, alone in a new process: {_told(second)}"
    if second.status in FAILED_STATUSES:
        return replace(first, reason=f"{first.reason}; {again}"), 2
    return replace(first, status="flaky", reason=f"{first.status}: {first.reason}; {again}"), 2


def _told(record: Record) -> str:
    why = record.reason or (record.judgement.reason if record.judgement else "")
    return f"{record.status} ({why})" if why else record.status
