"""A kernel in a whole transformer: does the model still say the same?

Two answers. Each call that a layer makes is judged on the tensors that it received, as any Case:
that is exact, and says which layer is wrong. And the model's states and logits drift from those of
the same model in fp64 with exact attention; they drift with a right kernel too, so the same model
runs with ideal kernels of several tilings. If the kernel is as right as those, each order of all
their drifts is as likely as any other: it is the furthest with a chance of one in their number.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from msgspec.structs import replace

from attncheck import oracles
from attncheck.core.errors import UsageError
from attncheck.core.mod_spec import NONE
from attncheck.inputs.problem import Case, Problem, check_size, short_id
from attncheck.inputs.recorded_calls import Call, Recording
from attncheck.inputs.recording_file import write_calls
from attncheck.records.failures import KeptFailure, keep_failure
from attncheck.records.model_report import Drift, ModelCall, ModelFault, ModelRecord
from attncheck.records.record import FAILED_STATUSES, UNTRUSTED_STATUSES, reason_of
from attncheck.subjects.capabilities.subject import Refused, Tiling
from attncheck.subjects.ideal import Ideal
from attncheck.surveys.swapped_model import (
    CallPlace,
    ModelRun,
    ModelSize,
    draw_tokens,
    exact_model,
    layer_of,
    make_model,
    run_model,
)
from attncheck.verify.environment import environment
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.executor import Execution, Failure, InProcess
from attncheck.verify.question_fit import question_summary
from attncheck.verify.run_case import new_record, run_on_evidence, without_outputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn

    from attncheck.core.outputs import Outputs
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.records.model_report import Phase
    from attncheck.records.record import Record
    from attncheck.subjects.capabilities.subject import Subject
    from attncheck.verify.executor import Executor
    from attncheck.verify.kernel_hosts import KernelHost

_STEPS = (1, 2, 3, 4, 6)  # sizes of key tiles, in twelfths of a prompt
_KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"reverse": True},
    {"lazy_rescale": 8.0},
    {"recurrence": "flash1"},
    {"reverse": True, "lazy_rescale": 8.0},
)
_ANSWERS = (("prefill", "logits"), ("decode", "logits"), ("training", "gradients"))


def names_beside(device: str) -> tuple[str, ...]:
    """Return torch's kernels, to compare with."""
    own = ("sdpa-cudnn", "sdpa-efficient") if device == "cuda" else ()
    return ("sdpa-math", "sdpa-flash", *own, "flex")


