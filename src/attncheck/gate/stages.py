"""The stages of a gate that ask fixed problems: contract, probes, memory and determinism.

Each function yields units of work in the order in which they are asked. A problem that a kernel
does not take is replaced by the nearest one that it takes, if the question stays meaningful; if
there is none, the refusal is stored in ``Planning.refused``. Duplicate units are removed later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from attncheck.cases import named_problems
from attncheck.cases.check_cases import check_cases
from attncheck.cases.mask_samples import SOFTMAX
from attncheck.core.errors import ProblemError
from attncheck.core.formats import DTYPES, FORMATS
from attncheck.core.mod_spec import FULL, Spec
from attncheck.gate.planning import Planning, move_case
from attncheck.inputs.problem import Case, Parameters, Problem
from attncheck.records.run_reports import Answer, Stage
from attncheck.subjects.capabilities.capability_table import ALIASES
from attncheck.subjects.capabilities.configuration import read_configuration
from attncheck.verify import sanitizer
from attncheck.verify.call_checks import CHECKS
from attncheck.verify.question_fit import (
    COMPARE,
    QUESTIONS,
    adapted_problems,
    compares_launches,
    question_named,
)
from attncheck.workers.units import Unit, UnitResult

# ------------------------------------------------------------ contract

# Masks with arguments for which each hides something in a problem of 16 rows and keys.
_DECLARED_MASKS = {
    "full": FULL,
    "causal": Spec.of("causal"),
    "causal_bottom_right": Spec.of("causal_bottom_right"),
    "sliding_window": Spec.of("sliding_window", window=3),
    "prefix_lm": Spec.of("prefix_lm", prefix=3),
    "padding": Spec.of("padding", lengths=[9]),
    "document": Spec.of("document", lengths=[9, 7]),
    "bottom_right": Spec.of("bottom_right", Spec.of("causal"), lengths=[9]),
    "documents_bottom_right": Spec.of(
        "documents_bottom_right", Spec.of("causal"), query_lengths=[9, 7], kv_lengths=[7, 9]
    ),
}


def contract_units(planning: Planning) -> Iterator[Unit]:
    """Yield the smallest problems, unusual ones, and each capability that the kernel declares."""
    # Backwards last: each needs further compilations, and forwards fail more often.
    for name, problem in sorted(_contract_problems(planning), key=lambda named: named[1].backward):
        yield planning.unit_of("contract", Case(problem=problem), name)
    if planning.device == "cuda":  # on a CPU there are no grids to overflow
        for name, problem in _unmoved_problems(
            planning, named_problems.MANY_SEQUENCES, planning.dtypes[:1]
        ):
            # There are too many sequences for an oracle, which this question does not need.
            case = Case(problem=problem, question="first_row")
            yield planning.unit_of("contract", case, name)


def _contract_problems(planning: Planning) -> Iterator[tuple[str, Problem]]:
    dtypes = planning.dtypes
    for turn, dtype in enumerate(dtypes):
        scaled = DTYPES[dtype].scaled
        for name, entry in named_problems.tagged(named_problems.SMALLEST).items():
            for backward in (False,) if scaled else (False, True):
                problem = Problem(dtype=dtype, backward=backward, **entry.fields)
                nearest = planning.nearest(problem)
                if nearest is not None:
                    yield f"{name} backward" if backward else name, nearest
        # One dtype is enough, since these problems are unusual in any dtype.
        if turn == 0:
            yield from _unmoved_problems(planning, named_problems.CONTRACT, [dtype])
        if scaled:
            yield from _unmoved_problems(planning, named_problems.FP8, [dtype])
        # Long sums expose accumulators in the inputs' format, which is no fault in fp32.
        if DTYPES[dtype].storage.significand < FORMATS["fp32"].significand:
            yield from _unmoved_problems(planning, named_problems.LONG, [dtype])
    yield from _declared_problems(planning)
    for dtype in dtypes:
        if not planning.refusal(SOFTMAX, dtype):
            yield SOFTMAX, Problem(operation=SOFTMAX, query=2, kv=16, dtype=dtype)


def _unmoved_problems(
    planning: Planning, tag: str, dtypes: Sequence[str]
) -> Iterator[tuple[str, Problem]]:
    """Yield the problems of a tag unchanged; the kernel may refuse them when asked."""
    for dtype in dtypes:
        for name, entry in named_problems.tagged(tag).items():
            if DTYPES[dtype].scaled and entry.fields.get("backward"):
                continue  # no gradients in fp8
            problem = Problem(dtype=dtype, **entry.fields)
            if planning.executor.concerns(planning.subject, problem):
                yield name, problem


def _declared_problems(planning: Planning) -> Iterator[tuple[str, Problem]]:
    """Yield a problem for each dtype, head_dim and mask in the kernel's capability table."""
    table = read_configuration().kernels.get(planning.unit.kernel)
    if table is None:
        return
    # These are asked even if the kernel refuses them, since that contradicts its table.
    first = planning.dtypes[0] if planning.dtypes else "bf16"
    wanted = planning.choices.dtypes or table.dtypes or ()
    declared: list[tuple[str, dict[str, Any]]] = []
    declared += [(dtype, {"dtype": dtype}) for dtype in table.dtypes or ()]
    for dims in table.head_dims if isinstance(table.head_dims, tuple) else ():
        keys, values = dims if isinstance(dims, tuple) else (dims, dims)
        dims_text = f"{keys}/{values}" if isinstance(dims, tuple) else str(dims)
        declared.append((f"head_dim {dims_text}", {"head_dim": keys, "value_dim": values}))
    for mask in table.masks or ():
        spec = _DECLARED_MASKS.get(ALIASES.get(mask, mask), FULL)
        declared.append((mask, {"mask": spec}))
    for name, fields in declared:
        usual: dict[str, Any] = {"query": 16, "kv": 16, "dtype": first}
        try:
            problem = Problem(**usual | fields)
        except ProblemError:
            continue
        concerns = planning.executor.concerns(planning.subject, problem)
        if concerns and (not wanted or problem.dtype in wanted):
            yield f"declared {name}", problem


