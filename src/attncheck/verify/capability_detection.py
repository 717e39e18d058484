"""Capability detection: runs and judges tiny problems to find out what a kernel takes.

The base is the first problem that the kernel gets right, else the first that it answers. Each trial
differs from it in one aspect, which is a field of the capability table.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from attncheck.core.errors import UsageError
from attncheck.core.formats import DTYPES
from attncheck.core.mod_spec import Spec
from attncheck.inputs import input_tensors
from attncheck.inputs.problem import PROMISES, USUAL_SCALE, Case, Problem
from attncheck.records.record import FAILED_STATUSES, Record, Status
from attncheck.relations import RELATIONS
from attncheck.subjects.capabilities.capability_table import ALIGNMENTS, EMPTY_ROWS, Capabilities
from attncheck.subjects.capabilities.subject import Subject
from attncheck.subjects.conventions.convention import ConventionOptions
from attncheck.subjects.conventions.declarations import NATIVE
from attncheck.subjects.terms import Terms
from attncheck.verify.executor import ENDS_CALLER, Executor, Failure, InProcess, Origin
from attncheck.verify.isolated import IsolatedExecutor
from attncheck.verify.kernel_hosts import on_terms
from attncheck.verify.question_fit import adapted_problems
from attncheck.verify.run_case import run_case

Verdict = Literal["takes", "refuses", "raises", "wrong"]
"""``refuses``: declined beforehand or by a clean exception. ``raises``: any other exception.
``wrong``: errors beyond rounding, a result of another shape or dtype, or inputs overwritten."""

_VERDICT_OF_STATUS: dict[Status, Verdict] = {
    **dict.fromkeys(FAILED_STATUSES, "raises"),
    "unsupported": "refuses",
    "fail": "wrong",
}
_FATAL = {"crash", "timeout"}
_CALL_RULES = {"contract", "alias", "mutation"}  # Rules whose reasons need no name before them.
# Aspects in which a result of a wrong form is as good as an exception: by a convention that is not
# the kernel's its axes are others, and autograd raises where a gradient is missing.
_WRONG_FORM_IS_RAISED = {"convention", "backward"}


class TrialResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a trial."""

    # A field of the capability table; ``lengths``, ``batch``, ``strides``, ``slopes`` and
    # ``attn_mask`` are no fields.
    aspect: str
    what: str  # the value of the aspect that was tried
    verdict: Verdict  # for a promise, ``takes`` if it held
    reason: str = ""  # why it was not taken, in one line; empty if it was
    problem: str = ""  # the Problem, in one line
    # ``crash`` or ``timeout`` if the process died or did not answer; ``error`` if it raised an
    # exception that ends a program.
    fatal: str = ""


def trial_verdict(record: Record, aspect: str) -> Verdict:
    """Return the verdict on a trial of ``aspect`` from its Record."""
    judgement = record.judgement
    has_wrong_form = judgement is not None and judgement.rule == "contract"
    if has_wrong_form and aspect in _WRONG_FORM_IS_RAISED:
        return "raises"
    return _VERDICT_OF_STATUS.get(record.status, "takes")


def trial_result(aspect: str, what: str, record: Record, problem: Problem | str) -> TrialResult:
    """Return the result of trying ``what`` by ``problem``, from its Record."""
    verdict, judgement = trial_verdict(record, aspect), record.judgement
    reason = record.reason
    if judgement is not None:
        # The question's name already says that a relation failed.
        shows_rule = judgement.rule not in _CALL_RULES | {"relation"}
        reason = f"{judgement.rule}: {judgement.reason}" if shows_rule else judgement.reason
    return TrialResult(
        aspect=aspect,
        what=what,
        verdict=verdict,
        reason="" if verdict == "takes" else reason,
        problem=str(problem),
        fatal=_fatal(record.status, record.reason),
    )


def refused_result(convention: str, failure: Failure, problem: Problem) -> TrialResult:
    """Return the result of a convention by which the kernel refused or raised."""
    return TrialResult(
        aspect="convention",
        what=convention,
        verdict="refuses" if failure.kind == "refused" else "raises",
        reason=failure.message,
        problem=str(problem),
        fatal=_fatal(failure.kind, failure.message),
    )


def _fatal(kind: str, message: str) -> str:
    return kind if kind in _FATAL or message.endswith(ENDS_CALLER) else ""


