"""Inputs of a Problem: drawn once and rounded once.

What a kernel reads is bit for bit what an oracle reads, promoted without loss. In fp8 that is the
stored number times its descale.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.core import strided_alloc
from attncheck.core.draws import SPAN, Draws
from attncheck.core.errors import ProblemError
from attncheck.core.formats import FORMATS, Format, round_to
from attncheck.inputs import distributions
from attncheck.inputs.distributions import Sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attncheck.inputs.problem import Problem

# Rounding needs about ten float64 temporaries; 2**18 elements make that 20 MB. A GPU gets 640 MB:
# with few it waits for Python.
_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 23}
_ROUNDING = 10 * 8 * _CHUNK["cuda"]  # bytes
_LN2 = 0.6931471805599453
_FP32 = ("sink", "dlse")  # in every dtype
_SINKS = {"above": 2.0**10, "below": -(2.0**10), "equal": 0.0, "absent": -math.inf}
_LARGEST_SINK = 2.0**100  # beside scores that nearly overflow; in log2 units a number of fp32 still


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Descale:
    """Factors of stored fp8 numbers: fp32, ``(batch, kv_heads)`` each.

    A head of q takes that of the key head it reads.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Inputs:
    """The tensors of one Problem, in its storage dtype.

    Raises:
        ProblemError: for a tensor whose shape or dtype is not the Problem's.
    """

    problem: Problem
    q: torch.Tensor  # ``(batch, heads, query, head_dim)``
    k: torch.Tensor  # ``(batch, kv_heads, kv, head_dim)``
    v: torch.Tensor  # ``(batch, kv_heads, kv, value_dim)``
    # Of fp8 alone: the number meant is the stored one times its descale.
    descale: Descale | None = None
    # Of a softmax alone: its scores ``(batch, heads, query, kv)``; q, k and v are empty then,
    # their last axis is 0.
    x: torch.Tensor | None = None
    # Of a Problem with one: each head's logit, fp32 ``(heads,)``, natural, in every dtype.
    sink: torch.Tensor | None = None
    # Of a backward: the loss's gradient with respect to out, as out in shape and dtype.
    dout: torch.Tensor | None = None
    # Of a backward whose loss depends on LSE (natural log): its gradient with respect to it, fp32
    # ``(batch, heads, query)`` in every dtype.
    dlse: torch.Tensor | None = None

    def __post_init__(self) -> None:
        problem, sizes = self.problem, _sizes(self.problem)
        # What a Problem has and what Inputs hold must agree tensor by tensor.
        for name, needed in (
            ("descale", problem.formats.scaled),
            ("x", _is_softmax(problem)),
            ("sink", problem.sink),
            ("dout", problem.backward),
            ("dlse", problem.dlse),
        ):
            if (getattr(self, name) is not None) != needed:
                verb = "needs its" if needed else "has no"
                raise ProblemError(f"{problem.operation} in {problem.dtype} {verb} {name}.")
        for name, tensor in self.tensors().items():
            shape, dtype = _should_be(name, problem, sizes)
            if tuple(tensor.shape) != shape:
                raise ProblemError(f"{name}.shape={tuple(tensor.shape)}, but should be {shape}.")
            if tensor.dtype != dtype:
                raise ProblemError(f"{name}.dtype={tensor.dtype}, but should be {dtype}.")

    @property
    def device(self) -> torch.device:
        """Device of all the tensors."""
        return self.q.device

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor that is not None by name, q, k and v first."""
        named = {"q": self.q, "k": self.k, "v": self.v}
        if self.descale is not None:
            named |= {f"{name}_descale": getattr(self.descale, name) for name in named}
        more = {"x": self.x, "sink": self.sink, "dout": self.dout, "dlse": self.dlse}
        return named | {name: tensor for name, tensor in more.items() if tensor is not None}

    def to(self, device: str | torch.device) -> Inputs:
        """Return the same numbers on another device."""
        return self._with(lambda tensor: tensor.to(device))

    def clone(self) -> Inputs:
        """The same numbers in memory of their own, laid out alike: strides, gaps and all."""
        return self._with(_clone_memory)

    def _with(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
        return Inputs.of(self.problem, {n: change(tensor) for n, tensor in self.tensors().items()})

    @classmethod
    def of(cls, problem: Problem, tensors: Mapping[str, torch.Tensor]) -> Inputs:
        """Return Inputs of ``problem``, of tensors by the names that ``tensors`` has."""
        scales = {name[0]: t for name, t in tensors.items() if name.endswith("_descale")}
        others = {name: t for name, t in tensors.items() if not name.endswith("_descale")}
        return cls(problem=problem, **others, descale=Descale(**scales) if scales else None)

    def replace(
        self,
        *,
        problem: Problem | None = None,
        descale: Descale | None = None,
        **tensors: torch.Tensor | None,
    ) -> Inputs:
        """Return these Inputs with other tensors, or of another Problem; checked like any.

        What is None stays as it is.
        """
        return dataclasses.replace(
            self,
            problem=problem or self.problem,
            descale=descale or self.descale,
            **{name: tensor for name, tensor in tensors.items() if tensor is not None},
        )

    def promoted(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The float64 q, k and v that are meant: every stored number, times its descale in fp8.

        Nothing is rounded: float64 holds all formats, and a descale's 24 bits times fp8's 4.
        """
        q, k, v = self.q.double(), self.k.double(), self.v.double()
        if self.descale is None:
            return q, k, v
        scales = (self.descale.q.repeat_interleave(self.problem.group, dim=1), self.descale.k)
        q, k = (
            values * scale[..., None, None] for values, scale in zip((q, k), scales, strict=True)
        )
        return q, k, v * self.descale.v[..., None, None]

    def loss(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss's float64 gradients with respect to out and LSE (0 where it has none of LSE).

        Raises ProblemError for a Problem without a backward.
        """
        if self.dout is None:
            raise ProblemError("the problem has no backward, and so no loss.")
        if self.dlse is None:
            return self.dout.double(), self.dout.new_zeros(self.dout.shape[:3]).double()
        return self.dout.double(), self.dlse.double()

    def forward(self) -> Inputs:
        """The same numbers without the loss: Inputs of the Problem's forward alone."""
        problem = self.problem.replace(backward=False, dlse=False, dcaptured=False)
        return dataclasses.replace(self, problem=problem, dout=None, dlse=None)

    def scores(self) -> torch.Tensor:
        """The float64 scores of a softmax; raises ProblemError for attention."""
        if self.x is None:
            raise ProblemError(f"{self.problem.operation} has no scores as inputs.")
        return self.x.double()


def draw_inputs(problem: Problem, device: str | torch.device = "cpu") -> Inputs:
    """Draw the Inputs of ``problem``, with the same bits on every machine and device.

    Each float64 number of its distribution is rounded once, to nearest, ties to even; in fp8 it is
    the float64 quotient of the number and its descale, the fp32 number that brings the largest of
    its batch and key head to the format's largest.

    Raises ProblemError in fp8 where no fp32 descale is large enough, or a number is not finite.
    """
    if _is_drawn_there(problem, device):
        try:
            return round_inputs(unrounded_inputs(problem, str(device)), problem)
        except torch.OutOfMemoryError:  # others may have taken it meanwhile
            pass
        finally:  # a kernel that is called next finds the memory as it was
            strided_alloc.release_cached_memory(device)
    return round_inputs(unrounded_inputs(problem), problem).to(device)


def _is_drawn_there(problem: Problem, device: str | torch.device) -> bool:
    """Return whether a GPU draws and rounds: many numbers, with memory for three float64 copies.

    Those of some distributions and of a softmax are drawn here all the same, and rounded there.
    """
    if torch.device(device).type == "cpu":
        return False
    sizes = _sizes(problem)
    each = math.prod(sizes.q), math.prod(sizes.k), math.prod(sizes.v)
    free, _ = torch.cuda.mem_get_info(device)
    return max(each) > SPAN and 3 * 8 * sum(each) + _ROUNDING < free // 2


def unrounded_inputs(problem: Problem, device: str = "cpu") -> Inputs:
    """The float64 numbers of the Problem's distribution, before any rounding: its fp64 Inputs."""
    exact, sizes = problem.replace(dtype="fp64"), _sizes(problem)
    if not _is_softmax(problem):
        drawn = distributions.draw(problem.distribution, sizes, problem.seed, device)
        q, k, v = map(torch.as_tensor, drawn)
        # Pages that all sequences share hold what the first one's do.
        if problem.paging is not None:
            shared = problem.paging.shared * problem.paging.size
            for tensor in (k, v):
                tensor[:, :, :shared] = tensor[:1, :, :shared].clone()
        sink = _sink(problem) if problem.sink else None
        dout, dlse = _loss(problem)
        tensors = {"q": q, "k": k, "v": v, "sink": sink, "dout": dout, "dlse": dlse}
        there = {name: each.to(device) for name, each in tensors.items() if each is not None}
        return Inputs.of(exact, there)
    scores = distributions.draw_scores(problem.distribution, sizes, problem.seed)
    # Empty, not None: shapes and devices are the same for both operations.
    q, k, v = (torch.empty(getattr(sizes, name), dtype=torch.float64) for name in ("q", "k", "v"))
    return Inputs(problem=exact, q=q, k=k, v=v, x=torch.from_numpy(scores)).to(device)


def round_inputs(exact: Inputs, problem: Problem) -> Inputs:
    """Return fp64 Inputs rounded once to the storage format of ``problem``, as ``draw`` says."""
    fmt = problem.formats.storage
    stored = {}
    for name, values in exact.tensors().items():
        # Kernels take logits and dLSE in fp32, whatever the dtype of q, k and v.
        if name in _FP32:
            stored[name] = values
        elif problem.formats.scaled:
            scale = _share_descale(_descale(values, problem.kv_heads, fmt), name, problem)
            stored[f"{name}_descale"] = scale
            each = scale.double().repeat_interleave(values.shape[1] // problem.kv_heads, dim=1)
            stored[name] = _to_storage(values / each[..., None, None], fmt)
        else:
            stored[name] = _to_storage(values, fmt)
    return Inputs.of(problem, stored)


def quick_inputs(problem: Problem, device: str | torch.device) -> Inputs:
    """Inputs of standard normal numbers that torch draws on ``device``, for what is timed.

    In a hundredth of the time of ``draw_inputs``; another device or torch draws other bits.
    """
    exact, draws = zero_inputs(problem.replace(dtype="fp64"), device), torch.Generator(device)
    draws.manual_seed(problem.seed)
    for tensor in exact.tensors().values():
        tensor.normal_(generator=draws)
    return round_inputs(exact, problem)


def zero_inputs(problem: Problem, device: str | torch.device) -> Inputs:
    """Inputs of ``problem`` that are all 0, their descales 1: for what depends on shapes alone."""
    sizes = _sizes(problem)
    more = {
        "x": _is_softmax(problem),
        "sink": problem.sink,
        "dout": problem.backward,
        "dlse": problem.dlse,
    }
    names = ("q", "k", "v", *(name for name, needed in more.items() if needed))
    zeros = {}
    for name in names:
        shape, dtype = _should_be(name, problem, sizes)
        zeros[name] = torch.zeros(shape, dtype=dtype, device=device)
    scales = None
    if problem.formats.scaled:
        ones = torch.ones((problem.batch, problem.kv_heads), device=device)
        scales = Descale(q=ones, k=ones.clone(), v=ones.clone())
    return Inputs(problem=problem, **zeros, descale=scales)


def _sink(problem: Problem) -> torch.Tensor:
    """fp32 logits ``(heads,)``: spread around what a row's scores may add up to, unless named."""
    own = distributions.distribution_named(problem.distribution).sink
    if own is not None and not problem.sink_logits:
        return own()
    if problem.sink_logits:
        return torch.full((problem.heads,), _SINKS[problem.sink_logits])
    amplitude = problem.scale * math.sqrt(problem.head_dim)
    normal = Draws(problem.seed).normal("sink", (problem.heads,))
    usual = _LN2 * (problem.kv.bit_length() - 1)  # ln kv, in products alone: the same bits anywhere
    sinks = torch.from_numpy(usual + 2.0 * amplitude * normal)
    return sinks.clamp(-_LARGEST_SINK, _LARGEST_SINK).float()


def _loss(problem: Problem) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Float64 dout and fp32 dlse, standard normal where the distribution says nothing of them."""
    draws, rows = Draws(problem.seed), (problem.batch, problem.heads, problem.query)
    dout = dlse = None
    if problem.backward:
        own = distributions.distribution_named(problem.distribution).dout
        drawn = draws.normal("dout", (*rows, problem.value_dim)) if own is None else None
        dout = torch.from_numpy(own(draws, _sizes(problem)) if own is not None else drawn)
    if problem.dlse:
        dlse = torch.from_numpy(draws.normal("dlse", rows)).float()
    return dout, dlse


def _share_descale(scale: torch.Tensor, name: str, problem: Problem) -> torch.Tensor:
    """One descale for all sequences, the largest, where they share pages: what is stored is one."""
    if name == "q" or problem.paging is None or not problem.paging.shared:
        return scale
    return scale.amax(0, keepdim=True).expand_as(scale).contiguous()


def _clone_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all the memory that a tensor is a view of, seen through the same view.

    Of what lies between rows that are spread nothing is copied.
    """
    if strided_alloc.has_far_rows(tensor):
        return strided_alloc.copy_far_rows(tensor)
    # The whole storage, gaps too: a kernel may read beside the view, and must find the same there.
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = tensor.as_strided((size,), (1,), 0).clone()
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _should_be(name: str, problem: Problem, sizes: Sizes) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the tensor called ``name``."""
    if name.endswith("_descale"):
        return (problem.batch, problem.kv_heads), torch.float32
    if name == "sink":
        return (problem.heads,), torch.float32
    if name in ("dout", "dlse"):
        rows = (problem.batch, problem.heads, problem.query)
        if name == "dlse":
            return rows, torch.float32
        return (*rows, problem.value_dim), problem.formats.output.torch_dtype
    return getattr(sizes, name), problem.formats.storage.torch_dtype


def _is_softmax(problem: Problem) -> bool:
    return problem.operation == "softmax"


def _descale(values: torch.Tensor, kv_heads: int, fmt: Format) -> torch.Tensor:
    """fp32 ``(batch, kv_heads)``: what brings the largest to ``fmt.max``; 1 where all are 0.

    Never below fp32's smallest normal number, which a GPU may take for 0.
    """
    largest = values.reshape(values.shape[0], kv_heads, -1).abs().amax(-1)
    # By a tensor: a GPU multiplies by the reciprocal of a Python number, and rounds twice.
    scale = (largest / torch.tensor(fmt.max, dtype=largest.dtype, device=largest.device)).float()
    if not bool(scale.isfinite().all()):
        raise ProblemError(f"the inputs are too large for {fmt.name}: a descale is an fp32 number.")
    smallest = 2.0 ** FORMATS["fp32"].min_exponent
    return torch.where(largest == 0, 1.0, scale.clamp(min=smallest))


def _sizes(problem: Problem) -> Sizes:
    names = (field.name for field in dataclasses.fields(Sizes))
    return Sizes(**{name: getattr(problem, name) for name in names})


def _to_storage(values: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Float64 ``values`` rounded once to ``fmt``, in its storage dtype."""
    out = torch.empty(values.shape, dtype=fmt.torch_dtype, device=values.device)
    stored, exact, chunk = out.view(-1), values.view(-1), _CHUNK[values.device.type]
    for start in range(0, exact.numel(), chunk):
        part = slice(start, start + chunk)
        stored[part] = round_to(exact[part], fmt)  # the cast is exact: the numbers are fmt's
    return out
