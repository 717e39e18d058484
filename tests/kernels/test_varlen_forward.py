"""The forward of packed documents: bitwise equal to FlashAttention-2's of each document alone."""

import itertools

import pytest
import torch
from tests.kernels.packed_calls import LAUNCH, LENGTHS

from attncheck.core.errors import UsageError
from attncheck.inputs.input_tensors import Descale
from attncheck.kernels.flash2_forward import flash2_forward
from attncheck.kernels.launch import Launch
from attncheck.kernels.varlen_forward import program_list, varlen_forward
from attncheck.mods import masks, scores
from attncheck.mods.to_triton import to_triton
from attncheck.mods.trace import trace_mask, trace_score

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 20, 7
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def starts(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def draw(dtype=torch.float32):
    numbers = torch.Generator().manual_seed(0)
    rows, keys = map(sum, zip(*LENGTHS, strict=True))
    shapes = [(rows, HEADS, DIM), (keys, KV_HEADS, DIM), (keys, KV_HEADS, VALUE_DIM)]
    return [torch.randn(shape, generator=numbers).to(dtype) for shape in shapes]


def traced(mask=None, score=None):
    return {
        "mask": None if mask is None else to_triton(trace_mask(mask)),
        "score": None if score is None else to_triton(trace_score(score)),
    }


def packed(q, k, v, *, launch=LAUNCH, **keywords):
    rows, keys = zip(*LENGTHS, strict=True)
    programs = program_list(rows, launch.block_query)
    places = {"programs": programs, "scale": 0.3, "launch": launch}
    return varlen_forward(q, k, v, starts(rows), starts(keys), **places, **keywords)


def one_by_one(q, k, v, mask_of, *, score=None, descale=None, launch=LAUNCH, **keywords):
    """Run FlashAttention-2 on each document, with the mask ``mask_of(query, kv)``."""
    outs, lses = [], []
    ends = itertools.accumulate(LENGTHS, lambda one, other: (one[0] + other[0], one[1] + other[1]))
    for document, ((query, kv), (end, kv_end)) in enumerate(zip(LENGTHS, ends, strict=True)):
        if query == 0:
            continue
        parts = [q[end - query : end], k[kv_end - kv : kv_end], v[kv_end - kv : kv_end]]
        one = [x.transpose(0, 1)[None] for x in parts]
        scale = descale and Descale(
            **{n: getattr(descale, n)[document : document + 1] for n in "qkv"}
        )
        mods = {"mask": to_triton(trace_mask(mask_of(query, kv))), "score": score}
        keywords |= {"scale": 0.3, "launch": launch, "descale": scale}
        out, lse = flash2_forward(*one, **mods, **keywords)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def same_bits(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


MASKS = {
    "": lambda _query, _kv: masks.full,
    "top_left": lambda _query, _kv: masks.causal,
    "bottom_right": lambda query, kv: masks.causal_bottom_right(kv - query),
}


@pytest.mark.parametrize("causal", MASKS)
def test_document_has_the_outputs_flash2_gives_it_alone(causal):
    tensors = draw()
    assert same_bits(packed(*tensors, causal=causal), one_by_one(*tensors, MASKS[causal]))


def test_top_left_and_bottom_right_alignment_differ():
    tensors = draw()
    one, other = (packed(*tensors, causal=causal) for causal in ("top_left", "bottom_right"))
    assert not same_bits(one, other)


def test_mods_index_from_the_first_row_and_key_of_the_document():
    tensors, window = draw(), masks.sliding_window(9)
    mods = traced(window, scores.alibi(SLOPES))
    alone = one_by_one(*tensors, lambda _query, _kv: window, score=mods["score"])
    assert same_bits(packed(*tensors, **mods), alone)


def test_mods_index_across_all_documents_with_places():
    """A mask of documents over global indices then restricts nothing further."""
    tensors = draw()
    rows, keys = (starts(length[side] for length in LENGTHS)[:-1] for side in (0, 1))
    places = torch.stack([torch.zeros_like(rows), rows, keys], 1)
    of_row, of_key = (
        torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(lengths))
        for lengths in zip(*LENGTHS, strict=True)
    )
    own = traced(masks.documents(of_row.int(), of_key.int()))
    assert same_bits(packed(*tensors, places=places, **own), packed(*tensors))
    assert not same_bits(packed(*tensors, **own), packed(*tensors))


def test_index_b_is_the_documents_number_or_with_places_its_sequence():
    def first_only(b, h, q_idx, kv_idx):
        return (b == 0) & (kv_idx >= 0)

    tensors, mod = draw(), traced(first_only)
    _, of_number = packed(*tensors, **mod)
    places = torch.zeros(len(LENGTHS), 3, dtype=torch.int32)
    _, of_sequence = packed(*tensors, **mod, places=places)
    _, whole = packed(*tensors)
    assert bool(of_number[:, 3:].isneginf().all())
    assert torch.equal(of_number[:, :3], whole[:, :3])
    assert torch.equal(of_sequence, whole)


def test_sink_counts_for_every_row():
    tensors, sink = draw(), torch.tensor([-1.0, 0.5, 2.0, 30.0])
    results = packed(*tensors, sink=sink)
    assert same_bits(results, one_by_one(*tensors, MASKS[""], sink=sink))
    out, lse = results
    dead = slice(3, 7)  # the third document has no keys
    assert not out[dead].any()
    assert bool((lse[:, dead] == lse[:, dead][:, :1]).all())
    assert bool(lse[:, dead].isfinite().all())


def test_fp8_uses_the_descale_of_each_document():
    numbers = torch.Generator().manual_seed(1)
    shape = (len(LENGTHS), KV_HEADS)
    descale = Descale(**{n: 0.5 + torch.rand(shape, generator=numbers) for n in "qkv"})
    tensors = draw(torch.float8_e4m3fn)
    # fp8 products contract over 32 keys at a time
    launch = Launch(block_query=16, block_kv=32, weights_scale=256.0)
    keywords = {"descale": descale, "out_dtype": torch.bfloat16}
    results = packed(*tensors, launch=launch, **keywords)
    assert same_bits(results, one_by_one(*tensors, MASKS[""], launch=launch, **keywords))
    moved = Descale(**{n: getattr(descale, n).roll(1, 0) for n in "qkv"})
    assert not same_bits(results, packed(*tensors, launch=launch, **keywords | {"descale": moved}))


def test_inputs_may_have_any_strides():
    tensors = draw()
    views = [torch.stack([x, -x], -1).transpose(0, 1).contiguous()[..., 0] for x in tensors]
    views = [view.transpose(0, 1) for view in views]
    assert not any(view.is_contiguous() for view in views)
    assert same_bits(packed(*views), packed(*tensors))


def test_nan_in_another_document_changes_no_bit():
    q, k, v = draw()
    right = packed(q, k, v, causal="bottom_right")
    k, v = k.clone(), v.clone()
    k[19:24] = v[19:24] = torch.nan  # keys of the document without rows
    assert same_bits(packed(q, k, v, causal="bottom_right"), right)


def test_each_program_has_rows_of_one_document():
    assert program_list([3, 0, 17, 32], 16).tolist() == [[0, 0], [2, 0], [2, 16], [3, 0], [3, 16]]


def test_documents_without_any_row_are_refused():
    with pytest.raises(UsageError, match=r"query_lengths=\(0, 0\): no document has a row"):
        program_list([0, 0], 16)
