"""Everything that one kernel is asked, stage by stage, in order."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from attncheck.cases.mask_samples import NOT_APPLICABLE, sample_problems
from attncheck.cases.tier import tier_named
from attncheck.core.errors import UsageError
from attncheck.gate.stages import (
    baseline_units,
    bound_units,
    contract_units,
    probe_units,
    surrounding_units,
)
from attncheck.inputs.problem import Case
from attncheck.inputs.question_parameters import check_parameters
from attncheck.probes import PROBES
from attncheck.records.failures import MOST_KEPT, is_id, load_failure
from attncheck.records.run_reports import STAGES
from attncheck.relations import RELATIONS
from attncheck.suite.known_failures import FILE, KnownFailure, read_known_failures
from attncheck.suite.property_catalogue import (
    DrawingKernel,
    Property,
    draw_property_cases,
    properties,
    properties_folder,
    property_named,
)
from attncheck.verify.question_fit import COMPARE, allowed_parameters, unfit_reason
from attncheck.workers.units import Unit

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from attncheck.gate.planning import Planning
    from attncheck.records.failures import KeptFailure
    from attncheck.records.record import Record
    from attncheck.records.run_reports import Stage

__all__ = [
    "KNOWN",
    "REPLAYED",
    "KnownFailures",
    "choose_pairs",
    "describe_units",
    "drawn_units",
    "plan_kernel",
    "priority",
    "property_units",
    "replay_units",
]


KNOWN = "known failure"
"""How the reason of one begins."""
_EXCUSED = frozenset({"fail", "error"})
"""What may be known; a process that is lost, or hangs, never is."""
_LOST = frozenset({"crash", "timeout", "oom"})


class KnownFailures:
    """The entries beside the properties.

    Attributes:
        entries: In order; the first that is about a question counts.
    """

    def __init__(self, entries: tuple[KnownFailure, ...] | None = None) -> None:
        if entries is None:
            path = properties_folder() / FILE
            entries = read_known_failures(path) if path.exists() else ()
        self.entries = entries

    def of_draw(self, unit: Unit) -> KnownFailure | None:
        """The entry about a property's part, which is asked in place of what is drawn."""
        return next(
            (
                each
                for each in self.entries
                if _is_about(each, unit, unit.dtype)
                and fnmatchcase(unit.test, each.test)
                and (not each.families or unit.family in each.families)
            ),
            None,
        )

    def settled(self, record: Record, unit: Unit, case: Case) -> Record:
        """``record``, or what is to be made of it where it is known to be wrong.

        A known failure is a warning; so is one that holds where its very Case was asked.
        """
        entry = next((each for each in self.entries if _about(each, unit, case)), None)
        if entry is None:
            return record
        if record.status in _EXCUSED:
            return _warning(record, f"{KNOWN}: {entry.reason}")
        holds = record.status not in {*_LOST, "unsupported"}
        if _is_its_case(entry, case) and unit.test and not entry.depends_on and holds:
            return _warning(record, f"{KNOWN} that no longer fails: remove {entry.where}.")
        return record


def _is_about(entry: KnownFailure, unit: Unit, dtype: str) -> bool:
    return (
        entry.is_of(unit.kernel)
        and entry.device in {"", unit.device}
        and (not entry.dtypes or dtype in entry.dtypes)
    )


def _about(entry: KnownFailure, unit: Unit, case: Case) -> bool:
    """Whether ``entry`` is about a question: of its property, or of no property the same one.

    To compare is what all stages ask: of that, elsewhere, an entry is about its very Case alone.
    """
    if not _is_about(entry, unit, case.problem.dtype):
        return False
    if unit.test:
        names = {unit.variant, case.problem.mask.name}
        mine = fnmatchcase(unit.test, entry.test)
    elif _is_its_case(entry, case):
        return True
    else:
        names = {case.problem.mask.name}
        mine = entry.case.question == case.question != "compare"
    return mine and (not entry.families or bool(names & set(entry.families)))


def _is_its_case(entry: KnownFailure, case: Case) -> bool:
    return entry.case_in(case.problem.dtype).id == case.id


def _warning(record: Record, reason: str) -> Record:
    judgement = record.judgement
    if judgement is not None:
        judgement = replace(judgement, status="warn", reason=reason)
    return replace(record, status="warn", reason=reason, judgement=judgement)


_STAGE: Stage = "properties"
Pair = tuple[str, str]


def property_units(planning: Planning) -> Iterator[Unit]:
    """What is to be drawn: a property, a dtype and a family each."""
    used: Counter[str] = Counter()
    for each in properties():
        pairs = _pairs(planning, each)
        for dtype, family in choose_pairs(pairs, planning.choices.tier.combinations, used):
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


def choose_pairs(pairs: Sequence[Pair], most: int, used: Counter[str]) -> list[Pair]:
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


