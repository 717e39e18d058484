"""The cases of a quick check: exact probes, and problems that find common kernel faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from attncheck import probes
from attncheck.cases.covering import SHAPES, FewRows, plain_row, row_name, row_problem
from attncheck.cases.named_problems import CHECK, IN_TURN, PROBED, SUMMARIES, tagged
from attncheck.cases.variants import check_measured
from attncheck.core.errors import ProblemError
from attncheck.core.judgement import Unclaimed
from attncheck.core.mod_spec import Spec
from attncheck.inputs.problem import LARGEST_HEAD_DIM, Case, Problem

# Probes that are asked on every layout: ``decode`` finds keys that are read at wrong positions,
# which depends on the layout; other probes' findings do not.
_ON_EVERY_LAYOUT = ("decode",)
_USUAL_LAYOUTS = ("ragged", "causal")
# Questions that distinguish most fault models at the lowest cost come first. Written by
# `benchmarks/question_order.py`. Questions that are not listed come last.
ORDER = tuple(
    """
    causal-documents decode-empty-rows window-edge uniform padding window-two-sided
    window-lengths negative-ragged decode-causal-tall causal-blocks gqa isolated-causal-2
    mask-by-head large long-sum decode-causal-even window-wide window-far one-key scale
    many-rows decode-causal-wide empty-rows one-hot decode-one-query window-negative negative
    ones-ragged decode-causal-lengths causal-one-query ramp-ragged one-query sink ones-causal
    two_level-causal-2 plain isolated-ragged positive-causal decode-window causal-lengths
    mean-ragged ragged positive-ragged window causal-even causal-wide decode-padding
    causal-tall two_level-ragged decode-ragged causal ramp-causal-2 mean-causal outliers
    negative-causal decode-gqa decode-causal
    """.split()  # noqa: SIM905  # as a list it has a line for each of fifty
)
_PROBE_ROUNDS = 2  # Cases per probe: decode has one, ramp a fast and a slow one.


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckCase:
    """A Case with its name on the command line and in reports."""

    name: str  # ``causal-wide``; for a probe with its name before: ``decode-causal-wide``
    summary: str  # what a failure would show, in one line
    case: Case
    # The feature that the kernel does not seem to support, which is asked about separately; or None
    unclaimed: Unclaimed | None = None


def check_cases(
    dtype: str,
    head_dims: Sequence[int] = (),
    *,
    takes: Callable[[Problem], bool] | None = None,
    names: Sequence[str] = (),
) -> list[CheckCase]:
    """Return every case of a quick check in ``dtype``, in the planned order (``ORDER``).

    Args:
        dtype: A name of ``formats.DTYPES`` that kernels are measured in.
        head_dims: Head dims that the kernel takes; none: 64, 80, 96 and 128.
        takes: Whether a kernel takes a Problem; if not, the nearest that it takes replaces it. If
            there is none, the Problem stays, and the kernel says why it does not take it.
        names: Return at least the cases of these names, but not all others; none: all.

    Raises:
        UnknownName: for another dtype.
        ProblemError: for a head_dim that no Problem has.
    """
    problems = _problems(CHECK, dtype, head_dims, takes, names)
    comparisons = [
        CheckCase(name=name, summary=SUMMARIES[name], case=Case(problem=problem))
        for name, problem in problems.items()
    ]
    place = {name: number for number, name in enumerate(ORDER)}
    cases = [*_probe_cases(problems), *comparisons]
    return sorted(cases, key=lambda one: place.get(one.name, len(place)))


def _problems(
    tag: str,
    dtype: str,
    head_dims: Sequence[int],
    takes: Callable[[Problem], bool] | None,
    names: Sequence[str],
) -> dict[str, Problem]:
    """Return name → problem with this tag, each the nearest that a kernel takes.

    If ``names`` are given, only problems whose name is part of one, as the search takes time.
    """
    check_measured(dtype)
    for dim in head_dims:
        if not 1 <= dim <= LARGEST_HEAD_DIM:
            raise ProblemError(f"head_dim={dim} must be 1–{LARGEST_HEAD_DIM}.")
    problems: dict[str, Problem] = {}
    for number, (name, entry) in enumerate(tagged(tag).items()):
        if names and not any(name in each for each in names):
            continue
        # Two heads, so that a kernel that confuses heads is found.
        fields = {"heads": 2, "head_dim": 64} | entry.fields
        if head_dims and fields["head_dim"] not in head_dims:
            # In turn, so that each head_dim is used in several problems.
            fields["head_dim"] = head_dims[number % len(head_dims)]
        problem = Problem(dtype=dtype, **fields)
        if takes is not None and entry.instead and not takes(problem):
            problem = problem.replace(**entry.instead)
        if takes is not None and not takes(problem):
            problem = _other_diagonal(problem)
        if takes is not None and not takes(problem):
            from attncheck.cases.strategies.problems import nearest_supported  # loads Hypothesis

            nearest = nearest_supported(problem, takes, (dtype,)) or problem
            # Keep the features that the problem's name stands for.
            has_same_features = (nearest.score, nearest.sink, nearest.group > 1) == (
                problem.score,
                problem.sink,
                problem.group > 1,
            )
            has_needed_scale = problem.has_usual_scale or not nearest.has_usual_scale
            problem = nearest if has_same_features and has_needed_scale else problem
        problems[name] = problem
    return problems


def _other_diagonal(problem: Problem) -> Problem:
    """Return a causal problem of unequal lengths with its other alignment, others unchanged."""
    other = {"causal": "causal_bottom_right", "causal_bottom_right": "causal"}
    if problem.mask.name not in other or problem.query == problem.kv:
        return problem
    return problem.replace(mask=Spec.of(other[problem.mask.name]))


_CROSSED = 14  # Number of crossed cases.
_CROSSED_SIZES = "tiny"  # A name of covering.SHAPES.


def crossed_cases(
    dtype: str, head_dims: Sequence[int], takes: Callable[[Problem], bool]
) -> list[CheckCase]:
    """Return cases with every value of the axes that a kernel takes, and with many pairs of them.

    A kernel with one layout gets as many cases as any other, with more distributions and draws.

    Args:
        dtype: As in ``check_cases``.
        head_dims: The head dims that were asked for; none: all that the kernel takes.
        takes: Whether the kernel takes a Problem.
    """
    from attncheck.cases.strategies.problems import nearest_supported  # loads Hypothesis

    own_dims = {"dims": (head_dims[0], head_dims[0])} if head_dims else {}
    # A kernel that takes few lengths may refuse some of the shapes.
    plainest = (
        row_problem({"dtype": dtype, "shape": shape} | own_dims, _CROSSED_SIZES, 0)
        for shape in SHAPES[_CROSSED_SIZES]
    )
    nearest = (nearest_supported(problem, takes, (dtype,)) for problem in plainest)
    base = next(filter(None, nearest), None)
    if base is None:
        return []
    few_rows = FewRows(
        takes if not head_dims else lambda p: p.head_dim in head_dims and takes(p),
        plain_row(base, _CROSSED_SIZES),
        _CROSSED_SIZES,
    )
    named = {f"crossed-{n}": row for n, row in enumerate(few_rows.rows(_CROSSED), 1)}
    named |= {f"alone-{row_name(row)}".replace(" ", "-"): row for row in few_rows.alone()}
    return [
        CheckCase(
            name=name,
            summary=row_name(row) or "plain",
            case=Case(problem=row_problem(row, _CROSSED_SIZES, seed)),
        )
        for seed, (name, row) in enumerate(named.items())
    ]


_CALL_CHECKS = (
    ("state", "plain", "a call leaves flags, random generators and the folder as they were"),
    ("guards", "ragged", "nothing is written beside the tensors"),
)
_IN_TURN = {
    "calls-alike": "nothing is left of a call on other numbers of the same shapes",
    "calls-shorter": "nothing is left of a shorter call",
    "calls-longer": "nothing is left of a longer call",
}


def call_cases(
    dtype: str,
    head_dims: Sequence[int] = (),
    *,
    takes: Callable[[Problem], bool] | None = None,
    names: Sequence[str] = (),
) -> list[CheckCase]:
    """Return the cases about side effects and the order of calls; arguments of ``check_cases``.

    Calls of different lengths in turn are left out if the kernel does not take half a length.
    """
    call_checks = [each for each in _CALL_CHECKS if not names or each[0] in names]
    needed = [layout for _, layout, _ in call_checks]
    layouts = _problems(CHECK, dtype, head_dims, takes, needed) if needed else {}
    cases = [
        CheckCase(name=name, summary=summary, case=Case(problem=layouts[layout], question=name))
        for name, layout, summary in call_checks
    ]

    def whole_and_half(problem: Problem) -> bool:
        half = problem.replace(query=(problem.query + 1) // 2, kv=(problem.kv + 1) // 2)
        return takes is None or (takes(problem) and takes(half))

    problems = [*_problems(IN_TURN, dtype, head_dims, whole_and_half, names).values()]
    takes_halves = all(map(whole_and_half, problems))
    if not takes_halves:
        problems = [*_problems(CHECK, dtype, head_dims, takes, ["plain"]).values()]
    cases += [
        CheckCase(
            name=name,
            summary=summary,
            case=Case(problem=problem, question="call_order", parameters={"between": between}),
        )
        for problem in problems
        for between, (name, summary) in enumerate(_IN_TURN.items())
        if takes is None or (takes(problem) and (takes_halves or not between))
    ]
    return cases


def _probe_cases(problems: Mapping[str, Problem]) -> Iterator[CheckCase]:
    all_layouts = tuple(tagged(PROBED))
    for name, probe in probes.PROBES.items():
        for layout in all_layouts if name in _ON_EVERY_LAYOUT else _USUAL_LAYOUTS:
            if layout not in problems:
                continue
            problem = problems[layout]
            if probe.unfit(problem) is not None:
                continue
            # Each of the usual layouts takes another round, if the probe has several.
            rounds = probes.cases(name, problem)[:_PROBE_ROUNDS]
            turn = _USUAL_LAYOUTS.index(layout) if layout in _USUAL_LAYOUTS else 0
            number = turn % len(rounds)
            label = f"{name}-{layout}" + (f"-{number + 1}" if number else "")
            yield CheckCase(name=label, summary=probe.summary, case=rounds[number])
