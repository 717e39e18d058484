"""A gate driven in this process against one kernel, in the order in which lanes would do it."""

from __future__ import annotations

import faulthandler
import heapq
import re
from typing import TYPE_CHECKING, NamedTuple

from attncheck.errors import AttncheckError
from attncheck.examine.connection import Deadlines
from attncheck.fault_record import Wrong
from attncheck.gate.choices import Choices
from attncheck.gate.known import Known
from attncheck.gate.plan import describing, priority
from attncheck.gate.work import Gate
from attncheck.inert import one_line
from attncheck.problem import Case
from attncheck.record import WRONG

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from attncheck.faults.listening import Listening
    from attncheck.gate_record import Answer
    from attncheck.record import Record
    from attncheck.runner.unit import Done, Unit

__all__ = ["Drive", "Failed", "NotScored", "wrong"]

# What a planted text raises that is no kernel: its fault is ours, or of who wrote the variant.
_BROKEN = re.compile(
    r"(?:^|raised )(?:ImportError|ModuleNotFoundError|NameError|UnboundLocalError|SyntaxError"
    r"|IndentationError|AttributeError|CompilationError|UnsupportedLanguageConstruct)\b"
)
_NO_TRUTH = "out of memory for"  # what a Record says where the judge had none
_PATIENCE = 2 * Deadlines().compile  # seconds that one question may take


class NotScored(AttncheckError):
    """What was planted does not run, or was asked nothing: neither caught nor missed."""


class Failed(NamedTuple):
    """The first wrong answer, and the work that would make it smaller."""

    answer: Answer
    shrinking: tuple[Unit, ...]


class Drive:
    """All of a gate against one kernel, until somebody has seen enough.

    Args:
        kernel: As ``subjects.load.load`` takes it.
        device: ``cpu`` or ``cuda``.
        tier: How hard.
        dtype: In which; empty for all that it takes.
        stages: Which, between commas; empty for all.
        isolated: Whether the kernel has a process of its own: slower, and it may crash or hang.
        listening: Calls a kernel that has none; hears of each question's first call.

    Attributes:
        problems: Questions answered so far, and taken.
        seconds: That describing, drawing and asking took so far.
        environment: Key and facts of where, once the kernel is described.
    """

    def __init__(  # one kernel, said once
        self,
        kernel: str,
        *,
        device: str,
        tier: str,
        dtype: str,
        stages: str,
        isolated: bool,
        listening: Listening,
    ) -> None:
        options: dict[str, str | bool] = {
            "tier": tier,
            "isolated": isolated,
            "dtypes": dtype,
            "stages": stages,
        }
        self._gate = Gate(Choices.of(options), Known(()), lambda: listening)
        self._listening = listening
        self._watched = not isolated
        self._queue: list[tuple[tuple[int, ...], int, Unit]] = []
        self._seen: set[str] = set()
        self.problems, self.seconds = 0, 0.0
        self.environment: dict[str, object] = {}
        self._add(describing([kernel], device=device, tier=tier, convention=""))

    def close(self) -> None:
        """End what was started."""
        self._gate.close()

    def answers(self) -> Iterator[tuple[Answer, tuple[Unit, ...]]]:
        """Each answer, with the work that would make a wrong one smaller.

        Raises:
            NotScored: where the gate cannot ask, or the kernel's own text is broken.
        """
        while self._queue:
            *_, unit = heapq.heappop(self._queue)
            done = self._did(unit)
            self.seconds += done.seconds
            smaller = tuple(each for each in done.units if each.kind == "shrink")
            for answer in done.answers:
                self.problems += answer.record.status != "unsupported"
                _check_runs(answer.record)
                yield answer, smaller
            self._add(each for each in done.units if each.kind != "shrink")
        if not self.problems:
            raise NotScored("it takes nothing of what the gate asks: nothing was asked of it.")

    def shrunk(self, units: Iterable[Unit]) -> tuple[Answer | None, float]:
        """The smallest failure alike, None where none is smaller; and the seconds that took."""
        seconds, found = 0.0, None
        for unit in units:
            done = self._gate.do(unit)
            seconds += done.seconds
            found = next(iter(done.answers), found)
        return found, seconds

    def _did(self, unit: Unit) -> Done:
        if self._watched:  # a kernel that hangs takes this process with it: it is scored alone then
            faulthandler.dump_traceback_later(_PATIENCE, exit=True)
        self._listening.forget()
        try:
            done = self._gate.do(unit)
        finally:
            if self._watched:
                faulthandler.cancel_dump_traceback_later()
        said = done.harness or str(done.facts.get("absent") or done.facts.get("missing") or "")
        if said:
            raise NotScored(one_line(said))
        if unit.kind == "describe":
            self.environment = dict(done.facts["environment"])
        return done

    def _add(self, units: Iterable[Unit]) -> None:
        for unit in units:
            if unit.id not in self._seen:
                self._seen.add(unit.id)
                heapq.heappush(self._queue, (priority(unit), len(self._seen), unit))


def wrong(answer: Answer) -> Wrong:
    """What a report says of a wrong answer."""
    record = answer.record
    judged = record.judgement
    return Wrong(
        stage=answer.stage,
        question=str(record.case["question"]),
        status=record.status,
        rule=judged.rule if judged else "",
        reason=one_line(record.reason or (judged.reason if judged else "")),
        variant=record.variant,
        problem=str(Case.from_json(record.case).problem),
        case=record.case,
    )


def _check_runs(record: Record) -> None:
    """Raises NotScored where what the kernel raised says that its text is broken, or ours is."""
    if record.status not in WRONG or record.judgement is not None:
        return
    if _BROKEN.search(record.reason):
        raise NotScored(one_line(f"what was planted is no kernel: {record.reason}"))
    if record.reason.startswith(_NO_TRUTH):
        raise NotScored(one_line(record.reason))
