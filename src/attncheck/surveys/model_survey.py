"""Run a kernel in a whole transformer, and judge the calls and the model's drift.

Each call of a layer is judged on the tensors that it received, like any Case: that is exact, and
shows which layer is wrong. The drift is the distance of the model's states and logits from those of
the same model in fp64 with exact attention. Right kernels drift too, so the same model runs with
ideal kernels of several tilings. If the kernel is as accurate as those, all orders of their drifts
are equally likely: it drifts furthest of n kernels with a chance of 1/n.
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
from attncheck.core.grouping import group_by
from attncheck.core.mod_spec import NONE
from attncheck.inputs.problem import Case, Problem, check_size, short_id
from attncheck.inputs.recorded_calls import Call, Recording
from attncheck.inputs.recording_file import write_calls
from attncheck.records.failures import StoredFailure, keep_failure
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
from attncheck.verify.question_fit import question_named
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

_SIZES = (1, 2, 3, 4, 6)  # Sizes of key tiles, in twelfths of a prompt.
_KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"reverse": True},
    {"lazy_rescale": 8.0},
    {"recurrence": "flash1"},
    {"reverse": True, "lazy_rescale": 8.0},
)
_RANKED_PLACES = (("prefill", "logits"), ("decode", "logits"), ("training", "gradients"))


def peer_names(device: str) -> tuple[str, ...]:
    """Return the names of torch's kernels, whose drift is shown for comparison."""
    cuda_only = ("sdpa-cudnn", "sdpa-efficient") if device == "cuda" else ()
    return ("sdpa-math", "sdpa-flash", *cuda_only, "flex")


def right_tilings(length: int, count: int) -> list[Tiling]:
    """Return ``count`` tilings, at most 25, that round differently: sizes, orders, recurrences."""
    unit = max(4, length // 12)
    every = (
        Tiling(block_query=64, block_kv=unit * size, **kind) for kind in _KINDS for size in _SIZES
    )
    return [tiling for tiling, _ in zip(every, range(count), strict=False)]


class _Stopped(Exception):
    """A kernel failed in a call, so that the model's run ends."""

    def __init__(self, place: CallPlace, failure: Failure) -> None:
        super().__init__(failure.message)
        self.place, self.failure = place, failure


@dataclass
class _Replay:
    """An executor that returns a stored result, so that the kernel is not called again."""

    execution: Execution | Failure

    def refusal(self, *_: object) -> None:
        """Return None: the kernel took the call."""

    def run(self, *_: object, **__: object) -> Execution | Failure:
        """Return the stored result."""
        return self.execution


@dataclass(kw_only=True)
class _Kernel:
    """A kernel as a model's attention; if ``judged``, each call is judged and recorded."""

    subject: Subject
    executor: Executor
    device: str
    judged: bool
    calls: list[tuple[CallPlace, Record]] = field(default_factory=list)
    first_failure: tuple[CallPlace, Inputs, Execution | Failure] | None = None

    def __call__(self, place: CallPlace, inputs: Inputs) -> Outputs:
        problem = inputs.problem
        refusal = self.executor.refusal(self.subject, problem, self.device)
        if refusal is not None and refusal.kind == "refused":
            raise Refused(refusal.message)
        if not self.executor.concerns(self.subject, problem):
            raise Refused(f"it takes no {'sinks' if problem.sink else 'such call'}")
        result = refusal or self.executor.run(self.subject, inputs)
        if self.judged:
            record = self._record(Case(problem=problem), inputs, result)
            self.calls.append((place, record))
            if record.status in FAILED_STATUSES and self.first_failure is None:
                self.first_failure = place, inputs, result
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

    def keep(self, folder: Path, *, model: str, kernel: str, length: int) -> ModelFault | None:
        """Store the first failed call: its tensors, and the failure for ``repro``.

        Returns:
            A description of the fault; None if no call failed.
        """
        if self.first_failure is None:
            return None
        place, inputs, result = self.first_failure
        file = re.sub(r"[^A-Za-z0-9.-]+", "-", f"{model}-{Path(kernel).name}") + ".safetensors"
        recording = _recording(file, place, inputs)
        folder.mkdir(parents=True, exist_ok=True)
        write_calls(folder / file, [(recording.call, recording.tensors())])
        recording.register()
        case = Case(problem=recording.problem())
        record = self._record(case, inputs.replace(problem=case.problem), result)
        failure = StoredFailure(
            id=short_id({"kernel": kernel, "device": self.device, "case": case.to_json()}),
            kernel=kernel,
            device=self.device,
            question=question_named(case.question).summary,
            record=replace(record, variant=recording.call.name),
            environment=environment(self.device),
        )
        keep_failure(failure, folder)
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
            id=failure.id,
            recording=file,
            again=again,
        )


