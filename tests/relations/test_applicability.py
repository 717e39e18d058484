"""Which relations apply to a Problem and the reasons why others do not, and what a mod reads."""

import pytest

from attncheck.core.errors import ProblemError, UnknownName
from attncheck.core.mod_spec import Spec
from attncheck.core.paged_layout import Paging
from attncheck.inputs.problem import Case
from attncheck.probes import PROBES
from attncheck.relations import RELATIONS, relation_named
from attncheck.relations.hidden_keys import first_hidden
from attncheck.relations.mask_visibility import rows_without_keys
from attncheck.relations.relation import indices_read
from attncheck.subjects.ideal import Ideal
from attncheck.verify.relation_runs import check_relation

FULL, CAUSAL, BOTTOM_RIGHT = map(Spec.of, ("full", "causal", "causal_bottom_right"))
DOCUMENT = Spec.of("document", lengths=[3, 0, 4])
ALIBI, BIAS = Spec.of("alibi"), Spec.of("bias", seed=0, per_batch=0, per_head=0)
SIDES = {"canvas": [2, 2], "kernel": [1, 1]}


def text(mask: str) -> dict:
    return {"mask": Spec.of("expression", text=mask)}


TILED = {"mask": Spec.of("neighborhood_tiled", canvas=[2, 2], kernel=[1, 1], tile=[1, 2])}
REASONS = [
    ("future_keys", {}, "no key is hidden to a row"),
    ("future_keys", {"mask": CAUSAL, "kv": 1}, "no key is hidden to a row"),
    ("hidden_keys", {}, "its mask shows every row every key"),
    ("empty_rows", {"mask": CAUSAL}, "each of its rows sees a key"),
    ("first_row", {}, "does not show row 0 key 0 alone"),
    ("first_row", {"mask": Spec.of("sliding_window", window=0)}, "does not show row 0"),
    ("first_row", {"mask": Spec.of("prefix_lm", prefix=2)}, "does not show row 0"),
    ("first_row", {"mask": BOTTOM_RIGHT}, "does not show row 0"),
    (
        "first_row",
        {"mask": CAUSAL, "score": Spec.of("relative_bias", distance=1, seed=0)},
        "moves a score of 0",
    ),
    ("zero_query", {"score": ALIBI}, "its score mod may move a score of 0"),
    ("one_hot", {"score": Spec.of("softcap", cap=9.0)}, "its score mod"),
    ("one_hot", {"head_dim": 5}, "head_dim=5 has no room for 3 bits"),
    ("one_hot", {"dtype": "fp16", "scale": 1e-5}, "scale=1e-05 asks for q beyond fp16"),
    ("values_scaled", {"score": ALIBI}, "its score mod may make scores so far"),
    ("key_shift", {"score": Spec.of("softcap", cap=3.0)}, "its score mod may make something"),
    ("key_shift", {"dtype": "fp16", "scale": 1e-10}, "scale=1e-10 asks for q and k"),
    ("key_permutation", text("q_idx >= kv_idx"), "no two keys are seen by the same rows"),
    ("key_permutation", text("q_idx < 3"), None),
    ("key_permutation", text("q_idx < 3") | {"kv": 1}, "no two keys are seen by the same rows"),
    ("key_permutation", {"score": ALIBI}, "reads the key's index"),
    ("head_permutation", text("(h > 0) | (q_idx > 2)"), "its mask reads the head's index"),
    ("head_permutation", text("b > kv_idx"), None),
    ("head_permutation", {"score": ALIBI}, "its score mod reads"),
    ("head_permutation", {"heads": 1, "kv_heads": 1}, "it has one head"),
    ("batch_permutation", text("b > kv_idx"), "its mask reads the sequence's index"),
    ("batch_permutation", text("h > kv_idx"), None),
    ("batch_permutation", {"batch": 1}, "it has one sequence"),
    ("neighborhood_order", {"mask": Spec.of("neighborhood", **SIDES)}, "its mask is none of"),
    ("neighborhood_order", TILED | {"query": 3}, "do not cover the canvas"),
    ("neighborhood_order", TILED | {"kv": 3}, "do not cover the canvas"),
    ("neighborhood_order", TILED | {"score": ALIBI}, "reads the place of a row or key"),
    ("neighborhood_order", TILED | {"score": BIAS}, "reads the place of a row or key"),
    ("neighborhood_order", TILED | {"score": Spec.of("temperature", temperature=2.0)}, None),
    ("split_merge", {"kv": 1}, "one key cannot be cut"),
    ("split_merge", {"score": ALIBI}, "later keys alone"),
    ("rectangular", {"query": 1}, "one row has no part"),
    ("prefill_rows", {"query": 1}, "no rows before it"),
    ("documents", {}, "neither document nor"),
    ("documents", {"mask": Spec.of("or", CAUSAL, DOCUMENT)}, "neither document nor"),
    ("alone_in_batch", {"batch": 1}, "is alone"),
    ("window_beyond", {}, "neither causal nor sliding_window"),
    ("window_beyond", {"mask": Spec.of("offset", CAUSAL, rows=3)}, "neither causal nor"),
    ("prefix_zero", {}, "neither causal nor prefix_lm"),
    ("prefix_full", {"mask": CAUSAL}, "neither full nor prefix_lm"),
    ("softcap_infinite", {"score": ALIBI}, "neither none nor softcap"),
    ("gqa_repeat", {"kv_heads": 4}, "key head of its own"),
    ("pad_head_dim", {"head_dim": 256}, "the largest"),
    ("pad_value_dim", {"value_dim": 256}, "the largest"),
    ("scaled_query", {"dtype": "e4m3"}, "as large as can be"),
    ("scaled_query", {"scale": 2.0**-126}, "subnormal"),
    ("descale", {}, "only fp8"),
    ("pages", {}, "its keys are in no pages"),
    ("mask_order", {"kv": 1}, "two keys, of which one is hidden"),
    ("strides_far", {"query": 1, "kv": 2}, "two rows"),
    ("group_sums", {"backward": True, "kv_heads": 4}, "key head of its own"),
    ("lse_loss", {"backward": True}, "its loss does not depend on LSE"),
    ("euler", {}, "it is about gradients"),
    *((n, {"backward": True}, "nothing of gradients") for n in ("hidden_keys", "future_keys_nan")),
]


