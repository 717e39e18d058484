"""Parts of a Record as text: its status and reason, its environment, its gradients."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from attncheck.core.judgement import BlindSpot, Judgement, Rule
from attncheck.core.tensor_names import TensorName
from attncheck.records.problem_summary import problem_of
from attncheck.records.record import Environment, Record, Status
from attncheck.reporting.document import Cell, Look, Note, Section
from attncheck.reporting.number_text import percent, plural, superscript

STATUS_LOOKS: dict[Status, Look] = {
    "pass": "good",
    "warn": "notable",
    "inconclusive": "notable",
    "fail": "bad",
    "flaky": "notable",
    "error": "bad",
    "crash": "bad",
    "timeout": "bad",
    "oom": "bad",
    "oracle disagrees": "notable",
    "unsupported": "dim",
}
"""The look of every status, in the order in which statuses are listed."""

# Only records of these statuses have an error ÷ bound and a blind spot.
JUDGED: frozenset[Status] = frozenset({"pass", "warn", "inconclusive", "fail"})
"""Statuses of a measured and judged answer."""

RULES: dict[Rule, str] = {
    "contract": "The kernel gave something other than was asked for: another shape, dtype or "
    "device, or no tensor.",
    "alias": "What the kernel gave lies in the memory of its inputs.",
    "mutation": "The kernel wrote to its inputs.",
    "memory": "The kernel wrote beside its outputs, left some of them unwritten, or read what "
    "nobody gave it.",
    "state": "The kernel left its process changed.",
    "leak": "The kernel keeps more memory with each call.",
    "finite": "NaN or infinite where the exact result is finite.",
    "empty rows": "A row that sees no key is not exactly 0 with an LSE of −∞, or a gradient of it "
    "is not exactly 0.",
    "structure": "An exact probe has another answer: a key too many, one too few, or another head.",
    "bound": "An error beyond what rounding can explain at most: a proof of a fault.",
    "improbable": "An error that rounding explains with a probability of less than one in a "
    "million.",
    "precision": "Within every bound, and less accurate than a kernel of this arithmetic is.",
    "relation": "Two runs, or a run and its own inputs, do not agree as they must.",
    "determinism": "The same call gave other bits than the kernel promises.",
    "regression": "Worse than the baseline.",
}
"""Meaning of the rule that a verdict rests on."""

STATUSES: dict[Status, str] = {
    "pass": "Right, as far as this question can tell.",
    "warn": "Something is odd, and no proof of a fault.",
    "inconclusive": "The judge cannot tell.",
    "fail": "Wrong, by the rule that is named.",
    "flaky": "Failed, and did not when it was asked once more alone.",
    "error": "The kernel raised.",
    "crash": "The kernel's process died.",
    "timeout": "The kernel did not come back in time.",
    "oom": "The kernel had no memory left.",
    "oracle disagrees": "The truth itself is in doubt: nothing is said of the kernel.",
    "unsupported": "The kernel said beforehand that it does not take this problem.",
}
"""Meaning of each status."""


def rule_id(record: Record) -> str:
    """Return ``fail/bound``, or the status alone if the verdict has no rule."""
    rule = record.judgement.rule if record.judgement else ""
    return f"{record.status}/{rule}".rstrip("/").replace(" ", "-")


def rule_text(record: Record) -> str:
    """Return the meaning of the record's rule or status, in a sentence."""
    rule = record.judgement.rule if record.judgement else ""
    # A rule is more specific than the status that it leads to.
    return RULES[rule] if rule else STATUSES[record.status]


def footnote(record: Record) -> str:
    """Return the reason for the record's status in one line; "" for a pass without one."""
    judgement = record.judgement
    if record.status not in JUDGED or judgement is None:
        return "" if record.status in JUDGED else record.reason or "no reason given"
    text = ": ".join(part for part in (judgement.rule, judgement.reason) if part)
    # A pass needs no reason; any other status without one would look like a mistake.
    return text if text or record.status == "pass" else "no reason given"


def status_cell(record: Record, reason: str, notes: dict[tuple[str, str], int]) -> Cell:
    """Return ``fail ¹``: the status with the number of its reason among the page's ``notes``."""
    # A reason is listed once, however many cells share it.
    number = notes.setdefault((record.status, reason), len(notes) + 1) if reason else 0
    mark = f" {superscript(number)}" if number else ""
    return Cell(f"{record.status}{mark}", STATUS_LOOKS[record.status])


