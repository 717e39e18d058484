"""Somebody's own tests, run by pytest with a kernel of ours in place of their function.

Each run is a process of its own: ``python -m pytest`` in the project's folder with the plugin
``attncheck.faults.replaced``.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from attncheck.errors import UnknownName, UsageError
from attncheck.faults.own_calls import CONVENTIONS
from attncheck.faults.replaced import VARIABLE, Replacement

__all__ = ["OwnSuite", "Ran", "Status", "ran"]

Status = Literal["caught", "missed", "not shown", "not reached", "not scored"]

_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_PASSED, _FAILED, _INTERRUPTED, _NOTHING = 0, 1, 2, 5  # pytest's exit codes


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSuite:
    """Somebody's tests and the function that they test.

    Attributes:
        command: What follows ``pytest``: ``tests/ -k attn``.
        replace: The function: ``package.module:name``.
        convention: A name of ``own_calls.CONVENTIONS``; empty for what the function shows.
        folder: Where pytest runs.
        timeout: Seconds that one run may take.

    Raises:
        UsageError: for a function that is not spelled so, or a command that cannot be split.
        UnknownName: for a convention that is not known.
    """

    command: str
    replace: str
    convention: str = ""
    folder: Path = field(default_factory=Path.cwd)
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if not _TARGET.fullmatch(self.replace):
            raise UsageError(
                f"--replace {self.replace!r} is no function of a module: write package.module:name."
            )
        if self.convention and self.convention not in CONVENTIONS:
            raise UnknownName("convention", self.convention, CONVENTIONS)
        try:
            shlex.split(self.command)
        except ValueError as error:
            raise UsageError(f"--pytest {self.command!r} cannot be split: {error}.") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What came of one run of pytest.

    Attributes:
        code: Its exit code; None where it took too long.
        said: What the plugin told, of what.
        output: What pytest printed.
        seconds: That it took.
    """

    code: int | None
    said: dict[str, list[str]]
    output: str
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether all tests did."""
        return self.code == _PASSED

    @property
    def called(self) -> bool:
        """Whether a kernel of ours was."""
        return "called" in self.said

    @property
    def failed(self) -> tuple[str, ...]:
        """The first tests that did."""
        return tuple(self.said.get("failed", ()))

    @property
    def left(self) -> tuple[str, ...]:
        """Why calls went to the suite's own function."""
        return tuple(self.said.get("left", ()))

    def unreached(self) -> str:
        """Why no kernel of ours was called."""
        if self.left:
            return f"no kernel of ours takes its calls: {self.left[0]}"
        return "no test calls the function from where it is replaced"

    def status(self, suite: OwnSuite) -> tuple[Status, str]:
        """What it says of the kernel's fault, and why."""
        wrong = self.unscorable(suite)
        if self.code == _PASSED and "called" not in self.said:
            return "not reached", self.unreached()
        if wrong:
            return "not scored", wrong
        if self.code == _PASSED:
            shown = "shown" in self.said
            said = "" if shown else "the same bits with the fault as without, in every call"
            return ("missed" if shown else "not shown"), said
        if "called" not in self.said and "replaced" in self.said and self.code == _FAILED:
            return "not reached", self.unreached()
        return "caught", ""

    def unscorable(self, suite: OwnSuite) -> str:
        """Why it says nothing; empty where it does."""
        module, _, name = suite.replace.partition(":")
        if "absent" in self.said:
            kind = self.said["absent"][0]
            what = f"is {kind}, no function" if kind else "is not there"
            return f"{name!r} of module {module!r} {what}"
        if self.code is None:
            return f"it did not end within {suite.timeout:g} s"
        if self.code == _NOTHING:
            return f"pytest {suite.command} runs no test"
        if "replaced" not in self.said and self.code in {_PASSED, _FAILED}:
            return f"no test imports module {module!r}"
        collecting = self.code == _INTERRUPTED and "called" in self.said
        if self.code not in {_PASSED, _FAILED} and not collecting:
            return f"pytest {suite.command} ends with {self.code}: {self._last()}"
        return ""

    def _last(self) -> str:
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith(("E ", "ERROR"))]
        return (errors or lines or ["it says nothing"])[-1].removeprefix("E ").strip().rstrip(".")


def ran(suite: OwnSuite, folder: Path, *, kernel: str, right: str, first: bool = True) -> Ran:
    """One run.

    Args:
        suite: Whose tests.
        folder: For what is told.
        kernel: In place of the function; empty for the function itself.
        right: The same without a fault; empty where nothing is to be compared.
        first: Whether it ends with the first test that fails.
    """
    told, how = folder / "told.jsonl", folder / "replaced.json"
    module, _, name = suite.replace.partition(":")
    replacement = Replacement(
        module=module,
        name=name,
        kernel=kernel,
        right=right,
        convention=suite.convention,
        told=str(told),
    )
    how.write_bytes(msgspec.json.encode(replacement))
    plugin = ["-p", "attncheck.faults.replaced"] if kernel else []
    command = [sys.executable, "-m", "pytest", *plugin, *shlex.split(suite.command)]
    command += ["-p", "no:cacheprovider", *(["-x"] if first else [])]
    start = time.perf_counter()
    code, output = _process(command, suite, os.environ | {VARIABLE: str(how)})
    seconds = round(time.perf_counter() - start, 3)
    return Ran(code=code, said=_told(told), output=output, seconds=seconds)


def _process(
    command: list[str], suite: OwnSuite, environment: dict[str, str]
) -> tuple[int | None, str]:
    """Exit code, None where it took too long, and what it printed."""
    with tempfile.TemporaryFile() as printed:
        child = subprocess.Popen(  # noqa: S603  # what the user typed, and our own Python
            command,
            cwd=suite.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
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
    """With all that it started: a suite may have workers."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _told(file: Path) -> dict[str, list[str]]:
    """What was said of what, in order, each once."""
    if not file.exists():
        return {}
    said: dict[str, Counter[str]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        said.setdefault(one["what"], Counter())[one["of"]] += 1
    return {what: [*of] for what, of in said.items()}