def right_tilings(length: int, count: int) -> list[Tiling]:
    """Return tilings of right kernels, no two of which round alike: sizes, orders, recurrences."""
    unit = max(4, length // 12)
    every = (
        Tiling(block_query=64, block_kv=unit * size, **kind) for kind in _KINDS for size in _STEPS
    )
    return [tiling for tiling, _ in zip(every, range(count), strict=False)]


class _Stopped(Exception):
    """A kernel gave nothing for a call."""

    def __init__(self, place: CallPlace, failure: Failure) -> None:
        super().__init__(failure.message)
        self.place, self.failure = place, failure


@dataclass
class _Replay:
    """An executor that gives what a kernel gave: to be judged, it is not called once more."""

    execution: Execution | Failure

    def refusal(self, *_: object) -> None:
        """It took the call."""

    def run(self, *_: object, **__: object) -> Execution | Failure:
        """What it gave."""
        return self.execution


@dataclass(kw_only=True)
class _Kernel:
    """A kernel as a model's attention; with ``judged`` each call has a Record."""

    subject: Subject
    executor: Executor
    device: str
    judged: bool
    made: list[tuple[CallPlace, Record]] = field(default_factory=list)
    # The first call that failed.
    failed: tuple[CallPlace, Inputs, Execution | Failure] | None = None

    def __call__(self, place: CallPlace, inputs: Inputs) -> Outputs:
        problem = inputs.problem
        refusal = self.executor.refusal(self.subject, problem, self.device)
        if isinstance(refusal, str) or not self.executor.concerns(self.subject, problem):
            raise Refused(refusal or f"it takes no {'sinks' if problem.sink else 'such call'}")
        result = refusal or self.executor.run(self.subject, inputs)
        if self.judged:
            record = self._record(Case(problem=problem), inputs, result)
            self.made.append((place, record))
            if record.status in FAILED_STATUSES and self.failed is None:
                self.failed = place, inputs, result
        if isinstance(result, Failure):
            raise (Refused(result.message) if result.kind == "refused" else _Stopped(place, result))
        return result.outputs

    def _record(
        self, case: Case, inputs: Inputs, result: Execution | Failure, *, brief: bool = True
    ) -> Record:
        here = environment(self.device).id
        record = new_record(self.subject, case, device=self.device, variant="", environment=here)
        if isinstance(result, Failure):
            return without_outputs(record, result)
        evidence = EvidenceBuilder(case, self.device, inputs)
        replay = cast("Executor", _Replay(result))
        return run_on_evidence(record, self.subject, evidence, replay, brief=brief)[0]

    def kept(self, folder: Path, *, model: str, kernel: str, length: int) -> ModelFault | None:
        """Keep the first call that failed: its tensors, and the failure that ``repro`` asks again.

        Returns:
            Where it is; None where none failed.
        """
        if self.failed is None:
            return None
        place, inputs, result = self.failed
        file = re.sub(r"[^A-Za-z0-9.-]+", "-", f"{model}-{Path(kernel).name}") + ".safetensors"
        recording = _recording(file, place, inputs)
        folder.mkdir(parents=True, exist_ok=True)
        write_calls(folder / file, [(recording.call, recording.tensors())])
        recording.register()
        case = Case(problem=recording.problem())
        record = self._record(case, inputs.replace(problem=case.problem), result)
        failed = KeptFailure(
            id=short_id({"kernel": kernel, "device": self.device, "case": case.to_json()}),
            kernel=kernel,
            device=self.device,
            question=question_summary(case.question),
            record=replace(record, variant=recording.call.name),
            environment=environment(self.device),
        )
        keep_failure(failed, folder)
        again = None
        if isinstance(result, Execution):
            alone = self.executor.run(self.subject, inputs)
            again = isinstance(alone, Execution) and torch.equal(
                alone.outputs.out.view(torch.uint8), result.outputs.out.view(torch.uint8)
            )
        worst = record.judgement.worst if record.judgement else None
        at = worst.at if worst else None
        row = at.query if at and not place.step else length + place.step - 1
        return ModelFault(
            layer=place.layer,
            module=place.module,
            step=place.step,
            backward=place.backward,
            batch=at.batch if at else None,
            head=at.head if at else None,
            position=row if at else None,
            reason=reason_of(record),
            id=failed.id,
            recording=file,
            again=again,
        )


def _recording(file: str, place: CallPlace, inputs: Inputs) -> Recording:
    """Return a call as a recording; a mask that has no flag becomes a table."""
    problem, kinds = inputs.problem, {"full": "none", "causal": "causal"}
    mask = None
    if problem.mask.name not in kinds:
        rows = torch.arange(problem.query)[:, None]
        first = rows.new_zeros(())
        mask = problem.mask_mod()(first, first, rows, torch.arange(problem.kv))[None, None]
    cap = None if problem.score == NONE else cast("float", problem.score.values["cap"])
    call = Call(
        name=f"{place.module}/{place.step}",
        batch=problem.batch,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        query=problem.query,
        kv=problem.kv,
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        dtype=cast("Any", problem.dtype),
        mask=cast("Any", kinds.get(problem.mask.name, "bool")),
        scale=problem.scale,
        softcap=cap,
        sink=problem.sink,
        backward=problem.backward,
    )
    tensors = {name: one.detach().cpu().contiguous() for name, one in inputs.tensors().items()}
    return Recording(file=file, call=call, **tensors, mask=mask)


# ------------------------------------------------------------------ drift

Distances = dict[tuple["Phase", str], float]


def _distances(run: ModelRun, exact: ModelRun) -> Distances:
    """How far a run is from the exact one, by phase and place."""
    distances: Distances = {}
    for phase, states in run.states.items():
        known, logits = cast("Phase", phase), len(states) - 1
        for place, (one, true) in enumerate(zip(states, exact.states[phase], strict=True)):
            where = "logits" if place == logits else f"layer {place}"
            distances[known, where] = float((one - true).norm() / true.norm())
        distances[known, "KL"] = _divergence(states[logits], exact.states[phase][logits])
    if not run.gradients:
        return distances
    squares: dict[str, list[float]] = {}
    for name, true in exact.gradients.items():
        layer = layer_of(name)
        error, size = (run.gradients[name] - true).square().sum(), true.square().sum()
        for where in {"gradients", "gradients" if layer is None else f"layer {layer}"}:
            sums = squares.setdefault(where, [0.0, 0.0])
            sums[0] += float(error)
            sums[1] += float(size)
    distances |= {("training", where): math.sqrt(a / b) for where, (a, b) in squares.items() if b}
    return distances


def _divergence(logits: torch.Tensor, exact: torch.Tensor) -> float:
    """Mean over positions of KL(exact ‖ other), in nats."""
    true, other = exact.log_softmax(-1), logits.log_softmax(-1)
    return float((true.exp() * (true - other)).sum(-1).mean())


def _first_other(run: ModelRun, exact: ModelRun) -> int | None:
    """The first decoded word that is another than the exact model's."""
    if run.tokens is None or exact.tokens is None:
        return None
    other = (run.tokens != exact.tokens).any(0).nonzero()
    return int(other[0]) if len(other) else None


def drift_chance(kernel: Distances, right: list[Distances]) -> float:
    """Return the chance that a right kernel drifts as far as ``kernel``, by order alone.

    What each is ordered by is the largest of its distances, each ÷ the median of all of them, the
    kernel's included: so no order of them is likelier than another where all are alike right.
    """
    concerned = [place for place in _ANSWERS if place in kernel]
    every = [kernel, *right]
    medians = {place: statistics.median(one[place] for one in every) for place in concerned}

    def furthest(one: Distances) -> float:
        shares = (one[p] / medians[p] if medians[p] else float(one[p] > 0) for p in concerned)
        # NaN is further than anything.
        return max((math.inf if math.isnan(share) else share for share in shares), default=0.0)

    mine = furthest(kernel)
    return (1 + sum(furthest(one) >= mine for one in right)) / (1 + len(right))


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """A model, its exact run and those with right kernels."""

    name: str
    model: nn.Module
    prompt: torch.Tensor
    exact: ModelRun
    right: list[Distances]
    diverge: int | None

    def run(self, attend: Any, size: ModelSize, *, backward: bool) -> ModelRun:
        return run_model(
            self.model,
            self.prompt,
            attend,
            steps=size.steps,
            forced=self.exact.tokens,
            backward=backward,
        )

    def record(self, run: ModelRun, **facts: Any) -> ModelRecord:
        """The Record of a run, by its drift alone."""
        mine = _distances(run, self.exact)
        drifts = []
        for (phase, where), error in mine.items():
            others = [one[phase, where] for one in self.right]
            drifts.append(
                Drift(
                    phase=phase,
                    where=where,
                    error=error,
                    floor=statistics.median(others),
                    most=max(others),
                    as_far=sum(one >= error for one in others),
                )
            )
        norms = (_norm(run), _norm(self.exact)) if run.gradients else (None, None)
        return ModelRecord(
            model=self.name,
            drifts=tuple(drifts),
            chance=drift_chance(mine, self.right),
            diverges=_first_other(run, self.exact),
            right_diverge=self.diverge,
            gradient_norm=norms[0],
            exact_norm=norms[1],
            **facts,
        )


def _norm(run: ModelRun) -> float:
    return math.sqrt(sum(float(one.square().sum()) for one in run.gradients.values()))


# ------------------------------------------------------------------ the survey


def survey_model(
    spec: str,
    size: ModelSize,
    hosts: Mapping[str, KernelHost],
    beside: list[Subject],
    *,
    right: int,
    folder: Path,
    advance: Callable[[str], None] = lambda _: None,
) -> Iterator[ModelRecord]:
    """Yield the Record of each kernel in one model, those to compare with last.

    Args:
        spec: As of ``make_model``.
        hosts: Kernels, by what somebody called them; each call of theirs is judged.
        beside: Kernels whose drift is shown beside theirs, where they take every call.
        right: How many ideal kernels they are compared with.
        folder: Where the first failing call of each is kept.
        advance: Called after each run of the model with what ran.

    Raises:
        UsageError: where there is no such model, or its attention is none that can be passed on.
    """
    name = Path(spec).name
    try:
        compared = _compared(spec, name, size, right, advance)
    except Refused as error:
        raise UsageError(f"model {spec!r}: {error}.") from None
    for kernel, host in hosts.items():
        attend = _Kernel(
            subject=host.subject, executor=host.executor, device=size.device, judged=True
        )
        yield _judged(compared, attend, kernel, size, folder)
        advance(f"{name} {kernel}")
    for subject in beside:
        attend = _Kernel(subject=subject, executor=InProcess(), device=size.device, judged=False)
        record = _run(compared, attend, size, subject.name)
        yield replace(record, beside=True, chance=None)
        advance(f"{name} {subject.name}")


def _compared(
    spec: str, name: str, size: ModelSize, right: int, advance: Callable[[str], None]
) -> _Compared:
    model = make_model(spec, size)
    config: Any = model.config
    config = config.get_text_config()
    heads, width, length = config.num_attention_heads, config.hidden_size, size.length
    shape = {"batch": size.batch, "heads": heads, "query": length, "head_dim": width // heads}
    check_size(Problem(**shape, dtype=size.dtype, backward=True), size.device)
    prompt = draw_tokens(model, size)

    def exactly(_: CallPlace, inputs: Inputs) -> Outputs:
        return oracles.truth(inputs)

    exact = run_model(exact_model(model), prompt, exactly, steps=size.steps, exact=True)
    advance(f"{name} in fp64")
    compared = _Compared(name=name, model=model, prompt=prompt, exact=exact, right=[], diverge=None)
    first: list[int] = []
    for tiling in right_tilings(size.length, right):
        ideal = Ideal(tiling)
        run = compared.run(lambda _, inputs: ideal.run(inputs), size, backward=True)  # noqa: B023  # called at once
        compared.right.append(_distances(run, exact))
        first += [] if (word := _first_other(run, exact)) is None else [word]
        advance(f"{name} ideal {tiling}")
    return dataclasses.replace(compared, diverge=min(first, default=None))


def _run(
    compared: _Compared, attend: _Kernel, size: ModelSize, kernel: str, *, backward: bool = True
) -> ModelRecord:
    """Run the model with a kernel; without gradients where it gives none."""
    attend.made.clear()
    attend.failed = None
    backward = backward and attend.subject.backward
    try:
        run = compared.run(attend, size, backward=backward)
    except Refused as error:
        if backward:  # it may take the forward alone
            return _run(compared, attend, size, kernel, backward=False)
        reason = str(error)
        return ModelRecord(model=compared.name, kernel=kernel, status="unsupported", reason=reason)
    except _Stopped as error:
        status = attend.made[-1][1].status if attend.made else "error"
        reason = f"{error.place.module}, step {error.place.step}: {error.failure.message}"
        return ModelRecord(model=compared.name, kernel=kernel, status=status, reason=reason)
    return compared.record(run, kernel=kernel, status="pass")


def _judged(
    compared: _Compared, attend: _Kernel, kernel: str, size: ModelSize, folder: Path
) -> ModelRecord:
    record = _run(compared, attend, size, kernel)
    calls: dict[int, list[tuple[CallPlace, Record]]] = {}
    for place, one in attend.made:
        calls.setdefault(place.layer, []).append((place, one))
    record = replace(record, calls=tuple(map(_layer_calls, calls.values())))
    fault = attend.kept(folder, model=compared.name, kernel=kernel, length=size.length)
    if fault is not None:
        status = record.status if record.status in FAILED_STATUSES else "fail"
        return replace(record, status=status, reason=fault.reason, fault=fault)
    if record.status != "pass":
        return record
    doubts = Counter(one.status for _, one in attend.made if one.status in UNTRUSTED_STATUSES)
    if doubts:
        status, count = doubts.most_common(1)[0]
        return replace(record, status=status, reason=f"{count} calls: {status}")
    if record.chance is not None and record.chance * (1 + len(compared.right)) <= 1:
        reason = (
            f"further from exact than all {len(compared.right)} right kernels, as a right one is "
            f"with a chance of {record.chance:.0%}; every call is within its bound"
        )
        return replace(record, status="warn", reason=reason)
    return record


def _layer_calls(calls: list[tuple[CallPlace, Record]]) -> ModelCall:
    shares = []
    for _, record in calls:
        judgement = record.judgement
        if judgement is None:
            continue
        gradients = judgement.gradients_over_bound or {}
        shares += [judgement.out_over_bound, judgement.lse_over_bound, *gradients.values()]
    known = [share for share in shares if share is not None]
    return ModelCall(
        layer=calls[0][0].layer,
        module=calls[0][0].module,
        calls=len(calls),
        failed=sum(record.status in FAILED_STATUSES for _, record in calls),
        over_bound=max(known, default=None),
    )
