"""triton-varlen: the masks that it takes, its gradients, its causal flag, and the packed layout."""

import pytest
import torch

from attncheck.core.mod_spec import Spec
from attncheck.core.paged_layout import Paging
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.conventions.layouts import pack
from attncheck.subjects.triton_caches import Varlen
from attncheck.verify.run_case import run_case

CAUSAL, BOTTOM_RIGHT = Spec.of("causal"), Spec.of("causal_bottom_right")
DOCUMENT = Spec.of("document", lengths=[5, 0, 1, 6, 9])
# Only the first nonempty document has unlike lengths: bottom-right in each is so in the whole.
FIRST = {
    "mask": Spec.of("documents", query_lengths=[0, 3, 0, 8, 1], kv_lengths=[0, 9, 0, 8, 1]),
    "query": 12,
    "kv": 18,
}
# Only the last document with rows has unlike lengths: top-left in each is so in the whole.
LAST = {
    "mask": Spec.of("documents", query_lengths=[0, 4, 8, 0], kv_lengths=[0, 4, 9, 3]),
    "query": 12,
    "kv": 16,
}
# Each document has a diagonal of its own.
EACH = {
    "mask": Spec.of(
        "documents_bottom_right", CAUSAL, query_lengths=[0, 3, 2, 7], kv_lengths=[2, 9, 1, 8]
    ),
    "query": 12,
    "kv": 20,
}


def both(*parts):
    return Spec.of("and", *parts)


def small(**changes) -> Problem:
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 12, "head_dim": 16, "dtype": "fp32"}
    return Problem(**(sizes | changes))


def judge(problem) -> str:
    """The status of triton-varlen's Record, with its reason."""
    record = run_case(Varlen(), Case(problem=problem), device="cpu")
    return f"{record.status} {record.reason}".strip()


SUPPORTED = [
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
    LAST | {"mask": both(CAUSAL, LAST["mask"]), "sink": True},
    {"mask": Spec.of("document", lengths=[1] * 12), "batch": 1},
    EACH,
    EACH | {"mask": both(EACH["mask"], Spec.of("prefix_lm", prefix=8)), "sink": True},
    {"mask": Spec.of("bottom_right", Spec.of("sliding_window", window=3), lengths=[12, 5])},
]


@pytest.mark.parametrize("changes", SUPPORTED, ids=lambda c: str(c.get("mask", "full")))
def test_supported_problem_passes(changes):
    problem = small(**changes)
    assert Varlen().unsupported(problem, "cpu") is None
    assert judge(problem) == "pass"


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
        EACH | {"sink": True},
        {"mask": Spec.of("bottom_right", CAUSAL, lengths=[12, 5])},
    ],
    ids=lambda c: str(c.get("mask", "full")),
)
def test_gradients_pass(changes):
    problem = small(**changes, **GRADIENTS)
    assert Varlen().concerns(problem)
    assert judge(problem) == "pass"


def test_padded_keys_have_gradients_of_zero():
    inputs = draw_inputs(small(mask=Spec.of("padding", lengths=[0, 9]), **GRADIENTS))
    gradients = Varlen().run(inputs).gradients()
    for name, like in (("dk", inputs.k), ("dv", inputs.v)):
        gradient = gradients[name]
        assert gradient.shape == like.shape
        assert gradient.dtype == like.dtype
        assert not gradient[0].any()
        assert not gradient[1, :, 9:].any()
        assert gradient[1, :, :9].any()


def test_forward_alone_has_the_same_bits_and_no_gradients():
    inputs = draw_inputs(small(**FIRST, **GRADIENTS))
    both, forward = Varlen().run(inputs), Varlen().run(inputs.forward())
    assert torch.equal(both.out, forward.out)
    assert torch.equal(both.lse, forward.lse)
    assert not forward.gradients()


@pytest.mark.parametrize(
    ("changes", "alignment", "masked"),
    [
        ({}, "", False),
        ({"mask": CAUSAL}, "bottom_right", False),
        ({"mask": CAUSAL, "kv": 17}, "top_left", False),
        ({"mask": BOTTOM_RIGHT, "kv": 17}, "bottom_right", False),
        (FIRST | {"mask": both(BOTTOM_RIGHT, FIRST["mask"])}, "bottom_right", False),
        (LAST | {"mask": both(CAUSAL, LAST["mask"])}, "top_left", False),
        (EACH, "bottom_right", False),
        ({"mask": Spec.of("bottom_right", CAUSAL, lengths=[12, 5])}, "bottom_right", False),
        (FIRST | {"mask": both(CAUSAL, FIRST["mask"])}, "", True),
        ({"mask": both(DOCUMENT, Spec.of("not", CAUSAL))}, "", True),
        ({"mask": Spec.of("sliding_window", window=3)}, "", True),
    ],
    ids=str,
)
def test_causal_flag_is_used_exactly_where_it_is_the_mask(changes, alignment, masked, monkeypatch):
    passed = {}

    def forward(*_tensors, **keywords):
        passed.update(keywords)
        rows, heads = 2 * small(**changes).query, 4
        return torch.zeros(rows, heads, 16), torch.zeros(heads, rows)

    monkeypatch.setattr(Varlen, "forward", lambda _: forward)
    Varlen().run(draw_inputs(small(**changes)))
    assert passed["causal"] == alignment
    assert (passed["mask"] is not None) == masked


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
def test_unsupported_mask_has_a_reason(mask, reason):
    assert reason in (Varlen().unsupported(small(mask=mask), "cpu") or "")


def test_varlen_concerns_sinks_and_neither_pages_nor_softmax():
    subject = Varlen()
    assert subject.concerns(small(sink=True))
    assert not subject.concerns(small(paging=Paging(size=16)))
    assert not subject.concerns(Problem(operation="softmax", query=3))


def test_tiling_is_declared_only_where_documents_start_at_tiles():
    aligned = small(mask=Spec.of("document", lengths=[64, 0, 64, 7]), query=135)
    assert Varlen().tiling(aligned, "cpu").block_kv == 64
    assert Varlen().tiling(small(), "cpu") is not None
    unaligned = small(mask=DOCUMENT, query=21)
    assert Varlen().tiling(unaligned, "cpu") is None


def test_packed_documents_keep_their_places_and_starts():
    packed = pack(small(mask=LAST["mask"], query=12, kv=16))
    assert packed.places()[:4] == [(0, 0, 0), (0, 0, 0), (0, 4, 4), (0, 12, 13)]
    assert packed.places()[4:] == [(1, row, key) for _, row, key in packed.places()[:4]]
    assert packed.starts(1) == [0, 0, 4, 13, 16, 16, 20, 29, 32]
