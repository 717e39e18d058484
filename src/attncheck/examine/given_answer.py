"""What somebody's kernel gave, judged: there are tensors, and nobody who could be called again."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from attncheck import inputs as inputs_room
from attncheck.errors import UsageError
from attncheck.examine.diagnosis import LARGEST, diagnosis_of
from attncheck.examine.evidence import Evidence
from attncheck.examine.executor import Execution, out_of_memory
from attncheck.examine.given_tensors import GivenTensors
from attncheck.examine.judging import judged
from attncheck.examine.second_opinion import disagreement
from attncheck.formats import FORMATS
from attncheck.inputs import Descale, Inputs
from attncheck.judge.arithmetic import Arithmetic, default
from attncheck.outputs import Outputs
from attncheck.problem import Case, Problem
from attncheck.subjects.contract import capability

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attncheck.formats import Format
    from attncheck.judgement import Judgement
    from attncheck.record import Diagnosis

__all__ = ["GivenAnswer"]


@dataclass(frozen=True, eq=False, kw_only=True)
class GivenAnswer:
    """An answer, and the call that it answers.

    Attributes:
        out: ``(batch, heads, query, value_dim)``.
        lse: ``(batch, heads, query)``, natural logarithm; None where there is none.
        call: What ``GivenTensors`` takes, by name; all None where a problem is given.
        problem: In place of the call: Inputs, or a Problem whose Inputs are drawn.
        arithmetic: Of the kernel; None for what is usual at these dtypes on this device.
        generic: Whether the tensors are random and without structure.
    """

    out: Tensor
    lse: Tensor | None
    call: dict[str, Any]
    problem: Problem | Inputs | None = None
    arithmetic: Arithmetic | None = None
    generic: bool = False

    def judgement(self) -> tuple[Judgement, str]:
        """What the judge says, and where the oracles that it rests on disagree, if anywhere.

        Raises:
            UsageError: for arguments that are no call of attention, or no answer to it.
        """
        with self._evidence() as (result, evidence):
            found = judged(result, evidence)
            return found, disagreement(found, evidence)

    def diagnosis(self) -> Diagnosis | None:
        """What may be wrong; None where nobody can say, or nothing is."""
        with self._evidence() as (result, evidence):
            return diagnosis_of(result, evidence)

    def kept(self) -> GivenAnswer | None:
        """The same in memory of its own; None where it is too large to be looked at."""
        given = self.problem.problem if isinstance(self.problem, Inputs) else self.problem
        rows = self.out.shape[:3].numel()
        kv = self.call["k"].shape[2] if given is None else given.kv
        if rows * kv > LARGEST:
            return None
        try:
            return replace(
                self,
                out=_copied(self.out),
                lse=_copied(self.lse),
                call={name: _copied(value) for name, value in self.call.items()},
                problem=_copied(self.problem),
            )
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            return None

    @contextmanager
    def _evidence(self) -> Iterator[tuple[Execution, Evidence]]:
        with self._inputs() as inputs:
            yield (
                self._result(inputs),
                Evidence(Case(problem=inputs.problem), str(inputs.device), inputs),
            )

    @contextmanager
    def _inputs(self) -> Iterator[Inputs]:
        """The Inputs that are meant."""
        if not isinstance(self.out, torch.Tensor):
            raise UsageError(f"out is {type(self.out).__name__}: it must be a tensor.")
        if not isinstance(self.arithmetic, Arithmetic | None):
            kind = type(self.arithmetic).__name__
            raise UsageError(f"arithmetic is {kind}: it must be an Arithmetic.")
        if self.problem is None:
            missing = [name for name in "qkv" if self.call[name] is None]
            if missing:
                raise UsageError(f"{missing[0]} is missing: give q, k and v, or problem.")
            tf32 = self.arithmetic is not None and self.arithmetic.products.name == "tf32"
            with GivenTensors(**self.call, tf32=tf32, generic=self.generic).inputs() as inputs:
                yield inputs
            return
        twice = [n for n, value in self.call.items() if value is not None and value is not False]
        if twice:
            raise UsageError(f"problem and {twice[0]} are given both: the problem says it all.")
        if not isinstance(self.problem, Problem | Inputs):
            kind = type(self.problem).__name__
            raise UsageError(f"problem is {kind}: it must be a Problem, or its Inputs.")
        given = self.problem
        drawn = given if isinstance(given, Inputs) else inputs_room.draw(given, self.out.device)
        yield drawn.forward()  # gradients are not given

    def _result(self, inputs: Inputs) -> Execution:
        """As if a kernel had just given it."""
        problem, arithmetic = inputs.problem, self.arithmetic
        columns = problem.kv if problem.operation == "softmax" else problem.value_dim
        rows = (problem.batch, problem.heads, problem.query)
        output = _checked("out", self.out, (*rows, columns), inputs)
        if self.lse is not None:
            _checked("lse", self.lse, rows, inputs)
        if arithmetic is None:
            assumed = default(problem.formats, capability(inputs.device.type))
            # Whoever made out may have divided P by its sum before it was rounded, and have merged
            # a sink with what keys alone gave.
            splits = 2 if problem.sink else 1
            arithmetic = replace(assumed, output=output, normalised_weights=True, splits=splits)
        elif arithmetic.output != output:
            raise UsageError(
                f"out.dtype={self.out.dtype}, but the arithmetic gives out in "
                f"{arithmetic.output.name}."
            )
        lse = None if self.lse is None else self.lse.detach()
        outputs = Outputs(self.out.detach(), lse)
        return Execution(outputs=outputs, seconds=None, tiling=None, arithmetic=arithmetic)


def _checked(name: str, tensor: object, shape: tuple[int, ...], inputs: Inputs) -> Format:
    """The format of an output; raises UsageError where it is none."""
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{name} is {type(tensor).__name__}: it must be a tensor.")
    if tuple(tensor.shape) != shape:
        raise UsageError(f"{name}.shape={tuple(tensor.shape)}, but should be {shape}.")
    if tensor.device != inputs.device:
        raise UsageError(f"{name}.device={tensor.device}, but should be {inputs.device}.")
    if tensor.layout != torch.strided:
        raise UsageError(f"{name}.layout={tensor.layout} must be torch.strided.")
    for fmt in FORMATS.values():
        if fmt.torch_dtype == tensor.dtype and not fmt.saturates:
            return fmt
    raise UsageError(f"{name}.dtype={tensor.dtype} is no dtype of a result.")


def _copied(value: Any) -> Any:
    """With tensors of its own, strides as they were; what is no tensor and holds none, itself."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, tuple | list):
        return tuple(map(_copied, value))
    if isinstance(value, Inputs | Descale):
        each = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        return replace(value, **{name: _copied(part) for name, part in each.items()})
    return value
