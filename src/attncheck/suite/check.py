"""``attncheck.check``: is this function right? For a test file of a kernel's author."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis

from attncheck.capabilities.subject import Subject
from attncheck.core.errors import UsageError
from attncheck.diagnose.diagnosis import diagnose_failure
from attncheck.inputs.problem import Case, Problem
from attncheck.records.record import UNTRUSTED_STATUSES
from attncheck.runner.quick import questions
from attncheck.subjects.load import load_subject
from attncheck.suite.diagnosed import DoesNotHold, DoNotHold
from attncheck.verify.environment import default_device, prepare, require_device
from attncheck.verify.question_fit import COMPARE
from attncheck.verify.verify import iter_records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from attncheck.records.record import Record

__all__ = ["check"]


def check(
    kernel: Callable[..., object] | Subject | str,
    problem: Problem | Case | None = None,
    *,
    convention: str | None = None,
    dtypes: Iterable[str] = ("bf16",),
    device: str | None = None,
    question: str = COMPARE,
) -> tuple[Record, ...]:
    """Raise AssertionError unless ``kernel`` answers rightly: each wrong answer with a diagnosis.

    Args:
        kernel: A function in a known calling convention, a Subject, or what ``--kernel`` takes:
            ``file.py::name``, ``package.module:name``, a name.
        problem: What to ask; None for what ``attncheck check`` asks: exact probes and a dozen
            Problems. Within a Hypothesis test a Problem that the kernel does not take is drawn
            anew.
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
    device = _ready(device)
    subject = _subject(kernel, convention)
    cases = _cases(problem, question, dtypes)
    records = tuple(iter_records([subject], cases, device=device))
    _guide(records)
    name = kernel if isinstance(kernel, str) else _reference(kernel) or subject.name
    wrong = [
        DoesNotHold(
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
        raise DoNotHold(wrong, len(records))
    if problem is None and all(record.status == "unsupported" for record in records):
        raise AssertionError(
            f"nothing was tested: {name} takes none of {len(records)} questions on {device}: "
            f"{records[0].reason}"
        )
    return records


def _ready(device: str | None) -> str:
    if device not in {None, "cpu", "cuda"}:
        raise UsageError(f"device {device!r} is not known: choose from cpu, cuda.")
    found = device or default_device()
    require_device(found)
    prepare(found)
    return found


def _subject(kernel: Callable[..., object] | Subject | str, convention: str | None) -> Subject:
    if isinstance(kernel, Subject):
        return kernel
    if isinstance(kernel, str):
        return _loaded(kernel, convention)
    from attncheck.conventions.declarations import adopted

    name = getattr(kernel, "__name__", type(kernel).__name__)
    subject = adopted(kernel, name, convention)
    if isinstance(subject, str):
        raise UsageError(f"kernel {name!r} is {type(kernel).__name__}: it must {subject}.")
    return subject


@functools.cache
def _loaded(kernel: str, convention: str | None) -> Subject:
    """A file is imported once, however many Problems are asked."""
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
    names = (dtypes,) if isinstance(dtypes, str) else tuple(dtypes)
    if not names:
        raise UsageError("dtypes is empty: give at least one, such as 'bf16'.")
    return [each.case for dtype in names for each in questions(dtype)]


def _guide(records: tuple[Record, ...]) -> None:
    """Within a Hypothesis test: what is not taken is drawn anew."""
    if hypothesis.currently_in_test_context():
        hypothesis.assume(any(record.status != "unsupported" for record in records))


def _reference(kernel: object) -> str:
    """``path/to/file.py::name`` of a function of a module; empty of what has no such name."""
    name, module = getattr(kernel, "__qualname__", ""), inspect.getmodule(kernel)
    file = getattr(module, "__file__", None)
    if not file or getattr(module, name, None) is not kernel:
        return ""
    path = Path(file)
    inside = path.is_relative_to(Path.cwd())
    return f"{path.relative_to(Path.cwd()) if inside else path}::{name}"
