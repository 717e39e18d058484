"""What a lane of ``attncheck faults`` does: one fault in one host, planted, asked about, scored.

The kernel is called in the lane's own process, which is quick, and lets other projects' rules see
what it gives. Where that process dies the lane is replaced, and the unit done once more, alone:
with the kernel in a process of its own then.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import UNSET, to_builtins
from msgspec.structs import replace

from attncheck.errors import UsageError
from attncheck.examine.answer import answered
from attncheck.examine.environment import environment, fingerprint, prepare
from attncheck.fault_record import Caught, ControlScore, FaultScore
from attncheck.faults.catalogue import fault_named
from attncheck.faults.choosing import FILE
from attncheck.faults.driving import Drive, Failed, NotScored, wrong
from attncheck.faults.fault import HOSTS, Control, Fault, Host
from attncheck.faults.kernel_file import reference
from attncheck.faults.listening import Listening, Peers
from attncheck.faults.planting import NotPlanted, planted
from attncheck.problem import Case, Problem
from attncheck.record import WRONG, Diagnosis
from attncheck.runner.unit import Done
from attncheck.subjects.builtin import subject_named
from attncheck.subjects.ideal import Ideal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.fault_record import Wrong
    from attncheck.gate_record import Answer
    from attncheck.record import Explanation
    from attncheck.runner.unit import Unit
    from attncheck.subjects.contract import Subject

__all__ = ["CATEGORY_OF_FILES", "Scorer", "ranked", "work"]

CATEGORY_OF_FILES = "own"

_PLANTED = ("planted_", "attncheck_file_")  # what a lane imports for one fault alone
_KINDS_OF_ANSWERS = 5  # of a control's wrong ones, that are told


def work(**options: Any) -> Scorer:
    """The Work of a lane."""
    return Scorer(file=str(options.get("file", "")), stages=str(options.get("stages", "")))


class Scorer:
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
            kernel = reference(Path(self._file), name, folder)
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
                return self._controlled(unit, planted(found, how_named(host), folder), control)
            except NotPlanted as error:
                return replace(control, reason=str(error))
        score = FaultScore(
            fault=name, category=found.category, outcome="harness", discrete=found.discrete, **said
        )
        try:
            kernel = planted(found, how_named(host), folder)
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
        listening, peers = Listening(), Peers(right)
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
            caught = Caught(
                first=wrong(failed.answer),
                shrunk=wrong(smaller) if smaller else None,
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
        drive = self._drive(unit, kernel, Listening())
        flagged: dict[tuple[str, ...], Wrong] = {}
        try:
            for answer, _ in drive.answers():
                if answer.record.status in WRONG:
                    each = wrong(answer)
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

    def _drive(self, unit: Unit, kernel: str, listening: Listening) -> Drive:
        return Drive(
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
    answered(subject_named(kernel), smallest, device=device)


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


def _first_wrong(drive: Drive, listening: Listening, peers: Peers) -> Failed | None:
    for answer, smaller in drive.answers():
        if answer.record.status != "unsupported":
            peers.hear(Case.from_json(answer.record.case), listening.heard)
        if answer.record.status in WRONG:
            return Failed(answer, smaller)
    return None


def _where(unit: Unit, drive: Drive) -> dict[str, Any]:
    described = bool(drive.environment)
    return {"environment": fingerprint(environment(unit.device)) if described else ""}


def _diagnosed(first: Answer, smaller: Answer | None, named: tuple[str, ...]) -> dict[str, Any]:
    """What the diagnosis says: the smallest failure's, which is of both, or the first one's."""
    for answer in (smaller, first):
        found = answer.record.diagnosis if answer is not None else UNSET
        if isinstance(found, Diagnosis):
            rank = ranked(found.ranked, named)
            return {"diagnosis": found.ranked, "tied": found.tied, "rank": rank}
    return {}


def ranked(diagnosis: tuple[Explanation, ...], named: tuple[str, ...]) -> int:
    """At which place of ``diagnosis`` the first of ``named`` stands, from 1; 0 where none does."""
    places = (place for place, each in enumerate(diagnosis, 1) if each.model in named)
    return next(places, 0)
