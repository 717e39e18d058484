"""Compare a run with its baseline: identical bits, other rounding, better or worse.

Two kernels of equal accuracy still make different rounding errors. Their mean squared errors over a
Case are two samples of one population, so that their ratio follows an F distribution with as many
degrees of freedom as there are independent errors (derivation: ``docs/how-to/baseline.md``).

There are no tolerances. Bits are compared first, then the judge's verdicts, and then the errors, by
the probability that chance alone made them so much larger.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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

_STEPS = 100  # Steps of a ternary search; each shrinks the interval to two thirds.


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorPair:
    """Nonzero errors of one tensor on one Case, before and after a change."""

    # before, after: root mean square errors, in the units of ``Accuracy.relative``.
    before: float
    after: float
    # freedom_before, freedom_after: degrees of freedom of the mean squares.
    freedom_before: float
    freedom_after: float
    # Root mean square errors of ideal kernels of several tilings; every Case lists the tilings in
    # one order.
    ensemble: tuple[float, ...]

    @property
    def weight(self) -> float:
        """Return the pair's weight in a mean: the inverse variance of the logarithm of F."""
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
    """Return the weighted geometric mean of after ÷ before over the pairs."""
    return math.exp(_weighted_mean(pairs, [math.log(p.after) - math.log(p.before) for p in pairs]))


def tiling_growth(pairs: Sequence[ErrorPair]) -> float:
    """Return the factor by which another choice of tile sizes alone may change the errors.

    (largest ÷ smallest)² over the ensemble, where each member's errors are averaged over all
    pairs. In logarithms this is twice the ensemble's range: each of the two kernels may lie outside
    of the range by half of its width, on opposite sides.
    """
    members = zip(*(pair.ensemble for pair in pairs), strict=True)
    sizes = [_weighted_mean(pairs, [math.log(size) for size in member]) for member in members]
    return math.exp(2 * (max(sizes) - min(sizes))) if sizes else 1.0


def log_probability(pairs: Sequence[ErrorPair]) -> float:
    """Return the log of an upper bound on the probability of so large a mean ratio by chance.

    It holds for kernels that are equally accurate up to ``tiling_growth``, and is 0 for a ratio
    that this growth explains. Chernoff's bound: for every s > 0 the probability that T ≥ t is at
    most E[exp(s·T)]·exp(−s·t). T is a weighted mean of the logarithms of independent F-distributed
    ratios, for which the expectation is a product of gamma functions.
    """
    excess = 2 * math.log(mean_ratio(pairs) / tiling_growth(pairs))
    if excess <= 0:
        return 0.0
    total_weight = math.fsum(pair.weight for pair in pairs)
    shares = [pair.weight / total_weight for pair in pairs]

    def exponent(s: float) -> float:
        moments = (_log_moment(pair, s * w) for pair, w in zip(pairs, shares, strict=True))
        return math.fsum(moments) - s * excess

    # Beyond ``end`` a moment is infinite. The exponent is convex in s, and 0 at s = 0.
    end = min(pair.freedom_before / (2 * w) for pair, w in zip(pairs, shares, strict=True))
    return min(0.0, exponent(_minimize(exponent, end)))


def _weighted_mean(pairs: Sequence[ErrorPair], values: Sequence[float]) -> float:
    total_weight = math.fsum(pair.weight for pair in pairs)
    return math.fsum(p.weight / total_weight * v for p, v in zip(pairs, values, strict=True))


def _log_moment(pair: ErrorPair, u: float) -> float:
    """Return ln E[F^u] of an F of (after, before) degrees of freedom; u < freedom_before / 2."""
    above, below = pair.freedom_after / 2, pair.freedom_before / 2
    gammas = math.lgamma(above + u) - math.lgamma(above)
    gammas += math.lgamma(below - u) - math.lgamma(below)
    return u * math.log(below / above) + gammas


def _minimize(function: Callable[[float], float], end: float) -> float:
    """Return the argument in [0, end) at which a convex function is smallest."""
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
"""Rank of each status, from best (0) to worst; equal ranks are no change."""


KEPT_STATUSES: frozenset[Status] = frozenset({"pass", "warn", "inconclusive", "unsupported"})
"""Statuses that a baseline may store: wrong answers are never accepted as a baseline."""

STAGES: frozenset[Stage] = frozenset({"baseline"})
"""Gate stages that ask the same Cases in every run and measure errors relative to ideal kernels.

The stage ``bounds`` asks most Cases, but decides only whether errors are due to rounding.
"""

