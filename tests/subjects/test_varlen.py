"""triton-varlen: what it takes, and how it packs it."""

import pytest
import torch

from attncheck.core.mod_spec import Spec
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.conventions.layouts import pack
from attncheck.subjects.triton_caches import Varlen
from attncheck.verify.run_case import run_case

CAUSAL, BOTTOM_RIGHT = Spec.of("causal"), Spec.of("causal_bottom_right")
DOCUMENT = Spec.of("document", lengths=[5, 0, 1, 6, 9])
# Rows and keys unlike in the first of them that has both: bottom-right in each is so in the whole.
FIRST = {
    "mask": Spec.of("documents", query_lengths=[0, 3, 0, 8, 1], kv_lengths=[0, 9, 0, 8, 1]),
    "query": 12,
    "kv": 18,
}
# … in the last: top-left in each is so in the whole.
LAST = {
    "mask": Spec.of("documents", query_lengths=[0, 4, 8, 0], kv_lengths=[0, 4, 9, 3]),
    "query": 12,
    "kv": 16,
}


def both(*parts):
    return Spec.of("and", *parts)


def small(**changes) -> Problem:
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 12, "head_dim": 16, "dtype": "fp32"}
    return Problem(**(sizes | changes))


def status(subject, problem) -> str:
    record = run_case(subject, Case(problem=problem), device="cpu")
    return f"{record.status} {record.reason}".strip()


TAKEN = [
    {},
    {"mask": CAUSAL, "value_dim": 8},
    {"mask": BOTTOM_RIGHT, "kv": 17},
    {"mask": BOTTOM_RIGHT, "kv": 7, "dtype": "bf16"},
    {"mask": Spec.of("padding", lengths=[0, 9])},
    {"mask": DOCUMENT, "query": 21, "dtype": "e4m3"},
    {"mask": both(DOCUMENT, CAUSAL), "query": 21, "kv": 9},
    {"mask": both(Spec.of("prefix_lm", prefix=8), DOCUMENT), "query": 21, "batch": 1},
    FIRST,
    LAST | {"dtype": "e5m2"},
    FIRST | {"mask": both(BOTTOM_RIGHT, FIRST["mask"]), "score": Spec.of("alibi")},
    LAST | {"mask": both(CAUSAL, LAST["mask"]), "score": Spec.of("softcap", cap=2.0)},
    {"mask": Spec.of("document", lengths=[1] * 12), "batch": 1},
]


@pytest.mark.parametrize("changes", TAKEN, ids=lambda c: str(c.get("mask", "full")))
def test_it_is_exact(changes):
    problem = small(**changes)
    assert Varlen().unsupported(problem, "cpu") is None
    assert status(Varlen(), problem) == "pass"


GRADIENTS = {"backward": True, "dlse": True}


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "tf32", "sink": True},
        {"mask": BOTTOM_RIGHT, "kv": 7, "dtype": "bf16", "value_dim": 8},
        {"mask": Spec.of("padding", lengths=[0, 9])},
        {"mask": Spec.of("padding", lengths=[0, 0]), "dtype": "fp16"},
        {"mask": both(Spec.of("prefix_lm", prefix=8), DOCUMENT), "query": 21, "batch": 1},
        FIRST | {"mask": both(BOTTOM_RIGHT, FIRST["mask"]), "score": Spec.of("alibi")},
        LAST | {"mask": both(CAUSAL, LAST["mask"]), "score": Spec.of("softcap", cap=2.0)},
    ],
    ids=lambda c: str(c.get("mask", "full")),
)
def test_its_gradients_are_exact(changes):
    problem = small(**changes, **GRADIENTS)
    assert Varlen().concerns(problem)
    assert status(Varlen(), problem) == "pass"


