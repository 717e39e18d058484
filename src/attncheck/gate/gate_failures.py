"""Failures of a kernel: diagnosed, shrunk and kept."""

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
from attncheck.verify.question_fit import question_problem, unfit_reason
from attncheck.workers.units import Unit

# A single row, whole tiles, and one row beyond them: the edges where tails begin.
_LENGTHS = (1, 2, 3, 8, 16, 17, 32, 64, 65)
# The smallest first, then the one that most kernels take.
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
    """Return the Record of the smallest Case found that fails alike; None if there is no smaller.

    Each step asks the Cases that are a little plainer, the plainest first, and goes on from the
    first that still fails.

    Args:
        seconds: No Case is asked after so long.
        clock: For tests.
        explained: Whether the cause of what fails explains the Record of another Case, too.
    """
    end, best = clock() + seconds, failed
    refused: set[str] = {failed.case_id}
    progressed = True
    while progressed:
        progressed = False
        for case in plainer_cases(Case.from_json(best.case)):
            if case.id in refused or not supports(case.problem):
                continue
            if clock() >= end:
                return None if best is failed else best
            refused.add(case.id)
            record = ask(case)
            if fails_alike(record, failed) and explained(record):
                best, progressed = record, True
                break
    return None if best is failed else best


def fails_alike(record: Record, failed: Record) -> bool:
    """Return whether both are wrong in the same way: by the same rule, with the same symptom."""
    return record.status in FAILED_STATUSES and symptom(record) == symptom(failed)


def plainer_cases(case: Case) -> Iterator[Case]:
    """Yield cases one step plainer than ``case``, the largest steps first."""
    for changes in _changes(case.problem):
        try:
            problem = question_problem(case.question, case.problem.replace(**changes))
            if unfit_reason(case.question, problem) is None:
                yield move_case(case, problem)
        except ProblemError:  # documents that must cover a length, say
            continue


def _changes(problem: Problem) -> Iterator[dict[str, Any]]:
    softmax = problem.operation == "softmax"
    yield from _smaller_value(problem, "batch", (1,))
    if not softmax:
        yield from _heads(problem)
        for name in ("dcaptured", "dlse", "backward", "sink"):
            yield from _without_feature(problem, name)
        yield from _plainer(problem)
    elif problem.heads > 1:
        yield {"heads": 1, "kv_heads": 1}
    for name in ("query", "kv"):
        yield from _shorter(problem, name)
    yield from _shorter_both(problem)
    if not softmax:
        yield from _dims(problem)
    if problem.distribution != "normal":
        yield {"distribution": "normal"}
    yield from _smaller_value(problem, "seed", (0,))


def _smaller_value(
    problem: Problem, name: str, values: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    yield from ({name: value} for value in values if value < getattr(problem, name))


def _heads(problem: Problem) -> Iterator[dict[str, Any]]:
    now = (problem.heads, problem.kv_heads)
    for heads, kv_heads in ((1, 1), (2, 2), (2, 1), (problem.kv_heads, problem.kv_heads)):
        if heads < now[0]:
            yield {"heads": heads, "kv_heads": kv_heads}


def _without_feature(problem: Problem, name: str) -> Iterator[dict[str, Any]]:
    if getattr(problem, name):
        # Without a backward, no gradient of LSE or of a score mod's tensors can be asked for.
        gradients = {"dlse": False, "dcaptured": False} if name == "backward" else {}
        yield {name: False} | gradients


def _plainer(problem: Problem) -> Iterator[dict[str, Any]]:
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


def _shorter(problem: Problem, name: str) -> Iterator[dict[str, Any]]:
    length = getattr(problem, name)
    for shorter in dict.fromkeys((*_LENGTHS, length // 2, length - 16, length - 1)):
        if 0 < shorter < length:
            yield {name: shorter} | _fitting_mask(problem, name, shorter)


def _shorter_both(problem: Problem) -> Iterator[dict[str, Any]]:
    """Yield shorter lengths, both at once: for a kernel, or a mask, that takes equal ones alone."""
    if problem.query == problem.kv:
        for change in _shorter(problem, "query"):
            length = change["query"]
            yield {"query": length, "kv": length} | _fitting_mask(problem, "both", length)


def _fitting_mask(problem: Problem, name: str, length: int) -> dict[str, Any]:
    """Return the mask with lists of lengths that fit a length that has shrunk."""
    spec = problem.mask.to_json()
    if problem.mask.name == "padding" and name in {"kv", "both"}:
        return {
            "mask": Spec.from_json(spec | {"lengths": [min(n, length) for n in spec["lengths"]]})
        }
    if problem.mask.name != "document":
        return {}
    other = {"query": problem.kv, "kv": problem.query, "both": length}[name]
    total = max(length, other)
    # Documents must cover the longer length; two of them keep a border to get wrong.
    parts = [total // 2, total - total // 2] if total > 1 else [total]
    return {"mask": Spec.from_json(spec | {"lengths": parts})}


def _dims(problem: Problem) -> Iterator[dict[str, Any]]:
    if problem.value_dim != problem.head_dim:
        yield {"value_dim": problem.head_dim}
    usual = problem.has_usual_scale
    for dim in _DIMS:
        if dim < problem.head_dim:
            # Scores stay as large as they were, or the failure might vanish with them.
            scale = USUAL_SCALE if usual else problem.scale * math.sqrt(problem.head_dim / dim)
            yield {"head_dim": dim, "value_dim": dim, "scale": scale}


SHRUNK_STATUSES = frozenset({"fail", "error", "crash"})
"""What is made smaller: what hangs takes as long each time."""


class FailureLog:
    """The failures of a worker's kernels; of many alike only the first few are looked into.

    Args:
        choices: What is asked: how many are made smaller, and where failures are kept.
    """

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._shrunk: dict[str, set[str]] = {}
        self._searches: dict[str, diagnosis.CauseSearch] = {}

    def diagnose(self, record: Record, unit: Unit, host: KernelHost) -> Record:
        """Return ``record`` with what may be wrong, where it is a failure that nobody knows of."""
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
        """Return the smallest Case that fails alike, diagnosed; and the id of the first.

        None where it is like one that was made smaller before, does not fail again, or there is no
        smaller one.
        """
        case, tier = Case.from_json(unit.case), self._choices.tier
        # One of each question and direction: a hundred failures of one fault say no more.
        mark, done = (
            f"{case.question} {case.problem.backward}",
            self._shrunk.setdefault(unit.kernel, set()),
        )
        if mark in done or len(done) >= tier.shrinks:
            return None
        done.add(mark)
        # Asked again: a failure that does not come every time cannot be made smaller.
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
        # The report names the failure by its id even where no file is kept.
        if self._choices.failures:
            keep_failure(kept, self._choices.failures)
        return kept.id


def _call_options(unit: Unit, host: KernelHost) -> dict[str, Any]:
    return {"device": unit.device, "executor": host.executor}
