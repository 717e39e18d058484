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

OUTCOMES: tuple[FaultOutcome, ...] = FaultOutcome.__args__  # type: ignore[attr-defined]  # a Literal has them

# What was not asked, or changes no bit, nobody can catch: it counts for neither side.
SCORED: frozenset[FaultOutcome] = frozenset({"caught", "missed"})
"""Those of faults that a suite was asked about."""


class WrongAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One wrong answer.

    Attributes:
        stage: Which part of the gate asked.
        question: ``compare``, or the name of a probe, relation or check.
        status: ``fail`` where the judge says so; else what became of the call.
        rule: Of the judge; empty where it did not come to that.
        reason: In one line.
        variant: What the gate calls the problem.
        problem: The problem, in one line.
        case: The whole reproducer.
    """

    stage: str
    question: str
    status: Status
    rule: str = ""
    reason: str = ""
    variant: str = ""
    problem: str
    case: dict[str, Any]


class PeerVerdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Verdicts of another project's rule on the problems.

    Attributes:
        rule: Its name.
        problems: Of which it says something, up to the one where it caught the fault.
        caught: Whether it did: it refuses the faulty kernel there, and not the right one.
        alarms: Problems where it refuses the right kernel too, and so says nothing of the fault.
    """

    rule: str
    problems: int = 0
    caught: bool = False
    # A rule that refuses right kernels too would catch everything, and tell nothing.
    alarms: int = 0


class Detection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The way in which a fault was caught.

    Attributes:
        first: The first wrong answer.
        shrunk: That of the smallest problem found that fails alike; None where none is smaller.
        shrinking: Seconds that the search for it took.
    """

    first: WrongAnswer
    shrunk: WrongAnswer | None = None
    # Apart from the seconds of the score: the fault is caught by then.
    shrinking: float = 0.0


class FaultScore(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault in one host.

    Attributes:
        category: What it is about.
        host: In which it is planted; empty of one that is planted nowhere, ``file`` of one that
            somebody's file has.
        kernel: The kernel that was changed.
        dtype: In which it was asked; empty for all that it takes.
        outcome: See ``FaultOutcome``.
        reason: Why there is no score, in one line.
        problems: Questions asked until it was caught, that one counted; all where it was not.
        seconds: That these took, with describing the kernel and drawing them, without shrinking.
        caught: How; None where it was not.
        peers: What other projects' rules said of the plain ones of these problems.
        discrete: Whether a diagnosis may be expected to name it.
        diagnosis: What the failure's diagnosis named, the best first.
        tied: How many of these, from the first on, explain it equally well.
        rank: At which of these the first stands that names this fault; 0 where none does.
        environment: Key into the report's environments.
    """

    fault: str
    category: str
    summary: str = ""
    host: str = ""
    kernel: str = ""
    device: str = ""
    dtype: str = ""
    tier: str = ""
    outcome: FaultOutcome
    reason: str = ""
    problems: int = 0
    seconds: float = 0.0
    caught: Detection | None = None
    peers: tuple[PeerVerdict, ...] = ()
    # Of a fault with a size, such as a scale that is off, no diagnosis can name the very one.
    discrete: bool = True
    diagnosis: tuple[Explanation, ...] = ()
    tied: int = 0
    rank: int = 0
    environment: str = ""


