"""The inputs of a relation's runs: they differ from the first run's exactly as it states."""

from fractions import Fraction

import pytest
import torch
from tests.planted_kernels.inputs_read import memory

from attncheck.core.formats import FORMATS
from attncheck.core.mod_spec import Spec
from attncheck.core.paged_layout import Paging
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.relations import RELATIONS, mask_visibility, relation_named

FULL, CAUSAL = map(Spec.of, ("full", "causal"))
PADDING = Spec.of("padding", lengths=[3, 6])
DOCUMENT, PREFIX = Spec.of("document", lengths=[3, 0, 4]), Spec.of("prefix_lm", prefix=4)
DTYPES = ["fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2"]
FUTURE_KEYS = ("future_keys", "future_keys_nan", "future_keys_huge")
STRIDES = [n for n in RELATIONS if n.startswith("strides_") and n != "strides_far"]


def runs(question, problem, **parameters):
    """The inputs of each run; the drawn inputs come first."""
    return relation_named(question).runs(draw_inputs(problem), parameters)


def all_parameters(question, problem):
    ((name, values),) = relation_named(question).allowed(problem).items()
    return [{name: value} for value in values]


def test_relation_does_not_modify_drawn_inputs(small):
    drawn = draw_inputs(small(CAUSAL, dtype="tf32", backward=True))
    before = {name: tensor.clone() for name, tensor in drawn.tensors().items()}
    for relation in RELATIONS.values():
        if not relation.unfit(drawn.problem):
            allowed = relation.allowed(drawn.problem)
            relation.runs(drawn, {name: values[0] for name, values in allowed.items()})
    for name, tensor in drawn.tensors().items():
        assert torch.equal(tensor, before[name])


# ------------------------------------------------------------------ hidden keys


@pytest.mark.parametrize("question", FUTURE_KEYS)
def test_only_future_keys_and_values_change(question, small):
    before, after = runs(question, small(CAUSAL), row=2)
    assert torch.equal(before.q, after.q)
    for old, new in ((before.k, after.k), (before.v, after.v)):
        assert torch.equal(old[:, :, :3], new[:, :, :3])
        assert (old[:, :, 3:] != new[:, :, 3:]).any(-1).all()


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16"])
def test_huge_keys_are_finite_and_reach_format_maximum(dtype, small):
    k = runs("future_keys_huge", small(CAUSAL, dtype=dtype), row=0)[1].k[:, :, 1:]
    largest = FORMATS["fp32" if dtype == "tf32" else dtype].max
    assert torch.isfinite(k).all()
    assert k.max() == largest
    assert k.min() >= min(1e29, largest)


@pytest.mark.parametrize(
    "mask",
    [CAUSAL, Spec.of("sliding_window", window=2), Spec.of("padding", lengths=[4, 0]),
     Spec.of("expression", text="(kv_idx + h // 2) % 3 <= q_idx"), Spec.of("not", FULL)],
)  # fmt: skip
def test_hidden_keys_changes_only_keys_hidden_from_row(mask, small, visible):
    problem = small(mask)
    drawn = draw_inputs(problem)
    hidden = ~visible(problem).unflatten(1, (2, 2)).any(2)  # (batch, kv_heads, rows, keys)
    rows = relation_named("hidden_keys").allowed(problem)["row"]
    assert list(rows) == [row for row in range(5) if hidden[:, :, row].any()]
    for row in rows:
        _, after = relation_named("hidden_keys").runs(drawn, {"row": row})
        assert torch.equal((after.k != drawn.k).any(-1), hidden[:, :, row])
        assert torch.equal(mask_visibility.keys_hidden_from(problem, row), hidden[:, :, row])


def test_one_hot_gives_one_zero_score_and_low_others(small):
    problem = small(FULL, dtype="e4m3", head_dim=9)
    q, k, _ = runs("one_hot", problem, turn=0)[0].promoted()
    scores = problem.scale * q @ k.repeat_interleave(2, dim=1).mT
    assert torch.equal((scores == 0).sum(-1), torch.ones(2, 4, 5, dtype=torch.long))
    assert scores[scores != 0].exp().max() < FORMATS["fp32"].subnormal_spacing / 2


# ------------------------------------------------------------------ linearity and shifts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distribution", ["normal", "sink", "zero_q"])
def test_scaled_values_stay_normal_with_bounded_logits(dtype, distribution, small):
    problem = small(dtype=dtype, distribution=distribution)
    fmt = problem.formats.storage
    for parameters in all_parameters("values_scaled", problem):
        first, second = runs("values_scaled", problem, **parameters)
        for each in (first, second):
            assert bool((each.v.double().abs() >= 2.0**fmt.min_exponent).all())
            assert bool((each.v.double().abs() <= fmt.max).all())
        assert torch.equal(first.v.double() * 2.0 ** parameters["power"], second.v.double())
        assert bool((first.v.double().sign() == first.v.double()[:, :, :1].sign()).all())
        q, k, _ = first.promoted()
        assert bool((problem.scale * q @ k.repeat_interleave(2, dim=1).mT).abs().max() <= 24)


