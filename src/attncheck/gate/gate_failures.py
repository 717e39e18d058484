"""Diagnose, shrink and store the failures of a kernel."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from attncheck.core.errors import ProblemError
from attncheck.core.mod_spec import FULL, NONE, Spec
from attncheck.diagnose import diagnosis
from attncheck.diagnose.reproduce import new_failure
from attncheck.gate.planning import Choices, Planning, move_case
from attncheck.gate.property_stage import KNOWN
from attncheck.inputs.problem import USUAL_SCALE, Case, Problem
from attncheck.records.failure_causes import symptom
from attncheck.records.failures import keep_failure
from attncheck.records.record import FAILED_STATUSES, Record
from attncheck.verify.kernel_hosts import KernelHost
from attncheck.verify.question_fit import question_named, question_problem
from attncheck.workers.units import Unit

# Lengths to shrink to: a single row, whole tiles, and one row more, where partial tiles begin.
_LENGTHS = (1, 2, 3, 8, 16, 17, 32, 64, 65)
# Head dimensions to shrink to: the smallest, the most widely supported, and others.
_DIMS = (16, 64, 32, 128)


def shrink_case(
    failed: Record,
    ask: Callable[[Case], Record],
    supports: Callable[[Problem], bool],
    *,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    explained: Callable[[Record], bool] = lambda _: True,
) -> Record | None:
    """Return the Record of the smallest Case found that fails alike; None if none is smaller.

    Each step asks Cases that are one step plainer, the plainest first, and continues with the first
    that still fails.

    Args:
        seconds: Time after which no Case is asked.
        clock: A replacement of the clock, for tests.
        explained: Whether the cause of the failure also explains another Case's Record.
    """
    end, best = clock() + seconds, failed
    tried_ids: set[str] = {failed.case_id}
    progressed = True
    while progressed:
        progressed = False
        for case in plainer_cases(Case.from_json(best.case)):
            if case.id in tried_ids or not supports(case.problem):
                continue
            if clock() >= end:
                return None if best is failed else best
            tried_ids.add(case.id)
            record = ask(case)
            alike = record.status in FAILED_STATUSES and symptom(record) == symptom(failed)
            if alike and explained(record):
                best, progressed = record, True
                break
    return None if best is failed else best


def plainer_cases(case: Case) -> Iterator[Case]:
    """Yield cases one step plainer than ``case``, the largest steps first."""
    for changes in _changes(case.problem):
        try:
            problem = question_problem(case.question, case.problem.replace(**changes))
            if question_named(case.question).unfit(problem) is None:
                yield move_case(case, problem)
        except ProblemError:  # for example documents that must cover a length
            continue


def _changes(problem: Problem) -> Iterator[dict[str, Any]]:
    softmax = problem.operation == "softmax"
    if problem.batch > 1:
        yield {"batch": 1}
    if not softmax:
        yield from _fewer_heads(problem)
        yield from _fewer_features(problem)
        yield from _plainer_mods(problem)
    elif problem.heads > 1:
        yield {"heads": 1, "kv_heads": 1}
    for names in (("query",), ("kv",), ("query", "kv")):
        yield from _shorter_lengths(problem, names)
    if not softmax:
        yield from _smaller_dims(problem)
    if problem.distribution != "normal":
        yield {"distribution": "normal"}
    if problem.seed:
        yield {"seed": 0}


def _fewer_heads(problem: Problem) -> Iterator[dict[str, Any]]:
    now = (problem.heads, problem.kv_heads)
    for heads, kv_heads in ((1, 1), (2, 2), (2, 1), (problem.kv_heads, problem.kv_heads)):
        if heads < now[0]:
            yield {"heads": heads, "kv_heads": kv_heads}


def _fewer_features(problem: Problem) -> Iterator[dict[str, Any]]:
    for name in ("dcaptured", "dlse", "backward", "sink"):
        if not getattr(problem, name):
            continue
        # Without a backward, no gradient of LSE or of a score mod's tensors can be asked for.
        gradients = {"dlse": False, "dcaptured": False} if name == "backward" else {}
        yield {name: False} | gradients


def _plainer_mods(problem: Problem) -> Iterator[dict[str, Any]]:
    if problem.score != NONE:
        yield {"score": NONE, "dcaptured": False}
    if problem.paging is not None:
        yield {"paging": None}
    if problem.mask != FULL:
        yield {"mask": FULL}
        if problem.mask != Spec.of("causal"):
            yield {"mask": Spec.of("causal")}
        for part in problem.mask.parts or ():
            yield {"mask": part}
    if not problem.has_usual_scale:
        yield {"scale": USUAL_SCALE}


def _shorter_lengths(problem: Problem, names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield a shorter length, or of both if they are equal, as some kernels and masks need it."""
    length = getattr(problem, names[0])
    if any(getattr(problem, name) != length for name in names):
        return
    for shorter in dict.fromkeys((*_LENGTHS, length // 2, length - 16, length - 1)):
        if 0 < shorter < length:
            lengths = dict.fromkeys(names, shorter)
            yield lengths | _fitting_mask(problem, lengths)


def _fitting_mask(problem: Problem, changes: dict[str, int]) -> dict[str, Any]:
    """Return the change of a mask's list of lengths that shorter lengths require."""
    spec = problem.mask.to_json()
    if problem.mask.name in {"padding", "bottom_right"} and "kv" in changes:
        lengths = [min(n, changes["kv"]) for n in spec["lengths"]]
    elif problem.mask.name == "document":
        # Documents must cover the longer length; two of them preserve a border.
        total = max(changes.get("query", problem.query), changes.get("kv", problem.kv))
        lengths = [total // 2, total - total // 2] if total > 1 else [total]
    else:
        return {}
    return {"mask": Spec.from_json(spec | {"lengths": lengths})}


def _smaller_dims(problem: Problem) -> Iterator[dict[str, Any]]:
    if problem.value_dim != problem.head_dim:
        yield {"value_dim": problem.head_dim}
    usual = problem.has_usual_scale
    for dim in _DIMS:
        if dim < problem.head_dim:
            # Keeps the magnitude of the scores, so that the failure does not vanish with them.
            scale = USUAL_SCALE if usual else problem.scale * math.sqrt(problem.head_dim / dim)
            yield {"head_dim": dim, "value_dim": dim, "scale": scale}


SHRUNK_STATUSES = frozenset({"fail", "error", "crash"})
"""Statuses of failures that are shrunk; each repetition of a timeout would take too long."""


class FailureLog:
    """Diagnoses, shrinks and stores failures; only the first few of many similar ones.

    Args:
        choices: Determines how many failures are shrunk, and where failures are stored.
    """

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._shrunk: dict[str, set[str]] = {}
        self._searches: dict[str, diagnosis.CauseSearch] = {}

    def diagnose(self, record: Record, unit: Unit, host: KernelHost) -> Record:
        """Return ``record`` with a diagnosis, unless it is a known failure or no failure."""
        search = self._searches.setdefault(unit.kernel, diagnosis.CauseSearch())
        if record.status != "fail" or record.reason.startswith(KNOWN):
            search.note(record)
            return record
        return search.diagnose(record, host.subject, **_call_options(unit, host))

    def shrink(
        self,
        unit: Unit,
        host: KernelHost,
        ask: Callable[[Case], Record],
        planning: Callable[[], Planning],
    ) -> tuple[Record, str] | None:
        """Return the diagnosed Record of the smallest Case found, and the original Case's id.

        None if a similar failure has been shrunk before, the Case does not fail again, or no
        smaller one fails.
        """
        case, tier = Case.from_json(unit.case), self._choices.tier
        # One failure of each question and direction is enough.
        kind = f"{case.question} {case.problem.backward}"
        kinds_done = self._shrunk.setdefault(unit.kernel, set())
        if kind in kinds_done or len(kinds_done) >= tier.shrinks:
            return None
        kinds_done.add(kind)
        # Asked again, since a failure that is not reproducible cannot be shrunk.
        first = ask(case)
        if first.status not in SHRUNK_STATUSES:
            return None
        how = _call_options(unit, host)
        first = self.diagnose(first, unit, host)
        causes = set(diagnosis.certain_causes(first))
        shrunk = shrink_case(
            first,
            ask,
            planning().supports,
            seconds=tier.shrink_seconds,
            explained=lambda record: (
                not causes
                or diagnosis.explained_by(record, causes, host.subject, **how) is not None
            ),
        )
        if shrunk is None:
            return None
        larger = diagnosis.explain_failure(first, host.subject, **how)
        return diagnosis.diagnose_failure(shrunk, host.subject, before=larger, **how), first.case_id

    def keep(self, record: Record, unit: Unit) -> str:
        """Store a failure for ``attncheck repro``, and return its id; empty for no new failure."""
        if record.status not in FAILED_STATUSES or record.reason.startswith(KNOWN):
            return ""
        failure = new_failure(
            record,
            kernel=unit.kernel,
            device=unit.device,
            convention=unit.convention,
            test=unit.test,
        )
        # The report contains the id even if no file is stored.
        if self._choices.failures:
            keep_failure(failure, self._choices.failures)
        return failure.id


def _call_options(unit: Unit, host: KernelHost) -> dict[str, Any]:
    return {"device": unit.device, "executor": host.executor}
