"""FLOP rate of the streaming oracle over float64 torch.matmul's, in one run, and its memory.

    python benchmarks/oracle.py [--device cpu|cuda] [--length N ...] [--sweep] [--json FILE]

FLOPs are 2·(head_dim + value_dim) for each visible pair of a row and a key. Every repeat times
matmul, torch's math SDPA in float64 (where its scores fit) and the oracle in turn; medians.
``--sweep`` times block sizes instead, for ``attncheck/oracles/tiles.py``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import statistics
import time
import weakref
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from attncheck.inputs import Inputs
from attncheck.mods.spec import Spec
from attncheck.oracles import streaming
from attncheck.oracles.tiles import Blocks, blocks_for
from attncheck.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Callable

MASKS = ("full", "causal")
SDPA_COPIES = 4  # score matrices that math SDPA holds at once, with room to spare


@dataclass(frozen=True)
class Cell:
    """One problem size."""

    head_dim: int
    mask: str
    length: int
    batch: int
    heads: int

    def inputs(self, device: str) -> Inputs:
        """Normal bf16 inputs; the values do not matter here, so torch draws them."""
        problem = Problem(
            batch=self.batch,
            heads=self.heads,
            query=self.length,
            head_dim=self.head_dim,
            mask=Spec.of(self.mask),
        )
        shape = (self.batch, self.heads, self.length, self.head_dim)
        q, k, v = (torch.randn(shape, device=device).bfloat16() for _ in range(3))
        return Inputs(problem=problem, q=q, k=k, v=v)

    @property
    def flops(self) -> float:
        """Of the visible pairs."""
        n = self.length
        pairs = n * n if self.mask == "full" else n * (n + 1) // 2
        return 4.0 * self.head_dim * pairs * self.batch * self.heads


class LivePeak(TorchDispatchMode):
    """Most bytes of storages that were alive at once, of those made inside."""

    def __init__(self) -> None:
        super().__init__()
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


def peak_bytes(inputs: Inputs) -> int:
    """Memory of one call beyond its inputs."""
    if inputs.q.is_cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        streaming(inputs)
        return torch.cuda.max_memory_allocated() - before
    with LivePeak() as mode:
        streaming(inputs)
    return mode.peak


def seconds(call: Callable[[], object], device: str) -> float:
    """Wall time of one call, the device idle before and after."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def medians(calls: dict[str, Callable[[], object]], repeats: int, device: str) -> dict[str, float]:
    """Median seconds of each call over interleaved repeats, after one of each that is not kept."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            taken = seconds(call, device)
            if repeat:
                times[name].append(taken)
    return {name: statistics.median(values) for name, values in times.items()}


def matmul(device: str) -> tuple[Callable[[], object], float]:
    """A square float64 product that fills the device, and its FLOPs."""
    size = 8192 if device == "cuda" else 2048
    left, right = (torch.randn(size, size, dtype=torch.float64, device=device) for _ in range(2))
    return lambda: torch.matmul(left, right), 2.0 * size**3


def sdpa(cell: Cell, inputs: Inputs) -> Callable[[], object] | None:
    """Torch's math SDPA in float64, or None where its scores do not fit."""
    scores = cell.batch * cell.heads * cell.length**2 * 8
    free = torch.cuda.mem_get_info()[0] if inputs.q.is_cuda else 4 << 30
    if SDPA_COPIES * scores > free:
        return None
    q, k, v = inputs.promoted()

    def call() -> object:
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(q, k, v, is_causal=cell.mask == "causal")

    return call


def measure(cell: Cell, device: str, repeats: int) -> dict[str, Any]:
    """One row of the table."""
    inputs = cell.inputs(device)
    peak = peak_bytes(inputs)
    product, product_flops = matmul(device)
    calls = {"matmul": product, "streaming": lambda: streaming(inputs)}
    if math_sdpa := sdpa(cell, inputs):
        calls["sdpa"] = math_sdpa
    taken = medians(calls, repeats, device)
    rates = {name: cell.flops / t for name, t in taken.items()}
    rates["matmul"] = product_flops / taken["matmul"]
    return {
        **asdict(cell),
        "milliseconds": taken["streaming"] * 1e3,
        "peak_bytes": peak,
        "flop_per_s": rates,
        "ratio": rates["streaming"] / rates["matmul"],
        "sdpa_ratio": rates["sdpa"] / rates["matmul"] if "sdpa" in rates else None,
    }


