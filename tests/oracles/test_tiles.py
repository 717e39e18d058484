"""The streaming oracle's tiles cover exactly what a mask shows, in memory linear in the length."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attncheck import oracles
from attncheck.core.mod_spec import Spec
from attncheck.inputs.input_tensors import Inputs, draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.oracles.mod_calls import Indices, call_mask
from attncheck.oracles.streaming_forward import (
    Blocks,
    Visibility,
    blocks_for,
    head_ranges,
    query_blocks,
)

CPU = torch.device("cpu")
BLOCKS = Blocks(rows=48, query=8, query_most=16, kv=16, cell=4)
MASKS = [
    Spec.of("full"),
    Spec.of("causal"),
    Spec.of("sliding_window", window=9),
    Spec.of("sliding_window", window=0),
    Spec.of("document", lengths=[30, 1, 29, 23]),
    Spec.of("padding", lengths=[0, 50, 71]),
    Spec.of("or", Spec.of("not", Spec.of("prefix_lm", prefix=40)), Spec.of("causal")),
]


def _problem(mask, **changes):
    sizes = {"batch": 3, "heads": 6, "kv_heads": 2, "query": 61, "kv": 83} | changes
    return Problem(**sizes, head_dim=8, mask=mask)


def _tiles(problem, blocks):
    visibility = Visibility(problem, blocks, CPU)
    for number, rows in enumerate(query_blocks(problem, blocks)):
        for heads in head_ranges(problem, blocks, len(rows)):
            for run in visibility.runs(heads, number):
                yield visibility, heads, rows, run


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("blocks", [BLOCKS, blocks_for(CPU)], ids=["small", "CPU"])
def test_tiles_cover_exactly_what_the_mask_shows(mask, blocks):
    problem = _problem(mask)
    everywhere = (range(3), range(6), range(61), range(83))
    shown = call_mask(problem.mask_mod(), Indices.of(*everywhere)).expand(3, 6, 61, 83)
    covered = torch.zeros(3, 6, 61, 83, dtype=torch.int64)
    for visibility, heads, rows, run in _tiles(problem, blocks):
        axes = (heads.batch, heads.query, rows, run.keys)
        place = tuple(slice(axis.start, axis.stop) for axis in axes)
        seen = visibility.tile(heads, rows, run.keys) if run.partial else torch.tensor(data=True)
        covered[place] += seen
        assert len(run.keys) <= blocks.kv
    assert torch.equal(covered, shown.long())


def test_hidden_tiles_are_skipped_and_full_ones_not_masked():
    kinds = [run.partial for *_, run in _tiles(_problem(Spec.of("causal"), kv=61), BLOCKS)]
    assert kinds.count(False) > 0
    causal = sum(
        len(rows) * len(run.keys)
        for _, _, rows, run in _tiles(
            _problem(Spec.of("causal"), batch=1, heads=1, kv_heads=1, kv=61), BLOCKS
        )
    )
    # Half of all pairs, and for each row at most half a block and a cell more.
    assert causal <= 61 * (61 + 16 + 2 * 4) / 2
    assert not list(_tiles(_problem(Spec.of("sliding_window", window=0)), BLOCKS))


@pytest.mark.parametrize(
    "sizes",
    [{"heads": 64, "kv_heads": 1}, {"heads": 14, "kv_heads": 7}, {"batch": 16}, {"query": 1}],
)
def test_products_have_at_most_the_configured_rows(sizes):
    problem = _problem(Spec.of("full"), **sizes)
    for rows in query_blocks(problem, BLOCKS):
        heads = list(head_ranges(problem, BLOCKS, len(rows)))
        pairs = [(b, h) for part in heads for b in part.batch for h in part.query]
        assert sorted(pairs) == [(b, h) for b in range(problem.batch) for h in range(problem.heads)]
        for part in heads:
            product = len(part.batch) * len(part.query) * len(rows)
            assert product <= max(BLOCKS.rows, problem.group)


class _Largest(TorchDispatchMode):
    """Bytes of the largest storage that an operation returns."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return result