_JUDGED = frozenset({"pass", "warn", "inconclusive"})


def measurements(answers: Iterable[Answer]) -> Iterator[Record]:
    """Yield the Records of the answers that can be compared with a baseline."""
    # Shrinking a failure gives another small Case in each run.
    return (a.record for a in answers if a.stage in STAGES and not a.smallest_of)


def comparable_entries(
    records: Iterable[Record], environments: Mapping[str, Environment]
) -> dict[Key, tuple[Entry, bool]]:
    """Return, by key, the entry to compare and whether its rounding errors are independent.

    Leaves out questions other than ``compare``, judged Records without an ``accuracy``, and Cases
    whose oracles disagree. If a Case was asked twice, the worse answer counts.
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
                by_key[entry.key] = entry, _has_independent_errors(record)
    return by_key


def _has_independent_errors(record: Record) -> bool:
    """Return whether the inputs are unstructured, so that rounding errors are independent."""
    name = record.case.get("problem", {}).get("distribution", "normal")
    try:
        return distribution_named(name).generic
    except AttncheckError:  # a distribution of another version of attncheck
        return False


_ORDER: tuple[BaselineStanding, ...] = (
    *("worse", "better", "gone"),
    *("new", "not asked", "within rounding", "identical"),
)
# Which change of a case to report for several baselines: cases without a counterpart come last.
_RANK: tuple[BaselineStanding, ...] = (
    *("worse", "better", "within rounding", "identical"),
    *("gone", "not asked", "new"),
)


def sort_changes(changes: Iterable[Change]) -> tuple[Change, ...]:
    """Return the changes sorted from worst to harmless, then by kernel and case."""
    return tuple(sorted(changes, key=lambda c: (_ORDER.index(c.standing), c.kernel, c.case_id)))


def merge_changes(names: Sequence[str], of: Sequence[Iterable[Change]]) -> tuple[Change, ...]:
    """Merge the changes against several baselines: the most serious change of each case.

    Args:
        names: Name of each baseline; if there are several, reasons begin with it.
        of: The changes against each baseline.
    """
    by_case: dict[tuple[str, str], Change] = {}
    for name, group in zip(names, of, strict=True):
        for each in group:
            reason = f"{name}: {each.reason}" if each.reason and len(names) > 1 else each.reason
            key = (each.kernel, each.case_id)
            other = by_case.get(key)
            if other is None or _RANK.index(each.standing) < _RANK.index(other.standing):
                by_case[key] = replace(each, reason=reason)
    return sort_changes(by_case.values())


FALSE_ALARM = 1e-4
"""Largest allowed probability that a run calls any correct kernel worse by chance."""


def compare_runs(
    baseline: Baseline,
    answers: Iterable[Answer],
    environments: Mapping[str, Environment],
    *,
    complete: bool = True,
    dtypes: Collection[str] = (),
) -> tuple[Change, ...]:
    """Compare each case that was measured with its entry in ``baseline``.

    Args:
        baseline: Entries of kernels and architectures that ``answers`` lacks are ignored.
        answers: Answers of all stages; only the accuracies measured in ``STAGES`` are compared.
        environments: Environments of the answers, by the ids in their Records.
        complete: Whether the whole plan was asked. In a shard, or in a run that was stopped, a
            missing case does not count as gone.
        dtypes: The dtypes that were chosen; empty for all. A missing case of another dtype was not
            asked, and is not gone.

    Returns:
        The changes, sorted as by ``sort_changes``.
    """
    after = comparable_entries(measurements(answers), environments)
    # The file may hold kernels and machines that are not part of this run.
    measured = {(entry.kernel, entry.device) for entry, _ in after.values()}
    before = {e.key: e for e in baseline.entries if (e.kernel, e.device) in measured}
    by_id = baseline.environments | {one.id: one for one in environments.values()}
    return _compare_entries(before, after, by_id, complete=complete, dtypes=dtypes)


def compare_answers(
    before: Iterable[Answer],
    after: Iterable[Answer],
    environments: Mapping[str, Environment],
) -> tuple[Change, ...]:
    """Compare two versions of kernels case by case, both measured in this run.

    Cases that only the earlier kernels were asked are left out.

    Args:
        before: Answers of the earlier kernels, under the names of the later ones.
        after: Answers of the later kernels.
        environments: Environments of both, by the ids in their Records.
    """
    old = comparable_entries(measurements(before), environments)
    new = comparable_entries(measurements(after), environments)
    by_id = {one.id: one for one in environments.values()}
    return _compare_entries({k: e for k, (e, _) in old.items()}, new, by_id, complete=False)


@dataclass(frozen=True, slots=True)
class _Case:
    """One case that was measured before and after."""

    before: Entry
    after: Entry
    independent: bool

    def pairs(self) -> dict[TensorName, ErrorPair]:
        """Return the ErrorPair of each tensor whose error is nonzero both before and after."""
        pairs = {}
        for name, old in self.before.tensors.items():
            new = self.after.tensors.get(name)
            if new is not None and old.relative and new.relative:
                smallest = _smallest_error(new, independent=self.independent)
                pairs[name] = ErrorPair(
                    before=max(old.relative, smallest),
                    after=max(new.relative, smallest),
                    freedom_before=old.freedom,
                    freedom_after=new.freedom,
                    ensemble=new.ensemble if all(new.ensemble) else (),
                )
        return pairs


def _smallest_error(tensor: BaselineTensor, *, independent: bool) -> float:
    """Return the error below which differences are not significant.

    If an ideal kernel is exact, or all rows round alike, then the ensemble's largest error is a
    matter of luck. For dependent roundings the result is at least one rounding, 1 unit.
    """
    largest = max(tensor.ensemble, default=0.0)
    if not independent:
        return max(largest, 1.0)
    return 0.0 if all(tensor.ensemble) else largest


def _compare_entries(
    before: Mapping[Key, Entry],
    after: Mapping[Key, tuple[Entry, bool]],
    environments: Mapping[str, Environment],
    *,
    complete: bool,
    dtypes: Collection[str] = (),
) -> tuple[Change, ...]:
    common = {k: _Case(before[k], *after[k]) for k in after if k in before}
    standings = _standings(common)
    changes = []
    for key, case in common.items():
        standing, reason = standings[key]
        versions = _other_versions(case, environments)
        reason = "; ".join(part for part in (reason, versions) if part)
        changes.append(_change(case.before, case.after, standing, reason))
    changes += [_change(None, after[key][0], "new", "") for key in after if key not in before]
    if complete:
        changes += _missing_changes(before, after, dtypes)
    return sort_changes(changes)


def _missing_changes(
    before: Mapping[Key, Entry], after: Mapping[Key, object], dtypes: Collection[str]
) -> Iterator[Change]:
    """Yield the cases that were not asked; they count as worse if their kernel was not asked."""
    measured = {before[key].kernel for key in after if key in before}
    for key, entry in before.items():
        if key in after:
            continue
        if entry.kernel in measured:
            is_chosen = not dtypes or entry.dtype in dtypes
            yield _change(entry, None, "gone" if is_chosen else "not asked", "")
        else:  # otherwise a kernel that was not asked at all would pass
            reason = "of all that the baseline has of this kernel nothing was asked"
            yield _change(entry, None, "worse", reason)


def _standings(common: Mapping[Key, _Case]) -> dict[Key, tuple[BaselineStanding, str]]:
    """Return each case's standing and its reason, tested alone and then with similar cases."""
    groups: dict[tuple[str, str, TensorName, int], dict[Key, ErrorPair]] = defaultdict(dict)
    unequal = {k: c for k, c in common.items() if not _has_equal_bits(c)}
    for key, case in unequal.items():
        for name, pair in case.pairs().items():
            if case.independent:
                # Errors of different dtypes or tensors are sums of different roundings.
                kind = (case.after.kernel, case.after.dtype, name, len(pair.ensemble))
                groups[kind][key] = pair
    # A single pair has been tested with its own case.
    several = {kind: of for kind, of in groups.items() if len(of) > 1}
    tests = len(several) + sum(len(case.before.tensors) for case in unequal.values())
    # Bonferroni correction: each test gets an equal share of the run's false alarm probability.
    limit = math.log(FALSE_ALARM / max(tests, 1))
    standings = {key: _judge_alone(case, limit) for key, case in common.items()}
    for (_, dtype, name, _), of in several.items():
        _judge_together(dtype, name, of, limit, standings)
    return standings