def candidates(device: str) -> list[Blocks]:
    """Block sizes that a sweep tries."""
    if device == "cuda":
        rows, kv, cell = (4096, 8192, 16384, 32768), (256, 512, 1024, 2048), 128
        query = ((512, 1024), (512, 2048), (1024, 2048), (2048, 4096))
    else:
        rows, kv, cell = (512, 1024, 2048), (256, 512, 1024), 64
        query = ((128, 256), (256, 256), (256, 512), (512, 512))
    sizes = itertools.product(rows, query, kv)
    return [Blocks(rows=r, query=q, query_most=m, kv=k, cell=cell) for r, (q, m), k in sizes]


def sweep(cells: list[Cell], device: str, repeats: int) -> list[dict[str, Any]]:
    """Ratio of each candidate on each cell, best geometric mean first."""
    tried = candidates(device)
    ratios: list[list[float]] = [[] for _ in tried]
    for cell in cells:
        inputs = cell.inputs(device)
        product, flops = matmul(device)
        calls: dict[str, Callable[[], object]] = {
            str(i): partial(streaming, inputs, blocks=blocks) for i, blocks in enumerate(tried)
        }
        taken = medians({"matmul": product, **calls}, repeats, device)
        for i in range(len(tried)):
            ratios[i].append(cell.flops / taken[str(i)] / (flops / taken["matmul"]))
    rows = [
        {"blocks": asdict(blocks), "ratios": values, "mean": math.prod(values) ** (1 / len(values))}
        for blocks, values in zip(tried, ratios, strict=True)
    ]
    return sorted(rows, key=lambda row: -row["mean"])


def show(rows: list[dict[str, Any]]) -> None:
    """The table."""
    print(
        f"{'D':>4} {'mask':>7} {'B·H':>5} {'N':>6} {'ms':>9} {'GFLOP/s':>9} {'matmul':>9} "
        f"{'ratio':>6} {'sdpa':>6} {'peak MB':>8}"
    )
    for row in rows:
        rates = row["flop_per_s"]
        other = "—" if row["sdpa_ratio"] is None else f"{row['sdpa_ratio']:.2f}"
        print(
            f"{row['head_dim']:>4} {row['mask']:>7} {row['batch'] * row['heads']:>5} "
            f"{row['length']:>6} {row['milliseconds']:>9.2f} {rates['streaming'] / 1e9:>9.1f} "
            f"{rates['matmul'] / 1e9:>9.1f} {row['ratio']:>6.2f} {other:>6} "
            f"{row['peak_bytes'] / 1e6:>8.1f}"
        )


def show_sweep(rows: list[dict[str, Any]]) -> None:
    """The best and the worst block sizes, and those in use."""
    for row in [*rows[:10], rows[-1]]:
        print(f"{row['mean']:.3f}  {' '.join(f'{r:.2f}' for r in row['ratios'])}  {row['blocks']}")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--length", type=int, nargs="+", help="default: 1024 4096; GPU 4096 16384")
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, help="default: 4; GPU 16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--sweep", action="store_true", help="time block sizes instead")
    parser.add_argument("--json", type=Path, help="write everything measured")
    return parser.parse_args()


def environment(device: str) -> dict[str, Any]:
    """What the numbers depend on besides the code."""
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "blocks": asdict(blocks_for(torch.device(device))),
    }


def main() -> None:
    """Measure, print, write."""
    options = arguments()
    cuda = options.device == "cuda"
    if options.threads:
        torch.set_num_threads(options.threads)
    lengths = options.length or ([4096, 16384] if cuda else [1024, 4096])
    heads = options.heads or (16 if cuda else 4)
    cells = [
        Cell(head_dim, mask, length, options.batch, heads)
        for head_dim, mask, length in itertools.product(options.head_dim, MASKS, lengths)
    ]
    around = environment(options.device)
    print(json.dumps(around))
    if options.sweep:
        rows = sweep(cells, options.device, options.repeats)
        print("mean   " + " ".join(f"{c.head_dim}/{c.mask}/{c.length}" for c in cells))
        show_sweep(rows)
    else:
        rows = [measure(cell, options.device, options.repeats) for cell in cells]
        show(rows)
    if options.json:
        options.json.write_text(json.dumps({"environment": around, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
