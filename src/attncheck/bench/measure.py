"""Times kernels that take turns on each problem, and judges the results of the timed calls.

Each cell also has the least work of a call: pairs of a row and a visible key, operations, bytes.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from msgspec.structs import replace as replace_struct

from attncheck.bench.machine import sm_clock
from attncheck.core.mod_spec import FULL
from attncheck.core.strided_alloc import release_cached_memory
from attncheck.inputs.input_tensors import Inputs, quick_inputs
from attncheck.inputs.problem import Case, Problem, head_arrangement
from attncheck.records.bench_report import BenchCell, BenchRow, Times, Work
from attncheck.records.record import FAILED_STATUSES, Record
from attncheck.relations.excerpt import Excerpt, can_excerpt
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.executor import Execution, Failure
from attncheck.verify.kernel_hosts import KeepingExecutor, executor_of
from attncheck.verify.run_case import mask_rows, new_record, run_on_evidence, without_outputs
from attncheck.verify.verify import applicable_subjects, case_subjects, own_arithmetics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from attncheck.bench.tables import BenchPlan
    from attncheck.subjects.capabilities.subject import Subject

    Pass = Literal["forward", "both"]

# The most pairs of a row and a key that are judged per cell, threefold with gradients. Their bounds
# take about a second for each arithmetic: 3 ns per pair on an H100, 1 µs on a CPU's core.
_MOST_PAIRS = {"cpu": 2**20, "cuda": 2**28}
_PAIRS = {"cpu": 1 << 22, "cuda": 1 << 26}  # pairs for which a mask is evaluated at a time
_MOST_DECODED = 16  # up to this many rows, reading k and v takes longer than multiplying


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verified:
    """The part of a problem that is compared with the exact result, and its evidence by pass."""

    at: Excerpt
    text: str  # describes the part in reports
    evidence: Mapping[Pass, EvidenceBuilder]


class _PartExecutor:
    """An executor that runs a kernel on the whole problem, and returns its results of a part."""

    def __init__(self, keeping: KeepingExecutor, whole: Inputs, at: Excerpt, *, graph: bool):
        self._keeping, self._whole, self._at, self._graph = keeping, whole, at, graph
        self.absence, self.concerns = keeping.absence, keeping.concerns
        self.launches = keeping.launches

    def refusal(self, subject: Subject, problem: Problem, device: str) -> Failure | None:
        del problem
        return self._keeping.refusal(subject, self._whole.problem, device)

    def run(self, subject: Subject, inputs: Inputs, **under: Any) -> Execution | Failure:
        del under
        result = self._keeping.keep(subject, self._whole, graph=self._graph)
        if isinstance(result, Failure):
            return result
        return Execution(
            outputs=self._at.outputs(result.outputs, inputs.problem),
            seconds=None,
            tiling=result.tiling,
            arithmetic=result.arithmetic,
            notes=result.notes,
        )


@dataclass(slots=True)
class _Entry:
    """A kernel's records and times in one cell, which are filled in step by step."""

    subject: Subject
    executor: KeepingExecutor
    records: dict[Pass, Record] = field(default_factory=dict)
    seconds: dict[Pass, list[float]] = field(default_factory=dict)
    clock: dict[Pass, Any] = field(default_factory=dict)

    def row(self, verified: str) -> BenchRow:
        """Return its row of the report; the record is that of the pass with the worse verdict."""
        record = max(self.records.values(), key=_badness)
        both = self.records.get("both")
        refused = both is not None and both.status == "unsupported"
        return BenchRow(
            record=record,
            verified=verified if record.judgement else "",
            forward=self._times("forward"),
            both=self._times("both"),
            lacks=both.reason if both and refused and record is not both else "",
        )

    def _times(self, name: Pass) -> Times | None:
        seconds = self.seconds.get(name)
        return Times(seconds=tuple(seconds), clock=self.clock[name]) if seconds else None


def _badness(record: Record) -> int:
    if record.status in FAILED_STATUSES:
        return 3
    return {"pass": 1, "unsupported": 0}.get(record.status, 2)


