"""Time that our FlashAttention-2 saves by skipping hidden tiles, compared with its dense kernel.

    python benchmarks/block_mask_speed.py [--length N] [--dims D ...] [--heads H] [--repeats R]
        [--device cuda|cpu] [--alone] [--json PATH] [--md PATH]

For each head dim and mask: median milliseconds of the kernel without a mask, and of the same kernel
over the tiles of the mask's block mask; their quotient, and the ideal quotient, which is all tiles
÷ visited tiles. Partial tiles also cost the mask's evaluation. Starting long rows first shortens
the end, where few programs run. On a GPU, compiled ``flex_attention`` is timed too, with and
without the same mask, unless ``--alone``. All calls are timed in turn in one process, each in a
CUDA graph where it can be captured. Skipping must not change results: out and LSE are compared with
those of the same kernel visiting every tile.

On a CPU, kernels are interpreted: a run shows that the benchmark works; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from in_processes import write_json

from attncheck.core.mod_spec import FULL, Spec
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Problem
from attncheck.subjects.torch_kernels import Flex
from attncheck.subjects.triton_flash import Flash2
from attncheck.verify.environment import default_device, environment, prepare
from attncheck.verify.timing import medians

if TYPE_CHECKING:
    from attncheck.subjects.capabilities.subject import Subject

_DOCUMENTS = 8
_READING = (
    "*Dense*: the same kernel without a mask. *Ideal*: all tiles ÷ visited tiles. *Same bits*: out "
    "and LSE are those of the kernel that visits every tile."
)


def masks(length: int) -> dict[str, Spec]:
    """Return the masks that are timed, by their names in the table."""
    even = [length // _DOCUMENTS] * (_DOCUMENTS - 1)
    return {
        "causal": Spec.of("causal"),
        f"window of {length // 8:,}": Spec.of("sliding_window", window=length // 8),
        f"{_DOCUMENTS} documents": Spec.of("document", lengths=[*even, length - sum(even)]),
    }


def drawn(problem: Problem, device: str) -> Inputs:
    """Return standard normal tensors, since their values do not change the time."""
    torch.manual_seed(0)
    dtype = problem.formats.storage.torch_dtype
    q_shape = (problem.batch, problem.heads, problem.query, problem.head_dim)
    k_shape = (problem.batch, problem.kv_heads, problem.kv, problem.head_dim)
    q, k, v = (torch.randn(shape, device=device).to(dtype) for shape in (q_shape, k_shape, k_shape))
    return Inputs(problem=problem, q=q, k=k, v=v)


def measured(problem: Problem, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each mask at the sizes of ``problem``."""
    device, inputs = options.device, drawn(problem, options.device)
    masked_inputs = {
        name: inputs.replace(problem=problem.replace(mask=mask))
        for name, mask in masks(problem.kv).items()
    }
    kernels: dict[str, Subject] = {"ours": Flash2()}
    if device == "cuda" and not options.alone:
        kernels["flex"] = Flex()
    calls = {
        (kernel, name): subject.prepare(each)
        for kernel, subject in kernels.items()
        for name, each in {"dense": inputs, **masked_inputs}.items()
    }
    for each in masked_inputs.values():  # kernels must be compiled before a graph is captured
        Flash2().run(each.replace(v=torch.full_like(each.v, torch.nan)))
    named_calls = {"/".join(key): call for key, call in calls.items()}
    seconds = medians(named_calls, device, options.repeats, graph=True)
    milliseconds = {name: 1e3 * each for name, each in seconds.items()}
    rows = []
    for name, each in masked_inputs.items():
        every, visited = tiles(each.problem, device)
        row: dict[str, Any] = {"head_dim": problem.head_dim, "mask": name}
        row |= {"tiles": every, "visited": visited, "ideal": every / visited}
        for kernel in kernels:
            dense, masked = milliseconds[f"{kernel}/dense"], milliseconds[f"{kernel}/{name}"]
            row[kernel] = {"dense_ms": dense, "masked_ms": masked, "speed_up": dense / masked}
        row["share_of_ideal"] = row["ours"]["speed_up"] / row["ideal"]
        row["same_bits"] = same_bits(calls["ours", name](), Flash2(dense=True).run(each))
        rows.append(row)
    return rows


def tiles(problem: Problem, device: str) -> tuple[int, int]:
    """Return the number of tiles, and how many of them our kernel visits."""
    subject, where = Flash2(), torch.device(device)
    launch = subject.launch(problem, device)
    visits = subject.visited(problem, where)["tiles"]
    blocks = -(-problem.kv // launch.block_kv)
    return visits.counts.numel() * blocks, visits.visited()


def same_bits(got: Any, expected: Any) -> bool:
    """Return whether out and LSE have the same bits."""
    return torch.equal(got.out, expected.out) and torch.equal(got.lse, expected.lse)


def page(result: dict[str, Any]) -> str:
    """Return a page with a line for each head dim and mask, as Markdown."""
    env, rows = result["environment"], result["rows"]
    heads = ["head dim", "mask", "dense ms", "masked ms", "speed-up", "ideal", "share of ideal"]
    heads += ["same bits"]
    flex = all("flex" in row for row in rows)
    heads += ["flex dense ms", "flex masked ms", "flex speed-up"] if flex else []
    lines = [
        "# Block masks: the time of tiles that are not visited",
        "",
        f"{env['device']}; torch {env['torch']}, triton {env['triton'] or '–'}. {result['shape']}.",
        _READING,
        "",
        f"| {' | '.join(heads)} |",
        f"| --: | --- |{' --: |' * (len(heads) - 2)}",
    ]
    lines += [f"| {' | '.join(_cells(row, flex=flex))} |" for row in rows]
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any], *, flex: bool) -> list[str]:
    ours = row["ours"]
    cells = [str(row["head_dim"]), row["mask"], f"{ours['dense_ms']:.3f}"]
    cells += [f"{ours['masked_ms']:.3f}", f"{ours['speed_up']:.2f}×", f"{row['ideal']:.2f}×"]
    cells += [f"{100 * row['share_of_ideal']:.0f} %", "yes" if row["same_bits"] else "**no**"]
    if flex:
        other = row["flex"]
        cells += [f"{other['dense_ms']:.3f}", f"{other['masked_ms']:.3f}"]
        cells += [f"{other['speed_up']:.2f}×"]
    return cells


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default_device())
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, help="default: 16, 1 on a CPU")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--repeats", type=int, help="default: 15, 1 on a CPU")
    parser.add_argument("--alone", action="store_true", help="without flex_attention, a peer")
    parser.add_argument("--json", type=Path, default=Path("reports/block_mask_speed.json"))
    parser.add_argument("--md", type=Path, default=Path("reports/block_mask_speed.md"))
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    options.heads = options.heads or (16 if on_gpu else 1)
    options.repeats = options.repeats or (15 if on_gpu else 1)
    return options


def main() -> None:
    """Measure, print, write."""
    options = arguments()
    prepare(options.device)
    sizes = {"batch": options.batch, "heads": options.heads, "query": options.length}
    result: dict[str, Any] = {
        "environment": json.loads(msgspec.json.encode(environment(options.device))),
        "shape": f"{options.dtype}, batch {options.batch}, {options.heads} heads, "
        f"{options.length:,} rows and keys",
        "rows": [],
    }
    for dim in options.dims:
        problem = Problem(**sizes, head_dim=dim, dtype=options.dtype, mask=FULL)
        result["rows"] += measured(problem, options)
        write_json(options.json, result)
    options.md.write_text(page(result))
    print(page(result), end="")


if __name__ == "__main__":
    main()
