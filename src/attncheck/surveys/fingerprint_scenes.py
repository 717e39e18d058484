"""Scenes: inputs whose outputs reveal a property of a kernel's arithmetic, and their runner.

Logits are in log2 units throughout: the Problem's scale is ln 2, rounded to fp32, whose product
with log2 e rounds to exactly 1. If q·k is an integer, the weight is a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from attncheck.core.declared_arithmetic import Arithmetic
from attncheck.core.errors import ProblemError
from attncheck.core.formats import dtype_named, fp32, round_to
from attncheck.core.mod_spec import FULL, Spec
from attncheck.inputs.input_tensors import Descale, Inputs
from attncheck.inputs.problem import Problem
from attncheck.subjects.capabilities.subject import Subject, Tiling
from attncheck.verify.call_checks import Unanswered
from attncheck.verify.executor import Executor, Failure
from attncheck.verify.question_fit import adapted_problems

LN2 = fp32(math.log(2.0))
ROWS, KEYS, DIM = 128, 128, 64
GROUP = 16
"""Period of patterns, in keys: no kernel's tile is smaller, and each group has its maximum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The Problem and the numbers of one call; all sequences have the same numbers."""

    problem: Problem
    q: torch.Tensor  # Float64 ``(heads, query, dim)``; k and v are float64 too
    k: torch.Tensor  # ``(heads, kv, dim)``
    v: torch.Tensor  # ``(heads, kv, dim)``

    def inputs(self, device: str = "cpu") -> Inputs:
        """Return the inputs of a kernel; raises ProblemError if the dtype cannot hold them."""
        fmt = self.problem.formats.storage
        tensors, scales = {}, {}
        for name in ("q", "k", "v"):
            values = getattr(self, name)
            if self.problem.formats.scaled:
                # Scale to the format's largest binade, so that small numbers do not underflow.
                scale = _descale(values, fmt.max)
                values = values / scale[:, None, None]
                scales[name] = scale.float().expand(self.problem.batch, -1).contiguous()
            # Rounding the inputs would be mistaken for rounding in the kernel.
            if not torch.equal(round_to(values, fmt), values):
                raise ProblemError(f"{name} of this scene are not numbers of {fmt.name}.")
            batch = values.expand(self.problem.batch, -1, -1, -1)
            tensors[name] = batch.to(fmt.torch_dtype).contiguous()
        descale = Descale(**scales) if scales else None
        return Inputs(problem=self.problem, **tensors, descale=descale).to(device)


def make_scene(
    dtype: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Spec = FULL,
    scale: float = LN2,
    batch: int = 1,
) -> Scene:
    """Return a Scene of float64 ``(heads, length, dim)``; raises ProblemError if it is invalid."""
    problem = Problem(
        batch=batch,
        heads=q.shape[0],
        query=q.shape[1],
        kv=k.shape[1],
        head_dim=q.shape[2],
        value_dim=v.shape[2],
        dtype=dtype_named(dtype).name,
        mask=mask,
        scale=scale,
    )
    return Scene(problem=problem, q=q, k=k, v=v)


