"""The library's own functions for a kernel author's tests."""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from attncheck.cases.check_cases import check_cases, crossed_cases
from attncheck.core.declared_arithmetic import Arithmetic
from attncheck.core.errors import OraclesDisagree, UnknownName, UsageError
from attncheck.core.judgement import BlindSpot, Judgement, Worst
from attncheck.diagnose.diagnosis import diagnose_failure
from attncheck.diagnose.user_tensors import UserOutputs
from attncheck.inputs.input_tensors import Descale, Inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.records.record import UNTRUSTED_STATUSES, Record
from attncheck.reporting.diagnosis_text import explanation_facts, tile_picture
from attncheck.subjects.capabilities.subject import Subject
from attncheck.subjects.conventions.function_subject import FunctionSubject
from attncheck.subjects.load import load_subject
from attncheck.suite.pytest_options import settings_of
from attncheck.suite.wrong_answers import WrongAnswer, WrongAnswers
from attncheck.verify.claims import claimed_questions, find_claims, subject_takes
from attncheck.verify.environment import prepare, usable_device
from attncheck.verify.kernel_hosts import on_terms
from attncheck.verify.question_fit import COMPARE
from attncheck.verify.verify import iter_records

_USUAL = ("bf16",)


def check(
    kernel: Callable[..., object] | Subject | str,
    problem: Problem | Case | None = None,
    *,
    convention: str | None = None,
    dtypes: Iterable[str] = _USUAL,
    device: str | None = None,
    question: str = COMPARE,
) -> tuple[Record, ...]:
    """Raise AssertionError unless ``kernel`` answers rightly: each wrong answer with a diagnosis.

    Args:
        kernel: A function in a known calling convention, a Subject, or what ``--kernel`` takes:
            ``file.py::name``, ``package.module:name``, a name.
        problem: What to ask; None for what ``attncheck check`` asks: exact probes, a dozen
            Problems, and of a Subject crossed ones. Within a Hypothesis test a Problem that the
            kernel does not take is drawn anew.
        convention: How a function is called; None for the one that its signature shows.
        dtypes: In which the dozen is asked.
        device: ``cpu`` or ``cuda``; None for cuda where torch sees a GPU.
        question: What is asked of a Problem: ``compare``, a relation or a probe.

    Returns:
        What it answered, one Record for each question; ``unsupported`` where it was not taken.

    Raises:
        AssertionError: for wrong answers, for a kernel that raises, and where none of several
            questions was taken.
        UsageError: for arguments that cannot be; in one line.
    """
    __tracebackhide__ = True
    device = _prepare_device(device)
    subject = _subject(kernel, convention)
    cases = _cases(problem, question, dtypes)
    name = kernel if isinstance(kernel, str) else _reference(kernel) or subject.name
    claims = None
    if problem is None or isinstance(kernel, str):  # which keeps what was found
        claims = find_claims(subject, kernel=name, device=device)
    if claims is not None and not claims.timeout:
        problems = [case.problem for case in cases if problem is not None]
        named = () if problem is not None else _names(dtypes)
        # The one dtype that is asked where nobody says is claimed only where it is right.
        named = () if named == _USUAL else named
        subject = on_terms(subject, claims.terms(named, problems=problems))
        if problem is None:
            how: dict[str, Any] = {"device": device, "dtypes": named, "calls": False}
            cases = [each.case for each in claimed_questions(claims, subject, **how)]
    elif problem is None and not isinstance(subject, FunctionSubject):
        able = subject_takes(subject, device)
        cases += [one.case for name in _names(dtypes) for one in crossed_cases(name, (), able)]
    records = tuple(iter_records([subject], cases, device=device))
    if hypothesis.currently_in_test_context():  # which draws anew what is not taken
        hypothesis.assume(any(record.status != "unsupported" for record in records))
    wrong = [
        WrongAnswer(
            record,
            kernel=name,
            device=device,
            diagnose=functools.partial(diagnose_failure, subject=subject, device=device),
        )
        for record in records
        if record.status in UNTRUSTED_STATUSES
    ]
    if len(wrong) == 1:
        raise wrong[0]
    if wrong:
        raise WrongAnswers(wrong, len(records))
    # A kernel that refuses everything must not pass for a right one.
    if problem is None and all(record.status == "unsupported" for record in records):
        raise AssertionError(
            f"nothing was tested: {name} takes none of {len(records)} questions on {device}: "
            f"{records[0].reason}"
        )
    return records


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
    from attncheck.subjects.conventions.declarations import adopted, possible_conventions

    name = getattr(kernel, "__name__", type(kernel).__name__)
    subject = adopted(kernel, name, convention)
    if isinstance(subject, str):
        raise UsageError(f"kernel {name!r} is {type(kernel).__name__}: it must {subject}.")
    subject.conventions = (convention,) if convention else possible_conventions(kernel)
    return subject