def _largest(oracle, length, mask, score):
    problem = Problem(
        heads=2, query=length, head_dim=4, value_dim=4, mask=Spec.of(mask), score=Spec.of(score)
    )
    inputs = draw_inputs(problem)
    with _Largest() as mode:
        oracle(inputs)
    return mode.bytes


@pytest.mark.parametrize(
    ("mask", "score"), [("full", "none"), ("causal", "none"), ("causal", "alibi")]
)
def test_memory_grows_linearly_with_the_length(mask, score):
    def streamed(inputs):
        return oracles.streaming(inputs, blocks=BLOCKS)

    small, large = (_largest(streamed, length, mask, score) for length in (128, 512))
    assert large <= 4 * small  # linear
    # The measurement does notice a score matrix.
    small, large = (_largest(oracles.dense, length, mask, score) for length in (128, 512))
    assert large == 16 * small


class _Custom(Problem):
    """A causal mask that a user wrote as a score mod of −∞."""

    def score_mod(self, device="cpu"):
        return lambda score, b, h, i, j: torch.where(i >= j, score, -math.inf)


def test_score_of_minus_infinity_hides_a_key_like_a_mask(allowance):
    causal = draw_inputs(Problem(query=40, head_dim=8, mask=Spec.of("causal")))
    v = causal.v.clone()
    v[:, :, -1] = math.nan
    custom = Inputs(problem=_Custom(query=40, head_dim=8), q=causal.q, k=causal.k, v=v)
    for oracle in (
        oracles.dense,
        lambda inputs: oracles.flash1(inputs, block_query=7, block_kv=6),
        lambda inputs: oracles.flash2(inputs, block_query=7, block_kv=6),
        lambda inputs: oracles.streaming(inputs, blocks=BLOCKS),
    ):
        outputs, truth = oracle(custom), oracles.dense(causal)
        assert outputs.out[:, :, -1].isnan().all()
        for part in (outputs, truth):
            part.out[:, :, -1] = 0
        assert not allowance(causal).misses(outputs, truth)


class _MaskOfHeads(Problem):
    """A mask that differs between heads, and is the same for all sequences."""

    def mask_mod(self, device="cpu"):
        return lambda b, h, i, j: j <= i + 3 * h


def test_mask_of_each_head_applies_when_a_sequences_heads_are_split(allowance):
    sizes = {"batch": 2, "heads": 14, "kv_heads": 7, "query": 40, "head_dim": 8}
    problem = _MaskOfHeads(**sizes, score=Spec.of("alibi"))
    rows = query_blocks(problem, BLOCKS)[0]
    ranges = [part.kv for part in head_ranges(problem, BLOCKS, len(rows))]
    assert any(kv.start > 0 for kv in ranges)  # the heads of one sequence are split
    drawn = draw_inputs(Problem(**sizes))
    inputs = Inputs(problem=problem, q=drawn.q, k=drawn.k, v=drawn.v)
    streamed = oracles.streaming(inputs, blocks=BLOCKS)
    assert not allowance(inputs).misses(oracles.dense(inputs), streamed)


class _Table(Problem):
    """A score mod that returns a view of its own table."""

    table = torch.randn(40, 40, dtype=torch.float64)

    def score_mod(self, device="cpu"):
        return lambda score, b, h, i, j: self.table[i, j]


def test_table_returned_by_a_score_mod_is_not_written_to():
    inputs = draw_inputs(Problem(query=40, head_dim=8))
    custom = Inputs(
        problem=_Table(query=40, head_dim=8, mask=Spec.of("causal")),
        q=inputs.q,
        k=inputs.k,
        v=inputs.v,
    )
    before = _Table.table.clone()
    oracles.streaming(custom)
    assert torch.equal(_Table.table, before)
