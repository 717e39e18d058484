"""The worker of a gate: it describes a kernel, draws and asks cases, and shrinks failures.

It is a trusted process: the kernel itself runs in another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from typing import Any

import msgspec
from msgspec.structs import replace

from attncheck.core.errors import AttncheckError, HostError, UsageError
from attncheck.core.mod_spec import Spec
from attncheck.core.strided_alloc import release_cached_memory, release_scarce_memory
from attncheck.gate.bound_stage import AGAIN
from attncheck.gate.gate_failures import SHRUNK_STATUSES, FailureLog
from attncheck.gate.plan import plan_kernel
from attncheck.gate.planning import CachingExecutor, Choices, Planning
from attncheck.gate.property_stage import KnownFailures, drawn_units
from attncheck.gate.sources import file_hashes
from attncheck.gate.stages import SANITIZER_VARIANT, sanitize_kernel
from attncheck.inputs.problem import Case, Problem
from attncheck.records.record import FAILED_STATUSES, Record
from attncheck.records.run_reports import Answer
from attncheck.verify.accuracy import measure_accuracy
from attncheck.verify.claims import Claims, hold_to_claims
from attncheck.verify.deaths import confirm_death, death_record
from attncheck.verify.environment import environment, prepare
from attncheck.verify.evidence_builder import forget_numbers
from attncheck.verify.executor import LACKED, InProcess
from attncheck.verify.isolated import IsolatedExecutor, IsolatedKernel
from attncheck.verify.kernel_hosts import KernelHost, on_terms, open_kernel
from attncheck.verify.remote_kernel import Deadlines
from attncheck.verify.run_case import run_case
from attncheck.workers.process import Died
from attncheck.workers.units import Done, Unit

# (row, key) of all heads up to which a kernel's answer is judged on a CPU: a core does that sooner
# than a GPU that a dozen processes share, each with thousands of small operations. On an H100 and
# fifteen of its cores 0.07 s of the smallest, not 0.28; but of four times as many 0.45, not 0.22.
_MOST_PAIRS_ON_CPU = 1 << 16
# The same where a GPU has no memory for the judge: half a minute of a core.
_MOST_PAIRS_IN_NEED = 1 << 24
# Seconds in which neighbours on a GPU end their questions, and give back what those took.
_WAITS = (0.5, 2.0, 8.0)
_READS = Spec.of("relative_bias", distance=1, seed=0)  # a score mod that reads a tensor
_UNCLAIMED = "not refused: "  # before the name of a question beyond a kernel's claims


def work(*, ahead: str = "", **options: Any) -> GateWorker:
    """Return the worker of a gate; raises UsageError for options that are none of a gate's.

    Args:
        ahead: JSON of a unit whose kernel is loaded before anything is asked; empty for none.
        options: Those of ``Choices``.
    """
    worker = GateWorker(Choices.of(options))
    if ahead:
        worker.load(msgspec.json.decode(ahead, type=Unit))
    return worker


class GateWorker:
    """Does the units of a gate, one after the other.

    Args:
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
        self._hosts = _KernelHosts(choices, here)
        self._chosen_failures = known
        self._device = self._key = self._reported = ""
        self._cached_executor: tuple[KernelHost, CachingExecutor] | None = None
        self._failures = FailureLog(choices)

    @cached_property
    def _known(self) -> KnownFailures:
        return self._chosen_failures or KnownFailures()

    def close(self) -> None:
        """End the kernel's process."""
        self._hosts.close()

    def load(self, unit: Unit) -> None:
        """Load the kernel of ``unit``; what that breaks is said when something is asked."""
        with suppress(Exception):
            self._prepare_device(unit.device)
            host = self._hosts.of(unit)
            # To trace a mod imports half of torch, in this process and in the kernel's.
            problem = Problem(query=1, score=_READS, backward=True, dcaptured=True)
            host.executor.concerns(host.subject, problem)

    def do(self, unit: Unit) -> Done:
        """Do ``unit``; what a kernel does to its own process raises nothing here."""
        start = time.perf_counter()
        try:
            done = self._do_with_retry(unit)
        except MissingKernelError as error:
            done = Done(unit=unit.id, facts={"missing": str(error)})
        except UsageError as error:  # of its Case, not of what was typed
            done = Done(unit=unit.id, harness=f"{unit.kind} of {unit.kernel}: {error}")
        except HostError as error:
            self._hosts.end(unit.commit)
            done = Done(unit=unit.id, harness=f"{unit.kind} of {unit.kernel}: {error}")
        release_scarce_memory(unit.device)
        seconds = round(time.perf_counter() - start, 3)
        return replace(
            done, seconds=seconds, facts=done.facts | self._environment_facts(unit, done)
        )

    def _environment_facts(self, unit: Unit, done: Done) -> dict[str, Any]:
        """Return the environment that its Records name: workers may be on several machines.

        Of what several shards do always, so that they say the same of it; else once a worker.
        """
        shared = unit.kind in {"describe", "draw"}
        if not done.answers or (self._reported == self._key and not shared):
            return {}
        self._reported = self._reported if shared else self._key
        return {"environment": msgspec.to_builtins(environment(unit.device))}

    def _do_with_retry(self, unit: Unit) -> Done:
        """Do a unit, once more in a new process where the kernel's process dies in a Case.

        An answer that is right then is flaky. Of what several shards do they say the same.
        """
        try:
            return self._load_and_do(unit)
        except Died as error:
            first = error
        # A process may end for what an earlier case left behind: only a new one can tell.
        self._hosts.end(unit.commit)
        try:
            done = self._load_and_do(unit)
        except Died as second:
            return self._report_death(unit, second if second.kind == first.kind else first)
        is_question = unit.kind == "ask"
        answers = tuple(_as_flaky(each, first) if is_question else each for each in done.answers)
        return replace(done, answers=answers, attempts=2)

    def _load_and_do(self, unit: Unit) -> Done:
        try:
            self._prepare_device(unit.device)
            host = self._hosts.of(unit)
        except UsageError as error:
            return Done(unit=unit.id, facts={"usage": str(error)}, harness=str(error))
        return self._do_kind(unit, host)

    def _do_kind(self, unit: Unit, host: KernelHost) -> Done:
        if unit.kind == "describe":
            return self._describe(unit, host)
        if unit.kind == "draw":
            planning = self._planning(unit, host)
            units = drawn_units(unit, planning, self._known)
            return Done(unit=unit.id, units=tuple(units), answers=tuple(planning.refused))
        if unit.kind == "shrink":
            return self._shrink(unit, host)
        if unit.variant.startswith(SANITIZER_VARIANT):
            return sanitize_kernel(unit, self._planning(unit, host))
        return self._ask_case(unit, host)

    def _prepare_device(self, device: str) -> None:
        """Prepare once: what kernels on the device need, and what Records say of where."""
        if self._device == device:
            return
        import torch

        torch.set_num_threads(1)  # at these sizes more mostly wait for each other
        prepare(device)
        self._device, self._key = device, environment(device).id

    def _planning(self, unit: Unit, host: KernelHost) -> Planning:
        # Kept as long as the kernel's process is: a new one may answer otherwise.
        if self._cached_executor is None or self._cached_executor[0] is not host:
            self._cached_executor = (host, CachingExecutor(host.executor))
        return Planning(unit, host.subject, self._cached_executor[1], self._choices, self._key)

    def _describe(self, unit: Unit, host: KernelHost) -> Done:
        facts: dict[str, Any] = {
            "kernel": unit.kernel,
            "name": host.subject.name,
            "summary": host.subject.summary,
            "absent": host.executor.absence(host.subject, unit.device) or "",
            "environment": msgspec.to_builtins(environment(unit.device)),
        }
        # Only a process of its own tells which files it loaded; another commit's never change.
        if isinstance(host, IsolatedKernel) and not unit.commit:
            facts |= file_hashes(host.files())
        if facts["absent"]:
            return Done(unit=unit.id, facts=facts)
        planning = self._planning(unit, host)
        units = plan_kernel(planning)
        claims = None if unit.commit else self._hosts.claims
        if claims is not None:
            facts["summary"] = "; ".join((facts["summary"], *claims.lines()))
            units += self._unclaimed_units(planning, claims)
            if claims.convention != claims.conventions[0]:
                # Who asks again asks by the convention that was found, and does not look for it.
                units = [replace(each, convention=claims.convention) for each in units]
        return Done(unit=unit.id, facts=facts, units=tuple(units), answers=tuple(planning.refused))

    def _unclaimed_units(self, planning: Planning, claims: Claims) -> Iterator[Unit]:
        """Yield what it got wrong beyond its claims, to be asked once, where any case is asked."""
        stages, dtypes = self._choices.stages, self._choices.dtypes
        for question in claims.unclaimed() if "contract" in stages else ():
            if not dtypes or question.case.problem.dtype in dtypes:
                yield planning.unit_of("contract", question.case, f"{_UNCLAIMED}{question.name}")

    def _ask_case(self, unit: Unit, host: KernelHost) -> Done:
        case, start = Case.from_json(unit.case), time.perf_counter()
        compiled = _compiling(host)
        record, attempts = self._run_case(unit, host, case)
        record = self._known.excuse(record, unit, case)
        claims = None if unit.commit else self._hosts.claims
        apart = claims is not None and unit.variant.startswith(_UNCLAIMED)
        if apart:
            assert claims is not None
            name = unit.variant.removeprefix(_UNCLAIMED)
            question = next(each for each in claims.unclaimed([name]) if each.name == name)
            record = replace(record, unclaimed=question.unclaimed or msgspec.UNSET)
        before = bool(unit.commit)  # what it did is measured: nobody mends it
        if not before:
            terms = claims.terms(dtypes=self._choices.dtypes) if claims is not None else None
            # What is wrong beyond its claims is confirmed there too.
            if apart and terms is not None:
                host.subject = on_terms(host.subject, replace(terms, table=None))
            record = self._failures.diagnose(record, unit, host)
            if apart and terms is not None:
                host.subject = on_terms(host.subject, terms)
        answer = Answer(
            unit=unit.id,
            stage=unit.stage,
            record=record,
            test=unit.test,
            seconds=round(time.perf_counter() - start, 3),
            compiling=round(_compiling(host) - compiled, 3),
            attempts=attempts,
            failure="" if before else self._failures.keep(record, unit),
        )
        # A unit of its own: other questions come first, and another worker may do it.
        shrinks = record.status in SHRUNK_STATUSES and not before and not apart
        units = (replace(unit, kind="shrink"),) if shrinks else ()
        return Done(unit=unit.id, answers=(answer,), units=units, attempts=1)

    def _run_case(self, unit: Unit, host: KernelHost, case: Case) -> tuple[Record, int]:
        problem = case.problem
        pairs = problem.batch * problem.heads * problem.query * problem.kv

        def ask_at(place: str) -> Record:
            how: dict[str, Any] = {
                "executor": host.executor,
                "device": unit.device,
                "place": place,
                "variant": unit.variant,
                "environment": self._key,
            }
            if unit.stage == "baseline":
                return measure_accuracy(host.subject, case, **how)
            # Errors beside their reference errors where they are to be read; elsewhere the verdict.
            brief = unit.stage != "bounds" or unit.variant.endswith(AGAIN)
            return run_case(host.subject, case, brief=brief, **how)

        def ask() -> Record:
            """Ask, again later or judged on a CPU where this process has no memory to judge."""
            isolated = self._choices.isolated
            usual = "cpu" if isolated and pairs <= _MOST_PAIRS_ON_CPU else ""
            last = "cpu" if isolated and pairs <= _MOST_PAIRS_IN_NEED else usual
            record = ask_at(usual)
            for wait, place in (*((wait, usual) for wait in _WAITS), (0, last)):
                if not _judge_lacked_memory(record):
                    return record
                forget_numbers()
                release_cached_memory(unit.device)
                time.sleep(wait)
                record = ask_at(place)
            if _judge_lacked_memory(record):  # which is nothing that the kernel did
                reason = f"this machine is too small for it: {record.reason}"
                return replace(record, status="unsupported", reason=reason)
            return record

        return confirm_death(host.subject, ask, slow=True)

    def _shrink(self, unit: Unit, host: KernelHost) -> Done:
        """Find a smaller Case that fails alike; of many such failures the first few are shrunk."""
        start = time.perf_counter()
        shrunk = self._failures.shrink(
            unit,
            host,
            lambda case: self._run_case(unit, host, case)[0],
            lambda: self._planning(unit, host),
        )
        if shrunk is None:
            return Done(unit=unit.id)
        record, first = shrunk
        answer = Answer(
            unit=unit.id,
            stage=unit.stage,
            record=record,
            test=unit.test,
            seconds=round(time.perf_counter() - start, 3),
            smallest_of=first,
            failure=self._failures.keep(record, unit),
        )
        return Done(unit=unit.id, answers=(answer,))

    def _report_death(self, unit: Unit, error: Died) -> Done:
        """Return what comes of a process that died at the import, or when asked what it takes."""
        self._hosts.end(unit.commit)
        # A Record needs some Case; a kernel that dies while it is described was asked none.
        case = Case.from_json(unit.case) if unit.case else Case(problem=Problem(query=1))
        record = death_record(
            error,
            case,
            kernel=unit.kernel,
            variant=unit.variant or unit.kind,
            environment=self._key,
            loading=False,
        )
        record = replace(record, reason=f"{unit.kind}: {record.reason}")
        answer = Answer(unit=unit.id, stage=unit.stage, record=record)
        facts: dict[str, Any] = {}
        if unit.kind == "describe":
            where = msgspec.to_builtins(environment(unit.device))
            # It died before it could say its name: what was typed stands in for that.
            names = {"kernel": unit.kernel, "name": unit.kernel}
            facts = {**names, "summary": "", "environment": where}
        return Done(unit=unit.id, answers=(answer,), facts=facts)


