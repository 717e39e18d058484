"""Benchmark tables by name, many from papers: their problems, dtypes and passes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attncheck.cases.variants import OPTIONAL_VARIANTS, VARIANTS, Shape
from attncheck.core.errors import UsageError, require_known
from attncheck.core.formats import DTYPES, MEASURED_DTYPES
from attncheck.inputs.problem import Problem, check_size

if TYPE_CHECKING:
    from collections.abc import Sequence

_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
_LONG = (1024, 2048, 4096, 8192, 16384, 32768)
# The FlexAttention paper's: none, causal, ALiBi, a window, a prefix, a softcap, documents.
_SEVEN = tuple(name for name, variant in VARIANTS.items() if variant.mods is not None)


@dataclass(frozen=True, slots=True)
class BenchTable:
    """A table of every combination of lengths, dimensions, groups, dtypes and variants."""

    lengths: tuple[int, ...]
    dims: tuple[int, ...]
    dtypes: tuple[str, ...] = ("bf16",)
    backward: bool = True  # whether the backward is timed too, if there is one
    batch: int = 0  # 0: ``tokens`` ÷ length
    tokens: int = 16384
    heads: int = 0  # 0: ``hidden`` ÷ dimension
    hidden: int = 2048
    variants: tuple[str, ...] = ("full", "causal")
    groups: tuple[int, ...] = (1,)  # query heads that share a key head

    def shape(self, length: int, dim: int, group: int) -> Shape:
        """Return the sizes at a length, a dimension and a group."""
        heads = self.heads or self.hidden // dim
        return Shape(
            batch=self.batch or max(1, self.tokens // length),
            heads=heads,
            kv_heads=max(1, heads // group),
            query=length,
            kv=length,
            head_dim=dim,
            value_dim=dim,
        )


_SIZES, _ALL = (64, 128), (64, 128, 256)
TABLES = {
    "main": BenchTable((4096, 16384), _SIZES),
    "flash2": BenchTable(_LENGTHS, _SIZES, ("fp16", "bf16")),
    "flash3": BenchTable(_LENGTHS, _ALL, ("fp16",)),
    "flash3-fp8": BenchTable(_LENGTHS, _ALL, ("e4m3",)),
    "flex": BenchTable(_LONG, (64,), tokens=32768, heads=16, variants=_SEVEN, groups=(1, 8)),
    "tutorial": BenchTable(_LONG[:-1], _SIZES, ("fp16",), batch=4, heads=32),
    "tutorial-fp8": BenchTable(_LONG[:-1], _SIZES, ("e5m2",), batch=4, heads=32),
    "decode": BenchTable(
        *(_LONG, _SIZES),
        backward=False,
        batch=16,
        heads=32,
        variants=("decode", "paged_decode"),
        groups=(1, 8),
    ),
    "paged": BenchTable(_LONG, _SIZES, tokens=32768, heads=16, variants=("paged",)),
    "cpu": BenchTable((512, 1024), (64,), ("fp32", "bf16"), batch=1, heads=4),
}
"""The tables by their names on the command line."""

DEFAULT_TABLE = {"cpu": "cpu", "cuda": "main"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """A problem of a table; its backward is timed if the Problem has one."""

    table: str
    variant: str
    problem: Problem


def bench_plan(  # noqa: PLR0913  # what is timed, and where
    tables: Sequence[str],
    *,
    shapes: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    variants: Sequence[str] = (),
    lengths: Sequence[int] = (),
    dims: Sequence[int] = (),
    backward: bool | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> list[BenchPlan]:
    """Return the problems of tables, or of the user's shapes, in the order of timing.

    Args:
        tables: Names of ``TABLES``.
        shapes: Texts for ``Shape.parse``, in place of tables; MHA if kv heads are not given.
        dtypes: Replace a table's dtypes.
        variants: Replace a table's variants.
        lengths: Replace a table's lengths; in a decoding step these are numbers of keys.
        dims: Replace a table's dimensions.
        backward: Whether the backward is timed; None: as in the table.
        device: The device on which the exact result is computed.

    Raises:
        UnknownName, ProblemError: for invalid names and sizes, before anything is measured.
        UsageError: for a variant of softmax.
    """
    require_known("table", tables, TABLES)
    known = VARIANTS | OPTIONAL_VARIANTS
    require_known("variant", variants, known)
    require_known("dtype", dtypes, MEASURED_DTYPES)
    rows = []
    for name in () if shapes else tables:
        table = TABLES[name]
        sizes = [
            table.shape(*one)
            for one in itertools.product(lengths or table.lengths, dims or table.dims, table.groups)
        ]
        requested = table.backward if backward is None else backward
        rows.append((name, sizes, dtypes or table.dtypes, variants or table.variants, requested))
    if shapes:
        sizes = list(map(Shape.parse, shapes))
        usual = ("full", "causal")
        rows.append(("own", sizes, dtypes or ("bf16",), variants or usual, backward is not False))
    plan = []
    for name, sizes, row_dtypes, row_variants, requested in rows:
        for dtype, shape, variant in itertools.product(row_dtypes, sizes, row_variants):
            has = known[variant].exists(dtype, "normal", backward=True) and not DTYPES[dtype].scaled
            if known[variant].mods is None:
                raise UsageError("bench times attention: softmax is none.")
            fields = known[variant].fields(shape, shape.kv_heads or shape.heads)
            problem = Problem(**fields, dtype=dtype, seed=seed, backward=requested and has)
            check_size(problem, device)
            plan.append(BenchPlan(table=name, variant=variant, problem=problem))
    return list(dict.fromkeys(plan))
