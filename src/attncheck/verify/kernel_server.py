"""Answers requests in a kernel's process, whatever the kernel raises."""

from __future__ import annotations

import os
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from attncheck.core import strided_alloc
from attncheck.core.errors import AttncheckError, UsageError
from attncheck.core.source_files import import_file, is_installed
from attncheck.inputs import recording_file
from attncheck.inputs.problem import Case, Problem
from attncheck.mods.mod_files import kind_of_mod, load_mask, load_score, mods_in
from attncheck.subjects.load import load_kernel
from attncheck.subjects.terms import Terms, subject_on_terms
from attncheck.verify.call_conditions import CallConditions
from attncheck.verify.environment import prepare, require_device
from attncheck.verify.executor import (
    CallReport,
    Execution,
    Failure,
    InProcess,
    Origin,
    failure,
    lost_gpu,
)
from attncheck.verify.kernel_messages import (
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
    """A clock that runs while Triton or torch.compile compiles; one per process.

    Triton reports the time afterwards (``knobs.compilation.listener``, from 3.6 on), torch.compile
    when it starts and ends. Triton within torch.compile counts once. A cache hit counts the time of
    reading it. Interpreted kernels compile nothing.
    """

    def __init__(self) -> None:
        self.seconds = 0.0  # so far
        self._since: float | None = None
        self._previous_listener: Any = None
        self._triton = self._torch = False

    def listen(self) -> None:
        """Listen to the compilers imported by now; call it again after further imports."""
        if "triton" in sys.modules and not self._triton:
            self._triton = True
            from triton import knobs

            self._previous_listener = knobs.compilation.listener
            knobs.compilation.listener = self._add_triton
        if "torch._dynamo" in sys.modules and not self._torch:
            self._torch = True
            from torch._dynamo.callback import callback_handler

            callback_handler.register_start_callback(self._torch_starts)
            callback_handler.register_end_callback(self._torch_ends)

    def _add_triton(self, *, times: Any, **more: Any) -> None:
        if self._since is None:  # Otherwise torch.compile's clock includes it.
            self.seconds += times.total * _MICROSECONDS
        if self._previous_listener is not None:
            self._previous_listener(times=times, **more)

    def _torch_starts(self, _: object) -> None:
        self._since = time.perf_counter()

    def _torch_ends(self, _: object) -> None:
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
        self._since = None


_LONGEST = LARGEST_WORDS // 32  # Characters of a message or traceback; each is ≤ 12 bytes of JSON.


class KernelServer:
    """Answers requests to the kernel of this process."""

    # Set once the kernel is loaded, which the asking process requests first.
    _subject: Subject
    _candidate: Candidate

    def __init__(self) -> None:
        self._device = "cpu"
        self._state: State = {}  # after the kernel was loaded
        self._changed_parts: dict[str, None] = {}  # parts of that state that calls have changed
        # The asking process compares digests with those of its own inputs.
        self._executor = InProcess(digests=True)
        self._compiling = Compiling()
        self._answers = {
            "start": lambda _: Frame(kind="started", words={}),
            "mods": self._load_mods,
            "load": self._load,
            "hold": self._hold,
            "ask": self._ask,
            "run": self._run,
            "time": self._time,
            "forget": self._forget,
        }

    def close(self) -> None:
        """Do nothing: processes that the kernel started are killed with this one."""

    def answer(self, request: Frame) -> Frame:
        """Return the answer to ``request``; an exception is answered as a failure."""
        try:
            if request.data:
                return self._run(request.words, request.data)
            return self._answers[request.kind](request.words)
        except BaseException as error:  # noqa: BLE001  # foreign code may raise anything
            return _failure_frame(failure(error))

    def _load_mods(self, words: dict[str, Any]) -> Frame:
        """Load a ``mask``, ``score`` or ``recording``, or all mods of a ``file``, for Problems."""
        try:
            prepare(words["device"])
            if "recording" in words:
                recording_file.load(words["recording"])
            for name, load in {"mask": load_mask, "score": load_score}.items():
                if name in words:
                    load(words[name])
            if "file" in words:
                # Loading may end this process; the asking process checks the mods itself.
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
            warnings.simplefilter("ignore")  # As in the command line's process.
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
        try:
            self._subject = subject_on_terms(self._subject, msgspec.convert(words, Terms))
        except UsageError as error:
            return Frame(kind="usage", words={"message": str(error)[:_LONGEST]})
        return Frame(kind="described", words=describe_subject(self._subject))

    def _ask(self, words: dict[str, Any]) -> Frame:
        kernel, device = self._kernel_of(words["launch"]), words["device"]
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
            "entry": lambda: msgspec.to_builtins(self._candidate.facts()),
            "written_call": lambda: to_fields(kernel.written_call(problem)),
            "launches": lambda: {
                name: describe_subject(each)
                for name, each in kernel.launches(problem, device).items()
            },
        }
        value = answers[words["what"]]()
        if isinstance(value, Failure):
            return _failure_frame(value)
        return Frame(kind="answer", words={"value": value})

    def _run(self, words: dict[str, Any], data: bytes | bytearray = b"") -> Frame:
        """Call the kernel on what a Case draws, or on the inputs that ``data`` holds."""
        kernel, origin = self._kernel_of(words["launch"]), None
        # Otherwise changes by an earlier call, such as a default device, would break the drawing of
        # inputs. Generators stay: a kernel that draws random numbers draws others in each call.
        changed = restore_process(self._state, torch.device(self._device), generators=False)
        self._changed_parts.update(dict.fromkeys(changed))
        if data:
            inputs = unpack_inputs(words["inputs"], data, self._device)
        else:
            origin = Origin(case=Case.from_json(words["case"]), run=words["run"])
            inputs = draw_case_inputs(origin, self._device)
        # Before the call, which may write to the inputs.
        before, compiled = inputs_digest(inputs), self._compiling.seconds
        if words.get("kept"):
            result = self._executor.keep(kernel, inputs, graph=words["graph"])
        else:
            under = from_fields(CallConditions, words["under"])
            result = self._executor.run(kernel, inputs, origin=origin, under=under)
        stir_heap()  # A heap that this call corrupted ends the process here, not after the answer.
        # Checked first: any other use of a lost GPU would raise an error that is not a crash.
        if gpu_error := lost_gpu() if self._device == "cuda" else "":
            message = result.message if isinstance(result, Failure) else gpu_error
            return _failure_frame(
                Failure(kind="crash", message=f"its process lost the GPU: {message}")
            )
        problem = inputs.problem
        far = any(map(strided_alloc.has_far_rows, inputs.tensors().values()))
        del inputs  # It may be gibibytes, which another process may need.
        if far:
            strided_alloc.release_cached_memory(self._device)
        elif not words.get("kept"):  # The next call of a kept call is timed.
            strided_alloc.release_scarce_memory(self._device)
        self._compiling.listen()  # The call may have imported a compiler.
        if isinstance(result, Failure):
            return _failure_frame(result)
        if words.get("under", {}).get("state") and self._changed_parts:
            result.notes.remark = f"an earlier call changed {', '.join(self._changed_parts)}"
        compiling = self._compiling.seconds - compiled
        return _success_frame(result, problem, drawn=before, compiling=compiling)

    def _time(self, words: dict[str, Any]) -> Frame:
        turn = self._executor.time(Problem.from_json(words["problem"]))
        if isinstance(turn, Failure):
            return _failure_frame(turn)
        return Frame(kind="timed", words=to_fields(turn))

    def _forget(self, words: dict[str, Any]) -> Frame:
        del words
        self._executor.forget()
        strided_alloc.release_cached_memory(self._device)
        return Frame(kind="forgot", words={})

    def _kernel_of(self, launch: dict[str, Any] | None) -> Subject:
        """Return the kernel, or the named launch of it."""
        if launch is None:
            return self._subject
        problem = Problem.from_json(launch["of"])
        return self._subject.launches(problem, self._device)[launch["name"]]


def loaded_files() -> list[str]:
    """Return the files of loaded modules, except Python's own and installed packages'."""
    named = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    files = {name for name in named if isinstance(name, str)}
    with suppress(FileNotFoundError):  # The kernel has deleted the working directory.
        files = {os.path.abspath(name) for name in files}  # noqa: PTH100
    return sorted(name for name in files if not is_installed(name))


def _success_frame(result: Execution, problem: Problem, *, drawn: str, compiling: float) -> Frame:
    values = {each.name: getattr(result, each.name) for each in fields(CallReport)}
    try:
        report = to_fields(CallReport(**{**values, "compiling": compiling}))
    except UsageError as error:
        return _failure_frame(Failure(kind="contract", message=f"what it declares: {error}"))
    about, data = pack_tensors(requested_outputs(result.outputs, problem).tensors())
    return Frame(kind="ran", words={"drawn": drawn, "report": report, "outputs": about}, data=data)


def _failure_frame(outcome: Failure) -> Frame:
    # The end of a traceback has the exception.
    message, trace = outcome.message[:_LONGEST], outcome.trace[-_LONGEST:]
    return Frame(kind="failed", words={"kind": outcome.kind, "message": message, "trace": trace})
