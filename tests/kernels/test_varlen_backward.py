"""Gradients of packed documents: torch's in float64 within what fp32 sums and roundings allow, bit
for bit what FlashAttention-2 gives of each document alone, and every planted fault is noticed."""

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
    asked_of,
    in_reference_axes,
    one_of,
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
def test_any_mask_beside_the_flag(within, causal):
    asked = asked_of(causal, WITHIN[within])
    found = run(asked)
    assert worst_of(asked, found) <= 1
    seen = asked.given.seen()
    dead, unseen = ~seen.any(-1)[0].T, ~seen.any((0, 1, 2))
    assert bool(dead.any())
    assert bool(unseen[[0, 1, -3, -2, -1]].all())  # those in no document
    assert not found[2]["dq"][dead].any()
    assert not found[2]["dk"][unseen].any()
    assert not found[2]["dv"][unseen].any()


@pytest.mark.parametrize("local", [True, False], ids=["documents", "whole"])
@pytest.mark.parametrize("score", SCORES)
def test_mods_count_in_documents_or_through_them(score, local):
    asked = asked_of("bottom_right", WITHIN["stripes"], SCORES[score], local=local)
    assert worst(asked) <= 1


def test_places_matter():
    one, other = (asked_of(score=SCORES["of documents"], local=local) for local in (True, False))
    assert not same(run(one), run(other))


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 2, 256, 3), (6, 2, 8, 130)])
def test_any_shape(shape):
    assert worst(asked_of("top_left", shape=shape)) <= 1


@pytest.mark.parametrize(
    ("causal", "blocks"),
    [("", (32, 16)), ("top_left", (16, 32)), ("bottom_right", (64, 64)), ("top_left", (128, 32))],
)
def test_any_tiles(causal, blocks):
    launch = Launch(block_query=blocks[0], block_kv=blocks[1])
    assert worst(asked_of(causal, dtype="bf16"), launch) <= 1


def test_keys_may_have_tiles_of_their_own():
    asked = asked_of("bottom_right")
    first = run(asked)
    # dK and dV are added up in another order then, in the interpreter by BLAS: bounds, not bits.
    for block_kv in (32, 64):
        mixed = run(asked, by_keys=Launch(block_query=16, block_kv=block_kv))
        assert worst_of(asked, mixed) <= 1
        assert torch.equal(mixed[2]["dq"], first[2]["dq"])


@pytest.mark.parametrize("causal", ["", "top_left", "bottom_right"])
def test_a_document_is_what_it_is_alone(causal):
    """To the bit what FlashAttention-2 gives of it, where its tiles are the same."""
    asked = asked_of(causal, score=SCORES["softcap"], dtype="bf16")
    out, lse, found = in_reference_axes(run(asked))
    said = mods(None, asked.score)
    for (row, key), (query, kv) in zip(STARTS, LENGTHS, strict=False):
        if not (query and kv):
            continue
        one = one_of(asked.given, row, BEFORE + key, (query, kv))
        rows, keys = slice(row, row + query), slice(BEFORE + key, BEFORE + key + kv)
        mask = masks.causal if causal == "top_left" else masks.causal_bottom_right(kv - query)
        alone = flash2_backward(
            one.q, one.k, one.v, out[:, :, rows], lse[:, :, rows], one.dout, one.dlse,
            scale=one.scale, launch=LAUNCH, **said | {
                "mask": to_triton(trace_mask(mask if causal else masks.full))
            },
        )  # fmt: skip
        assert torch.equal(alone[0], found["dq"][:, :, rows])
        assert torch.equal(alone[1], found["dk"][:, :, keys])
        assert torch.equal(alone[2], found["dv"][:, :, keys])


def poisoned(asked, keys, poison):
    k, v = asked.given.k.clone(), asked.given.v.clone()
    k[:, :, keys], v[:, :, keys] = poison, -poison
    return asked.but(k=k, v=v)


