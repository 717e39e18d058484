"""Score a fault: plant it, run a gate against it until it is caught, and diagnose the failure.

The kernel is called in the worker's own process, which is quick, and lets other projects' rules see
its outputs. If that process dies, the worker is replaced, and the unit is repeated alone, with the
kernel in a process of its own.
"""

from __future__ import annotations

import faulthandler
import heapq
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import UNSET, to_builtins
from msgspec.structs import replace

from attncheck.core.errors import AttncheckError, UnknownName, UsageError
from attncheck.core.sanitize_text import one_line
from attncheck.faults.catalogue import HOSTS, Control, fault_named
from attncheck.faults.fault_selection import FILE, file_fault_reference, new_score
from attncheck.faults.patching import NotPlanted
from attncheck.faults.peer_rules import PeerRules, RecordingExecutor
from attncheck.faults.planting import plant
from attncheck.gate.gate_worker import GateWorker
from attncheck.gate.plan import describe_units, priority
from attncheck.gate.planning import Choices, parse_stages
from attncheck.gate.property_stage import KnownFailures
from attncheck.inputs.problem import Case, Problem
from attncheck.records.fault_scores import ControlScore, Detection, FaultScore, WrongAnswer
from attncheck.records.record import FAILED_STATUSES, Diagnosis, Explanation, Record, reason_of
from attncheck.records.run_reports import Answer
from attncheck.subjects.capabilities.named_kernels import subject_named
from attncheck.subjects.capabilities.subject import Subject
from attncheck.subjects.ideal import Ideal
from attncheck.verify.environment import environment, prepare
from attncheck.verify.executor import LACKED
from attncheck.verify.isolated import Deadlines
from attncheck.verify.run_case import run_case
from attncheck.workers.units import Unit, UnitResult

CATEGORY_OF_FILES = "own"

# Errors of planted code that is broken: a mistake in the patch or the user's file, not a fault.
_BROKEN = re.compile(
    r"(?:^|raised )(?:ImportError|ModuleNotFoundError|NameError|UnboundLocalError|SyntaxError"
    r"|IndentationError|AttributeError|CompilationError|UnsupportedLanguageConstruct)\b"
)
_PATIENCE = 2 * Deadlines().compile  # most seconds for one question
_PLANTED = ("planted_", "attncheck_file_")  # prefixes of modules imported for one fault only
_KINDS_OF_ANSWERS = 5  # most kinds of a control's wrong answers that are reported


class NotScored(AttncheckError):
    """Raised for a planted kernel that does not run, or supports no question of the gate."""


class GateRun:
    """A whole gate against one kernel, in this process, in the order of a gate's workers.

    Args:
        unit: Gives the device, tier and dtype. If it is ``alone``, the kernel gets a process of its
            own, which is slower, and where it may crash or hang.
        stages: Names of stages, comma-separated; empty for all.

    Attributes:
        recording: Holds the first call of the last question.
        problems: Number of questions answered so far that the kernel supports.
        seconds: Time taken so far to describe the kernel, draw inputs and ask questions.
        environment: Key and facts of the environment, once the kernel is described.
    """

    def __init__(self, kernel: str, unit: Unit, stages: str) -> None:
        self.recording = RecordingExecutor()
        choices = Choices.of_tier(
            unit.tier,
            isolated=unit.alone,
            dtypes=(unit.dtype,) if unit.dtype else (),
            stages=parse_stages([name for name in stages.split(",") if name]),
        )
        # No failure counts as known: known failures of a right kernel would hide the fault.
        self._gate = GateWorker(choices, KnownFailures(()), lambda: self.recording)
        self._is_watched = not unit.alone
        self._queue: list[tuple[tuple[int, ...], int, Unit]] = []
        self._seen: set[str] = set()
        self.problems, self.seconds = 0, 0.0
        self.environment: dict[str, object] = {}
        self._add(describe_units([kernel], device=unit.device, tier=unit.tier, convention=""))

    def close(self) -> None:
        """Close the gate and its processes."""
        self._gate.close()

    def answers(self) -> Iterator[tuple[Answer, tuple[Unit, ...]]]:
        """Yield each answer, with the units that would shrink a wrong one.

        Raises:
            NotScored: where the gate cannot run, or the kernel's code is broken.
        """
        while self._queue:
            *_, unit = heapq.heappop(self._queue)
            done = self._do(unit)
            self.seconds += done.seconds
            smaller = tuple(each for each in done.units if each.kind == "shrink")
            for answer in done.answers:
                self.problems += answer.record.status != "unsupported"
                _check_runs(answer.record)
                yield answer, smaller
            # The caller decides whether to shrink failures: those of a control are not shrunk.
            self._add(each for each in done.units if each.kind != "shrink")
        if not self.problems:
            raise NotScored("it takes nothing of what the gate asks: nothing was asked of it.")

    def shrink(self, units: Iterable[Unit]) -> tuple[Answer | None, float]:
        """Return the smallest failure that ``units`` find, or None, and the seconds taken."""
        seconds, smallest = 0.0, None
        for unit in units:
            done = self._gate.do(unit)
            seconds += done.seconds
            smallest = next(iter(done.answers), smallest)
        return smallest, seconds

    def _do(self, unit: Unit) -> UnitResult:
        # A kernel that hangs ends this process; it is then scored again, alone.
        if self._is_watched:
            faulthandler.dump_traceback_later(_PATIENCE, exit=True)
        self.recording.forget()
        try:
            done = self._gate.do(unit)
        finally:
            if self._is_watched:
                faulthandler.cancel_dump_traceback_later()
        reason = done.harness or str(done.facts.get("absent") or done.facts.get("missing") or "")
        if reason:
            raise NotScored(one_line(reason))
        if unit.kind == "describe":
            self.environment = dict(done.facts["environment"])
        return done

    def _add(self, units: Iterable[Unit]) -> None:
        for unit in units:
            # Two answers may ask for the same further work.
            if unit.id not in self._seen:
                self._seen.add(unit.id)
                heapq.heappush(self._queue, (priority(unit), len(self._seen), unit))


