"""Gradients of packed documents: against torch's in float64 within the error of fp32 sums and
roundings, bitwise equal to FlashAttention-2's of each document alone, and planted faults fail."""

import math
from pathlib import Path

import pytest
import torch
from tests.kernels.backward_calls import mods, same
from tests.kernels.packed_calls import (
    BEFORE,
    LAUNCH,
    LENGTHS,
    SCORES,
    STARTS,
    WITHIN,
    document_part,
    in_reference_axes,
    pack,
    run,
    worst,
    worst_of,
)
from tests.kernels.patched_kernels import PLANTED, faulty

from attncheck.kernels.flash2_backward import flash2_backward
from attncheck.kernels.launch import Launch
from attncheck.kernels.varlen_backward import key_program_list, varlen_backward
from attncheck.kernels.varlen_forward import program_list, varlen_forward
from attncheck.mods import masks
from attncheck.mods.to_triton import to_triton
from attncheck.mods.trace import trace_mask


@pytest.mark.parametrize(
    ("within", "causal"),
    [
        ("all", ""),
        ("all", "bottom_right"),
        ("window", ""),
        ("of heads", "bottom_right"),
        ("later rows see nothing", ""),
        ("nothing", "top_left"),
    ],
)
def test_gradients_are_within_bounds_for_mask_and_causal_flag(within, causal):
    packed = pack(causal, WITHIN[within])
    results = run(packed)
    assert worst_of(packed, results) <= 1
    seen = packed.whole.seen()
    empty_rows, unseen = ~seen.any(-1)[0].T, ~seen.any((0, 1, 2))
    assert bool(empty_rows.any())
    assert bool(unseen[[0, 1, -3, -2, -1]].all())  # keys of no document
    assert not results[2]["dq"][empty_rows].any()
    assert not results[2]["dk"][unseen].any()
    assert not results[2]["dv"][unseen].any()


@pytest.mark.parametrize("local", [True, False], ids=["documents", "whole"])
@pytest.mark.parametrize("score", SCORES)
def test_mods_index_within_a_document_or_across_all(score, local):
    packed = pack("bottom_right", WITHIN["stripes"], SCORES[score], local=local)
    assert worst(packed) <= 1


def test_local_and_global_indices_give_different_gradients():
    one, other = (pack(score=SCORES["of documents"], local=local) for local in (True, False))
    assert not same(run(one), run(other))


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 2, 256, 3), (6, 2, 8, 130)])
def test_gradients_are_within_bounds_for_shape(shape):
    assert worst(pack("top_left", shape=shape)) <= 1


@pytest.mark.parametrize(
    ("causal", "blocks"),
    [("", (32, 16)), ("top_left", (16, 32)), ("bottom_right", (64, 64)), ("top_left", (128, 32))],
)
def test_gradients_are_within_bounds_for_tile_size(causal, blocks):
    launch = Launch(block_query=blocks[0], block_kv=blocks[1])
    assert worst(pack(causal, dtype="bf16"), launch) <= 1


def test_pass_by_keys_may_have_other_tiles():
    packed = pack("bottom_right")
    first = run(packed)
    # Bounds, not bits: dK and dV are summed in another order, in the interpreter by BLAS.
    for block_kv in (32, 64):
        mixed = run(packed, by_keys=Launch(block_query=16, block_kv=block_kv))
        assert worst_of(packed, mixed) <= 1
        assert torch.equal(mixed[2]["dq"], first[2]["dq"])


@pytest.mark.parametrize("causal", ["", "top_left", "bottom_right"])
def test_document_has_the_gradients_flash2_gives_it_alone(causal):
    """Bitwise, with the same tiles."""
    packed = pack(causal, score=SCORES["softcap"], dtype="bf16")
    out, lse, results = in_reference_axes(run(packed))
    traced = mods(None, packed.score)
    for (row, key), (query, kv) in zip(STARTS, LENGTHS, strict=False):
        if not (query and kv):
            continue
        one = document_part(packed.whole, row, BEFORE + key, (query, kv))
        rows, keys = slice(row, row + query), slice(BEFORE + key, BEFORE + key + kv)
        mask = masks.causal if causal == "top_left" else masks.causal_bottom_right(kv - query)
        alone = flash2_backward(
            one.q, one.k, one.v, out[:, :, rows], lse[:, :, rows], one.dout, one.dlse,
            scale=one.scale, launch=LAUNCH, **traced | {
                "mask": to_triton(trace_mask(mask if causal else masks.full))
            },
        )  # fmt: skip
        assert torch.equal(alone[0], results["dq"][:, :, rows])
        assert torch.equal(alone[1], results["dk"][:, :, keys])
        assert torch.equal(alone[2], results["dv"][:, :, keys])


