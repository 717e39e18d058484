"""Row softmaxes as subjects: our Triton ones and torch's."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from attncheck.core.outputs import Outputs
from attncheck.subjects.capabilities.subject import Call, Subject

if TYPE_CHECKING:
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Problem
    from attncheck.kernels.softmax_forward import Launch

_SUMMARIES = {
    "naive": "exp(x) over its sum",
    "safe": "a pass for the maximum, one for the sum",
    "online": "one pass for a running maximum and sum",
    "blocked": "online over tiles of rows and columns",
}


class _RowSoftmax(Subject):
    """Softmax, and nothing else."""

    def concerns(self, problem: Problem) -> bool:
        """Softmax alone."""
        return problem.operation == "softmax"

    def unsupported(self, problem: Problem, device: str) -> str | None:
        """Return None: it takes every softmax."""
        del problem, device
        return None


class Softmax(_RowSoftmax):
    """Row softmax with LSE; interpreted where there is no GPU.

    Rows that are −inf throughout give 0 and −∞ (naive: NaN and −∞).

    Args:
        kind: ``naive``, ``safe``, ``online`` or ``blocked``.
    """

    triton = True

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.name = f"triton-softmax-{kind}"
        self.summary = f"our row softmax in Triton: {_SUMMARIES[kind]}"

    def absent(self, device: str) -> str | None:
        """Needs triton, which has wheels for Linux only."""
        del device
        return None if find_spec("triton") else "triton is not installed"

    def prepare(self, inputs: Inputs) -> Call:
        """Bind one launch."""
        problem, device, x = inputs.problem, inputs.device.type, inputs.x
        assert x is not None, "Inputs of a softmax have their scores"
        from attncheck.kernels.compilation import prepare_triton

        prepare_triton(device)
        # Only now: a kernel is compiled or interpreted from its import on.
        from attncheck.kernels.softmax_forward import softmax

        chosen = launch_softmax(self._kind, problem.kv, problem.dtype, device)
        return lambda: Outputs(*softmax(x, self._kind, chosen))


def launch_softmax(kind: str, columns: int, dtype: str, device: str) -> Launch:
    """Tile sizes for rows of ``columns``: few programs, or what is fast on Hopper.

    The interpreter's cost is per program and per step, almost whatever the tile: many rows at
    once. But several tiles in every row above 32, so that the recurrence is exercised; on a GPU
    online and blocked take several for the same reason, for in one block all kinds are one kernel.
    """
    from attncheck.kernels.softmax_forward import Launch

    block = 1 << (columns - 1).bit_length()
    if device == "cpu":
        return Launch(block_rows=64, block_columns=max(32, min(block // 4, 1024)))
    if kind in {"naive", "safe"}:
        return _whole_rows(columns, block)
    tiles = _TILES[kind][16 if dtype in {"fp16", "bf16"} else 32]
    rows, width, warps = next((tile for most, *tile in tiles if columns <= most), tiles[-1][1:])
    # At most half a row, so that a second tile meets the first one's maximum and sum.
    small = max(32, block // 2)
    return Launch(block_rows=rows, block_columns=min(width, small), warps=warps)


def _whole_rows(columns: int, block: int) -> Launch:
    """Rows that are read once and stay in registers, as long as these hold them."""
    from attncheck.kernels.softmax_forward import Launch

    if block > _LARGEST_BLOCK:
        # Longer rows do not stay in registers: they are read again, in pieces.
        return Launch(block_columns=8192, warps=16)
    rows = max(1, _SMALLEST_TILE // block)
    warps = max(1, min(32, rows * block // _PER_WARP))
    return Launch(block_rows=rows, block_columns=block, warps=warps, aligned=columns >= 1024)


# For Hopper, by benchmarks/softmax.py: a thread holds up to 32 columns, 64 of which would spill.
_LARGEST_BLOCK = 32768
_SMALLEST_TILE = 2048
_PER_WARP = 1024

# By its --sweep on an H200, for elements of 16 and 32 bits: (columns up to, rows, columns, warps).
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
    """``torch.softmax`` in the input's dtype; it exposes no LSE.

    Rows that are −inf throughout give NaN.
    """

    name = "torch-softmax"
    summary = "torch.softmax in the input's dtype; no LSE"

    def prepare(self, inputs: Inputs) -> Call:
        """Nothing is prepared."""
        x = inputs.x
        assert x is not None, "Inputs of a softmax have their scores"

        def call() -> Outputs:
            with torch.no_grad():
                return Outputs(torch.softmax(x, -1))

        return call