def _check_runs(record: Record) -> None:
    """Raise NotScored if an error shows that the kernel's code, or attncheck's, is broken."""
    if record.judgement is None and LACKED in record.reason:
        raise NotScored(one_line(record.reason))
    if record.status not in FAILED_STATUSES or record.judgement is not None:
        return
    if _BROKEN.search(record.reason):
        raise NotScored(one_line(f"what was planted is no kernel: {record.reason}"))


def _wrong_answer(answer: Answer) -> WrongAnswer:
    record = answer.record
    return WrongAnswer(
        stage=answer.stage,
        question=str(record.case["question"]),
        status=record.status,
        rule=record.judgement.rule if record.judgement else "",
        reason=one_line(reason_of(record)),
        variant=record.variant,
        problem=str(Case.from_json(record.case).problem),
        case=record.case,
    )


class FaultScorer:
    """Scores faults, one after the other.

    Args:
        stages: Stages of the gate, comma-separated; all by default.
    """

    def __init__(self, *, file: str = "", stages: str = "") -> None:
        self._file, self._stages = file, stages

    def close(self) -> None:
        """Do nothing: no resources are held."""

    def do(self, unit: Unit) -> UnitResult:
        """Return the score of ``unit``, a fault or control, in ``facts``.

        Never raises for what the kernel does. A planted kernel that does not run gets a score that
        says so, and not a result with ``harness``, so that the report shows it with its fault.
        """
        name, _, host = unit.kernel.rpartition("@")
        prepare(unit.device)
        _warm_up("triton-flash2" if host == "triton" else "ideal", unit.device)
        start = time.perf_counter()
        with _planting_folder() as folder:
            if host == FILE:
                score: FaultScore | ControlScore = self._score_file_fault(unit, name, folder)
            else:
                score = self._score_catalogue_fault(unit, name, host, folder)
        facts: dict[str, Any] = {"score": to_builtins(score)}
        facts["kind"] = "control" if isinstance(score, ControlScore) else "fault"
        if score.environment:
            facts["environment"] = to_builtins(environment(unit.device))
        return UnitResult(unit=unit.id, facts=facts, seconds=round(time.perf_counter() - start, 3))

    def _score_file_fault(self, unit: Unit, name: str, folder: Path) -> FaultScore:
        score = FaultScore(
            fault=name,
            category=CATEGORY_OF_FILES,
            host=FILE,
            kernel=Path(self._file).name,
            outcome="harness",
            discrete=False,
            **_where(unit),
        )
        try:
            kernel = file_fault_reference(Path(self._file), name, folder)
        except UsageError as error:
            return replace(score, reason=str(error))
        return self._score_fault(unit, kernel, score, right=Ideal())

    def _score_catalogue_fault(
        self, unit: Unit, name: str, host: str, folder: Path
    ) -> FaultScore | ControlScore:
        if host not in HOSTS:
            raise UnknownName("host", host, HOSTS)
        fault = fault_named(name)
        how = fault.hosts.get(host)
        if how is None:
            raise UsageError(f"{name} is not planted in {host}.")
        facts = _where(unit) | {"host": host, "kernel": how.kernel, "outcome": "harness"}
        score = new_score(fault, **facts)
        try:
            kernel = plant(fault, host, folder)
        except NotPlanted as error:
            return replace(score, reason=str(error))
        if isinstance(score, ControlScore):
            return self._score_control(unit, kernel, score)
        assert not isinstance(fault, Control), "scored as a fault"
        # The kernel without the fault: a rule that rejects it has caught nothing.
        right = subject_named(how.kernel)
        return self._score_fault(unit, kernel, score, right=right, named=fault.named)

    def _score_fault(
        self,
        unit: Unit,
        kernel: str,
        score: FaultScore,
        *,
        right: Subject,
        named: tuple[str, ...] = (),
    ) -> FaultScore:
        """Run the gate until the first wrong answer, shrink that, and return the score."""
        peers = PeerRules(right)
        with closing(GateRun(kernel, unit, self._stages)) as run:
            try:
                failure = _first_failure(run, peers)
                score = replace(score, **_counts(run, unit), peers=peers.verdicts)
                if failure is None:
                    return replace(score, outcome="missed")
                first, shrinking = failure
                # A kernel that ends its process costs two processes a question: do not shrink.
                smaller, seconds = run.shrink(() if unit.alone else shrinking)
            except NotScored as error:
                return replace(score, outcome="harness", reason=str(error))
        caught = Detection(
            first=_wrong_answer(first),
            shrunk=_wrong_answer(smaller) if smaller else None,
            shrinking=round(seconds, 3),
        )
        # The diagnosis of the smaller failure covers both; without one take the first failure's.
        diagnoses = [answer.record.diagnosis for answer in (smaller, first) if answer is not None]
        diagnosis = next((each for each in diagnoses if isinstance(each, Diagnosis)), UNSET)
        if isinstance(diagnosis, Diagnosis):
            rank = rank_of(diagnosis.ranked, named)
            score = replace(score, diagnosis=diagnosis.ranked, tied=diagnosis.tied, rank=rank)
        return replace(score, outcome="caught", caught=caught)

    def _score_control(self, unit: Unit, kernel: str, control: ControlScore) -> ControlScore:
        """Run the whole gate, and return the score with one wrong answer of each kind."""
        flagged: dict[tuple[str, ...], WrongAnswer] = {}
        with closing(GateRun(kernel, unit, self._stages)) as run:
            try:
                for answer, _ in run.answers():
                    if answer.record.status in FAILED_STATUSES:
                        wrong = _wrong_answer(answer)
                        kind = (wrong.stage, wrong.question, wrong.status, wrong.rule)
                        flagged.setdefault(kind, wrong)
            except NotScored as error:
                return replace(control, outcome="harness", reason=str(error))
        return replace(
            control,
            outcome="flagged" if flagged else "clean",
            flagged=tuple(flagged.values())[:_KINDS_OF_ANSWERS],
            **_counts(run, unit),
        )


