"""Which bounds real kernels satisfy, and how tightly, for several arithmetic profiles.

    python benchmarks/profiles.py [--dtypes NAME ...] [--lengths N ...] [--processes N]
        [--json PATH] [--md PATH]

Prints the largest error ÷ bound over all problems for each kernel and profile: fp8 with the 13-bit
accumulator of Hopper's and Ada's tensor cores and with fp32 sums, tf32 truncated and rounded to
nearest, and every kernel's own profile in every dtype. On a CPU, sums are fp32 and only interpreted
kernels truncate.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from calibration import Untimed
from in_processes import finished, write_json
from judged_record import judged_record

from attncheck.core.declared_arithmetic import FP32, HOPPER_FP8
from attncheck.core.mod_spec import Spec
from attncheck.inputs.distributions import DISTRIBUTIONS
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.capabilities.named_kernels import subject_named
from attncheck.verify.environment import default_device, environment, prepare
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.executor import InProcess

if TYPE_CHECKING:
    from attncheck.core.declared_arithmetic import Arithmetic
    from attncheck.subjects.capabilities.subject import Subject

DTYPES = ("fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2")
KERNELS = {
    "cpu": ("ideal", "triton-flash2", "sdpa-math", "sdpa-flash"),
    "cuda": (
        *("ideal", "triton-flash2", "triton-flash2-vt", "triton-flash2-fastacc", "triton-flash1"),
        *("sdpa-math", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn"),
    ),
}
LENGTHS = {"cpu": (128,), "cuda": (128, 777, 1024, 4096)}
_FP8 = {
    "fp32 sums": {"scores": FP32, "values": FP32},
    "13-bit sums": {"scores": HOPPER_FP8, "values": HOPPER_FP8},
}
CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "tf32": {"truncated": {"truncates": True}, "to nearest": {"truncates": False}},
    "e4m3": _FP8,
    "e5m2": _FP8,
}
NUMBERS = ("out_over_bound", "out_over_probable", "lse_over_bound", "lse_over_probable")


@dataclass(frozen=True)
class Task:
    """A problem of each distribution."""

    device: str
    dtype: str
    length: int
    dim: int
    mask: str


def work(task: Task) -> list[dict[str, Any]]:
    """Return a row for each problem, kernel and profile."""
    prepare(task.device)
    rows = []
    for seed, distribution in enumerate(DISTRIBUTIONS):
        problem = Problem(
            heads=2,
            query=min(task.length, 1024),
            kv=task.length,
            head_dim=task.dim,
            dtype=task.dtype,
            mask=Spec.of(task.mask),
            distribution=distribution,
            seed=seed,
        )
        evidence = EvidenceBuilder(Case(problem=problem), task.device)
        for name in KERNELS[task.device]:
            rows += judged(name, evidence)
    return rows


def judged(name: str, evidence: EvidenceBuilder) -> list[dict[str, Any]]:
    """Judge one kernel by every profile of its dtype; return a row for each."""
    problem = evidence.case.problem
    if not InProcess().concerns(subject_named(name), problem):
        return []
    rows = []
    for profile, changes in {"its own": {}, **CHANGES.get(problem.dtype, {})}.items():
        subject = declaring(subject_named(name), changes)
        record = judged_record(subject, evidence, Untimed())
        if record.judgement is None:
            continue
        row = {"kernel": name, "dtype": problem.dtype, "profile": profile}
        row |= {"status": record.status, "rule": record.judgement.rule}
        row |= {"distribution": problem.distribution, "problem": str(problem)}
        row |= {number: getattr(record.judgement, number) for number in NUMBERS}
        rows.append(row)
    return rows


def declaring(subject: Subject, changes: dict[str, Any]) -> Subject:
    """Return the kernel with ``changes`` of the arithmetic that it declares."""
    declared = subject.arithmetic

    def arithmetic(problem: Problem, device: str) -> Arithmetic:
        return dataclasses.replace(declared(problem, device), **changes)

    subject.arithmetic = arithmetic  # type: ignore[method-assign]
    return subject


def page(result: dict[str, Any]) -> str:
    """Return a page with a line for each kernel, dtype and profile, as Markdown."""
    rows = result["rows"]
    env = result["environment"]
    heads = ("dtype", "kernel", "profile", "problems", "beyond a bound", "failed")
    names = [name.replace("_over_", " ÷ ") for name in NUMBERS]
    lines = [
        "# Arithmetic profiles against real kernels",
        "",
        f"{env['device']}; torch {env['torch']}, triton {env['triton'] or '–'}.",
        "Largest error ÷ bound over all problems; *beyond a bound* counts the deterministic one's.",
        "",
        f"| {' | '.join((*heads, *names))} |",
        f"|{' --- |' * 3}{' --: |' * (len(heads) + len(names) - 3)}",
    ]
    for dtype, kernel, profile in sorted(
        {(r["dtype"], r["kernel"], r["profile"]) for r in rows}, key=_order
    ):
        some = [
            r for r in rows if (r["dtype"], r["kernel"], r["profile"]) == (dtype, kernel, profile)
        ]
        beyond = sum(max(r["out_over_bound"] or 0, r["lse_over_bound"] or 0) > 1 for r in some)
        failed = sum(r["status"] == "fail" for r in some)
        cells = [_largest(r[name] for r in some) for name in NUMBERS]
        line = [dtype, kernel, profile, len(some), beyond, failed, *cells]
        lines.append(f"| {' | '.join(map(str, line))} |")
    return "\n".join(lines) + "\n"


def _order(key: tuple[str, str, str]) -> tuple[Any, ...]:
    return (DTYPES.index(key[0]), *key[1:])


def _largest(values: Any) -> str:
    known = [value for value in values if value is not None]
    return f"{max(known):.3g}" if known else "–"


def main() -> None:
    """Judge all kernels, and write the JSON file and the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default_device())
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--lengths", type=int, nargs="*")
    parser.add_argument("--dims", type=int, nargs="*", default=[64, 96, 128])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--json", type=Path, default=Path("reports/profiles.json"))
    parser.add_argument("--md", type=Path, default=Path("reports/profiles.md"))
    options = parser.parse_args()
    prepare(options.device)
    todo = [
        Task(options.device, dtype, length, dim, mask)
        for length in options.lengths or LENGTHS[options.device]
        for dim in options.dims
        for mask in ("full", "causal")
        for dtype in options.dtypes
    ]
    env = json.loads(msgspec.json.encode(environment(options.device)))
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"environment": env, "rows": rows}
    parts = finished(work, todo, processes=options.processes, seconds=options.seconds)
    for done, part in enumerate(parts, 1):
        rows += part
        if done % 10 == 0:
            print(f"{done}/{len(todo)}", file=sys.stderr, flush=True)
            write_json(options.json, result)
    write_json(options.json, result)
    options.md.write_text(page(result))
    print(json.dumps({"rows": len(rows)}))


if __name__ == "__main__":
    main()