@pytest.mark.parametrize("poison", [1e30, math.inf, math.nan])
def test_hidden_keys_move_no_bit(poison):
    """Those after the rows of the first document, and those of documents and places without any."""
    asked = asked_of("top_left", sink=True)
    hidden = [0, 1, *range(BEFORE + 3, BEFORE + 24), -1]
    assert same(run(poisoned(asked, hidden, poison)), run(asked))


@pytest.mark.parametrize(
    ("causal", "within", "key"), [("bottom_right", "all", 31), ("", "window", 3)]
)
def test_a_document_that_is_not_finite_is_so_alone(causal, within, key):
    """And in it the rows that do not see the key keep every bit."""
    asked = asked_of(causal, WITHIN[within])
    place = BEFORE + 24 + key  # of the fifth, whose rows are 7 to 23
    right, found = run(asked)[2], run(poisoned(asked, [place], math.nan))[2]
    sees = asked.given.seen()[0, 0, :, place]
    assert bool(sees[7:24].any())
    assert not bool(sees[7:24].all())
    assert torch.equal(found["dq"][~sees], right["dq"][~sees])
    assert bool(found["dq"][sees].isnan().all())
    own = torch.zeros(len(right["dk"]), dtype=torch.bool)
    own[BEFORE + 24 : BEFORE + 57] = True
    for name in ("dk", "dv"):
        assert torch.equal(found[name][~own], right[name][~own])
        assert bool(found[name][own].isnan().any())


def test_a_program_owns_keys_of_one_document():
    assert key_program_list([3, 0, 17], 16).tolist() == [[0, 0], [2, 0], [2, 16]]
    assert key_program_list([0, 0], 16).shape == (0, 2)


def test_no_keys_at_all_have_no_gradients():
    """None in a document, that is, or none anywhere."""
    q, dout = torch.randn(3, 2, 16), torch.ones(3, 2, 8)
    starts = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([0, 0], dtype=torch.int32)
    both = {"scale": 1.0, "launch": LAUNCH, "programs": program_list([3], 16)}
    for keys in (5, 0):
        k, v = torch.randn(keys, 1, 16), torch.randn(keys, 1, 8)
        out, lse = varlen_forward(q, k, v, *starts, **both)
        found = varlen_backward(
            q, k, v, out, lse, dout, None, *starts, **both, key_programs=key_program_list([0], 16)
        )
        assert [x.shape for x in found[:3]] == [q.shape, k.shape, v.shape]
        assert not any(x.any() for x in found[:3])


BESIDE = """


def _full_of_ones(*shape, **keywords):
    return torch.ones(*shape, **keywords)


@triton.jit
def _one(x, b, h, rows, keys, captured):
    return x * 0.0 + 1.0
"""


def with_a_fault(folder: Path, where: str, right: str, wrong: str):
    return faulty(folder, ("varlen_backward",), where, right, wrong, BESIDE)


@pytest.mark.parametrize("fault", PLANTED["varlen_backward"])
def test_planted_faults_are_noticed(fault, tmp_path):
    changes = dict(PLANTED["varlen_backward"][fault])
    planted = with_a_fault(tmp_path, *(changes.pop(name) for name in ("where", "right", "wrong")))
    for name, known in (("within", WITHIN), ("score", SCORES)):
        if name in changes:
            changes[name] = known[changes[name]]
    asked = asked_of("bottom_right", **changes)
    assert not changes or worst(asked) <= 1
    assert worst(asked, backward=planted) > 1


def test_a_careless_kernel_lets_hidden_keys_through(tmp_path):
    careless = with_a_fault(tmp_path, "_by_rows", "needs_careful_launch(flags)", "False")
    asked = poisoned(asked_of("top_left"), [BEFORE + 10], math.nan)  # hidden from 3 rows
    assert run(asked, backward=careless)[2]["dq"].isnan().any()
    assert not run(asked)[2]["dq"].isnan().any()
