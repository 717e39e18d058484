"""Bandwidth of our four softmaxes, compared with torch.softmax and a device copy.

    python benchmarks/softmax.py [--device cuda|cpu] [--columns N ...] [--dtype bf16 ...]
                                 [--kind online ...] [--sweep] [--json FILE]

Bytes are counted as read once and written once, 2 · rows · columns · size, in every line of the
table. Times are medians; every repeat times all calls in turn, each in a CUDA graph, so that the
GPU never waits for Python. ``--sweep`` times tile sizes and warps instead, for ``launch`` in
``attncheck/subjects/softmax.py``, and prints the best ones, also of those with several tiles in a
row.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attncheck.core.formats import FORMATS
from attncheck.kernels.compilation import prepare_triton
from attncheck.verify.timing import medians

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.kernels.softmax_forward import Launch

COLUMNS = (4096, 5000, 8192, 16384, 32768, 50257, 65536)
DTYPES = ("fp32", "bf16", "fp16")
KINDS = ("naive", "safe", "online", "blocked")
CHECKED_ROWS = 32


@dataclass(frozen=True)
class Cell:
    """One tensor: rows of standard normal numbers, ``megabytes`` in all."""

    dtype: str
    columns: int
    megabytes: float

    @property
    def rows(self) -> int:
        """Number of rows that fit."""
        return max(1, int(self.megabytes * 1e6) // (self.columns * self.itemsize))

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return FORMATS[self.dtype].torch_dtype.itemsize

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return 2 * self.rows * self.columns * self.itemsize

    def x(self, device: str) -> torch.Tensor:
        """Draw the tensor ``(rows, columns)``."""
        dtype = FORMATS[self.dtype].torch_dtype
        return torch.randn((self.rows, self.columns), device=device, dtype=dtype)


def rms_error(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    """Return the RMS error of ``call`` relative to float64 softmax, on the first rows."""
    x = x[:CHECKED_ROWS]
    return float((call(x).double() - torch.softmax(x.double(), -1)).square().mean().sqrt())


def references(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return the calls with which the kernels are compared."""
    target = torch.empty_like(x)
    return {"copy": lambda: target.copy_(x), "torch": lambda: torch.softmax(x, -1)}


def measure(cell: Cell, kinds: list[str], device: str, repeats: int) -> dict[str, Any]:
    """Return GB/s of each kind, and ratios to torch.softmax and to the copy."""
    from attncheck.kernels.softmax_forward import softmax
    from attncheck.subjects.softmax_kernels import launch_softmax

    x = cell.x(device)
    chosen = {kind: launch_softmax(kind, cell.columns, cell.dtype, device) for kind in kinds}
    calls = references(x) | {kind: partial(softmax, x, kind, chosen[kind]) for kind in kinds}
    rates = {
        name: cell.bytes / taken / 1e9
        for name, taken in medians(calls, device, repeats, graph=True).items()
    }
    torchs = rms_error(lambda rows: torch.softmax(rows, -1), x)
    return asdict(cell) | {
        "rows": cell.rows,
        "gb_per_s": rates,
        "over_torch": {kind: rates[kind] / rates["torch"] for kind in kinds},
        "over_copy": {name: rates[name] / rates["copy"] for name in ("torch", *kinds)},
        "error_over_torch": {
            kind: rms_error(lambda rows, kind=kind: softmax(rows, kind, chosen[kind])[0], x)
            / torchs
            for kind in kinds
        },
        "launches": {kind: asdict(value) for kind, value in chosen.items()},
    }


def candidates(kind: str, columns: int) -> list[Launch]:
    """Return the launches that a sweep tries: each thread has 8 to 64 columns of a tile."""
    from attncheck.kernels.softmax_forward import Launch

    whole = 1 << (columns - 1).bit_length()
    tiles = [(1, whole)] if whole <= 65536 else []
    tiles += [(1, block) for block in (2048, 4096, 8192, 16384) if block < whole]
    if kind == "blocked":
        tiles += [(2, block) for block in (2048, 4096, 8192) if block <= whole]
        tiles += [(4, block) for block in (2048, 4096) if block <= whole]
    return [
        Launch(block_rows=rows, block_columns=block, warps=warps, stages=stages, aligned=aligned)
        for rows, block in tiles
        for warps in (4, 8, 16, 32)
        for stages in ((1,) if block >= columns else (1, 3))
        if 8 <= rows * block // (32 * warps) <= 64
        for aligned in ((True,) if columns % 16 == 0 else (True, False))
    ]


def compile_now(device: str, dtype: str, tasks: list[tuple[str, int, Launch]]) -> None:
    """Launch each candidate once, so that it is in Triton's cache on disk."""
    prepare_triton(device)
    from attncheck.kernels.softmax_forward import softmax

    for kind, columns, launch in tasks:
        x = torch.zeros((2, columns), device=device, dtype=FORMATS[dtype].torch_dtype)
        softmax(x, kind, launch)


