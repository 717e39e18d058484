"""Stage contract: the smallest problems, everything that is declared, and what is unusual."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncheck.capabilities.capability_table import ALIASES
from attncheck.capabilities.configuration import read_configuration
from attncheck.core.errors import ProblemError
from attncheck.core.formats import DTYPES, FORMATS
from attncheck.inputs.problem import Case, Problem
from attncheck.mods.library import FULL
from attncheck.mods.spec import Spec
from attncheck.suite.marks import SOFTMAX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.gate.planning import Planning
    from attncheck.records.run_reports import Stage
    from attncheck.workers.units import Unit

__all__ = ["contract"]

_STAGE: Stage = "contract"
_SMALL: dict[str, dict[str, Any]] = {
    "smallest": {"query": 1, "kv": 1},
    "a tile": {"query": 16, "kv": 16},
}
# Whether it takes these is the kernel's own affair: it says so cleanly, or it answers rightly.
# Those of one mask are beside each other: for each kind kernels are compiled.
_UNUSUAL: dict[str, dict[str, Any]] = {
    "other scale": {"query": 5, "kv": 7, "scale": 0.3},
    # Of one size and no larger: a path without bounds, chosen for the tiles that there once were.
    "whole tiles of 16": {"query": 48, "kv": 48},
    "whole tiles of 32": {"query": 96, "kv": 96},
    "whole tiles of 64": {"query": 192, "kv": 192},
    "three heads to a key head": {"query": 5, "kv": 7, "heads": 6, "kv_heads": 2},
    "rows that see nothing": {
        "query": 7,
        "kv": 5,
        "mask": Spec.of("causal_bottom_right"),
    },
    # More than a tile of rows of every kernel of ours, and a diagonal within a tile of keys.
    "a diagonal beyond a tile": {
        "query": 177,
        "kv": 293,
        "mask": Spec.of("causal_bottom_right"),
    },
    "more rows than keys": {"query": 7, "kv": 5, "mask": Spec.of("causal")},
    "more keys than rows": {"query": 5, "kv": 7, "mask": Spec.of("causal")},
    # A first tile that the mask empties, before scores that are all far below 0.
    "a window over negative scores": {
        "query": 100,
        "kv": 100,
        "mask": Spec.of("sliding_window", window=17),
        "distribution": "negative_logits",
    },
    "odd head_dim": {"query": 5, "kv": 7, "head_dim": 17},
    "other value_dim": {"query": 5, "kv": 7, "value_dim": 32},
    "a window beyond a tile": {
        "query": 177,
        "kv": 293,
        "mask": Spec.of("sliding_window", window=73),
    },
    # Of up to 256 rows: those of a GPU are larger than an interpreter's.
    "a prefix beyond the diagonal's tiles": {
        "query": 20,
        "kv": 330,
        "mask": Spec.of("prefix_lm", prefix=300),
    },
    "a prefix beside padding": {
        "query": 9,
        "kv": 20,
        "mask": Spec.of("and", Spec.of("prefix_lm", prefix=4), Spec.of("padding", lengths=[15])),
    },
    "negative scores backward": {
        "query": 40,
        "kv": 40,
        "distribution": "negative_logits",
        "backward": True,
    },
    "rows that see nothing backward": {
        "query": 7,
        "kv": 5,
        "mask": Spec.of("causal_bottom_right"),
        "backward": True,
    },
    "a window backward": {
        "query": 9,
        "kv": 9,
        "mask": Spec.of("sliding_window", window=2),
        "backward": True,
    },
    "the gradient of a table": {
        "query": 140,
        "kv": 70,
        "score": Spec.of("relative_bias", distance=4, seed=0),
        "backward": True,
        "dcaptured": True,
    },
}
# The smallest there is: times a descale it is 0, and 0 times a score of −∞ is NaN.
_NO_SCALE: dict[str, Any] = {
    "query": 4,
    "kv": 70,
    "mask": Spec.of("causal"),
    "scale": FORMATS["fp32"].subnormal_spacing,
}
# More than the 65 535 places of a grid's second axis. Of so many heads exact attention takes
# minutes, and a row of one key none: it is that key's value.
_MANY: dict[str, Any] = {"batch": 65_537, "query": 1, "kv": 2, "mask": Spec.of("causal")}
_DECLARED_MASKS = {
    "full": FULL,
    "causal": Spec.of("causal"),
    "causal_bottom_right": Spec.of("causal_bottom_right"),
    "sliding_window": Spec.of("sliding_window", window=3),
    "prefix_lm": Spec.of("prefix_lm", prefix=3),
    "padding": Spec.of("padding", lengths=[9]),
    "document": Spec.of("document", lengths=[9, 7]),
}


def contract(planning: Planning) -> Iterator[Unit]:
    """The questions, in every dtype that the kernel takes."""
    asked: set[str] = set()
    # Backwards last: each has kernels of its own to be compiled, and forwards are wrong more often.
    for name, problem in sorted(_problems(planning), key=lambda named: named[1].backward):
        unit = planning.ask(_STAGE, Case(problem=problem), name)
        if unit.id not in asked:
            asked.add(unit.id)
            yield unit
    yield from _many_sequences(planning)


def _many_sequences(planning: Planning) -> Iterator[Unit]:
    """More than a grid may hold; on a CPU there are no grids."""
    if planning.device != "cuda":
        return
    for dtype in planning.dtypes[:1]:
        problem = Problem(dtype=dtype, **_MANY)
        if planning.executor.concerns(planning.subject, problem):
            case = Case(problem=problem, question="first_row")
            yield planning.ask(_STAGE, case, "more sequences than a grid holds")


def _problems(planning: Planning) -> Iterator[tuple[str, Problem]]:
    for turn, dtype in enumerate(planning.dtypes):
        for name, fields in _SMALL.items():
            for backward in (False, True):
                yield from _taken(planning, name, fields, dtype, backward=backward)
        if turn == 0:
            yield from _unusual(planning, dtype, _UNUSUAL)
        if DTYPES[dtype].scaled:
            yield from _unusual(planning, dtype, {"no scale": _NO_SCALE})
    yield from _declared(planning)
    for dtype in planning.dtypes:
        if not planning.refusal(SOFTMAX, dtype):
            yield SOFTMAX, Problem(operation=SOFTMAX, query=2, kv=16, dtype=dtype)


def _taken(
    planning: Planning, name: str, fields: dict[str, Any], dtype: str, *, backward: bool
) -> Iterator[tuple[str, Problem]]:
    """The smallest Problem of its kind that the kernel takes."""
    if backward and DTYPES[dtype].scaled:
        return
    problem = Problem(dtype=dtype, backward=backward, **fields)
    found = planning.nearest(problem)
    if found is not None:
        yield f"{name} backward" if backward else name, found


def _unusual(
    planning: Planning, dtype: str, problems: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, Problem]]:
    for name, fields in problems.items():
        if DTYPES[dtype].scaled and fields.get("backward"):
            continue
        problem = Problem(dtype=dtype, **fields)
        if planning.executor.concerns(planning.subject, problem):
            yield name, problem


def _declared(planning: Planning) -> Iterator[tuple[str, Problem]]:
    """Each dtype, head_dim and mask of the kernel's table, whatever the kernel itself says."""
    table = read_configuration().kernels.get(planning.unit.kernel)
    if table is None:
        return
    first = planning.dtypes[0] if planning.dtypes else "bf16"
    wanted = planning.choices.dtypes or table.dtypes or ()
    dims = table.head_dims if isinstance(table.head_dims, tuple) else ()
    for said, fields in (
        *((f"declared {dtype}", {"dtype": dtype}) for dtype in table.dtypes or ()),
        *((f"declared head_dim {_shown(dim)}", _dims(dim)) for dim in dims),
        *((f"declared {mask}", _mask(mask)) for mask in table.masks or ()),
    ):
        try:
            usual: dict[str, Any] = {"query": 16, "kv": 16, "dtype": first}
            problem = Problem(**usual | fields)
        except ProblemError:
            continue
        known = planning.executor.concerns(planning.subject, problem)
        if known and (not wanted or problem.dtype in wanted):
            yield said, problem


def _dims(dim: int | tuple[int, int]) -> dict[str, Any]:
    keys, values = dim if isinstance(dim, tuple) else (dim, dim)
    return {"head_dim": keys, "value_dim": values}


def _shown(dim: int | tuple[int, int]) -> str:
    return "/".join(map(str, dim)) if isinstance(dim, tuple) else str(dim)


def _mask(name: str) -> dict[str, Any]:
    return {"mask": _DECLARED_MASKS.get(ALIASES.get(name, name), FULL)}