class MissingKernelError(AttncheckError):
    """The kernel of another commit that is not there."""


class _KernelHosts:
    """One kernel of each commit at a time: its process ends when another kernel is asked for.

    Args:
        choices: Whether kernels have processes of their own, and how long a call may take.
        here: Makes what calls kernels that have none.
    """

    def __init__(self, choices: Choices, here: Callable[[], InProcess]) -> None:
        self._choices = choices
        self._executor = here
        self._hosts: dict[str, tuple[tuple[str, str, str], KernelHost]] = {}
        # Of the kernel that was started last, where it is a plain function; else None.
        self.claims: Claims | None = None

    def of(self, unit: Unit) -> KernelHost:
        """Return the host of a unit's kernel.

        Raises:
            MissingKernelError: where another commit has no such kernel.
            UsageError: where there is no such kernel here, or that commit's is not the one that is
                found there.
            HostError: where its process cannot be had.
        """
        key = (unit.kernel, unit.convention, unit.device)
        known, host = self._hosts.get(unit.commit, (None, None))
        if host is not None and key == known:
            return host
        # Ended before the next begins: two kernels need not fit the GPU's memory together.
        self.end(unit.commit)
        host = self._start_other(unit) if unit.commit else self._start_on_claims(unit)
        self._hosts[unit.commit] = key, host
        return host

    def end(self, commit: str) -> None:
        """End the process of a commit's kernel, where there is one."""
        _, host = self._hosts.pop(commit, (None, None))
        if host is not None:
            host.close()

    def close(self) -> None:
        """End the processes that there are."""
        for commit in tuple(self._hosts):
            self.end(commit)

    def _start_on_claims(self, unit: Unit) -> KernelHost:
        """Start a kernel; a plain function is asked within what it is found to take."""
        host = self._start(unit)
        try:
            self.claims = hold_to_claims(
                host,
                kernel=unit.kernel,
                device=unit.device,
                asks_beyond=True,
                dtypes=self._choices.dtypes,
            )
        except BaseException:
            host.close()
            raise
        return host

    def _start(self, unit: Unit) -> KernelHost:
        return open_kernel(
            unit.kernel,
            isolated=self._choices.isolated,
            here=self._executor(),
            **self._host_options(unit),
        )

    def _start_other(self, unit: Unit) -> KernelHost:
        """Start the kernel of another commit; in a process, since two of one name share none."""
        tree = self._choices.tree
        if tree is None or tree.commit != unit.commit:
            raise MissingKernelError(f"commit {unit.commit} is not part of this run.")
        side = tree.kernel(unit.kernel)
        if side.missing:
            raise MissingKernelError(side.missing)
        try:
            host = IsolatedKernel(
                side.kernel, folder=side.folder, paths=side.paths, **self._host_options(unit)
            )
        except UsageError as error:
            raise MissingKernelError(f"{tree.ref}: {error}") from None
        # Else today's files would be compared with themselves, and nothing would seem to change.
        if strayed := tree.strayed(host.files()):
            host.close()
            raise UsageError(f"--against {tree.ref}: {strayed}.")
        return host

    def _host_options(self, unit: Unit) -> dict[str, Any]:
        limits = Deadlines.of(self._choices.timeout)
        return {"convention": unit.convention, "device": unit.device, "deadlines": limits}


def _judge_lacked_memory(record: Record) -> bool:
    return record.status == "error" and record.reason.startswith(LACKED)


def _compiling(host: KernelHost) -> float:
    """Return seconds so far; of kernels in this process nobody listens."""
    return host.executor.compiling if isinstance(host.executor, IsolatedExecutor) else 0.0


def _as_flaky(answer: Answer, first: Died) -> Answer:
    """Return an answer as flaky, since the first process died before the question was asked."""
    record = answer.record
    if record.status not in FAILED_STATUSES:
        reason = f"{first.kind}: {first}; asked once more, in a new process: {record.status}"
        record = replace(record, status="flaky", reason=reason)
    return replace(answer, record=record, attempts=answer.attempts + 1)
