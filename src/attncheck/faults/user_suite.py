"""Score a kernel author's own pytest suite with planted faults.

Each run is a process of its own: ``python -m pytest`` in the project's folder with the plugin
``attncheck.faults.replacement_plugin``.

The tests run once with a right kernel of attncheck's in place of the function, and must pass, and
then once with each fault. ``SuiteScorer`` does this in workers of ``attncheck faults --pytest``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import to_builtins

from attncheck.core.errors import UsageError, require_known
from attncheck.faults.catalogue import HostName, fault_named
from attncheck.faults.planting import plant
from attncheck.faults.replacement_plugin import VARIABLE, Replacement
from attncheck.records.fault_scores import OwnTestsScore
from attncheck.subjects.conventions.declarations import READERS
from attncheck.workers.units import Unit, UnitResult

Status = Literal["caught", "missed", "not shown", "not reached", "not scored"]

_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_PASSED, _FAILED, _INTERRUPTED, _NOTHING = 0, 1, 2, 5  # pytest's exit codes
_MOST_FILES = 10_000  # most files of a project that are hashed
_NOT_ITS_OWN = {"site-packages", "node_modules", "__pycache__"}


@dataclass(frozen=True, slots=True, kw_only=True)
class UserSuite:
    """A user's tests and the function that they test.

    Raises:
        UsageError: for a misspelled function, or a command that cannot be split.
        UnknownName: for an unknown convention.
    """

    command: str  # arguments of ``pytest``, such as ``tests/ -k attn``
    replace: str  # the function: ``package.module:name``
    convention: str = ""  # a name of ``conventions.READERS``; empty to infer it from the function
    folder: Path = field(default_factory=Path.cwd)  # where pytest runs
    timeout: float = 600.0  # most seconds for one run

    def __post_init__(self) -> None:
        if not _TARGET.fullmatch(self.replace):
            raise UsageError(
                f"--replace {self.replace!r} is no function of a module: write package.module:name."
            )
        if self.convention:
            require_known("convention", [self.convention], READERS)
        try:
            shlex.split(self.command)
        except ValueError as error:
            raise UsageError(f"--pytest {self.command!r} cannot be split: {error}.") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRun:
    """Outcome of one run of pytest."""

    code: int | None  # exit code; None for a timeout
    events: dict[str, list[str]]  # details of the plugin's events, by kind, in order
    output: str  # printed output
    seconds: float  # duration

    @property
    def passed(self) -> bool:
        """Return whether all tests passed."""
        return self.code == _PASSED

    @property
    def called(self) -> bool:
        """Return whether a kernel of attncheck's was called."""
        return "called" in self.events

    @property
    def failed(self) -> tuple[str, ...]:
        """Return the first tests that failed."""
        return tuple(self.events.get("failed", ()))

    @property
    def fallback_reasons(self) -> tuple[str, ...]:
        """Return why calls went to the suite's own function."""
        return tuple(self.events.get("left", ()))

    def unreached(self) -> str:
        """Return why no kernel of attncheck's was called."""
        if self.fallback_reasons:
            return f"no kernel of ours takes its calls: {self.fallback_reasons[0]}"
        return "no test calls the function from where it is replaced"

    def status(self, suite: UserSuite) -> tuple[Status, str]:
        """Return the status of the kernel's fault in this run, and the reason."""
        wrong = self.unscorable(suite)
        if not self.called and (self.passed or not wrong):
            return "not reached", self.unreached()
        if wrong:
            return "not scored", wrong
        if not self.passed:
            return "caught", ""
        if "shown" in self.events:
            return "missed", ""
        return "not shown", "the same bits with the fault as without, in every call"

    def unscorable(self, suite: UserSuite) -> str:
        """Return why the run cannot be scored; empty if it can."""
        module, _, name = suite.replace.partition(":")
        if "absent" in self.events:
            kind = self.events["absent"][0]
            what = f"is {kind}, no function" if kind else "is not there"
            return f"{name!r} of module {module!r} {what}"
        if self.code is None:
            return f"it did not end within {suite.timeout:g} s"
        if self.code == _NOTHING:
            return f"pytest {suite.command} runs no test"
        if "replaced" not in self.events and self.code in {_PASSED, _FAILED}:
            return f"no test imports module {module!r}"
        # A fault may break a module that calls the function on import: that is a catch.
        collecting = self.code == _INTERRUPTED and "called" in self.events
        if self.code not in {_PASSED, _FAILED} and not collecting:
            return f"pytest {suite.command} ends with {self.code}: {self._last()}"
        return ""

    def _last(self) -> str:
        # pytest marks errors with E; without any take the last line that it printed.
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith(("E ", "ERROR"))]
        return (errors or lines or ["it says nothing"])[-1].removeprefix("E ").strip().rstrip(".")


