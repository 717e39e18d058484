"""Score a fault: plant it, drive a gate against it, and diagnose what fails.

The kernel is called in the lane's own process, which is quick, and lets other projects' rules see
what it gives. Where that process dies the lane is replaced, and the unit done once more, alone:
with the kernel in a process of its own then.
"""

from __future__ import annotations

import faulthandler
import heapq
import re
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import UNSET, to_builtins
from msgspec.structs import replace

from attncheck.capabilities.named_kernels import subject_named
from attncheck.core.errors import AttncheckError, UsageError
from attncheck.core.sanitize_text import one_line
from attncheck.faults.catalogue import fault_named
from attncheck.faults.fault import HOSTS, Control, Fault, Host
from attncheck.faults.fault_selection import FILE, file_fault_reference
from attncheck.faults.peer_rules import PeerRules, RecordingExecutor
from attncheck.faults.planting import NotPlanted, plant
from attncheck.gate.choices import Choices
from attncheck.gate.known import Known
from attncheck.gate.plan import describing, priority
from attncheck.gate.work import Gate
from attncheck.inputs.problem import Case, Problem
from attncheck.records.fault_scores import ControlScore, Detection, FaultScore, WrongAnswer
from attncheck.records.record import FAILED_STATUSES, Diagnosis
from attncheck.subjects.ideal import Ideal
from attncheck.verify.environment import environment, fingerprint, prepare
from attncheck.verify.run_case import run_case
from attncheck.verify.remote_kernel import Deadlines
from attncheck.workers.units import Done

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from attncheck.capabilities.subject import Subject
    from attncheck.records.record import Explanation, Record
    from attncheck.records.run_reports import Answer
    from attncheck.workers.units import Unit

__all__ = [
    "CATEGORY_OF_FILES",
    "FaultScorer",
    "FirstFailure",
    "GateRun",
    "NotScored",
    "rank_of",
    "work",
    "wrong_answer",
]


# What a planted text raises that is no kernel: its fault is ours, or of who wrote the variant.
_BROKEN = re.compile(
    r"(?:^|raised )(?:ImportError|ModuleNotFoundError|NameError|UnboundLocalError|SyntaxError"
    r"|IndentationError|AttributeError|CompilationError|UnsupportedLanguageConstruct)\b"
)
_NO_TRUTH = "out of memory for"  # what a Record says where the judge had none
_PATIENCE = 2 * Deadlines().compile  # seconds that one question may take


class NotScored(AttncheckError):
    """What was planted does not run, or was asked nothing: neither caught nor missed."""


class FirstFailure(NamedTuple):
    """The first wrong answer, and the work that would make it smaller."""

    answer: Answer
    shrinking: tuple[Unit, ...]


class GateRun:
    """All of a gate against one kernel, until somebody has seen enough.

    Args:
        kernel: As ``subjects.load.load`` takes it.
        device: ``cpu`` or ``cuda``.
        tier: How hard.
        dtype: In which; empty for all that it takes.
        stages: Which, between commas; empty for all.
        isolated: Whether the kernel has a process of its own: slower, and it may crash or hang.
        listening: Calls a kernel that has none; hears of each question's first call.

    Attributes:
        problems: Questions answered so far, and taken.
        seconds: That describing, drawing and asking took so far.
        environment: Key and facts of where, once the kernel is described.
    """

    def __init__(  # one kernel, said once
        self,
        kernel: str,
        *,
        device: str,
        tier: str,
        dtype: str,
        stages: str,
        isolated: bool,
        listening: RecordingExecutor,
    ) -> None:
        options: dict[str, str | bool] = {
            "tier": tier,
            "isolated": isolated,
            "dtypes": dtype,
            "stages": stages,
        }
        self._gate = Gate(Choices.of(options), Known(()), lambda: listening)
        self._listening = listening
        self._watched = not isolated
        self._queue: list[tuple[tuple[int, ...], int, Unit]] = []
        self._seen: set[str] = set()
        self.problems, self.seconds = 0, 0.0
        self.environment: dict[str, object] = {}
        self._add(describing([kernel], device=device, tier=tier, convention=""))

    def close(self) -> None:
        """End what was started."""
        self._gate.close()

    def answers(self) -> Iterator[tuple[Answer, tuple[Unit, ...]]]:
        """Each answer, with the work that would make a wrong one smaller.

        Raises:
            NotScored: where the gate cannot ask, or the kernel's own text is broken.
        """
        while self._queue:
            *_, unit = heapq.heappop(self._queue)
            done = self._did(unit)
            self.seconds += done.seconds
            smaller = tuple(each for each in done.units if each.kind == "shrink")
            for answer in done.answers:
                self.problems += answer.record.status != "unsupported"
                _check_runs(answer.record)
                yield answer, smaller
            self._add(each for each in done.units if each.kind != "shrink")
        if not self.problems:
            raise NotScored("it takes nothing of what the gate asks: nothing was asked of it.")

    def shrunk(self, units: Iterable[Unit]) -> tuple[Answer | None, float]:
        """The smallest failure alike, None where none is smaller; and the seconds that took."""
        seconds, found = 0.0, None
        for unit in units:
            done = self._gate.do(unit)
            seconds += done.seconds
            found = next(iter(done.answers), found)
        return found, seconds

    def _did(self, unit: Unit) -> Done:
        if self._watched:  # a kernel that hangs takes this process with it: it is scored alone then
            faulthandler.dump_traceback_later(_PATIENCE, exit=True)
        self._listening.forget()
        try:
            done = self._gate.do(unit)
        finally:
            if self._watched:
                faulthandler.cancel_dump_traceback_later()
        said = done.harness or str(done.facts.get("absent") or done.facts.get("missing") or "")
        if said:
            raise NotScored(one_line(said))
        if unit.kind == "describe":
            self.environment = dict(done.facts["environment"])
        return done

    def _add(self, units: Iterable[Unit]) -> None:
        for unit in units:
            if unit.id not in self._seen:
                self._seen.add(unit.id)
                heapq.heappush(self._queue, (priority(unit), len(self._seen), unit))