def reason_sections(
    notes: Mapping[tuple[str, str], int],
    claims: object,
    absent: Mapping[str, str],
    unsupported: Iterable[str] = (),
) -> list[Section]:
    """Return a section of numbered reasons, claims and absent kernels, to follow a table.

    ``unsupported`` are lines about cells that have no row.
    """
    looks: dict[str, Look] = dict(STATUS_LOOKS.items())
    lines = [
        Note(f"{superscript(number)} {status}: {reason}", looks.get(status, "plain"))
        for (status, reason), number in notes.items()
    ]
    lines += map(Note, unsupported)
    for kernel, claim_lines in claims.items() if isinstance(claims, dict) else ():
        lines += [Note(f"{kernel}: {line}") for line in claim_lines]
    lines += [Note(f"{kernel} is absent: {reason}") for kernel, reason in absent.items()]
    return [Section("", tuple(lines))] if lines else []


def refusal_lines(records: Iterable[Record], most: int = 5) -> Iterator[str]:
    """Yield reasons why questions are not supported, the ``most`` frequent in a line each."""
    reasons = refusal_counts(records)
    # Thousands of refusals mostly have a handful of reasons.
    for (kernel, reason), count in reasons.most_common(most):
        yield f"{kernel} does not support {plural(count, 'question')}: {reason}"
    if others := reasons.most_common()[most:]:
        rest = plural(sum(count for _, count in others), "more question")
        yield f"{rest} not supported, for {plural(len(others), 'other reason')}"


def refusal_counts(records: Iterable[Record]) -> Counter[tuple[str, str]]:
    """Return the number of unsupported questions by kernel and reason."""
    return Counter(
        (record.kernel, record.reason or "no reason given")
        for record in records
        if record.status == "unsupported"
    )


def verdict_remarks(judgement: Judgement | None) -> Iterator[Note]:
    """Yield further warnings, the rows that were not judged, and another profile that fits."""
    if judgement is None:
        return
    for warning in judgement.warnings:
        if warning != judgement.reason:
            yield Note(warning, "notable")
    if judgement.rows_unbounded:
        jumps = f" ({judgement.jumps} scores at a jump of the mod)" if judgement.jumps else ""
        rows = f"{judgement.rows_unbounded} of {judgement.rows} rows"
        yield Note(f"not judged: {rows} have no finite bound{jumps}", "notable")
    if judgement.lse_also_within:
        yield Note(f"LSE is also within: {judgement.lse_also_within}", "dim")


def gradient_shares(record: Record) -> dict[TensorName, float]:
    """Return the largest error ÷ bound of each gradient; none if they were not judged."""
    shares = record.judgement.gradients_over_bound if record.judgement else None
    return shares if isinstance(shares, dict) else {}


def bound_shares(record: Record) -> dict[TensorName, float]:
    """Return the largest error ÷ bound of each judged tensor, for readers.

    A tensor that fails for NaN, or for an element that must be exact, has NaN or infinity: the
    largest share of its other elements would look like a pass.
    """
    judgement = record.judgement
    if judgement is None:
        return {}
    forward: dict[TensorName, float | None]
    forward = {"out": judgement.out_over_bound, "lse": judgement.lse_over_bound}
    shares = {name: share for name, share in forward.items() if share is not None}
    shares |= gradient_shares(record)
    worst = judgement.worst
    if worst is not None and judgement.rule in {"finite", "empty rows"}:
        shares[worst.tensor] = math.nan if math.isnan(worst.got) else math.inf
    return shares


def largest_share(shares: Iterable[float]) -> float | None:
    """Return the largest error ÷ bound, of which NaN is the largest; None if there is none."""
    return max(shares, key=lambda share: (math.isnan(share), share), default=None)


def environment_facts(environment: Environment, **versions: str) -> str:
    """Return device and versions in a line; ``versions`` are those of further packages."""
    capability = f" ({environment.capability})" if environment.capability else ""
    all_versions = {
        "torch": environment.torch,
        "triton": environment.triton or "missing",
        "CUDA": environment.cuda,
        "Python": environment.python,
        "attncheck": environment.attncheck,
        **versions,
    }
    texts = [f"{name} {version}" for name, version in all_versions.items() if version]
    return " · ".join([f"{environment.device}{capability}", environment.machine, *texts])


