"""Compiles the forward's two launches for Hopper, without one: who adds a row of weights up?

A row sum has one order in both only where both lay the scores out alike: how many warps share the
keys of a row. Prints, for each dtype, head dim and tile asked for as ``DTYPE:DIM[:Q,KV,WARPS]``,
``same`` or ``apart``.
"""

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget

from attncheck.core.mod_spec import Spec
from attncheck.inputs.problem import Problem
from attncheck.subjects.triton_flash import Flash2

SPILLS = Path(__file__).parents[2] / "benchmarks" / "spills.py"


def loaded():
    spec = importlib.util.spec_from_file_location("spills", SPILLS)
    module = importlib.util.module_from_spec(spec)
    sys.modules["spills"] = module
    spec.loader.exec_module(module)
    return module


def warps_of_scores(spills, problem: Problem, kind: str) -> str:
    """``warpsPerCTA`` of the first product's result."""
    source, options = spills.source_of("flash2", problem, spills.KINDS[kind])
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    products = [x for x in text.splitlines() if "tt.dot " in x or "warp_group_dot " in x]
    name = re.findall(r"(#\w+)>\s*(?:loc\(.*\))?$", products[0])[-1]
    return re.search(r"warpsPerCTA = (\[[^]]*\])", layouts[name])[1]


def main() -> None:
    spills, chosen = loaded(), Flash2.launch
    for asked in sys.argv[1:]:
        dtype, dim, *tile = asked.split(":")
        if tile:
            q, kv, warps = map(int, tile[0].split(","))
            changes = {"block_query": q, "block_kv": kv, "warps": warps}
            Flash2.launch = lambda *given, c=changes: replace(chosen(*given), **c)
        problem = Problem(
            heads=16, query=4096, head_dim=int(dim), dtype=dtype, mask=Spec.of("causal")
        )
        found = {warps_of_scores(spills, problem, kind) for kind in ("causal", "careful")}
        verdict = "same" if len(found) == 1 else "apart"
        sys.stdout.write(f"{asked} {verdict} {' '.join(sorted(found))}\n")
        Flash2.launch = chosen


main()
