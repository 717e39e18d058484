"""Checks of memory: what a call writes where, what it reads that nobody wrote, what it leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from attncheck.examine.asking import Asking, Check, remarks
from attncheck.examine.circumstances import PLAIN, Circumstances
from attncheck.examine.poison import junk
from attncheck.judgement import Judgement

if TYPE_CHECKING:
    from attncheck.examine.circumstances import Noted
    from attncheck.examine.executor import Execution
    from attncheck.judgement import Rule
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.question import Allowed
    from attncheck.tensor_names import TensorName

__all__ = ["GUARDS", "LEAKS", "STATE", "UNWRITTEN"]

_FILLS = Circumstances(fill="pattern"), Circumstances(fill="inverse")
_RULES: tuple[Rule, ...] = ("memory", "state", "leak")
_WINDOWS = (2, 8, 32)
_UNGUARDED = "no guard bands around {}: torch did not ask Python for that memory"
_UNPOISONED = "{} may have held anything before: torch did not ask Python for that memory"


def _guards(asking: Asking) -> Judgement:
    """Two runs, the second with the inverse pattern: what wrote the pattern itself is seen too."""
    seen = [asking.run(under).noted for under in _FILLS]
    missing = (_UNGUARDED.format(each.unguarded) for each in seen if each.unguarded)
    return _noted(seen, remarks(*missing))


def _noted(seen: list[Noted], found: tuple[str, ...] = ()) -> Judgement:
    """The verdict on what was noted around calls."""
    found += remarks(*(each.unchecked for each in seen), *(each.remark for each in seen))
    for each in seen:
        if each.wrong:
            return Judgement(status="fail", rule=_rule(each), reason=each.wrong, warnings=found)
    return Judgement(status="pass", warnings=found)


def _rule(noted: Noted) -> Rule:
    return next((rule for rule in _RULES if rule == noted.rule), "memory")


def _unwritten(asking: Asking) -> Judgement:
    plain, *filled = (asking.run(under) for under in (PLAIN, *_FILLS))
    noted = [each.noted for each in filled]
    unknown = {name for each in noted for name in each.unpoisoned.split(", ") if name}
    found = remarks(_UNPOISONED.format(", ".join(sorted(unknown))) if unknown else "")
    names = plain.outputs.tensors()
    for name in names:
        wrong = _left(name, *(each.outputs for each in filled))
        if wrong:
            return Judgement(status="fail", rule="memory", reason=wrong, warnings=found)
    reads = _reads(plain, filled)
    if reads and not _repeats(asking, filled[0]):
        odd = "two calls on the same inputs differ: what it reads of unwritten memory is not told"
        return Judgement(status="inconclusive", rule="memory", reason=odd, warnings=found)
    if reads:
        return Judgement(status="fail", rule="memory", reason=reads, warnings=found)
    if unknown:
        return Judgement(status="inconclusive", rule="memory", reason=found[0])
    return Judgement(status="pass", warnings=found)


def _left(name: TensorName, one: Outputs, other: Outputs) -> str:
    """What of an output nobody wrote: all its bytes differ as what filled memory does."""
    a, b = (_elements(each, name) for each in (one, other))
    where = (a ^ b == 0xFF).all(-1) | junk(a) & (b == 0).all(-1)
    return f"left {_counted(where, name, one)} unwritten" if bool(where.any()) else ""


def _reads(plain: Execution, filled: list[Execution]) -> str:
    """What of the outputs depends on memory that nobody wrote."""
    for name in plain.outputs.tensors():
        was = _elements(plain.outputs, name)
        where = torch.zeros(len(was), dtype=torch.bool, device=was.device)
        for each in filled:
            where |= (_elements(each.outputs, name) != was).any(-1)
        if bool(where.any()):
            said = _counted(where, name, plain.outputs)
            return f"reads poison: {said} depend on memory that nobody wrote"
    return ""


def _repeats(asking: Asking, first: Execution) -> bool:
    """Whether the same call gives the same bits where memory holds what it did."""
    before, after = first.outputs, asking.run(_FILLS[0]).outputs
    return all(
        bool((_elements(before, name) == _elements(after, name)).all()) for name in before.tensors()
    )


def _elements(outputs: Outputs, name: TensorName) -> torch.Tensor:
    """The bytes of each element of a tensor, ``(elements, bytes)``."""
    tensor = outputs.tensors()[name]
    bits = tensor.detach().contiguous().flatten().view(torch.uint8)
    return bits.view(-1, tensor.element_size())


def _counted(where: torch.Tensor, name: TensorName, outputs: Outputs) -> str:
    shape = outputs.tensors()[name].shape
    first = np.unravel_index(int(where.nonzero()[0, 0]), shape)
    index = ", ".join(str(int(i)) for i in first)
    return f"{int(where.sum())} of {len(where)} elements of {name}, first [{index}],"


def _state(asking: Asking) -> Judgement:
    return _noted([asking.run(Circumstances(state=True)).noted])


def _leaks(asking: Asking) -> Judgement:
    window = int(asking.case.parameters["calls"])
    return _noted([asking.run(Circumstances(window=window)).noted])


def _windows(problem: Problem) -> Allowed:
    del problem
    return {"calls": _WINDOWS}


GUARDS = Check(
    name="guards",
    summary="nothing is written before or after a tensor that the call reads or allocates",
    stage="memory",
    look=_guards,
)
UNWRITTEN = Check(
    name="unwritten",
    summary="every element of the outputs is written, and none depends on memory nobody wrote",
    stage="memory",
    look=_unwritten,
)
STATE = Check(
    name="state",
    summary="a call leaves its process as it was: generators, flags, modes, directory, environment",
    stage="memory",
    look=_state,
)
LEAKS = Check(
    name="leaks",
    summary="the process holds no more descriptors, threads, children or tensors after `calls` "
    "calls, three times over",
    stage="memory",
    look=_leaks,
    allowed=_windows,
)
