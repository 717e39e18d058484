"""Scores of a test suite on planted faults, and the smallest faults that it still detects."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from attncheck.records.record import Environment, Explanation, Status

FaultOutcome = Literal[
    "caught",
    "missed",
    "equivalent",
    "unplanted",
    "not asked (needs cuda)",
    "harness",
]
"""``equivalent``: the changed kernel gives the same bits as a correct one; ``unplanted``: no change
to one of attncheck's kernels produces the fault; ``harness``: the planted kernel does not run or
was asked nothing, so that there is no score."""

# Faults that were not asked about, or that change no bit, cannot be caught and do not count.
SCORED: frozenset[FaultOutcome] = frozenset({"caught", "missed"})
"""Outcomes that count in a suite's score."""


class WrongAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One wrong answer."""

    stage: str  # stage of the gate that asked
    question: str  # ``compare``, or the name of a probe, relation or check
    status: Status  # ``fail`` for a verdict of the judge; else how the call ended
    rule: str = ""  # the judge's rule that is broken; empty without a verdict
    reason: str = ""  # in one line
    variant: str = ""  # the gate's name for the problem
    problem: str  # the problem, in one line
    case: dict[str, Any]  # the whole reproducer


class PeerVerdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Summary of the verdicts of another project's rule on the problems."""

    rule: str  # its name
    problems: int = 0  # problems on which the rule decides, up to the one that caught the fault
    # Whether the rule rejects the faulty kernel on some problem where it accepts the correct one.
    caught: bool = False
    # False alarms: problems where the rule rejects the correct kernel too, which say nothing about
    # the fault.
    alarms: int = 0


class Detection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The way in which a fault was caught."""

    first: WrongAnswer  # the first wrong answer
    # Wrong answer to the smallest similar problem that was found; None where none is smaller.
    shrunk: WrongAnswer | None = None
    # Not part of the score's seconds, since the fault is already caught.
    shrinking: float = 0.0  # seconds that the search for ``shrunk`` took


class FaultScore(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The score of one fault in one host, the kernel that it is planted in."""

    fault: str
    category: str  # category of the fault in the catalogue
    summary: str = ""
    # Host that the fault is planted in; empty for an unplanted fault, ``file`` for one in a user's
    # file.
    host: str = ""
    kernel: str = ""  # the kernel that was changed
    device: str = ""
    dtype: str = ""  # dtype of the questions; empty for all that the kernel takes
    tier: str = ""
    outcome: FaultOutcome  # see ``FaultOutcome``
    reason: str = ""  # why there is no score, in one line
    problems: int = 0  # questions up to and including the one that caught it, or else all
    # Time of these questions, including describing the kernel and drawing, without shrinking.
    seconds: float = 0.0
    caught: Detection | None = None  # how it was caught; None where it was not
    # Verdicts of other projects' rules on those problems that are plain comparisons.
    peers: tuple[PeerVerdict, ...] = ()
    # A diagnosis cannot name the exact size of a continuous fault, such as a wrong scale.
    discrete: bool = True  # whether a diagnosis may be expected to name the fault
    diagnosis: tuple[Explanation, ...] = ()  # explanations in the failure's diagnosis, best first
    tied: int = 0  # how many of these, from the first on, explain it equally well
    rank: int = 0  # position, from 1, of the first explanation that names this fault; 0 for none
    environment: str = ""  # key into the report's environments


