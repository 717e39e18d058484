"""A run next to its baseline: the same bits, other rounding, better or worse.

Two kernels that round as often and as finely err by different numbers, and their mean squares over
a Case are two draws of one population: their ratio is one of F's, with as many degrees of freedom
as there are independent errors (``docs/how-to/baseline.md`` has the derivation).

Nothing here is a tolerance. Bits are compared first; then what the judge says; then errors, by how
improbable it is that chance alone made them so much larger.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from attncheck.core.errors import AttncheckError
from attncheck.core.tensor_names import TensorName
from attncheck.inputs.distributions import distribution_named
from attncheck.records.baseline_entries import (
    Baseline,
    BaselineTensor,
    Entry,
    Key,
    baseline_entries,
)
from attncheck.records.record import Environment, Record, Status
from attncheck.records.run_reports import Answer, BaselineStanding, Change, Stage

_STEPS = 100  # of a ternary search: each leaves two thirds


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorPair:
    """The errors of one tensor on one Case, before and after; none of them 0."""

    # before, after: root mean squares, in the units of the Case.
    before: float
    after: float
    # freedom_before, freedom_after: degrees of freedom of their squares.
    freedom_before: float
    freedom_after: float
    # Root mean squares of ideal kernels of several tilings, in an order of theirs that is the
    # same in every Case.
    ensemble: tuple[float, ...]

    @property
    def weight(self) -> float:
        """Return its weight among others: the inverse of the variance of the logarithm of F."""
        return self.freedom_before * self.freedom_after / (self.freedom_before + self.freedom_after)

    def reversed(self) -> ErrorPair:
        """Return the pair with before and after exchanged."""
        return ErrorPair(
            before=self.after,
            after=self.before,
            freedom_before=self.freedom_after,
            freedom_after=self.freedom_before,
            ensemble=self.ensemble,
        )


def mean_ratio(pairs: Sequence[ErrorPair]) -> float:
    """Compute after ÷ before: the weighted geometric mean of the pairs."""
    return math.exp(_mean(pairs, [math.log(p.after) - math.log(p.before) for p in pairs]))


def tiling_growth(pairs: Sequence[ErrorPair]) -> float:
    """Compute by which factor another tiling alone may change the errors.

    The square of the largest ÷ the smallest of the ensemble, each member's errors taken together
    over all pairs: the kernel before may lie as far outside of what the ensemble spans as half of
    that is wide, and the kernel after as far on the other side.
    """
    members = zip(*(pair.ensemble for pair in pairs), strict=True)
    sizes = [_mean(pairs, [math.log(size) for size in member]) for member in members]
    return math.exp(2 * (max(sizes) - min(sizes))) if sizes else 1.0


def log_probability(pairs: Sequence[ErrorPair]) -> float:
    """Compute the natural logarithm of a bound of the probability of such a ratio; 0 if ≤ 1.

    Of kernels that are equally accurate but for ``growth``. Chernoff's bound: for every s > 0 the
    probability that T ≥ t is at most E[exp(s·T)]·exp(−s·t), and of T, a weighted mean of the
    logarithms of independent ratios F, that expectation is a product of gamma functions.
    """
    excess = 2 * math.log(mean_ratio(pairs) / tiling_growth(pairs))
    if excess <= 0:
        return 0.0
    whole = math.fsum(pair.weight for pair in pairs)
    shares = [pair.weight / whole for pair in pairs]

    def exponent(s: float) -> float:
        moments = (_moment(pair, s * w) for pair, w in zip(pairs, shares, strict=True))
        return math.fsum(moments) - s * excess

    # Beyond it a moment is infinite. The exponent is convex in s, and 0 at 0.
    end = min(pair.freedom_before / (2 * w) for pair, w in zip(pairs, shares, strict=True))
    return min(0.0, exponent(_minimum(exponent, end)))


def _mean(pairs: Sequence[ErrorPair], values: Sequence[float]) -> float:
    whole = math.fsum(pair.weight for pair in pairs)
    return math.fsum(p.weight / whole * v for p, v in zip(pairs, values, strict=True))


def _moment(pair: ErrorPair, u: float) -> float:
    """Compute ln E[F^u] for (after, before) degrees of freedom; u < freedom before ÷ 2."""
    above, below = pair.freedom_after / 2, pair.freedom_before / 2
    gammas = math.lgamma(above + u) - math.lgamma(above)
    gammas += math.lgamma(below - u) - math.lgamma(below)
    return u * math.log(below / above) + gammas


def _minimum(function: Callable[[float], float], end: float) -> float:
    """Find where a convex function is least between 0 and ``end``, which it does not reach."""
    low, high = 0.0, end * (1 - 2.0**-20)
    for _ in range(_STEPS):
        first, second = low + (high - low) / 3, high - (high - low) / 3
        if function(first) <= function(second):
            high = second
        else:
            low = first
    return (low + high) / 2


STATUS_ORDER: dict[Status, int] = {
    "pass": 0,
    "warn": 1,
    "inconclusive": 1,
    "flaky": 2,
    "unsupported": 3,
    "fail": 4,
    "error": 5,
    "oom": 6,
    "timeout": 7,
    "crash": 8,
}
"""What is said of a kernel, from the best to the worst."""


KEPT_STATUSES: frozenset[Status] = frozenset({"pass", "warn", "inconclusive", "unsupported"})
"""What a baseline may keep: a wrong answer is wrong whatever was before."""

STAGES: frozenset[Stage] = frozenset({"baseline"})
"""Parts of a gate that ask the same Cases every time, and measure errors beside ideal kernels'.

