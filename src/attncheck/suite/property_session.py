"""A property suite at work: its kernels, the cases it draws, and what must hold of them."""

from __future__ import annotations

import functools
import inspect
import math
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from hypothesis import HealthCheck, event, given, settings, target
from hypothesis import strategies as st
from hypothesis.errors import FailedHealthCheck, Flaky, Unsatisfiable, UnsatisfiedAssumption

from attncheck.capabilities import named_kernels
from attncheck.capabilities.configuration import read_configuration
from attncheck.capabilities.subject import Subject
from attncheck.cases.check_cases import check_cases
from attncheck.cases.mask_samples import NOT_APPLICABLE, PLAIN_KIND, ProblemKind, refusal
from attncheck.cases.strategies.families import MASK_FAMILIES, family_named
from attncheck.cases.strategies.problems import problems, softmax_problems
from attncheck.cases.strategies.sizes import parameters, shapes
from attncheck.cases.tier import TIERS, Tier
from attncheck.core.errors import ProblemError, UsageError, without_recorded
from attncheck.core.formats import DTYPES
from attncheck.diagnose.diagnosis import diagnose_failure
from attncheck.inputs.distributions import DISTRIBUTIONS
from attncheck.inputs.problem import Case, Problem
from attncheck.records.record import UNTRUSTED_STATUSES
from attncheck.records.run_reports import Tally
from attncheck.relations import RELATIONS
from attncheck.subjects.load import load_subject
from attncheck.suite.pytest_options import MARK, SOFTMAX, choose_gpu
from attncheck.suite.wrong_answers import WrongAnswer
from attncheck.verify import question_fit
from attncheck.verify import question_fit as of_kernels
from attncheck.verify.environment import default_device, prepare, require_device
from attncheck.verify.executor import Executor, Failure, InProcess
from attncheck.verify.kernel_server import Compiling
from attncheck.verify.run_case import run_case

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from hypothesis.strategies import SearchStrategy

    from attncheck.mods.spec import Spec
    from attncheck.records.record import Record
    from attncheck.suite.pytest_options import Options

__all__ = [
    "NOT_ASKED",
    "Kernel",
    "Param",
    "PropertySpec",
    "Session",
    "UnderTest",
    "asks",
    "cases",
    "configured_kernels",
    "gpu_is_lost",
    "has_launches_for",
    "kernels",
    "parametrize_kernels",
    "parametrize_problems",
    "prepare_device",
    "search_cases",
    "skip_without_gpu",
    "variations",
]


_SEEDS = 1000  # as strategies.problems draws


def variations(
    case: Case,
    count: int,
    *,
    fits: Callable[[str, Problem], bool],
    lengths: bool,
    distributions: Sequence[str] = (),
) -> Iterator[Case]:
    """Up to ``count`` Cases beside ``case``, of the same dtype, dims and mods.

    Each has another seed and distribution, the relation's numbers move on, and with ``lengths``
    query and kv shrink towards a half. They follow from ``case`` alone: a failure of one of them
    shrinks as ``case`` does.

    Args:
        case: What was drawn.
        count: How many.
        fits: (question, Problem) → whether it may be asked.
        lengths: Whether lengths may be others, where the mask's numbers allow it.
        distributions: To choose from (default: all).
    """
    for turn in range(1, count + 1):
        numbers = _numbers(case.problem, turn, distributions)
        sizes = _lengths(case.problem, turn, count) if lengths else {}
        problem = _first(case, fits, (numbers | sizes, numbers))
        if problem is not None:
            yield _moved(case, problem, turn)


def _numbers(problem: Problem, turn: int, only: Sequence[str]) -> dict[str, Any]:
    softmax = problem.operation == "softmax"
    names = list(only) or [
        name
        for name in without_recorded(DISTRIBUTIONS)
        if DISTRIBUTIONS[name].scores is not None or not softmax
    ]
    if problem.distribution not in names:
        names = [problem.distribution]
    index = names.index(problem.distribution)
    return {
        "seed": (problem.seed + turn) % _SEEDS,
        "distribution": names[(index + turn) % len(names)],
    }


