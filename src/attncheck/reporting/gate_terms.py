"""What statuses and rules mean, in a sentence each: for readers who see one for the first time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attncheck.core.judgement import Rule
    from attncheck.records.record import Record, Status

__all__ = ["RULES", "STATUSES", "rule_id", "rule_text"]

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
    return f"{record.status}/{rule}".replace(" ", "-") if rule else record.status.replace(" ", "-")


def rule_text(record: Record) -> str:
    """What that means, in a sentence."""
    rule = record.judgement.rule if record.judgement else ""
    return RULES[rule] if rule else STATUSES[record.status]
