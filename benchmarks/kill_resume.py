"""Kill runs at random moments and resume them: are results lost, computed twice or different?

    python benchmarks/kill_resume.py --runs 1000 --out reports/cpu

Each run does the units of one of a few plans, in one lane or two, with a Work that has no kernel.
Its process gets SIGKILL at a random moment, in some runs one of its children too, and it is resumed
until it has finished. Each result that it has acknowledged must be in the journal at the end, from
the same execution, and all results must be those of the same plan undisturbed.
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

__all__ = ["RunResult", "Task", "main", "measure", "run_undisturbed", "run_with_kills", "work"]

_PR_SET_CHILD_SUBREAPER = 36
_PLANS = 24
_MOST_SESSIONS = 6
_LONGEST_START = 0.1  # seconds
_LONGEST_PAUSE = 0.02  # seconds: a unit or two


@dataclass
class RunResult:
    """The observations of one run.

    Attributes:
        kills, lane_kills: How often the process, and one of its children, got SIGKILL.
        at: Share of all results that the journal had at each kill.
        sessions: Number of sessions until the run was finished.
        results: Number of results at the end.
        acknowledged: Number of results that the run acknowledged.
        lost: Number of acknowledged results that are missing at the end.
        doubled: Number of units that were done again after they were acknowledged.
        hit_twice: Number of units that kills hit twice, and that are given up, as they should be.
        different: Number of results that differ from those of an undisturbed run.
        orphans: Number of processes that the run left.
        broken: Why the journal could not be read or the run not be finished; empty otherwise.
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
    """One run.

    Attributes:
        number: Number of the plan.
        seed: Seed of the moments of kills.
        folder: Folder of the journal.
        journal: A name of ``JOURNALS``.
        cold: Whether lanes are new processes, and not forks.
    """

    number: int
    seed: int
    folder: str
    journal: str = "right"
    cold: bool = False


def run_undisturbed(task: Task) -> dict[str, str]:
    """Run the plan without kills; return its results by unit."""
    path = Path(task.folder) / f"plan-{task.number}.jsonl"
    with _session(path, task) as running:
        running.read_to_end()
    return _summaries(read_journal(path).results)


def run_with_kills(task: Task) -> RunResult:
    """Run, kill and resume the plan until it is finished."""
    draw, run = random.Random(task.seed), RunResult()  # noqa: S311  # moments, no secrets
    path = Path(task.folder) / f"{task.journal}-{task.seed}.jsonl"
    results = run_undisturbed(replace(task, journal="right"))
    acknowledged: list[tuple[str, str]] = []
    planned_kills = 1 if draw.randrange(8) else 2
    for _ in range(_MOST_SESSIONS):
        run.sessions += 1
        with _session(path, task) as running:
            if run.kills < planned_kills:
                _kill(running, draw, len(results), run)
            running.read_to_end()
        whole = (line for line in running.lines if line.endswith("\n"))
        acknowledged += [(unit, token) for unit, token in map(str.split, whole)]
        if running.code == -signal.SIGKILL:
            run.kills += 1
            run.at.append(_share_done(path, len(results)))
        elif running.code == 0:
            break
    try:
        _compare(task.number, path, acknowledged, results, run)
    except Exception as error:  # noqa: BLE001  # a planted fault may raise anything
        run.broken = str(error) or type(error).__name__
    run.orphans = _orphans()
    return run


def _compare(
    number: int,
    path: Path,
    acknowledged: list[tuple[str, str]],
    expected: dict[str, str],
    run: RunResult,
) -> None:
    """Fill in ``run`` from the journal and the acknowledged results."""
    content = read_journal(path)
    results = _summaries(content.results)
    given_up = {id_ for id_ in content.quarantined if expected.get(id_) != "given up"}
    # A unit that two kills hit looks like one that takes the machine down.
    excused = given_up if run.kills + run.lane_kills > 1 else set()
    tokens = {id_: done.facts.get("token", "-") for id_, done in content.results.items()}
    run.results, run.acknowledged = len(results), len(acknowledged)
    run.lost = sum(id_ not in results for id_, _ in acknowledged)
    repeated = sum(id_ in tokens and tokens[id_] != token for id_, token in acknowledged)
    run.doubled = repeated + len(acknowledged) - len({id_ for id_, _ in acknowledged})
    run.hit_twice = len(excused)
    known = Plan(number).known(excused) - excused
    run.different = sum(results.get(id_) != expected.get(id_) for id_ in known)
    run.different += len(results.keys() - known - excused)


