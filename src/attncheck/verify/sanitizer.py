"""Runs a kernel on a few problems under NVIDIA's compute-sanitizer, and reports one line for each.

The tool watches every access of every thread, which no check inside a process can: it also finds
races, and accesses of memory that has no guard bands. It takes tens of times as long.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from attncheck.core.errors import require_known
from attncheck.core.judgement import Judgement
from attncheck.core.sanitize_text import one_line
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case
from attncheck.records.record import Record
from attncheck.subjects.capabilities.subject import Subject
from attncheck.subjects.load import load_subject
from attncheck.verify.environment import prepare
from attncheck.verify.executor import Failure, InProcess
from attncheck.verify.run_case import blank_record

TOOLS = {
    "memcheck": "no access outside of what was allocated, none that is misaligned",
    "racecheck": "no two threads of a block race for shared memory",
    "initcheck": "nothing is read of global memory that nobody wrote",
    "synccheck": "no barrier that some threads of a block do not reach",
}
"""Tools of compute-sanitizer, each with the rule that it checks."""

ABSENT = "there is no compute-sanitizer on PATH: it comes with the CUDA toolkit"

_ERROR_EXIT_CODE = 99  # The tool's exit code if it finds an error.
_LARGEST_REPORT = 1 << 24  # Bytes of a report that are read.
_PREFIX = "========="
# Lines of the tool that are no errors: the first and the last lines of a report.
_BOILERPLATE = re.compile(
    r"^(COMPUTE-SANITIZER|\w+ SUMMARY|Target application|Error: (process|Target application))"
)
_PLACE = re.compile(r"^\s*at (?P<place>.+)$")


def sanitizer() -> str | None:
    """Return the path of compute-sanitizer; None if it is not on PATH."""
    return shutil.which("compute-sanitizer")


def run_sanitizer(
    kernel: str,
    cases: Sequence[Case],
    tool: str,
    *,
    convention: str = "",
    device: str = "cuda",
    seconds: float = 600.0,
) -> tuple[Record, ...]:
    """Call ``kernel`` on each of ``cases`` in one process under ``tool``; return their Records.

    The status is ``fail`` by the rule ``memory`` if the tool reported an error while the case ran,
    ``error`` if the kernel raised, ``crash`` if its process ended before, ``timeout`` if it did not
    end in time, and ``unsupported`` if there is no compute-sanitizer or the kernel does not take
    the case. The kernel's outputs are not judged.

    Args:
        kernel: As ``subjects.load.load_subject`` takes it; only that process imports it.
        tool: A name in ``TOOLS``.
        convention: How the kernel is called, as in ``load_subject``.
        device: ``cuda``; on a CPU the tool observes nothing.
        seconds: Time limit of all cases together.

    Raises:
        UnknownName: for another tool.
    """
    require_known("tool", [tool], TOOLS)
    program = sanitizer()
    if program is None:
        absent: dict[str, Any] = {"kernel": kernel, "status": "unsupported", "reason": ABSENT}
        return tuple(blank_record(case, **absent) for case in cases)
    # Random, because the kernel may print to the same stream.
    mark = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="attncheck-") as folder:
        request = Path(folder) / "asked.json"
        words = {"kernel": kernel, "convention": convention, "device": device, "mark": mark}
        request.write_text(json.dumps({**words, "cases": [case.to_json() for case in cases]}))
        command = [program, "--tool", tool, "--error-exitcode", str(_ERROR_EXIT_CODE)]
        # Libraries query CUDA for features that a GPU lacks, and handle the error themselves.
        command += ["--report-api-errors", "no"] if tool == "memcheck" else []
        command += [sys.executable, "-m", "attncheck.verify.sanitizer", str(request)]
        report, late = _run_tool(command, Path(folder) / "report.txt", seconds)
    reports = _read_reports(report, mark)
    return tuple(
        _verdict(kernel, case, reports.get(number, _Report()), tool, late)
        for number, case in enumerate(cases)
    )


def _run_tool(command: Sequence[str], path: Path, seconds: float) -> tuple[str, bool]:
    """Return what a command prints, and whether it ran out of time."""
    # With torch's caching allocator the tool would not see where a tensor ends.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    timed_out = False
    with path.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603  # no shell, and words of our own
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            # The tool starts the program as its child: the whole group is killed.
            start_new_session=True,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    with path.open("rb") as output:
        return output.read(_LARGEST_REPORT).decode(errors="replace"), timed_out


@dataclass(slots=True)
class _Report:
    """The report on one case; as it is made, on one that never began."""

    ended: str = ""  # its process's last line on it: ``ok``, ``refused …`` or ``error …``
    errors: list[str] = field(default_factory=list)  # the tool's errors, a line each


def _read_reports(text: str, mark: str) -> dict[int, _Report]:
    """Return the reports on cases that began; ``mark`` starts the lines that begin and end one."""
    reports: dict[int, _Report] = {}
    current = _Report()
    for line in text.splitlines():
        if line.startswith(f"{mark} begin "):
            current = reports.setdefault(int(line.split()[2]), _Report())
        elif line.startswith(f"{mark} end "):
            current.ended = one_line(line.split(maxsplit=3)[3])
        elif line.startswith(_PREFIX):
            _collect_error(line.removeprefix(_PREFIX), current.errors)
    return reports


def _collect_error(line: str, errors: list[str]) -> None:
    """Add a line of the tool to ``errors``: a new error, or the place of the last one."""
    words, place = line.strip(), _PLACE.match(line)
    if not words or _BOILERPLATE.match(words):
        return
    if place:
        if errors and " at " not in errors[-1]:
            errors[-1] = f"{errors[-1]} at {one_line(place['place'])}"
    elif line.startswith(" ") and not line.startswith("  "):
        errors.append(one_line(words))


def _verdict(kernel: str, case: Case, report: _Report, tool: str, timed_out: bool) -> Record:  # noqa: FBT001
    record = blank_record(case, kernel=kernel)
    # Checked first, because a case that goes on after an error may still end with ``ok``.
    if report.errors:
        more = f" ({len(report.errors)} in all)" if len(report.errors) > 1 else ""
        reason = f"{tool}: {report.errors[0]}{more}"
        judgement = Judgement(status="fail", rule="memory", reason=reason)
        return replace(record, status="fail", judgement=judgement)
    if report.ended == "ok":
        return replace(record, status="pass", judgement=Judgement(status="pass"))
    status, _, reason = report.ended.partition(" ")
    if status == "refused":
        return replace(record, status="unsupported", reason=reason)
    if status:
        return replace(record, reason=reason)
    if timed_out:
        return replace(record, status="timeout", reason=f"{tool} did not end in time")
    message = f"its process ended under {tool} before it had run"
    return replace(record, status="crash", reason=message)


# The program that compute-sanitizer watches: it calls a kernel once on each of some cases.


def main(path: str) -> int:
    """Run the cases in the file at ``path``, and print a marked line before and after each."""
    request = json.loads(Path(path).read_text())
    device, mark = request["device"], request["mark"]
    # Before the kernel's module is imported, which fixes whether Triton compiles or interprets.
    prepare(device)
    subject = load_subject(request["kernel"], request["convention"] or None)
    for number, case in enumerate(request["cases"]):
        _print_at_once(f"{mark} begin {number}")
        _print_at_once(f"{mark} end {number} {_run_one(subject, case, device)}")
    return 0


def _print_at_once(line: str) -> None:
    """Print and flush a line, to keep it in order with the tool's own output."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _run_one(subject: Subject, case: Any, device: str) -> str:
    problem = Case.from_json(case).problem
    executor = InProcess()
    refusal = executor.refusal(subject, problem, device)
    result = refusal or executor.run(subject, draw_inputs(problem, device))
    if isinstance(result, Failure):
        return f"{'refused' if result.kind == 'refused' else 'error'} {one_line(result.message)}"
    return "ok"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
