"""FLOP rate of the streaming oracle relative to float64 torch.matmul, and its memory.

    python benchmarks/oracle.py [--backward] [--device cpu|cuda] [--length N ...] [--sweep]
        [--seconds N] [--json FILE]

FLOPs count products of visible pairs of a row and a key, 2·head_dim for each pair: two products in
a forward (QKᵀ, PV), five in a backward (QKᵀ, dO Vᵀ, Pᵀ dO, dSᵀ Q, dS K), 2.5 × as many. With
``--backward`` a call makes both passes, seven products: *ratio* is for the backward alone, five
products over the time of both passes minus that of the forward in the same repeats; *both* is for
the whole call. Every repeat times matmul, torch's math SDPA in float64 (where its scores fit; with
its autograd) and the oracle in turn; times are medians. ``--sweep`` times block sizes instead, for
``attncheck/oracles/tiles.py``. The JSON file is rewritten after each size.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from in_processes import write_json
from oracle_calls import (
    BACKWARD_PRODUCTS,
    Cell,
    forward_alone,
    matmul,
    peak_bytes,
    sdpa,
    streamed,
)

from attncheck.oracles.streaming_forward import Blocks, backward_blocks_for, blocks_for
from attncheck.verify.timing import medians

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Row = dict[str, Any]

MASKS = ("full", "causal")


def measure(cell: Cell, device: str, repeats: int) -> Row:
    """Return one row of the table."""
    inputs = cell.inputs(device)
    oracle = streamed(inputs)
    peak = peak_bytes(oracle, device)
    product, product_flops = matmul(device)
    calls = {"matmul": product, "streaming": oracle}
    if cell.backward:
        calls["forward"] = forward_alone(inputs)
    if math_sdpa := sdpa(cell, inputs):
        calls["sdpa"] = math_sdpa
    taken = medians(calls, device, repeats)
    rates = {name: cell.flops / each for name, each in taken.items() if name != "forward"}
    rates["matmul"] = product_flops / taken["matmul"]
    row: Row = {
        **asdict(cell),
        "milliseconds": taken["streaming"] * 1e3,
        "peak_bytes": peak,
        "flop_per_s": rates,
        "ratio": rates["streaming"] / rates["matmul"],
        "sdpa_ratio": rates["sdpa"] / rates["matmul"] if "sdpa" in rates else None,
    }
    if cell.backward:
        row["both_ratio"] = row["ratio"]
        row["forward_milliseconds"] = taken["forward"] * 1e3
        row["ratio"] = _backward_rate(cell, taken, "streaming") / rates["matmul"]
    return row


def table(cells: list[Cell], device: str, repeats: int) -> Iterator[list[Row]]:
    """Yield all rows so far after each new one."""
    rows: list[Row] = []
    for cell in cells:
        rows.append(measure(cell, device, repeats))
        yield rows


def _backward_rate(cell: Cell, taken: dict[str, float], name: str) -> float:
    """Return FLOPs per second of the backward pass, or of the call without a backward."""
    if not cell.backward:
        return cell.flops / taken[name]
    return BACKWARD_PRODUCTS * cell.product / (taken[name] - taken["forward"])


def candidates(device: str) -> list[Blocks]:
    """Return the block sizes that a sweep tries."""
    rows: tuple[int, ...]
    kv: tuple[int, ...]
    if device == "cuda":
        rows, kv, cell = (4096, 8192, 16384, 32768), (256, 512, 1024, 2048), 128
        query = ((512, 1024), (512, 2048), (1024, 2048), (2048, 4096))
    else:
        rows, kv, cell = (512, 1024, 2048), (256, 512, 1024), 64
        query = ((128, 256), (256, 256), (256, 512), (512, 512))
    sizes = itertools.product(rows, query, kv)
    return [Blocks(rows=r, query=q, query_most=m, kv=k, cell=cell) for r, (q, m), k in sizes]


def sweep(cells: list[Cell], device: str, repeats: int) -> Iterator[list[Row]]:
    """Yield after each cell the candidates' ratios so far, best geometric mean first."""
    tried = candidates(device)
    ratios: list[list[float]] = [[] for _ in tried]
    for cell in cells:
        inputs = cell.inputs(device)
        product, flops = matmul(device)
        calls: dict[str, Callable[[], object]] = {"matmul": product}
        if cell.backward:
            calls["forward"] = forward_alone(inputs)
        calls |= {str(i): streamed(inputs, blocks) for i, blocks in enumerate(tried)}
        taken = medians(calls, device, repeats)
        for i in range(len(tried)):
            rate = _backward_rate(cell, taken, str(i))
            ratios[i].append(rate / (flops / taken["matmul"]))
        yield _ranked(tried, ratios)


