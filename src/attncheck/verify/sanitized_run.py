"""Calls a kernel once on each of some cases: the program that compute-sanitizer watches."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attncheck.core.sanitize_text import one_line
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case
from attncheck.subjects.load import load_subject
from attncheck.verify.environment import prepare
from attncheck.verify.executor import Failure, InProcess

if TYPE_CHECKING:
    from attncheck.subjects.capabilities.subject import Subject


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
