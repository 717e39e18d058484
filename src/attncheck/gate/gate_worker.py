"""What a lane of a gate does: describes a kernel, draws, asks, and makes failures smaller.

The lane is a trusted process: the kernel itself runs in another one.
"""

from __future__ import annotations

import time
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from attncheck.core.errors import UsageError
from attncheck.gate.choices import Choices
from attncheck.gate.failures import SHRUNK_STATUSES, FailureLog
from attncheck.gate.kernel_hosts import KernelHosts, MissingKernelError
from attncheck.gate.plan import plan_kernel
from attncheck.gate.planning import CachingExecutor, Planning
from attncheck.gate.property_stage import KnownFailures, drawn_units
from attncheck.gate.sources import file_hashes
from attncheck.gate.stages import SANITIZER_VARIANT, sanitize_kernel
from attncheck.inputs.problem import Case, Problem, head_arrangement
from attncheck.records.record import FAILED_STATUSES, Record
from attncheck.records.run_reports import Answer
from attncheck.verify.accuracy import measure_accuracy
from attncheck.verify.environment import environment, fingerprint, prepare
from attncheck.verify.executor import InProcess
from attncheck.verify.isolated import IsolatedExecutor, IsolatedKernel, confirm_death
from attncheck.verify.run_case import run_case
from attncheck.workers.process import Died, HostError
from attncheck.workers.units import Done, Unit

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.gate.kernel_hosts import KernelHost

__all__ = ["GateWorker", "work"]


def work(**options: Any) -> GateWorker:
    """The Work of a lane; raises UsageError for options that are none of a gate's."""
    return GateWorker(Choices.of(options))


