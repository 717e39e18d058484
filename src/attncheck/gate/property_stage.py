"""Stage properties: cases drawn by Hypothesis, and known failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from msgspec.structs import replace

from attncheck.cases.mask_samples import sample_problems
from attncheck.gate.planning import Planning
from attncheck.inputs.problem import Case
from attncheck.records.record import Record
from attncheck.records.run_reports import Stage
from attncheck.suite import property_spec
from attncheck.suite.kernel_support import NOT_APPLICABLE
from attncheck.suite.known_failures import FILE, KnownFailure, read_known_failures
from attncheck.suite.property_spec import PropertySpec
from attncheck.suite.property_spec import cases as property_cases
from attncheck.suite.search import DrawingKernel, draw_cases
from attncheck.verify.question_fit import compares_launches
from attncheck.workers.units import Unit

_STAGE: Stage = "properties"
Pair = tuple[str, str]

# ------------------------------------------------------------ what is drawn


def property_units(planning: Planning) -> Iterator[Unit]:
    """Yield units that draw cases, each for a property, a dtype and a mask family."""
    used: Counter[str] = Counter()
    for name, spec in property_spec.properties().items():
        pairs = _applicable_pairs(planning, name, spec)
        for dtype, family in choose_pairs(pairs, planning.choices.tier.combinations, used):
            part = {"test": name, "dtype": dtype, "family": family}
            yield replace(planning.unit, kind="draw", stage=_STAGE, alone=False, **part)


def choose_pairs(pairs: Sequence[Pair], most: int, used: Counter[str]) -> list[Pair]:
    """Return up to ``most`` of ``pairs`` (0: all), so that values and pairs are used evenly.

    Args:
        pairs: (dtype, family) pairs to choose from.
        most: Largest number of pairs.
        used: Number of earlier choices of each dtype and pair, which is updated.
    """
    remaining = list(pairs)
    chosen: list[Pair] = []
    while remaining and (not most or len(chosen) < most):
        values = {value for pair in chosen for value in pair}

        def rank(pair: Pair) -> tuple[int, int, int]:
            dtype, family = pair
            repeats = (dtype in values) + (family in values)  # noqa: B023  # called before it changes
            return repeats, used[f"{dtype} {family}"], used[dtype]

        # Ties go to the first pair, so that plans are reproducible.
        best = min(remaining, key=rank)
        remaining.remove(best)
        chosen.append(best)
        used.update([f"{best[0]} {best[1]}", best[0]])
    return chosen


def drawn_units(unit: Unit, planning: Planning, known: KnownFailures) -> list[Unit]:
    """Draw the cases of ``unit`` and return units that ask them; for a known failure its Case.

    Raises:
        AttncheckError: for a property that this version lacks.
    """
    spec = property_spec.property_named(unit.test)
    entry = known.of_draw(unit)
    cases = [] if entry is None else [entry.case_in(unit.dtype)]
    # A machine-dependent failure may not occur here, so that other cases are drawn too.
    if entry is None or entry.depends_on:
        tier = planning.choices.tier
        kernel = DrawingKernel(
            unit.kernel,
            planning.subject,
            unit.device,
            dtype=unit.dtype,
            family=unit.family,
            tier=tier,
            executor=planning.executor,
        )
        strategy, seed = property_cases(kernel, spec), planning.choices.seed
        cases += draw_cases(kernel, strategy, unit.test, tier.draws, seed=seed)
        planning.reason = kernel.reason or planning.reason
    if not cases:
        _drop_property(planning, unit, planning.reason)
    return [planning.unit_of(_STAGE, case, unit.family, unit.test) for case in cases]


def _applicable_pairs(planning: Planning, name: str, spec: PropertySpec) -> list[Pair]:
    """Return the (dtype, family) pairs that the kernel takes; record families that it refuses."""
    pairs = []
    refused: dict[str, str] = {}
    dtypes = [dtype for dtype in planning.dtypes if not spec.dtypes or dtype in spec.dtypes]
    # One plain problem is enough, since the number of launches does not depend on the mask.
    if compares_launches(spec.questions):
        samples = sample_problems("full", planning.dtypes[0]) if planning.dtypes else ()
        if not samples or not planning.has_launches(samples[0]):
            return []
    for dtype in dtypes:
        for family in spec.families:
            reason = planning.refusal(family, dtype, spec.kind)
            if not reason:
                pairs.append((dtype, family))
            elif reason != NOT_APPLICABLE:
                refused.setdefault(family, reason)
    # A family that is taken in some dtype does not count as refused.
    supported = {family for _, family in pairs}
    for family, reason in refused.items():
        if family not in supported:
            dtype = next(iter(dtypes), "")
            unit = replace(planning.unit, stage=_STAGE, test=name, family=family, dtype=dtype)
            _drop_property(planning, unit, reason)
    return pairs


def _drop_property(planning: Planning, unit: Unit, reason: str) -> None:
    """Record that a property is not asked of a family, with the family's plainest Problem."""
    kind = property_spec.property_named(unit.test).kind
    for problem in sample_problems(unit.family, unit.dtype, kind)[:1]:
        planning.drop(_STAGE, Case(problem=problem), unit.family, reason)