LENGTHS = (64, 128)
"""Lengths tried for the base Problem; both are multiples of usual tiles."""

HEAD_DIMS: tuple[int | tuple[int, int], ...] = (
    *(16, 17, 32, 40, 64, 65, 80, 96, 128, 192, 256),
    *((64, 32), (64, 96), (192, 128)),
)
"""Usual head dims, two that no tile divides, and pairs (of q and k, of v)."""

_FULL, _CAUSAL = Spec.of("full"), Spec.of("causal")
_BASE_DTYPES = ("bf16", "fp16", "fp32", "e4m3")
_BASE_DIMS = (64, 128, 32)
_WINDOW, _PREFIX = 17, 9

# Changes that make all axes unequal, then fewer: a kernel may take only equal lengths, for example.
_WIDE: tuple[dict[str, Any], ...] = (
    {"batch": 3, "heads": 4, "kv_heads": 2, "kv": 192},
    {"batch": 3, "heads": 4, "kv_heads": 4, "kv": 192},
    {"batch": 3, "heads": 4, "kv_heads": 4},
    {"batch": 3},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A trial of one value of an aspect."""

    aspect: str  # a field of the capability table
    what: str  # the value, such as ``bf16`` or ``192/128``
    # Changed fields of the base Problem.
    changes: dict[str, Any] = field(default_factory=dict)
    question: str = ""  # a relation; empty where the result is compared with the exact one

    def of(self, base: Problem) -> Problem:
        """Return the Problem to ask."""
        return base.replace(**self.changes)


def base_problems() -> Iterator[Problem]:
    """Yield candidates for the base, of which the first that the kernel gets right becomes it."""
    # The likeliest first, because each refused problem costs a call; some kernels are causal only.
    for mask in (_FULL, _CAUSAL):
        for length in LENGTHS:
            for head_dim in _BASE_DIMS:
                for dtype in _BASE_DTYPES:
                    yield Problem(query=length, heads=2, head_dim=head_dim, dtype=dtype, mask=mask)


def trials(aspect: str, base: Problem, device: str) -> list[Trial]:
    """Return the trials of one aspect of a kernel that takes ``base``, in their order."""
    return [
        Trial(
            aspect=aspect,
            what=what,
            changes=changes,
            question=f"strides_{what.partition(',')[0]}" if aspect == "strides" else "",
        )
        for what, changes in _values(base.query, device)[aspect].items()
    ]


def _values(n: int, device: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Return by aspect the values to try, and the fields that each changes in a base of length n.

    The aspects are in the order of the table's fields.
    """
    window, softcap = Spec.of("sliding_window", window=_WINDOW), Spec.of("softcap", cap=20.0)
    long_window = Spec.of("sliding_window", window=n + _WINDOW)
    bottom_right, alibi = Spec.of("causal_bottom_right"), Spec.of("alibi")
    # A document of a single token shows off-by-one ends.
    documents = Spec.of("document", lengths=[n // 3, 1, n - n // 3 - 1])
    masks = {
        "full": _FULL,
        "causal": _CAUSAL,
        "sliding_window": window,
        "prefix_lm": Spec.of("prefix_lm", prefix=_PREFIX),
        "document": documents,
        "composition": Spec.of("and", documents, Spec.of("or", window, _CAUSAL)),
        "expression": Spec.of("expression", text="(q_idx + kv_idx) % 3 != 0"),
    }
    scores = {
        "none": Spec.of("none"),
        "alibi": alibi,
        "softcap": softcap,
        "relative_bias": Spec.of("relative_bias", distance=8, seed=0),
        "temperature": Spec.of("temperature", temperature=2.0),
        "composition": Spec.of("chain", softcap, alibi),
        "expression": Spec.of("expression", text="score * 0.5"),
    }
    # A CPU has no tf32 products, whatever the kernel.
    measured = [each.name for each in DTYPES.values() if each.measured]
    dtypes = [name for name in measured if name != "tf32" or device != "cpu"]
    other_lengths = (length for length in (16, 32, 64, 128) if length != n)
    return {
        "dtypes": {name: {"dtype": name} for name in dtypes},
        "head_dims": dict(map(_head_dim, HEAD_DIMS)),
        "masks": {
            **{name: {"mask": mask} for name, mask in masks.items()},
            # At equal lengths it would be the causal mask.
            "causal_bottom_right": {"kv": 2 * n, "mask": bottom_right},
            "padding": {"batch": 2, "mask": Spec.of("padding", lengths=[n, n // 3])},
            # Of a single length each, it would be the causal mask of one of the corners.
            "bottom_right": {
                "batch": 2,
                "kv": 2 * n,
                "mask": Spec.of("bottom_right", _CAUSAL, lengths=[n + n // 3, 2 * n]),
            },
            "documents_bottom_right": {
                "kv": 2 * n,
                "mask": Spec.of(
                    "documents_bottom_right",
                    _CAUSAL,
                    query_lengths=[n // 2, n - n // 2],
                    kv_lengths=[n // 2, 2 * n - n // 2],
                ),
            },
        },
        "scores": {name: {"score": score} for name, score in scores.items()},
        "gqa": {
            "4 heads on 2": {"heads": 4, "kv_heads": 2},
            "3 heads on 1": {"heads": 3, "kv_heads": 1},
        },
        "batch": {"3 sequences": {"batch": 3}},
        "scale": {"0.3": {"scale": 0.3}},
        # 1 and 77 are multiples of no tile.
        "lengths": {str(each): {"query": each, "kv": each} for each in (1, 77, *other_lengths)},
        "rectangular": {
            "query < kv": {"query": n, "kv": 2 * n},
            "query > kv": {"query": 2 * n, "kv": n},
            "one query": {"query": 1, "kv": n},
        },
        # Windows that leave no row without a key.
        "unequal": {
            "causal, query > kv": {"query": 2 * n, "kv": n, "mask": _CAUSAL},
            "sliding_window, query < kv": {"query": n, "kv": 2 * n, "mask": long_window},
            "sliding_window, query > kv": {"query": 2 * n, "kv": n, "mask": long_window},
        },
        # The alignments as in ``ALIGNMENTS``.
        "causal": {
            f"{mask}, query < kv": {"kv": 2 * n, "mask": mask} for mask in (_CAUSAL, bottom_right)
        },
        "backward": {
            "out": {"backward": True},
            "out and LSE": {"backward": True, "dlse": True},
            "sinks": {"backward": True, "sink": True},
        },
        # Gaps between rows, also those of dOut, and the expanded dOut of ``out.sum()``.
        "strides": {
            "gapped": {},
            "gapped, backward": {"backward": True},
            "expanded": {"backward": True},
        },
        "slopes": {
            what: {"batch": 2, "mask": _CAUSAL, "score": Spec.of(score)}
            for what, score in (("each head", "alibi"), ("2 sequences", "alibi_by_sequence"))
        },
        # It is 0 on the diagonal, where no key is hidden.
        "attn_mask": {"floats": {"score": alibi}},
        # Rows that see no key, by different masks.
        "empty_row": {
            "padding": {"batch": 2, "mask": Spec.of("padding", lengths=[0, n])},
            "causal_bottom_right": {"query": 2 * n, "kv": n, "mask": bottom_right},
            "sliding_window": {"mask": Spec.of("sliding_window", window=0)},
        },
    }


def _head_dim(dims: int | tuple[int, int]) -> tuple[str, dict[str, Any]]:
    head_dim, value_dim = dims if isinstance(dims, tuple) else (dims, dims)
    what = str(dims) if isinstance(dims, int) else f"{head_dim}/{value_dim}"
    # The usual scale of the new head_dim, not that of the base.
    return what, {"head_dim": head_dim, "value_dim": value_dim, "scale": USUAL_SCALE}


KernelFactory = Callable[[str, ConventionOptions], Subject]
"""(convention, options) → the kernel called by them; raises UsageError if it cannot be."""


class DetectedCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Capabilities of a kernel, and the results of the trials that show them."""

    convention: str  # the convention by which it was called
    options: ConventionOptions  # its differences from that, detected or given
    base: Problem | None  # the Problem that all trials change; None if it takes none
    exposes_lse: bool  # whether it returns LSE
    tried: tuple[TrialResult, ...]  # in the order of the trials

    def of(self, aspect: str) -> list[TrialResult]:
        """Return the results of the trials of one aspect."""
        return [one for one in self.tried if one.aspect == aspect]

    def takes(self, aspect: str, what: str = "") -> bool:
        """Return whether it takes the value ``what`` of an aspect; if empty, any value."""
        return any(what in {"", one.what} and one.verdict == "takes" for one in self.of(aspect))


def detect_capabilities(
    make: KernelFactory,
    conventions: Sequence[str],
    options: ConventionOptions,
    *,
    device: str,
    advance: Callable[[str], None],
    executor: Executor | None = None,
) -> DetectedCapabilities:
    """Try a kernel on some seventy Problems of at most 256 keys, and return its capabilities.

    Args:
        conventions: Conventions to try; the first by which it is right is used, else one by which
            it answers.
        advance: Called with a name before each question; an exception in it ends the detection.
        executor: How to call the kernel; by default in this process.
    """
    detection = Detection(make, options, device, advance, executor)
    base = detection.choose_base(conventions)
    if base is not None:
        detection.lse()
        # Before the trials, so that their causal masks are judged at the right alignment.
        detection.causal()
        aspects = ("dtypes", "head_dims", "masks", "scores", "gqa", "batch", "scale", "lengths")
        for aspect in aspects:
            for trial in trials(aspect, base, device):
                detection.ask(trial)
        detection.rectangular()
        detection.unequal()
        detection.empty_rows()
        # Last, because relations need problems that the kernel takes.
        detection.strides()
        for promise in PROMISES:
            detection.promise(promise)
    return detection.result()


class Detection:
    """The trials of one kernel, and their results so far.

    Args:
        make: As in ``detect_capabilities``, as are the next four.
        advance: Called before each question.
        brief: Whether only verdicts are needed, which takes half the time.

    Attributes:
        base: The Problem that all trials change; None if the kernel takes none.
    """

    _subject: Subject  # the kernel by the convention that is tried, or was chosen

    def __init__(
        self,
        make: KernelFactory,
        options: ConventionOptions,
        device: str,
        advance: Callable[[str], None],
        executor: Executor | None = None,
        *,
        brief: bool = False,
    ) -> None:
        self._make, self._options = make, options
        self._device, self._advance, self._brief = device, advance, brief
        self._executor = executor or InProcess()
        self.base: Problem | None = None
        self._convention = ""
        self._exposes_lse = False
        self._results: list[TrialResult] = []
        self._taken: list[Problem] = []

    def result(self) -> DetectedCapabilities:
        """Return the capabilities detected so far."""
        return DetectedCapabilities(
            convention=self._convention,
            options=self._options,
            base=self.base,
            exposes_lse=self._exposes_lse,
            tried=tuple(self._results),
        )

    def choose_base(self, conventions: Sequence[str]) -> Problem | None:
        """Choose the convention and LSE's base, and return the base Problem; None if none works."""
        answers: list[tuple[str, Problem]] = []
        for convention in conventions:
            self._load(convention, self._options)
            self.base = self._first_taken_problem(convention)
            # Only a right answer decides: a wrong one may be right by another convention.
            if self.base is not None and self._results[-1].verdict == "takes":
                return self.base
            if self.base is not None:
                answers.append((convention, self.base))
            elif self._results[-1].fatal:
                break
        if not answers:
            return None
        # Right by none: only with its own order of axes does a kernel take sizes that are unequal.
        convention, self.base = min(answers, key=self._misfit) if len(answers) > 1 else answers[0]
        self._load(convention, self._options)
        # The chosen convention's result goes last, as if it were the only one.
        chosen = next(one for one in self._results if one.what == convention)
        self._results.remove(chosen)
        self._results.append(chosen)
        return self.base

    def _misfit(self, answer: tuple[str, Problem]) -> int:
        """Return how many of the ``_WIDE`` changes fail before one is answered, by a convention."""
        convention, base = answer
        self._load(convention, self._options)
        for count, changes in enumerate(_WIDE):
            record = self._record(base.replace(**changes), f"convention {convention}")
            if trial_verdict(record, "convention") in {"takes", "wrong"}:
                return count
        return len(_WIDE)

    def _first_taken_problem(self, convention: str) -> Problem | None:
        """Return the first right Problem, else the first wrong one or None; store the result."""
        first: TrialResult | None = None
        candidates = [
            adapted_problems(self._subject, each, self._executor) for each in base_problems()
        ]
        wrong: tuple[Problem, TrialResult] | None = None
        for problem in itertools.chain.from_iterable(candidates):
            # After a wrong answer only other dtypes and lengths of its head_dim are tried: another
            # head_dim would be wrong too.
            if wrong and problem.head_dim != wrong[0].head_dim:
                continue
            answer = self._refusal(convention, problem) or self._first_answer(convention, problem)
            if answer.verdict == "takes":
                self._results.append(answer)
                return problem
            if answer.verdict == "wrong" and wrong is None:
                wrong = problem, answer
            if answer.fatal:  # Each further call may take as long, or another process.
                first = answer
                break
            first = first or answer
        assert first is not None, "there are Problems to begin with"
        self._results.append(wrong[1] if wrong else first)
        return wrong[0] if wrong else None

    def other_conventions(self, conventions: Sequence[str]) -> tuple[str, ...]:
        """Return those of the other ``conventions`` by which it is right on the base too."""
        chosen, options = self._convention, self._options
        right = []
        for convention in conventions:
            if convention != chosen:
                self._load(convention, options)
                if self.ask(Trial(aspect="convention", what=convention)) == "takes":
                    right.append(convention)
                self._results.pop()
        self._load(chosen, options)
        return tuple(right)

    def _first_answer(self, convention: str, problem: Problem) -> TrialResult:
        record = self._record(problem, "base")
        if record.status == "fail" and _lse_is_wrong(record) and not self._options.lse:
            record = self._try_options("lse", ("base2",), problem) or record
        self._exposes_lse = record.lse is not None
        return trial_result("convention", convention, record, problem)

    def _refusal(self, convention: str, problem: Problem) -> TrialResult | None:
        """Return the result if the kernel refuses or fails, without computing the exact result."""
        self._advance("base")
        answer = self._executor.refusal(self._subject, problem, self._device)
        if answer is None:
            inputs = input_tensors.draw_inputs(problem, self._device)
            result = self._executor.run(
                self._subject, inputs, origin=Origin(case=Case(problem=problem))
            )
            answer = result if isinstance(result, Failure) else None
        return None if answer is None else refused_result(convention, answer, problem)

    def lse(self) -> None:
        """Store whether it returns LSE, as the first answer showed."""
        base_of = self._options.lse or "natural"
        self._results.append(
            TrialResult(
                aspect="lse",
                what=base_of if self._exposes_lse else "",
                verdict="takes" if self._exposes_lse else "refuses",
                reason="" if self._exposes_lse else "it gives out alone",
                problem=str(self.base),
            )
        )

    def ask(self, trial: Trial) -> Verdict:
        """Make a trial, and store its result."""
        problem = self._problem(trial)
        record = self._record(problem, trial.question or trial.what)
        answer = trial_result(trial.aspect, trial.what, record, problem)
        self._results.append(answer)
        if answer.verdict == "takes":
            self._taken.append(problem)
        return answer.verdict

    def _problem(self, trial: Trial) -> Problem:
        assert self.base is not None, "a base comes first"
        return trial.of(self.base)

    def expect(self, trial: Trial) -> None:
        """Have the kernel called ahead on the trial that comes after the next."""
        if isinstance(self._executor, IsolatedExecutor):
            self._executor.expect(self._subject, Case(problem=self._problem(trial)))

    def verdict(self, trial: Trial) -> Verdict:
        """Return the verdict on a trial without storing a result."""
        problem = self._problem(trial)
        return trial_verdict(self._record(problem, str(problem)), trial.aspect)

    def causal(self) -> None:
        """Try causal masks at unequal lengths; if one is wrong, try the other alignment."""
        for other, trial in zip(reversed(ALIGNMENTS), self._trials("causal"), strict=True):
            if self.ask(trial) == "wrong" and not self._options.causal:
                self.other_diagonal(other)

    def other_diagonal(self, alignment: str) -> None:
        """Try the causal mask at ``alignment``, after the convention's alignment was wrong."""
        trial = self._trials("causal")[ALIGNMENTS.index(alignment)]
        self._try_again("causal", (alignment,), self._problem(trial))

    def rectangular(self) -> None:
        """Try unequal lengths; a single query only if a length of 1 is taken."""
        one = self.result().takes("lengths", "1")
        for trial in self._trials("rectangular"):
            if one or trial.what != "one query":
                self.ask(trial)

    def unequal(self) -> None:
        """Try masks that it takes at unequal lengths, of which its table says one thing for all.

        What the convention cannot express is left out, since a table does not declare it; a Subject
        is called by none, and refuses for itself.
        """
        tried = {one.what for one in self.result().of("masks") if one.verdict != "refuses"}
        for trial in self._trials("unequal"):
            problem = self._problem(trial)
            if trial.changes["mask"].name in tried:
                refusal = self._executor.refusal(self._subject, problem, self._device)
                expressed = refusal is None or refusal.kind != "refused"
                if expressed or self._convention == NATIVE.name:
                    self.ask(trial)

    def empty_rows(self) -> None:
        """Try rows that see no key: their output is 0, or another usual value."""
        for trial in self._trials("empty_row"):
            verdict = self.ask(trial)
            if verdict == "wrong" and not self._options.empty_row:
                self._try_again("empty_row", EMPTY_ROWS[:-1], self._problem(trial))
            # One mask is enough, unless the kernel refuses it.
            if verdict != "refuses":
                return

    def _trials(self, aspect: str) -> list[Trial]:
        assert self.base is not None, "a base comes first"
        return trials(aspect, self.base, self._device)

    def promise(self, promise: str) -> None:
        """Try the relations of a promise, comparing bits."""
        table = Capabilities(entry=self._subject.name, promises=PROMISES)
        options = {n: getattr(self._options, n) for n in ("lse", "empty_row", "causal")}
        terms = Terms(convention=self._convention, **options, table=table)
        promising = on_terms(self._subject, terms)
        answers: list[TrialResult] = []
        for relation, problem in self._relations(promise):
            record = self._record(problem, relation, promising)
            answers.append(trial_result("promises", promise, record, f"{relation} of {problem}"))
        # One result per promise: the first that breaks it, else one in which it held.
        broken = [one for one in answers if one.verdict != "takes"]
        self._results += (broken or answers)[:1]

    def strides(self) -> None:
        """Try inputs that are not contiguous, compared within bounds, not by bits."""
        for relation, problem in self._relations("layout"):
            record = self._record(problem, relation)
            self._results.append(
                trial_result("strides", relation, record, f"{relation} of {problem}")
            )

    def _relations(self, promise: str) -> Iterator[tuple[str, Problem]]:
        """Yield relations that a promise makes exact, each with a Problem that fits."""
        # Without short problems, which have a single tile.
        long = [p for p in self._taken if min(p.query, p.kv) >= min(LENGTHS)]
        # The cheapest first, because each relation runs a problem several times.
        long.sort(key=_work)
        for relation in RELATIONS.values():
            fitting = (p for p in long if relation.unfit(p) is None)
            problem = next(fitting, None) if relation.promise == promise else None
            if problem is not None:
                yield relation.name, problem

    def _try_again(self, option: str, values: Iterable[str], problem: Problem) -> None:
        """Replace the last result, which was wrong, if another option makes it right."""
        record = self._try_options(option, values, problem)
        if record is not None:
            last = self._results.pop()
            what = f'{last.what}: right as {option} = "{getattr(self._options, option)}"'
            self._results.append(trial_result(last.aspect, what, record, problem))

    def _try_options(self, option: str, values: Iterable[str], problem: Problem) -> Record | None:
        """Return the Record by the first of ``values`` that is right; None if none is."""
        before = self._options
        for value in values:
            changed: dict[str, Any] = {option: value}
            try:
                self._load(self._convention, dataclasses.replace(before, **changed))
            except UsageError:  # A Subject, unlike a plain function, has no options.
                break
            record = self._record(problem, f'{option} = "{value}"')
            if trial_verdict(record, option) == "takes":
                return record
        self._load(self._convention, before)
        return None

    def _load(self, convention: str, options: ConventionOptions) -> None:
        self._subject = self._make(convention, options)
        self._convention, self._options = convention, options

    def _record(self, problem: Problem, what: str, subject: Subject | None = None) -> Record:
        self._advance(what)
        relation = RELATIONS.get(what)
        numbers = relation.allowed(problem).items() if relation else ()
        case = Case(
            problem=problem,
            question=relation.name if relation else "compare",
            # Any value will do: detection only asks whether the relation holds.
            parameters={name: values[0] for name, values in numbers},
        )
        kernel = subject or self._subject
        return run_case(
            kernel, case, device=self._device, executor=self._executor, brief=self._brief
        )


def _work(problem: Problem) -> int:
    """Return the number of products in a call, to which an interpreter's time is proportional."""
    pairs = problem.batch * problem.heads * problem.query * problem.kv
    return pairs * (problem.head_dim + problem.value_dim)


def _lse_is_wrong(record: Record) -> bool:
    judgement = record.judgement
    return bool(judgement and judgement.worst and judgement.worst.tensor == "lse")
