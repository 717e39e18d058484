"""The worker of a gate, which describes a kernel, draws and asks cases, and shrinks failures.

The worker is a trusted process; the kernel itself runs in another one.
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
from attncheck.core.judgement import Unclaimed
from attncheck.core.mod_spec import Spec
from attncheck.core.strided_alloc import (
    others_hold_memory,
    release_cached_memory,
    release_scarce_memory,
)
from attncheck.gate.bound_stage import REUSE_SUFFIX
from attncheck.gate.gate_failures import SHRUNK_STATUSES, FailureLog
from attncheck.gate.plan import covering_units, plan_kernel
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
from attncheck.verify.isolated import Deadlines, IsolatedExecutor, IsolatedKernel
from attncheck.verify.kernel_hosts import KernelHost, on_terms, open_kernel
from attncheck.verify.relation_runs import TOO_SMALL
from attncheck.verify.run_case import run_case
from attncheck.workers.process import Died
from attncheck.workers.units import Unit, UnitResult

# Number of (row, key) pairs over all heads up to which answers are judged on a CPU. For small
# problems a core is faster than a GPU that a dozen processes share: on an H100 with fifteen cores,
# the smallest took 0.07 s instead of 0.28 s, but four times as many pairs 0.45 s instead of 0.22 s.
_MOST_PAIRS_ON_CPU = 1 << 16
# The limit if the GPU has no memory for the judge; this takes half a minute on a core.
_MOST_PAIRS_AS_FALLBACK = 1 << 24
# Seconds to wait, in turn, until other processes on a GPU free memory.
_WAITS = (0.5, 2.0, 8.0)
_READING_MOD = Spec.of("relative_bias", distance=1, seed=0)  # A score mod that reads a tensor.
_UNCLAIMED = "not refused: "  # Prefix of the variant of a question beyond a kernel's claims.


def work(*, ahead: str = "", **options: Any) -> GateWorker:
    """Return the worker of a gate; raise UsageError for invalid options.

    Args:
        ahead: JSON of a unit whose kernel is loaded in advance; empty for none.
        options: The fields of ``Choices``.
    """
    worker = GateWorker(Choices.of(options))
    if ahead:
        worker.load(msgspec.json.decode(ahead, type=Unit))
    return worker


class GateWorker:
    """Does the units of a gate, one after the other.

    Args:
        known: Known failures; by default those in the folder of the properties.
        here: Factory of the executor of kernels that run in this process.
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
        """Load the kernel of ``unit`` in advance; errors are ignored, since asking repeats them."""
        with suppress(Exception):
            self._prepare_device(unit.device)
            host = self._hosts.of(unit)
            # Tracing a mod imports large parts of torch, in this process and the kernel's.
            problem = Problem(query=1, score=_READING_MOD, backward=True, dcaptured=True)
            host.executor.concerns(host.subject, problem)

    def do(self, unit: Unit) -> UnitResult:
        """Do ``unit``; the death of the kernel's process is a result and raises nothing."""
        start = time.perf_counter()
        try:
            done = self._do_with_retry(unit)
        except MissingKernelError as error:
            done = UnitResult(unit=unit.id, facts={"missing": str(error)})
        except UsageError as error:  # an error in the Case, not on the command line
            done = UnitResult(unit=unit.id, harness=f"{unit.kind} of {unit.kernel}: {error}")
        except HostError as error:
            self._hosts.end(unit.commit)
            done = UnitResult(unit=unit.id, harness=f"{unit.kind} of {unit.kernel}: {error}")
        release_scarce_memory(unit.device)
        seconds = round(time.perf_counter() - start, 3)
        return replace(
            done, seconds=seconds, facts=done.facts | self._environment_facts(unit, done)
        )

    def _environment_facts(self, unit: Unit, done: UnitResult) -> dict[str, Any]:
        """Return the environment of the unit's Records, since workers may be on several machines.

        Units that every shard does always include it, so that their results agree; other units
        include it once per worker.
        """
        shared = unit.kind in {"describe", "draw"}
        if not done.answers or (self._reported == self._key and not shared):
            return {}
        self._reported = self._reported if shared else self._key
        return {"environment": msgspec.to_builtins(environment(unit.device))}

    def _do_with_retry(self, unit: Unit) -> UnitResult:
        """Do a unit, and repeat it in a new process if the kernel's process dies.

        An ``ask`` that is right the second time is flaky; other units, which every shard may do,
        are not marked, so that shards agree.
        """
        try:
            return self._load_and_do(unit)
        except Died as error:
            first = error
        # An earlier case may be the cause of the death, so it is repeated in a new process.
        self._hosts.end(unit.commit)
        try:
            done = self._load_and_do(unit)
        except Died as second:
            return self._report_death(unit, second if second.kind == first.kind else first)
        is_question = unit.kind == "ask"
        answers = tuple(_as_flaky(each, first) if is_question else each for each in done.answers)
        return replace(done, answers=answers, attempts=2)

    def _load_and_do(self, unit: Unit) -> UnitResult:
        try:
            self._prepare_device(unit.device)
            host = self._hosts.of(unit)
        except UsageError as error:
            return UnitResult(unit=unit.id, facts={"usage": str(error)}, harness=str(error))
        if unit.kind == "describe":
            return self._describe(unit, host)
        if unit.kind == "draw":
            planning = self._planning(unit, host)
            if unit.draws_stages:
                units = covering_units(planning)
            else:
                units = drawn_units(unit, planning, self._known)
            return UnitResult(unit=unit.id, units=tuple(units), answers=tuple(planning.refused))
        if unit.kind == "shrink":
            return self._shrink(unit, host)
        if unit.variant.startswith(SANITIZER_VARIANT):
            return sanitize_kernel(unit, self._planning(unit, host))
        return self._ask_case(unit, host)

    def _prepare_device(self, device: str) -> None:
        """Prepare ``device`` for kernels on the first call, and determine its environment."""
        if self._device == device:
            return
        import torch

        torch.set_num_threads(1)  # more threads do not pay at these sizes
        prepare(device)
        self._device, self._key = device, environment(device).id

    def _planning(self, unit: Unit, host: KernelHost) -> Planning:
        # Cached as long as the kernel's process lives; a new one may give other answers.
        if self._cached_executor is None or self._cached_executor[0] is not host:
            self._cached_executor = (host, CachingExecutor(host.executor))
        claims = self._claims(unit)
        return Planning(
            unit,
            host.subject,
            self._cached_executor[1],
            self._choices,
            self._key,
            lse_loss_refusal=claims.lse_loss_refusal() if claims is not None else "",
        )

    def _claims(self, unit: Unit) -> Claims | None:
        """Return the claims of a plain function; None for another kernel, or another commit's."""
        return None if unit.commit else self._hosts.claims

    def _describe(self, unit: Unit, host: KernelHost) -> UnitResult:
        facts: dict[str, Any] = {
            "kernel": unit.kernel,
            "name": host.subject.name,
            "summary": host.subject.summary,
            "absent": host.executor.absence(host.subject, unit.device) or "",
            "environment": msgspec.to_builtins(environment(unit.device)),
        }
        # Only a separate process knows its loaded files; those of another commit never change.
        if isinstance(host, IsolatedKernel) and not unit.commit:
            facts |= file_hashes(host.files())
        if facts["absent"]:
            return UnitResult(unit=unit.id, facts=facts)
        planning = self._planning(unit, host)
        units = plan_kernel(planning)
        claims = self._claims(unit)
        if claims is not None:
            facts["summary"] = "; ".join((facts["summary"], *claims.lines()))
            units += self._unclaimed_units(planning, claims)
            if claims.convention != claims.conventions[0]:
                # Further units use the convention that was found instead of searching again.
                units = [replace(each, convention=claims.convention) for each in units]
        return UnitResult(
            unit=unit.id, facts=facts, units=tuple(units), answers=tuple(planning.refused)
        )

    def _unclaimed_units(self, planning: Planning, claims: Claims) -> Iterator[Unit]:
        """Yield units that repeat the questions that the kernel failed beyond its claims.

        Among them are those in a dtype that is requested, and so claimed.
        """
        stages, dtypes = self._choices.stages, self._choices.dtypes
        for question in claims.unclaimed(dtypes=dtypes) if "contract" in stages else ():
            if not dtypes or question.case.problem.dtype in dtypes:
                prefix = _UNCLAIMED if question.unclaimed else ""
                yield planning.unit_of("contract", question.case, f"{prefix}{question.name}")

    def _unclaimed(self, unit: Unit) -> Unclaimed | None:
        """Return what a question asks beyond the kernel's claims; None for one within them."""
        claims = self._claims(unit)
        if claims is None or not unit.variant.startswith(_UNCLAIMED):
            return None
        name = unit.variant.removeprefix(_UNCLAIMED)
        questions = claims.unclaimed([name], dtypes=self._choices.dtypes)
        return next(one.unclaimed for one in questions if one.name == name)

    def _ask_case(self, unit: Unit, host: KernelHost) -> UnitResult:
        case, start = Case.from_json(unit.case), time.perf_counter()
        compiled = _compile_seconds(host)
        record, attempts = self._run_case(unit, host, case)
        record = self._known.excuse(record, unit, case)
        claims, beyond = self._claims(unit), self._unclaimed(unit)
        if claims is not None and beyond is not None:
            record = replace(record, unclaimed=beyond)
            # A failure beyond the claims has to be diagnosed beyond them, too.
            terms = claims.terms(dtypes=self._choices.dtypes)
            host.subject = on_terms(host.subject, replace(terms, table=None))
            record = self._failures.diagnose(record, unit, host)
            host.subject = on_terms(host.subject, terms)
        elif not unit.commit:
            record = self._failures.diagnose(record, unit, host)
        answer = self._answer(
            unit,
            record,
            start,
            compiling=round(_compile_seconds(host) - compiled, 3),
            attempts=attempts,
        )
        # Shrinking is a separate unit, so that other questions come first.
        shrinks = record.status in SHRUNK_STATUSES and not unit.commit and beyond is None
        units = (replace(unit, kind="shrink", alone=False),) if shrinks else ()
        return UnitResult(unit=unit.id, answers=(answer,), units=units, attempts=1)

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
            # Error measures are needed only in the stage bounds; elsewhere the verdict is enough.
            brief = unit.stage != "bounds" or unit.variant.endswith(REUSE_SUFFIX)
            return run_case(host.subject, case, brief=brief, **how)

        def ask() -> Record:
            """Ask; if this process lacks memory for it, retry later and finally judge on a CPU."""
            isolated = self._choices.isolated
            usual = "cpu" if isolated and pairs <= _MOST_PAIRS_ON_CPU else ""
            last = "cpu" if isolated and pairs <= _MOST_PAIRS_AS_FALLBACK else usual
            record = ask_at(usual)
            for wait in _WAITS:
                if not _lacked_memory(record, unit.device):
                    return record
                forget_numbers()
                release_cached_memory(unit.device)
                time.sleep(wait)
                record = ask_at(usual)
            # Elsewhere the judge may have memory; a kernel lacks its own wherever it is judged.
            if last != usual and _judge_lacked_memory(record):
                record = ask_at(last)
            if _judge_lacked_memory(record):  # not the kernel's fault
                reason = f"{TOO_SMALL}: {record.reason}"
                return replace(record, status="unsupported", reason=reason)
            return record

        return confirm_death(host.subject, ask, slow=True)

    def _shrink(self, unit: Unit, host: KernelHost) -> UnitResult:
        """Shrink a failure to a smaller Case, except if similar ones have been shrunk already."""
        start = time.perf_counter()
        shrunk = self._failures.shrink(
            unit,
            host,
            lambda case: self._run_case(unit, host, case)[0],
            lambda: self._planning(unit, host),
        )
        if shrunk is None:
            return UnitResult(unit=unit.id)
        record, first = shrunk
        answer = self._answer(unit, record, start, smallest_of=first)
        return UnitResult(unit=unit.id, answers=(answer,))

    def _answer(self, unit: Unit, record: Record, start: float, **more: Any) -> Answer:
        """Return the answer to a question begun at ``start``, and keep its failure."""
        return Answer(
            unit=unit.id,
            stage=unit.stage,
            record=record,
            test=unit.test,
            seconds=round(time.perf_counter() - start, 3),
            # Another commit's kernel is only measured: its failures are not of interest.
            failure="" if unit.commit else self._failures.keep(record, unit),
            **more,
        )

    def _report_death(self, unit: Unit, error: Died) -> UnitResult:
        """Return the result of a unit whose kernel died during import or planning."""
        self._hosts.end(unit.commit)
        # A Record needs some Case, but a kernel that dies while it is described was asked none.
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
            # It died before it could state its name, so the user's name of it is used.
            names = {"kernel": unit.kernel, "name": unit.kernel}
            facts = {**names, "summary": "", "environment": where}
        return UnitResult(unit=unit.id, answers=(answer,), facts=facts)