# ------------------------------------------------------------ what is known to fail

KNOWN = "known failure"  # Beginning of the reason of a known failure.

# Statuses that a known failure may excuse; lost processes and timeouts are never excused.
_EXCUSED = frozenset({"fail", "error"})
_LOST = frozenset({"crash", "timeout", "oom"})


class KnownFailures:
    """The known failures in the folder of the properties."""

    def __init__(self, entries: tuple[KnownFailure, ...] | None = None) -> None:
        if entries is None:
            path = property_spec.properties_folder() / FILE
            entries = read_known_failures(path) if path.exists() else ()
        self.entries = entries  # The first entry that matches a question counts.

    def of_draw(self, unit: Unit) -> KnownFailure | None:
        """Return the entry that matches a ``draw`` unit, whose Case replaces the drawn ones."""
        part = unit.test, unit.kernel, unit.dtype, unit.family, unit.device
        return next((entry for entry in self.entries if entry.matches(*part)), None)

    def excuse(self, record: Record, unit: Unit, case: Case) -> Record:
        """Return ``record``, turned into a warning if it is a known failure.

        If the entry's own Case passes, this is a warning too, since the entry is out of date.
        """
        entry = next((each for each in self.entries if _matches(each, unit, case)), None)
        if entry is None:
            return record
        if record.status in _EXCUSED:
            return _as_warning(record, f"{KNOWN}: {entry.reason}")
        holds = record.status not in {*_LOST, "unsupported"}
        if _is_its_case(entry, case) and unit.test and not entry.depends_on and holds:
            return _as_warning(record, f"{KNOWN} that no longer fails: remove {entry.where}.")
        return record


def _matches(entry: KnownFailure, unit: Unit, case: Case) -> bool:
    """Return whether ``entry`` matches a case of its property, or a similar case elsewhere.

    Outside of its property an entry matches its own question, but for ``compare``, which all stages
    ask, only its own Case.
    """
    if not entry.concerns(unit.kernel, case.problem.dtype, unit.device):
        return False
    masks = {case.problem.mask.name}
    if unit.test:
        matches = fnmatchcase(unit.test, entry.test)
        masks.add(unit.variant)
    elif _is_its_case(entry, case):
        return True
    else:
        matches = entry.case.question == case.question != "compare"
    return matches and (not entry.families or bool(masks & set(entry.families)))


def _is_its_case(entry: KnownFailure, case: Case) -> bool:
    return entry.case_in(case.problem.dtype).id == case.id


def _as_warning(record: Record, reason: str) -> Record:
    judgement = record.judgement
    if judgement is not None:
        judgement = replace(judgement, status="warn", reason=reason)
    return replace(record, status="warn", reason=reason, judgement=judgement)
