"""Parts of a Record as text: its status, why it has it, its environment, its gradients."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from attncheck.reporting.document import Look, Note
from attncheck.reporting.number_text import plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from attncheck.core.judgement import Judgement, Rule
    from attncheck.core.tensor_names import TensorName
    from attncheck.records.record import Environment, GradientErrors, Record, Status

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
