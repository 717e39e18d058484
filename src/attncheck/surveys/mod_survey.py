"""Compare every mod of a file in every backend that evaluates it: one ModReport.

Backends are the mod's callable in float64, its traced expression on mpmath numbers, and each
kernel, whose mod is derived from its own results (``applied_mods``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch

from attncheck.core.errors import AttncheckError, ProblemError, UsageError
from attncheck.core.mod_spec import Dimensions, Spec
from attncheck.core.source_files import error_line, import_file, load_attribute
from attncheck.inputs.problem import Problem
from attncheck.mods.expression import Expression
from attncheck.mods.index_ranges import check_index_ranges
from attncheck.mods.mod_files import (
    definition_line,
    kind_of_mod,
    load_mask,
    load_score,
    mods_in,
)
from attncheck.mods.mpmath_algebra import to_mpmath
from attncheck.mods.operation_errors import KERNEL_FP32, TORCH_FP64, Arithmetic
from attncheck.mods.running_error import RunningError, undecided
from attncheck.mods.trace import trace_mask, trace_score
from attncheck.oracles.mod_calls import Indices, call_mask, call_score_mod
from attncheck.records.survey_reports import ModAnswer, ModRecord, ModReport
from attncheck.subjects.capabilities.subject import Subject
from attncheck.surveys.applied_mods import (
    NotMeasurable,
    ScoreInputs,
    applied_mask,
    applied_score,
    lse_radius,
)
from attncheck.verify.environment import environment
from attncheck.verify.executor import InProcess
from attncheck.verify.isolated import RemoteSubject
from attncheck.verify.kernel_hosts import executor_of

DIMENSIONS = Dimensions(batch=2, heads=2, query=32, kv=40)
"""Small for an interpreter, but more than one block of keys, the last one partial."""

MOST_PLACES = 2**20  # Limit on index tuples per comparison; mpmath evaluates each of them.

_BITS = 160  # Precision of mpmath, in which products of float64 numbers are exact.
_TAKES = "(b, h, q_idx, kv_idx) or (score, b, h, q_idx, kv_idx)"


class Difference(NamedTuple):
    """The first place where a backend differs."""

    b: int
    h: int
    q_idx: int
    kv_idx: int
    value: float  # the backend's value; for a mask 1 if the key is visible, else 0
    low: float  # smallest allowed value
    high: float  # largest allowed value

    def __str__(self) -> str:
        allowed = f"{self.low!r}" if self.low == self.high else f"{self.low!r} … {self.high!r}"
        return f"(b, h, q_idx, kv_idx) = {self[:4]}: {self.value!r}, but should be {allowed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """The result of comparing a mod in one backend."""

    name: str  # ``mpmath``, or the kernel's name
    # ``unknown`` if no value differs, but some cannot be judged (∞ − ∞).
    status: Literal["equal", "different", "unknown", "unsupported", "error"]
    compared: int = 0  # number of index tuples
    differing: int = 0  # number of index tuples at which it differs
    difference: Difference | None = None  # the first difference, or None
    reason: str = ""  # why it is unsupported, or the error, in one line


# ------------------------------------------------------------------ one mod in all backends


def compare_backends(
    name: str,
    mod: Callable[..., Any],
    subjects: Iterable[Subject] = (),
    *,
    device: str = "cpu",
    dimensions: Dimensions = DIMENSIONS,
    path: str = "",
) -> tuple[Expression, list[Backend]]:
    """Compare a mod on every index tuple: its callable, mpmath, and each kernel.

    Masks must be equal. A score may be off by the rounding errors of an evaluation of the traced
    expression: in float64 for the callable, in fp32 for a kernel.

    Args:
        mod: The callable, whose tensors are on ``device``.
        path: The mod's file, which kernels in other processes have loaded too.

    Returns:
        The traced expression, and the results for mpmath and each kernel.

    Raises:
        AttncheckError: if the mod cannot be traced, or indexes outside a tensor.
    """
    if kind_of_mod(mod) is None:
        raise UsageError(f"{name!r} does not take {_TAKES}.")
    expression = _trace_checked(name, mod, dimensions, device)
    where = (dimensions, device, path)
    return expression, [_backend(each, name, expression, mod, *where) for each in (None, *subjects)]


def _trace_checked(
    name: str, mod: Callable[..., Any], dimensions: Dimensions, device: str
) -> Expression:
    """Trace a mod; raises AttncheckError if that fails or it indexes outside a tensor."""
    kind = kind_of_mod(mod)
    expression = (trace_mask if kind == "mask" else trace_score)(mod, device)
    # Beyond a tensor's end torch raises an error, but a kernel reads other memory.
    check_index_ranges(expression, dimensions, f"{kind} {name!r}")
    return expression


def _backend(
    kernel: Subject | None,
    mod_name: str,
    expression: Expression,
    mod: Callable[..., Any],
    dimensions: Dimensions,
    device: str,
    path: str,
) -> Backend:
    """Return the comparison for a kernel, or for mpmath if it is None; never raises."""
    name = "mpmath" if kernel is None else kernel.name
    try:
        if kernel is None:
            return mpmath_backend(expression, mod, dimensions, device)
        # The allowed values are computed on the CPU, wherever the kernel runs.
        indices = _indices(dimensions, "cpu")
        where = (dimensions, device, executor_of(kernel))
        spec = None
        if isinstance(kernel, RemoteSubject):  # its process has loaded the file too
            load = load_mask if kind_of_mod(mod) == "mask" else load_score
            spec = load(f"{path}::{mod_name}")
        if expression.structure.inputs[0] != "score":
            visible_keys = expression.evaluate(*indices.axes)
            either = undecided(expression, *indices.axes)
            weights = applied_mask(kernel, mod_name, mod, *where, spec)
            return _compare_mask(name, weights, visible_keys.numpy(), either.numpy())
        inputs = ScoreInputs.draw(dimensions)
        scores, radius = _score_and_radius(expression, KERNEL_FP32, inputs.scores, indices)
        values = applied_score(kernel, mod_name, mod, inputs, *where, spec)
        return _compare_score(name, values, scores, lse_radius(scores, radius))
    except NotMeasurable as reason:
        return Backend(name=name, status=reason.status, reason=str(reason))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  (somebody's callable: SystemExit, too)
        return Backend(name=name, status="error", reason=error_line(error))


def mpmath_backend(
    expression: Expression,
    mod: Callable[..., Any],
    dimensions: Dimensions,
    device: str = "cpu",
) -> Backend:
    """Compare the callable in float64 and the expression on mpmath numbers, on every index tuple.

    Args:
        device: The device of the mod's tensors.
    """
    import mpmath

    # A separate context, so that mpmath's global precision does not change.
    context = mpmath.MPContext()
    context.prec = _BITS
    evaluate_exactly, indices = to_mpmath(expression, context), _indices(dimensions, "cpu")
    on_device = _indices(dimensions, device)
    axes = [axis.numpy() for axis in indices.axes]
    if expression.structure.inputs[0] != "score":
        visible = call_mask(mod, on_device).expand(indices.shape).cpu().numpy()
        expected = evaluate_exactly(*axes)
        return _compare_mask("mpmath", visible.astype(float), expected)
    inputs = ScoreInputs.draw(dimensions).scores
    value = call_score_mod(mod, inputs.to(device), on_device).detach().cpu().numpy()
    allowed = _score_and_radius(expression, TORCH_FP64, inputs, indices)
    in_torch = _compare_score("mpmath", value, *allowed)
    # A difference of the callable in torch takes precedence.
    if in_torch.status == "different":
        return in_torch
    # Rounding mpmath's value to float64 adds no more than the last operation's rounding error.
    rounded = np.broadcast_to(evaluate_exactly(inputs.numpy(), *axes).astype(float), value.shape)
    in_mpmath = _compare_score("mpmath", rounded, *allowed)
    return in_mpmath if in_mpmath.status == "different" else in_torch


def _indices(dimensions: Dimensions, device: str) -> Indices:
    sizes = (dimensions.batch, dimensions.heads, dimensions.query, dimensions.kv)
    b, h, query, kv = (range(size) for size in sizes)
    return Indices.of(b, h, query, kv, device)


def _score_and_radius(
    expression: Expression, arithmetic: Arithmetic, scores: torch.Tensor, indices: Indices
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the score mod of ``scores``, and the error bound of an evaluation of it."""
    analysis = RunningError(expression, arithmetic=arithmetic, of_reals=True)
    errors = analysis.at(scores, torch.zeros_like(scores), *indices.axes)
    return expression.evaluate(scores, *indices.axes).double(), errors.own