@pytest.mark.parametrize("dtype", DTYPES)
def test_key_shift_moves_every_logit_equally(dtype, small):
    problem = small(dtype=dtype)
    for parameters in all_parameters("key_shift", problem):
        before, after = runs("key_shift", problem, **parameters)
        (q, old, v), (same_q, new, same_v) = before.promoted(), after.promoted()
        assert torch.equal(q, same_q)
        assert torch.equal(v, same_v)
        c = new - old
        assert torch.equal(c, c[:, :, :1].expand_as(c))
        assert torch.equal((c != 0).sum(-1), torch.ones(2, 2, 7, dtype=torch.long))
        for b, h, column in ((0, 0, 0), (0, 3, 1), (1, 1, 1), (1, 2, 2)):
            x, y = q[b, h, :, column], c[b, h // 2, 0, column]
            assert len(x.unique()) == 1
            exact = Fraction(problem.scale) * Fraction(float(x[0])) * Fraction(float(y))
            assert exact == float(exact)  # without rounding
            # y is rounded down, to an eighth of 8 or less and 4 or more.
            assert Fraction(4, 5) < exact / parameters["nats"] <= 1


@pytest.mark.parametrize("run", [1, 2, 4])
def test_values_added_splits_keys_into_two_parts(run, small):
    first, second, whole = runs("values_added", small(dtype="e4m3"), run=run)
    parts = [each.v.float().ne(0).any(-1).long() for each in (first, second)]
    assert torch.equal(parts[0] + parts[1], torch.ones(2, 2, 7, dtype=torch.long))
    assert torch.equal(first.v.float() + second.v.float(), whole.v.float())
    assert parts[0][0, 0].tolist() == [1 - j // run % 2 for j in range(7)]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_scaled_query_divides_scale_by_same_power_of_two(dtype, small):
    drawn = draw_inputs(small(dtype=dtype, distribution="outliers"))
    drawn = drawn.replace(q=drawn.q * 2.0**7)  # in fp16 some are beyond a further 2^8
    before, after = relation_named("scaled_query").runs(drawn, {"exponent": 10})
    assert after.problem.scale * 2**8 == before.problem.scale == drawn.problem.scale / 4
    assert torch.equal(after.q.double(), before.q.double() * 2**8)
    assert torch.isfinite(after.q).all()
    assert torch.equal(before.q.double(), torch.where(before.q == 0, 0.0, 4 * drawn.q.double()))


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_descale_keeps_the_numbers(dtype, small):
    problem = small(dtype=dtype, distribution="outliers")
    drawn, (before, after) = draw_inputs(problem), runs("descale", problem, tensor=1)
    for first, second in zip(before.promoted(), after.promoted(), strict=True):
        assert torch.equal(first, second)
    changed = before.k.float() != drawn.k.float()
    assert bool((before.k.float()[changed] == 0).all())
    # Only a subnormal number may have no half, and the largest is far above those.
    assert bool((drawn.k.float()[changed].abs() < 2 * 2.0**-6).all())


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("distribution", ["normal", "large_logits", "outliers"])
def test_softmax_shift_is_exact(dtype, distribution, softmax):
    problem = softmax(dtype=dtype, distribution=distribution)
    for parameters in all_parameters("softmax_shift", problem):
        before, after = runs("softmax_shift", problem, **parameters)
        (shift,) = (after.scores() - before.scores()).unique().tolist()
        assert shift * parameters["nats"] > 0
        if abs(parameters["nats"]) > 1:
            assert abs(parameters["nats"]) / 2 < abs(shift) < abs(parameters["nats"]) * 2


# ------------------------------------------------------------------ orders and parts


@pytest.mark.parametrize("mask", [FULL, PADDING, DOCUMENT, PREFIX, Spec.of("or", DOCUMENT, PREFIX)])
@pytest.mark.parametrize("shuffle", [0, 3])
def test_keys_are_permuted_among_keys_seen_by_same_rows(mask, shuffle, small, visible):
    before, after = runs("key_permutation", small(mask), shuffle=shuffle)
    seen = visible(before.problem)
    for b in range(2):
        order = [int((before.v[b, 0] == v).all(-1).nonzero()) for v in after.v[b, 0]]
        assert sorted(order) == list(range(7))
        assert torch.equal(after.k[b], before.k[b][:, order])
        assert torch.equal(seen[b], seen[b][..., order])
    assert not torch.equal(before.k, after.k) or shuffle


def test_batch_permutation_moves_lengths_and_descales(small):
    nested = Spec.of("and", CAUSAL, Spec.of("not", PADDING))
    drawn, after = runs("batch_permutation", small(nested, dtype="e4m3"), turn=1)
    assert after.problem.mask.parts[1].parts[0] == Spec.of("padding", lengths=[6, 3])
    assert torch.equal(after.descale.v, drawn.descale.v.flip(0))
    assert torch.equal(after.q.float(), drawn.q.float().flip(0))


def test_permutations_move_loss_and_sink(small):
    problem = small(dtype="fp32", backward=True, dlse=True, sink=True)
    drawn, turned = runs("batch_permutation", problem, turn=1)
    assert torch.equal(turned.dout, drawn.dout[[1, 0]])
    drawn, turned = runs("head_permutation", problem, turn=0)
    heads = [list(map(torch.Tensor.tolist, drawn.q[0])).index(q.tolist()) for q in turned.q[0]]
    assert sorted(heads) == [0, 1, 2, 3] != heads
    assert torch.equal(turned.dlse, drawn.dlse[:, heads])
    assert torch.equal(turned.sink, drawn.sink[heads])


def test_softmax_rows_permutes_across_heads_and_sequences(softmax):
    drawn, after = runs("softmax_rows", softmax(), turn=0)
    rows = drawn.x.flatten(0, 2)
    assert torch.equal(after.x.flatten(0, 2), torch.cat([rows[:1], rows[1:].flip(0)]))


SIDES = {"canvas": [3, 5], "kernel": [3, 3]}


@pytest.mark.parametrize(
    "mask",
    [Spec.of("neighborhood_tiled", **SIDES, tile=[2, 2]), Spec.of("neighborhood_morton", **SIDES)],
)
def test_neighborhood_order_keeps_neighbours_of_each_cell(mask, small, visible):
    """The plain problem's mask, its rows and keys permuted back, equals the other's."""
    plain, drawn = runs("neighborhood_order", small(mask, query=17, kv=19, dtype="fp32"))
    assert plain.problem.mask == Spec.of("neighborhood", **SIDES)

    def match_rows(ours, theirs):
        """Find each of our rows among theirs."""
        same = (ours[0, 0, :, None] == theirs[0, 0, None]).all(-1)
        assert bool((same.sum(-1) == 1).all())
        return same.long().argmax(-1)

    rows, keys = match_rows(drawn.q, plain.q), match_rows(drawn.k, plain.k)
    assert torch.equal(match_rows(drawn.v, plain.v), keys)
    before, after = (visible(each.problem)[0, 0] for each in (plain, drawn))
    assert torch.equal(before[rows][:, keys], after)
    assert not torch.equal(before, after)


def test_prefill_rows_keeps_mods_that_read_no_row(small):
    drawn, last = runs("prefill_rows", small(PADDING, score=Spec.of("softcap", cap=5.0)), rows=2)
    assert (last.problem.mask, last.problem.score) == (PADDING, drawn.problem.score)
    assert torch.equal(last.q, drawn.q[:, :, -2:])


def test_split_merge_gives_sink_to_first_part_only(small):
    first, second, whole = runs("split_merge", small(sink=True), cut=3)
    assert [run.problem.sink for run in (first, second, whole)] == [True, False, True]
    assert second.sink is None


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize("question", STRIDES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "e4m3"])
def test_strides_relation_keeps_numbers_and_changes_layout(question, dtype, small):
    backward = {"backward": True} if dtype == "fp32" else {}
    problem = small(dtype=dtype, **backward)
    parameters = dict.fromkeys(relation_named(question).allowed(problem), 1)  # tensor 1 is k
    plain, strided = (x.clone() for x in runs(question, problem, **parameters))
    for name in ("q", "k", "v", "dout") if backward else "qkv":
        before, after = getattr(plain, name), getattr(strided, name)
        assert torch.equal(before.float(), after.float())
        assert before.is_contiguous()
        assert before.storage_offset() == 0
    k = strided.k
    assert k.stride() != plain.k.stride() or k.storage_offset()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "e4m3"])