def _ranked(tried: list[Blocks], ratios: list[list[float]]) -> list[Row]:
    rows = []
    for blocks, values in zip(tried, ratios, strict=True):
        # A backward's time is a difference, which for a tiny problem may be negative.
        mean = math.prod(max(0.0, value) for value in values) ** (1 / len(values))
        rows.append({"blocks": asdict(blocks), "ratios": values, "mean": mean})
    return sorted(rows, key=lambda row: -row["mean"])


def show(rows: list[Row]) -> None:
    """Print the table."""
    print(
        f"{'D':>4} {'mask':>7} {'B·H':>5} {'N':>6} {'ms':>9} {'GFLOP/s':>9} {'matmul':>9} "
        f"{'ratio':>6} {'both':>6} {'sdpa':>6} {'peak MB':>8}"
    )
    for row in rows:
        rates = row["flop_per_s"]
        others = (row.get(name) for name in ("both_ratio", "sdpa_ratio"))
        both, other = ("—" if ratio is None else f"{ratio:.2f}" for ratio in others)
        print(
            f"{row['head_dim']:>4} {row['mask']:>7} {row['batch'] * row['heads']:>5} "
            f"{row['length']:>6} {row['milliseconds']:>9.2f} {rates['streaming'] / 1e9:>9.1f} "
            f"{rates['matmul'] / 1e9:>9.1f} {row['ratio']:>6.2f} {both:>6} {other:>6} "
            f"{row['peak_bytes'] / 1e6:>8.1f}"
        )


def show_sweep(rows: list[Row]) -> None:
    """Print the best and the worst block sizes."""
    for row in [*rows[:10], rows[-1]]:
        print(f"{row['mean']:.3f}  {' '.join(f'{r:.2f}' for r in row['ratios'])}  {row['blocks']}")


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backward", action="store_true", help="gradients, behind the forward")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--length", type=int, nargs="+", help="default: 1024 4096; GPU 4096 16384")
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, help="default: 4; GPU 16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--sweep", action="store_true", help="time block sizes instead")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after this")
    parser.add_argument("--json", type=Path, help="write everything measured")
    return parser.parse_args()


def environment(device: str, *, backward: bool) -> dict[str, Any]:
    """Return what the numbers depend on besides the code."""
    blocks_of = backward_blocks_for if backward else blocks_for
    where = torch.device(device)
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "blocks": asdict(blocks_of(where)),
        "fused_blocks": asdict(blocks_of(where, fused=True)),  # of a large problem on a Hopper GPU
    }


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """Return the sizes of the options, ordered by length."""
    cuda = options.device == "cuda"
    lengths = options.length or ([4096, 16384] if cuda else [1024, 4096])
    heads = options.heads or (16 if cuda else 4)
    return [
        Cell(head_dim, mask, length, options.batch, heads, options.backward)
        for length, head_dim, mask in itertools.product(lengths, options.head_dim, MASKS)
    ]


def main() -> None:
    """Measure, print, write."""
    options = arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    begun, cells = time.monotonic(), cells_of(options)
    around = environment(options.device, backward=options.backward)
    print(json.dumps(around))

    rows: list[Row] = []
    measured = sweep if options.sweep else table
    for rows in measured(cells, options.device, options.repeats):
        if options.json:
            write_json(options.json, {"environment": around, "rows": rows})
        if time.monotonic() - begun > options.seconds:
            break
    if options.sweep:
        print("mean   " + " ".join(f"{c.head_dim}/{c.mask}/{c.length}" for c in cells))
        show_sweep(rows)
    else:
        show(rows)


if __name__ == "__main__":
    main()
