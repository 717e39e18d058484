"""The cases of a quick check: exact probes, and problems that show what kernels get wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attncheck import probes
from attncheck.cases.named_problems import CHECK, IN_TURN, PROBED, tagged
from attncheck.cases.variants import check_measured
from attncheck.core.errors import ProblemError
from attncheck.inputs.problem import LARGEST_HEAD_DIM, Case, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from attncheck.records.record import Unclaimed

# Decoding tells where each key is, so that it is asked on every layout with a place to confuse;
# what other probes show does not depend on it.
_ON_EVERY_LAYOUT = ("decode",)
_USUAL_LAYOUTS = ("ragged", "causal")
_ROUNDS = 2  # of a probe's numbers: decoding is done in one, ramps are fast and slow


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckCase:
    """One Case under the name that it has on the command line and in reports."""

    name: str  # ``causal-wide``; a probe's own name stands before it: ``decode-causal-wide``
    summary: str  # what it would show, in a line
    case: Case  # the Case
    # What the kernel was not found to take, and is asked apart; None for all else.
    unclaimed: Unclaimed | None = None


def check_cases(
    dtype: str,
    head_dims: Sequence[int] = (),
    *,
    takes: Callable[[Problem], bool] | None = None,
) -> list[CheckCase]:
    """Return every case of a quick check in ``dtype``: probes first, since they say most.

    Args:
        dtype: A name of ``formats.DTYPES`` that kernels are measured in.
        head_dims: Those that the kernel takes; none: 64, 80, 96 and 128.
        takes: Whether a kernel is to be asked a Problem; the nearest is asked in place of one that
            it is not. Where there is none that stays, and the kernel says why it does not take it.

    Raises:
        UnknownName: for another dtype.
        ProblemError: for a head_dim that no Problem has.
    """
    check_measured(dtype)
    for dim in head_dims:
        if not 1 <= dim <= LARGEST_HEAD_DIM:
            raise ProblemError(f"head_dim={dim} must be 1–{LARGEST_HEAD_DIM}.")
    entries = tagged(CHECK)
    problems = _problems(CHECK, dtype, head_dims, takes)
    comparisons = [
        CheckCase(name=name, summary=entries[name].summary, case=Case(problem=problem))
        for name, problem in problems.items()
    ]
    return [*_probe_cases(problems), *comparisons]


def _problems(
    tag: str, dtype: str, head_dims: Sequence[int], takes: Callable[[Problem], bool] | None
) -> dict[str, Problem]:
    """Return those of a tag by name, each the nearest that a kernel is to be asked."""
    problems: dict[str, Problem] = {}
    for number, (name, entry) in enumerate(tagged(tag).items()):
        # With one head alone, none could be mistaken for another.
        fields = {"heads": 2, "head_dim": 64} | entry.fields
        if head_dims and fields["head_dim"] not in head_dims:
            # In turn, so that each of them meets several problems.
            fields["head_dim"] = head_dims[number % len(head_dims)]
        problem = Problem(dtype=dtype, **fields)
        if takes is not None and entry.instead and not takes(problem):
            problem = problem.replace(**entry.instead)
        if takes is not None and not takes(problem):
            from attncheck.cases.strategies.problems import nearest_supported  # loads Hypothesis

            problem = nearest_supported(problem, takes, (dtype,)) or problem
        problems[name] = problem
    return problems


_OF_CALLS = (
    ("state", "plain", "a call leaves flags, random generators and the folder as they were"),
    ("guards", "ragged", "nothing is written beside the tensors"),
)
_IN_TURN = {
    "calls-alike": "nothing is left of a call on other numbers of the same shapes",
    "calls-shorter": "nothing is left of a shorter call",
    "calls-longer": "nothing is left of a longer call",
}


def call_cases(
    dtype: str, head_dims: Sequence[int] = (), *, takes: Callable[[Problem], bool] | None = None
) -> list[CheckCase]:
    """Return the cases about calls beside their numbers; arguments of ``check_cases``.

    Calls in turn are not asked of a kernel that takes no such length and half of it.
    """
    layouts = _problems(CHECK, dtype, head_dims, takes)
    cases = [
        CheckCase(name=name, summary=summary, case=Case(problem=layouts[layout], question=name))
        for name, layout, summary in _OF_CALLS
    ]

    def whole_and_half(problem: Problem) -> bool:
        half = problem.replace(query=(problem.query + 1) // 2, kv=(problem.kv + 1) // 2)
        return takes is None or (takes(problem) and takes(half))

    problems = _problems(IN_TURN, dtype, head_dims, whole_and_half).values()
    cases += [
        CheckCase(
            name=name,
            summary=summary,
            case=Case(problem=problem, question="call_order", parameters={"between": between}),
        )
        for problem in filter(whole_and_half, problems)
        for between, (name, summary) in enumerate(_IN_TURN.items())
    ]
    return cases


def _probe_cases(problems: Mapping[str, Problem]) -> Iterator[CheckCase]:
    every = tuple(tagged(PROBED))
    for name, probe in probes.PROBES.items():
        for layout in every if name in _ON_EVERY_LAYOUT else _USUAL_LAYOUTS:
            problem = problems[layout]
            if probe.unfit(problem) is not None:
                continue
            for number, case in enumerate(probes.cases(name, problem)[:_ROUNDS]):
                again = f"-{number + 1}" if number else ""
                label = f"{name}-{layout}{again}"
                yield CheckCase(name=label, summary=probe.summary, case=case)