def test_keys_of_padding_have_gradients_of_0():
    inputs = draw_inputs(small(mask=Spec.of("padding", lengths=[0, 9]), **GRADIENTS))
    found = Varlen().run(inputs)
    for name, like in (("dk", inputs.k), ("dv", inputs.v)):
        given = found.gradients()[name]
        assert given.shape == like.shape
        assert given.dtype == like.dtype
        assert not given[0].any()
        assert not given[1, :, 9:].any()
        assert given[1, :, :9].any()


def test_the_forward_beside_gradients_is_the_forward():
    inputs = draw_inputs(small(**FIRST, **GRADIENTS))
    found, alone = Varlen().run(inputs), Varlen().run(inputs.forward())
    assert torch.equal(found.out, alone.out)
    assert torch.equal(found.lse, alone.lse)
    assert not alone.gradients()


@pytest.mark.parametrize(
    ("changes", "alignment", "masked"),
    [
        ({}, "", False),
        ({"mask": CAUSAL}, "bottom_right", False),
        ({"mask": CAUSAL, "kv": 17}, "top_left", False),
        ({"mask": BOTTOM_RIGHT, "kv": 17}, "bottom_right", False),
        (FIRST | {"mask": both(BOTTOM_RIGHT, FIRST["mask"])}, "bottom_right", False),
        (LAST | {"mask": both(CAUSAL, LAST["mask"])}, "top_left", False),
        (FIRST | {"mask": both(CAUSAL, FIRST["mask"])}, "", True),
        ({"mask": both(DOCUMENT, Spec.of("not", CAUSAL))}, "", True),
        ({"mask": Spec.of("sliding_window", window=3)}, "", True),
    ],
    ids=str,
)
def test_the_flag_is_used_where_it_is_the_mask(changes, alignment, masked, monkeypatch):
    asked = {}

    def forward(*_tensors, **keywords):
        asked.update(keywords)
        rows, heads = 2 * small(**changes).query, 4
        return torch.zeros(rows, heads, 16), torch.zeros(heads, rows)

    monkeypatch.setattr(Varlen, "forward", lambda _: forward)
    Varlen().run(draw_inputs(small(**changes)))
    assert asked["causal"] == alignment
    assert (asked["mask"] is not None) == masked


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (both(DOCUMENT, Spec.of("padding", lengths=[3, 4])), "more than once"),
        (both(DOCUMENT, DOCUMENT), "more than once"),
        (Spec.of("or", DOCUMENT, CAUSAL), "neither documents nor padding nor a band"),
        (Spec.of("prefix_lm", prefix=3), "neither documents nor padding nor a band"),
    ],
    ids=str,
)
def test_what_it_does_not_take_it_says(mask, reason):
    assert reason in (Varlen().unsupported(small(mask=mask), "cpu") or "")


def test_it_is_asked_with_sinks_and_not_about_pages_or_softmax():
    subject = Varlen()
    assert subject.concerns(small(sink=True))
    assert not subject.concerns(Problem(operation="softmax", query=3))


def test_a_sink_takes_part():
    problem = small(mask=both(CAUSAL, LAST["mask"]), **{k: LAST[k] for k in ("query", "kv")})
    assert status(Varlen(), problem.replace(sink=True)) == "pass"


def test_tiles_are_declared_where_documents_do_not_move_them():
    aligned = small(mask=Spec.of("document", lengths=[64, 0, 64, 7]), query=135)
    assert Varlen().tiling(aligned, "cpu").block_kv == 64
    assert Varlen().tiling(small(), "cpu") is not None
    moved = small(mask=DOCUMENT, query=21)
    assert Varlen().tiling(moved, "cpu") is None


def test_places_are_those_of_the_problem():
    problem = small(mask=LAST["mask"], query=12, kv=16)
    found = pack(problem)
    assert found.places()[:4] == [(0, 0, 0), (0, 0, 0), (0, 4, 4), (0, 12, 13)]
    assert found.places()[4:] == [(1, row, key) for _, row, key in found.places()[:4]]
    assert found.starts(1) == [0, 0, 4, 13, 16, 16, 20, 29, 32]
