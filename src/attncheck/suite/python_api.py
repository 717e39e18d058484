"""The public functions for a kernel author's tests."""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import hypothesis
from hypothesis.strategies import SearchStrategy
from msgspec.structs import replace
from torch import Tensor

from attncheck.cases.check_cases import check_cases, crossed_cases
from attncheck.core.declared_arithmetic import Arithmetic
from attncheck.core.errors import OraclesDisagree, UnknownName, UsageError
from attncheck.core.judgement import BlindSpot, Judgement, Worst
from attncheck.diagnose.diagnosis import CauseSearch
from attncheck.diagnose.user_tensors import UserOutputs
from attncheck.inputs.input_tensors import Descale, Inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.records.failure_causes import gives_no_out
from attncheck.records.record import DEFAULT_DTYPE, UNTRUSTED_STATUSES, Record
from attncheck.reporting.check_document import worst_record
from attncheck.reporting.diagnosis_text import explanation_facts, tile_picture
from attncheck.subjects.capabilities.subject import Subject
from attncheck.subjects.conventions.function_subject import FunctionSubject
from attncheck.subjects.load import load_subject
from attncheck.suite.pytest_options import settings_of
from attncheck.suite.wrong_answers import WrongAnswer, WrongAnswers
from attncheck.verify.claims import claimed_questions, find_claims, subject_takes
from attncheck.verify.environment import has_stock_interpreter, prepare, usable_device
from attncheck.verify.kernel_hosts import on_terms
from attncheck.verify.question_fit import COMPARE
from attncheck.verify.verify import assemble_report, iter_records

