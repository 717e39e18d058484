"""The generator of calibration problems: the same problems everywhere, and all kinds of them."""

import pytest
from random_problems import (
    PER_STRUCTURE,
    SHAPED_EVERY,
    gradient_problem,
    problem,
    shaped,
    tiling,
)

from attncheck.core.formats import DTYPES
from attncheck.inputs.distributions import DISTRIBUTIONS
from attncheck.mods.masks import MASKS
from attncheck.mods.scores import SCORES

SOME = range(0, 7500, 12)


@pytest.fixture(scope="module")
def drawn():
    return {number: problem(number) for number in SOME}


def test_number_gives_the_same_problem_every_time():
    """On every machine and in any order: an id is a hash of all fields of a Problem."""
    first, second = ([problem(number).id for number in (0, 31, 4096)] for _ in range(2))
    assert first == second
    assert problem(31).id == "4fz3obokas"
    assert problem(31) != problem(32)


def test_all_dtypes_distributions_masks_and_score_mods_are_drawn(drawn):
    problems = drawn.values()
    measured = {name for name, dtype in DTYPES.items() if dtype.measured}
    assert {p.dtype for p in problems} == measured
    assert {p.distribution for p in problems} == set(DISTRIBUTIONS) - {"small_terms"}
    attention = [p for p in problems if p.operation == "attention"]
    assert 0 < len(problems) - len(attention) < len(problems) / 6
    # Like small_terms, these are newer than the measurements, whose numbers keep their Problems.
    newer = {"expression", "documents", "bias", "offset", "alibi_by_sequence"}
    newer |= {name for name in MASKS if name.startswith("neighborhood") or "bottom_right" in name}
    newer -= {"causal_bottom_right"}
    assert {part.name for p in problems for part in p.mask.walk()} == set(MASKS) - newer
    assert {part.name for p in problems for part in p.score.walk()} == set(SCORES) - newer


def test_sizes_range_from_one_to_the_longest_in_all_combinations(drawn):
    problems = drawn.values()
    assert {min(p.kv for p in problems), min(p.query for p in problems)} == {1}
    assert min(max(p.kv for p in problems), max(p.query for p in problems)) > 4000
    assert max(p.batch * p.heads * p.query * p.kv for p in problems) <= 2**24
    assert {1, 256} <= {p.head_dim for p in problems}
    common = sum(p.head_dim in {64, 80, 96, 128} for p in problems)
    assert 2 * common > len(drawn)
    assert any(p.query < p.kv for p in problems)
    assert any(p.query > p.kv for p in problems)
    assert any(p.query == p.kv > 1 for p in problems)
    assert any(p.group > 1 for p in problems)
    assert any(p.value_dim != p.head_dim for p in problems)


def test_limits_for_a_cpu_shorten_a_problem_without_changing_its_kind(drawn):
    for number in SOME[::5]:
        short = problem(number, longest=512, most_scores=2**19)
        assert max(short.query, short.kv) <= 512
        assert short.batch * short.heads * short.query * short.kv <= 2**19
        assert (short.dtype, short.operation) == (drawn[number].dtype, drawn[number].operation)


def structure(p):
    names = tuple(tuple(part.name for part in spec.walk()) for spec in (p.mask, p.score))
    return p.dtype, p.head_dim, p.value_dim, p.heads, p.kv_heads, p.kv % 16 == 0, *names


@pytest.mark.parametrize("first", [0, PER_STRUCTURE, SHAPED_EVERY * PER_STRUCTURE])
def test_consecutive_problems_need_one_compiled_kernel(first):
    problems = [problem(number) for number in range(first, first + PER_STRUCTURE)]
    assert len({structure(p) for p in problems}) == 1
    assert len({p.seed for p in problems}) == PER_STRUCTURE
    shapes = {p.replace(seed=0, distribution="normal") for p in problems}
    assert (len(shapes) == 1) == shaped(first)


def test_all_tilings_are_drawn():
    tilings = [tiling(number) for number in range(200)]
    assert {t.recurrence for t in tilings} == {"flash1", "flash2"}
    assert {t.lazy_rescale for t in tilings} == {0.0, 2.0, 8.0}
    assert {t.reverse for t in tilings} == {True, False}
    assert {t.block_kv for t in tilings} == {t.block_query for t in tilings} == {16, 32, 64, 128}
    assert tiling(7) == tiling(7)


def test_gradient_problem_is_the_forward_problem_with_a_backward():
    """Only the dtype may differ, since not all dtypes have gradients."""
    for number in SOME[::10]:
        backward, forward = gradient_problem(number), problem(number, most_scores=2**22)
        if forward.operation == "softmax":
            continue
        of_forward = {"backward": False, "dlse": False, "sink": False, "dtype": forward.dtype}
        assert backward.backward
        assert backward.replace(**of_forward) == forward
        assert backward.dtype == forward.dtype or not shaped(number)


def test_gradient_problems_have_all_dtypes_sinks_and_lse_losses():
    some = SOME[::3]
    drawn = [gradient_problem(number, longest=64) for number in some]
    assert {p.dtype for p in drawn} == {"fp32", "tf32", "fp16", "bf16"}
    assert {(p.dlse, p.sink) for p in drawn} == {
        (dlse, sink) for dlse in (False, True) for sink in (False, True)
    }
    assert not any(p.sink for n, p in zip(some, drawn, strict=True) if shaped(n))
