"""What becomes of a kernel's failures: what is wrong with them, a smaller one, one that is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncheck.diagnose.diagnosis import diagnose_failure, explain_failure
from attncheck.diagnose.reproduce import new_failure
from attncheck.gate.known import KNOWN
from attncheck.gate.shrinking import smallest
from attncheck.inputs.problem import Case
from attncheck.records.failures import keep_failure
from attncheck.records.record import FAILED_STATUSES

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.gate.choices import Choices
    from attncheck.gate.hosts import AnyHost
    from attncheck.gate.planning import Planning
    from attncheck.records.record import Record
    from attncheck.workers.units import Unit

__all__ = ["SHRUNK", "Failures"]

SHRUNK = frozenset({"fail", "error", "crash"})
"""What is made smaller: what hangs takes as long each time."""

_DIAGNOSED = 24  # failures of one kernel of which it is looked for what is wrong


class Failures:
    """Of all kernels of a lane; of many alike only the first few are looked into.

    Args:
        choices: What is asked: how many are made smaller, and where failures are kept.
    """

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._shrunk: dict[str, set[str]] = {}
        self._diagnosed: dict[str, set[str]] = {}

    def diagnosed(self, record: Record, unit: Unit, host: AnyHost) -> Record:
        """``record`` with what may be wrong, where it is a failure unlike those before."""
        if record.status != "fail" or record.reason.startswith(KNOWN):
            return record
        case = Case.from_json(unit.case)
        mark = f"{case.question} {case.problem.backward} {case.problem.dtype}"
        if not _is_new(self._diagnosed, unit.kernel, mark, _DIAGNOSED):
            return record
        return diagnose_failure(record, host.subject, **_how(unit, host))

    def smaller(
        self,
        unit: Unit,
        host: AnyHost,
        ask: Callable[[Case], Record],
        planning: Callable[[], Planning],
    ) -> tuple[Record, str] | None:
        """The smallest Case that fails alike, with what may be wrong; and the id of the first.

        None where it is like one that was made smaller before, does not fail again, or there is no
        smaller one.

        Args:
            unit: Whose Case fails.
            host: The kernel's.
            ask: What the kernel answers to a Case.
            planning: Says what it takes.
        """
        case, tier = Case.from_json(unit.case), self._choices.tier
        mark = f"{case.question} {case.problem.backward}"
        if not _is_new(self._shrunk, unit.kernel, mark, tier.shrinks):
            return None
        first = ask(case)
        if first.status not in SHRUNK:
            return None
        found = smallest(first, ask, planning().supports, seconds=tier.shrinking)
        if found is None:
            return None
        how = _how(unit, host)
        larger = explain_failure(first, host.subject, **how)
        return diagnose_failure(found, host.subject, before=larger, **how), first.case_id

    def kept(self, record: Record, unit: Unit) -> str:
        """Keep a failure for ``attncheck repro``; its id, empty where there is none."""
        if record.status not in FAILED_STATUSES or record.reason.startswith(KNOWN):
            return ""
        kept = new_failure(
            record,
            kernel=unit.kernel,
            device=unit.device,
            convention=unit.convention,
            test=unit.test,
        )
        if self._choices.failures:
            keep_failure(kept, self._choices.failures)
        return kept.id


def _is_new(seen: dict[str, set[str]], kernel: str, mark: str, most: int) -> bool:
    """Whether ``mark`` is one of the first few of a kernel; it is seen from now on."""
    done = seen.setdefault(kernel, set())
    if mark in done or len(done) >= most:
        return False
    done.add(mark)
    return True


def _how(unit: Unit, host: AnyHost) -> dict[str, Any]:
    return {"device": unit.device, "executor": host.executor}