def _compare_mask(name: str, weights: Any, visible: Any, either: Any = 0) -> Backend:
    """Compare ``weights``, positive for visible keys and 0 for others, with ``visible``.

    Args:
        either: True where visible and hidden are both right.
    """
    shows = weights > 0
    shown, hidden = (np.broadcast_to((a | either) != 0, shows.shape) for a in (visible, ~visible))
    wrong = np.where(shows, ~shown, ~hidden) | ~np.isfinite(weights)
    values = np.where(np.isfinite(weights), shows.astype(float), weights)
    return _compare(name, wrong, values, (~hidden).astype(float), shown.astype(float))


def _compare_score(name: str, values: Any, scores: torch.Tensor, radius: torch.Tensor) -> Backend:
    limits = ((scores + side * radius).numpy() for side in (-1, 1))
    low, high = (np.broadcast_to(end, values.shape) for end in limits)
    # For a score of +∞ any value is allowed, because the row has no finite sum.
    unknown = np.broadcast_to((~(scores < math.inf) | radius.isinf()).numpy(), values.shape)
    # NaN is in no interval, so that it differs unless the place is unknown.
    inside = (low <= values) & (values <= high)
    backend = _compare(name, ~inside & ~unknown, values, low, high)
    if backend.status == "equal" and unknown.any():
        reason = f"nothing can be said at {int(unknown.sum())} places, where it may be NaN"
        return Backend(name=name, status="unknown", compared=backend.compared, reason=reason)
    return backend


