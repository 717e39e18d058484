"""The Inputs that a kernel is called with, drawn anew from what names them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck import inputs as inputs_room
from attncheck import probes
from attncheck.errors import UsageError
from attncheck.examine.relate import runs
from attncheck.relations import RELATIONS

if TYPE_CHECKING:
    from attncheck.examine.executor import Origin
    from attncheck.inputs import Inputs

__all__ = ["drawn"]


def drawn(origin: Origin, device: str) -> Inputs:
    """The same bits as those that ``origin`` was said of, in whatever process.

    Raises:
        UsageError: for a question that cannot be asked of its Problem, or a run that it has not.
    """
    case = origin.case
    if case.question in RELATIONS:
        each = runs(case, device)
        if not 0 <= origin.run < len(each):
            raise UsageError(f"{case.question} has no run {origin.run}.")
        return each[origin.run]
    if case.question in probes.PROBES:
        return probes.inputs(case, device)
    return inputs_room.draw(case.problem, device)
