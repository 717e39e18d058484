"""Inputs of a Problem: drawn once and rounded once.

A kernel and an oracle read the same bits, which the oracle promotes without loss. In fp8 numbers
are the stored ones times their descales.
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

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attncheck.inputs.problem import Problem

# Elements rounded at a time. Rounding takes about ten float64 temporaries: 20 MB on a CPU, and
# 640 MB on a GPU, which would wait for Python with smaller chunks.
_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 23}
_ROUNDING_BYTES = 10 * 8 * _CHUNK["cuda"]
_LN2 = 0.6931471805599453
_FP32 = ("sink", "dlse")  # Tensors that are fp32 in every dtype.
_SINKS = {"above": 2.0**10, "below": -(2.0**10), "equal": 0.0, "absent": -math.inf}
_LARGEST_SINK = 2.0**100  # For scores that nearly overflow; fp32 also holds it in log2 units.


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Descale:
    """Factors of stored fp8 numbers: fp32, ``(batch, kv_heads)`` each.

    A head of q has the factor of its key head.
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
    # Only in fp8: numbers are the stored ones times their descales.
    descale: Descale | None = None
    # Only for a softmax: its scores ``(batch, heads, query, kv)``; q, k and v have no columns.
    x: torch.Tensor | None = None
    # Only with sinks: each head's natural logit, fp32 ``(heads,)`` in every dtype.
    sink: torch.Tensor | None = None
    # Only for a backward: the loss's gradient with respect to out, with out's shape and dtype.
    dout: torch.Tensor | None = None
    # Only for a backward whose loss depends on LSE: its gradient with respect to LSE (natural log),
    # fp32 ``(batch, heads, query)`` in every dtype.
    dlse: torch.Tensor | None = None

    def __post_init__(self) -> None:
        problem = self.problem
        for name, needed in _optional_tensors(problem).items():
            if (getattr(self, name) is not None) != needed:
                verb = "needs its" if needed else "has no"
                raise ProblemError(f"{problem.operation} in {problem.dtype} {verb} {name}.")
        for name, tensor in self.tensors().items():
            shape, dtype = _required_shape_and_dtype(name, problem)
            if tuple(tensor.shape) != shape:
                raise ProblemError(f"{name}.shape={tuple(tensor.shape)}, but should be {shape}.")
            if tensor.dtype != dtype:
                raise ProblemError(f"{name}.dtype={tensor.dtype}, but should be {dtype}.")

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
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
        """Return a copy with equal strides, and equal gaps except between far rows."""
        return self._with(_clone_memory)

    def _with(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
        return Inputs.of(self.problem, {n: change(tensor) for n, tensor in self.tensors().items()})

    @classmethod
    def of(cls, problem: Problem, tensors: Mapping[str, torch.Tensor]) -> Inputs:
        """Return Inputs of ``problem`` from ``tensors`` by the names of the method ``tensors``."""
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
        """Return these Inputs with other tensors or another Problem; the new ones are checked.

        Arguments that are None change nothing.
        """
        return dataclasses.replace(
            self,
            problem=problem or self.problem,
            descale=descale or self.descale,
            **{name: tensor for name, tensor in tensors.items() if tensor is not None},
        )

    def promoted(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v in float64: the stored numbers, times their descales in fp8.

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
        """Return the loss's float64 gradients with respect to out and LSE; 0 without dLSE.

        Raises ProblemError for a Problem without a backward.
        """
        if self.dout is None:
            raise ProblemError("the problem has no backward, and so no loss.")
        if self.dlse is None:
            return self.dout.double(), self.dout.new_zeros(self.dout.shape[:3]).double()
        return self.dout.double(), self.dlse.double()

    def forward(self) -> Inputs:
        """Return the Inputs of the Problem's forward: the same tensors without the loss."""
        problem = self.problem.replace(backward=False, dlse=False, dcaptured=False)
        return dataclasses.replace(self, problem=problem, dout=None, dlse=None)

    def scores(self) -> torch.Tensor:
        """Return the float64 scores of a softmax; raise ProblemError for attention."""
        if self.x is None:
            raise ProblemError(f"{self.problem.operation} has no scores as inputs.")
        return self.x.double()


def draw_inputs(problem: Problem, device: str | torch.device = "cpu") -> Inputs:
    """Draw the Inputs of ``problem``, with the same bits on every machine and device.

    Each float64 number of the distribution is rounded once, to nearest, ties to even. In fp8 the
    float64 quotient of the number and its descale is rounded; the descale is the fp32 number that
    brings the largest number of a batch and key head to the format's largest.

    Raises ProblemError in fp8 if no fp32 descale is large enough, or a number is not finite.
    """
    if _is_drawn_there(problem, device):
        try:
            return round_inputs(unrounded_inputs(problem, str(device)), problem)
        except torch.OutOfMemoryError:  # other processes may have taken the memory meanwhile
            pass
        finally:  # leaves the memory free for the kernel that is called next
            strided_alloc.release_cached_memory(device)
    return round_inputs(unrounded_inputs(problem), problem).to(device)


def _is_drawn_there(problem: Problem, device: str | torch.device) -> bool:
    """Return whether a GPU draws and rounds: many numbers, with memory for three float64 copies.

    Some distributions, and a softmax's scores, are still drawn on the CPU and rounded on the GPU.
    """
    if torch.device(device).type == "cpu":
        return False
    sizes = problem.sizes
    each = math.prod(sizes.q), math.prod(sizes.k), math.prod(sizes.v)
    free, _ = torch.cuda.mem_get_info(device)
    return max(each) > SPAN and 3 * 8 * sum(each) + _ROUNDING_BYTES < free // 2


def unrounded_inputs(problem: Problem, device: str = "cpu") -> Inputs:
    """Return the float64 numbers of the Problem's distribution before rounding, as fp64 Inputs."""
    exact, sizes = problem.replace(dtype="fp64"), problem.sizes
    if problem.operation != "softmax":
        drawn = distributions.draw(problem.distribution, sizes, problem.seed, device)
        q, k, v = map(torch.as_tensor, drawn)
        # Pages that all sequences share hold the first sequence's keys and values.
        if problem.paging is not None:
            shared = problem.paging.shared * problem.paging.size
            for tensor in (k, v):
                tensor[:, :, :shared] = tensor[:1, :, :shared].clone()
        sink = _draw_sinks(problem) if problem.sink else None
        dout, dlse = _draw_loss(problem)
        tensors = {"q": q, "k": k, "v": v, "sink": sink, "dout": dout, "dlse": dlse}
        on_device = {name: each.to(device) for name, each in tensors.items() if each is not None}
        return Inputs.of(exact, on_device)
    scores = distributions.draw_scores(problem.distribution, sizes, problem.seed)
    # Empty and not None, so that both operations have tensors with shapes and devices.
    q, k, v = (torch.empty(getattr(sizes, name), dtype=torch.float64) for name in ("q", "k", "v"))
    return Inputs(problem=exact, q=q, k=k, v=v, x=torch.from_numpy(scores)).to(device)


def round_inputs(exact: Inputs, problem: Problem) -> Inputs:
    """Return fp64 Inputs rounded once to the storage format of ``problem``; see ``draw_inputs``."""
    fmt = problem.formats.storage
    stored = {}
    for name, values in exact.tensors().items():
        # Kernels read sinks and dLSE in fp32, whatever the dtype of q, k and v.
        if name in _FP32:
            stored[name] = values
        elif problem.formats.scaled:
            scale = _compute_descale(values, problem.kv_heads, fmt)
            # Pages that all sequences share are stored once, with the largest descale.
            if name != "q" and problem.paging is not None and problem.paging.shared:
                scale = scale.amax(0, keepdim=True).expand_as(scale).contiguous()
            stored[f"{name}_descale"] = scale
            each = scale.double().repeat_interleave(values.shape[1] // problem.kv_heads, dim=1)
            stored[name] = _to_storage(values / each[..., None, None], fmt)
        else:
            stored[name] = _to_storage(values, fmt)
    return Inputs.of(problem, stored)


def quick_inputs(problem: Problem, device: str | torch.device) -> Inputs:
    """Return standard normal Inputs that torch draws on ``device``, for timing.

    They take a hundredth of the time of ``draw_inputs``; bits depend on the device and on torch.
    """
    exact, draws = zero_inputs(problem.replace(dtype="fp64"), device), torch.Generator(device)
    draws.manual_seed(problem.seed)
    for tensor in exact.tensors().values():
        tensor.normal_(generator=draws)
    return round_inputs(exact, problem)


def zero_inputs(problem: Problem, device: str | torch.device) -> Inputs:
    """Return Inputs of 0 with descales of 1, for purposes that depend on shapes alone."""
    needed = [name for name, needs in _optional_tensors(problem).items() if needs]
    if "descale" in needed:
        needed[:1] = ("q_descale", "k_descale", "v_descale")
    tensors = {}
    for name in ("q", "k", "v", *needed):
        shape, dtype = _required_shape_and_dtype(name, problem)
        number = 1 if name.endswith("_descale") else 0
        tensors[name] = torch.full(shape, number, dtype=dtype, device=device)
    return Inputs.of(problem, tensors)


def _draw_sinks(problem: Problem) -> torch.Tensor:
    """Return fp32 logits ``(heads,)``: as named, the distribution's own, or spread about ln kv."""
    draw_own = distributions.distribution_named(problem.distribution).sink
    if draw_own is not None and not problem.sink_logits:
        return draw_own()
    if problem.sink_logits:
        return torch.full((problem.heads,), _SINKS[problem.sink_logits])
    amplitude = problem.scale * math.sqrt(problem.head_dim)
    normal = Draws(problem.seed).normal("sink", (problem.heads,))
    log_keys = _LN2 * (problem.kv.bit_length() - 1)  # about ln kv, with the same bits everywhere
    sinks = torch.from_numpy(log_keys + 2.0 * amplitude * normal)
    return sinks.clamp(-_LARGEST_SINK, _LARGEST_SINK).float()


def _draw_loss(problem: Problem) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return float64 dout and fp32 dlse, standard normal unless the distribution has its own."""
    draws, rows = Draws(problem.seed), (problem.batch, problem.heads, problem.query)
    dout = dlse = None
    if problem.backward:
        draw_own = distributions.distribution_named(problem.distribution).dout
        drawn = draws.normal("dout", (*rows, problem.value_dim)) if draw_own is None else None
        dout = torch.from_numpy(draw_own(draws, problem.sizes) if draw_own is not None else drawn)
    if problem.dlse:
        dlse = torch.from_numpy(draws.normal("dlse", rows)).float()
    return dout, dlse


def _clone_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the tensor's whole storage, through the same view.

    The gaps between far rows (``strided_alloc.has_far_rows``) are not copied.
    """
    if strided_alloc.has_far_rows(tensor):
        return strided_alloc.copy_far_rows(tensor)
    # With the gaps, since a kernel may read outside the view and must find the same numbers there.
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = tensor.as_strided((size,), (1,), 0).clone()
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _optional_tensors(problem: Problem) -> dict[str, bool]:
    """Return whether Inputs of ``problem`` have each of the tensors that not all have."""
    return {
        "descale": problem.formats.scaled,
        "x": problem.operation == "softmax",
        "sink": problem.sink,
        "dout": problem.backward,
        "dlse": problem.dlse,
    }


def _required_shape_and_dtype(name: str, problem: Problem) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape and dtype that the tensor called ``name`` must have."""
    if name.endswith("_descale"):
        return (problem.batch, problem.kv_heads), torch.float32
    if name == "sink":
        return (problem.heads,), torch.float32
    if name in ("dout", "dlse"):
        rows = (problem.batch, problem.heads, problem.query)
        if name == "dlse":
            return rows, torch.float32
        return (*rows, problem.value_dim), problem.formats.output.torch_dtype
    return getattr(problem.sizes, name), problem.formats.storage.torch_dtype


def _compute_descale(values: torch.Tensor, kv_heads: int, fmt: Format) -> torch.Tensor:
    """Return factors that bring the largest numbers to ``fmt.max``; 1 where all numbers are 0.

    They are fp32, ``(batch, kv_heads)``, and not subnormal, since a GPU may flush those to 0.
    """
    largest = values.reshape(values.shape[0], kv_heads, -1).abs().amax(-1)
    # Divided by a tensor: a GPU multiplies by the reciprocal of a Python number and rounds twice.
    scale = (largest / torch.tensor(fmt.max, dtype=largest.dtype, device=largest.device)).float()
    if not bool(scale.isfinite().all()):
        raise ProblemError(f"the inputs are too large for {fmt.name}: a descale is an fp32 number.")
    smallest = 2.0 ** FORMATS["fp32"].min_exponent
    return torch.where(largest == 0, 1.0, scale.clamp(min=smallest))


def _to_storage(values: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return float64 ``values`` rounded once to ``fmt``, in its storage dtype."""
    out = torch.empty(values.shape, dtype=fmt.torch_dtype, device=values.device)
    stored, exact, chunk = out.view(-1), values.view(-1), _CHUNK[values.device.type]
    for start in range(0, exact.numel(), chunk):
        part = slice(start, start + chunk)
        stored[part] = round_to(exact[part], fmt)  # the cast of rounded numbers is exact
    return out
