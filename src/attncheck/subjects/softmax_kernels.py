"""Row softmaxes as subjects: attncheck's own in Triton, and torch's."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from attncheck.core.outputs import Outputs
from attncheck.subjects.capabilities.named_kernels import BUILTIN
from attncheck.subjects.capabilities.subject import Call, Subject

if TYPE_CHECKING:
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Problem
    from attncheck.kernels.softmax_forward import Launch


class _RowSoftmax(Subject):
    """A Subject for Problems of softmax only."""

    def concerns(self, problem: Problem) -> bool:
        """Return whether it is a softmax."""
        return problem.operation == "softmax"

    def unsupported(self, problem: Problem, device: str) -> str | None:
        """Return None, because it supports every softmax."""
        del problem, device
        return None


class Softmax(_RowSoftmax):
    """Row softmax with LSE; interpreted if there is no GPU.

    A row of −inf alone gives 0 and LSE −∞ (naive: NaN and −∞).

    Args:
        kind: ``naive``, ``safe``, ``online`` or ``blocked``.
    """

    triton = True

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.name = f"triton-softmax-{kind}"
        self.summary = BUILTIN[self.name].summary

    def absent(self, device: str) -> str | None:
        """Return a reason if triton, which has wheels for Linux only, is not installed."""
        del device
        return None if find_spec("triton") else "triton is not installed"

    def prepare(self, inputs: Inputs) -> Call:
        """Return a call of one launch."""
        problem, device, x = inputs.problem, inputs.device.type, inputs.x
        assert x is not None, "Inputs of a softmax have their scores"
        from attncheck.kernels.compilation import prepare_triton

        prepare_triton(device)
        # Imported here because the import decides whether a kernel is interpreted.
        from attncheck.kernels.softmax_forward import softmax

        launch = launch_softmax(self._kind, problem.kv, problem.dtype, device)
        return lambda: Outputs(*softmax(x, self._kind, launch))


def launch_softmax(kind: str, columns: int, dtype: str, device: str) -> Launch:
    """Return a launch for rows of ``columns``: large tiles in the interpreter, fast ones on Hopper.

    The interpreter's cost is per program and step, almost independent of tile sizes, so tiles have
    many rows; but rows above 32 columns have several tiles, so that the recurrence is exercised.
    For the same reason online and blocked use several on a GPU: with one block all kinds are equal.
    """
    from attncheck.kernels.softmax_forward import Launch

    block = 1 << (columns - 1).bit_length()
    if device == "cpu":
        return Launch(block_rows=64, block_columns=max(32, min(block // 4, 1024)))
    if kind in {"naive", "safe"}:
        return _whole_rows(columns, block)
    tiles = _TILES[kind][16 if dtype in {"fp16", "bf16"} else 32]
    rows, width, warps = next((tile for most, *tile in tiles if columns <= most), tiles[-1][1:])
    # At most half a row, so that there is a second tile.
    small = max(32, block // 2)
    return Launch(block_rows=rows, block_columns=min(width, small), warps=warps)


def _whole_rows(columns: int, block: int) -> Launch:
    """Return a launch that reads rows once and keeps them in registers, if they fit."""
    from attncheck.kernels.softmax_forward import Launch

    if block > _LARGEST_BLOCK:
        # Longer rows do not fit into registers and are read again, in pieces.
        return Launch(block_columns=8192, warps=16)
    rows = max(1, _SMALLEST_TILE // block)
    warps = max(1, min(32, rows * block // _PER_WARP))
    return Launch(block_rows=rows, block_columns=block, warps=warps, aligned=columns >= 1024)


# For Hopper, from benchmarks/softmax.py: a thread holds up to 32 columns; 64 would spill.
_LARGEST_BLOCK = 32768  # columns of a row in registers
_SMALLEST_TILE = 2048  # elements
_PER_WARP = 1024  # elements

# From its --sweep on an H200, by bits of an element: (columns up to, tile rows and columns, warps).
_TILES: dict[str, dict[int, tuple[tuple[int, int, int, int], ...]]] = {
    "online": {
        16: ((6144, 1, 2048, 4), (24576, 1, 2048, 8), (49152, 1, 4096, 16), (65535, 1, 8192, 8),
             (65536, 1, 4096, 16)),
        32: ((12288, 1, 2048, 8), (24576, 1, 4096, 16), (49152, 1, 16384, 16),
             (65535, 1, 16384, 32), (65536, 1, 16384, 16)),
    },
    "blocked": {
        16: ((6144, 2, 2048, 4), (12288, 2, 4096, 8), (65535, 1, 8192, 8), (65536, 1, 16384, 16)),
        32: ((4096, 2, 2048, 16), (6144, 2, 4096, 8), (12288, 2, 4096, 16), (24576, 2, 8192, 16),
             (49152, 1, 16384, 32), (65535, 1, 16384, 32), (65536, 1, 16384, 16)),
    },
}  # fmt: skip


class TorchSoftmax(_RowSoftmax):
    """``torch.softmax`` in the input's dtype, without LSE; a row of −inf alone gives NaN."""

    name = "torch-softmax"
    summary = "torch.softmax in the input's dtype; no LSE"

    def prepare(self, inputs: Inputs) -> Call:
        """Return a call of ``torch.softmax``."""
        x = inputs.x
        assert x is not None, "Inputs of a softmax have their scores"

        def call() -> Outputs:
            with torch.no_grad():
                return Outputs(torch.softmax(x, -1))

        return call
