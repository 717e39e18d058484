"""Memory with guard bands around it, for every tensor that is allocated where torch asks Python."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.dlpack import from_dlpack

from attncheck import spread
from attncheck.examine.poison import pattern
from attncheck.inputs import Descale

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attncheck.examine.poison import Fill
    from attncheck.inputs import Inputs

__all__ = ["GuardBands"]

_ALIGNED = 4096  # keeps the 512 bytes of a GPU's allocator, and a page
_NARROWEST, _WIDEST = 1 << 16, 1 << 22
_BEYOND = "out-of-bounds write"
_MOST = 2 << 30  # bytes under guard at a time

aten = torch.ops.aten
_UNWRITTEN = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
_WRITTEN = {
    aten.zeros.default,
    aten.zeros_like.default,
    aten.new_zeros.default,
    aten.ones.default,
    aten.ones_like.default,
    aten.new_ones.default,
    aten.full.default,
    aten.full_like.default,
    aten.new_full.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.constant_pad_nd.default,
    aten.cat.default,
    aten.stack.default,
}

# Bound before any kernel is loaded, which might bind the name to something else.
_equal = torch.equal


@dataclass(slots=True)
class _Placed:
    """One tensor's memory, with a band before and after it.

    Attributes:
        buffer: All of it, in bytes.
        start, end: Where between the bands the tensor's bytes are.
        place: What the bands' bytes are hashed from.
        said: What it is, for a message.
        kept: Of an input what it held; None of what may be written.
    """

    buffer: torch.Tensor
    start: int
    end: int
    place: int
    said: str
    kept: torch.Tensor | None = None

    @property
    def inside(self) -> torch.Tensor:
        return self.buffer[self.start : self.end]


class GuardBands(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """While it is on, tensors are allocated between guard bands, and poisoned.

    Both hold bytes that are a hash of the place, compared as integers: a NaN is a number like any.
    A compiled graph allocates for itself, and so does C++: ``holds`` says which tensors lie here.

    Args:
        fill: Which pattern.
        device: Whose memory.
    """

    # FlexAttention is one; it is called as it is, and what it allocates inside is its own affair.
    supports_higher_order_operators = True

    def __init__(self, fill: Fill, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._fill, self._device = fill, device
        self._placed: list[_Placed] = []
        self._inputs: list[_Placed] = []
        self._bytes = 0
        self._wrong = self.unchecked = ""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A kernel that compiles a graph does so here too: it is to be called as it always is."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports its compiler and Triton, and the interpreter has to be on by then."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operator's result, in guarded memory where it allocated it."""
        del types
        made = func(*args, **(kwargs or {}))
        if (func in _UNWRITTEN or func in _WRITTEN) and self._ours(made):
            return self._guarded(made, written=func in _WRITTEN)
        return made

    def copied(self, inputs: Inputs) -> Inputs:
        """The same numbers between guard bands, laid out alike: strides, gaps and all."""
        tensors = {name: self._copied(name, t) for name, t in inputs.tensors().items()}
        scales = {n[0]: tensors.pop(n) for n in list(tensors) if n.endswith("_descale")}
        descale = Descale(**scales) if scales else None
        return dataclasses.replace(inputs, descale=descale, **tensors)  # type: ignore[arg-type]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies between guard bands."""
        at = tensor.data_ptr()
        return any(
            0 <= at - placed.buffer.data_ptr() - placed.start < placed.end - placed.start
            for placed in (*self._placed, *self._inputs)
        )

    def look(self) -> str:
        """What was written where nobody may; what was allocated so far is then forgotten.

        Empty where nothing was. The first fault that was ever found is told again.
        """
        for placed in (*self._inputs, *self._placed):
            self._wrong = self._wrong or self._written(placed)
        self._placed, self._bytes = [], 0
        return self._wrong

    def _ours(self, made: object) -> bool:
        if type(made) is not torch.Tensor or made.layout != torch.strided:
            return False  # a fake tensor of a compiler's, say
        if made.device.type != self._device.type or not made.numel():
            return False
        if made.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.unchecked = "what is allocated in a CUDA graph has no guard bands"
            return False
        return made.device.type == "cuda" or not torch.cuda.is_available() or not made.is_pinned()

    def _guarded(self, made: torch.Tensor, *, written: bool) -> torch.Tensor:
        size = made.untyped_storage().nbytes()
        if self._bytes + size > _MOST:
            self.unchecked = f"beyond {_MOST >> 30} GiB of allocations nothing has guard bands"
            return made
        shape, dtype = tuple(made.shape), str(made.dtype).removeprefix("torch.")
        placed = self._place(size, f"a tensor {shape} of {dtype} that it allocated", made.device)
        self._placed.append(placed)
        if written:
            return _tensor(placed, made).copy_(made)
        inside = pattern(size, size, made.device, self._fill)
        placed.inside.copy_(inside & 1 if made.dtype == torch.bool else inside)
        return _tensor(placed, made)

    def _copied(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.untyped_storage().nbytes()
        if not size:
            return tensor.clone()
        if spread.is_spread(tensor):  # gibibytes between its rows are no bands that one can fill
            return spread.copied(tensor)
        placed = self._place(size, f"its input {name}", tensor.device)
        self._inputs.append(placed)
        whole = tensor.as_strided((size // tensor.element_size(),), (1,), 0)
        _tensor(placed, whole).copy_(whole)
        placed.kept = placed.inside.clone()
        return _tensor(placed, tensor)

    def _place(self, size: int, said: str, device: torch.device) -> _Placed:
        """New memory for ``size`` bytes, its bands filled."""
        band = min(max(_rounded(size), _NARROWEST), _WIDEST)
        whole = band + _rounded(size) + band
        buffer = torch.empty(whole + _ALIGNED, dtype=torch.uint8, device=device)
        first = -buffer.data_ptr() % _ALIGNED
        placed = _Placed(
            buffer=buffer[first : first + whole],
            start=band,
            end=band + size,
            place=size,  # and no address: another run with this pattern finds the same bytes
            said=said,
        )
        for part, bytes_ in self._bands(placed):
            part.copy_(bytes_)
        self._bytes += whole
        return placed

    def _bands(self, placed: _Placed) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """Both bands of ``placed``, the first in full and the second, with what they must hold."""
        bands = placed.buffer[: placed.start], placed.buffer[placed.end :]
        return [
            (band, pattern(placed.place + 1 + i, len(band), band.device, self._fill))
            for i, band in enumerate(bands)
        ]

    def _written(self, placed: _Placed) -> str:
        before, after = self._bands(placed)
        if not _equal(*before):
            at = len(before[0]) - 1 - _first(before, lambda places: places[-1])
            return f"{_BEYOND}: {_bytes(before)} before {placed.said}, the last {at} bytes ahead"
        if not _equal(*after):
            at = _first(after, lambda places: places[0])
            return f"{_BEYOND}: {_bytes(after)} after {placed.said}, the first {at} bytes behind"
        if placed.kept is not None and not _equal(placed.inside, placed.kept):
            return f"wrote {_bytes((placed.inside, placed.kept))} between elements of {placed.said}"
        return ""


def _tensor(placed: _Placed, like: torch.Tensor) -> torch.Tensor:
    """The memory of ``placed`` as a tensor laid out as ``like``, which knows of no bands."""
    alone = from_dlpack(torch._C._to_dlpack(placed.inside))
    return alone.view(like.dtype).as_strided(like.shape, like.stride(), like.storage_offset())


def _rounded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _first(
    band: tuple[torch.Tensor, torch.Tensor], which: Callable[[torch.Tensor], torch.Tensor]
) -> int:
    return int(which((band[0] != band[1]).nonzero().flatten()))


def _bytes(band: tuple[torch.Tensor, torch.Tensor]) -> str:
    count = int((band[0] != band[1]).sum())
    return "1 byte" if count == 1 else f"{count} bytes"