def _summaries(results: Any) -> dict[str, str]:
    """Return each result as text, without the token of its execution."""
    return {
        id_: "given up" if done.harness else f"{done.facts['name']} {len(done.units)}"
        for id_, done in results.items()
    }


class _Running:
    """A session in a fork of this process, which has imported everything."""

    def __init__(self, path: Path, task: Task) -> None:
        self.lines: list[str] = []
        self.code: int | None = None
        read_end, write_end = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                os.close(read_end)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                session(str(path), task.number, task.journal, write_end, cold=task.cold)
            except BaseException:  # noqa: BLE001  # a planted fault may raise anything
                os._exit(1)
            os._exit(0)
        os.close(write_end)
        self.output = os.fdopen(read_end)

    def kill(self) -> None:
        """Send SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)

    def read_to_end(self) -> None:
        """Read the remaining lines, and wait for the end of the process."""
        with self.output:
            self.lines += self.output
        self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@contextmanager
def _session(path: Path, task: Task) -> Iterator[_Running]:
    running = _Running(path, task)
    try:
        yield running
    finally:
        if running.code is None:
            running.kill()
            running.read_to_end()


def _kill(running: _Running, draw: random.Random, results: int, run: RunResult) -> None:
    """Kill a session after some of its results; in every third case first one of its children."""
    after = draw.randrange(results)
    if not draw.randrange(10):  # during its start
        time.sleep(draw.uniform(0.0, _LONGEST_START))
        running.kill()
        return
    child_after = draw.randrange(after + 1) if not draw.randrange(3) else -1
    for number, line in enumerate(running.output):
        running.lines.append(line)
        if number == child_after and (children := _children(running.pid)):
            with suppress(ProcessLookupError):
                os.kill(draw.choice(children), signal.SIGKILL)
                run.lane_kills += 1
        if number == after:
            break
    time.sleep(draw.uniform(0.0, _LONGEST_PAUSE))
    running.kill()


def _children(parent: int) -> list[int]:
    children = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(stat[1]) == parent and stat[0] != "Z":
                children.append(int(folder.name))
    return sorted(children)


def _orphans() -> int:
    """Count the processes of a run, now our children, that are left five seconds after its end."""
    until = time.monotonic() + 5
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        count = len(_children(os.getpid()))
        if not count or time.monotonic() > until:
            return count
        time.sleep(0.005)


def _share_done(path: Path, count: int) -> float:
    """Return the share of ``count`` results that the journal has."""
    with suppress(Exception):
        return len(read_journal(path).results) / count
    return 0.0


def measure(
    runs: int, folder: str, *, journal: str = "right", processes: int = 1
) -> list[RunResult]:
    """Return the results of ``runs`` runs."""
    tasks = [Task(seed % _PLANS, seed, folder, journal) for seed in range(runs)]
    results = []
    for one in finished(work, tasks, processes=processes, seconds=math.inf):
        results.append(one)
        if len(results) % 50 == 0:
            print(f"{len(results)}/{runs}", file=sys.stderr, flush=True)
    return results


def work(task: Task) -> RunResult:
    """Do one run; processes that it leaves become children of this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return run_with_kills(task)


def main() -> None:
    """Kill, resume, compare; then write the summary and the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--faulty", type=int, default=20, help="runs of each planted fault")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("reports"))
    options = parser.parse_args()
    summaries = []
    for journal in JOURNALS:
        runs, begun = options.runs if journal == "right" else options.faulty, time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            results = measure(runs, folder, journal=journal, processes=options.processes)
        rows = [asdict(one) for one in results]
        summaries.append(summary(journal, rows, time.monotonic() - begun))
    write_json(options.out / "kill-resume.json", summaries)
    (options.out / "kill-resume.md").write_text(page(summaries))


if __name__ == "__main__":
    main()