def wrong_answer(answer: Answer) -> WrongAnswer:
    """What a report says of a wrong answer."""
    record = answer.record
    judged = record.judgement
    return WrongAnswer(
        stage=answer.stage,
        question=str(record.case["question"]),
        status=record.status,
        rule=judged.rule if judged else "",
        reason=one_line(record.reason or (judged.reason if judged else "")),
        variant=record.variant,
        problem=str(Case.from_json(record.case).problem),
        case=record.case,
    )


def _check_runs(record: Record) -> None:
    """Raises NotScored where what the kernel raised says that its text is broken, or ours is."""
    if record.status not in FAILED_STATUSES or record.judgement is not None:
        return
    if _BROKEN.search(record.reason):
        raise NotScored(one_line(f"what was planted is no kernel: {record.reason}"))
    if record.reason.startswith(_NO_TRUTH):
        raise NotScored(one_line(record.reason))


CATEGORY_OF_FILES = "own"

_PLANTED = ("planted_", "attncheck_file_")  # what a lane imports for one fault alone
_KINDS_OF_ANSWERS = 5  # of a control's wrong ones, that are told


def work(**options: Any) -> FaultScorer:
    """The Work of a lane."""
    return FaultScorer(file=str(options.get("file", "")), stages=str(options.get("stages", "")))


class FaultScorer:
    """Scores faults, one after the other.

    Args:
        file: Somebody's own faults; empty for none.
        stages: Of the gate, between commas; all unless told.
    """

    def __init__(self, *, file: str = "", stages: str = "") -> None:
        self._file, self._stages = file, stages

    def close(self) -> None:
        """Nothing is left open."""

    def do(self, unit: Unit) -> Done:
        """The score of ``unit``, a fault or control, in ``facts``; raises nothing of its kernel's.

        What was planted and does not run is a score of its own, and no result's ``harness``: the
        report says it of that fault.
        """
        name, _, host = unit.kernel.rpartition("@")
        prepare(unit.device)
        _started("triton-flash2" if host == "triton" else "ideal", unit.device)
        start = time.perf_counter()
        with _planting() as folder:
            if host == FILE:
                score: FaultScore | ControlScore = self._of_file(unit, name, folder)
            else:
                score = self._of_catalogue(unit, name, host, folder)
        facts: dict[str, Any] = {"score": to_builtins(score)}
        facts["kind"] = "control" if isinstance(score, ControlScore) else "fault"
        if score.environment:
            facts["environment"] = to_builtins(environment(unit.device))
        seconds = round(time.perf_counter() - start, 3)
        return Done(unit=unit.id, facts=facts, seconds=seconds)

    def _of_file(self, unit: Unit, name: str, folder: Path) -> FaultScore:
        score = FaultScore(
            fault=name,
            category=CATEGORY_OF_FILES,
            host=FILE,
            kernel=Path(self._file).name,
            outcome="harness",
            discrete=False,
            **_asked(unit),
        )
        try:
            kernel = file_fault_reference(Path(self._file), name, folder)
        except UsageError as error:
            return replace(score, reason=str(error))
        return self._scored(unit, kernel, score, right=Ideal())

    def _of_catalogue(
        self, unit: Unit, name: str, host: str, folder: Path
    ) -> FaultScore | ControlScore:
        found, how = _planned(name, host)
        said = _asked(unit) | {"host": host, "kernel": how.kernel, "summary": found.summary}
        if isinstance(found, Control):
            control = ControlScore(control=name, outcome="harness", **said)
            try:
                return self._controlled(unit, plant(found, how_named(host), folder), control)
            except NotPlanted as error:
                return replace(control, reason=str(error))
        score = FaultScore(
            fault=name, category=found.category, outcome="harness", discrete=found.discrete, **said
        )
        try:
            kernel = plant(found, how_named(host), folder)
        except NotPlanted as error:
            return replace(score, reason=str(error))
        right = subject_named(how.kernel)
        return self._scored(unit, kernel, score, right=right, named=found.named)

    def _scored(
        self,
        unit: Unit,
        kernel: str,
        score: FaultScore,
        *,
        right: Subject,
        named: tuple[str, ...] = (),
    ) -> FaultScore:
        """Asks until the first wrong answer, and makes that smaller."""
        listening, peers = RecordingExecutor(), PeerRules(right)
        drive = self._drive(unit, kernel, listening)
        try:
            failed = _first_wrong(drive, listening, peers)
            counts: dict[str, Any] = {
                "problems": drive.problems,
                "seconds": round(drive.seconds, 3),
            }
            score = replace(score, **counts, **_where(unit, drive), peers=peers.said)
            if failed is None:
                return replace(score, outcome="missed")
            # Of one that ends its process each question costs two processes: it is left as it is.
            smaller, shrinking = drive.shrunk(() if unit.alone else failed.shrinking)
            caught = Detection(
                first=wrong_answer(failed.answer),
                shrunk=wrong_answer(smaller) if smaller else None,
                shrinking=round(shrinking, 3),
            )
            said = _diagnosed(failed.answer, smaller, named)
            return replace(score, outcome="caught", caught=caught, **said)
        except NotScored as error:
            return replace(score, outcome="harness", reason=str(error))
        finally:
            drive.close()

    def _controlled(self, unit: Unit, kernel: str, control: ControlScore) -> ControlScore:
        """Asks everything; wrong answers of one kind are told once."""
        drive = self._drive(unit, kernel, RecordingExecutor())
        flagged: dict[tuple[str, ...], WrongAnswer] = {}
        try:
            for answer, _ in drive.answers():
                if answer.record.status in FAILED_STATUSES:
                    each = wrong_answer(answer)
                    flagged.setdefault((each.stage, each.question, each.status, each.rule), each)
        except NotScored as error:
            return replace(control, outcome="harness", reason=str(error))
        finally:
            drive.close()
        return replace(
            control,
            outcome="flagged" if flagged else "clean",
            problems=drive.problems,
            seconds=round(drive.seconds, 3),
            flagged=tuple(flagged.values())[:_KINDS_OF_ANSWERS],
            **_where(unit, drive),
        )

    def _drive(self, unit: Unit, kernel: str, listening: RecordingExecutor) -> GateRun:
        return GateRun(
            kernel,
            device=unit.device,
            tier=unit.tier,
            dtype=unit.dtype,
            stages=self._stages,
            isolated=unit.alone,  # it brought a lane down
            listening=listening,
        )