def _compare(name: str, wrong: Any, values: Any, low: Any, high: Any) -> Backend:
    differing = int(wrong.sum())
    if not differing:
        return Backend(name=name, status="equal", compared=wrong.size)
    first = tuple(int(i) for i in np.argwhere(wrong)[0])
    return Backend(
        name=name,
        status="different",
        compared=wrong.size,
        differing=differing,
        difference=Difference(*first, *(float(a[first]) for a in (values, low, high))),
    )


# ------------------------------------------------------------------ a file's mods


def survey_mods(
    mods: Mapping[str, Callable[..., Any]],
    subjects: Sequence[Subject],
    *,
    file: str,
    dimensions: Dimensions,
    device: str,
    command: str,
    done: Callable[[str], None] = lambda _: None,
    path: str = "",
) -> ModReport:
    """Return a report on each mod's callable in mpmath and in each kernel.

    Args:
        mods: Name → mod; report those in ``refusals`` as a usage error before calling this.
        done: Called with the name of each mod when it is done.
        path: As in ``compare_backends``.
    """
    records = []
    for name, mod in mods.items():
        expression, backends = compare_backends(
            name, mod, subjects, device=device, dimensions=dimensions, path=path
        )
        records.append(
            ModRecord(
                name=name,
                kind=cast("Any", kind_of_mod(mod)),
                line=definition_line(mod),
                expression=str(expression),
                answers={each.name: _answer(each) for each in backends},
            )
        )
        done(name)
    sizes = (dimensions.batch, dimensions.heads, dimensions.query, dimensions.kv)
    return ModReport(
        command=command,
        environment=environment(device),
        mpmath=metadata.version("mpmath"),
        file=file,
        shape=" ".join(f"{axis}{size}" for axis, size in zip("BHQK", sizes, strict=True)),
        backends={"mpmath": f"{_BITS} bits"} | {s.name: s.summary for s in subjects},
        records=tuple(records),
    )