def _lengths(problem: Problem, turn: int, count: int) -> dict[str, int]:
    """More than half of each: 1 stays 1, and 2 stays 2."""

    def less(length: int) -> int:
        return -(-length * (2 * (count + 1) - turn) // (2 * (count + 1)))

    return {"query": less(problem.query), "kv": less(problem.kv)}


def _first(
    case: Case, fits: Callable[[str, Problem], bool], changes: tuple[dict[str, Any], ...]
) -> Problem | None:
    for each in changes:
        try:
            problem = question_fit.question_problem(case.question, case.problem.replace(**each))
        except ProblemError:  # documents that must cover a length, padding beyond it
            continue
        if fits(case.question, problem):
            return problem
    return None


def _moved(case: Case, problem: Problem, turn: int) -> Case:
    allowed = question_fit.allowed_parameters(case.question, problem)
    chosen = {
        name: values[(_index(values, case.parameters.get(name)) + turn) % len(values)]
        for name, values in allowed.items()
    }
    return Case(problem=problem, question=case.question, parameters=chosen)


def _index(values: Any, value: object) -> int:
    return list(values).index(value) if value in values else 0


def has_launches_for(subject: Subject, questions: Iterable[str]) -> bool:
    """Whether any of ``questions`` can be asked of ``subject`` as far as its launches go.

    A kernel that says nothing of other launches is not asked about them: it gets no such test.
    """
    relaunched = (q in RELATIONS and RELATIONS[q].relaunched for q in questions)
    return not all(relaunched) or type(subject).launches is not Subject.launches


class UnderTest:
    """A subject on one device, and which part of the suite is asked of it.

    Attributes:
        name: What it was asked for by: a name, or ``file.py::name``.
        subject: The kernel.
        device: ``cpu`` or ``cuda``.
        dtype: The dtype that a test is about; empty where it is about none.
        family: The mask family that a test is about; empty where it is about none.
        tier: How hard it is asked.
        refused: Why it did not take the last Problem that it did not take; empty if it took all.
        failed: The last Record that was no pass.
        lost: The Record of the Case that took the GPU from this process; None where none did.
        share: Largest error ÷ bound of the answers since it was last set to 0.
        tally: What the test that runs asked of it.
    """

    def __init__(
        self,
        name: str,
        subject: Subject,
        device: str,
        *,
        dtype: str = "",
        family: str = "",
        tier: Tier = TIERS["smoke"],
        executor: Executor | None = None,
        compiling: Compiling | None = None,
    ) -> None:
        self.name = name
        self.subject = subject
        self.device = device
        self.dtype = dtype
        self.family = family
        self.tier = tier
        self.refused = ""
        self.failed: Record | None = None
        self.lost: Record | None = None
        self.share = 0.0
        self.tally = Tally()
        self._compiling = compiling or Compiling()
        self._executor = executor or InProcess()

    def __repr__(self) -> str:
        return f"UnderTest({self.name!r}, device={self.device!r})"

    def begin(self) -> None:
        """Forget what was asked before: another test begins."""
        self.refused, self.failed, self.share, self.tally = "", None, 0.0, Tally()

    def supports(self, problem: Problem) -> bool:
        """Whether the kernel takes ``problem``: for ``strategies.problems(supports=…)``.

        Where even asking raises it is asked the question, and the answer says what it raised.
        """
        reason: str | Failure | None = "such problems do not concern it"
        if self._executor.concerns(self.subject, problem):
            reason = self._executor.refusal(self.subject, problem, self.device)
        if isinstance(reason, str):
            self.refused = reason
        return not isinstance(reason, str)

    def answer(self, case: Case) -> Record:
        """The Record of one Case."""
        start, before = time.perf_counter(), self._compiling.seconds
        record = run_case(
            self.subject, case, device=self.device, executor=self._executor, brief=True
        )
        seconds = time.perf_counter() - start
        compiling = self._compiling.seconds - before
        self.tally.add(Tally(problems={record.status: 1}, seconds=seconds, compiling=compiling))
        if record.status == "unsupported":
            self.refused = record.reason
        return record

    def must_hold(self, case: Case) -> None:
        """Raises DoesNotHold, which reads like a diagnosis, unless the kernel answers rightly.

        A Case that the kernel does not take is drawn anew, and skips a test without Hypothesis.

        Raises:
            DoesNotHold: an AssertionError, also for a kernel that raised.
        """
        __tracebackhide__ = True
        record = self.lost or self.answer(case)
        self._guide(record)
        if record.status in UNTRUSTED_STATUSES:
            self.failed = record
            if record.status == "error" and self.device == "cuda" and gpu_is_lost():
                self.lost = record  # whatever is asked now fails alike: this one did it
            raise WrongAnswer(
                record, kernel=self.name, device=self.device, diagnose=self._diagnosed
            )

    def _diagnosed(self, record: Record) -> Record:
        return diagnose_failure(record, self.subject, device=self.device, executor=self._executor)

    def skip(self) -> NoReturn:
        """Skip the test, with what the kernel said when it last refused a Problem."""
        pytest.skip(f"{self.name} takes no such problem on {self.device}: {self.refused}")

    def _guide(self, record: Record) -> None:
        """Tell Hypothesis what happened: refusals are drawn anew, what is odd is counted."""
        share = record.judgement.out_over_bound if record.judgement else None
        if share and math.isfinite(share):
            self.share = max(self.share, share)
        import hypothesis

        if not hypothesis.currently_in_test_context():
            if record.status == "unsupported":
                self.skip()
            return
        if record.status == "unsupported":
            hypothesis.reject()
        if record.status in {"warn", "inconclusive"}:
            hypothesis.event(record.status)


_TILE = 16  # the smallest that kernels use
_FLAKY = "It does not fail every time: of the runs of this very case, at least one held."


def search_cases(
    test: Callable[[UnderTest, Case], None],
    kernel: UnderTest,
    cases: SearchStrategy[Case],
    beside: Callable[[Case], Iterable[Case]] = lambda _: (),
) -> None:
    """Ask ``test`` of as many ``cases`` as the kernel's tier says; the smallest failure raises.

    Skips where the kernel took none of them, and said why.

    Args:
        test: The property.
        kernel: Of which it is asked.
        cases: What is drawn.
        beside: Other Cases that are asked together with a drawn one.

    Raises:
        DoesNotHold: for the smallest failing Case.
    """
    __tracebackhide__ = True
    kernel.begin()

    def holds(case: Case) -> None:
        __tracebackhide__ = True
        kernel.share = 0.0
        test(kernel, case)
        for other in beside(case):
            with suppress(UnsatisfiedAssumption):  # refused as it was called: the first was not
                test(kernel, other)
        event(f"lengths {_remainders(case)} of {_TILE}")
        if kernel.share:
            target(math.log2(kernel.share), label="log2(error / bound)")

    # Where it is not random Hypothesis draws by the source and the signature: by this each kernel,
    # dtype and family has problems of its own, and the same ones next time.
    holds.__annotations__["case"] = f"{test.__name__} {kernel.name} {kernel.dtype} {kernel.family}"
    try:
        _drawn(holds, kernel, cases)
    except Unsatisfiable:
        _nothing_tested(kernel)
    except Flaky:
        if kernel.failed is None:
            raise
        raise WrongAnswer(
            kernel.failed, kernel=kernel.name, device=kernel.device, remark=_FLAKY
        ) from None
    if kernel.tally.total and kernel.tally.total == kernel.tally.problems.get("inconclusive"):
        pytest.skip(f"nothing could be judged of {kernel.name}: every answer is inconclusive")


def _drawn(holds: Callable[[Case], None], kernel: UnderTest, cases: SearchStrategy[Case]) -> None:
    """Let Hypothesis draw; raises Unsatisfiable where the first few dozen are all refused."""
    __tracebackhide__ = True
    profile = settings.get_profile(kernel.tier.profile)
    most = kernel.tier.examples_on(kernel.device, triton=kernel.subject.triton)
    patient = settings(profile, max_examples=most)
    few = {HealthCheck.filter_too_much}
    others = set(patient.suppress_health_check) - few
    try:
        settings(patient, suppress_health_check=others)(given(case=cases)(holds))()
    except FailedHealthCheck:
        # Hundreds more would be drawn until Hypothesis gave up; where some were taken, they are.
        if not kernel.tally.total:
            raise Unsatisfiable from None
        patient(given(case=cases)(holds))()


def _remainders(case: Case) -> str:
    """Which lengths are whole tiles."""
    whole = [not length % _TILE for length in (case.problem.query, case.problem.kv)]
    return {2: "both multiples", 1: "one multiple", 0: "no multiples"}[sum(whole)]


def _nothing_tested(kernel: UnderTest) -> None:
    __tracebackhide__ = True
    if kernel.refused:
        kernel.skip()
    pytest.fail(f"nothing was tested: no problem of {kernel.family} fits", pytrace=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PropertySpec:
    """What a property asks.

    Attributes:
        questions: ``compare``, relations or probes; one of them is drawn.
        families: Mask families, each a test of its own; ``softmax`` for row softmax.
        dtypes: Only these; empty for all that a kernel takes.
        shapes: Keywords of ``strategies.shapes``; ``longest`` is the tier's unless it is here.
        scores: Score mods; None for none.
        problems: Other keywords of ``strategies.problems``.
        where: Which Problems the property is about; the nearest one is derived, not waited for.
    """

    questions: tuple[str, ...]
    families: tuple[str, ...]
    dtypes: tuple[str, ...] = ()
    shapes: dict[str, Any]
    scores: Callable[[], SearchStrategy[Spec]] | None = None
    problems: dict[str, Any]
    where: Callable[[Problem], bool] | None = None

    @property
    def kind(self) -> ProblemKind:
        """What all its Problems have."""
        return ProblemKind(
            paged="pagings" in self.problems,
            sink=self.problems.get("sinks", False) is True,
            backward=self.problems.get("backward", False),
            captured=self.problems.get("dcaptured", False),
        )

    def fits(self, question: str, problem: Problem) -> bool:
        """Whether ``question`` of ``problem`` is what the property is about."""
        problem = of_kernels.question_problem(question, problem)
        if of_kernels.unfit_reason(question, problem) is not None:
            return False
        return self.where is None or self.where(problem)


def asks(
    *questions: str,
    families: Sequence[str],
    dtypes: Sequence[str] = (),
    shapes: dict[str, Any] | None = None,
    scores: Callable[[], SearchStrategy[Spec]] | None = None,
    where: Callable[[Problem], bool] | None = None,
    **more: Any,
) -> Callable[[Callable[[UnderTest, Case], None]], Any]:
    """A property: the test runs once for each kernel × dtype × mask family.

    Hypothesis draws the rest. The test's signature is ``(kernel, case)``; arguments are those of
    ``Asked``.

    Raises:
        UnknownName: for a question or a family that there is not.
    """
    for question in questions:
        of_kernels.check_question(question)
    for family in families:
        if family != SOFTMAX:
            family_named(family)
    asked = PropertySpec(
        questions=questions,
        families=tuple(families),
        dtypes=tuple(dtypes),
        shapes=shapes or {},
        scores=scores,
        problems=more,
        where=where,
    )

    def decorate(test: Callable[[UnderTest, Case], None]) -> Any:
        @functools.wraps(test)
        def of_kernel(kernel: UnderTest) -> None:
            __tracebackhide__ = True
            search_cases(
                test, kernel, cases(kernel, asked), functools.partial(_beside, kernel, asked)
            )

        # What pytest reads: Hypothesis gives the case.
        kernel = inspect.signature(test).parameters["kernel"]
        # Hypothesis' own plugin then prints statistics where it is asked to.
        of_kernel.is_hypothesis_test = True  # type: ignore[attr-defined]  # a function's own
        of_kernel.__signature__ = inspect.Signature([kernel])  # type: ignore[attr-defined]  # PEP 362
        return getattr(pytest.mark, MARK)(asked)(of_kernel)

    return decorate


@st.composite
def cases(draw: st.DrawFn, kernel: UnderTest, asked: PropertySpec) -> Case:
    """Cases of a property for one kernel, dtype and family; they shrink to the plainest."""
    question = draw(st.sampled_from(asked.questions))
    problem = of_kernels.question_problem(question, draw(_problems(kernel, asked, question)))
    chosen = draw(parameters(allowed=of_kernels.allowed_parameters(question, problem)))
    return Case(problem=problem, question=question, parameters=chosen)


def _beside(kernel: UnderTest, asked: PropertySpec, case: Case) -> Iterator[Case]:
    """What is asked together with ``case``: more on a GPU, where its kernel is compiled now."""

    def fits(question: str, problem: Problem) -> bool:
        return kernel.supports(problem) and asked.fits(question, problem)

    return variations(
        case,
        kernel.tier.repeats_on(kernel.device) - 1,
        fits=fits,
        # Ours are compiled for any length; what is known of no other kernel.
        lengths=kernel.subject.triton and kernel.name in named_kernels.BUILTIN,
        distributions=asked.problems.get("distributions", ()),
    )


def _problems(kernel: UnderTest, asked: PropertySpec, question: str) -> SearchStrategy[Problem]:
    def fits(problem: Problem) -> bool:
        return kernel.supports(problem) and asked.fits(question, problem)

    common: dict[str, Any] = {"dtypes": (kernel.dtype,), "supports": fits, **asked.problems}
    sizes = kernel.tier.sizes_on(kernel.device)
    if kernel.family == SOFTMAX:
        return softmax_problems(longest=sizes["longest"], **common)
    return problems(
        shapes=shapes(**(sizes | asked.shapes)),
        masks=family_named(kernel.family),
        scores=asked.scores() if asked.scores else None,
        **common,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One that is to be judged.

    Attributes:
        name: What it was asked for by.
        id: What tests' ids call it.
        subject: The kernel.
    """

    name: str
    id: str
    subject: Subject


def prepare_device(options: Options) -> str:
    """Where kernels run, and this process made ready for it, before any is loaded.

    Raises:
        pytest.UsageError: for a device that is not here.
    """
    if options.device != "cpu":
        choose_gpu()
    try:
        if options.device:
            require_device(options.device)
    except UsageError as error:
        raise pytest.UsageError(f"--device: {error}") from None
    device = options.device or default_device()
    prepare(device)
    return device


def kernels(options: Options, device: str) -> tuple[Kernel, ...]:
    """Those that were asked for; by default the built-in ones that can run on ``device``.

    Raises:
        pytest.UsageError: for one that was asked for and cannot be loaded, or not run here.
    """
    if options.kernels:
        return tuple(_asked_for(name, device) for name in options.kernels)
    return tuple(
        Kernel(name=name, id=name, subject=subject)
        for name in named_kernels.builtin_names()
        if not InProcess().absence(subject := named_kernels.subject_named(name), device)
    )


def configured_kernels(device: str) -> tuple[Kernel, ...]:
    """Those of ``[tool.attncheck.kernels]`` of the working directory's project.

    Raises:
        pytest.UsageError: for a table that cannot be read, a kernel that cannot be loaded or run.
    """
    try:
        names = read_configuration().kernels
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None
    return tuple(_asked_for(name, device) for name in names)


def _asked_for(name: str, device: str) -> Kernel:
    try:
        subject = load_subject(name)
    except UsageError as error:
        raise pytest.UsageError(f"--kernel: {error}") from None
    reason = InProcess().absence(subject, device)
    if reason:
        raise pytest.UsageError(f"--kernel: {name} cannot run on {device}: {reason}.")
    return Kernel(name=name, id=_id(name), subject=subject)


def _id(name: str) -> str:
    """``wide`` of ``some/file.py`` is ``file.wide``: a ``::`` would cut the test's own id."""
    path, separator, function = name.rpartition("::")
    return f"{Path(path).stem}.{function}" if separator else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """Which part of the suite one test is: what stands in the brackets of its id.

    Attributes:
        kernel: The kernel.
        dtype: Empty where a test is about none.
        family: The mask family; empty as dtype.
        refused: Why the kernel takes no such problem; empty where it takes some.
    """

    kernel: Kernel
    dtype: str = ""
    family: str = ""
    refused: str = ""

    @property
    def id(self) -> str:
        """``triton-flash2-bf16-causal``."""
        return "-".join(part for part in (self.kernel.id, self.dtype, self.family) if part)


@dataclass(slots=False, kw_only=True)
class Session:
    """The kernels of a session, and what was asked of each.

    Attributes:
        options: What the command line asks for.
        compiling: The clock of what is compiled.
        untaken: Kernel → dtype that it takes not at all → why: no test is made of it.
        lost_by: The test that took the GPU from this process; empty where none did.
    """

    options: Options
    untaken: dict[str, dict[str, str]] = field(default_factory=dict)
    lost_by: str = ""
    compiling: Compiling = field(default_factory=Compiling)
    _refusals: dict[tuple[str, str, str, ProblemKind], str] = field(default_factory=dict)
    _none_taken: dict[tuple[str, str], bool] = field(default_factory=dict)

    @cached_property
    def device(self) -> str:
        """``cpu`` or ``cuda``; this process is made ready for it."""
        return prepare_device(self.options)

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """Those that are judged, in order."""
        return kernels(self.options, self.device)

    @cached_property
    def _named(self) -> tuple[Kernel, ...]:
        """Those of the project's configuration, where none was asked for."""
        return () if self.options.kernels else configured_kernels(self.device)

    def params(self, asked: PropertySpec) -> list[Param]:
        """The tests that a property becomes, in order."""
        return [
            Param(kernel=kernel, dtype=dtype, family=family, refused=refused)
            for kernel in self.kernels
            if has_launches_for(kernel.subject, asked.questions)
            for dtype in self._dtypes(kernel, asked)
            for family in asked.families
            if (refused := self._refusal_of(asked, kernel, family, dtype)) != NOT_APPLICABLE
        ]

    def plain_params(self) -> list[Param]:
        """One for each kernel: the tests of somebody's own file.

        Those that were asked for; else those that the project names; else the built-in ones.
        """
        return [Param(kernel=kernel) for kernel in self._named or self.kernels]

    def under_test(self, param: Param) -> UnderTest:
        """What a test gets."""
        self.compiling.listen()
        return UnderTest(
            param.kernel.name,
            param.kernel.subject,
            self.device,
            dtype=param.dtype,
            family=param.family,
            tier=self.options.tier,
            compiling=self.compiling,
        )

    def _dtypes(self, kernel: Kernel, asked: PropertySpec) -> list[str]:
        """Those that are wanted and that the kernel takes somewhere in the suite."""
        wanted = [name for name, dtype in DTYPES.items() if dtype.measured]
        for only in (asked.dtypes, self.options.dtypes):
            wanted = [name for name in wanted if not only or name in only]
        return [dtype for dtype in wanted if not self._untaken(kernel, dtype)]

    def _untaken(self, kernel: Kernel, dtype: str) -> bool:
        """Whether the kernel takes no problem of this dtype; then the reason is kept."""
        key = (kernel.name, dtype)
        if key not in self._none_taken:  # every property asks
            self._none_taken[key] = self._takes_none(kernel, dtype)
        return self._none_taken[key]

    def _takes_none(self, kernel: Kernel, dtype: str) -> bool:
        families = (*MASK_FAMILIES, SOFTMAX)
        reasons = []
        for kind in (
            PLAIN_KIND,
            ProblemKind(paged=True),
            ProblemKind(sink=True),
            ProblemKind(backward=True),
        ):
            for family in families:
                refusal = self._refusal(kernel, family, dtype, kind)
                if not refusal:
                    return False
                reasons += [refusal] if refusal != NOT_APPLICABLE else []
        if self.options.kernels and self.options.dtypes:  # somebody asked for exactly this
            reasons = reasons or [NOT_APPLICABLE]
        if reasons:
            self.untaken.setdefault(kernel.name, {})[dtype] = reasons[0]
        return True

    def _refusal_of(self, asked: PropertySpec, kernel: Kernel, family: str, dtype: str) -> str:
        """Why the kernel takes no such problem as the property asks."""
        return self._refusal(kernel, family, dtype, asked.kind)

    def _refusal(self, kernel: Kernel, family: str, dtype: str, kind: ProblemKind) -> str:
        key = (kernel.name, family, dtype, kind)
        if key not in self._refusals:
            self._refusals[key] = refusal(kernel.subject, family, dtype, self.device, kind)
        return self._refusals[key]


def gpu_is_lost() -> bool:
    """Whether CUDA works no more in this process.

    An illegal or a misaligned address ends every later call with the same words.
    """
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def skip_without_gpu(session: Session) -> None:
    """Skip a test of a process that has no GPU any more."""
    if session.lost_by:
        pytest.skip(f"this process lost its GPU in {session.lost_by}: run again without that")


NOT_ASKED = "attncheck-asks-nothing"
"""Id of a property that concerns none of the kernels; it is taken out when all is collected."""


def parametrize_kernels(metafunc: pytest.Metafunc, session: Session) -> None:
    """Parametrise ``kernel``: what a property asks of, or each kernel."""
    marker = metafunc.definition.get_closest_marker(MARK)
    if marker is None:
        params = [pytest.param(each, id=each.id) for each in session.plain_params()]
        metafunc.parametrize("kernel", params, indirect=True, scope="session")
        return
    params = [
        pytest.param(each, id=each.id, marks=_skips(each.refused))
        for each in session.params(marker.args[0])
    ]
    # By module, so that a file's tests stay together and in order.
    metafunc.parametrize(
        "kernel", params or [pytest.param(None, id=NOT_ASKED)], indirect=True, scope="module"
    )


def parametrize_problems(metafunc: pytest.Metafunc, dtypes: Sequence[str]) -> None:
    """Parametrise ``problem``: the dozen Problems of ``attncheck check``, by their names."""
    params = [
        pytest.param(each.case.problem, id=each.name if len(dtypes) < 2 else f"{dtype}-{each.name}")
        for dtype in dtypes or ("bf16",)
        for each in check_cases(dtype)
        if each.case.question == "compare"
    ]
    metafunc.parametrize("problem", params, indirect=True, scope="session")


def _skips(reason: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.skip(reason=reason)] if reason else []
