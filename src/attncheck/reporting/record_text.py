"""Parts of a Record as text: its status, why it has it, its environment, its gradients."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from attncheck.core.judgement import BlindSpot, Judgement, Rule
from attncheck.core.tensor_names import TensorName
from attncheck.records.problem_summary import problem_of
from attncheck.records.record import Environment, GradientErrors, Record, Status
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
"""Every status in the order in which they are counted, and how it looks."""

# Only of these an error ÷ bound can be shown, and a blind spot be asked for.
JUDGED: frozenset[Status] = frozenset({"pass", "warn", "inconclusive", "fail"})
"""Those that mean that there are numbers."""

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
"""By the rule that a verdict rests on."""

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
"""By status."""


def rule_id(record: Record) -> str:
    """``fail/bound``, or the status where no rule says more."""
    rule = record.judgement.rule if record.judgement else ""
    return f"{record.status}/{rule}".rstrip("/").replace(" ", "-")


def rule_text(record: Record) -> str:
    """Its meaning, in a sentence."""
    rule = record.judgement.rule if record.judgement else ""
    # A rule says more than the status that it leads to.
    return RULES[rule] if rule else STATUSES[record.status]


def footnote(record: Record) -> str:
    """Reason for the record's status, in one line; empty where a pass needs none."""
    judgement = record.judgement
    if record.status not in JUDGED or judgement is None:
        return "" if record.status in JUDGED else record.reason or "no reason given"
    text = ": ".join(part for part in (judgement.rule, judgement.reason) if part)
    # A pass needs no reason; any other status without one would look like a mistake.
    return text if text or record.status == "pass" else "no reason given"


def status_cell(record: Record, reason: str, notes: dict[tuple[str, str], int]) -> Cell:
    """``fail ¹``: the status, with the number of its reason among the ``notes`` of a page."""
    # A reason is said once however many cells it holds for.
    number = notes.setdefault((record.status, reason), len(notes) + 1) if reason else 0
    mark = f" {superscript(number)}" if number else ""
    return Cell(f"{record.status}{mark}", STATUS_LOOKS[record.status])


def reason_sections(
    notes: Mapping[tuple[str, str], int], claims: object, absent: Mapping[str, str]
) -> list[Section]:
    """Return what stands below such a table: reasons by their numbers, claims, absent kernels."""
    looks: dict[str, Look] = dict(STATUS_LOOKS.items())
    lines = [
        Note(f"{superscript(number)} {status}: {reason}", looks.get(status, "plain"))
        for (status, reason), number in notes.items()
    ]
    for kernel, claim_lines in claims.items() if isinstance(claims, dict) else ():
        lines += [Note(f"{kernel}: {line}") for line in claim_lines]
    lines += [Note(f"{kernel} is absent: {reason}") for kernel, reason in absent.items()]
    return [Section("", tuple(lines))] if lines else []


def refusal_lines(records: Iterable[Record], most: int = 5) -> Iterator[str]:
    """Reasons why questions are not supported, the ``most`` frequent in a line each."""
    reasons = refusal_counts(records)
    # Thousands of refusals have a handful of reasons.
    for (kernel, reason), count in reasons.most_common(most):
        yield f"{kernel} does not support {plural(count, 'question')}: {reason}"
    if others := reasons.most_common()[most:]:
        rest = plural(sum(count for _, count in others), "more question")
        yield f"{rest} not supported, for {plural(len(others), 'other reason')}"


def refusal_counts(records: Iterable[Record]) -> Counter[tuple[str, str]]:
    """Questions by the kernel that does not support them, and why."""
    return Counter(
        (record.kernel, record.reason or "no reason given")
        for record in records
        if record.status == "unsupported"
    )


def verdict_remarks(judgement: Judgement | None) -> Iterator[Note]:
    """Warnings beside the verdict, rows that were not judged, and another profile that fits."""
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


def gradients_of(record: Record) -> dict[TensorName, GradientErrors]:
    """Errors of gradients; none without a backward, or where nothing was measured."""
    return record.gradients if isinstance(record.gradients, dict) else {}


def gradient_shares(record: Record) -> dict[TensorName, float]:
    """The largest error ÷ bound of each gradient; none where they were not judged."""
    shares = record.judgement.gradients_over_bound if record.judgement else None
    return shares if isinstance(shares, dict) else {}