@pytest.mark.parametrize(("question", "changes", "reason"), REASONS)
def test_inapplicable_relation_gives_reason(question, changes, reason, small):
    unfit = relation_named(question).unfit(small(**changes))
    assert (unfit is None) if reason is None else (reason in (unfit or ""))


def test_relation_applies_to_softmax_or_attention(softmax, small):
    of_softmax = {name for name in RELATIONS if name.startswith("softmax_")}
    for name, relation in RELATIONS.items():
        expected = None if name in {*of_softmax, "repeat"} else "it is about attention"
        assert relation.unfit(softmax()) == expected
        assert (relation.unfit(small()) == "it is about softmax") == (name in of_softmax)
    one = softmax(batch=1, heads=1, query=1, kv=1)
    assert relation_named("softmax_rows").unfit(one) == "it has one row"
    assert relation_named("softmax_columns").unfit(one) == "it has one column"


COUNT_KEYS_ALONE = ("empty_rows", "first_row", "key_shift", "logit_shift", "one_hot", "zero_query")


def test_sink_rules_out_relations_that_count_keys_alone(small):
    masks = [FULL, CAUSAL, Spec.of("padding", lengths=[5, 0]), DOCUMENT]
    for name, relation in RELATIONS.items():
        plain = [relation.unfit(small(mask)) for mask in masks]
        with_sink = [relation.unfit(small(mask, sink=True)) for mask in masks]
        if name in COUNT_KEYS_ALONE:
            assert None in plain
            assert None not in with_sink
            assert "it has a sink" in with_sink
        else:
            assert plain == with_sink, name
    for probe in PROBES.values():
        with pytest.raises(ProblemError, match="it has a sink"):
            probe.inputs(small(sink=True), {})


