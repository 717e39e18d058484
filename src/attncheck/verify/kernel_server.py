"""Requests to a kernel's process, and its answers, whatever the kernel raises."""

from __future__ import annotations

import os
import sys
import sysconfig
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from attncheck.core import strided_alloc
from attncheck.core.errors import AttncheckError, UsageError
from attncheck.core.source_files import import_file
from attncheck.inputs import recording_file
from attncheck.inputs.problem import Case, Problem
from attncheck.mods.mod_files import kind_of_mod, load_mask, load_score, mods_in
from attncheck.subjects.load import load_kernel
from attncheck.subjects.terms import Terms, subject_on_terms
from attncheck.verify.call_conditions import CallConditions
from attncheck.verify.environment import prepare, require_device
from attncheck.verify.executor import Execution, Failure, InProcess, Origin, failure, lost_gpu
from attncheck.verify.kernel_messages import (
    CallReport,
    describe_subject,
    from_fields,
    pack_tensors,
    to_fields,
    unpack_inputs,
)
from attncheck.verify.obligations import inputs_digest, requested_outputs
from attncheck.verify.process_effects import State, process_state, restore_process, stir_heap
from attncheck.verify.relation_runs import draw_case_inputs
from attncheck.workers.transport import LARGEST_WORDS, Frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.subjects.capabilities.subject import Subject
    from attncheck.subjects.load import Candidate

_MICROSECONDS = 1e-6


class Compiling:
    """A clock that runs while Triton or torch.compile compiles; started once a process.

    Triton tells afterwards how long it took (``knobs.compilation.listener``, from 3.6 on);
    torch.compile when it starts and ends. Triton within torch.compile counts once. A cache hit
    costs what it costs: reading it. Interpreted kernels compile nothing.
    """

    def __init__(self) -> None:
        self.seconds = 0.0  # so far
        self._since: float | None = None
        self._before: Any = None
        self._triton = self._torch = False

    def listen(self) -> None:
        """Start listening to what has been imported by now; again for what was imported since."""
        if "triton" in sys.modules and not self._triton:
            self._triton = True
            self._listen_to_triton()
        if "torch._dynamo" in sys.modules and not self._torch:
            self._torch = True
            from torch._dynamo.callback import callback_handler

            callback_handler.register_start_callback(self._started)
            callback_handler.register_end_callback(self._ended)

    def _listen_to_triton(self) -> None:
        from triton import knobs

        self._before = knobs.compilation.listener
        knobs.compilation.listener = self._compiled

    def _compiled(self, *, times: Any, **more: Any) -> None:
        if self._since is None:  # else it is part of what torch.compile does
            self.seconds += times.total * _MICROSECONDS
        if self._before is not None:
            self._before(times=times, **more)

    def _started(self, _: object) -> None:
        self._since = time.perf_counter()

    def _ended(self, _: object) -> None:
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
        self._since = None


_LONGEST = LARGEST_WORDS // 32  # characters of a message, or a traceback: JSON has 12 bytes for one