# ------------------------------------------------------------ probes


def probe_units(planning: Planning) -> Iterator[Unit]:
    """Yield each probe of ``attncheck check``, in the dtypes by turns or in every dtype.

    Each is moved to the nearest problem that the kernel takes and that fits the probe.
    """
    dtypes = planning.dtypes
    for turn, dtype in enumerate(dtypes):
        probes = [each for each in check_cases(dtype) if each.case.question != COMPARE]
        for number, probe in enumerate(probes):
            # Dtypes take turns, shifted by one from probe to probe, so that each gets its share.
            if not planning.choices.tier.each_dtype and number % len(dtypes) != turn:
                continue
            case = probe.case
            adapted = adapted_problems(planning.subject, case.problem, planning.executor)
            moved = (planning.fitting(case.question, each) for each in adapted)
            problem = next((each for each in moved if each is not None), None)
            if problem is None:
                planning.drop("probes", case, probe.name, planning.reason)
            else:
                yield planning.unit_of("probes", move_case(case, problem), probe.name)


# ------------------------------------------------------------ memory and determinism

_RELATIONS: dict[Stage, tuple[str, ...]] = {
    "memory": (
        "hidden_keys_nan",
        "hidden_keys_huge",
        "future_keys_nan",
        "future_keys_huge",
        *(name for name in QUESTIONS if name.startswith("strides")),
        "pages",
        "call_order",
        "mask_order",
    ),
    "determinism": ("repeat", "alone_in_batch", "batch_permutation", "launches"),
}
# Questions that are asked for every value of a parameter, such as the tensor with unusual strides.
_EACH_VALUE = dict.fromkeys(("strides_alone", "strides_of_one_column", "strides_far"), "tensor")
_EACH_VALUE["call_order"] = "between"
# Questions that are asked on further problems, by the tag of these.
_ADDITIONAL = {
    "hidden_keys_nan": named_problems.BACKWARD_CAP,
    "neighbours": named_problems.MANY_KEYS,
}