def run_suite(
    suite: UserSuite, folder: Path, *, kernel: str, right: str, first: bool = True
) -> SuiteRun:
    """Run the tests once, with a kernel in place of the function.

    Args:
        folder: Folder for settings and log.
        kernel: Kernel in place of the function; empty for the function itself.
        right: The kernel without its fault, to compare with; empty to compare nothing.
        first: Whether to stop at the first test that fails.
    """
    log, settings = folder / "events.jsonl", folder / "replacement.json"
    module, _, name = suite.replace.partition(":")
    replacement = Replacement(
        module=module,
        name=name,
        kernel=kernel,
        right=right,
        convention=suite.convention,
        log=str(log),
    )
    settings.write_bytes(msgspec.json.encode(replacement))
    plugin = ["-p", "attncheck.faults.replacement_plugin"] if kernel else []
    command = [sys.executable, "-m", "pytest", *plugin, *shlex.split(suite.command)]
    # No cache is left in the user's project, and no run depends on an earlier one.
    command += ["-p", "no:cacheprovider", *(["-x"] if first else [])]
    start = time.perf_counter()
    code, output = _process(command, suite, os.environ | {VARIABLE: str(settings)})
    seconds = round(time.perf_counter() - start, 3)
    return SuiteRun(code=code, events=_logged_events(log), output=output, seconds=seconds)