def _has_equal_bits(case: _Case) -> bool:
    return bool(case.after.digest) and case.after.digest == case.before.digest


def _judge_alone(case: _Case, limit: float) -> tuple[BaselineStanding, str]:
    old, new = case.before, case.after
    step = STATUS_ORDER[new.status] - STATUS_ORDER[old.status]
    bits = "the same bits" if _has_equal_bits(case) else ""
    if step:
        message = f"{old.status} before, {new.status} now"
        message += "; the same bits: the judge is another" if bits else ""
        message += ": it took this before" if new.status == "unsupported" and step > 0 else ""
        return ("worse" if step > 0 else "better"), message
    # Neither run gave numbers, or both gave equal ones: there are no errors to compare.
    if bits or not (old.tensors or new.tensors):
        return "identical", bits or f"{new.status} before and now"
    missing = [name for name in old.tensors if name not in new.tensors]
    if missing:
        return "worse", f"gives no {missing[0]} any more, or one that is not finite"
    by_tensor = [_judge_tensor(name, case, limit) for name in old.tensors]
    # One tensor that is worse outweighs another that is better.
    for standing in _ORDER[:2]:
        reasons = [reason for each, reason in by_tensor if each == standing]
        if reasons:
            return standing, "; ".join(reasons)
    return "within rounding", ", ".join(reason for _, reason in by_tensor)