class KernelServer:
    """The kernel of this process."""

    def __init__(self) -> None:
        self._subject: Subject | None = None
        self._candidate: Candidate | None = None
        self._device = "cpu"
        self._state: State = {}  # as it was loaded
        self._left: dict[str, None] = {}  # what calls have changed of it
        # Whoever asks compares them with the digests of its own inputs.
        self._executor = InProcess(digests=True)
        self._compiling = Compiling()
        self._answers = {
            "start": self._start,
            "mods": self._load_mods,
            "load": self._load,
            "hold": self._hold,
            "ask": self._ask,
            "run": self._run,
            "time": self._time,
            "forget": self._forget,
        }

    def close(self) -> None:
        """There is nothing to end: what the kernel started is killed with this process."""

    def answer(self, request: Frame) -> Frame:
        """The answer to ``request``; whatever is raised on the way is one too."""
        try:
            if request.data:
                return self._run(request.words, request.data)
            return self._answers[request.kind](request.words)
        except BaseException as error:  # noqa: BLE001  # foreign code may raise anything
            return _failed(failure(error))

    def _start(self, words: dict[str, Any]) -> Frame:
        del words
        return Frame(kind="started", words={})

    def _load_mods(self, words: dict[str, Any]) -> Frame:
        """Load a ``mask``, ``score`` or ``recording``, or all of a ``file``: Problems name them."""
        try:
            prepare(words["device"])
            if "recording" in words:
                recording_file.load(words["recording"])
            for name, load in {"mask": load_mask, "score": load_score}.items():
                if name in words:
                    load(words[name])
            if "file" in words:
                # Whoever asks looks at them itself: here they may end the process.
                with torch.device(words["device"]):
                    mods = mods_in(import_file(Path(words["file"]), "mods"))
                for name, mod in mods.items():
                    load = load_mask if kind_of_mod(mod) == "mask" else load_score
                    with suppress(AttncheckError):
                        load(f"{words['file']}::{name}")
        except AttncheckError as error:
            return Frame(kind="usage", words={"message": str(error)[:_LONGEST]})
        return Frame(kind="loaded", words={})

    def _load(self, words: dict[str, Any]) -> Frame:
        self._device = words["device"]
        torch.set_num_threads(words["threads"])
        if not sys.warnoptions:
            warnings.simplefilter("ignore")  # of somebody's code, as in the command line's process
        try:
            require_device(self._device)
            prepare(self._device)
            convention = words["convention"] or None
            self._candidate, self._subject = load_kernel(words["kernel"], convention)
            self._state = process_state(torch.device(self._device))
            # The import of a kernel is often the first to import Triton.
            self._compiling.listen()
            return Frame(kind="described", words=describe_subject(self._subject))
        except UsageError as error:
            return Frame(kind="usage", words={"message": str(error)[:_LONGEST]})
        except AttncheckError as error:
            return Frame(kind="unready", words={"message": str(error)[:_LONGEST]})

    def _hold(self, words: dict[str, Any]) -> Frame:
        assert self._subject is not None
        try:
            self._subject = subject_on_terms(self._subject, msgspec.convert(words, Terms))
        except UsageError as error:
            return Frame(kind="usage", words={"message": str(error)[:_LONGEST]})
        return Frame(kind="described", words=describe_subject(self._subject))

    def _read_entry(self) -> Any:
        assert self._candidate is not None
        return msgspec.to_builtins(self._candidate.facts())

    def _ask(self, words: dict[str, Any]) -> Frame:
        kernel, device = self._one(words["launch"]), words["device"]
        problem = words["problem"] and Problem.from_json(words["problem"])
        answers: dict[str, Callable[[], Any]] = {
            "absence": lambda: self._executor.absence(kernel, device),
            "absent": lambda: kernel.absent(device),
            "wanted": lambda: self._executor.concerns(kernel, problem),
            "concerns": lambda: kernel.concerns(problem),
            "refusal": lambda: self._executor.refusal(kernel, problem, device),
            "unsupported": lambda: kernel.unsupported(problem, device),
            "tiling": lambda: to_fields(kernel.tiling(problem, device)),
            "arithmetic": lambda: to_fields(kernel.arithmetic(problem, device)),
            "files": loaded_files,
            "entry": self._read_entry,
            "written_call": lambda: to_fields(kernel.written_call(problem)),
            "launches": lambda: {
                name: describe_subject(each)
                for name, each in kernel.launches(problem, device).items()
            },
        }
        value = answers[words["what"]]()
        if isinstance(value, Failure):
            return _failed(value)
        return Frame(kind="answer", words={"value": value})

    def _run(self, words: dict[str, Any], data: bytes | bytearray = b"") -> Frame:
        """Call the kernel on what a Case draws, or on the inputs that ``data`` holds."""
        kernel, origin = self._one(words["launch"]), None
        # Else what an earlier call has left, such as a default device, would break our drawing.
        # Not its random numbers: a kernel that draws some is to draw others in each call.
        left = restore_process(self._state, torch.device(self._device), generators=False)
        self._left.update(dict.fromkeys(left))
        if data:
            inputs = unpack_inputs(words["inputs"], data, self._device)
        else:
            origin = Origin(case=Case.from_json(words["case"]), run=words["run"])
            inputs = draw_case_inputs(origin, self._device)
        # Before the call, which may write to them.
        before, compiled = inputs_digest(inputs), self._compiling.seconds
        if words.get("kept"):
            result = self._executor.keep(kernel, inputs, graph=words["graph"])
        else:
            under = from_fields(CallConditions, words["under"])
            result = self._executor.run(
                kernel, inputs, origin=origin, timed=words["timed"], under=under
            )
        stir_heap()  # what this call broke is to end it here, and not after its answer
        # Before anything else is asked of it: whatever is would raise, as an error of no crash.
        if lost := lost_gpu() if self._device == "cuda" else "":
            message = result.message if isinstance(result, Failure) else lost
            return _failed(Failure(kind="crash", message=f"its process lost the GPU: {message}"))
        problem = inputs.problem
        far = any(map(strided_alloc.has_far_rows, inputs.tensors().values()))
        del inputs  # perhaps gibibytes, which the next question of another process may need
        if far:
            strided_alloc.release_cached_memory(self._device)
        elif not words.get("kept"):  # else its next call, which is timed, would pay for it
            strided_alloc.release_scarce_memory(self._device)
        self._compiling.listen()  # to what the call imported
        if isinstance(result, Failure):
            return _failed(result)
        if words.get("under", {}).get("state") and self._left:
            result.notes.remark = f"an earlier call changed {', '.join(self._left)}"
        compiling = self._compiling.seconds - compiled
        return _ran(result, problem, drawn=before, compiling=compiling)

    def _time(self, words: dict[str, Any]) -> Frame:
        turn = self._executor.time(Problem.from_json(words["problem"]))
        if isinstance(turn, Failure):
            return _failed(turn)
        return Frame(kind="timed", words=to_fields(turn))

    def _forget(self, words: dict[str, Any]) -> Frame:
        del words
        self._executor.forget()
        strided_alloc.release_cached_memory(self._device)
        return Frame(kind="forgot", words={})

    def _one(self, launch: dict[str, Any] | None) -> Subject:
        """The kernel, or a launch of it."""
        assert self._subject is not None
        if launch is None:
            return self._subject
        problem = Problem.from_json(launch["of"])
        return self._subject.launches(problem, self._device)[launch["name"]]