def surrounding_units(planning: Planning, stage: Stage) -> Iterator[Unit]:
    """Yield the questions of ``memory`` or ``determinism``, each on a few layouts by turns.

    Layouts that the kernel does not take are not reported here, but in the stage bounds.
    """
    if stage == "memory":
        yield from sanitizer_units(planning)
    dtypes, layouts = planning.dtypes, planning.choices.tier.layouts
    checks = (name for name, check in CHECKS.items() if check.stage == stage)
    for number, question in enumerate((*checks, *_RELATIONS[stage])):
        # Each question begins at a different layout, so that together they cover all.
        for turn in range(number, number + layouts if dtypes else number):
            yield from _layout_units(planning, stage, question, turn)
        for name, entry in named_problems.tagged(_ADDITIONAL.get(question, "")).items():
            able = (p for dtype in dtypes for p in _nearest_problems(planning, dtype, entry.fields))
            problem = next(able, None)
            if problem is not None:
                case = move_case(Case(problem=problem, question=question), problem)
                yield planning.unit_of(stage, case, name)


def _layout_units(planning: Planning, stage: Stage, question: str, turn: int) -> Iterator[Unit]:
    """Yield the units of a question on the first layout, from index ``turn`` on, that fits it."""
    dtype = planning.dtypes[turn % len(planning.dtypes)]
    entries = list(named_problems.tagged(named_problems.MEMORY).values())
    for step in range(len(entries)):
        entry = entries[(turn + step) % len(entries)]
        for problem in _nearest_problems(planning, dtype, entry.fields):
            if question_named(question).unfit(problem) is not None:
                continue
            if compares_launches([question]) and not planning.has_launches(problem):
                continue
            # Missing parameters default to the middle of the allowed values.
            name = _EACH_VALUE.get(question)
            values = question_named(question).allowed(problem)[name] if name else ()
            choices: list[Parameters] = [{name: value} for value in values] if name else [{}]
            for chosen in choices:
                case = Case(problem=problem, question=question, parameters=chosen)
                yield planning.unit_of(stage, move_case(case, problem), entry.name)
            return


def _nearest_problems(planning: Planning, dtype: str, fields: dict[str, Any]) -> list[Problem]:
    try:
        problem = Problem(dtype=dtype, **fields)
    except ProblemError:  # no gradients in fp8
        return []
    adapted = adapted_problems(planning.subject, problem, planning.executor)
    nearest = map(planning.nearest, adapted)
    return [each for each in nearest if each is not None]


# ------------------------------------------------------------ compute-sanitizer

SANITIZER_VARIANT = "compute-sanitizer"  # Prefix, before a tool's name, of its units' variant.

_TOOLS = ("memcheck", "racecheck", "synccheck")


def sanitizer_units(planning: Planning) -> Iterator[Unit]:
    """Yield one unit for each tool, with all problems, since starting its process takes longest.

    If compute-sanitizer is missing, a single unsupported answer states this.
    """
    cases = _sanitizer_cases(planning) if planning.choices.sanitizer else []
    if not cases:
        return
    missing = "" if sanitizer.sanitizer() else sanitizer.ABSENT
    if planning.device == "cpu":
        missing = "compute-sanitizer sees nothing of a CPU"
    if missing:
        planning.drop("memory", cases[0], SANITIZER_VARIANT, missing)
        return
    for tool in _TOOLS:
        yield planning.unit_of("memory", cases[0], f"{SANITIZER_VARIANT} {tool}")


def sanitize_kernel(unit: Unit, planning: Planning) -> UnitResult:
    """Run the kernel under the tool of ``unit``, and return an answer for each problem."""
    records = sanitizer.run_sanitizer(
        unit.kernel,
        _sanitizer_cases(planning),
        unit.variant.removeprefix(SANITIZER_VARIANT).strip(),
        convention=unit.convention,
        device=unit.device,
    )
    facts = {
        "kernel": planning.subject.name,
        "variant": unit.variant,
        "environment": planning.environment,
    }
    answers = tuple(
        Answer(unit=unit.id, stage=unit.stage, record=replace(record, **facts))
        for record in records
    )
    return UnitResult(unit=unit.id, answers=answers)


def _sanitizer_cases(planning: Planning) -> list[Case]:
    """Return cases of distinct problems that the kernel takes, preferably in bf16 or fp16."""
    if not planning.dtypes:
        return []
    dtype = next((d for d in planning.dtypes if d in {"bf16", "fp16"}), planning.dtypes[0])
    problems = [
        problem
        for entry in named_problems.tagged(named_problems.SANITIZER).values()
        for problem in _nearest_problems(planning, dtype, entry.fields)
    ]
    return [Case(problem=problem) for problem in dict.fromkeys(problems)]
