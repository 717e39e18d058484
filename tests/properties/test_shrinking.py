"""Shrinking of failures, compared with the smallest failing problem of an exhaustive grid."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest

from attncheck.core.mod_spec import Spec
from attncheck.inputs.problem import Case, Problem
from attncheck.verify.question_fit import question_named, question_problem

QUERIES = (1, 2, 17)
LONGEST = 40


def plain(query: int, kv: int, *, name: str = "full") -> list[Spec]:
    return [Spec.of(name)]


def windows(query: int, kv: int) -> list[Spec]:
    return [Spec.of("sliding_window", window=n) for n in range(min(4, kv + 1))]


def prefixes(query: int, kv: int) -> list[Spec]:
    return [Spec.of("prefix_lm", prefix=n) for n in range(min(4, kv + 1))]


def two_documents(query: int, kv: int) -> list[Spec]:
    total = max(query, kv)
    return [Spec.of("document", lengths=[n, total - n]) for n in range(1, min(3, total))]


def padded(query: int, kv: int) -> list[Spec]:
    return [Spec.of("padding", lengths=[kv - n]) for n in range(min(3, kv + 1))]


CAUSAL = partial(plain, name="causal")
BOTTOM_RIGHT = partial(plain, name="causal_bottom_right")


@dataclass(frozen=True)
class Fault:
    """A planted fault, the property that finds it, and the axes of its grid."""

    planted: str
    found_by: str
    question: str = "compare"
    masks: Callable[[int, int], list[Spec]] = plain
    tile: int = 16
    heads: tuple[tuple[int, int], ...] = ((1, 1),)
    dims: tuple[int, ...] = (1,)
    batch: int = 1
    seeds: int = 1

    @property
    def family(self) -> str:
        return self.masks(2, 2)[0].name

    def __str__(self) -> str:
        return f"{self.planted}-{self.question}-{self.family}"


GROUPS = ((4, 2), (6, 2), (6, 3))
RAGGED = "shapes.ragged_lengths_are_exact"
FAULTS = [
    Fault("RowBelow", "causal.future_keys_do_not_matter", "future_keys", CAUSAL),
    Fault("TopLeft", "causal.rows_see_their_keys", "decode", BOTTOM_RIGHT),
    Fault("WindowWider", "window.far_keys_do_not_matter", "hidden_keys", windows),
    Fault("PrefixShorter", "prefix_lm.rows_see_their_keys", "decode", prefixes),
    Fault("DocumentsIgnored", "document.rows_see_their_keys", "decode", two_documents),
    Fault("Interleaved", "causal.first_row_is_the_first_value", "first_row", CAUSAL, heads=GROUPS),
    Fault("GarbageDims", "shapes.extreme_head_dims_are_exact", dims=(1, 2, 3)),
    Fault("TailKeysAtZero32", RAGGED, "decode", tile=32),
    Fault("LoopFloor", RAGGED),
    Fault("LoopFloor32", RAGGED, "decode", tile=32),
    Fault("NotRescaled", RAGGED, seeds=6),  # where the largest score is in the second tile
    Fault("MaskSkippedWhenWhole", "causal.rows_see_their_keys", "decode", CAUSAL),
    Fault("EmptyRowsMean", "masked_rows.empty_rows_are_zero", "empty_rows", padded),
    Fault("MaximumFromZero", "lse.levels_of_logits", "negative"),
    Fault(
        "BatchDependent", "determinism.alone_equals_in_a_batch", "alone_in_batch", CAUSAL, batch=2
    ),
]


def grid(fault: Fault) -> Iterator[Case]:
    """Every Case of few rows, up to 40 keys, few numbers and few dims, the smallest first."""
    lengths = sorted(itertools.product(QUERIES, range(1, LONGEST + 1)), key=sum)
    others = list(itertools.product(fault.heads, fault.dims, range(fault.seeds)))
    for (query, kv), (heads, dim, seed) in itertools.product(lengths, others):
        for mask in fault.masks(query, kv):
            problem = Problem(
                batch=fault.batch,
                heads=heads[0],
                kv_heads=heads[1],
                query=query,
                kv=kv,
                head_dim=dim,
                dtype="fp32",
                mask=mask,
                seed=seed,
            )
            yield from make_cases(fault.question, problem)


def make_cases(question: str, problem: Problem) -> Iterator[Case]:
    """Cases with the first two values of each parameter, or none if the question does not fit."""
    problem = question_problem(question, problem)
    if question_named(question).unfit(problem) is None:
        allowed = question_named(question).allowed(problem)
        for values in itertools.product(*(each[:2] for each in allowed.values())):
            numbers = dict(zip(allowed, values, strict=True))
            yield Case(problem=problem, question=question, parameters=numbers)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_failure_shrinks_to_within_a_tile_of_the_smallest(suite, fault):
    kernel = suite.under_test(fault.planted, fault.family, "fp32")
    smallest = next(case.problem for case in grid(fault) if suite.fails(kernel, case))
    spec = dataclasses.replace(suite.properties[fault.found_by], questions=(fault.question,))
    case = suite.find_failure(kernel, spec, shrink=True)
    assert case is not None
    for length in ("query", "kv", "head_dim"):
        difference = getattr(case.problem, length) - getattr(smallest, length)
        assert abs(difference) <= fault.tile, f"{length}: {case.problem}, smallest: {smallest}"