def _process(
    command: list[str], suite: UserSuite, environment: dict[str, str]
) -> tuple[int | None, str]:
    """Run pytest; return its exit code, None for a timeout, and its output."""
    # A file, since a pipe would be kept open by a process that outlives pytest.
    with tempfile.TemporaryFile() as printed:
        child = subprocess.Popen(  # noqa: S603  # the user's own arguments, and this Python
            command,
            cwd=suite.folder,
            env=environment,
            # A debugger that a test opens would wait for input forever.
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            # A process group of its own, so that all processes of the tests end with it.
            start_new_session=True,
        )
        try:
            code: int | None = child.wait(suite.timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(child)
        printed.seek(0)
        return code, printed.read().decode(errors="replace")


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill pytest and all processes that it started, such as workers of the suite."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _logged_events(file: Path) -> dict[str, list[str]]:
    """Return the details of logged events by kind, in order, each once: processes may repeat."""
    events: dict[str, dict[str, None]] = {}
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            event = json.loads(line)
            events.setdefault(event["kind"], {})[event["of"]] = None
    return {kind: [*of] for kind, of in events.items()}


def suite_work(**options: Any) -> SuiteScorer:
    """Return a worker's SuiteScorer; raise UsageError as ``UserSuite`` does."""
    return SuiteScorer(UserSuite(**{**options, "folder": Path(options["folder"])}))


class SuiteScorer:
    """Scores faults, one after the other, on one suite."""

    def __init__(self, suite: UserSuite) -> None:
        self._suite = suite

    def close(self) -> None:
        """Do nothing: each run has ended all its processes."""

    def do(self, unit: Unit) -> UnitResult:
        """Return the score of ``unit``, a fault in a host, in ``facts``."""
        name, _, host = unit.kernel.rpartition("@")
        score = score_suite(self._suite, name, host)  # type: ignore[arg-type]  # one of HOSTS
        return UnitResult(unit=unit.id, facts={"score": to_builtins(score)}, seconds=score.seconds)


def check_scorable(suite: UserSuite, faults: Sequence[str], host: HostName) -> None:
    """Raise UsageError unless ``suite`` passes with right kernels, and calls one of them.

    Args:
        faults: Ids of faults, whose hosts without a fault are run.
    """
    # One control for each kernel that faults are planted in, not for each fault.
    kernels = {fault_named(name).hosts[host].kernel for name in faults}
    reached = [run_control(suite, kernel) for kernel in sorted(kernels)]
    if reached and all(one.status == "not reached" for one in reached):
        raise UsageError(f"the suite cannot be scored: {reached[0].reason}.")


def run_control(suite: UserSuite, kernel: str = "ideal") -> OwnTestsScore:
    """Run the suite with a right kernel of attncheck's in place of the function; it must pass.

    Raises UsageError if it fails, or the function does not exist: the suite cannot be scored.
    """
    with tempfile.TemporaryDirectory(prefix="attncheck_own_") as folder:
        run = run_suite(suite, Path(folder), kernel=kernel, right="", first=False)
    wrong = run.unscorable(suite)
    if not wrong and not run.passed:
        with tempfile.TemporaryDirectory(prefix="attncheck_own_") as folder:
            # Tests that also fail with their own function say nothing about the kernel.
            alone = run_suite(suite, Path(folder), kernel="", right="", first=False)
        theirs = "passes" if alone.passed else "fails too"
        which = f", at {run.failed[0]}" if run.failed else ""
        wrong = (
            f"it fails{which} with the right kernel {kernel!r} in place of {suite.replace}, and "
            f"{theirs} with its own; choose tests of what attention gives"
        )
    if wrong:
        raise UsageError(f"the suite cannot be scored: {wrong}.")
    return OwnTestsScore(
        fault="",
        category="",
        host=kernel,
        status="not shown" if run.called else "not reached",
        reason="" if run.called else run.unreached(),
        fallback_reasons=run.fallback_reasons,
        seconds=run.seconds,
    )


def score_suite(suite: UserSuite, fault: str, host: HostName = "ideal") -> OwnTestsScore:
    """Run ``suite`` with a faulty kernel in place of the function, and return its score.

    Raises UnknownName for an unknown fault, and UsageError for one not planted in the host.
    """
    entry = fault_named(fault)
    if host not in entry.hosts:
        raise UsageError(f"fault {fault!r} is not planted in {host}: choose another host.")
    with tempfile.TemporaryDirectory(prefix="attncheck_own_") as name:
        folder = Path(name)
        kernel = plant(entry, host, folder)
        run = run_suite(suite, folder, kernel=kernel, right=entry.hosts[host].kernel)
    status, reason = run.status(suite)
    return OwnTestsScore(
        fault=fault,
        category=getattr(entry, "category", "control"),
        host=host,
        status=status,
        reason=reason,
        tests=run.failed,
        fallback_reasons=run.fallback_reasons,
        seconds=run.seconds,
    )


def project_digest(suite: UserSuite) -> str:
    """Return sixteen hexadecimal digits of the Python files where pytest runs.

    They hold the tests and the tested code. Hidden folders and installed packages are left out.
    """
    digest = hashlib.sha256()
    for path in islice(_files(suite.folder), _MOST_FILES):
        digest.update(str(path.relative_to(suite.folder)).encode(errors="surrogateescape"))
        try:
            digest.update(path.read_bytes())
        except OSError:
            digest.update(b"cannot be read")
    return digest.hexdigest()[:16]


def _files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        here = Path(place)
        # In place: os.walk descends into the remaining folders, in this order.
        folders[:] = sorted(
            name
            for name in folders
            if name[0] != "."
            and name not in _NOT_ITS_OWN
            # A virtual environment is no part of the project.
            and not (here / name / "pyvenv.cfg").exists()
        )
        yield from (here / name for name in sorted(names) if name.endswith(".py"))