def _answer(backend: Backend) -> ModAnswer:
    detail = backend.reason
    if backend.difference is not None:
        places = f"{backend.differing} of {backend.compared} places"
        detail = f"{places}, first {backend.difference}"
    return ModAnswer(status=backend.status, detail=detail)


_SIZE = r"([1-9]\d{0,8})"
_SHAPE = re.compile(f"{_SIZE}x{_SIZE}x{_SIZE}(?:/{_SIZE})?")


def dimensions_of(shape: str) -> Dimensions:
    """Return the index ranges ``BxHxL`` or ``BxHxQUERY/KV``; raises ProblemError for others."""
    match = _SHAPE.fullmatch(shape.strip().lower())
    if not match:
        raise ProblemError(
            f"shape {shape!r} is not BATCHxHEADSxLENGTH, with /KV after LENGTH, such as 2x2x40/48."
        )
    batch, heads, query, kv = (int(size) for size in match.groups(match[3]))
    places = batch * heads * query * kv
    if places > MOST_PLACES:
        raise ProblemError(
            f"shape {shape!r} has {places} places (b, h, q_idx, kv_idx): at most {MOST_PLACES} are "
            "compared."
        )
    return Dimensions(batch=batch, heads=heads, query=query, kv=kv)


def mods_of_file(reference: str, device: str) -> dict[str, Callable[..., Any]]:
    """Return the mods of ``FILE.py``, or the one of ``FILE.py::NAME``, their tensors on ``device``.

    Raises:
        UsageError: for a file that cannot be imported or has no mod, or a name that is no mod.
    """
    file, separator, name = reference.partition("::")
    what = f"mods of {reference!r}"
    if not file or (separator and not name):
        missing = "name after '::'" if file else "file"
        raise UsageError(f"{what}: there is no {missing}: give FILE.py or FILE.py::NAME.")
    with torch.device(device):
        module = import_file(Path(file), what)
    if not name:
        mods = mods_in(module)
        if not mods:
            raise UsageError(f"{what}: there are none: a mod is a public name that takes {_TAKES}.")
        return mods
    mod = load_attribute(module, Path(file), name, what)
    if kind_of_mod(mod) is None:
        raise UsageError(f"{what}: {name!r} is no mod: it does not take {_TAKES}.")
    return {name: mod}


def refusals(
    mods: Mapping[str, Callable[..., Any]], file: str, dimensions: Dimensions, device: str
) -> list[str]:
    """Return a line for each mod that cannot be compared, with its place, name and the reason.

    Args:
        dimensions: The index ranges, which must not lead outside a captured tensor.
        device: The device of the tensors that the mods capture.
    """
    reasons = []
    for name, mod in mods.items():
        try:
            _trace_checked(name, mod, dimensions, device)
        except AttncheckError as error:
            line = definition_line(mod)
            place = f"{file}:{line}" if line else file
            reasons.append(f"{place}: {name}: {error}")
    return reasons


def concerns_mods(subject: Subject) -> bool:
    """Return whether mods concern a kernel; they do not concern a softmax."""
    return executor_of(subject).concerns(subject, Problem(query=16, head_dim=16, dtype="fp32"))


def takes_any_mod(subject: Subject, device: str) -> bool:
    """Return whether a kernel takes any mask and score mod in fp32, so that it is a default."""
    problem = Problem(
        query=16,
        head_dim=16,
        dtype="fp32",
        # A mask that no flag or window can express.
        mask=Spec.of("expression", text="(q_idx + kv_idx) % 2 == 0"),
        score=Spec.of("softcap", cap=1.0),
    )
    executor = InProcess()
    return executor.concerns(subject, problem) and not executor.refusal(subject, problem, device)