def time_cells(
    plan: Sequence[BenchPlan],
    subjects: Sequence[Subject],
    *,
    device: str,
    rounds: int,
    graph: bool = False,
    stage: Callable[[str], None] = lambda _: None,
) -> Iterator[BenchCell]:
    """Yield each problem's cell as soon as it is timed and judged.

    Args:
        plan: Problems, in their order.
        subjects: Kernels; those that cannot run here or are not concerned by a problem have no
            row.
        device: ``cpu`` or ``cuda``.
        rounds: Timed rounds, in which each call has one turn, after a warm-up round.
        graph: Whether calls are timed in CUDA graphs, if they can be captured.
        stage: Called with a description of each next step.
    """
    forwards = [one.problem.replace(backward=False, dcaptured=False) for one in plan]
    concerned = case_subjects(forwards, subjects, device)
    clock = sm_clock(device)
    for planned, chosen in zip(plan, concerned, strict=True):
        entries = [_Entry(subject, executor_of(subject)) for subject in chosen]
        try:
            yield _time_cell(planned, entries, device, rounds, clock, stage, graph=graph)
        finally:
            for entry in entries:
                entry.executor.forget()
            release_cached_memory(device)


def _time_cell(
    planned: BenchPlan,
    entries: list[_Entry],
    device: str,
    rounds: int,
    clock: Callable[[], int | None],
    stage: Callable[[str], None],
    *,
    graph: bool,
) -> BenchCell:
    problem = planned.problem
    what = f"{planned.variant} {problem.dtype} {problem.shape}"
    whole = quick_inputs(problem, device)
    passes: dict[Pass, Inputs] = {"forward": whole.forward()}
    if problem.backward:
        passes["both"] = whole
    verified = _cut_part(passes, [entry.subject for entry in entries], device)
    for entry in entries:
        stage(f"{entry.subject.name} {what}")
        _verify(entry, planned.variant, passes, verified, device, graph=graph)
    stage(f"{what}: in turns")
    problems = {name: inputs.problem for name, inputs in passes.items()}
    clocks = _take_turns(entries, problems, rounds, clock)
    return BenchCell(
        table=planned.table,
        case_id=problem.id,
        case=Case(problem=problem).to_json(),
        variant=planned.variant,
        heads=head_arrangement(problem),
        work=count_work(problem, device),
        clocks=(min(clocks), max(clocks)) if clocks else None,
        rows=tuple(entry.row(verified.text) for entry in entries if entry.records),
    )


