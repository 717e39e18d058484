"""What relations ask kernels: each run's inputs differ from the first's as they say, exactly."""

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
FUTURES = ("future_keys", "future_keys_nan", "future_keys_huge")
STRIDES = [n for n in RELATIONS if n.startswith("strides_") and n != "strides_far"]


def runs(question, problem, **parameters):
    """The inputs of each run; those drawn first come first."""
    return relation_named(question).runs(draw_inputs(problem), parameters)


def all_numbers(question, problem):
    ((name, values),) = relation_named(question).allowed(problem).items()
    return [{name: value} for value in values]


def test_a_relation_leaves_its_inputs_as_they_are(small):
    drawn = draw_inputs(small(CAUSAL, dtype="tf32", backward=True))
    before = {name: tensor.clone() for name, tensor in drawn.tensors().items()}
    for relation in RELATIONS.values():
        if not relation.unfit(drawn.problem):
            allowed = relation.allowed(drawn.problem)
            relation.runs(drawn, {name: values[0] for name, values in allowed.items()})
    for name, tensor in drawn.tensors().items():
        assert torch.equal(tensor, before[name])


# ------------------------------------------------------------------ hidden keys


@pytest.mark.parametrize("question", FUTURES)
def test_only_the_future_changes(question, small):
    before, after = runs(question, small(CAUSAL), row=2)
    assert torch.equal(before.q, after.q)
    for old, new in ((before.k, after.k), (before.v, after.v)):
        assert torch.equal(old[:, :, :3], new[:, :, :3])
        assert (old[:, :, 3:] != new[:, :, 3:]).any(-1).all()


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16"])
def test_huge_is_finite_and_as_large_as_can_be(dtype, small):
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
def test_only_what_the_row_does_not_see_changes(mask, small, visible):
    problem = small(mask)
    drawn = draw_inputs(problem)
    hidden = ~visible(problem).unflatten(1, (2, 2)).any(2)  # (batch, kv_heads, rows, keys)
    rows = relation_named("hidden_keys").allowed(problem)["row"]
    assert list(rows) == [row for row in range(5) if hidden[:, :, row].any()]
    for row in rows:
        _, after = relation_named("hidden_keys").runs(drawn, {"row": row})
        assert torch.equal((after.k != drawn.k).any(-1), hidden[:, :, row])
        assert torch.equal(mask_visibility.keys_hidden_from(problem, row), hidden[:, :, row])


def test_one_hot_makes_one_score_0_and_all_others_low(small):
    problem = small(FULL, dtype="e4m3", head_dim=9)
    q, k, _ = runs("one_hot", problem, turn=0)[0].promoted()
    scores = problem.scale * q @ k.repeat_interleave(2, dim=1).mT
    assert torch.equal((scores == 0).sum(-1), torch.ones(2, 4, 5, dtype=torch.long))
    assert scores[scores != 0].exp().max() < FORMATS["fp32"].subnormal_spacing / 2


# ------------------------------------------------------------------ linearity and shifts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distribution", ["normal", "sink", "zero_q"])
def test_v_is_normal_before_and_after(dtype, distribution, small):
    problem = small(dtype=dtype, distribution=distribution)
    fmt = problem.formats.storage
    for chosen in all_numbers("values_scaled", problem):
        first, second = runs("values_scaled", problem, **chosen)
        for each in (first, second):
            assert bool((each.v.double().abs() >= 2.0**fmt.min_exponent).all())
            assert bool((each.v.double().abs() <= fmt.max).all())
        assert torch.equal(first.v.double() * 2.0 ** chosen["power"], second.v.double())
        assert bool((first.v.double().sign() == first.v.double()[:, :, :1].sign()).all())
        q, k, _ = first.promoted()
        assert bool((problem.scale * q @ k.repeat_interleave(2, dim=1).mT).abs().max() <= 24)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_key_shift_moves_every_logit_alike(dtype, small):
    problem = small(dtype=dtype)
    for chosen in all_numbers("key_shift", problem):
        before, after = runs("key_shift", problem, **chosen)
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
            assert Fraction(4, 5) < exact / chosen["nats"] <= 1