def _where(unit: Unit) -> dict[str, Any]:
    return {"device": unit.device, "dtype": unit.dtype, "tier": unit.tier}


@cache
def _warm_up(kernel: str, device: str) -> None:
    """Ask a right kernel one question, so that one-time loading counts in no score."""
    smallest = Case(problem=Problem(query=1, kv=1))
    run_case(subject_named(kernel), smallest, device=device)


@contextmanager
def _planting_folder() -> Iterator[Path]:
    """Yield a folder for planted code; remove it and the modules imported from it afterwards."""
    paths = list(sys.path)
    with tempfile.TemporaryDirectory(prefix="attncheck_fault_") as folder:
        try:
            yield Path(folder)
        finally:
            # A planted file adds its folder to ``sys.path``, and imports its package from there.
            sys.path[:] = paths
            for name in [name for name in sys.modules if name.startswith(_PLANTED)]:
                del sys.modules[name]


def _first_failure(run: GateRun, peers: PeerRules) -> tuple[Answer, tuple[Unit, ...]] | None:
    """Return the first wrong answer, and the units that would shrink it."""
    for answer, smaller in run.answers():
        if answer.record.status != "unsupported":
            # Apply the rules to passes, too: they may reject the kernel before the gate does.
            peers.apply(Case.from_json(answer.record.case), run.recording.first_call)
        if answer.record.status in FAILED_STATUSES:
            return answer, smaller
    return None


def _counts(run: GateRun, unit: Unit) -> dict[str, Any]:
    described = bool(run.environment)
    return {
        "problems": run.problems,
        "seconds": round(run.seconds, 3),
        "environment": environment(unit.device).id if described else "",
    }


def rank_of(diagnosis: tuple[Explanation, ...], named: tuple[str, ...]) -> int:
    """Return the best rank in ``diagnosis`` of a model in ``named``, from 1; 0 if none is there."""
    places = (place for place, each in enumerate(diagnosis, 1) if each.model in named)
    return next(places, 0)