_DEFAULT_DTYPES = (DEFAULT_DTYPE,)
_MOST_SEARCHES = 4  # searches for a cause among all fault models, each of which takes a second

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _point_at_caller(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return ``function`` with UsageErrors that show the caller's line alone.

    An argument that it does not have is one of them, with the name that is nearest.
    """
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        __tracebackhide__ = True
        try:
            for name in kwargs:
                if name not in names:
                    raise UnknownName("argument", name, names)
            return function(*args, **kwargs)
        except UsageError as error:
            # The frames in which arguments are read tell their author nothing.
            raise error.with_traceback(None)  # noqa: B904  # the same error

    return call


@_point_at_caller
def check(
    kernel: Callable[..., object] | Subject | str,
    problem: Problem | Case | None = None,
    *,
    convention: str | None = None,
    dtypes: Iterable[str] = _DEFAULT_DTYPES,
    device: str | None = None,
    question: str = COMPARE,
) -> tuple[Record, ...]:
    """Raise AssertionError, with a diagnosis, if ``kernel`` gives wrong answers.

    Args:
        kernel: A function in a known calling convention, a Subject, or a name as for ``--kernel``:
            ``file.py::name``, ``package.module:name``, or the name of a kernel.
        problem: The Problem or Case to ask; None for the questions of ``attncheck check``: some
            sixty exact probes and Problems, and for a Subject crossed ones. Within a Hypothesis
            test, a Problem that the kernel does not take is rejected, so that another one is drawn.
        convention: Calling convention of a function; None to infer it from the signature.
        dtypes: Dtypes of the questions if ``problem`` is None.
        device: ``cpu`` or ``cuda``; None for cuda if torch sees a GPU.
        question: The question to ask of a Problem: ``compare``, a relation or a probe.

    Returns:
        One Record for each question; its status is ``unsupported`` if the kernel does not take it.

    Raises:
        AssertionError: if an answer is wrong, the kernel raises, or it takes no question at all.
        UsageError: in one line, for invalid arguments.
    """
    __tracebackhide__ = True
    device = _prepare_device(device)
    subject = _subject(kernel, convention)
    cases = _cases(problem, question, dtypes)
    name = kernel if isinstance(kernel, str) else _reference(kernel) or subject.name
    claims = None
    if problem is None or isinstance(kernel, str):  # the claims of a named kernel are cached
        claims = find_claims(subject, kernel=name, device=device)
    if claims is not None and not claims.timeout:
        problems = [case.problem for _, case in cases if problem is not None]
        named = () if problem is not None else _names(dtypes)
        # The default dtype is claimed only if the kernel is right in it.
        named = () if named == _DEFAULT_DTYPES else named
        subject = on_terms(subject, claims.terms(named, problems=problems))
        if problem is None:
            how: dict[str, Any] = {"device": device, "dtypes": named, "calls": False}
            cases = [(one.name, one.case) for one in claimed_questions(claims, subject, **how)]
    elif problem is None and not isinstance(subject, FunctionSubject):
        takes = subject_takes(subject, device)
        crossed = [one for each in _names(dtypes) for one in crossed_cases(each, (), takes)]
        cases += [(one.name, one.case) for one in crossed]
    records = _answers(subject, cases, device)
    if hypothesis.currently_in_test_context():  # rejects Problems that are not taken
        hypothesis.assume(any(record.status != "unsupported" for record in records))
    diagnosed = _diagnosed_later(records, subject, device)
    wrong = [
        WrongAnswer(
            record, kernel=name, device=device, diagnose=functools.partial(diagnosed, place)
        )
        for place, record in enumerate(records)
        if record.status in UNTRUSTED_STATUSES
    ]
    if len(wrong) == 1:
        raise wrong[0]
    if wrong:
        report = assemble_report([subject], records, device=device, command="")
        left = len(cases) - len(records)
        not_asked = f"{left} more were not asked" if left else ""
        report = replace(report, kernels={name: subject.summary}, incomplete=not_asked)
        raise WrongAnswers(wrong, report)
    # A kernel that refuses everything must not pass.
    if problem is None and all(record.status == "unsupported" for record in records):
        raise AssertionError(
            f"nothing was tested: {name} takes none of {len(records)} questions on {device}: "
            f"{records[0].reason}"
        )
    return records


def _answers(
    subject: Subject, cases: Sequence[tuple[str, Case]], device: str
) -> tuple[Record, ...]:
    """Return a Record for each Case, or the first ones if these settle that there is no out."""
    records: list[Record] = []
    for record in iter_records([subject], cases, device=device):
        records.append(record)
        if gives_no_out(records):
            break
    return tuple(records)


def _diagnosed_later(
    records: Sequence[Record], subject: Subject, device: str
) -> Callable[[int, Record], Record]:
    """Return a function of the place of a failure in ``records``, and it, which diagnoses it.

    The first call diagnoses all failures, which share causes: a search among all fault models for
    each of them would take minutes.
    """

    @functools.cache
    def diagnosed() -> Sequence[Record]:
        worst = worst_record(records)
        if worst is None:  # the oracles disagree
            return records
        search = CauseSearch(_MOST_SEARCHES)
        for record in records:
            search.note(record)
        return search.diagnose_all(records, subject, device=device, first=worst)

    return lambda place, _record: diagnosed()[place]


def _prepare_device(device: str | None) -> str:
    if device not in {None, "cpu", "cuda"}:
        raise UnknownName("device", device, ("cpu", "cuda"))
    chosen = usable_device(device)
    prepare(chosen)
    return chosen


def _subject(kernel: Callable[..., object] | Subject | str, convention: str | None) -> Subject:
    if isinstance(kernel, Subject):
        return kernel
    if isinstance(kernel, str):
        return _load_once(kernel, convention)
    from attncheck.subjects.conventions.declarations import make_subject, possible_conventions

    name = getattr(kernel, "__name__", type(kernel).__name__)
    subject = make_subject(kernel, name, convention)
    if isinstance(subject, str):
        raise UsageError(f"kernel {name!r} {subject}.")
    subject.conventions = (convention,) if convention else possible_conventions(kernel)
    return subject


@functools.cache
def _load_once(kernel: str, convention: str | None) -> Subject:
    """Import a file once, however many Problems are asked."""
    return load_subject(kernel, convention)


def _cases(
    problem: Problem | Case | None, question: str, dtypes: Iterable[str]
) -> list[tuple[str, Case]]:
    """Return the Cases that are asked, each with its name in reports; empty for a single one."""
    if isinstance(problem, Case):
        return [("", problem)]
    if isinstance(problem, Problem):
        return [("", Case(problem=problem, question=question))]
    if problem is not None:
        kind = type(problem).__name__
        raise UsageError(f"problem is {kind}: it must be a Problem or a Case.")
    if question != COMPARE:
        raise UsageError(f"question={question!r} is asked of a Problem: give one.")
    return [(one.name, one.case) for dtype in _names(dtypes) for one in check_cases(dtype)]


def _names(dtypes: Iterable[str]) -> tuple[str, ...]:
    # A single name would be iterated letter by letter.
    names = (dtypes,) if isinstance(dtypes, str) else tuple(dtypes)
    if not names:
        raise UsageError("dtypes is empty: give at least one, such as 'bf16'.")
    return names


def _reference(kernel: object) -> str:
    """Return ``path/to/file.py::name`` for a module's function; empty for any other object."""
    name, module = getattr(kernel, "__qualname__", ""), inspect.getmodule(kernel)
    file = getattr(module, "__file__", None)
    # A command line can only name objects that are attributes of a file's module.
    if not file or getattr(module, name, None) is not kernel:
        return ""
    path = Path(file)
    inside = path.is_relative_to(Path.cwd())
    return f"{path.relative_to(Path.cwd()) if inside else path}::{name}"


_MOST_DIAGNOSED = 24
_left = iter(range(_MOST_DIAGNOSED))
"""Counts the failures of this process that are diagnosed, which takes as long as a question."""


@_point_at_caller
def assert_attention_close(  # noqa: PLR0913  # a call of attention has that many
    out: Tensor,
    lse: Tensor | None = None,
    *,
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    mask: Tensor | Callable[..., Tensor] | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    score_mod: Callable[..., Tensor] | None = None,
    scale: float | None = None,
    descale: Descale | tuple[Tensor, Tensor, Tensor] | None = None,
    sink: Tensor | None = None,
    arithmetic: Arithmetic | None = None,
    problem: Problem | Inputs | None = None,
    generic: bool = False,
) -> Judgement:
    """Raise AssertionError unless out, and LSE, are exact attention up to rounding.

    There is no tolerance: the allowed error of each element follows from the tensors and the
    arithmetic (``docs/explanation/bounds.md``). No kernel is called.

    Args:
        out: ``(batch, heads, query, value_dim)``, as returned by the kernel. If it was upcast, so
            that all of its numbers are representable in q's dtype, it is judged in q's dtype.
        lse: ``(batch, heads, query)``, natural logarithm; a more sensitive check, if available.
        q: ``(batch, heads, query, head_dim)``, fp32, fp16, bf16 or fp8.
        k: ``(batch, kv_heads, kv, head_dim)``; fewer heads than q's are shared (GQA).
        v: ``(batch, kv_heads, kv, value_dim)``.
        mask: A FlexAttention mask ``(b, h, q_idx, kv_idx) -> bool``, or a bool tensor that
            broadcasts to ``(batch, heads, query, kv)``, True where a row sees a key.
        attn_mask: Alternatively the argument of ``F.scaled_dot_product_attention``: booleans as in
            ``mask``, or fp32, bf16 or fp16 to be added to the scores, finite or −∞.
        is_causal: Row i sees keys up to i, aligned top-left as in torch.
        score_mod: A FlexAttention score mod ``(score, b, h, q_idx, kv_idx) -> score``.
        scale: Factor of q·k, rounded to fp32; None for 1/√head_dim.
        descale: For fp8, factors of q, k and v, fp32 ``(batch, kv_heads)`` each; None for 1.
        sink: The logit of each head, ``(heads,)``, fp32, bf16 or fp16, natural, for an additional
            key of value 0 that every row sees, and that LSE includes; −∞ for none.
        arithmetic: The kernel's arithmetic; None for the usual one for these dtypes and this
            device. Products in tf32 mean that fp32 tensors are multiplied in tf32.
        problem: Instead of q to sink, Inputs, or a Problem whose Inputs are drawn here.
        generic: Whether the tensors are random and unstructured (``torch.randn``): then errors that
            rounding causes once in a million times are a failure instead of a warning.

    Returns:
        The judgement, of status ``pass``, ``warn`` or ``inconclusive``. The last two also emit a
        UserWarning: turn it into an error (``warnings.simplefilter("error")``) to be strict.

    Raises:
        AssertionError: ``NotAttention``, with the broken rule, the likely cause, the worst element,
            its allowance and the terms of this, and the smallest fault that would be detected.
        OraclesDisagree: if two oracles differ by more than float64 explains.
        UsageError: in one line, for arguments that are no call of attention, or whose NaN or ∞
            reaches the exact result of a row.
    """
    __tracebackhide__ = True
    answer = UserOutputs(
        out=out,
        lse=lse,
        call={
            "q": q,
            "k": k,
            "v": v,
            "mask": mask,
            "attn_mask": attn_mask,
            "is_causal": is_causal,
            "score_mod": score_mod,
            "scale": scale,
            "descale": descale,
            "sink": sink,
        },
        problem=problem,
        arithmetic=arithmetic,
        generic=generic,
    )
    judgement, disagreement = answer.judgement()
    if disagreement:
        raise OraclesDisagree(f"{disagreement}: nothing is said of what was given.")
    if judgement.status == "fail":
        raise NotAttention(judgement, answer)
    if judgement.status != "pass":
        warnings.warn("\n".join(_lines(judgement)), UserWarning, stacklevel=3)
    return judgement


class NotAttention(AssertionError):
    """Outputs that are not attention.

    Hypothesis raises one for every failing example while it shrinks. Therefore the failure is only
    diagnosed when the text is read, from copies of the tensors.

    Attributes:
        judgement: The verdict of the judge.
    """

    def __init__(self, judgement: Judgement, answer: UserOutputs) -> None:
        super().__init__(judgement.reason)
        self.judgement = judgement
        self._answer = answer.own_copy()
        self._remarks = [_fact("perhaps", text) for text in _remarks(answer)]
        self._text = ""

    def __str__(self) -> str:
        if not self._text:
            first, *rest = _lines(self.judgement)
            likely, tiles = _diagnosis_lines(self._answer)
            # The tensors are released, since pytest keeps every exception until the end.
            lines = [first, *self._remarks, *likely, *rest, *tiles]
            self._text, self._answer = "\n".join(lines), None
        return self._text


def _remarks(answer: UserOutputs) -> Iterator[str]:
    """Yield what may be wrong with the test in place of the kernel."""
    if answer.out.device.type == "cpu" and has_stock_interpreter():
        yield (
            "if a Triton kernel gave out: Triton's own interpreter computes bf16 and fp8 wrongly; "
            "call attncheck.repair_interpreter() in conftest.py"
        )
    if answer.has_more_heads_than_rows():
        yield (
            "axes 1 and 2 are exchanged: q, k and v each have more heads than rows, and axes are "
            "(batch, heads, length, dim)"
        )


def _diagnosis_lines(answer: UserOutputs | None) -> tuple[list[str], list[str]]:
    """Return the lines of a diagnosis, and of a map of the error; none without a diagnosis."""
    if answer is None:
        return [], []
    if next(_left, None) is None:
        return [
            _fact("likely", f"not looked for, as it was of {_MOST_DIAGNOSED} failures before")
        ], []
    with warnings.catch_warnings():  # warnings of the trial calls
        warnings.simplefilter("ignore")
        diagnosis = answer.diagnosis()
    if diagnosis is None:
        return [], []
    labels = itertools.chain(["tiles"], itertools.repeat(""))
    return (
        [_fact(name, text) for name, text in explanation_facts(diagnosis)],
        [_fact(name, line) for name, line in zip(labels, tile_picture(diagnosis), strict=False)],
    )


def _fact(name: str, text: str) -> str:
    return f"  {name:<10} {text}"


def _lines(judgement: Judgement) -> Iterator[str]:
    """Yield the lines of a judgement for the message of a failed test."""
    rule = f": {judgement.rule}" if judgement.rule else ""
    yield f"attention: {judgement.status}{rule}: {judgement.reason}"
    yield from (_fact("also", text) for text in judgement.warnings if text != judgement.reason)
    if judgement.worst is not None:
        yield from _worst(judgement.worst)
    yield _fact("judged as", judgement.arithmetic)
    if judgement.blind_spot is not None:
        yield _fact("would see", _visible_faults(judgement.blind_spot))


def _worst(worst: Worst) -> Iterator[str]:
    at = worst.at
    index = [at.batch, at.head, at.query] + ([at.dim] if at.dim >= 0 else [])
    yield _fact("worst", f"{worst.tensor}{index}")
    yield _fact("got", f"{worst.got:.9g}")
    yield _fact("should be", f"{worst.exact:.9g}")
    parts = sorted(worst.budget.items(), key=lambda item: -item[1])
    terms = " + ".join(f"{name} {part:.1e}" for name, part in parts if part > 0)
    yield _fact("allowed", f"{worst.allowance:.2e}{f' = {terms}' if terms else ''}")


def _visible_faults(spot: BlindSpot) -> str:
    """Return a text on the smallest faults that would be detected with these tensors."""
    facts = {
        f"a scale {100 * spot.scale:.2g} % off": spot.scale < float("inf"),
        f"one key's weight {100 * spot.weight:.2g} % off": spot.weight < float("inf"),
        f"a dropped key ({100 * (spot.dropped_keys or 0):.3g} % of them)": bool(spot.dropped_keys),
        f"sums of {spot.accumulator_bits} bits or fewer": spot.accumulator_bits > 0,
        "an output half as large": spot.half,
        "an output of zeros": spot.zeros,
    }
    return ", ".join(fact for fact, seen in facts.items() if seen) or "none of the usual faults"


_HAS_SETTINGS = "_hypothesis_internal_settings_applied"


def given(
    *strategies: SearchStrategy[Any], **named: SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Any]:
    """Decorate a test of kernels as ``hypothesis.given``: ``@attncheck.given(problems())``.

    There is no deadline, since interpreted kernels are slow; only one failure is reported; and
    health checks of slow or filtered draws are off. All other settings are those of the current
    profile. ``@settings`` of your own, between this decorator and the test, replace all of these.
    """

    def decorate(test: Callable[..., None]) -> Any:
        wrapped = hypothesis.given(*strategies, **named)(test)
        # Hypothesis accepts only one set of settings; the author's own takes precedence.
        return wrapped if hasattr(test, _HAS_SETTINGS) else settings_of()(wrapped)

    return decorate
