"""The cases of a quick check: exact probes, and problems that show what kernels get wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from attncheck import probes
from attncheck.cases.covering import SHAPES, FewRows, plain_row, row_name, row_problem
from attncheck.cases.named_problems import CHECK, IN_TURN, PROBED, tagged
from attncheck.cases.variants import check_measured
from attncheck.core.errors import ProblemError
from attncheck.core.judgement import Unclaimed
from attncheck.core.mod_spec import Spec
from attncheck.inputs.problem import LARGEST_HEAD_DIM, Case, Problem

# Decoding tells where each key is, so that it is asked on every layout with a place to confuse;
# what other probes show does not depend on it.
_ON_EVERY_LAYOUT = ("decode",)
_USUAL_LAYOUTS = ("ragged", "causal")
# What separates most fault models at least cost comes first: `benchmarks/question_order.py` writes
# it, from what each question shows of each model. A question that is not there comes after these.
ORDER = tuple(
    """
    padding window-edge decode-empty-rows uniform decode-causal-tall negative-causal
    causal-even gqa long-sum decode-window one-key negative window-wide decode-one-query scale
    one-hot ramp-ragged ones-ragged causal-wide one-query empty-rows sink ones-causal large
    plain decode-causal-wide negative-ragged two_level-ragged window positive-causal
    causal-tall ragged decode-causal-even isolated-ragged positive-ragged decode-padding
    outliers mean-ragged decode-ragged mean-causal causal isolated-causal-2 ramp-causal-2
    two_level-causal-2 decode-gqa decode-causal
    """.split()  # noqa: SIM905  # as a list it has a line for each of fifty
)
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
    names: Sequence[str] = (),
) -> list[CheckCase]:
    """Return every case of a quick check in ``dtype``, in the planned order (``ORDER``).

    Args:
        dtype: A name of ``formats.DTYPES`` that kernels are measured in.
        head_dims: Those that the kernel takes; none: 64, 80, 96 and 128.
        takes: Whether a kernel is to be asked a Problem; the nearest is asked in place of one that
            it is not. Where there is none that stays, and the kernel says why it does not take it.
        names: Cases of these names are among those that come back, and not every other; none: all.

    Raises:
        UnknownName: for another dtype.
        ProblemError: for a head_dim that no Problem has.
    """
    entries = tagged(CHECK)
    problems = _problems(CHECK, dtype, head_dims, takes, names)
    comparisons = [
        CheckCase(name=name, summary=entries[name].summary, case=Case(problem=problem))
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
    """Return those of a tag by name, each the nearest that a kernel is to be asked.

    With ``names`` those alone that are a part of one: to look for the nearest takes time.
    """
    check_measured(dtype)
    for dim in head_dims:
        if not 1 <= dim <= LARGEST_HEAD_DIM:
            raise ProblemError(f"head_dim={dim} must be 1–{LARGEST_HEAD_DIM}.")
    problems: dict[str, Problem] = {}
    for number, (name, entry) in enumerate(tagged(tag).items()):
        if names and not any(name in each for each in names):
            continue
        # With one head alone, none could be mistaken for another.
        fields = {"heads": 2, "head_dim": 64} | entry.fields
        if head_dims and fields["head_dim"] not in head_dims:
            # In turn, so that each of them meets several problems.
            fields["head_dim"] = head_dims[number % len(head_dims)]
        problem = Problem(dtype=dtype, **fields)
        if takes is not None and entry.instead and not takes(problem):
            problem = problem.replace(**entry.instead)
        if takes is not None and not takes(problem):
            problem = _other_diagonal(problem)
        if takes is not None and not takes(problem):
            from attncheck.cases.strategies.problems import nearest_supported  # loads Hypothesis

            nearest = nearest_supported(problem, takes, (dtype,)) or problem
            # Without what it is there for it would show something else than its name says.
            kept = (nearest.score, nearest.sink, nearest.group > 1) == (
                problem.score,
                problem.sink,
                problem.group > 1,
            )
            own = problem.has_usual_scale or not nearest.has_usual_scale
            problem = nearest if kept and own else problem
        problems[name] = problem
    return problems


def _other_diagonal(problem: Problem) -> Problem:
    """Return a causal problem as bottom-right conventions have it, where lengths differ."""
    if problem.mask.name != "causal" or problem.query == problem.kv:
        return problem
    return problem.replace(mask=Spec.of("causal_bottom_right"))


_CROSSED = 14
_CROSSED_SIZES = "tiny"  # of covering.SHAPES


def crossed_cases(
    dtype: str, head_dims: Sequence[int], takes: Callable[[Problem], bool]
) -> list[CheckCase]:
    """Return problems that have every value of the axes that a kernel takes, and many pairs.

    Of a kernel of one layout as many as of any other: in other distributions, and other draws.

    Args:
        dtype: As of ``check_cases``.
        head_dims: Those that were asked for; none: all that the kernel takes.
        takes: Whether the kernel takes a Problem.
    """
    from attncheck.cases.strategies.problems import nearest_supported  # loads Hypothesis

    own = {"dims": (head_dims[0], head_dims[0])} if head_dims else {}
    # A kernel of few lengths may take those of another shape.
    plainest = (
        row_problem({"dtype": dtype, "shape": shape} | own, _CROSSED_SIZES, 0)
        for shape in SHAPES[_CROSSED_SIZES]
    )
    nearest = (nearest_supported(problem, takes, (dtype,)) for problem in plainest)
    base = next(filter(None, nearest), None)
    if base is None:
        return []
    few = FewRows(
        takes if not head_dims else lambda p: p.head_dim in head_dims and takes(p),
        plain_row(base, _CROSSED_SIZES),
        _CROSSED_SIZES,
    )
    named = {f"crossed-{n}": row for n, row in enumerate(few.rows(_CROSSED), 1)}
    named |= {f"alone-{row_name(row)}".replace(" ", "-"): row for row in few.alone()}
    return [
        CheckCase(
            name=name,
            summary=row_name(row) or "plain",
            case=Case(problem=row_problem(row, _CROSSED_SIZES, seed)),
        )
        for seed, (name, row) in enumerate(named.items())
    ]


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
    dtype: str,
    head_dims: Sequence[int] = (),
    *,
    takes: Callable[[Problem], bool] | None = None,
    names: Sequence[str] = (),
) -> list[CheckCase]:
    """Return the cases about calls beside their numbers; arguments of ``check_cases``.

    Calls of another length in turn are not asked of a kernel that takes none with half of it.
    """
    of_calls = [each for each in _OF_CALLS if not names or each[0] in names]
    needed = [layout for _, layout, _ in of_calls]
    layouts = _problems(CHECK, dtype, head_dims, takes, needed) if needed else {}
    cases = [
        CheckCase(name=name, summary=summary, case=Case(problem=layouts[layout], question=name))
        for name, layout, summary in of_calls
    ]

    def whole_and_half(problem: Problem) -> bool:
        half = problem.replace(query=(problem.query + 1) // 2, kv=(problem.kv + 1) // 2)
        return takes is None or (takes(problem) and takes(half))

    problems = [*_problems(IN_TURN, dtype, head_dims, whole_and_half, names).values()]
    halved = all(map(whole_and_half, problems))
    if not halved:
        problems = [*_problems(CHECK, dtype, head_dims, takes, ["plain"]).values()]
    cases += [
        CheckCase(
            name=name,
            summary=summary,
            case=Case(problem=problem, question="call_order", parameters={"between": between}),
        )
        for problem in problems
        for between, (name, summary) in enumerate(_IN_TURN.items())
        if takes is None or (takes(problem) and (halved or not between))
    ]
    return cases


def _probe_cases(problems: Mapping[str, Problem]) -> Iterator[CheckCase]:
    every = tuple(tagged(PROBED))
    for name, probe in probes.PROBES.items():
        for layout in every if name in _ON_EVERY_LAYOUT else _USUAL_LAYOUTS:
            if layout not in problems:
                continue
            problem = problems[layout]
            if probe.unfit(problem) is not None:
                continue
            # Each layout has rounds of its own, as far as there are several.
            rounds = [*enumerate(probes.cases(name, problem)[:_ROUNDS])]
            turn = _USUAL_LAYOUTS.index(layout) if layout in _USUAL_LAYOUTS else 0
            for number, case in rounds[turn % len(rounds) : turn % len(rounds) + 1]:
                again = f"-{number + 1}" if number else ""
                label = f"{name}-{layout}{again}"
                yield CheckCase(name=label, summary=probe.summary, case=case)