def _judge_tensor(name: TensorName, case: _Case, limit: float) -> tuple[BaselineStanding, str]:
    pair = case.pairs().get(name)
    if pair is None:
        return _judge_exact(name, case, limit)
    if log_probability([pair]) < limit:
        return "worse", f"{name}'s error is {_describe_growth([pair])}"
    # The test is symmetric: an improvement must be as improbable as a loss.
    if log_probability([pair.reversed()]) < limit:
        return "better", f"{name}'s error is {mean_ratio([pair]):.3g} × what it was"
    return "within rounding", f"{name} {mean_ratio([pair]):.3g} ×"


def _judge_exact(name: TensorName, case: _Case, limit: float) -> tuple[BaselineStanding, str]:
    """Judge a tensor that is exact before or after; ideal kernels replace the exact side."""
    old, new = case.before.tensors[name], case.after.tensors[name]
    if not old.relative and not new.relative:
        return "within rounding", f"{name} exact before and now"
    inexact = new if new.relative else old
    standing: BaselineStanding = "worse" if new.relative else "better"
    reason = f"{name} {'was' if new.relative else 'is'} exact, and "
    reason += "is not" if new.relative else "was not"
    largest = max([*inexact.ensemble, _smallest_error(inexact, independent=case.independent)])
    if not largest:
        return standing, f"{reason}: RMSE {inexact.rmse:.3g}, and ideal kernels are exact"
    # If an ideal kernel is exact here, the ensemble does not show how much tilings differ.
    spread = inexact.ensemble if all(inexact.ensemble) else ()
    pair = ErrorPair(
        before=largest,
        after=inexact.relative,
        freedom_before=inexact.freedom,
        freedom_after=inexact.freedom,
        ensemble=spread,
    )
    if log_probability([pair]) < limit:
        times = f"{mean_ratio([pair]):.3g} × the largest of ideal kernels'"
        return standing, f"{reason}: RMSE {inexact.rmse:.3g}, {times}"
    return "within rounding", f"{reason}: no more than ideal kernels may err by"


def _judge_together(
    dtype: str,
    name: str,
    of: Mapping[Key, ErrorPair],
    limit: float,
    standings: dict[Key, tuple[BaselineStanding, str]],
) -> None:
    """Change the standings of cases that are significant only when taken together."""
    rest = {key: pair for key, pair in of.items() if standings[key][0] == "within rounding"}
    pairs = list(rest.values())
    if len(pairs) < 2:  # a case that is significant alone does not incriminate others
        return
    directions: dict[BaselineStanding, list[ErrorPair]] = {"worse": pairs}
    directions["better"] = [pair.reversed() for pair in pairs]
    for standing, changes in directions.items():
        if log_probability(changes) >= limit:
            continue
        worse = standing == "worse"
        sentence = _describe_growth(pairs) if worse else f"{mean_ratio(pairs):.3g} × what it was"
        for key, pair in zip(rest, changes, strict=True):
            # Only the cases that moved in this direction are reported.
            if pair.after > pair.before:
                reason_alone = standings[key][1]
                cases = f"{len(rest)} {dtype} cases together"
                reason = f"{name}'s error in {cases} is {sentence}; {reason_alone}"
                standings[key] = standing, reason


def _describe_growth(pairs: Sequence[ErrorPair]) -> str:
    chance = math.floor(log_probability(pairs) / math.log(10)) + 1
    tiling = f"another tiling explains {tiling_growth(pairs):.3g} ×"
    return f"{mean_ratio(pairs):.3g} × what it was; {tiling}, chance the rest with p < 1e{chance}"


def _other_versions(case: _Case, environments: Mapping[str, Environment]) -> str:
    """Return a note on the versions that differ before and after; empty if none does."""
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
