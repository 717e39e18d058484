"""Tensors of somebody's own call as the Inputs of a Problem, for as long as they are looked at."""

from __future__ import annotations

import itertools
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attncheck.distributions import DISTRIBUTIONS, Distribution
from attncheck.errors import ProblemError, UsageError
from attncheck.formats import DTYPES
from attncheck.inputs import Descale, Inputs
from attncheck.mods.agreement import disagreements
from attncheck.mods.index_ranges import check_index_ranges
from attncheck.mods.library import FULL, MASKS, NONE, SCORES, Entry
from attncheck.mods.places import described
from attncheck.mods.spec import Dimensions, Spec
from attncheck.mods.tables import reader
from attncheck.mods.trace import trace_mask, trace_score
from attncheck.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from attncheck.mods.expression import Expression

__all__ = ["GivenTensors"]

_DEVICES = ("cpu", "cuda")
_SINKS = (torch.float32, torch.bfloat16, torch.float16)

# Nothing that is kept by name may be another call's.
_NUMBERS = itertools.count(1)


@dataclass(frozen=True, eq=False, kw_only=True)
class GivenTensors:
    """A call of attention: its tensors and what else it was given.

    Attributes:
        q: ``(batch, heads, query, head_dim)``, fp32, fp16, bf16 or fp8.
        k: ``(batch, kv_heads, kv, head_dim)``, the same dtype.
        v: ``(batch, kv_heads, kv, value_dim)``, the same dtype.
        mask: A FlexAttention mask, or a bool tensor that broadcasts to ``(batch, heads, query,
            kv)``, True where a row sees a key; None where all see all.
        is_causal: Row i sees keys up to i, as ``F.scaled_dot_product_attention`` has it.
        score_mod: A FlexAttention score mod.
        scale: Factor of q·k, read as fp32; None for 1/√head_dim.
        descale: Of fp8: what q, k and v are to be multiplied by, fp32 ``(batch, kv_heads)`` each;
            1 where it is None.
        sink: Each head's logit beside its keys, fp32 ``(heads,)``; None for none.
        tf32: Whether fp32 tensors are multiplied in tf32.
        generic: Whether the numbers are random, without structure.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | Callable[..., Tensor] | None = None
    is_causal: bool = False
    score_mod: Callable[..., Tensor] | None = None
    scale: float | None = None
    descale: Descale | tuple[Tensor, Tensor, Tensor] | None = None
    sink: Tensor | None = None
    tf32: bool = False
    generic: bool = False

    @contextmanager
    def inputs(self) -> Iterator[Inputs]:
        """Within, the Inputs of their Problem: its mask, mod and distribution have names meanwhile.

        Raises:
            UsageError: for tensors that no call of attention has, or a mask or score mod that
                cannot be traced; in one line.
        """
        self._check_tensors()
        with ExitStack() as names:
            given = f"given {next(_NUMBERS)}"
            mask = self._mask(names, given)
            score = NONE
            if self.score_mod is not None:
                self._check_mod("score mod", self.score_mod, trace_score)
                score = _known(names, SCORES, given, _entry(self.score_mod))
            drawn = Distribution(
                name=given, summary="tensors of a call", draw=_never, generic=self.generic
            )
            _known(names, DISTRIBUTIONS, given, drawn)
            problem = self._problem().replace(mask=mask, score=score, distribution=given)
            q, k, v = (tensor.detach() for tensor in (self.q, self.k, self.v))
            descale = self._descale(problem)
            yield Inputs(problem=problem, q=q, k=k, v=v, descale=descale, sink=self._sink())

    def _check_tensors(self) -> None:
        for name in ("q", "k", "v"):
            tensor = getattr(self, name)
            if not isinstance(tensor, torch.Tensor):
                raise UsageError(f"{name} is {type(tensor).__name__}: it must be a tensor.")
            if tensor.dim() != 4:
                raise UsageError(
                    f"{name}.shape={tuple(tensor.shape)} must have the axes (batch, heads, length, "
                    "dim)."
                )
            if 0 in tensor.shape:
                raise UsageError(f"{name}.shape={tuple(tensor.shape)} has an empty axis.")
            if tensor.device != self.q.device:
                raise UsageError(f"{name}.device={tensor.device}, but q.device={self.q.device}.")
            if tensor.layout != torch.strided:
                raise UsageError(f"{name}.layout={tensor.layout} must be torch.strided.")
        if self.q.device.type not in _DEVICES:
            able = " or ".join(_DEVICES)
            raise UsageError(f"q.device={self.q.device} must be {able}.")

    def _problem(self) -> Problem:
        # A Problem takes 0 for the default.
        if self.scale is not None and not (isinstance(self.scale, int | float) and self.scale > 0):
            raise ProblemError(f"scale={self.scale!r} must be a positive number.")
        batch, heads, query, head_dim = self.q.shape
        return Problem(
            batch=batch,
            heads=heads,
            kv_heads=self.k.shape[1],
            query=query,
            kv=self.k.shape[2],
            head_dim=head_dim,
            value_dim=self.v.shape[3],
            dtype=self._dtype(),
            scale=self.scale or 0.0,
            sink=self.sink is not None,
        )

    def _dtype(self) -> str:
        names = {
            dtype.storage.torch_dtype: name
            for name, dtype in DTYPES.items()
            if dtype.measured and name != "tf32"
        }
        if self.q.dtype not in names:
            able = ", ".join(str(dtype).removeprefix("torch.") for dtype in names)
            raise UsageError(f"q.dtype={self.q.dtype} is not known: choose from {able}.")
        return "tf32" if self.tf32 else names[self.q.dtype]

    def _mask(self, names: ExitStack, given: str) -> Spec:
        if self.mask is None:
            return Spec.of("causal") if self.is_causal else FULL
        if self.is_causal:
            raise UsageError("mask and is_causal are given both: let the mask say it.")
        if isinstance(self.mask, torch.Tensor):
            return _known(names, MASKS, given, _entry(reader(self._table(self.mask))))
        self._check_mod("mask", self.mask, trace_mask)
        return _known(names, MASKS, given, _entry(self.mask))

    def _check_mod(
        self, what: str, mod: Callable[..., Tensor], trace: Callable[..., Expression]
    ) -> None:
        """Raises UsageError for a mod that fails somewhere, or does not mean what its trace does.

        The oracle calls it as it is, and would raise in the middle of its own work.
        """
        device, name = str(self.q.device), described(what, mod)
        expression = trace(mod, device)
        batch, heads, query, _ = self.q.shape
        asked = Dimensions(batch=batch, heads=heads, query=query, kv=self.k.shape[2])
        check_index_ranges(expression, asked, name)
        others = disagreements(expression, mod, asked, device=device)
        if others:
            raise ProblemError(
                f"{name} gives other values than its trace at {others} sampled indices: it must be "
                "the same at each call, and for each index by itself."
            )

    def _table(self, mask: Tensor) -> Tensor:
        if mask.dtype is not torch.bool:
            raise UsageError(
                f"mask.dtype={mask.dtype} must be torch.bool, True where a row sees a key; what is "
                "added to scores is a score_mod."
            )
        scores = (*self.q.shape[:3], self.k.shape[2])
        shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
        if len(shape) > 4 or any(a not in {1, b} for a, b in zip(shape, scores, strict=True)):
            raise UsageError(
                f"mask.shape={tuple(mask.shape)} must broadcast to (batch, heads, query, kv) = "
                f"{scores}."
            )
        return mask.detach().to(self.q.device).reshape(shape)

    def _descale(self, problem: Problem) -> Descale | None:
        if not problem.formats.scaled:
            if self.descale is not None:
                raise UsageError(f"descale is given, but q.dtype={self.q.dtype} has none.")
            return None
        if isinstance(self.descale, Descale):
            return self.descale
        if self.descale is None:
            ones = torch.ones((problem.batch, problem.kv_heads), device=self.q.device)
            return Descale(q=ones, k=ones, v=ones)
        three = isinstance(self.descale, tuple | list) and len(self.descale) == len("qkv")
        if not three or not all(isinstance(scale, torch.Tensor) for scale in self.descale):
            raise UsageError(
                "descale must be three fp32 tensors (batch, kv_heads): of q, of k and of v."
            )
        for name, scale in zip("qkv", self.descale, strict=True):
            if scale.device != self.q.device:
                raise UsageError(
                    f"{name}_descale.device={scale.device}, but q.device={self.q.device}."
                )
        q, k, v = self.descale
        return Descale(q=q, k=k, v=v)

    def _sink(self) -> Tensor | None:
        """Exactly what is meant: fp32 holds bf16 and fp16."""
        sink = self.sink
        if sink is None:
            return None
        if not isinstance(sink, torch.Tensor):
            raise UsageError(f"sink is {type(sink).__name__}: it must be a tensor.")
        if tuple(sink.shape) != self.q.shape[1:2]:
            raise UsageError(
                f"sink.shape={tuple(sink.shape)} must be (heads,) = {tuple(self.q.shape[1:2])}."
            )
        if sink.dtype not in _SINKS:
            able = ", ".join(str(dtype).removeprefix("torch.") for dtype in _SINKS)
            raise UsageError(f"sink.dtype={sink.dtype} is not known: choose from {able}.")
        if sink.device != self.q.device:
            raise UsageError(f"sink.device={sink.device}, but q.device={self.q.device}.")
        if bool((sink.isnan() | sink.isposinf()).any()):
            raise UsageError("sink holds NaN or ∞: a logit is finite, or −∞ for none.")
        return sink.detach().float()


def _entry(mod: Callable[..., Tensor]) -> Entry[Any]:
    return Entry(summary="given with the tensors", build=lambda *_: mod, additive=False)


def _known(names: ExitStack, library: dict[str, Any], name: str, entry: object) -> Spec:
    library[name] = entry
    names.callback(library.pop, name)
    return Spec.of(name)


def _never(*_: object) -> Any:
    raise ProblemError("these numbers were given, and cannot be drawn again.")
