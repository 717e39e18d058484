"""The session of a run that ``kill_resume.py`` kills; its Work has no kernel."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attncheck.workers import worker_main
from attncheck.workers.journal import Journal
from attncheck.workers.pool import run_units
from attncheck.workers.units import Unit, UnitResult
from attncheck.workers.worker_pool import WorkerPlace

if TYPE_CHECKING:
    from attncheck.workers.pool import RunEvent

__all__ = ["JOURNALS", "Plan", "session", "work"]

_LONGEST_UNIT = 0.01  # seconds


@dataclass(frozen=True)
class Plan:
    """Units that are determined by the plan's number."""

    number: int

    def units(self) -> list[Unit]:
        """Return the first units; every fourth plan has one that kills its lane."""
        draw = random.Random(self.number)  # noqa: S311  # plans, no secrets
        units = [self._unit(draw, f"{n}", 2) for n in range(draw.randint(6, 14))]
        if self.number % 4 == 0:
            units.insert(draw.randrange(len(units)), _unit("deadly", die=True))
        return units

    def known(self, without: set[str]) -> set[str]:
        """Return the ids of all units except those that follow from ``without``."""
        ids, todo = set(), self.units()
        while todo:
            unit = todo.pop()
            ids.add(unit.id)
            if unit.id not in without:
                todo += [_unit(**case) for case in unit.case.get("follow", ())]
        return ids

    def _unit(self, draw: random.Random, name: str, depth: int) -> Unit:
        follow = range(draw.choice((0, 0, 1, 3)) if depth else 0)
        return _unit(
            f"{self.number}.{name}",
            seconds=draw.uniform(0, _LONGEST_UNIT),
            follow=[self._unit(draw, f"{name}.{n}", depth - 1).case for n in follow],
        )


def _unit(name: str, **case: Any) -> Unit:
    return Unit(
        kind="ask", stage="bounds", kernel="stub", device="cpu", case={"name": name, **case}
    )


class Stub:
    """A Work that does what a unit's case says; each execution has a new token."""

    def do(self, unit: Unit) -> UnitResult:
        """Sleep, die, or return further units."""
        case = unit.case
        if case.get("die"):
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(case["seconds"])
        return UnitResult(
            unit=unit.id,
            units=tuple(_unit(**one) for one in case["follow"]),
            facts={"token": os.urandom(8).hex(), "name": case["name"]},
        )

    def close(self) -> None:
        """Do nothing: nothing was started."""


def work() -> Stub:
    """Return a lane's Work."""
    return Stub()


class Hasty(Journal):
    """A planted fault: a result is acknowledged one result before it is written."""

    _held: UnitResult | None = None

    def write_result(self, done: UnitResult, *, quarantined: bool = False) -> None:
        """Write the previous result."""
        held, self._held = self._held, done
        if held is not None:
            super().write_result(held, quarantined=quarantined)


class Forgetful(Journal):
    """A planted fault: results of earlier sessions are ignored and overwritten."""

    @property
    def results(self) -> dict[str, UnitResult]:
        """No results."""
        return {}

    def write_result(self, done: UnitResult, *, quarantined: bool = False) -> None:
        """Write a result, and drop an earlier one of the same unit."""
        self.content.results.pop(done.unit, None)
        super().write_result(done, quarantined=quarantined)


JOURNALS = {"right": Journal, "hasty": Hasty, "forgetful": Forgetful}


class _Forked:
    """Replaces ``subprocess.Popen`` for workers: a fork, which need not import everything again."""

    def __init__(
        self, command: list[str], *, env: dict[str, str], pass_fds: tuple[int, ...], **_: Any
    ) -> None:
        (out, its_out), (err, its_err) = os.pipe(), os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            try:
                self._run(command, env, pass_fds, its_out, its_err)
            finally:
                os._exit(1)
        os.close(its_out)
        os.close(its_err)
        self.stdout, self.stderr = os.fdopen(out, "rb", 0), os.fdopen(err, "rb", 0)

    def _run(
        self, command: list[str], env: dict[str, str], kept: tuple[int, ...], out: int, err: int
    ) -> None:
        os.setsid()
        os.dup2(out, 1)
        os.dup2(err, 2)
        # As in a new process; otherwise a reader of a pipe would also wait for this fork's end.
        low = 3
        for descriptor in (*sorted(kept), os.sysconf("SC_OPEN_MAX")):
            os.closerange(low, descriptor)
            low = descriptor + 1
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.update(env)
        sys.argv = ["-c", *command[3:]]
        worker_main.main()

    def wait(self, timeout: float = 60.0) -> int:
        """Return the exit status; raise TimeoutExpired after ``timeout`` seconds."""
        until = time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                raise subprocess.TimeoutExpired("worker", timeout)
            else:
                time.sleep(0.001)
        return self.returncode


def _guard_or_fork(command: list[str], **options: Any) -> Any:
    return _Forked(command, **options) if options.get("pass_fds") else _POPEN(command, **options)


_POPEN = subprocess.Popen


def session(path: str, number: int, journal: str, descriptor: int, *, cold: bool) -> None:
    """Do one session of a run; write each acknowledged result to ``descriptor``.

    Args:
        path: Path of the journal.
        number: Number of the plan.
        journal: A name of ``JOURNALS``.
        descriptor: A line with a unit and a token is written there for each result.
        cold: Whether workers are new processes, as for users, or forks of this one.
    """

    def acknowledge(event: RunEvent) -> None:
        if event.kind == "done" and event.done is not None:
            token = event.done.facts.get("token", "-")
            os.write(descriptor, f"{event.done.unit} {token}\n".encode())

    if not cold:
        subprocess.Popen = _guard_or_fork  # type: ignore[assignment,misc]  # in this process only
    with JOURNALS[journal].open(path, {"command": f"plan {number}"}, resume=True) as opened:
        run_units(
            Plan(number).units(),
            work="kill_resume_session:work",
            options={},
            journal=opened,
            workers=[WorkerPlace()] * (1 + number % 2),
            on_event=acknowledge,
        )