@functools.cache
def _load_once(kernel: str, convention: str | None) -> Subject:
    """Import a file once, however many Problems are asked."""
    return load_subject(kernel, convention)


def _cases(problem: Problem | Case | None, question: str, dtypes: Iterable[str]) -> list[Case]:
    if isinstance(problem, Case):
        return [problem]
    if isinstance(problem, Problem):
        return [Case(problem=problem, question=question)]
    if problem is not None:
        kind = type(problem).__name__
        raise UsageError(f"problem is {kind}: it must be a Problem or a Case.")
    if question != COMPARE:
        raise UsageError(f"question={question!r} is asked of a Problem: give one.")
    return [each.case for dtype in _names(dtypes) for each in check_cases(dtype)]


def _names(dtypes: Iterable[str]) -> tuple[str, ...]:
    # A single name would be read letter by letter.
    names = (dtypes,) if isinstance(dtypes, str) else tuple(dtypes)
    if not names:
        raise UsageError("dtypes is empty: give at least one, such as 'bf16'.")
    return names


def _reference(kernel: object) -> str:
    """Return ``path/to/file.py::name`` of a module's function; empty of what has no such name."""
    name, module = getattr(kernel, "__qualname__", ""), inspect.getmodule(kernel)
    file = getattr(module, "__file__", None)
    # A command line can name only what its file's name leads to again.
    if not file or getattr(module, name, None) is not kernel:
        return ""
    path = Path(file)
    inside = path.is_relative_to(Path.cwd())
    return f"{path.relative_to(Path.cwd()) if inside else path}::{name}"


_LOOKED_INTO = 24
_left = iter(range(_LOOKED_INTO))
"""Failures of this process that are still looked into: each takes as long as a question."""


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

    There is no tolerance: how far each element may be from the exact result follows from the
    tensors and the arithmetic (``docs/explanation/bounds.md``). A kernel need not be there.

    Args:
        out: ``(batch, heads, query, value_dim)``, as the kernel gave it. One that was upcast, all
            of whose numbers are of q's dtype, is judged as of q's dtype.
        lse: ``(batch, heads, query)``, natural logarithm; the sharper witness, where there is one.
        q: ``(batch, heads, query, head_dim)``, fp32, fp16, bf16 or fp8.
        k: ``(batch, kv_heads, kv, head_dim)``; fewer heads than q's are shared (GQA).
        v: ``(batch, kv_heads, kv, value_dim)``.
        mask: A FlexAttention mask ``(b, h, q_idx, kv_idx) -> bool``, or a bool tensor that
            broadcasts to ``(batch, heads, query, kv)``, True where a row sees a key.
        attn_mask: In its place what ``F.scaled_dot_product_attention`` takes by this name: such
            booleans, or fp32, bf16 or fp16 that is added to the scores, finite or −∞.
        is_causal: Row i sees keys up to i, aligned top-left as in torch.
        score_mod: A FlexAttention score mod ``(score, b, h, q_idx, kv_idx) -> score``.
        scale: Factor of q·k, read as fp32; None for 1/√head_dim.
        descale: Of fp8: what q, k and v are to be multiplied by, fp32 ``(batch, kv_heads)`` each;
            None for 1.
        sink: Each head's logit, ``(heads,)``, fp32, bf16 or fp16, natural: one more key of value 0
            that every row sees, and that LSE includes; −∞ for none.
        arithmetic: The kernel's; None for what is usual at these dtypes on this device. One whose
            products are tf32 says that fp32 tensors are multiplied so.
        problem: In place of q to sink: Inputs, or a Problem whose Inputs are drawn here.
        generic: Whether the tensors are random and without structure (``torch.randn``): then what
            rounding does once in a million times is a failure, not a warning.

    Returns:
        The judgement, of status ``pass``, ``warn`` or ``inconclusive``. The last two are said by a
        UserWarning as well: turn it into an error (``warnings.simplefilter("error")``) to be
        strict.

    Raises:
        AssertionError: ``NotAttention``, with the rule that is broken, what is likely wrong, the
            worst element, what is allowed there and why, and how small a fault would have been
            seen.
        OraclesDisagree: where two oracles are further apart than float64 explains.
        UsageError: for arguments that are no call of attention, and where NaN or ∞ of theirs
            reaches the exact result of a row; in one line.
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
        warnings.warn("\n".join(_lines(judgement)), UserWarning, stacklevel=2)
    return judgement


