"""The benchmark tables of papers, by name: which problems, in which dtypes and passes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attncheck.cases.variants import FURTHER, VARIANTS, Shape, check_memory
from attncheck.core.errors import UsageError, require_known
from attncheck.core.formats import DTYPES
from attncheck.inputs.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
_LONG = (1024, 2048, 4096, 8192, 16384, 32768)
# Those of the FlexAttention paper: none, causal, ALiBi, a window, a prefix, a softcap, documents.
_SEVEN = tuple(name for name, variant in VARIANTS.items() if variant.mods is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTable:
    """Every combination of its lengths, dimensions, heads and variants."""

    summary: str  # what it is, in a line
    lengths: tuple[int, ...]
    dims: tuple[int, ...]
    variants: tuple[str, ...] = ("full", "causal")
    dtypes: tuple[str, ...] = ("bf16",)
    backward: bool = False  # whether the backward is timed too
    tokens: int = 0  # of all sequences: the batch follows from the length
    batch: int = 1  # where it does not
    hidden: int = 0  # heads × head_dim: the heads follow from the dimension
    heads: int = 1  # where they do not
    groups: tuple[int, ...] = (1,)  # query heads that share a key head

    def shape(self, length: int, dim: int, group: int) -> Shape:
        """Return the sizes at a length, a dimension and a group."""
        heads = self.hidden // dim if self.hidden else self.heads
        return Shape(
            batch=max(1, self.tokens // length) if self.tokens else self.batch,
            heads=heads,
            kv_heads=max(1, heads // group),
            query=length,
            kv=length,
            head_dim=dim,
            value_dim=dim,
        )


TABLES = {
    "main": BenchTable(
        summary="two lengths of flash3 in bf16",
        lengths=(4096, 16384),
        dims=(64, 128),
        backward=True,
        tokens=16384,
        hidden=2048,
    ),
    "flash2": BenchTable(
        summary="FlashAttention-2: 16k tokens, 2,048 wide",
        lengths=_LENGTHS,
        dims=(64, 128),
        dtypes=("fp16", "bf16"),
        backward=True,
        tokens=16384,
        hidden=2048,
    ),
    "flash3": BenchTable(
        summary="FlashAttention-3: the same with head_dim 256",
        lengths=_LENGTHS,
        dims=(64, 128, 256),
        dtypes=("fp16",),
        backward=True,
        tokens=16384,
        hidden=2048,
    ),
    "flash3-fp8": BenchTable(
        summary="FlashAttention-3: forward in fp8",
        lengths=_LENGTHS,
        dims=(64, 128, 256),
        dtypes=("e4m3",),
        tokens=16384,
        hidden=2048,
    ),
    "flex": BenchTable(
        summary="FlexAttention: seven mods, MHA and GQA, 32k tokens",
        lengths=_LONG,
        dims=(64,),
        variants=_SEVEN,
        backward=True,
        tokens=32768,
        heads=16,
        groups=(1, 8),
    ),
    "tutorial": BenchTable(
        summary="Triton's tutorial: batch 4, 32 heads",
        lengths=(1024, 2048, 4096, 8192, 16384),
        dims=(64, 128),
        dtypes=("fp16",),
        backward=True,
        batch=4,
        heads=32,
    ),
    "tutorial-fp8": BenchTable(
        summary="Triton's tutorial: forward in fp8",
        lengths=(1024, 2048, 4096, 8192, 16384),
        dims=(64, 128),
        dtypes=("e5m2",),
        batch=4,
        heads=32,
    ),
    "decode": BenchTable(
        summary="a decoding step, keys in one piece and in pages",
        lengths=_LONG,
        dims=(64, 128),
        variants=("decode", "paged_decode"),
        batch=16,
        heads=32,
        groups=(1, 8),
    ),
    "paged": BenchTable(
        summary="a prefill on keys in pages",
        lengths=_LONG,
        dims=(64, 128),
        variants=("paged",),
        tokens=32768,
        heads=16,
    ),
    "cpu": BenchTable(
        summary="small enough for a CPU",
        lengths=(512, 1024),
        dims=(64,),
        dtypes=("fp32", "bf16"),
        backward=True,
        heads=4,
    ),
}
"""By name, as typed."""

DEFAULT_TABLE = {"cpu": "cpu", "cuda": "main"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """A problem of a table; its backward is timed where the Problem has one."""

    table: str
    variant: str
    problem: Problem


def bench_plan(
    tables: Sequence[str],
    *,
    shapes: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    variants: Sequence[str] = (),
    lengths: Sequence[int] = (),
    dims: Sequence[int] = (),
    backward: bool | None = None,
    seed: int = 0,
) -> list[BenchPlan]:
    """Return the problems of tables, or of typed shapes, in the order in which they are timed.

    Args:
        tables: Names of ``TABLES``.
        shapes: As typed (``Shape.parse``), in place of tables; MHA where kv heads are left open.
        dtypes: In place of a table's.
        variants: The same.
        lengths: The same; a decoding step's are its keys.
        dims: The same.
        backward: Whether the backward is timed; as the table says where it is None.

    Raises:
        UnknownName, ProblemError: for what cannot be, before anything is measured.
        UsageError: where nothing is left to be timed.
    """
    require_known("table", tables, TABLES)
    known = VARIANTS | FURTHER
    require_known("variant", variants, known)
    require_known("dtype", dtypes, [name for name, dtype in DTYPES.items() if dtype.measured])
    asked = []
    for name in () if shapes else tables:
        table = TABLES[name]
        sizes = [
            table.shape(*one)
            for one in itertools.product(lengths or table.lengths, dims or table.dims, table.groups)
        ]
        wanted = table.backward if backward is None else backward
        asked.append((name, sizes, dtypes or table.dtypes, variants or table.variants, wanted))
    if shapes:
        sizes = list(map(Shape.parse, shapes))
        usual = ("full", "causal")
        asked.append(("own", sizes, dtypes or ("bf16",), variants or usual, backward is not False))
    plan = []
    for name, sizes, of_dtypes, of_variants, wanted in asked:
        for dtype, shape, variant in itertools.product(of_dtypes, sizes, of_variants):
            has = known[variant].exists(dtype, "normal", backward=True) and not DTYPES[dtype].scaled
            if known[variant].mods is None:
                raise UsageError("bench times attention: softmax is none.")
            fields = known[variant].fields(shape, shape.kv_heads or shape.heads)
            problem = Problem(**fields, dtype=dtype, seed=seed, backward=wanted and has)
            check_memory(problem)
            plan.append(BenchPlan(table=name, variant=variant, problem=problem))
    return list(dict.fromkeys(plan))
