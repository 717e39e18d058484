"""Asks a kernel scenes, through the executor, and remembers what it declares of each."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from attncheck.errors import ProblemError
from attncheck.examine.asking import Unanswered
from attncheck.examine.concerned import as_concerned
from attncheck.examine.executor import Failure

if TYPE_CHECKING:
    import torch

    from attncheck.examine.executor import Executor
    from attncheck.examine.fingerprint.scene import Scene
    from attncheck.judge.arithmetic import Arithmetic
    from attncheck.subjects.contract import Subject, Tiling

__all__ = ["Asker", "Told", "Unanswered"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a kernel gave on a scene, on the CPU.

    Attributes:
        out: Float64 ``(heads, query, dim)`` of the first sequence.
        lse: Float64 ``(heads, query)``; None where it gives none.
        arithmetic: What it declares there.
        tiling: The same.
    """

    out: torch.Tensor
    lse: torch.Tensor | None
    arithmetic: Arithmetic
    tiling: Tiling | None


@dataclass(slots=True, kw_only=True)
class Asker:
    """One kernel in one dtype.

    Attributes:
        subject: The kernel.
        dtype: A name of ``formats.DTYPES``.
        device: ``cpu`` or ``cuda``.
        executor: How it is called.
        asked: Scenes that it has answered.
    """

    subject: Subject
    dtype: str
    device: str
    executor: Executor
    asked: int = field(default=0, init=False)

    def finite(self, scene: Scene) -> Told:
        """As ``ask``; raises Unanswered also where something of out is not finite."""
        told = self.ask(scene)
        if not bool(told.out.isfinite().all()):
            raise Unanswered(Failure(kind="error", message="its outputs are not finite"))
        return told

    def ask(self, scene: Scene) -> Told:
        """What it gives; raises Unanswered where it does not take the scene, or fails."""
        scene = self._taken(scene)
        try:
            inputs = scene.inputs(self.device)
        except ProblemError as error:
            raise Unanswered(Failure(kind="refused", message=str(error))) from None
        result = self.executor.run(self.subject, inputs)
        if isinstance(result, Failure):
            raise Unanswered(result)
        self.asked += 1
        outputs = result.outputs
        return Told(
            out=outputs.out[0].double().cpu(),
            lse=None if outputs.lse is None else outputs.lse[0].double().cpu(),
            arithmetic=result.arithmetic,
            tiling=result.tiling,
        )

    def _taken(self, scene: Scene) -> Scene:
        """``scene``, in pages for a kernel that takes no others; raises Unanswered for none."""
        problems = as_concerned(self.subject, scene.problem, self.executor)
        if not self.executor.concerns(self.subject, problems[0]):
            raise Unanswered(Failure(kind="refused", message="the kernel is for other problems"))
        refusals: list[Failure] = []
        for problem in problems:
            refused = self.executor.refusal(self.subject, problem, self.device)
            if not refused:
                return replace(scene, problem=problem)
            refusals.append(
                refused
                if isinstance(refused, Failure)
                else Failure(kind="refused", message=refused)
            )
        raise Unanswered(refusals[0])
