"""Inputs from which a number of a kernel's arithmetic can be read, and how they are run.

Logits are in log2 units throughout: the Problem's scale is ln 2, rounded to fp32, whose product
with log2 e rounds to 1 exactly. q·k of a whole number is a weight that is a power of two.
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
"""Keys after which a pattern begins anew: no kernel's tile is smaller, and each has its maximum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Numbers of one call."""

    problem: Problem  # what is computed
    q: torch.Tensor  # Float64 ``(heads, query, dim)``, alike in every sequence; k and v so too
    k: torch.Tensor  # ``(heads, kv, dim)``
    v: torch.Tensor  # ``(heads, kv, dim)``

    def inputs(self, device: str = "cpu") -> Inputs:
        """Return them as a kernel reads them; raises ProblemError where the dtype cannot."""
        fmt = self.problem.formats.storage
        tensors, scales = {}, {}
        for name in ("q", "k", "v"):
            values = getattr(self, name)
            if self.problem.formats.scaled:
                # To the largest binade of the format: the smallest numbers of the scene survive.
                scale = _descale(values, fmt.max)
                values = values / scale[:, None, None]
                scales[name] = scale.float().expand(self.problem.batch, -1).contiguous()
            # A scene that is rounded on the way in would be read as the kernel's rounding.
            if not torch.equal(round_to(values, fmt), values):
                raise ProblemError(f"{name} of this scene are not numbers of {fmt.name}.")
            batch = values.expand(self.problem.batch, -1, -1, -1)
            tensors[name] = batch.to(fmt.torch_dtype).contiguous()
        descale = Descale(**scales) if scales else None
        return Inputs(problem=self.problem, **tensors, descale=descale).to(device)


def make_scene(  # q, k and v, and what a Problem has besides
    dtype: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Spec = FULL,
    scale: float = LN2,
    batch: int = 1,
) -> Scene:
    """A Scene of float64 ``(heads, length, dim)``; raises ProblemError for what cannot be."""
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
    """Zeros for q, k and v."""
    shapes = ((heads, query, DIM), (heads, kv, DIM), (heads, kv, DIM))
    q, k, v = (torch.zeros(shape, dtype=torch.float64) for shape in shapes)
    return q, k, v


def repeat_elements(offset: int, kv: int = KEYS) -> list[int]:
    """The keys at ``offset`` of each group."""
    return list(range(offset, kv, GROUP))


def _descale(values: torch.Tensor, top: float) -> torch.Tensor:
    """Powers of two ``(heads,)`` that bring the largest number to the format's largest binade."""
    largest = values.abs().amax((1, 2))
    _, exponent = torch.frexp(torch.where(largest == 0, 1.0, largest))
    scale = torch.pow(2.0, (exponent - 1 - math.floor(math.log2(top))).double())
    return torch.where(largest / scale > top, 2 * scale, scale)  # e4m3 ends at 1.75 · 2^8


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneResult:
    """Outputs of a kernel on a scene, on the CPU."""

    out: torch.Tensor  # Float64 ``(heads, query, dim)`` of the first sequence
    lse: torch.Tensor | None  # Float64 ``(heads, query)``; None where it gives none
    arithmetic: Arithmetic
    tiling: Tiling | None


@dataclass(slots=True, kw_only=True)
class SceneRunner:
    """One kernel in one dtype, and how it is called."""

    subject: Subject
    dtype: str
    device: str
    executor: Executor
    calls: int = field(default=0, init=False)  # how many scenes it has answered

    def run_finite(self, scene: Scene) -> SceneResult:
        """Run a scene; raises Unanswered also where something of out is not finite."""
        result = self.run(scene)
        if not bool(result.out.isfinite().all()):
            raise Unanswered(Failure(kind="error", message="its outputs are not finite"))
        return result

    def run(self, scene: Scene) -> SceneResult:
        """Run a scene; raises Unanswered where the kernel does not take it, or fails."""
        scene = self._adapted(scene)
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

    def _adapted(self, scene: Scene) -> Scene:
        """``scene``, in pages for a kernel that takes no others; raises Unanswered for none."""
        problems = adapted_problems(self.subject, scene.problem, self.executor)
        if not self.executor.concerns(self.subject, problems[0]):
            raise Unanswered(Failure(kind="refused", message="the kernel is for other problems"))
        first: Failure | None = None
        for problem in problems:
            refusal = self.executor.refusal(self.subject, problem, self.device)
            if not refusal:
                return replace(scene, problem=problem)
            if isinstance(refusal, str):
                refusal = Failure(kind="refused", message=refusal)
            first = first or refusal
        assert first is not None, "there is a problem at least"
        raise Unanswered(first)


# ------------------------------------------------------------------ grids of bits

STEPS = 8  # numbers 0 … 7 that are added to 2^b or 1.5 · 2^b


@dataclass(frozen=True, slots=True, order=True)
class Grid:
    """Numbers that a sum or an operand is held in, told apart by equality alone."""

    bits: int  # significant ones
    rounding: str = ""  # ``nearest`` (ties to even), ``truncated``; empty where nothing was rounded

    def __str__(self) -> str:
        return f"{self.bits} bits" + (f", {self.rounding}" if self.rounding else "")


def read_grid(results: Sequence[float], b: int) -> Grid | None:
    """The grid of numbers that hold 2^b + x, for x = 0, 1, … in turn.

    Args:
        results: What came of each x: equal exactly where x was held as the same number.
        b: Binary exponent of what x was added to.

    Returns:
        None where all are held, where all are the same, or where no grid tells them apart so.
    """
    classes = _classes(results)
    rounded: dict[str, Callable[[int, int], int]] = {
        "nearest": lambda x, spacing: round(x / spacing) * spacing,  # Python's ties go to even
        "down": lambda x, spacing: x // spacing * spacing,
        "up": lambda x, spacing: -(-x // spacing) * spacing,
    }
    # Of eight numbers a coarser grid keeps one alone.
    for spacing in (2, 4, 8):
        for rounding, to_grid in rounded.items():
            numbers = [to_grid(x, spacing) for x in range(len(results))]
            if _classes(numbers) == classes and len(set(numbers)) > 1:
                bits = b + 1 - int(math.log2(spacing))
                return Grid(bits, "nearest" if rounding == "nearest" else "truncated")
    return None


def _classes(values: Sequence[float]) -> tuple[int, ...]:
    """For each value the place of the first that equals it."""
    return tuple(list(values).index(value) for value in values)


def coarsest(ladder: Iterable[tuple[int, Sequence[float]]]) -> Grid | None:
    """The coarsest grid on a ladder of exponents b; at least the bits that all were held in.

    Args:
        ladder: (b, what came of each x).

    Returns:
        Without a rounding where all were held throughout; None where nothing can be said.
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