class NotAttention(AssertionError):
    """Outputs that are not attention.

    Hypothesis raises one for every example that fails on the way to the smallest; so what may be
    wrong is looked for when the text is read, in copies of the tensors.

    Attributes:
        judgement: What the judge says.
    """

    def __init__(self, judgement: Judgement, answer: UserOutputs) -> None:
        super().__init__(judgement.reason)
        self.judgement = judgement
        self._answer = answer.kept()
        self._text = ""

    def __str__(self) -> str:
        if not self._text:
            first, *rest = _lines(self.judgement)
            likely, tiles = _diagnosis_lines(self._answer)
            # pytest keeps every exception until the end: the tensors are let go.
            self._text, self._answer = "\n".join([first, *likely, *rest, *tiles]), None
        return self._text


def _diagnosis_lines(answer: UserOutputs | None) -> tuple[list[str], list[str]]:
    """Return lines of what may be wrong, and of where; none where nobody can say."""
    if answer is None:
        return [], []
    if next(_left, None) is None:
        return [_fact("likely", f"not looked for, as it was of {_LOOKED_INTO} failures before")], []
    with warnings.catch_warnings():  # of what is tried, not of what was given
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
    """Yield the judgement for somebody who reads a failed test."""
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
    made = " + ".join(f"{name} {part:.1e}" for name, part in parts if part > 0)
    yield _fact("allowed", f"{worst.allowance:.2e}{f' = {made}' if made else ''}")


def _visible_faults(spot: BlindSpot) -> str:
    """Return the smallest faults that these tensors would have shown."""
    facts = {
        f"a scale {100 * spot.scale:.2g} % off": spot.scale < float("inf"),
        f"a key's weight {100 * spot.weight:.2g} % off": spot.weight < float("inf"),
        f"{100 * (spot.dropped_keys or 0):.3g} % of single dropped keys": bool(spot.dropped_keys),
        f"sums of {spot.accumulator_bits} bits": spot.accumulator_bits > 0,
        "half the output": spot.half,
        "zeros": spot.zeros,
    }
    return ", ".join(fact for fact, seen in facts.items() if seen) or "none of the usual faults"


_OWN = "_hypothesis_internal_settings_applied"


def given(
    *strategies: SearchStrategy[Any], **named: SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Any]:
    """Decorate a test of kernels as ``hypothesis.given``: ``@attncheck.given(problems())``.

    Without a deadline, since an interpreted kernel takes as long as it takes; one failure at a
    time; no health check of slow or filtered draws. Everything else is the current profile's.
    ``@settings`` of your own stand below it, between it and the test, and then are all that holds.
    """

    def decorate(test: Callable[..., None]) -> Any:
        wrapped = hypothesis.given(*strategies, **named)(test)
        # Hypothesis takes one set of settings, and the author's own outweighs ours.
        return wrapped if hasattr(test, _OWN) else settings_of()(wrapped)

    return decorate