@cache
def _started(kernel: str, device: str) -> None:
    """One question to a right kernel: what a process loads once is no part of any score."""
    smallest = Case(problem=Problem(query=1, kv=1))
    run_case(subject_named(kernel), smallest, device=device)


@contextmanager
def _planting() -> Iterator[Path]:
    """A folder for what is planted, which is forgotten with all that was imported from it."""
    paths = list(sys.path)
    with tempfile.TemporaryDirectory(prefix="attncheck_fault_") as folder:
        try:
            yield Path(folder)
        finally:
            sys.path[:] = paths
            for name in [name for name in sys.modules if name.startswith(_PLANTED)]:
                del sys.modules[name]


def how_named(host: str) -> Any:
    """``host`` as a HostName; raises UsageError for another word."""
    if host not in HOSTS:
        raise UsageError(f"host {host!r} is not known: choose from {', '.join(HOSTS)}.")
    return host


def _planned(name: str, host: str) -> tuple[Fault | Control, Host]:
    found = fault_named(name)
    how = found.hosts.get(how_named(host))
    if how is None:
        raise UsageError(f"{name} is not planted in {host}.")
    return found, how


def _asked(unit: Unit) -> dict[str, Any]:
    return {"device": unit.device, "dtype": unit.dtype, "tier": unit.tier}


def _first_wrong(
    drive: GateRun, listening: RecordingExecutor, peers: PeerRules
) -> FirstFailure | None:
    for answer, smaller in drive.answers():
        if answer.record.status != "unsupported":
            peers.hear(Case.from_json(answer.record.case), listening.heard)
        if answer.record.status in FAILED_STATUSES:
            return FirstFailure(answer, smaller)
    return None


def _where(unit: Unit, drive: GateRun) -> dict[str, Any]:
    described = bool(drive.environment)
    return {"environment": fingerprint(environment(unit.device)) if described else ""}


def _diagnosed(first: Answer, smaller: Answer | None, named: tuple[str, ...]) -> dict[str, Any]:
    """What the diagnosis says: the smallest failure's, which is of both, or the first one's."""
    for answer in (smaller, first):
        found = answer.record.diagnosis if answer is not None else UNSET
        if isinstance(found, Diagnosis):
            rank = rank_of(found.ranked, named)
            return {"diagnosis": found.ranked, "tied": found.tied, "rank": rank}
    return {}


def rank_of(diagnosis: tuple[Explanation, ...], named: tuple[str, ...]) -> int:
    """At which place of ``diagnosis`` the first of ``named`` stands, from 1; 0 where none does."""
    places = (place for place, each in enumerate(diagnosis, 1) if each.model in named)
    return next(places, 0)