def poisoned(packed, keys, poison):
    k, v = packed.whole.k.clone(), packed.whole.v.clone()
    k[:, :, keys], v[:, :, keys] = poison, -poison
    return packed.but(k=k, v=v)


@pytest.mark.parametrize("poison", [1e30, math.inf, math.nan])
def test_hidden_keys_change_no_bit(poison):
    """Keys beyond the causal diagonal, in a document without rows, and in no document."""
    packed = pack("top_left", sink=True)
    hidden = [0, 1, *range(BEFORE + 3, BEFORE + 24), -1]
    assert same(run(poisoned(packed, hidden, poison)), run(packed))


@pytest.mark.parametrize(
    ("causal", "within", "key"), [("bottom_right", "all", 31), ("", "window", 3)]
)
def test_nan_key_reaches_only_rows_of_its_document_that_see_it(causal, within, key):
    """All other gradients keep their bits."""
    packed = pack(causal, WITHIN[within])
    place = BEFORE + 24 + key  # in the fifth document, whose rows are 7 to 23
    right, results = run(packed)[2], run(poisoned(packed, [place], math.nan))[2]
    sees = packed.whole.seen()[0, 0, :, place]
    assert bool(sees[7:24].any())
    assert not bool(sees[7:24].all())
    assert torch.equal(results["dq"][~sees], right["dq"][~sees])
    assert bool(results["dq"][sees].isnan().all())
    own = torch.zeros(len(right["dk"]), dtype=torch.bool)
    own[BEFORE + 24 : BEFORE + 57] = True
    for name in ("dk", "dv"):
        assert torch.equal(results[name][~own], right[name][~own])
        assert bool(results[name][own].isnan().any())


def test_each_program_has_keys_of_one_document():
    assert key_program_list([3, 0, 17], 16).tolist() == [[0, 0], [2, 0], [2, 16]]
    assert key_program_list([0, 0], 16).shape == (0, 2)


def test_gradients_are_zero_without_keys():
    """Whether the keys are in no document, or there are none at all."""
    q, dout = torch.randn(3, 2, 16), torch.ones(3, 2, 8)
    starts = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([0, 0], dtype=torch.int32)
    common = {"scale": 1.0, "launch": LAUNCH, "programs": program_list([3], 16)}
    for keys in (5, 0):
        k, v = torch.randn(keys, 1, 16), torch.randn(keys, 1, 8)
        out, lse = varlen_forward(q, k, v, *starts, **common)
        results = varlen_backward(
            q, k, v, out, lse, dout, None, *starts, **common, key_programs=key_program_list([0], 16)
        )
        assert [x.shape for x in results[:3]] == [q.shape, k.shape, v.shape]
        assert not any(x.any() for x in results[:3])


# Appended to the copy: functions that the planted faults call.
HELPERS = """


def _full_of_ones(*shape, **keywords):
    return torch.ones(*shape, **keywords)


@triton.jit
def _one(x, b, h, rows, keys, captured):
    return x * 0.0 + 1.0
"""


def plant(folder: Path, where: str, right: str, wrong: str):
    return faulty(folder, ("varlen_backward",), where, right, wrong, HELPERS)


@pytest.mark.parametrize("fault", PLANTED["varlen_backward"])
def test_planted_fault_exceeds_the_bounds(fault, tmp_path):
    changes = dict(PLANTED["varlen_backward"][fault])
    planted = plant(tmp_path, *(changes.pop(name) for name in ("where", "right", "wrong")))
    for name, known in (("within", WITHIN), ("score", SCORES)):
        if name in changes:
            changes[name] = known[changes[name]]
    packed = pack("bottom_right", **changes)
    assert not changes or worst(packed) <= 1
    assert worst(packed, backward=planted) > 1


def test_without_the_careful_pass_a_hidden_nan_key_spreads(tmp_path):
    careless = plant(tmp_path, "_by_rows", "needs_careful_launch(flags)", "False")
    packed = poisoned(pack("top_left"), [BEFORE + 10], math.nan)  # hidden from 3 rows
    assert run(packed, backward=careless)[2]["dq"].isnan().any()
    assert not run(packed)[2]["dq"].isnan().any()
