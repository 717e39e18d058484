"""Stage properties: each property in some of its dtypes and mask families, then its Cases."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from msgspec.structs import replace

from attncheck.inputs.problem import Case
from attncheck.relations import RELATIONS
from attncheck.suite.catalogue import Property, properties, property_named
from attncheck.suite.drawing import Drawing, drawn
from attncheck.suite.samples import NOT_CONCERNED, samples
from attncheck.suite.tiers import tier_named
from attncheck.workers.units import Unit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attncheck.gate.known import Known
    from attncheck.gate.planning import Planning
    from attncheck.records.run_reports import Stage

__all__ = ["asks", "chosen", "searches"]

_STAGE: Stage = "properties"
Pair = tuple[str, str]


def searches(planning: Planning) -> Iterator[Unit]:
    """What is to be drawn: a property, a dtype and a family each."""
    used: Counter[str] = Counter()
    for each in properties():
        pairs = _pairs(planning, each)
        for dtype, family in chosen(pairs, planning.choices.tier.combinations, used):
            yield Unit(
                kind="draw",
                stage=_STAGE,
                kernel=planning.unit.kernel,
                convention=planning.unit.convention,
                device=planning.device,
                tier=planning.unit.tier,
                test=each.id,
                dtype=dtype,
                family=family,
            )


def chosen(pairs: Sequence[Pair], most: int, used: Counter[str]) -> list[Pair]:
    """Up to ``most`` of ``pairs`` (0: all), each value and each pair as often as the others.

    Args:
        pairs: (dtype, family) that there are.
        most: How many.
        used: How often each dtype, family and pair was chosen before; what is chosen is added.
    """
    left = list(pairs)
    found: list[Pair] = []
    while left and (not most or len(found) < most):
        taken = {value for pair in found for value in pair}

        def rank(pair: Pair) -> tuple[int, int, int]:
            dtype, family = pair
            new = (dtype in taken) + (family in taken)  # noqa: B023  # called before it changes
            return new, used[f"{dtype} {family}"], used[dtype]

        best = min(left, key=rank)
        left.remove(best)
        found.append(best)
        used.update([f"{best[0]} {best[1]}", best[0]])
    return found


def asks(unit: Unit, planning: Planning, known: Known) -> list[Unit]:
    """The Cases of a draw, as questions; of a known failure its own Case.

    Raises:
        AttncheckError: for a property of another version.
    """
    asked = property_named(unit.test).asked
    entry = known.of_draw(unit)
    cases: list[Case] = [] if entry is None else [entry.case_in(unit.dtype)]
    if entry is None or entry.depends_on:
        tier = planning.choices.tier
        kernel = Drawing(
            unit.kernel,
            planning.subject,
            unit.device,
            dtype=unit.dtype,
            family=unit.family,
            tier=tier_named(tier.name),
            executor=planning.executor,
        )
        cases += drawn(kernel, asked, unit.test, tier.drawn, seed=planning.choices.seed)
        planning.reason = kernel.refused or planning.reason
    if not cases:
        _drop(planning, unit, planning.reason)
    return [planning.ask(_STAGE, case, unit.family, unit.test) for case in cases]


def _pairs(planning: Planning, each: Property) -> list[Pair]:
    """The parts of a property that concern the kernel; those that it refuses are kept as such."""
    if not _launched(planning, each):
        return []
    found: list[Pair] = []
    asked = each.asked
    refused: dict[str, str] = {}
    for dtype in planning.dtypes:
        if asked.dtypes and dtype not in asked.dtypes:
            continue
        for family in asked.families:
            said = planning.refusal(family, dtype, asked.kind)
            if not said:
                found.append((dtype, family))
            elif said != NOT_CONCERNED:
                refused.setdefault(family, said)
    taken = {family for _, family in found}
    for family, said in refused.items():
        if family not in taken:
            _drop(planning, _draw_of(planning, each, family), said)
    return found


def _draw_of(planning: Planning, each: Property, family: str) -> Unit:
    dtype = next(
        (d for d in planning.dtypes if not each.asked.dtypes or d in each.asked.dtypes), ""
    )
    return replace(planning.unit, stage=_STAGE, test=each.id, family=family, dtype=dtype)


def _drop(planning: Planning, unit: Unit, reason: str) -> None:
    """Keep that a property is not asked of a family, on the plainest Problem that it has."""
    kind = property_named(unit.test).asked.kind
    for problem in samples(unit.family, unit.dtype, kind)[:1]:
        planning.drop(_STAGE, Case(problem=problem), unit.family, reason)


def _launched(planning: Planning, each: Property) -> bool:
    """Whether the kernel has other launches, where a property is about nothing else."""
    names = each.asked.questions
    if not all(name in RELATIONS and RELATIONS[name].relaunched for name in names):
        return True
    dtype = next(iter(planning.dtypes), "")
    problem = next(iter(samples("full", dtype)), None) if dtype else None
    if problem is None:
        return False
    try:
        return bool(planning.subject.launches(problem, planning.device))
    except Exception:  # noqa: BLE001  # foreign code may raise anything: it is asked, and says so
        return True