@pytest.mark.parametrize("run", [1, 2, 4])
def test_every_key_is_in_one_of_two_parts(run, small):
    one, other, both = runs("values_added", small(dtype="e4m3"), run=run)
    parts = [each.v.float().ne(0).any(-1).long() for each in (one, other)]
    assert torch.equal(parts[0] + parts[1], torch.ones(2, 2, 7, dtype=torch.long))
    assert torch.equal(one.v.float() + other.v.float(), both.v.float())
    assert parts[0][0, 0].tolist() == [1 - j // run % 2 for j in range(7)]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_scaled_query_is_the_same_question(dtype, small):
    drawn = draw_inputs(small(dtype=dtype, distribution="outliers"))
    drawn = drawn.replace(q=drawn.q * 2.0**7)  # in fp16 some are beyond a further 2^8
    before, after = relation_named("scaled_query").runs(drawn, {"exponent": 10})
    assert after.problem.scale * 2**8 == before.problem.scale == drawn.problem.scale / 4
    assert torch.equal(after.q.double(), before.q.double() * 2**8)
    assert torch.isfinite(after.q).all()
    assert torch.equal(before.q.double(), torch.where(before.q == 0, 0.0, 4 * drawn.q.double()))


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_halved_inputs_are_the_same_numbers(dtype, small):
    problem = small(dtype=dtype, distribution="outliers")
    drawn, (before, after) = draw_inputs(problem), runs("descale", problem, tensor=1)
    for one, other in zip(before.promoted(), after.promoted(), strict=True):
        assert torch.equal(one, other)
    changed = before.k.float() != drawn.k.float()
    assert bool((before.k.float()[changed] == 0).all())
    # Only a subnormal number may have no half, and the largest is far above those.
    assert bool((drawn.k.float()[changed].abs() < 2 * 2.0**-6).all())


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("distribution", ["normal", "large_logits", "outliers"])
def test_every_softmax_shift_is_exact(dtype, distribution, softmax):
    problem = softmax(dtype=dtype, distribution=distribution)
    for chosen in all_numbers("softmax_shift", problem):
        before, after = runs("softmax_shift", problem, **chosen)
        (shift,) = (after.scores() - before.scores()).unique().tolist()
        assert shift * chosen["nats"] > 0
        if abs(chosen["nats"]) > 1:
            assert abs(chosen["nats"]) / 2 < abs(shift) < abs(chosen["nats"]) * 2


# ------------------------------------------------------------------ orders and parts


@pytest.mark.parametrize("mask", [FULL, PADDING, DOCUMENT, PREFIX, Spec.of("or", DOCUMENT, PREFIX)])
@pytest.mark.parametrize("shuffle", [0, 3])
def test_keys_are_permuted_among_those_that_the_same_rows_see(mask, shuffle, small, visible):
    before, after = runs("key_permutation", small(mask), shuffle=shuffle)
    seen = visible(before.problem)
    for b in range(2):
        came_from = [int((before.v[b, 0] == v).all(-1).nonzero()) for v in after.v[b, 0]]
        assert sorted(came_from) == list(range(7))
        assert torch.equal(after.k[b], before.k[b][:, came_from])
        assert torch.equal(seen[b], seen[b][..., came_from])
    assert not torch.equal(before.k, after.k) or shuffle


def test_lengths_go_with_their_sequences(small):
    nested = Spec.of("and", CAUSAL, Spec.of("not", PADDING))
    drawn, after = runs("batch_permutation", small(nested, dtype="e4m3"), turn=1)
    assert after.problem.mask.parts[1].parts[0] == Spec.of("padding", lengths=[6, 3])
    assert torch.equal(after.descale.v, drawn.descale.v.flip(0))
    assert torch.equal(after.q.float(), drawn.q.float().flip(0))


def test_heads_and_sequences_take_their_loss_and_sink_with_them(small):
    problem = small(dtype="fp32", backward=True, dlse=True, sink=True)
    drawn, turned = runs("batch_permutation", problem, turn=1)
    assert torch.equal(turned.dout, drawn.dout[[1, 0]])
    drawn, turned = runs("head_permutation", problem, turn=0)
    heads = [list(map(torch.Tensor.tolist, drawn.q[0])).index(q.tolist()) for q in turned.q[0]]
    assert sorted(heads) == [0, 1, 2, 3] != heads
    assert torch.equal(turned.dlse, drawn.dlse[:, heads])
    assert torch.equal(turned.sink, drawn.sink[heads])


def test_rows_of_all_heads_and_sequences_change_places(softmax):
    drawn, after = runs("softmax_rows", softmax(), turn=0)
    rows = drawn.x.flatten(0, 2)
    assert torch.equal(after.x.flatten(0, 2), torch.cat([rows[:1], rows[1:].flip(0)]))


SIDES = {"canvas": [3, 5], "kernel": [3, 3]}


@pytest.mark.parametrize(
    "mask",
    [Spec.of("neighborhood_tiled", **SIDES, tile=[2, 2]), Spec.of("neighborhood_morton", **SIDES)],
)
def test_every_cell_keeps_its_neighbours(mask, small, visible):
    """The plain problem's mask, its rows and keys moved back, is the other's."""
    plain, drawn = runs("neighborhood_order", small(mask, query=17, kv=19, dtype="fp32"))
    assert plain.problem.mask == Spec.of("neighborhood", **SIDES)

    def places(ours, theirs):
        """Where each of our rows is among theirs."""
        same = (ours[0, 0, :, None] == theirs[0, 0, None]).all(-1)
        assert bool((same.sum(-1) == 1).all())
        return same.long().argmax(-1)

    rows, keys = places(drawn.q, plain.q), places(drawn.k, plain.k)
    assert torch.equal(places(drawn.v, plain.v), keys)
    before, after = (visible(each.problem)[0, 0] for each in (plain, drawn))
    assert torch.equal(before[rows][:, keys], after)
    assert not torch.equal(before, after)


def test_mods_that_read_no_row_are_decoded_by_their_own_names(small):
    drawn, last = runs("prefill_rows", small(PADDING, score=Spec.of("softcap", cap=5.0)), rows=2)
    assert (last.problem.mask, last.problem.score) == (PADDING, drawn.problem.score)
    assert torch.equal(last.q, drawn.q[:, :, -2:])


def test_one_part_of_a_split_has_the_sink(small):
    first, second, whole = runs("split_merge", small(sink=True), cut=3)
    assert [run.problem.sink for run in (first, second, whole)] == [True, False, True]
    assert second.sink is None


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize("question", STRIDES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "e4m3"])
def test_a_kernel_gets_the_same_numbers_in_other_strides(question, dtype, small):
    backward = {"backward": True} if dtype == "fp32" else {}
    asked = small(dtype=dtype, **backward)
    chosen = dict.fromkeys(relation_named(question).allowed(asked), 1)  # of tensors k
    plain, laid_out = (x.clone() for x in runs(question, asked, **chosen))
    for name in ("q", "k", "v", "dout") if backward else "qkv":
        one, other = getattr(plain, name), getattr(laid_out, name)
        assert torch.equal(one.float(), other.float())
        assert one.is_contiguous()
        assert one.storage_offset() == 0
    k = laid_out.k
    assert k.stride() != plain.k.stride() or k.storage_offset()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "e4m3"])