def loaded_files() -> list[str]:
    """Files of the modules that are loaded; none of Python's own and of installed packages."""
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = tuple(f"{sysconfig.get_path(kind)}{os.sep}" for kind in kinds)
    named = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    files = {name for name in named if isinstance(name, str)}
    with suppress(FileNotFoundError):  # the kernel has deleted the folder that it is in
        files = {os.path.abspath(name) for name in files}  # noqa: PTH100
    return sorted(name for name in files if not name.startswith(installed))


def _ran(result: Execution, problem: Problem, *, drawn: str, compiling: float) -> Frame:
    report = CallReport(
        seconds=result.seconds,
        tiling=result.tiling,
        arithmetic=result.arithmetic,
        notes=result.notes,
        compiling=compiling,
        drawn=drawn,
        left=result.left,
    )
    try:
        words = to_fields(report)
    except UsageError as error:
        return _failed(Failure(kind="contract", message=f"what it declares: {error}"))
    about, data = pack_tensors(requested_outputs(result.outputs, problem).tensors())
    return Frame(kind="ran", words={"report": words, "outputs": about}, data=data)


def _failed(outcome: Failure) -> Frame:
    # The end of a traceback says what was raised.
    message, trace = outcome.message[:_LONGEST], outcome.trace[-_LONGEST:]
    return Frame(kind="failed", words={"kind": outcome.kind, "message": message, "trace": trace})