def blank_inputs(
    heads: int = 1, kv: int = KEYS, query: int = ROWS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return zeros for q, k and v, float64 ``(heads, length, DIM)``."""
    shapes = ((heads, query, DIM), (heads, kv, DIM), (heads, kv, DIM))
    q, k, v = (torch.zeros(shape, dtype=torch.float64) for shape in shapes)
    return q, k, v


def repeat_elements(offset: int, kv: int = KEYS) -> list[int]:
    """Return the keys at ``offset`` in each group."""
    return list(range(offset, kv, GROUP))


def _descale(values: torch.Tensor, top: float) -> torch.Tensor:
    """Return powers of two ``(heads,)`` that scale each head's maximum to the largest binade."""
    largest = values.abs().amax((1, 2))
    _, exponent = torch.frexp(torch.where(largest == 0, 1.0, largest))
    scale = torch.pow(2.0, (exponent - 1 - math.floor(math.log2(top))).double())
    return torch.where(largest / scale > top, 2 * scale, scale)  # e4m3 ends at 1.75 · 2^8


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneResult:
    """Outputs of a kernel on a scene, on the CPU, with what it declares."""

    out: torch.Tensor  # Float64 ``(heads, query, dim)`` of the first sequence
    lse: torch.Tensor | None  # Float64 ``(heads, query)``; None if the kernel gives no LSE
    arithmetic: Arithmetic
    tiling: Tiling | None


@dataclass(slots=True, kw_only=True)
class SceneRunner:
    """One kernel in one dtype, and how it is called."""

    subject: Subject
    dtype: str
    device: str
    executor: Executor
    calls: int = field(default=0, init=False)  # number of scenes that the kernel has answered

    def run_finite(self, scene: Scene) -> SceneResult:
        """Run a scene; raises Unanswered also if any element of out is not finite."""
        result = self.run(scene)
        if not bool(result.out.isfinite().all()):
            raise Unanswered(Failure(kind="error", message="its outputs are not finite"))
        return result

    def run(self, scene: Scene) -> SceneResult:
        """Run a scene; raises Unanswered if the kernel refuses it or fails."""
        scene = self._adapt(scene)
        try:
            inputs = scene.inputs(self.device)
        except ProblemError as error:
            raise Unanswered(Failure(kind="refused", message=str(error))) from None
        result = self.executor.run(self.subject, inputs)
        if isinstance(result, Failure):
            raise Unanswered(result)
        self.calls += 1
        outputs = result.outputs
        return SceneResult(
            out=outputs.out[0].double().cpu(),
            lse=None if outputs.lse is None else outputs.lse[0].double().cpu(),
            arithmetic=result.arithmetic,
            tiling=result.tiling,
        )

    def _adapt(self, scene: Scene) -> Scene:
        """Return ``scene``, in pages if the kernel needs them; raises Unanswered if it refuses."""
        problems = adapted_problems(self.subject, scene.problem, self.executor)
        if not self.executor.concerns(self.subject, problems[0]):
            raise Unanswered(Failure(kind="refused", message="the kernel is for other problems"))
        first: Failure | None = None
        for problem in problems:
            refusal = self.executor.refusal(self.subject, problem, self.device)
            if not refusal:
                return replace(scene, problem=problem)
            first = first or refusal
        assert first is not None, "there is a problem at least"
        raise Unanswered(first)


# ------------------------------------------------------------------ grids of bits

STEPS = 8  # The numbers x = 0 … 7 are added to 2^b or 1.5 · 2^b.


@dataclass(frozen=True, slots=True, order=True)
class Grid:
    """The numbers that a sum or an operand can hold, found by comparing results for equality."""

    bits: int  # significant bits
    rounding: str = ""  # ``nearest`` (ties to even), ``truncated``; empty if nothing was rounded

    def __str__(self) -> str:
        return f"{self.bits} bits" + (f", {self.rounding}" if self.rounding else "")


def read_grid(results: Sequence[float], b: int) -> Grid | None:
    """Return the grid to which 2^b + x is rounded, for x = 0, 1, … in turn.

    Args:
        results: The result for each x; two are equal exactly if both sums were held as one number.
        b: Binary exponent of the number that x was added to.

    Returns:
        None if all results differ, all are equal, or no grid gives this pattern.
    """
    classes = _first_equal_places(results)
    rounded: dict[str, Callable[[int, int], int]] = {
        "nearest": lambda x, spacing: round(x / spacing) * spacing,  # Python's ties go to even
        "down": lambda x, spacing: x // spacing * spacing,
        "up": lambda x, spacing: -(-x // spacing) * spacing,
    }
    # A grid coarser than 8 would hold only one of the eight numbers.
    for spacing in (2, 4, 8):
        for rounding, to_grid in rounded.items():
            numbers = [to_grid(x, spacing) for x in range(len(results))]
            if _first_equal_places(numbers) == classes and len(set(numbers)) > 1:
                bits = b + 1 - int(math.log2(spacing))
                return Grid(bits, "nearest" if rounding == "nearest" else "truncated")
    return None


def _first_equal_places(values: Sequence[float]) -> tuple[int, ...]:
    """Return for each value the index of the first value that equals it."""
    return tuple(list(values).index(value) for value in values)


def coarsest(ladder: Iterable[tuple[int, Sequence[float]]]) -> Grid | None:
    """Return the coarsest grid that shows for a series of exponents b.

    Args:
        ladder: Pairs (b, result for each x).

    Returns:
        No rounding if all x were held at every b (its bits are a lower bound); None if unknown.
    """
    grids: list[Grid] = []
    most = 0
    for b, results in ladder:
        if not all(map(math.isfinite, results)):
            continue
        if len(set(results)) == len(results):  # every x was held
            most = max(most, b + 1)
        grid = read_grid(results, b)
        if grid is not None:
            grids.append(grid)
    if grids:
        return min(grids)
    return Grid(most) if most else None
