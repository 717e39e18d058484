"""A few problems of a kernel under NVIDIA's compute-sanitizer, and its report in one line each.

It watches every access of every thread, which nothing in a process can: also of memory that no
guard band is beside, and races. It takes tens of times as long.
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
"""Of compute-sanitizer, with what each would find."""

ABSENT = "there is no compute-sanitizer on PATH: it comes with the CUDA toolkit"

_FOUND = 99  # its exit code where it found something
_READ = 1 << 24  # bytes of its report
_PREFIX = "========="
# Its own words, not those of an error: the first and the last lines of a report.
_FRAME = re.compile(
    r"^(COMPUTE-SANITIZER|\w+ SUMMARY|Target application|Error: (process|Target application))"
)
_PLACE = re.compile(r"^\s*at (?P<place>.+)$")


def sanitizer() -> str | None:
    """Return where compute-sanitizer is; None where it is not."""
    return shutil.which("compute-sanitizer")


def sanitized(
    kernel: str,
    cases: Sequence[Case],
    tool: str,
    *,
    convention: str = "",
    device: str = "cuda",
    seconds: float = 600.0,
) -> tuple[Record, ...]:
    """Call ``kernel`` on the inputs of each of ``cases``, in one process under ``tool``.

    ``fail`` by the rule ``memory`` where the tool said something while the case ran; ``error``
    where the kernel raised, ``crash`` where its process ended before, ``timeout`` where it did not
    end in time, ``unsupported`` where there is no compute-sanitizer or the kernel takes the case
    not. What is right of numbers is not looked at.

    Args:
        kernel: As of ``subjects.load.load``; imported in that process alone.
        tool: A name in ``TOOLS``.
        convention: How the kernel is called, as of ``load``.
        device: Where; on a CPU it has nothing to see.
        seconds: For all of them.

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
        command = [program, "--tool", tool, "--error-exitcode", str(_FOUND)]
        # Libraries ask CUDA for what a GPU does not have, and handle that it says so.
        command += ["--report-api-errors", "no"] if tool == "memcheck" else []
        command += [sys.executable, "-m", "attncheck.verify.sanitizer", str(request)]
        report, late = _run_tool(command, Path(folder) / "report.txt", seconds)
    each = _Reports.read(report, mark)
    return tuple(_verdict(kernel, case, each.of(i), tool, late) for i, case in enumerate(cases))


def _run_tool(command: Sequence[str], path: Path, seconds: float) -> tuple[str, bool]:
    """Return what a command prints, and whether it had to be ended."""
    # Without it torch's own allocator hides from the tool where a tensor ends.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    late = False
    with path.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603  # no shell, and words of our own
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            # The tool starts the program as a child of its own: the group is killed as a whole.
            start_new_session=True,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    with path.open("rb") as output:
        return output.read(_READ).decode(errors="replace"), late


@dataclass(slots=True)
class _Report:
    """The output while one case ran."""

    begun: bool = False  # whether it began
    ended: str = ""  # what its process said at its end: ``ok``, ``refused …`` or ``error …``
    errors: list[str] = field(default_factory=list)  # the tool's errors, a line each


@dataclass(slots=True)
class _Reports:
    """The same of all cases, and the last lines that nobody asked for."""

    cases: dict[int, _Report] = field(default_factory=dict)
    last: str = ""

    def of(self, number: int) -> _Report:
        """Of case ``number``; one that never began says why."""
        return self.cases.get(number, _Report(ended=""))

    @classmethod
    def read(cls, text: str, mark: str) -> _Reports:
        """From what was printed; a launch is waited for before its case ends."""
        reports, current = cls(), _Report()
        for line in text.splitlines():
            if line.startswith(f"{mark} begin "):
                current = reports.cases.setdefault(int(line.split()[2]), _Report())
                current.begun = True
            elif line.startswith(f"{mark} end "):
                current.ended = one_line(line.split(maxsplit=3)[3])
            elif line.startswith(_PREFIX):
                _collect_error(line.removeprefix(_PREFIX), current.errors)
        return reports


def _collect_error(line: str, errors: list[str]) -> None:
    """Take a line of the tool's into ``errors``: errors begin unindented, and say where below."""
    words, place = line.strip(), _PLACE.match(line)
    if not words or _FRAME.match(words):
        return
    if place:
        if errors and " at " not in errors[-1]:
            errors[-1] = f"{errors[-1]} at {one_line(place['place'])}"
    elif line.startswith(" ") and not line.startswith("  "):
        errors.append(one_line(words))


def _verdict(kernel: str, case: Case, report: _Report, tool: str, late: bool) -> Record:  # noqa: FBT001
    record = blank_record(case, kernel=kernel)
    # Before its last word: a program that went on after an error may still end with ``ok``.
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
    if late:
        return replace(record, status="timeout", reason=f"{tool} did not end in time")
    ended = f"its process ended under {tool} before it had run"
    return replace(record, status="crash", reason=ended)


# The program that compute-sanitizer watches: it calls a kernel once on each of some cases.


def main(path: str) -> int:
    """Ask what the file says; each case begins and ends with a line of its mark."""
    request = json.loads(Path(path).read_text())
    device, mark = request["device"], request["mark"]
    # Before the kernel's module, which decides by it whether Triton compiles or interprets.
    prepare(device)
    subject = load_subject(request["kernel"], request["convention"] or None)
    for number, case in enumerate(request["cases"]):
        _print_at_once(f"{mark} begin {number}")
        _print_at_once(f"{mark} end {number} {_run_one(subject, case, device)}")
    return 0


def _print_at_once(line: str) -> None:
    """At once: what the tool prints meanwhile is in the same stream."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _run_one(subject: Subject, case: Any, device: str) -> str:
    problem = Case.from_json(case).problem
    executor = InProcess()
    refusal = executor.refusal(subject, problem, device)
    if isinstance(refusal, str):
        return f"refused {one_line(refusal)}"
    # A refusal that raised is a Failure like that of a call.
    result = refusal or executor.run(subject, draw_inputs(problem, device))
    if isinstance(result, Failure):
        return f"{'refused' if result.kind == 'refused' else 'error'} {one_line(result.message)}"
    return "ok"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