class MissingKernelError(AttncheckError):
    """The kernel does not exist in the other commit."""


class _KernelHosts:
    """The hosts of the current kernel at each commit; requesting another kernel ends the old one.

    Args:
        choices: Whether kernels have processes of their own, and how long a call may take.
        here: Factory of the executor of kernels that run in this process.
    """

    def __init__(self, choices: Choices, here: Callable[[], InProcess]) -> None:
        self._choices = choices
        self._executor = here
        self._hosts: dict[str, tuple[tuple[str, str, str], KernelHost]] = {}
        # Claims of the kernel that was started last if it is a plain function; else None.
        self.claims: Claims | None = None

    def of(self, unit: Unit) -> KernelHost:
        """Return the host of a unit's kernel.

        Raises:
            MissingKernelError: if the other commit has no such kernel.
            UsageError: if there is no such kernel here, or the other commit's kernel was loaded
                from files outside of that commit's tree.
            HostError: if its process cannot be started.
        """
        key = (unit.kernel, unit.convention, unit.device)
        current_key, host = self._hosts.get(unit.commit, (None, None))
        if host is not None and key == current_key:
            return host
        # Ended before the next one starts, since both may not fit into the GPU's memory.
        self.end(unit.commit)
        host = self._start_other(unit) if unit.commit else self._start_on_claims(unit)
        self._hosts[unit.commit] = key, host
        return host

    def end(self, commit: str) -> None:
        """End the process of a commit's kernel, if there is one."""
        _, host = self._hosts.pop(commit, (None, None))
        if host is not None:
            host.close()

    def close(self) -> None:
        """End all processes."""
        for commit in tuple(self._hosts):
            self.end(commit)

    def _start_on_claims(self, unit: Unit) -> KernelHost:
        """Start a kernel; for a plain function, find the problems that it takes, its claims."""
        host = open_kernel(
            unit.kernel,
            isolated=self._choices.isolated,
            here=self._executor(),
            **self._host_options(unit),
        )
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

    def _start_other(self, unit: Unit) -> KernelHost:
        """Start another commit's kernel, in a process of its own since module names are equal."""
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
        # Otherwise the working tree would be compared with itself.
        if strayed := tree.strayed(host.files()):
            host.close()
            raise UsageError(f"--against {tree.ref}: {strayed}.")
        return host

    def _host_options(self, unit: Unit) -> dict[str, Any]:
        limits = Deadlines.of(self._choices.timeout)
        return {"convention": unit.convention, "device": unit.device, "deadlines": limits}


def _lacked_memory(record: Record, device: str) -> bool:
    """Return whether there may be more memory for a question later."""
    too_small = record.status == "unsupported" and record.reason.startswith(TOO_SMALL)
    return _judge_lacked_memory(record) or (too_small and others_hold_memory(device))


def _judge_lacked_memory(record: Record) -> bool:
    return record.status == "error" and record.reason.startswith(LACKED)


def _compile_seconds(host: KernelHost) -> float:
    """Return the seconds that compilers took so far; 0 for kernels in this process."""
    return host.executor.compiling if isinstance(host.executor, IsolatedExecutor) else 0.0


def _as_flaky(answer: Answer, first: Died) -> Answer:
    """Return a right answer as flaky, since the kernel's process died in the first attempt."""
    record = answer.record
    if record.status not in FAILED_STATUSES:
        reason = f"{first.kind}: {first}; asked once more, in a new process: {record.status}"
        record = replace(record, status="flaky", reason=reason)
    return replace(answer, record=record, attempts=answer.attempts + 1)
