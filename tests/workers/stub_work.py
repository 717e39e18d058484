"""A Work without kernels, for tests of the pool: the case of a unit says what happens to it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from attncheck.core.errors import UsageError
from attncheck.workers.units import Unit, UnitResult


def unit(name, kind="ask", *, kernel="stub", stage="bounds", **case):
    """A unit of that name.

    Keywords:
        follow: (name, case) of units that its result adds.
        die, raises: the signal that kills its worker, the message of its exception; with ``times``
            only in so many first attempts, which are counted by files in ``folder``.
        touch, child, prints: first creates this file, starts a process that would outlive the
            worker and writes its id to this file, prints this text.
        wait_for, seconds: waits for this file, and then so long.
        usage: the result is a usage error unless this file exists.
        lie: the unit id of its result, in place of its own.
    """
    return Unit(kind=kind, stage=stage, kernel=kernel, device="cpu", case={"name": name, **case})


class Stub:
    def __init__(self, folder=""):
        self.folder = Path(folder)
        self.count = 0

    def do(self, task):
        self.count += 1
        case = task.case
        if "touch" in case:
            Path(case["touch"]).touch()
        if "child" in case:
            child = subprocess.Popen(
                [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
            )
            Path(case["child"]).write_text(str(child.pid))
        if "prints" in case:
            print(case["prints"], file=sys.stderr, flush=True)  # noqa: T201  # what workers print
        if self._misbehaves(case):
            if "raises" in case:
                raise RuntimeError(case["raises"])
            if "die" in case:
                os.kill(os.getpid(), case["die"])
        while "wait_for" in case and not Path(case["wait_for"]).exists():
            time.sleep(0.01)
        time.sleep(case.get("seconds", 0.0))
        if "usage" in case and not Path(case["usage"]).exists():
            return UnitResult(unit=task.id, facts={"usage": f"there is no file {case['usage']!r}."})
        follow = tuple(unit(name, **rest) for name, rest in case.get("follow", ()))
        return UnitResult(
            unit=case.get("lie", task.id),
            units=follow,
            facts={
                "name": case["name"],
                "pid": os.getpid(),
                "count": self.count,
                "alone": task.alone,
                "gpu": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            },
        )

    def _misbehaves(self, case):
        """Whether ``die`` and ``raises`` apply in this attempt, which is counted."""
        if "times" not in case:
            return True
        marks = Path(case["folder"])
        before = len(list(marks.glob(f"{case['name']}.*")))
        (marks / f"{case['name']}.{before}").touch()
        return before < case["times"]

    def close(self):
        if self.folder.name:
            (self.folder / f"closed.{os.getpid()}").touch()


def work(folder=""):
    return Stub(folder)


def refused():
    raise UsageError("kernel 'x' is not there.")


def dead():
    os.kill(os.getpid(), signal.SIGKILL)


def made_twice(folder):
    """Like ``work``; making it a second time leaves a file ``second``."""
    try:
        (Path(folder) / "first").touch(exist_ok=False)
    except FileExistsError:
        (Path(folder) / "second").touch()
    return Stub()