_SCALE = 0.01  # relative error of the fault "a scale 1 % off"


def visible_faults(records: Iterable[Record]) -> str:
    """Return which faults the problems of ``records`` would have shown, and which they would not.

    For example ``would have shown: a scale 0.12–0.43 % off, an output of zeros; not: …``; "" if
    nothing was judged.
    """
    by_record = list(_spots(records))
    if not by_record:
        return ""
    spots = [spot for _, spot in by_record]
    scaled = [spot for record, spot in by_record if problem_of(record).operation != "softmax"]
    facts = [
        _least_size("a scale", [spot.scale for spot in scaled]),
        _least_size("one key's weight", [spot.weight for spot in spots]),
        _dropped_keys([s.dropped_keys for s in spots if s.dropped_keys is not None]),
        _accumulator_bits([spot.accumulator_bits for spot in scaled]),
        _fixed_fault("an output half as large", [spot.half for spot in spots]),
        _fixed_fault("an output of zeros", [spot.zeros for spot in spots]),
    ]
    visible = [fact for fact, is_visible in facts if fact and is_visible]
    hidden = [fact for fact, is_visible in facts if fact and not is_visible]
    parts = [f"would have shown: {', '.join(visible)}"] if visible else []
    parts += (
        [f"{'not' if visible else 'would not have shown'}: {', '.join(hidden)}"] if hidden else []
    )
    return "; ".join(parts)


def missed_faults(records: Sequence[Record]) -> tuple[str, ...]:
    """Return the classes of fault that no problem of ``records`` would have shown."""
    by_record = list(_spots(records))
    if not by_record:
        return ()
    spots = [spot for _, spot in by_record]
    # A problem with one key has none to drop.
    several = [spot for spot in spots if spot.dropped_keys is not None]
    scaled = [spot for record, spot in by_record if problem_of(record).operation != "softmax"]
    classes = {
        "a dropped key": several and not any(spot.dropped_keys for spot in several),
        "a scale 1 % off": scaled and not any(spot.scale <= _SCALE for spot in scaled),
        "an output half as large": not any(spot.half for spot in spots),
        "an output of zeros": not any(spot.zeros for spot in spots),
    }
    return tuple(name for name, missed in classes.items() if missed)


def _spots(records: Iterable[Record]) -> Iterator[tuple[Record, BlindSpot]]:
    for record in records:
        if record.judgement and record.judgement.blind_spot:
            yield record, record.judgement.blind_spot


_Fact = tuple[str, bool]
"""A fault's name, and whether it would have shown; ``_NOTHING`` if no problem can show it."""
_NOTHING: _Fact = ("", False)


def _least_size(quantity: str, sizes: list[float]) -> _Fact:
    """Return by how much a quantity must be off to show, in the best problem and in the worst."""
    if not sizes:
        return _NOTHING
    # The best problem decides what a suite sees, the worst how far to trust a single problem.
    best, worst = min(sizes), max(sizes)
    if math.isinf(best):
        return f"{quantity} off by any factor", False
    if math.isinf(worst):
        return f"{quantity} {percent(best)} % off{_count(map(math.isfinite, sizes))}", True
    return f"{quantity} {_range(percent(best), percent(worst))} % off", True


def _dropped_keys(shares: list[float]) -> _Fact:
    if not shares:
        return _NOTHING
    if not any(shares):
        return "a dropped key", False
    if min(shares) == 1.0:
        return "a dropped key", True
    return f"a dropped key ({_range(percent(min(shares)), percent(max(shares)))} % of them)", True


def _accumulator_bits(bits: list[int]) -> _Fact:
    if not bits:
        return _NOTHING
    best, worst = max(bits), min(bits)
    if not best:
        return "short accumulators", False
    in_worst = f" ({worst or 'none'} in the worst problem)" if worst < best else ""
    return f"sums of {best} bits or fewer{in_worst}", True


def _fixed_fault(fault: str, answers: list[bool]) -> _Fact:
    return f"{fault}{_count(answers) if any(answers) else ''}", any(answers)


def _count(seen: Iterable[bool]) -> str:
    answers = list(seen)
    return "" if all(answers) else f" (in {sum(answers)} of {len(answers)})"


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low}–{high}"
