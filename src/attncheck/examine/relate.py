"""One kernel, one Case whose question is a relation: does it hold?"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attncheck import inputs as inputs_room
from attncheck.errors import UsageError
from attncheck.examine.executor import Execution, Executor, Failure, InProcess
from attncheck.outputs import Outputs
from attncheck.problem import Case
from attncheck.relations import relation_named

if TYPE_CHECKING:
    from attncheck.relations import Finding
    from attncheck.subjects.contract import Subject

__all__ = ["Broken", "command", "relate", "replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A relation that does not hold for a kernel.

    Attributes:
        kernel: The kernel as it was asked for: a name, or ``file.py::name``.
        case: What was asked.
        found: What is wrong, or why the kernel gave nothing.
    """

    kernel: str
    case: Case
    found: Finding | Failure

    def __str__(self) -> str:
        parameters = "".join(f" {name}={n}" for name, n in self.case.parameters.items())
        summary = relation_named(self.case.question).summary
        what = self.found.message
        if isinstance(self.found, Failure):
            what = f"the kernel failed: {what}"
        return "\n".join(
            [
                what,
                f"  kernel    {self.kernel}",
                f"  problem   {self.case.problem}",
                f"  question  {self.case.question}{parameters}: {summary}",
                f"  case      {self.case.id}",
                f"Reproduce: {command(self.kernel, self.case)}",
            ]
        )


def relate(
    subject: Subject,
    case: Case,
    executor: Executor | None = None,
    *,
    device: str = "cpu",
) -> Finding | Failure | None:
    """Run ``subject`` on the inputs that the Case's relation asks for, and compare what it gives.

    Args:
        subject: The kernel; it must take the Case's Problem.
        case: A Case whose question is a name in ``relations.RELATIONS``.
        executor: How to call the kernel; in this process by default.
        device: ``cpu`` or ``cuda``.

    Returns:
        None where the relation holds. A Failure, which is not None, where the kernel raised.

    Raises:
        UsageError: for a question that is no relation, or that cannot be asked of the Problem.
    """
    relation = relation_named(case.question)
    relation.check(case.problem, case.parameters)
    runs = relation.runs(inputs_room.draw(case.problem, device), case.parameters)
    outputs = []
    for inputs in runs:
        result = (executor or InProcess()).run(subject, inputs)
        if not isinstance(result, Execution):
            return result
        outputs.append(_kept(result.outputs))
    return relation.holds(runs, outputs, case.parameters)


def replay(kernel: str, case: str, *, device: str | None = None) -> str:
    """What ``relate`` finds for a kernel (a name or ``file.py::name``) and a Case in JSON.

    Raises UsageError for a kernel or Case that cannot be.
    """
    from attncheck.examine.environment import default_device, prepare
    from attncheck.subjects.load import load

    device = device or default_device()
    prepare(device)
    try:
        asked = Case.from_json(json.loads(case))
    except json.JSONDecodeError as error:
        raise UsageError(f"the case is not JSON: {error}.") from None
    subject = load(kernel)
    reason = subject.absent(device) or subject.unsupported(asked.problem, device)
    if reason:
        raise UsageError(f"{kernel} does not take {asked.problem} on {device}: {reason}.")
    found = relate(subject, asked, device=device)
    return "holds" if found is None else str(Broken(kernel=kernel, case=asked, found=found))


def _kept(outputs: Outputs) -> Outputs:
    """Copies: a kernel that returns the same buffer each time would be compared with itself."""
    return Outputs(outputs.out.clone(), None if outputs.lse is None else outputs.lse.clone())


def command(kernel: str, case: Case, examiner: str = "relate") -> str:
    """The shell command that asks ``case`` of ``kernel`` again.

    Args:
        kernel: A name, or ``file.py::name``.
        case: What is asked, whole.
        examiner: The module of ``examine`` whose ``replay`` asks it.
    """
    text = json.dumps(case.to_json(), separators=(",", ":"))
    module = f"attncheck.examine.{examiner}"
    code = f"import sys; from {module} import replay; print(replay(*sys.argv[1:]))"
    return f'python -c "{code}" {shlex.quote(kernel)} {shlex.quote(text)}'