def test_strides_offset_misaligns_every_tensor_by_one_element(dtype, small):
    strided = runs("strides_offset", small(dtype=dtype))[1]
    for tensor in (strided.q, strided.k, strided.v):
        start = tensor.data_ptr() - tensor.untyped_storage().data_ptr()
        assert start == tensor.element_size()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "e4m3", "e5m2"])
@pytest.mark.parametrize("question", ["strides_gapped", "strides_packed"])
def test_gaps_between_strides_are_nan(question, dtype, small):
    strided = runs(question, small(dtype=dtype))[1]
    tensors = (strided.q, strided.k, strided.v)
    buffers = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    everything = torch.cat([memory(t).float() for t in buffers.values()])
    numbers = sum(tensor.numel() for tensor in tensors)
    assert int(everything.isfinite().sum()) == numbers < len(everything)


def test_pages_relation_changes_paging_only(small):
    paging = Paging(size=2, seed=3, shared=1)
    before, after = runs("pages", small(paging=paging), size=16, order=2, shared=0)
    assert after.problem.paging == Paging(size=16, seed=5, shared=0)
    assert after.problem.replace(paging=paging) == before.problem
    assert all(torch.equal(getattr(before, name), getattr(after, name)) for name in "qkv")
    largest_seed = small(paging=Paging(size=16, seed=2**63 - 1))
    assert runs("pages", largest_seed, size=16, order=1, shared=0)[1].problem.paging.seed == 0
