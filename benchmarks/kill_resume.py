"""Runs that are killed at random moments and resumed: is a result lost, doubled or another?

    python benchmarks/kill_resume.py --runs 1000 --out reports/cpu

Each run does the units of one of a few plans, in two lanes, with a Work that has no kernel. Its
process gets SIGKILL at a random moment, in some runs its lanes too, and it is resumed until it has
finished. What it said to have done (each result, when it is told of it) must be in the journal at
the end, made by the same doing; all results must be those of the same plan undisturbed.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from in_processes import finished, write_json
from kill_resume_page import page, summary
from kill_resume_session import JOURNALS, Plan, session

from attncheck.workers.journal_format import read_journal

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Found", "Task", "disturbed", "main", "measured", "undisturbed", "work"]

_PR_SET_CHILD_SUBREAPER = 36
_PLANS = 24
_MOST_SESSIONS = 6
_LONGEST_START = 0.1  # seconds
_LONGEST_PAUSE = 0.02  # seconds: a unit or two


@dataclass
class Found:
    """What one run showed.

    Attributes:
        kills, lane_kills: How often the process, and one of its lanes, got SIGKILL.
        at: Results that the journal had at each kill, as a part of all.
        sessions: Until it was finished.
        results: At the end.
        acknowledged: Results that it said to have.
        lost: Of these, not there at the end.
        doubled: Units that were done again after they were acknowledged, or have two results.
        hit_twice: Units that our kills hit twice, and that are given up, as they should be.
        different: Results that are not those of an undisturbed run.
        orphans: Processes that it left.
        broken: Why the journal could not be read, or the run not be finished; empty if neither.
    """

    kills: int = 0
    lane_kills: int = 0
    at: list[float] = field(default_factory=list)
    sessions: int = 0
    results: int = 0
    acknowledged: int = 0
    lost: int = 0
    doubled: int = 0
    hit_twice: int = 0
    different: int = 0
    orphans: int = 0
    broken: str = ""


@dataclass(frozen=True)
class Task:
    """One run to be killed, or none of its kills.

    Attributes:
        number: Of its plan.
        seed: Of the moments.
        folder: For the journal.
        journal: Which.
        cold: Whether its lanes are new processes.
    """

    number: int
    seed: int
    folder: str
    journal: str = "right"
    cold: bool = False


def undisturbed(task: Task) -> dict[str, str]:
    """What the plan gives, by unit."""
    path = Path(task.folder) / f"plan-{task.number}.jsonl"
    with _session(path, task) as running:
        running.rest()
    return _said(read_journal(path).results)


def disturbed(task: Task) -> Found:
    """One run that is killed and resumed."""
    draw, found = random.Random(task.seed), Found()  # noqa: S311  # moments, no secrets
    path = Path(task.folder) / f"{task.journal}-{task.seed}.jsonl"
    results = undisturbed(replace(task, journal="right"))
    acknowledged: list[tuple[str, str]] = []
    todo = 1 if draw.randrange(8) else 2
    for _ in range(_MOST_SESSIONS):
        found.sessions += 1
        with _session(path, task) as running:
            if found.kills < todo:
                _kill(running, draw, len(results), found)
            running.rest()
        whole = (line for line in running.told if line.endswith("\n"))
        acknowledged += [(unit, token) for unit, token in map(str.split, whole)]
        if running.code == -signal.SIGKILL:
            found.kills += 1
            found.at.append(_part(path, len(results)))
        elif running.code == 0:
            break
    try:
        _compare(task.number, path, acknowledged, results, found)
    except Exception as error:  # noqa: BLE001  # of a planted fault: it is what is looked for
        found.broken = str(error) or type(error).__name__
    found.orphans = _orphans()
    return found


def _compare(
    number: int,
    path: Path,
    acknowledged: list[tuple[str, str]],
    expected: dict[str, str],
    found: Found,
) -> None:
    content = read_journal(path)
    said = _said(content.results)
    given_up = {id_ for id_ in content.quarantined if expected.get(id_) != "given up"}
    # Two blows at one unit are what a unit that takes the machine down looks like.
    excused = given_up if found.kills + found.lane_kills > 1 else set()
    tokens = {id_: done.facts.get("token", "-") for id_, done in content.results.items()}
    found.results, found.acknowledged = len(said), len(acknowledged)
    found.lost = sum(id_ not in said for id_, _ in acknowledged)
    again = sum(id_ in tokens and tokens[id_] != token for id_, token in acknowledged)
    found.doubled = again + len(acknowledged) - len({id_ for id_, _ in acknowledged})
    found.hit_twice = len(excused)
    known = Plan(number).known(excused) - excused
    found.different = sum(said.get(id_) != expected.get(id_) for id_ in known)
    found.different += len(said.keys() - known - excused)


def _said(results: Any) -> dict[str, str]:
    """What each result says, but for whose doing it was."""
    return {
        id_: "given up" if done.harness else f"{done.facts['name']} {len(done.units)}"
        for id_, done in results.items()
    }


class _Running:
    """A session in a process that is a copy of this one, which has imported everything."""

    def __init__(self, path: Path, task: Task) -> None:
        self.told: list[str] = []
        self.code: int | None = None
        read_end, write_end = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                os.close(read_end)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                session(str(path), task.number, task.journal, write_end, cold=task.cold)
            except BaseException:  # noqa: BLE001  # of a planted fault
                os._exit(1)
            os._exit(0)
        os.close(write_end)
        self.said = os.fdopen(read_end)

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)

    def rest(self) -> None:
        """All that it says until it ends."""
        with self.said:
            self.told += self.said
        self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@contextmanager
def _session(path: Path, task: Task) -> Iterator[_Running]:
    running = _Running(path, task)
    try:
        yield running
    finally:
        if running.code is None:
            running.kill()
            running.rest()


def _kill(running: _Running, draw: random.Random, results: int, found: Found) -> None:
    """Kill it after some of its results; in every third case one of its children before."""
    after = draw.randrange(results)
    if not draw.randrange(10):  # as it starts
        time.sleep(draw.uniform(0.0, _LONGEST_START))
        running.kill()
        return
    child_after = draw.randrange(after + 1) if not draw.randrange(3) else -1
    for number, line in enumerate(running.said):
        running.told.append(line)
        if number == child_after and (children := _children(running.pid)):
            with suppress(ProcessLookupError):
                os.kill(draw.choice(children), signal.SIGKILL)
                found.lane_kills += 1
        if number == after:
            break
    time.sleep(draw.uniform(0.0, _LONGEST_PAUSE))
    running.kill()


def _children(parent: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(stat[1]) == parent and stat[0] != "Z":
                found.append(int(folder.name))
    return sorted(found)


def _orphans() -> int:
    """Processes of a run that are there five seconds after its end: they are our children now."""
    until = time.monotonic() + 5
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        count = len(_children(os.getpid()))
        if not count or time.monotonic() > until:
            return count
        time.sleep(0.005)


def _part(path: Path, count: int) -> float:
    """How much of a run is done."""
    with suppress(Exception):
        return len(read_journal(path).results) / count
    return 0.0


def measured(runs: int, folder: str, *, journal: str = "right", processes: int = 1) -> list[Found]:
    """So many runs."""
    tasks = [Task(seed % _PLANS, seed, folder, journal) for seed in range(runs)]
    found = []
    for one in finished(work, tasks, processes=processes, seconds=math.inf):
        found.append(one)
        if len(found) % 50 == 0:
            print(f"{len(found)}/{runs}", file=sys.stderr, flush=True)
    return found


def work(task: Task) -> Found:
    """One run; whatever it leaves behind becomes a child of this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return disturbed(task)


def main() -> None:
    """Kill, resume, compare; then write the summary and the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--faulty", type=int, default=20, help="runs of each planted fault")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("reports"))
    asked = parser.parse_args()
    told = []
    for journal in JOURNALS:
        runs, begun = asked.runs if journal == "right" else asked.faulty, time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found = measured(runs, folder, journal=journal, processes=asked.processes)
        told.append(summary(journal, [asdict(one) for one in found], time.monotonic() - begun))
    write_json(asked.out / "kill-resume.json", told)
    (asked.out / "kill-resume.md").write_text(page(told))


if __name__ == "__main__":
    main()