def compile_all(cells: list[Cell], kinds: list[str], jobs: int) -> None:
    """Compile all candidates of a sweep in ``jobs`` processes."""
    tasks: dict[str, list[tuple[str, int, Launch]]] = {}
    for cell, kind in itertools.product(cells, kinds):
        tasks.setdefault(cell.dtype, []).extend(
            (kind, cell.columns, launch) for launch in candidates(kind, cell.columns)
        )
    each = max(1, jobs // len(tasks))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        parts = [
            pool.submit(compile_now, "cuda", dtype, of_dtype[i::each])
            for dtype, of_dtype in tasks.items()
            for i in range(each)
        ]
        for part in parts:
            part.result()


def sweep(cell: Cell, kinds: list[str], device: str, repeats: int) -> list[dict[str, Any]]:
    """Time every candidate of a cell; return the lines by kind, fastest first."""
    from attncheck.kernels.softmax_forward import softmax

    x, rows = cell.x(device), []
    for kind in kinds:
        tried = candidates(kind, cell.columns)
        calls: dict[str, Callable[[], object]] = {
            str(i): partial(softmax, x, kind, launch) for i, launch in enumerate(tried)
        }
        taken = medians(references(x) | calls, device, repeats, graph=True)
        lines = [
            asdict(cell)
            | {
                "kind": kind,
                "launch": asdict(launch),
                "tiles": math.ceil(cell.columns / launch.block_columns),
            }
            | {"over_torch": taken["torch"] / taken[str(i)]}
            | {"over_copy": taken["copy"] / taken[str(i)]}
            for i, launch in enumerate(tried)
        ]
        rows += sorted(lines, key=lambda line: -line["over_torch"])
    return rows


def show(row: dict[str, Any]) -> None:
    """Print a cell of the table, one line for each call."""
    for name, rate in row["gb_per_s"].items():
        line = f"{row['dtype']:<5} {row['columns']:>6} {row['rows']:>7} {name:<8} {rate:>8.1f}"
        line += f" {rate / row['gb_per_s']['copy']:>6.3f}"
        if name in row["launches"]:
            line += f" {row['over_torch'][name]:>6.3f} {row['error_over_torch'][name]:>6.3f}"
            line += f"  {tile(row['launches'][name], row['columns'])}"
        print(line, flush=True)


def tile(launch: dict[str, Any], columns: int) -> str:
    """Return a launch as text: rows × columns, warps, stages."""
    text = f"{launch['block_rows']}×{launch['block_columns']} w{launch['warps']}"
    text += f" s{launch['stages']}" if launch["block_columns"] < columns else ""
    return text if launch["aligned"] else f"{text} unaligned"


def show_sweep(lines: list[dict[str, Any]], kinds: list[str]) -> None:
    """Print the three best launches of each kind, and the two best with several tiles."""
    for kind in kinds:
        of_kind = [line for line in lines if line["kind"] == kind]
        columns = of_kind[0]["columns"]
        several = [line for line in of_kind if line["tiles"] > 1]
        for note, line in [
            *(("best", line) for line in of_kind[:3]),
            *(("tiles", line) for line in several[:2]),
        ]:
            text = f"{line['dtype']:<5} {columns:>6} {kind:<8} {note:<5} {line['over_torch']:>6.3f}"
            text += f" {line['over_copy']:>6.3f}  {tile(line['launch'], columns)}"
            print(text, flush=True)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--columns", type=int, nargs="+", default=list(COLUMNS))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--megabytes", type=float, default=768.0, help="of the input")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--sweep", action="store_true", help="time tile sizes and warps instead")
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1), help="compilers")
    parser.add_argument("--json", type=Path, help="write everything measured")
    return parser.parse_args()


def environment(device: str) -> dict[str, str]:
    """Return what the numbers depend on besides the code."""
    triton = sys.modules["triton"]
    return {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
    }


def main() -> None:
    """Measure, print, write."""
    options = arguments()
    prepare_triton(options.device)
    import attncheck.kernels.softmax_forward  # noqa: F401  # imports triton, whose version is printed

    cells = [
        Cell(dtype, columns, options.megabytes)
        for dtype, columns in itertools.product(options.dtype, options.columns)
    ]
    around = environment(options.device)
    print(json.dumps(around))
    rows = []
    if options.sweep:
        if options.device == "cuda":
            compile_all(cells, options.kind, options.jobs)
        print("dtype columns kind     note  /torch  /copy  tile")
        for cell in cells:
            lines = sweep(cell, options.kind, options.device, options.repeats)
            show_sweep(lines, options.kind)
            rows += lines
    else:
        print("dtype columns   rows call         GB/s  /copy /torch  error  tile")
        for cell in cells:
            rows.append(measure(cell, options.kind, options.device, options.repeats))
            show(rows[-1])
        least = min(ratio for row in rows for ratio in row["over_torch"].values())
        print(f"least ratio to torch.softmax: {least:.3f}")
    if options.json:
        options.json.write_text(json.dumps({"environment": around, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