def _recording(file: str, place: CallPlace, inputs: Inputs) -> Recording:
    """Return a call as a recording; a mask that is neither full nor causal becomes a table."""
    problem, kinds = inputs.problem, {"full": "none", "causal": "causal"}
    mask = None
    if problem.mask.name not in kinds:
        rows = torch.arange(problem.query)[:, None]
        first = rows.new_zeros(())
        mask = problem.mask_mod()(first, first, rows, torch.arange(problem.kv))[None, None]
    cap = None if problem.score == NONE else cast("float", problem.score.values["cap"])
    call = Call(
        name=f"{place.module}/{place.step}",
        **dataclasses.asdict(problem.sizes),
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
    """Return the relative distances of a run from the exact one, by phase and place."""
    distances: Distances = {}
    for phase, states in run.states.items():
        named_phase, logits = cast("Phase", phase), len(states) - 1
        for place, (one, true) in enumerate(zip(states, exact.states[phase], strict=True)):
            where = "logits" if place == logits else f"layer {place}"
            distances[named_phase, where] = float((one - true).norm() / true.norm())
        distances[named_phase, "KL"] = _divergence(states[logits], exact.states[phase][logits])
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
    """Return the mean over positions of KL(exact ‖ other), in nats."""
    true, other = exact.log_softmax(-1), logits.log_softmax(-1)
    return float((true.exp() * (true - other)).sum(-1).mean())


def _first_different_token(run: ModelRun, exact: ModelRun) -> int | None:
    """Return the first decoding step whose word differs from the exact model's, or None."""
    if run.tokens is None or exact.tokens is None:
        return None
    other = (run.tokens != exact.tokens).any(0).nonzero()
    return int(other[0]) if len(other) else None


def drift_chance(kernel: Distances, right: list[Distances]) -> float:
    """Return the chance that a right kernel drifts as far as ``kernel``, by its rank alone.

    Runs are ranked by the largest of their distances, each divided by its median over all runs
    including the kernel's, so that all ranks are equally likely if all runs are equally right.
    """
    concerned = [place for place in _RANKED_PLACES if place in kernel]
    every = [kernel, *right]
    medians = {place: statistics.median(one[place] for one in every) for place in concerned}

    def furthest(one: Distances) -> float:
        shares = (one[p] / medians[p] if medians[p] else float(one[p] > 0) for p in concerned)
        # NaN counts as infinitely far.
        return max((math.inf if math.isnan(share) else share for share in shares), default=0.0)

    distance_of_kernel = furthest(kernel)
    return (1 + sum(furthest(one) >= distance_of_kernel for one in right)) / (1 + len(right))


@dataclass(frozen=True, kw_only=True)
class _Baseline:
    """A model, its exact run, and the distances of its runs with right kernels."""

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
        """Return the Record of a run with its drift; calls are not judged here."""
        distances = _distances(run, self.exact)
        drifts = []
        for (phase, where), error in distances.items():
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
            chance=drift_chance(distances, self.right),
            diverges=_first_different_token(run, self.exact),
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
    comparisons: list[Subject],
    *,
    right: int,
    folder: Path,
    advance: Callable[[str], None] = lambda _: None,
) -> Iterator[ModelRecord]:
    """Yield the Record of each kernel in one model; kernels for comparison come last.

    Args:
        spec: As in ``make_model``.
        hosts: Kernels by the names that the user gave; each of their calls is judged.
        comparisons: Kernels whose drift is shown for comparison, if they take every call.
        right: Number of ideal kernels that they are compared with.
        folder: Where the first failing call of each kernel is stored.
        advance: Called after each run of the model with a description of the run.

    Raises:
        UsageError: if there is no such model, or its attention is not supported.
    """
    name = Path(spec).name
    try:
        baseline = _run_baseline(spec, name, size, right, advance)
    except Refused as error:
        raise UsageError(f"model {spec!r}: {error}.") from None
    for kernel, host in hosts.items():
        attend = _Kernel(
            subject=host.subject, executor=host.executor, device=size.device, judged=True
        )
        yield _judge_model(baseline, attend, kernel, size, folder)
        advance(f"{name} {kernel}")
    for subject in comparisons:
        attend = _Kernel(subject=subject, executor=InProcess(), device=size.device, judged=False)
        record = _run_with_kernel(baseline, attend, size, subject.name)
        yield replace(record, for_comparison=True, chance=None)
        advance(f"{name} {subject.name}")


