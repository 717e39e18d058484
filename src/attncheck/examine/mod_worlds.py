"""Does a mask or score mod mean the same in all worlds? Its callable, mpmath, and each kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from attncheck.errors import AttncheckError
from attncheck.examine import mod_probes
from attncheck.examine.executor import Executor, InProcess
from attncheck.examine.mod_probes import NoProbe, Scores
from attncheck.mods import in_file
from attncheck.mods.enclosures import Interval, Truth
from attncheck.mods.index_ranges import check_index_ranges
from attncheck.mods.spec import Dimensions
from attncheck.mods.to_interval import KERNEL_FP32, TORCH_FP64, to_interval
from attncheck.mods.to_mpmath import to_mpmath
from attncheck.mods.trace import trace_mask, trace_score
from attncheck.oracles.indices import Indices, scored, visible
from attncheck.source_files import brief, import_file

if TYPE_CHECKING:
    from collections.abc import Iterable

    from attncheck.mods.expression import Expression
    from attncheck.subjects.contract import Subject

__all__ = ["DIMENSIONS", "Difference", "ModWorlds", "World", "mpmath_world", "worlds"]

Status = Literal["equal", "different", "unknown", "unsupported", "error"]

DIMENSIONS = Dimensions(batch=2, heads=2, query=32, kv=40)
"""Few programs for an interpreter, but more than one block of keys, the last one short."""

_BITS = 160  # of mpmath: products of float64 numbers are exact


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place where a world differs.

    Attributes:
        b, h, q_idx, kv_idx: Where.
        value: What is there; of a mask 1 where the key is visible, else 0.
        low, high: What may be there.
    """

    b: int
    h: int
    q_idx: int
    kv_idx: int
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        allowed = f"{self.low!r}" if self.low == self.high else f"{self.low!r} … {self.high!r}"
        place = (self.b, self.h, self.q_idx, self.kv_idx)
        return f"(b, h, q_idx, kv_idx) = {place}: {self.value!r}, but should be {allowed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One world's meaning of a mod, compared.

    Attributes:
        name: ``mpmath``, or a kernel's.
        status: ``unknown`` where it differs nowhere, but somewhere nothing can be said (∞ − ∞).
        compared: How many index tuples.
        differing: At how many of them it differs.
        difference: The first; None where there is none.
        reason: Why it is unsupported, or what went wrong, in one line.
    """

    name: str
    status: Status
    compared: int = 0
    differing: int = 0
    difference: Difference | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModWorlds:
    """A mod in all worlds.

    Attributes:
        name: Its name.
        kind: ``mask`` or ``score mod``.
        expression: What was traced; empty where it cannot be.
        worlds: In the order asked; none where it cannot be traced.
        reason: Why it cannot be traced, or indexes outside a tensor, in one line.
    """

    name: str
    kind: str
    expression: str = ""
    worlds: tuple[World, ...] = ()
    reason: str = ""

    @property
    def agree(self) -> bool:
        """Whether it was traced, and no world that takes it differs or fails."""
        return not self.reason and all(w.status in {"equal", "unsupported"} for w in self.worlds)


def worlds(
    mods: str | Path | Mapping[str, Callable[..., Any]],
    subjects: Iterable[Subject] = (),
    *,
    device: str = "cpu",
    dimensions: Dimensions = DIMENSIONS,
    executor: Executor | None = None,
) -> list[ModWorlds]:
    """Each mod on every index tuple: its callable in float64, on mpmath numbers, in each kernel.

    A mask must be the same everywhere. A score must lie in the interval of the roundings that an
    evaluation of the traced expression may make: in float64 for the callable, in fp32 for a kernel,
    whose mod is read out of its own results (``mod_probes``).

    Args:
        mods: Callables by name, their tensors on ``device``; or a Python file, imported with
            tensors on ``device``.
        subjects: Kernels.
        device: ``cpu`` or ``cuda``.
        dimensions: The index ranges.
        executor: How to call kernels; in this process by default.

    Raises:
        UsageError: for a file that cannot be imported. What is wrong with one mod is in its result.
    """
    if not isinstance(mods, Mapping):
        path = Path(mods)
        with torch.device(device):
            mods = in_file.mods_in(import_file(path, f"mods of {str(path)!r}"))
    examination = _Examination(dimensions, device, executor or InProcess(), tuple(subjects))
    return [examination.of(name, mod) for name, mod in mods.items()]


def mpmath_world(
    expression: Expression,
    mod: Callable[..., Any],
    dimensions: Dimensions,
    device: str = "cpu",
    scores: Scores | None = None,
) -> World:
    """The callable in float64 and the expression on mpmath numbers, on every index tuple.

    Args:
        expression: What should be ``mod``.
        mod: The callable.
        dimensions: The index ranges.
        device: Where its tensors are.
        scores: What a score mod gets (default: the same as for kernels).
    """
    import mpmath  # type: ignore[import-untyped]  # mpmath ships no types

    context = mpmath.MPContext()
    context.prec = _BITS
    exactly, indices = to_mpmath(expression, context), _indices(dimensions, "cpu")
    on_device = _indices(dimensions, device)
    axes = [axis.numpy() for axis in indices.axes]
    if expression.structure.inputs[0] != "score":
        shown = visible(mod, on_device).expand(indices.shape).cpu().numpy()
        meant = exactly(*axes)
        return _of_mask("mpmath", shown.astype(float), Truth(meant, ~meant))
    given = (scores or Scores.drawn(dimensions)).scores
    value = scored(mod, given.to(device), on_device).detach().cpu().numpy()
    allowed = to_interval(expression, TORCH_FP64)(given.numpy(), *axes)
    assert isinstance(allowed, Interval)
    callable_in = _of_score("mpmath", value, allowed)
    if callable_in.status == "different":
        return callable_in
    # What rounding to float64 moves it is no more than the last operation's own rounding.
    meant = np.broadcast_to(exactly(given.numpy(), *axes).astype(float), value.shape)
    mpmath_in = _of_score("mpmath", meant, allowed)
    return mpmath_in if mpmath_in.status == "different" else callable_in


@dataclass(frozen=True, slots=True)
class _Examination:
    dimensions: Dimensions
    device: str
    executor: Executor
    subjects: tuple[Subject, ...]

    def of(self, name: str, mod: Callable[..., Any]) -> ModWorlds:
        """One mod in all worlds."""
        kind = in_file.kind_of_mod(mod)
        if kind is None:
            takes = "(b, h, q_idx, kv_idx) or (score, b, h, q_idx, kv_idx)"
            return ModWorlds(name=name, kind="", reason=f"{name!r} does not take {takes}.")
        trace = trace_mask if kind == "mask" else trace_score
        try:
            expression = trace(mod, self.device)
            check_index_ranges(expression, self.dimensions, f"{kind} {name!r}")
        except AttncheckError as error:
            return ModWorlds(name=name, kind=kind, reason=str(error))
        found = [self._world(s, name, expression, mod) for s in (None, *self.subjects)]
        return ModWorlds(name=name, kind=kind, expression=str(expression), worlds=tuple(found))

    def _world(
        self, subject: Subject | None, of: str, expression: Expression, mod: Callable[..., Any]
    ) -> World:
        """The kernel's, or mpmath's."""
        name = "mpmath" if subject is None else subject.name
        try:
            if subject is None:
                return mpmath_world(expression, mod, self.dimensions, self.device)
            return self._kernel(subject, of, expression, mod)
        except NoProbe as no:
            return World(name=name, status=no.status, reason=str(no))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  (somebody's callable: SystemExit, too)
            return World(name=name, status="error", reason=brief(error))

    def _kernel(
        self, subject: Subject, of: str, expression: Expression, mod: Callable[..., Any]
    ) -> World:
        axes = [axis.numpy() for axis in _indices(self.dimensions, "cpu").axes]
        where = (self.dimensions, self.device, self.executor)
        function = to_interval(expression, KERNEL_FP32)
        if expression.structure.inputs[0] != "score":
            allowed = function(*axes)
            assert isinstance(allowed, Truth)
            return _of_mask(
                subject.name, mod_probes.applied_mask(subject, of, mod, *where), allowed
            )
        drawn = Scores.drawn(self.dimensions)
        scores = function(drawn.scores.numpy(), *axes)
        assert isinstance(scores, Interval)
        value = mod_probes.applied_score(subject, of, mod, drawn, *where)
        return _of_score(subject.name, value, mod_probes.as_lse(scores))


def _indices(dimensions: Dimensions, device: str) -> Indices:
    sizes = (dimensions.batch, dimensions.heads, dimensions.query, dimensions.kv)
    b, h, query, kv = (range(size) for size in sizes)
    return Indices.of(b, h, query, kv, device)


def _of_mask(name: str, weights: Any, allowed: Truth) -> World:
    """A world that gives positive ``weights`` to visible keys and 0 to others."""
    shows = weights > 0
    yes, no = (np.broadcast_to(a, shows.shape) for a in (allowed.yes, allowed.no))
    wrong = np.where(shows, ~yes, ~no) | ~np.isfinite(weights)
    values = np.where(np.isfinite(weights), shows.astype(float), weights)
    return _world(name, wrong, values, (~no).astype(float), yes.astype(float))


def _of_score(name: str, values: Any, allowed: Interval) -> World:
    low, high = (np.broadcast_to(bound, values.shape) for bound in allowed.bounds())
    unknown = np.broadcast_to(allowed.unknown(), values.shape)
    inside = (low <= values) & (values <= high)
    world = _world(name, ~inside & ~unknown, values, low, high)
    if world.status == "equal" and unknown.any():
        reason = f"nothing can be said at {int(unknown.sum())} places, where it may be NaN"
        return World(name=name, status="unknown", compared=world.compared, reason=reason)
    return world


def _world(name: str, wrong: Any, values: Any, low: Any, high: Any) -> World:
    differing = int(wrong.sum())
    if not differing:
        return World(name=name, status="equal", compared=wrong.size)
    first = tuple(int(i) for i in np.argwhere(wrong)[0])
    b, h, q_idx, kv_idx = first
    value, least, most = (float(a[first]) for a in (values, low, high))
    difference = Difference(b=b, h=h, q_idx=q_idx, kv_idx=kv_idx, value=value, low=least, high=most)
    return World(
        name=name,
        status="different",
        compared=wrong.size,
        differing=differing,
        difference=difference,
    )
