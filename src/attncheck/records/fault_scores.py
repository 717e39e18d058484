"""Scores of a test suite on planted faults, and the smallest faults that it still sees."""

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
"""``equivalent``: the changed kernel gives the bits of a right one; ``unplanted``: no change of a
kernel of ours makes the fault; ``harness``: what was planted does not run, or was asked nothing, so
that nothing was scored."""

# What was not asked, or changes no bit, nobody can catch: it counts for neither side.
SCORED: frozenset[FaultOutcome] = frozenset({"caught", "missed"})
"""Those of faults that a suite was asked about."""


class WrongAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One wrong answer."""

    stage: str  # which part of the gate asked
    question: str  # ``compare``, or the name of a probe, relation or check
    status: Status  # ``fail`` where the judge says so; else what became of the call
    rule: str = ""  # of the judge; empty where it did not come to that
    reason: str = ""  # in one line
    variant: str = ""  # what the gate calls the problem
    problem: str  # the problem, in one line
    case: dict[str, Any]  # the whole reproducer


class PeerVerdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Verdicts of another project's rule on the problems."""

    rule: str  # its name
    problems: int = 0  # of which it says something, up to the one where it caught the fault
    # Whether it did: it refuses the faulty kernel there, and not the right one.
    caught: bool = False
    # Problems where it refuses the right kernel too, and so says nothing of the fault.
    # A rule that refuses right kernels too would catch everything, and tell nothing.
    alarms: int = 0


class Detection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The way in which a fault was caught."""

    first: WrongAnswer  # the first wrong answer
    # That of the smallest problem found that fails alike; None where none is smaller.
    shrunk: WrongAnswer | None = None
    # Apart from the seconds of the score: the fault is caught by then.
    shrinking: float = 0.0  # seconds that the search for it took


class FaultScore(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault in one host."""

    fault: str
    category: str  # what it is about
    summary: str = ""
    # In which it is planted; empty of one that is planted nowhere, ``file`` of one that
    # somebody's file has.
    host: str = ""
    kernel: str = ""  # the kernel that was changed
    device: str = ""
    dtype: str = ""  # in which it was asked; empty for all that it takes
    tier: str = ""
    outcome: FaultOutcome  # see ``FaultOutcome``
    reason: str = ""  # why there is no score, in one line
    problems: int = 0  # questions asked until it was caught, that one counted; all where it was not
    # That these took, with describing the kernel and drawing them, without shrinking.
    seconds: float = 0.0
    caught: Detection | None = None  # how; None where it was not
    # What other projects' rules said of the plain ones of these problems.
    peers: tuple[PeerVerdict, ...] = ()
    # Of a fault with a size, such as a scale that is off, no diagnosis can name the very one.
    discrete: bool = True  # whether a diagnosis may be expected to name it
    diagnosis: tuple[Explanation, ...] = ()  # what the failure's diagnosis named, the best first
    tied: int = 0  # how many of these, from the first on, explain it equally well
    rank: int = 0  # at which of these the first stands that names this fault; 0 where none does
    environment: str = ""  # key into the report's environments


