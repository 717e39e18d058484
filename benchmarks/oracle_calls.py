"""The calls that ``oracle.py`` times: the streaming oracle, matmul and torch's math SDPA."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from attncheck.core.mod_spec import Spec
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Problem
from attncheck.oracles.streaming_forward import streaming
from attncheck.oracles.streaming_gradients import streaming_backward

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.oracles.streaming_forward import Blocks

__all__ = ["Cell", "forward_alone", "matmul", "peak_bytes", "sdpa", "streamed"]

# Score matrices that math SDPA holds at once, rounded up; a backward also holds their gradients.
SDPA_COPIES = {False: 4, True: 8}
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5


@dataclass(frozen=True)
class Cell:
    """One problem size."""

    head_dim: int
    mask: str
    length: int
    batch: int
    heads: int
    backward: bool = False

    def inputs(self, device: str) -> Inputs:
        """Return normal bf16 inputs drawn by torch, since their values do not matter."""
        problem = Problem(
            batch=self.batch,
            heads=self.heads,
            query=self.length,
            head_dim=self.head_dim,
            mask=Spec.of(self.mask),
            backward=self.backward,
        )
        shape = (self.batch, self.heads, self.length, self.head_dim)
        q, k, v, dout = (torch.randn(shape, device=device).bfloat16() for _ in range(4))
        return Inputs(problem=problem, q=q, k=k, v=v, dout=dout if self.backward else None)

    @property
    def product(self) -> float:
        """FLOPs of one of the products, over the visible pairs."""
        n = self.length
        pairs = n * n if self.mask == "full" else n * (n + 1) // 2
        return 2.0 * self.head_dim * pairs * self.batch * self.heads

    @property
    def products(self) -> int:
        """Number of products in a call."""
        return FORWARD_PRODUCTS + (BACKWARD_PRODUCTS if self.backward else 0)

    @property
    def flops(self) -> float:
        """FLOPs of all products of a call."""
        return self.products * self.product


class LivePeak(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own gap
    """Counts the bytes of storages made inside, and their peak of those alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own gap
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._born(tensor.untyped_storage())
        return result

    def _born(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._died, key, storage.nbytes())

    def _died(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def peak_bytes(call: Callable[[], object], device: str) -> int:
    """Return the peak memory of a call beyond what was allocated before."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return int(torch.cuda.max_memory_allocated() - before)
    mode = LivePeak()
    with mode:
        call()
    return mode.peak


def matmul(device: str) -> tuple[Callable[[], object], float]:
    """Return a square float64 product that fills the device, and its FLOPs."""
    size = 8192 if device == "cuda" else 2048
    left, right = (torch.randn(size, size, dtype=torch.float64, device=device) for _ in range(2))
    return lambda: torch.matmul(left, right), 2.0 * size**3


def streamed(inputs: Inputs, blocks: Blocks | None = None) -> Callable[[], object]:
    """Return a call of the oracle; with a backward both passes, ``blocks`` being the second's."""
    oracle = streaming_backward if inputs.problem.backward else streaming
    return lambda: oracle(inputs, blocks=blocks)


def forward_alone(inputs: Inputs) -> Callable[[], object]:
    """Return a call of a backward's first pass, whose time is the forward's."""
    forward = inputs.forward()
    return lambda: streaming(forward)


def sdpa(cell: Cell, inputs: Inputs) -> Callable[[], object] | None:
    """Return a call of torch's math SDPA in float64 with autograd; None if scores do not fit."""
    scores = cell.batch * cell.heads * cell.length**2 * 8
    free = torch.cuda.mem_get_info()[0] if inputs.q.is_cuda else 4 << 30
    if SDPA_COPIES[cell.backward] * scores > free:
        return None
    q, k, v = (x.requires_grad_(cell.backward) for x in inputs.promoted())
    dout = inputs.dout.double() if inputs.dout is not None else None

    def call() -> object:
        with sdpa_kernel(SDPBackend.MATH):
            out = scaled_dot_product_attention(q, k, v, is_causal=cell.mask == "causal")
        return out if dout is None else torch.autograd.grad(out, (q, k, v), dout)

    return call