class GateWorker:
    """Does the units of a gate, one after the other.

    Args:
        choices: What is asked.
        known: Known failures; those beside the properties unless told.
        here: Makes what calls a kernel that has no process of its own: for who listens to it.
    """

    def __init__(
        self,
        choices: Choices,
        known: KnownFailures | None = None,
        here: Callable[[], InProcess] = InProcess,
    ) -> None:
        self._choices = choices
        self._hosts = KernelHosts(choices, here)
        self._given = known
        self._device = self._key = self._told = ""
        self._remembering: tuple[KernelHost, CachingExecutor] | None = None
        self._failures = FailureLog(choices)

    @cached_property
    def _known(self) -> KnownFailures:
        return self._given or KnownFailures()

    def close(self) -> None:
        """End the kernel's process."""
        self._hosts.close()

    def do(self, unit: Unit) -> Done:
        """What comes of ``unit``; what a kernel does to its own process raises nothing here."""
        start = time.perf_counter()
        try:
            done = self._confirmed(unit)
        except MissingKernelError as error:
            done = Done(unit=unit.id, facts={"missing": str(error)})
        except UsageError as error:  # of its Case, not of what was typed
            done = Done(unit=unit.id, harness=f"{unit.kind} of {unit.kernel}: {error}")
        except HostError as error:
            self._hosts.end(unit.commit)
            done = Done(unit=unit.id, harness=f"{unit.kind} of {unit.kernel}: {error}")
        seconds = round(time.perf_counter() - start, 3)
        return replace(done, seconds=seconds, facts=done.facts | self._where(unit, done))

    def _where(self, unit: Unit, done: Done) -> dict[str, Any]:
        """The environment that its Records name: lanes may be on several machines.

        Of what several shards do always, so that they say the same of it; else once a lane.
        """
        shared = unit.kind in {"describe", "draw"}
        if not done.answers or (self._told == self._key and not shared):
            return {}
        self._told = self._told if shared else self._key
        return {"environment": msgspec.to_builtins(environment(unit.device))}

    def _confirmed(self, unit: Unit) -> Done:
        """Where the kernel's process dies beside a Case, it is all done once more in a new one.

        An answer that is right then is flaky. Of what several shards do they say the same.
        """
        try:
            return self._loaded_and_did(unit)
        except Died as error:
            first = error
        self._hosts.end(unit.commit)
        try:
            done = self._loaded_and_did(unit)
        except Died as second:
            return self._died(unit, second if second.kind == first.kind else first)
        asked = unit.kind == "ask"
        answers = tuple(_flaky(each, first) if asked else each for each in done.answers)
        return replace(done, answers=answers, attempts=2)

    def _loaded_and_did(self, unit: Unit) -> Done:
        try:
            self._get_ready(unit.device)
            host = self._hosts.of(unit)
        except UsageError as error:
            return Done(unit=unit.id, facts={"usage": str(error)}, harness=str(error))
        return self._did(unit, host)

    def _did(self, unit: Unit, host: KernelHost) -> Done:
        if unit.kind == "describe":
            return self._described(unit, host)
        if unit.kind == "draw":
            planning = self._planning(unit, host)
            units = drawn_units(unit, planning, self._known)
            return Done(unit=unit.id, units=tuple(units), answers=tuple(planning.refused))
        if unit.kind == "shrink":
            return self._made_smaller(unit, host)
        if unit.variant.startswith(SANITIZER_VARIANT):
            return sanitize_kernel(unit, self._planning(unit, host))
        return self._asked(unit, host)

    def _get_ready(self, device: str) -> None:
        """Once: what kernels on the device need, and what Records say of where."""
        if self._device == device:
            return
        import torch

        if device == "cpu":
            torch.set_num_threads(1)  # at these sizes more mostly wait for each other
        prepare(device)
        self._device, self._key = device, fingerprint(environment(device))

    def _planning(self, unit: Unit, host: KernelHost) -> Planning:
        if self._remembering is None or self._remembering[0] is not host:
            self._remembering = (host, CachingExecutor(host.executor))
        return Planning(unit, host.subject, self._remembering[1], self._choices, self._key)

    def _described(self, unit: Unit, host: KernelHost) -> Done:
        facts: dict[str, Any] = {
            "kernel": unit.kernel,
            "name": host.subject.name,
            "summary": host.subject.summary,
            "absent": host.executor.absence(host.subject, unit.device) or "",
            "environment": msgspec.to_builtins(environment(unit.device)),
        }
        if isinstance(host, IsolatedKernel) and not unit.commit:
            facts |= file_hashes(host.files())
        if facts["absent"]:
            return Done(unit=unit.id, facts=facts)
        planning = self._planning(unit, host)
        units = plan_kernel(planning)
        return Done(unit=unit.id, facts=facts, units=tuple(units), answers=tuple(planning.refused))

    def _asked(self, unit: Unit, host: KernelHost) -> Done:
        case, start = Case.from_json(unit.case), time.perf_counter()
        compiled = _compiling(host)
        record, attempts = self._record(unit, host, case)
        record = self._known.excuse(record, unit, case)
        before = bool(unit.commit)  # what it did is measured: nobody mends it
        if not before:
            record = self._failures.diagnosed(record, unit, host)
        answer = Answer(
            unit=unit.id,
            stage=unit.stage,
            record=record,
            test=unit.test,
            seconds=round(time.perf_counter() - start, 3),
            compiling=round(_compiling(host) - compiled, 3),
            attempts=attempts,
            failure="" if before else self._failures.kept(record, unit),
        )
        shrinks = record.status in SHRUNK_STATUSES and not before
        units = (replace(unit, kind="shrink"),) if shrinks else ()
        return Done(unit=unit.id, answers=(answer,), units=units, attempts=1)

    def _record(self, unit: Unit, host: KernelHost, case: Case) -> tuple[Record, int]:
        def ask() -> Record:
            said = {"device": unit.device, "variant": unit.variant, "environment": self._key}
            how: dict[str, Any] = {"executor": host.executor, **said}
            if unit.stage == "baseline":
                return measure_accuracy(host.subject, case, **how)
            # Errors beside their yardsticks where they are to be read; elsewhere the verdict.
            return run_case(host.subject, case, brief=unit.stage != "bounds", **how)

        if isinstance(host.executor, InProcess):
            return ask(), 1
        return confirm_death(host, ask)  # type: ignore[arg-type]  # it has a process: a Host

    def _made_smaller(self, unit: Unit, host: KernelHost) -> Done:
        """A smaller Case that fails alike; of many alike failures only the first few are shrunk."""
        start = time.perf_counter()
        found = self._failures.smaller(
            unit,
            host,
            lambda case: self._record(unit, host, case)[0],
            lambda: self._planning(unit, host),
        )
        if found is None:
            return Done(unit=unit.id)
        record, first = found
        answer = Answer(
            unit=unit.id,
            stage=unit.stage,
            record=record,
            test=unit.test,
            seconds=round(time.perf_counter() - start, 3),
            smallest_of=first,
            failure=self._failures.kept(record, unit),
        )
        return Done(unit=unit.id, answers=(answer,))

    def _died(self, unit: Unit, error: Died) -> Done:
        """Its process died as the kernel was imported, or was asked what it takes."""
        self._hosts.end(unit.commit)
        case = Case.from_json(unit.case) if unit.case else Case(problem=Problem(query=1))
        record = Record(
            case_id=case.id,
            case=case.to_json(),
            kernel=unit.kernel,
            variant=unit.variant or unit.kind,
            heads=head_arrangement(case.problem),
            status="oom" if error.kind == "oom" else _death(error.kind),
            reason=f"{unit.kind}: {error}",
            environment=self._key,
        )
        answer = Answer(unit=unit.id, stage=unit.stage, record=record)
        return Done(unit=unit.id, answers=(answer,), facts=self._facts(unit))

    def _facts(self, unit: Unit) -> dict[str, Any]:
        if unit.kind != "describe":
            return {}
        where = msgspec.to_builtins(environment(unit.device))
        return {"kernel": unit.kernel, "name": unit.kernel, "summary": "", "environment": where}


def _compiling(host: KernelHost) -> float:
    """Seconds so far; of kernels in this process nobody listens."""
    return host.executor.compiling if isinstance(host.executor, IsolatedExecutor) else 0.0


def _flaky(answer: Answer, first: Died) -> Answer:
    """What came of a question, the first process of which died before it was asked."""
    record = answer.record
    if record.status not in FAILED_STATUSES:
        reason = f"{first.kind}: {first}; asked once more, in a new process: {record.status}"
        record = replace(record, status="flaky", reason=reason)
    return replace(answer, record=record, attempts=answer.attempts + 1)


def _death(kind: str) -> Any:
    return "timeout" if kind == "timeout" else "crash"