def test_allowed_parameters_depend_on_problem(small):
    assert relation_named("call_order").allowed(small(query=1, kv=1)) == {"between": (0,)}
    assert relation_named("rectangular").allowed(small(score=ALIBI))["last"] == [0]
    far = relation_named("strides_far")
    assert far.allowed(small(query=2))["tensor"] == [1, 2]
    assert far.allowed(small(query=3, backward=True))["tensor"] == [0, 1, 2, 3]
    assert far.allowed(small(paging=Paging(size=16)))["tensor"] == [0]
    pages, orders = relation_named("pages"), (1, 2)
    odd, usual = small(paging=Paging(size=2, seed=3, shared=1)), small(paging=Paging(size=32))
    assert pages.allowed(odd) == {"size": [2, 3, 16, 64, 256], "order": orders, "shared": [0, 1]}
    assert pages.allowed(usual) == {"size": [16, 32, 64, 256], "order": orders, "shared": [0]}


@pytest.mark.parametrize("parameters", [{}, {"row": 5}, {"row": -1}, {"column": 0}])
def test_impossible_parameters_are_refused(parameters, small):
    case = Case(problem=small(CAUSAL), question="future_keys", parameters=parameters)
    with pytest.raises(ProblemError):
        check_relation(Ideal(), case)
    with pytest.raises(ProblemError, match="says nothing of"):
        check_relation(Ideal(), Case(problem=small(), question="future_keys"))


def test_unknown_relation_lists_known_ones():
    with pytest.raises(UnknownName, match="future_keys"):
        relation_named("compare")


@pytest.mark.parametrize(
    ("mod", "indices"),
    [
        (Spec.of("neighborhood", **SIDES), "kv_idx q_idx"),
        (Spec.of("neighborhood_tiled", **SIDES, tile=[1, 2]), "kv_idx q_idx"),
        (Spec.of("neighborhood_morton", **SIDES), "kv_idx q_idx"),
        (Spec.of("documents", query_lengths=[4], kv_lengths=[4]), "kv_idx q_idx"),
        (Spec.of("offset", FULL, rows=3), ""),
        (Spec.of("offset", Spec.of("padding", lengths=[3, 4]), rows=3), "b kv_idx"),
        (Spec.of("offset", ALIBI, rows=3), "h kv_idx q_idx"),
        (BIAS, "kv_idx q_idx"),
        (Spec.of("bias", seed=0, per_batch=1, per_head=0), "b kv_idx q_idx"),
        (Spec.of("bias", seed=0, per_batch=0, per_head=1), "h kv_idx q_idx"),
        (Spec.of("mine.py::mask"), "b h kv_idx q_idx"),
    ],
)
def test_indices_read_covers_every_index_of_mod(mod, indices):
    """Judged by the mod's name: more indices than it reads are allowed, but never fewer."""
    assert sorted(indices_read(mod)) == indices.split()


@pytest.mark.parametrize(
    ("mask", "first"),
    [
        (CAUSAL, 3),
        (Spec.of("sliding_window", window=2), 3),
        (BOTTOM_RIGHT, 5),
        (Spec.of("prefix_lm", prefix=4), 4),
        (Spec.of("prefix_lm", prefix=1), 3),
        (Spec.of("padding", lengths=[4, 6]), 6),
        (FULL, 7),
        (DOCUMENT, 7),
        (Spec.of("and", FULL, CAUSAL), 3),
        (Spec.of("or", CAUSAL, Spec.of("padding", lengths=[4, 6])), 6),
        (Spec.of("not", CAUSAL), 7),
    ],
)
def test_first_hidden_key_and_later_ones_are_hidden_by_mask(mask, first, small, visible):
    problem = small(mask)
    assert first_hidden(problem, 2) == first
    assert not visible(problem)[:, :, :3, first:].any()


def test_first_hidden_stays_within_keys(small):
    short = small(BOTTOM_RIGHT, query=7, kv=2)
    assert [first_hidden(short, row) for row in range(7)] == [0, 0, 0, 0, 0, 1, 2]


def test_rows_without_keys_are_those_that_see_none(small):
    empty = rows_without_keys(small(Spec.of("padding", lengths=[4, 0])))
    assert empty[:, :, 0].tolist() == [[False] * 4, [True] * 4]
    beyond = rows_without_keys(small(BOTTOM_RIGHT, query=9, kv=7))
    assert beyond[0, 0].tolist() == [True, True] + 7 * [False]
