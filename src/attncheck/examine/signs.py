"""What a failure says by itself of what may be wrong, where no fault model explains it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.errors import AttncheckError
from attncheck.examine.answer import answered
from attncheck.examine.beside import changes, read_beside, taken_otherwise
from attncheck.examine.executor import out_of_memory
from attncheck.examine.explaining import NO_FIT
from attncheck.hypotheses.signs import MOST_PLACES, SIGNS
from attncheck.probes import PROBES
from attncheck.problem import Case
from attncheck.record import Explanation
from attncheck.relations import RELATIONS
from attncheck.relations.strides_far import TENSORS

if TYPE_CHECKING:
    from attncheck.examine.executor import Executor
    from attncheck.problem import Problem
    from attncheck.record import Record
    from attncheck.subjects.contract import Subject

__all__ = ["by_proof", "by_signs"]

_OF_REPEATING = ("repeat", "repeats")
_OF_BATCHES = ("alone_in_batch", "batch_permutation", "neighbours")
_AGAIN = 2  # times that a question is asked again
_FAR = "strides_far"
_LAYOUTS = tuple(name for name in RELATIONS if name.startswith("strides_"))
# Of these both runs have the numbers of the plain call: where that is right, it is the layout.
_SAME_NUMBERS = ("strides_heads_last", "strides_gapped", "strides_packed", "strides_transposed")


def by_signs(
    record: Record, subject: Subject, *, device: str, executor: Executor
) -> Explanation | None:
    """What the failure says of calls that differ; None where that is nothing.

    Args:
        record: Of status ``fail``, of numbers that were wrong.
        subject: The kernel, which is asked again.
        device: ``cpu`` or ``cuda``.
        executor: How to call it.
    """
    if record.status != "fail" or record.judgement is None:
        return None
    try:
        name = _sign(Case.from_json(record.case), subject, device, executor)
    except AttncheckError:  # asked of nothing that can be asked again
        return None
    return None if name is None else _told(name)


def by_proof(  # what is asked, of whom, and what is known already
    record: Record,
    subject: Subject,
    *,
    device: str,
    executor: Executor,
    wrong: bool,
    explained: bool,
) -> Explanation | None:
    """What other layouts and surroundings prove of it; None where that is nothing.

    Args:
        record: As of ``by_signs``.
        subject: The kernel, which is asked again.
        device: ``cpu`` or ``cuda``.
        executor: How to call it.
        wrong: Whether a run of its question is beyond its bound, not only unlike another one.
        explained: Whether a fault model predicts the numbers it gives: only the layout is asked
            about then, and only where the question is of one.
    """
    if record.status != "fail" or record.judgement is None:
        return None
    try:
        case = Case.from_json(record.case)
        right = False
        if case.question in _LAYOUTS:
            right, names = taken_otherwise(case, subject, device, executor)
            if names:
                return _told("strides-not-taken", of=names)
        # What is read beside an input changes with its layout, too: it is asked about first.
        names = ""
        if not explained and case.question in (*RELATIONS, *PROBES, "compare"):
            names = read_beside(case, subject, device, executor)
        if right and wrong and not names:
            return _of_layout(case, subject, device, executor)
    except (*NO_FIT, MemoryError) as error:
        if not isinstance(error, AttncheckError) and not out_of_memory(error):
            raise
        return None
    return _told("reads-beside-an-input", of=names) if names else None


def _told(name: str, **parameters: str) -> Explanation:
    given: dict[str, int | float | str] = {key: value for key, value in parameters.items() if value}
    return Explanation(
        model=name, sentence=SIGNS[name], share=1.0, explains_all=True, parameters=given
    )


def _of_layout(case: Case, subject: Subject, device: str, executor: Executor) -> Explanation | None:
    """What a relation of layouts says that fails, where no input alone is wrong laid out near."""
    if case.question not in (_FAR, *_SAME_NUMBERS):
        return None
    # Far rows take gibibytes: once more is to do.
    again = answered(subject, case, device=device, executor=executor, brief=True).status
    if again != "fail":
        return _told("not-the-same-again") if again == "pass" else None
    if case.question == _FAR:
        return _told("far-offsets-wrap", of=TENSORS[int(case.parameters["tensor"])])
    return _told("strides-not-taken", of="k" if case.question == "strides_transposed" else "")


def _passes(case: Case, subject: Subject, device: str, executor: Executor) -> bool:
    found = answered(subject, case, device=device, executor=executor, brief=True)
    return found.status == "pass"


def _sign(case: Case, subject: Subject, device: str, executor: Executor) -> str | None:
    def passes(question: Case) -> bool:
        return _passes(question, subject, device, executor)

    asked = case.question
    if asked in _OF_REPEATING:
        return "not-the-same-again"
    if asked in _OF_BATCHES and passes(Case(problem=case.problem)):
        return None if passes(case) else "depends-on-the-batch"
    times = 1 if asked == _FAR else _AGAIN  # gibibytes each time
    if asked in (*RELATIONS, *PROBES, "compare") and (
        any(passes(case) for _ in range(times)) or changes(case, subject, device, executor)
    ):
        return "not-the-same-again"
    if asked in RELATIONS and (fewer := _that_fit(case.problem)) is not None:
        smaller = Case(problem=fewer, question=asked, parameters=case.parameters)
        return "grid-axis-exceeded" if passes(smaller) else None
    return None


def _that_fit(problem: Problem) -> Problem | None:
    """As many sequences as an axis of a grid has room for; None where all have."""
    if problem.batch * problem.heads <= MOST_PLACES or problem.heads > MOST_PLACES:
        return None
    return problem.replace(batch=MOST_PLACES // problem.heads)