# A suite that flags every kernel catches every fault: controls tell it from a good one.
class ControlScore(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change that leaves a kernel right: whether something flagged it.

    Attributes:
        summary: What the kernel does otherwise, in one line.
        host, kernel, device, dtype, tier: See ``FaultScore``.
        outcome: ``clean`` where all of the gate passed.
        reason: Why there is no score, in one line.
        seconds: That they took.
        flagged: The wrong answers, each kind once.
        environment: Key into the report's environments.
    """

    control: str
    summary: str = ""
    host: str = ""
    kernel: str = ""
    device: str = ""
    dtype: str = ""
    tier: str = ""
    outcome: Literal["clean", "flagged", "not asked (needs cuda)", "harness"]
    reason: str = ""
    problems: int = 0
    seconds: float = 0.0
    flagged: tuple[WrongAnswer, ...] = ()
    environment: str = ""


class Total(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The score of one category in one host.

    Attributes:
        host: In which its faults are planted.
        category: Which; empty for all of the host.
        caught, missed: Faults; together, those that were scored.
        equivalent: Faults that give the bits of a right kernel in this host.
        unscored: Faults that were not asked, or could not be.
        seconds: Median of those that were caught; None without any.
        problems: Likewise, of the questions asked.
        named_first, named_third: Of the caught ones that are discrete, those that the diagnosis
            names first, and among its first three.
        diagnosed: How many are caught and discrete, with a diagnosis or without.
        peers: Caught by each of the other projects' rules, by its name.
    """

    host: str
    category: str = ""
    caught: int = 0
    missed: int = 0
    equivalent: int = 0
    unscored: int = 0
    # Medians: one fault that takes all questions would hide the rest in a mean.
    seconds: float | None = None
    problems: float | None = None
    named_first: int = 0
    named_third: int = 0
    diagnosed: int = 0
    peers: dict[str, int] = {}


class FaultReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a run found.

    Attributes:
        tier: ``smoke``, ``pr`` or ``nightly``.
        started: When, UTC, as ``2026-11-22T17:30:00Z``.
        seconds: From then to the end, of all parts of a run that was resumed.
        unfinished: Faults and controls that were chosen and have no score.
        unfinished_because: Why; empty where none is.
        scores: In the order of the catalogue, host by host.
        controls: Likewise.
        totals: Of each host, and of each of its categories.
    """

    schema: int = 1
    command: str
    tier: str
    device: str
    started: str = ""
    seconds: float = 0.0
    environments: dict[str, Environment] = {}
    # An interrupted run writes its scores too: they must not look like all of them.
    unfinished: int = 0
    unfinished_because: str = ""
    scores: tuple[FaultScore, ...] = ()
    controls: tuple[ControlScore, ...] = ()
    totals: tuple[Total, ...] = ()


class OwnTestsScore(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Score of somebody's own tests on one fault.

    Attributes:
        fault, category: Which.
        host: In which kernel of ours it is planted.
        status: ``caught``; ``missed``; ``not shown`` where no call's result was another than
            without the fault; ``not reached`` where the faulty kernel was never called; ``not
            scored``.
        reason: Of what is neither caught nor missed: why, in a line.
        tests: The first that failed.
        left: Why calls went to the suite's own function.
        seconds: Of the run.
    """

    fault: str
    category: str
    host: str
    status: Literal["caught", "missed", "not shown", "not reached", "not scored"]
    reason: str = ""
    tests: tuple[str, ...] = ()
    # A call that went to the suite's own function says nothing of the planted kernel.
    left: tuple[str, ...] = ()
    seconds: float = 0.0


class OwnTestsReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Score of somebody's own tests on the planted faults.

    Attributes:
        pytest: What follows ``pytest``.
        replace: The function that was replaced, ``package.module:name``.
        unfinished: Faults that have no score.
        unfinished_because: Why; empty where there is none.
        scores: In the order of the catalogue.
    """

    schema: int = 1
    command: str
    pytest: str
    replace: str
    unfinished: int = 0
    unfinished_because: str = ""
    scores: tuple[OwnTestsScore, ...]


MutantOutcome = Literal["caught", "missed", "stillborn", "equivalent", "harness"]
"""``stillborn``: it cannot be imported, or raises on the plainest problem; ``equivalent``: by the
table of its kernel, with the reason."""


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
    named: Literal["", "right", "wrong", "none", "unjudged"] = (
        ""  # wrong: another's, with certainty
    )
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


ATTNCHECK_RULE = "attncheck"
"""In place of a rule's name: the gate."""


class SmallestFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The smallest size of a fault that somebody sees.

    Attributes:
        size: It; None where even the largest is not seen.
        below: The next one of the scale, which no question sees; None where there is none.
        question: Who sees ``size``.
        asked: How many times a question was asked of some size.
        unfit: Questions of which a rule says nothing, since it refuses some right kernel there.
    """

    size: float | None
    # Sizes are tried on a scale: the least that is seen lies between the two.
    below: float | None
    question: str = ""
    asked: int = 0
    unfit: int = 0


class FaultSensitivity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Smallest size at which one fault is still seen in one dtype.

    Attributes:
        summary: What the kernel does wrong.
        unit: ``ε`` or ``bits``.
        dtype: In which.
        tier: How hard the gate is.
        device: Where.
        questions: How many the gate has, of which the rules are asked ``plain``.
        plain: Comparisons and probes of attention.
        rules: By rule, ``ATTNCHECK_RULE`` among them.
        seconds: That all this took.
    """

    fault: str
    summary: str
    unit: Literal["ε", "bits"]
    dtype: str
    tier: str
    device: str
    questions: int
    # Rules of other projects compare tensors: they cannot be asked a relation.
    plain: int
    rules: dict[str, SmallestFault]
    seconds: float = 0.0


class SensitivityReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a run found.

    Attributes:
        seen: Fault by fault, dtype by dtype.
    """

    schema: int = 1
    command: str
    seen: tuple[FaultSensitivity, ...]
