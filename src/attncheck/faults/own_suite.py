"""A kernel author's own tests, scored: with their function replaced by kernels that have a fault.

The tests run once with a right kernel of ours in place of the function, which must pass, and then
once with each fault: ``Scorer`` is what a lane of ``attncheck faults --pytest`` does.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins

from attncheck.errors import UsageError
from attncheck.fault_record import OwnScore
from attncheck.faults.catalogue import fault_named
from attncheck.faults.own_pytest import OwnSuite, ran
from attncheck.faults.planting import planted
from attncheck.runner.unit import Done

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attncheck.faults.fault import HostName
    from attncheck.runner.unit import Unit

__all__ = ["OwnSuite", "Scorer", "check_scorable", "control", "project", "scored", "work"]

_MOST_FILES = 10_000  # of a project, that are looked at
_NOT_ITS_OWN = {"site-packages", "node_modules", "__pycache__"}


def work(**options: Any) -> Scorer:
    """The Work of a lane; raises UsageError as ``OwnSuite`` does."""
    return Scorer(OwnSuite(**{**options, "folder": Path(options["folder"])}))


class Scorer:
    """Scores faults, one after the other, on one suite."""

    def __init__(self, suite: OwnSuite) -> None:
        self._suite = suite

    def close(self) -> None:
        """Nothing is left open: a run ends with all that it has started."""

    def do(self, unit: Unit) -> Done:
        """The score of ``unit``, a fault in a host, in ``facts``."""
        name, _, host = unit.kernel.rpartition("@")
        found = scored(self._suite, name, host)  # type: ignore[arg-type]  # a word of HOSTS
        return Done(unit=unit.id, facts={"score": to_builtins(found)}, seconds=found.seconds)


def check_scorable(suite: OwnSuite, faults: Sequence[str], host: HostName) -> None:
    """Raises UsageError unless ``suite`` passes with right kernels, and calls one of them.

    Args:
        suite: What is to be scored.
        faults: Ids, whose kernels without a fault are asked for.
        host: In which kernel they are planted.
    """
    kernels = {fault_named(name).hosts[host].kernel for name in faults}
    reached = [control(suite, kernel) for kernel in sorted(kernels)]
    if reached and all(one.status == "not reached" for one in reached):
        raise UsageError(f"the suite cannot be scored: {reached[0].reason}.")


def control(suite: OwnSuite, kernel: str = "ideal") -> OwnScore:
    """The run with a right kernel of ours, which must pass.

    Raises UsageError where it does not, or the function is not there: the suite cannot be scored.
    """
    with tempfile.TemporaryDirectory(prefix="attncheck_own_") as folder:
        found = ran(suite, Path(folder), kernel=kernel, right="", first=False)
    wrong = found.unscorable(suite)
    if not wrong and not found.passed:
        with tempfile.TemporaryDirectory(prefix="attncheck_own_") as folder:
            alone = ran(suite, Path(folder), kernel="", right="", first=False)
        theirs = "passes" if alone.passed else "fails too"
        which = f", at {found.failed[0]}" if found.failed else ""
        wrong = (
            f"it fails{which} with the right kernel {kernel!r} in place of {suite.replace}, and "
            f"{theirs} with its own; choose tests of what attention gives"
        )
    if wrong:
        raise UsageError(f"the suite cannot be scored: {wrong}.")
    return OwnScore(
        fault="",
        category="",
        host=kernel,
        status="not shown" if found.called else "not reached",
        reason="" if found.called else found.unreached(),
        left=found.left,
        seconds=found.seconds,
    )


def scored(suite: OwnSuite, fault: str, host: HostName = "ideal") -> OwnScore:
    """What ``suite`` makes of one fault: one run.

    Raises UnknownName for a fault that is not known, and UsageError for one that the host has not.
    """
    entry = fault_named(fault)
    if host not in entry.hosts:
        raise UsageError(f"fault {fault!r} is not planted in {host}: choose another host.")
    with tempfile.TemporaryDirectory(prefix="attncheck_own_") as name:
        folder = Path(name)
        kernel = planted(entry, host, folder)
        found = ran(suite, folder, kernel=kernel, right=entry.hosts[host].kernel)
    status, reason = found.status(suite)
    return OwnScore(
        fault=fault,
        category=getattr(entry, "category", "control"),
        host=host,
        status=status,
        reason=reason,
        tests=found.failed,
        left=found.left,
        seconds=found.seconds,
    )


def project(suite: OwnSuite) -> str:
    """Sixteen hexadecimal digits of the Python files where pytest runs: tests, and what they test.

    Without those of hidden folders and of what is installed.
    """
    found = hashlib.sha256()
    for path in islice(_files(suite.folder), _MOST_FILES):
        found.update(str(path.relative_to(suite.folder)).encode(errors="surrogateescape"))
        try:
            found.update(path.read_bytes())
        except OSError:
            found.update(b"cannot be read")
    return found.hexdigest()[:16]


def _files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        here = Path(place)
        folders[:] = sorted(
            name
            for name in folders
            if name[0] != "."
            and name not in _NOT_ITS_OWN
            and not (here / name / "pyvenv.cfg").exists()
        )
        yield from (here / name for name in sorted(names) if name.endswith(".py"))