def test_no_vector_is_aligned_at_an_offset(dtype, small):
    laid_out = runs("strides_offset", small(dtype=dtype))[1]
    for tensor in (laid_out.q, laid_out.k, laid_out.v):
        start = tensor.data_ptr() - tensor.untyped_storage().data_ptr()
        assert start == tensor.element_size()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "e4m3", "e5m2"])
@pytest.mark.parametrize("question", ["strides_gapped", "strides_packed"])
def test_gaps_are_nan(question, dtype, small):
    laid_out = runs(question, small(dtype=dtype))[1]
    tensors = (laid_out.q, laid_out.k, laid_out.v)
    buffers = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    everything = torch.cat([memory(t).float() for t in buffers.values()])
    numbers = sum(tensor.numel() for tensor in tensors)
    assert int(everything.isfinite().sum()) == numbers < len(everything)


def test_the_numbers_stay_and_the_pages_change(small):
    paging = Paging(size=2, seed=3, shared=1)
    before, after = runs("pages", small(paging=paging), size=16, order=2, shared=0)
    assert after.problem.paging == Paging(size=16, seed=5, shared=0)
    assert after.problem.replace(paging=paging) == before.problem
    assert all(torch.equal(getattr(before, name), getattr(after, name)) for name in "qkv")
    last = small(paging=Paging(size=16, seed=2**63 - 1))
    assert runs("pages", last, size=16, order=1, shared=0)[1].problem.paging.seed == 0