def _cut_part(passes: Mapping[Pass, Inputs], subjects: Sequence[Subject], device: str) -> _Verified:
    """Choose a part that can be judged in about a second, and prepare its evidence.

    The part is one sequence (all, if a sink has a gradient), with as many heads as possible. If one
    head is too much, or the score mod depends on the number of heads, it is the last rows only,
    which see most keys, or the first rows if a mod does not allow the last; gradients, which are
    sums over all rows, are then not judged.
    """
    whole = passes["forward"].problem
    widest = passes.get("both", passes["forward"]).problem
    # The gradient of a sink is a sum over all sequences.
    chosen = range(whole.batch if whole.sink and widest.backward else 1)
    most = _MOST_PAIRS[device] // (3 if widest.backward else 1)
    groups = most // (len(chosen) * whole.group * whole.query * whole.kv)
    heads = min(whole.heads, groups * whole.group)
    at = Excerpt.of(whole, sequences=chosen, heads=range(heads))
    descriptions = [f"sequence 0 of {whole.batch}"] if len(chosen) < whole.batch else []
    cut = not heads or not can_excerpt(whole, at)
    if cut:
        count = min(whole.query, max(1, _MOST_PAIRS[device] // (whole.heads * whole.kv)))
        ends = range(whole.query - count, whole.query), range(count)
        last, early = (Excerpt.of(whole, sequences=range(1), rows=rows) for rows in ends)
        at = last if can_excerpt(whole, last) else early
        descriptions.append(f"rows {at.rows.start:,}–{at.rows.stop - 1:,}")
    elif heads < whole.heads:
        descriptions.append(f"heads 0–{heads - 1} of {whole.heads}")
    text = ", ".join(descriptions) or "everything"
    if cut and widest.backward:
        text += ": no gradients"
    parts = {name: inputs.forward() if cut else inputs for name, inputs in passes.items()}
    evidence = {}
    for name, part in parts.items():
        inputs, first = at.inputs(part), passes[name].problem
        evidence[name] = EvidenceBuilder(
            Case(problem=inputs.problem),
            device,
            inputs=inputs,
            expected=own_arithmetics(applicable_subjects([first], subjects), first, device),
        )
    return _Verified(at=at, text=text, evidence=evidence)


def _verify(
    entry: _Entry,
    variant: str,
    passes: Mapping[Pass, Inputs],
    verified: _Verified,
    device: str,
    *,
    graph: bool,
) -> None:
    """Call a kernel once in each pass, keep the calls for timing, and judge their results."""
    for name, inputs in passes.items():
        executor = _PartExecutor(entry.executor, inputs, verified.at, graph=graph)
        if not executor.concerns(entry.subject, inputs.problem):
            continue
        case = Case(problem=inputs.problem)
        record = new_record(entry.subject, case, device=device, variant=variant, environment="")
        entry.records[name], execution = run_on_evidence(
            record, entry.subject, verified.evidence[name], executor, brief=True
        )
        if execution is not None:
            entry.seconds[name] = []


def _take_turns(
    entries: list[_Entry],
    problems: Mapping[Pass, Problem],
    rounds: int,
    clock: Callable[[], int | None],
) -> list[int]:
    """Time each kept call once per round; returns the GPU's MHz after each turn.

    Each round begins with the next call; the first round is not recorded.
    """
    clocks = []
    turns = [(entry, name) for entry in entries for name in entry.seconds]
    for number in range(rounds + 1):
        first = number % len(turns) if turns else 0
        for entry, name in [*turns[first:], *turns[:first]]:
            if name not in entry.seconds:  # it failed in an earlier round
                continue
            turn = entry.executor.time(problems[name])
            if isinstance(turn, Failure):
                entry.records[name] = without_outputs(
                    replace_struct(entry.records[name], judgement=None), turn
                )
                del entry.seconds[name]
            elif number:
                entry.seconds[name].append(turn.seconds)
                entry.clock[name] = turn.clock
                if mhz := clock():
                    clocks.append(mhz)
    return clocks


def count_work(problem: Problem, device: str) -> Work:
    """Return the work of a Problem of attention, with exact pairs from the original mask.

    A product of a pair has a multiplication and an addition for each of head_dim or value_dim
    numbers. A forward has two products, q·k and P·v; a backward five: q·k again, dO·v, and those of
    dv, dq and dk, which is 2.5 times as much if both dimensions are equal.
    """
    plain = problem.replace(seed=0, distribution="normal", dtype="fp32", backward=False)
    pairs = visible_pairs(plain.replace(dlse=False, dcaptured=False), device)
    forward = 2.0 * pairs * (problem.head_dim + problem.value_dim)
    backward = 2.0 * pairs * (3 * problem.head_dim + 2 * problem.value_dim)
    stored = problem.formats.storage.torch_dtype.itemsize
    written = problem.formats.output.torch_dtype.itemsize
    keys = problem.batch * problem.kv_heads * problem.kv
    rows = problem.batch * problem.heads * problem.query
    cache = keys * (problem.head_dim + problem.value_dim) * stored
    read_and_written = rows * (problem.head_dim * stored + problem.value_dim * written)
    return Work(
        pairs=pairs,
        forward_flops=forward,
        backward_flops=backward if problem.backward else 0.0,
        forward_bytes=cache + read_and_written,
        cache_bytes=cache,
        decoding=problem.query <= _MOST_DECODED < problem.kv,
    )


@functools.lru_cache(maxsize=256)
def visible_pairs(problem: Problem, device: str) -> int:
    """Return the number of pairs of a query row and a visible key, over sequences and heads."""
    sizes = (problem.batch, problem.heads)
    if problem.mask == FULL:
        return math.prod(sizes) * problem.query * problem.kv
    seen, count = mask_rows(problem, torch.device(device)), 0
    step = max(1, _PAIRS[device] // (math.prod(sizes) * problem.kv))
    for start in range(0, problem.query, step):
        rows = range(start, min(start + step, problem.query))
        part = seen(rows)
        # Axes that a mask does not read have length 1 and stand for the whole axis.
        repeats = math.prod(sizes) * len(rows) * problem.kv // part.numel()
        count += int(part.sum()) * repeats
    return count