def environment_facts(environment: Environment, **versions: str) -> str:
    """Device and versions in a line, with ``versions`` of what else was used."""
    capability = f" ({environment.capability})" if environment.capability else ""
    known = {
        "torch": environment.torch,
        "triton": environment.triton or "missing",
        "CUDA": environment.cuda,
        "Python": environment.python,
        "attncheck": environment.attncheck,
        **versions,
    }
    said = [f"{name} {version}" for name, version in known.items() if version]
    return " · ".join([f"{environment.device}{capability}", environment.machine, *said])


_SCALE = 0.01  # the class of fault "a scale 1 % off"


def visible_faults(records: Iterable[Record]) -> str:
    """Describe what the problems of ``records`` would have shown, the easiest first.

    ``would have shown: the scale off by 0.12–0.43 %, half, zeros; not: …``; empty where nothing
    was judged.
    """
    by_record = list(_spots(records))
    if not by_record:
        return ""
    spots = [spot for _, spot in by_record]
    scaled = [spot for record, spot in by_record if problem_of(record).operation != "softmax"]
    facts = [
        _least("the scale off by", [spot.scale for spot in scaled]),
        _least("one key's weight off by", [spot.weight for spot in spots]),
        _dropped([s.dropped_keys for s in spots if s.dropped_keys is not None]),
        _bits([spot.accumulator_bits for spot in scaled]),
        _always("half the output", [spot.half for spot in spots]),
        _always("zeros", [spot.zeros for spot in spots]),
    ]
    shown = [fact for fact, seen in facts if fact and seen]
    hidden = [fact for fact, seen in facts if fact and not seen]
    parts = [f"would have shown: {', '.join(shown)}"] if shown else []
    parts += (
        [f"{'not' if shown else 'would not have shown'}: {', '.join(hidden)}"] if hidden else []
    )
    return "; ".join(parts)


def missed_faults(records: Sequence[Record]) -> tuple[str, ...]:
    """Return the classes of fault that no problem of ``records`` would have shown."""
    by_record = list(_spots(records))
    if not by_record:
        return ()
    spots = [spot for _, spot in by_record]
    # With one key there is none to drop.
    several = [spot for spot in spots if spot.dropped_keys is not None]
    scaled = [spot for record, spot in by_record if problem_of(record).operation != "softmax"]
    classes = {
        "a dropped key": several and not any(spot.dropped_keys for spot in several),
        "a scale 1 % off": scaled and not any(spot.scale <= _SCALE for spot in scaled),
        "half the output": not any(spot.half for spot in spots),
        "an output of zeros": not any(spot.zeros for spot in spots),
    }
    return tuple(name for name, missed in classes.items() if missed)


def _spots(records: Iterable[Record]) -> Iterator[tuple[Record, BlindSpot]]:
    for record in records:
        if record.judgement and record.judgement.blind_spot:
            yield record, record.judgement.blind_spot


_Fact = tuple[str, bool]
"""A fault's name, and whether it would have shown; nothing where nobody could ask."""
_NOTHING: _Fact = ("", False)


def _least(fault: str, sizes: list[float]) -> _Fact:
    """A fault of a size: the least that shows, in the best problem and in the worst."""
    if not sizes:
        return _NOTHING
    # The best problem decides what a suite sees; the worst how far to trust one of it.
    best, worst = min(sizes), max(sizes)
    if math.isinf(best):
        return f"{fault.removesuffix(' off by')} of any size", False
    if math.isinf(worst):
        return f"{fault} {percent(best)} % (in {_count(map(math.isfinite, sizes))})", True
    return f"{fault} {_range(percent(best), percent(worst))} %", True


def _dropped(shares: list[float]) -> _Fact:
    if not shares:
        return _NOTHING
    if not any(shares):
        return "a dropped key", False
    return f"{_range(percent(min(shares)), percent(max(shares)))} % of single dropped keys", True


def _bits(bits: list[int]) -> _Fact:
    if not bits:
        return _NOTHING
    if not any(bits):
        return "short accumulators", False
    return f"sums of {_range(str(min(bits)), str(max(bits)))} bits", True


def _always(fault: str, seen: list[bool]) -> _Fact:
    some = any(seen) and not all(seen)
    return f"{fault} (in {_count(seen)})" if some else fault, any(seen)


def _count(seen: Iterable[bool]) -> str:
    answers = list(seen)
    return f"{sum(answers)} of {len(answers)}"


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low}–{high}"
