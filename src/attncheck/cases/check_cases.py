"""The cases of a quick check: exact probes and problems that bite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attncheck import probes
from attncheck.cases.variants import check_measured
from attncheck.core.errors import ProblemError
from attncheck.inputs.problem import LARGEST_HEAD_DIM, Case, Problem
from attncheck.mods.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Sequence


__all__ = ["CheckCase", "check_cases"]

_CAUSAL = Spec.of("causal")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckCase:
    """One Case under the name it has on the command line and in reports.

    Attributes:
        name: ``causal-wide``; a probe's own name stands before it: ``decode causal-wide``.
        summary: What it would show, in a line.
        case: What is asked.
    """

    name: str
    summary: str
    case: Case


# Most lengths are no multiples of any tile; some are of small tiles alone (48 of 16, 96 of 32, 320
# of 64), for a kernel that asks by the length of another tile whether to mask its last. Two heads
# and few tiles, for Triton's interpreter. The head_dims are those of which 1/√head_dim is no power
# of two, and 64.
_LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("lengths that fit every tile; eight heads", {"query": 64, "heads": 8}),
    "ragged": ("lengths that fit no tile: masking of the last one", {"query": 77, "kv": 93}),
    "causal": ("the diagonal", {"query": 130, "head_dim": 128, "mask": _CAUSAL}),
    "causal-even": (
        "the diagonal, at lengths that fit every tile",
        {"query": 128, "mask": _CAUSAL},
    ),
    "causal-wide": (
        "more keys than queries: causal is aligned top-left",
        {"query": 33, "kv": 150, "head_dim": 80, "mask": _CAUSAL},
    ),
    "causal-tall": (
        "more queries than keys: the last rows see every key",
        {"query": 99, "kv": 48, "head_dim": 96, "mask": _CAUSAL},
    ),
    "gqa": (
        "three query heads to a key head, two sequences",
        {"batch": 2, "heads": 6, "kv_heads": 2, "query": 40, "kv": 70, "head_dim": 96},
    ),
    "one-query": ("one row, as in decoding", {"batch": 2, "query": 1, "kv": 211}),
    "one-key": ("one key: out is its value", {"query": 5, "kv": 1, "head_dim": 80}),
    "window": (
        "a sliding window, as a mask that is written out",
        {"query": 100, "mask": Spec.of("sliding_window", window=17)},
    ),
    "padding": (
        "another number of keys in each sequence",
        {
            "batch": 2,
            "query": 35,
            "kv": 60,
            "head_dim": 80,
            "mask": Spec.of("padding", lengths=[60, 7]),
        },
    ),
    "empty-rows": (
        "rows that see no key: out is exactly 0",
        {"batch": 2, "query": 20, "kv": 30, "mask": Spec.of("padding", lengths=[0, 30])},
    ),
}
_NUMBERS: dict[str, tuple[str, dict[str, Any]]] = {
    "scale": ("a scale other than 1/√head_dim", {"query": 65, "head_dim": 80, "scale": 0.3}),
    "large": (
        "logits beyond fp32's exp",
        {"query": 64, "kv": 129, "head_dim": 96, "distribution": "large_logits"},
    ),
    "negative": (
        "every logit near −128",
        {"query": 40, "kv": 96, "distribution": "negative_logits"},
    ),
    "one-hot": (
        "one key takes the whole weight",
        {"query": 60, "kv": 130, "head_dim": 128, "distribution": "one_hot"},
    ),
    "outliers": (
        "one number in a thousand is ten times larger",
        {"query": 65, "kv": 129, "head_dim": 128, "distribution": "outliers"},
    ),
    "uniform": (
        "all signs equal: errors add up",
        {"query": 64, "kv": 320, "head_dim": 80, "distribution": "uniform"},
    ),
    "sink": (
        "key 0 takes nearly the whole weight",
        {"query": 50, "kv": 90, "distribution": "sink"},
    ),
}
# On which layouts a probe is asked; decoding tells where a key is, and is asked on all.
_PROBED: dict[str, tuple[str, ...]] = {
    "decode": tuple(name for name in _LAYOUTS if name not in {"plain", "one-key"}),
}
_PROBED_ELSE = ("ragged", "causal")
_ROUNDS = 2  # of a probe's numbers: decoding is done in one, ramps are fast and slow


def check_cases(dtype: str, head_dims: Sequence[int] = ()) -> list[CheckCase]:
    """All questions in ``dtype``, in the order in which they are asked.

    Args:
        dtype: A name of ``formats.DTYPES`` that kernels are measured in.
        head_dims: Those that the kernel takes; none: 64, 80, 96 and 128.

    Raises UnknownName or ProblemError for what cannot be.
    """
    check_measured(dtype)
    for dim in head_dims:
        if not 1 <= dim <= LARGEST_HEAD_DIM:
            raise ProblemError(f"head_dim={dim} must be 1–{LARGEST_HEAD_DIM}.")
    problems = {
        name: (summary, _problem(fields, dtype, head_dims, turn))
        for turn, (name, (summary, fields)) in enumerate((_LAYOUTS | _NUMBERS).items())
    }
    asked = _probes(problems)
    asked += [
        CheckCase(name=name, summary=summary, case=Case(problem=problem))
        for name, (summary, problem) in problems.items()
    ]
    return asked


def _problem(fields: dict[str, Any], dtype: str, head_dims: Sequence[int], turn: int) -> Problem:
    wanted = {"heads": 2, "head_dim": 64} | fields
    if head_dims and wanted["head_dim"] not in head_dims:
        wanted["head_dim"] = head_dims[turn % len(head_dims)]
    return Problem(dtype=dtype, **wanted)


def _probes(problems: dict[str, tuple[str, Problem]]) -> list[CheckCase]:
    asked = []
    for name, each in probes.PROBES.items():
        for layout in _PROBED.get(name, _PROBED_ELSE):
            problem = problems[layout][1]
            if each.unfit(problem) is not None:
                continue
            for turn, case in enumerate(probes.cases(name, problem)[:_ROUNDS]):
                again = f"-{turn + 1}" if turn else ""
                known = f"{name}-{layout}{again}"
                asked.append(CheckCase(name=known, summary=each.summary, case=case))
    return asked