def _run_baseline(
    spec: str, name: str, size: ModelSize, right: int, advance: Callable[[str], None]
) -> _Baseline:
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
    baseline = _Baseline(name=name, model=model, prompt=prompt, exact=exact, right=[], diverge=None)
    first: list[int] = []
    for tiling in right_tilings(size.length, right):
        ideal = Ideal(tiling)
        run = baseline.run(lambda _, inputs: ideal.run(inputs), size, backward=True)  # noqa: B023  # called at once
        baseline.right.append(_distances(run, exact))
        first += [] if (word := _first_different_token(run, exact)) is None else [word]
        advance(f"{name} ideal {tiling}")
    return dataclasses.replace(baseline, diverge=min(first, default=None))


def _run_with_kernel(
    baseline: _Baseline, attend: _Kernel, size: ModelSize, kernel: str, *, backward: bool = True
) -> ModelRecord:
    """Run the model with a kernel, without gradients if the kernel has no backward."""
    attend.calls.clear()
    attend.first_failure = None
    backward = backward and attend.subject.backward
    try:
        run = baseline.run(attend, size, backward=backward)
    except Refused as error:
        if backward:  # the kernel may take the forward only
            return _run_with_kernel(baseline, attend, size, kernel, backward=False)
        reason = str(error)
        return ModelRecord(model=baseline.name, kernel=kernel, status="unsupported", reason=reason)
    except _Stopped as error:
        status = attend.calls[-1][1].status if attend.calls else "error"
        reason = f"{error.place.module}, step {error.place.step}: {error.failure.message}"
        return ModelRecord(model=baseline.name, kernel=kernel, status=status, reason=reason)
    return baseline.record(run, kernel=kernel, status="pass")


def _judge_model(
    baseline: _Baseline, attend: _Kernel, kernel: str, size: ModelSize, folder: Path
) -> ModelRecord:
    record = _run_with_kernel(baseline, attend, size, kernel)
    by_layer = group_by(attend.calls, lambda call: call[0].layer)
    record = replace(record, calls=tuple(map(_layer_calls, by_layer.values())))
    fault = attend.keep(folder, model=baseline.name, kernel=kernel, length=size.length)
    if fault is not None:
        status = record.status if record.status in FAILED_STATUSES else "fail"
        return replace(record, status=status, reason=fault.reason, fault=fault)
    if record.status != "pass":
        return record
    doubts = Counter(one.status for _, one in attend.calls if one.status in UNTRUSTED_STATUSES)
    if doubts:
        status, count = doubts.most_common(1)[0]
        return replace(record, status=status, reason=f"{count} calls: {status}")
    if record.chance is not None and record.chance * (1 + len(baseline.right)) <= 1:
        reason = (
            f"further from exact than all {len(baseline.right)} right kernels, as a right one is "
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
    shares_with_bound = [share for share in shares if share is not None]
    return ModelCall(
        layer=calls[0][0].layer,
        module=calls[0][0].module,
        calls=len(calls),
        failed=sum(record.status in FAILED_STATUSES for _, record in calls),
        over_bound=max(shares_with_bound, default=None),
    )