# A suite that flags every kernel catches every fault: controls tell it from a good one.
class ControlScore(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change that leaves a kernel right: whether something flagged it."""

    control: str
    summary: str = ""  # what the kernel does otherwise, in one line
    # host, kernel, device, dtype, tier: see ``FaultScore``.
    host: str = ""
    kernel: str = ""
    device: str = ""
    dtype: str = ""
    tier: str = ""
    # ``clean`` where all of the gate passed.
    outcome: Literal["clean", "flagged", "not asked (needs cuda)", "harness"]
    reason: str = ""  # why there is no score, in one line
    problems: int = 0
    seconds: float = 0.0  # that they took
    flagged: tuple[WrongAnswer, ...] = ()  # the wrong answers, each kind once
    environment: str = ""  # key into the report's environments


class Total(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The score of one category in one host."""

    host: str  # in which its faults are planted
    category: str = ""  # which; empty for all of the host
    # caught, missed: faults; together, those that were scored.
    caught: int = 0
    missed: int = 0
    equivalent: int = 0  # faults that give the bits of a right kernel in this host
    unscored: int = 0  # faults that were not asked, or could not be
    # Medians: one fault that takes all questions would hide the rest in a mean.
    seconds: float | None = None  # median of those that were caught; None without any
    problems: float | None = None  # likewise, of the questions asked
    # named_first, named_third: of the caught ones that are discrete, those that the diagnosis
    # names first, and among its first three.
    named_first: int = 0
    named_third: int = 0
    diagnosed: int = 0  # how many are caught and discrete, with a diagnosis or without
    peers: dict[str, int] = {}  # caught by each of the other projects' rules, by its name


class FaultReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a run found."""

    schema: int = 1
    command: str
    tier: str  # ``smoke``, ``pr`` or ``nightly``
    device: str
    started: str = ""  # when, UTC, as ``2026-11-22T17:30:00Z``
    seconds: float = 0.0  # from then to the end, of all parts of a run that was resumed
    environments: dict[str, Environment] = {}
    # An interrupted run writes its scores too: they must not look like all of them.
    unfinished: int = 0  # faults and controls that were chosen and have no score
    unfinished_because: str = ""  # why; empty where none is
    scores: tuple[FaultScore, ...] = ()  # in the order of the catalogue, host by host
    controls: tuple[ControlScore, ...] = ()  # likewise
    totals: tuple[Total, ...] = ()  # of each host, and of each of its categories


class OwnTestsScore(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Score of somebody's own tests on one fault."""

    # fault, category: which.
    fault: str
    category: str
    host: str  # in which kernel of ours it is planted
    # ``caught``; ``missed``; ``not shown`` where no call's result was another than without the
    # fault; ``not reached`` where the faulty kernel was never called; ``not scored``.
    status: Literal["caught", "missed", "not shown", "not reached", "not scored"]
    reason: str = ""  # of what is neither caught nor missed: why, in a line
    tests: tuple[str, ...] = ()  # the first that failed
    # A call that went to the suite's own function says nothing of the planted kernel.
    left: tuple[str, ...] = ()  # why calls went to the suite's own function
    seconds: float = 0.0  # of the run


class OwnTestsReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Score of somebody's own tests on the planted faults."""

    schema: int = 1
    command: str
    pytest: str  # what follows ``pytest``
    replace: str  # the function that was replaced, ``package.module:name``
    unfinished: int = 0  # faults that have no score
    unfinished_because: str = ""  # why; empty where there is none
    scores: tuple[OwnTestsScore, ...]  # in the order of the catalogue


MutantOutcome = Literal["caught", "missed", "stillborn", "equivalent", "harness"]
"""``stillborn``: it cannot be imported, or raises on the plainest problem; ``equivalent``: by the
table of its kernel, with the reason."""


NameWorth = Literal["", "right", "proven", "neighbour", "family", "wrong", "none", "unjudged"]
"""What a diagnosis is worth, given what it is right to say.

proven: by asking again, in other memory or layouts, whatever was changed. neighbour: a model of a
family that is right, and none of those that were to be told. wrong: another's name or family, with
certainty. Empty where there is nothing to name: it raises, or brings its process down.
"""


class MutantScore(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One mutant of somebody's kernel."""

    mutant: str  # ``kernel:operator:line:column``
    kernel: str
    operator: str
    line: int
    diff: str
    tool: str  # who was asked: check, or a gate's tier
    outcome: MutantOutcome
    reason: str = ""
    questions: int = 0  # until the first failure, that one counted; all where there was none
    seconds: float = 0.0  # that these took, with what finds out what it takes
    first: str = ""  # the first question that failed
    status: str = ""
    shown: str = ""  # how it failed, in one line
    # Of one that was missed: whether it gives the bits of the kernel on all of a reference set.
    identical: bool = False
    family: str = ""  # what its diagnosis is to say; empty where nobody has decided
    models: tuple[str, ...] = ()  # that it says, the likeliest first
    certain: int = 0  # how many of these, from the first on, it is certain of
    # How sure the diagnosis is; proven: by asking again, in other memory or layouts.
    level: Literal["", "named", "proven", "family", "unknown"] = ""
    kind: str = ""  # the family of fault models that it tells
    named: NameWorth = ""
    naming: float = 0.0  # seconds of the diagnosis
    peers: dict[str, bool] = {}  # whether another project's rule catches it on these problems


class MutantReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a run found."""

    schema: int = 1  # version of this layout
    command: str  # the command line that made it, without paths
    tool: str
    started: str = ""  # UTC, as ``2026-11-22T17:30:00Z``
    seconds: float = 0.0
    environments: dict[str, Environment] = {}
    unfinished: int = 0  # mutants that were chosen and have no score
    unfinished_because: str = ""
    scores: tuple[MutantScore, ...] = ()
    curve: tuple[int, ...] = ()  # of those caught: how many within the first 1, 2, 3, … questions


ATTNCHECK_RULE = "attncheck"  # in place of a rule's name: the gate


class SmallestFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The smallest size of a fault that somebody sees."""

    size: float | None  # it; None where even the largest is not seen
    # The next one of the scale, which no question sees; None where there is none.
    # Sizes are tried on a scale: the least that is seen lies between the two.
    below: float | None
    question: str = ""  # who sees ``size``
    asked: int = 0  # how many times a question was asked of some size
    # Questions of which a rule says nothing, since it refuses some right kernel there.
    unfit: int = 0


class FaultSensitivity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Smallest size at which one fault is still seen in one dtype."""

    fault: str
    summary: str  # what the kernel does wrong
    unit: Literal["ε", "bits"]  # ``ε`` or ``bits``
    dtype: str  # in which
    tier: str  # how hard the gate is
    device: str  # where
    questions: int  # how many the gate has, of which the rules are asked ``plain``
    # Rules of other projects compare tensors: they cannot be asked a relation.
    plain: int  # comparisons and probes of attention
    rules: dict[str, SmallestFault]  # by rule, ``ATTNCHECK_RULE`` among them
    seconds: float = 0.0  # that all this took


class SensitivityReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a run found."""

    schema: int = 1
    command: str
    seen: tuple[FaultSensitivity, ...]  # fault by fault, dtype by dtype