def drawn_units(unit: Unit, planning: Planning, known: KnownFailures) -> list[Unit]:
    """The Cases of a draw, as questions; of a known failure its own Case.

    Raises:
        AttncheckError: for a property of another version.
    """
    asked = property_named(unit.test).asked
    entry = known.of_draw(unit)
    cases: list[Case] = [] if entry is None else [entry.case_in(unit.dtype)]
    if entry is None or entry.depends_on:
        tier = planning.choices.tier
        kernel = DrawingKernel(
            unit.kernel,
            planning.subject,
            unit.device,
            dtype=unit.dtype,
            family=unit.family,
            tier=tier_named(tier.name),
            executor=planning.executor,
        )
        cases += draw_property_cases(
            kernel, asked, unit.test, tier.drawn, seed=planning.choices.seed
        )
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
            elif said != NOT_APPLICABLE:
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
    for problem in sample_problems(unit.family, unit.dtype, kind)[:1]:
        planning.drop(_STAGE, Case(problem=problem), unit.family, reason)


def _launched(planning: Planning, each: Property) -> bool:
    """Whether the kernel has other launches, where a property is about nothing else."""
    names = each.asked.questions
    if not all(name in RELATIONS and RELATIONS[name].relaunched for name in names):
        return True
    dtype = next(iter(planning.dtypes), "")
    problem = next(iter(sample_problems("full", dtype)), None) if dtype else None
    if problem is None:
        return False
    try:
        return bool(planning.subject.launches(problem, planning.device))
    except Exception:  # noqa: BLE001  # foreign code may raise anything: it is asked, and says so
        return True


_KINDS = ("describe", "draw", "ask", "shrink")

REPLAYED = "failed before"
"""Variant of a Case that failed in an earlier run."""


def plan_kernel(planning: Planning) -> list[Unit]:
    """The work, each piece once; it follows from the kernel, the choices and nothing else."""
    found = chain.from_iterable(_of(planning, stage) for stage in planning.choices.stages)
    return list({unit.id: unit for unit in found}.values())


def describe_units(
    kernels: Sequence[str], *, device: str, tier: str, convention: str
) -> list[Unit]:
    """The first work of a gate: what each kernel is."""
    return [
        Unit(
            kind="describe",
            stage="contract",
            kernel=kernel,
            convention=convention,
            device=device,
            tier=tier,
        )
        for kernel in kernels
    ]


def priority(unit: Unit) -> tuple[int, ...]:
    """What is done first: what a kernel is, then stage by stage; a smaller failure last."""
    kind = _KINDS.index(unit.kind)
    again = unit.kind == "ask" and unit.variant == REPLAYED
    return (kind if kind in {0, 3} else 1, not again, STAGES.index(unit.stage), kind)


def _of(planning: Planning, stage: Stage) -> Iterator[Unit]:
    match stage:
        case "contract":
            yield from contract_units(planning)
        case "probes":
            yield from probe_units(planning)
        case "bounds":
            yield from bound_units(planning)
        case "properties":
            yield from property_units(planning)
        case "memory" | "determinism":
            yield from surrounding_units(planning, stage)
        case "baseline":
            yield from baseline_units(planning)


def replay_units(
    kernels: Sequence[str],
    folder: Path | str,
    *,
    device: str,
    convention: str,
    tier: str,
    stages: Collection[Stage],
    dtypes: Collection[str] = (),
) -> list[Unit]:
    """The Cases that these kernels failed, as ``folder`` keeps them, each once; newest first.

    A file that cannot be read, or that holds a Case that another version asked and this one cannot,
    is no reason to stop.

    Args:
        kernels: As asked for.
        folder: Of ``reporting.failures.keep``.
        device: Only those that failed there.
        convention: Of the kernels.
        tier: Of the units.
        stages: Only those that belong to these.
        dtypes: Only these; empty for all.
    """
    found: dict[str, Unit] = {}
    for failed in _failures(Path(folder)):
        if failed.kernel not in kernels or failed.device != device:
            continue
        stage = _stage(failed)
        case = _case(failed)
        if case is None or stage not in stages or (dtypes and case.problem.dtype not in dtypes):
            continue
        unit = Unit(
            kind="ask",
            stage=stage,
            kernel=failed.kernel,
            convention=failed.convention or convention,
            device=device,
            tier=tier,
            variant=REPLAYED,
            test=_test(failed.test),
            case=case.to_json(),
        )
        found.setdefault(unit.id, unit)
    return list(found.values())


def _failures(folder: Path) -> Iterator[KeptFailure]:
    def age(path: Path) -> tuple[float, str]:
        try:
            return -path.stat().st_mtime, path.name
        except OSError:
            return 0.0, path.name

    for path in sorted((p for p in folder.glob("*.json") if is_id(p.stem)), key=age)[:MOST_KEPT]:
        try:
            yield load_failure(path)
        except UsageError:
            continue


def _case(failed: KeptFailure) -> Case | None:
    """None where it can be asked no more."""
    try:
        case = Case.from_json(failed.record.case)
        question, problem = case.question, case.problem
        if unfit_reason(question, problem) is not None:
            return None
        check_parameters(question, case.parameters, allowed_parameters(question, problem))
    except UsageError:
        return None
    return case


def _stage(failed: KeptFailure) -> Stage:
    question = str(failed.record.case.get("question"))
    if failed.test:
        return "properties"
    if question in PROBES:
        return "probes"
    return "bounds" if question == COMPARE else "memory"


def _test(nodeid: str) -> str:
    """``test_causal.py::test_x`` of ``properties/test_causal.py::test_x[triton-flash2-bf16]``."""
    path, separator, name = nodeid.partition("::")
    return f"{Path(path).name}{separator}{name.partition('[')[0]}" if separator else ""