The bounds, which ask most, say only whether an error is one of rounding.
"""

_JUDGED = frozenset({"pass", "warn", "inconclusive"})


def measurements(answers: Iterable[Answer]) -> Iterator[Record]:
    """Yield the Records of answers that may be held against a baseline."""
    # What is smaller than a Case of the plan is another Case each time that something fails.
    return (a.record for a in answers if a.stage in STAGES and not a.smallest_of)


def comparable_entries(
    records: Iterable[Record], environments: Mapping[str, Environment]
) -> dict[Key, tuple[Entry, bool]]:
    """Return by key the entry to compare, and whether its roundings are independent.

    Left out are questions other than ``compare``, verdicts on numbers without an ``accuracy``, and
    Cases of which the exact result is in doubt. Of what was asked twice the worse answer counts.
    """
    by_key: dict[Key, tuple[Entry, bool]] = {}
    for record in records:
        if record.status not in STATUS_ORDER or (
            record.status in _JUDGED and not isinstance(record.accuracy, dict)
        ):
            continue
        for entry in baseline_entries([record], environments):
            other = by_key.get(entry.key)
            if other is None or STATUS_ORDER[other[0].status] < STATUS_ORDER[entry.status]:
                by_key[entry.key] = entry, _independent(record)
    return by_key


def _independent(record: Record) -> bool:
    """Return whether inputs have no structure: else one rounding may decide all rows."""
    name = record.case.get("problem", {}).get("distribution", "normal")
    try:
        return distribution_named(name).generic
    except AttncheckError:  # of another version
        return False


_ORDER: tuple[BaselineStanding, ...] = (
    *("worse", "better", "gone"),
    *("new", "within rounding", "identical"),
)
# Of a case beside several: what fails first, and what was compared before what was not.
_TELLING: tuple[BaselineStanding, ...] = (
    *("worse", "better", "within rounding", "identical"),
    *("gone", "new"),
)


def sort_changes(changes: Iterable[Change]) -> tuple[Change, ...]:
    """Return changes with the worst first, then by kernel and case."""
    return tuple(sorted(changes, key=lambda c: (_ORDER.index(c.standing), c.kernel, c.case_id)))


def merge_changes(names: Sequence[str], of: Sequence[Iterable[Change]]) -> tuple[Change, ...]:
    """Return changes against several sides as one: of each case what tells most.

    Args:
        names: What each is beside: where there are several, reasons begin with it.
        of: Changes beside each.
    """
    by_case: dict[tuple[str, str], Change] = {}
    for name, group in zip(names, of, strict=True):
        for one in group:
            reason = f"{name}: {one.reason}" if one.reason and len(names) > 1 else one.reason
            key = (one.kernel, one.case_id)
            other = by_case.get(key)
            if other is None or _TELLING.index(one.standing) < _TELLING.index(other.standing):
                by_case[key] = replace(one, reason=reason)
    return sort_changes(by_case.values())


FALSE_ALARM = 1e-4
"""Most that is allowed for the probability that a run calls any right kernel worse by chance."""


def compare_runs(
    baseline: Baseline,
    answers: Iterable[Answer],
    environments: Mapping[str, Environment],
    *,
    complete: bool = True,
) -> tuple[Change, ...]:
    """Compare each case that was measured with its entry in ``baseline``.

    Args:
        baseline: What the kernels could do; entries of other kernels and of other architectures
            than those that answer are no part of the comparison.
        answers: Of all stages. What counts is what ``verify.accuracy`` measured in those of
            ``STAGES``.
        environments: Of the answers, by the ids that their Records have.
        complete: Whether everything was asked; of a shard, or of a run that was stopped, nothing
            can be said to be gone.

    Returns:
        The worst first, then by kernel and case.
    """
    after = comparable_entries(measurements(answers), environments)
    # A file may hold other kernels and machines, of which this run says nothing.
    measured = {(entry.kernel, entry.device) for entry, _ in after.values()}
    before = {e.key: e for e in baseline.entries if (e.kernel, e.device) in measured}
    known = baseline.environments | {one.id: one for one in environments.values()}
    return _compare_entries(before, after, known, complete=complete)


def compare_answers(
    before: Iterable[Answer],
    after: Iterable[Answer],
    environments: Mapping[str, Environment],
    *,
    complete: bool = True,
) -> tuple[Change, ...]:
    """Compare each case that was measured on two sides, both of which were asked now.

    Args:
        before: Of the earlier kernels; their names are those of the later ones.
        environments: Of both, by the ids that their Records have.
        complete: As of ``compare_runs``.
    """
    old = comparable_entries(measurements(before), environments)
    new = comparable_entries(measurements(after), environments)
    known = {one.id: one for one in environments.values()}
    return _compare_entries({k: e for k, (e, _) in old.items()}, new, known, complete=complete)


@dataclass(frozen=True, slots=True)
class _Case:
    """One case that is on both sides."""

    before: Entry
    after: Entry
    independent: bool

    def pairs(self) -> dict[TensorName, ErrorPair]:
        """Return errors that are 0 on neither side, and where ideal kernels have some too."""
        pairs = {}
        for name, old in self.before.tensors.items():
            new = self.after.tensors.get(name)
            if new is not None and old.relative and new.relative:
                pairs[name] = _pair(old, new, _smallest_error(new, independent=self.independent))
        return pairs


def _pair(old: BaselineTensor, new: BaselineTensor, least: float) -> ErrorPair:
    return ErrorPair(
        before=max(old.relative, least),
        after=max(new.relative, least),
        freedom_before=old.freedom,
        freedom_after=new.freedom,
        ensemble=new.ensemble if all(new.ensemble) else (),
    )


def _smallest_error(held: BaselineTensor, *, independent: bool) -> float:
    """Return what errors are not told apart below.

    Where an ideal kernel is exact, or one rounding falls the same way in all rows, what the largest
    of the ensemble has is a matter of luck; and then one rounding, which no unit is less than.
    """
    largest = max(held.ensemble, default=0.0)
    if not independent:
        return max(largest, 1.0)
    return 0.0 if all(held.ensemble) else largest


def _compare_entries(
    before: Mapping[Key, Entry],
    after: Mapping[Key, tuple[Entry, bool]],
    environments: Mapping[str, Environment],
    *,
    complete: bool,
) -> tuple[Change, ...]:
    both = {k: _Case(before[k], *after[k]) for k in after if k in before}
    standings = _standings(both)
    changes = []
    for key, case in both.items():
        standing, reason = standings[key]
        versions = _other_versions(case, environments)
        reason = "; ".join(part for part in (reason, versions) if part)
        changes.append(_change(case.before, case.after, standing, reason))
    changes += [_change(None, after[key][0], "new", "") for key in after if key not in before]
    if complete:
        changes += _missing_changes(before, after)
    return sort_changes(changes)


def _missing_changes(before: Mapping[Key, Entry], after: Mapping[Key, object]) -> Iterator[Change]:
    """Yield what was not asked; a kernel of which nothing was asked counts as worse."""
    measured = {before[key].kernel for key in after if key in before}
    for key, entry in before.items():
        if key not in after:
            # A kernel that is not asked at all would pass otherwise.
            lost = entry.kernel not in measured
            reason = "of all that the baseline has of this kernel nothing was asked" if lost else ""
            yield _change(entry, None, "worse" if lost else "gone", reason)


def _standings(both: Mapping[Key, _Case]) -> dict[Key, tuple[BaselineStanding, str]]:
    """Return how every case stands, and why: by itself, else together with others of its kind."""
    groups: dict[tuple[str, str, TensorName, int], dict[Key, ErrorPair]] = defaultdict(dict)
    unequal = {k: c for k, c in both.items() if not _equal(c)}
    for key, case in unequal.items():
        for name, pair in case.pairs().items():
            if case.independent:
                # Like with like: errors of other dtypes and tensors are sums of other roundings.
                kind = (case.after.kernel, case.after.dtype, name, len(pair.ensemble))
                groups[kind][key] = pair
    # One pair alone is what its own case is tested by.
    several = {kind: of for kind, of in groups.items() if len(of) > 1}
    tests = len(several) + sum(len(case.before.tensors) for case in unequal.values())
    # Bonferroni: every test gets an equal part of the run's probability of a false alarm.
    limit = math.log(FALSE_ALARM / max(tests, 1))
    standings = {key: _judge_alone(case, limit) for key, case in both.items()}
    for (_, dtype, name, _), of in several.items():
        _judge_together(dtype, name, of, limit, standings)
    return standings


def _equal(case: _Case) -> bool:
    return bool(case.after.digest) and case.after.digest == case.before.digest


def _judge_alone(case: _Case, limit: float) -> tuple[BaselineStanding, str]:
    old, new = case.before, case.after
    step = STATUS_ORDER[new.status] - STATUS_ORDER[old.status]
    bits = "the same bits" if _equal(case) else ""
    if step:
        message = f"{old.status} before, {new.status} now"
        message += "; the same bits: the judge is another" if bits else ""
        message += ": it took this before" if new.status == "unsupported" and step > 0 else ""
        return ("worse" if step > 0 else "better"), message
    # Neither gave numbers, or gave the very same: no error needs to be compared.
    if bits or not (old.tensors or new.tensors):
        return "identical", bits or f"{new.status} before and now"
    lost = [name for name in old.tensors if name not in new.tensors]
    if lost:
        return "worse", f"gives no {lost[0]} any more, or one that is not finite"
    by_tensor = [_judge_tensor(name, case, limit) for name in old.tensors]
    # One tensor that is worse outweighs another that is better.
    for standing in _ORDER[:2]:
        reasons = [reason for how, reason in by_tensor if how == standing]
        if reasons:
            return standing, "; ".join(reasons)
    return "within rounding", ", ".join(reason for _, reason in by_tensor)


def _judge_tensor(name: TensorName, case: _Case, limit: float) -> tuple[BaselineStanding, str]:
    pair = case.pairs().get(name)
    if pair is None:
        return _judge_exact(name, case, limit)
    if log_probability([pair]) < limit:
        return "worse", f"{name}'s error is {_describe_growth([pair])}"
    # The same test with the sides exchanged: better is as improbable as worse.
    if log_probability([pair.reversed()]) < limit:
        return "better", f"{name}'s error is {mean_ratio([pair]):.3g} × what it was"
    return "within rounding", f"{name} {mean_ratio([pair]):.3g} ×"


def _judge_exact(name: TensorName, case: _Case, limit: float) -> tuple[BaselineStanding, str]:
    """Compare a tensor that is exact on one side or both: ideal kernels stand in for the other."""
    old, new = case.before.tensors[name], case.after.tensors[name]
    if not old.relative and not new.relative:
        return "within rounding", f"{name} exact before and now"
    held = new if new.relative else old
    standing: BaselineStanding = "worse" if new.relative else "better"
    reason = f"{name} {'was' if new.relative else 'is'} exact, and "
    reason += "is not" if new.relative else "was not"
    largest = max([*held.ensemble, _smallest_error(held, independent=case.independent)])
    if not largest:
        return standing, f"{reason}: RMSE {held.rmse:.3g}, and ideal kernels are exact"
    # An ideal kernel that is exact here says nothing of how far tilings are apart.
    spread = held.ensemble if all(held.ensemble) else ()
    pair = ErrorPair(
        before=largest,
        after=held.relative,
        freedom_before=held.freedom,
        freedom_after=held.freedom,
        ensemble=spread,
    )
    if log_probability([pair]) < limit:
        times = f"{mean_ratio([pair]):.3g} × the largest of ideal kernels'"
        return standing, f"{reason}: RMSE {held.rmse:.3g}, {times}"
    return "within rounding", f"{reason}: no more than ideal kernels may err by"


def _judge_together(
    dtype: str,
    name: str,
    of: Mapping[Key, ErrorPair],
    limit: float,
    standings: dict[Key, tuple[BaselineStanding, str]],
) -> None:
    """Find a loss that no case shows by itself, and all of them do."""
    rest = {key: pair for key, pair in of.items() if standings[key][0] == "within rounding"}
    pairs = list(rest.values())
    if len(pairs) < 2:  # what is said of a case by itself is no reason to accuse others
        return
    both: dict[BaselineStanding, list[ErrorPair]] = {"worse": pairs}
    both["better"] = [pair.reversed() for pair in pairs]
    for standing, turned in both.items():
        if log_probability(turned) >= limit:
            continue
        sentence = (
            _describe_growth(pairs)
            if standing == "worse"
            else f"{mean_ratio(pairs):.3g} × what it was"
        )
        for key, pair in zip(rest, turned, strict=True):
            # All cases together prove it; only those that moved that way are blamed.
            if pair.after > pair.before:
                own = standings[key][1]
                cases = f"{len(rest)} {dtype} cases together"
                reason = f"{name}'s error in {cases} is {sentence}; {own}"
                standings[key] = standing, reason


def _describe_growth(pairs: Sequence[ErrorPair]) -> str:
    chance = math.floor(log_probability(pairs) / math.log(10)) + 1
    tiling = f"another tiling explains {tiling_growth(pairs):.3g} ×"
    return f"{mean_ratio(pairs):.3g} × what it was; {tiling}, chance the rest with p < 1e{chance}"


def _other_versions(case: _Case, environments: Mapping[str, Environment]) -> str:
    """Return what else is not as it was."""
    old, new = (environments[entry.versions] for entry in (case.before, case.after))
    fields = [f for f in old.__struct_fields__ if getattr(old, f) != getattr(new, f)]
    named = [f"{f} {_as_word(getattr(old, f))} → {_as_word(getattr(new, f))}" for f in fields]
    return f"measured with other versions: {', '.join(named)}" if named else ""


def _as_word(value: object) -> str:
    return (", ".join(value) if isinstance(value, tuple) else str(value)) or "none"


def _change(
    before: Entry | None, after: Entry | None, standing: BaselineStanding, reason: str
) -> Change:
    entry = after or before
    assert entry is not None, "it is on one side at least"
    out_before = before.tensors.get("out") if before else None
    out_after = after.tensors.get("out") if after else None
    return Change(
        kernel=entry.kernel,
        case_id=entry.case,
        standing=standing,
        reason=reason,
        before=out_before.rmse if out_before else None,
        after=out_after.rmse if out_after else None,
    )