# Controls expose a suite that catches every fault because it flags every kernel.
class ControlScore(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether the suite flagged a change that leaves the kernel correct."""

    control: str
    summary: str = ""  # how the kernel is changed, in one line
    # host, kernel, device, dtype, tier: see ``FaultScore``.
    host: str = ""
    kernel: str = ""
    device: str = ""
    dtype: str = ""
    tier: str = ""
    # ``clean`` where the whole gate passed.
    outcome: Literal["clean", "flagged", "not asked (needs cuda)", "harness"]
    reason: str = ""  # why there is no score, in one line
    problems: int = 0
    seconds: float = 0.0  # time of these problems
    flagged: tuple[WrongAnswer, ...] = ()  # the wrong answers, one of each kind
    environment: str = ""  # key into the report's environments


class Total(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The score of one category in one host."""

    host: str  # kernel that the faults are planted in
    category: str = ""  # category of the faults; empty for all of the host
    # caught, missed: numbers of faults; together all that were scored.
    caught: int = 0
    missed: int = 0
    equivalent: int = 0  # faults that change no bit of this host's results
    unscored: int = 0  # faults that were not asked about, or could not be
    # Medians, since one fault that takes all questions would dominate a mean.
    seconds: float | None = None  # median seconds of the caught faults; None for none
    problems: float | None = None  # median number of questions of the caught faults; None for none
    named_first: int = 0  # number of caught discrete faults that the diagnosis names first
    named_third: int = 0  # number of caught discrete faults that it names in the first three
    diagnosed: int = 0  # number of caught discrete faults, with a diagnosis or without
    peers: dict[str, int] = {}  # number of faults that each other project's rule caught, by rule


class FaultReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scores of a run on planted faults and controls."""

    schema: int = 1
    command: str
    tier: str  # ``smoke``, ``pr`` or ``nightly``
    device: str
    started: str = ""  # start, UTC, as ``2026-11-22T17:30:00Z``
    seconds: float = 0.0  # from start to end, summed over the parts of a run that was resumed
    environments: dict[str, Environment] = {}
    # An interrupted run writes its scores too, which must not look complete.
    unfinished: int = 0  # faults and controls that were selected and have no score
    unfinished_because: str = ""  # why they have no score; empty where all have one
    scores: tuple[FaultScore, ...] = ()  # in the order of the catalogue, host by host
    controls: tuple[ControlScore, ...] = ()  # in the order of the catalogue, host by host
    totals: tuple[Total, ...] = ()  # one for each host, and for each of its categories


class OwnTestsScore(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Score of a user's own tests on one fault."""

    # fault, category: as in ``FaultScore``.
    fault: str
    category: str
    host: str  # attncheck's kernel that it is planted in
    # ``caught``; ``missed``; ``not shown`` where the fault changed no result; ``not reached`` where
    # the faulty kernel was never called; ``not scored``.
    status: Literal["caught", "missed", "not shown", "not reached", "not scored"]
    reason: str = ""  # why it was neither caught nor missed, in a line
    tests: tuple[str, ...] = ()  # the first tests that failed
    # Why calls went to the suite's own function.
    # Calls that went to the suite's own function do not test the planted kernel.
    fallback_reasons: tuple[str, ...] = msgspec.field(default=(), name="left")
    seconds: float = 0.0  # duration of the test run


class OwnTestsReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Score of a user's own tests on the planted faults."""

    schema: int = 1
    command: str
    pytest: str  # the arguments of ``pytest``
    replace: str  # the function that was replaced, ``package.module:name``
    unfinished: int = 0  # faults that have no score
    unfinished_because: str = ""  # why they have no score; empty where all have one
    scores: tuple[OwnTestsScore, ...]  # in the order of the catalogue


MutantOutcome = Literal["caught", "missed", "stillborn", "equivalent", "harness"]
"""``stillborn``: it cannot be imported, or raises on the plainest problem; ``equivalent``: its
kernel's table lists it as such, with the reason."""


NameWorth = Literal["", "right", "proven", "neighbour", "family", "wrong", "none", "unjudged"]
"""How good a diagnosis is, compared with the expected one.

proven: the fault was proven by repeating calls in other memory or layouts, whatever was expected.
neighbour: another model of the expected family. wrong: another model or family, stated with
certainty. Empty where there is nothing to name: the mutant raises, or its process dies.
"""


class MutantScore(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The score of one mutant of a user's kernel."""

    mutant: str  # ``kernel:operator:line:column``
    kernel: str
    operator: str
    line: int
    diff: str
    tool: str  # the tool that was run: check, or a gate's tier
    outcome: MutantOutcome
    reason: str = ""
    questions: int = 0  # questions up to and including the first failure, or else all
    seconds: float = 0.0  # time of these, including finding out which problems the kernel takes
    first: str = ""  # the first question that failed
    status: str = ""
    shown: str = ""  # how it failed, in one line
    # Whether a missed mutant gives the same bits as the kernel on a whole reference set.
    identical: bool = False
    family: str = ""  # family that the diagnosis should name; empty where undecided
    models: tuple[str, ...] = ()  # fault models in the diagnosis, the likeliest first
    certain: int = 0  # how many of these, from the first on, the diagnosis is certain of
    # Certainty of the diagnosis; proven: by repeating calls in other memory or layouts.
    level: Literal["", "named", "proven", "family", "unknown"] = ""
    kind: str = ""  # family of fault models in the diagnosis
    named: NameWorth = ""
    naming: float = 0.0  # seconds of the diagnosis
    peers: dict[str, bool] = {}  # whether each other project's rule catches it on these problems


class MutantReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scores of a run on the mutants of a kernel."""

    schema: int = 1  # version of this layout
    command: str  # the command line that made it, without paths
    tool: str
    started: str = ""  # UTC, as ``2026-11-22T17:30:00Z``
    seconds: float = 0.0
    environments: dict[str, Environment] = {}
    unfinished: int = 0  # mutants that were selected and have no score
    unfinished_because: str = ""
    scores: tuple[MutantScore, ...] = ()
    curve: tuple[int, ...] = ()  # number of mutants caught within the first 1, 2, 3, … questions


ATTNCHECK_RULE = "attncheck"  # Stands for the gate among the names of other projects' rules.


class SmallestFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The smallest size of a fault that one rule detects."""

    size: float | None  # the smallest detected size; None where even the largest is missed
    # The next smaller size on the scale, which no question detects; None where there is none.
    # The true threshold lies between ``below`` and ``size``.
    below: float | None
    question: str = ""  # the question that detects ``size``
    asked: int = 0  # total number of questions asked, over all sizes
    # Questions that the rule cannot decide, since it rejects a correct kernel on them.
    unfit: int = 0


class FaultSensitivity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Smallest size at which one fault is still detected in one dtype, by each rule."""

    fault: str
    summary: str  # what the kernel does wrong
    unit: Literal["ε", "bits"]  # ``ε`` or ``bits``
    dtype: str
    tier: str  # tier of the gate
    device: str
    questions: int  # questions of the gate; other projects' rules are asked ``plain`` of them
    # Rules of other projects compare tensors, which a relation does not give them.
    plain: int  # comparisons and probes of attention
    rules: dict[str, SmallestFault]  # by rule, ``ATTNCHECK_RULE`` among them
    seconds: float = 0.0  # total time


class SensitivityReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Detection thresholds that a run measured."""

    schema: int = 1
    command: str
    seen: tuple[FaultSensitivity, ...]  # fault by fault, dtype by dtype
