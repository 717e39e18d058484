"""Masks, heads, columns and scales that mean the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attncheck.capabilities.subject import Tiling
from attncheck.core.source_files import import_file
from attncheck.inputs import input_tensors as inputs_room
from attncheck.mods.spec import Spec
from attncheck.relations import relation_named
from attncheck.relations.relation import Finding
from attncheck.subjects.ideal import Ideal

planted = import_file(Path(__file__).parent / "planted_same.py", "planted faults")

FULL, CAUSAL = map(Spec.of, ("full", "causal"))
LARGEST = 2**31 - 1

WITHIN_BOUNDS = [
    ("window_beyond", {"mask": CAUSAL}),
    ("window_beyond", {"mask": Spec.of("not", CAUSAL)}),
    ("prefix_zero", {"mask": Spec.of("prefix_lm", prefix=3)}),
    ("prefix_full", {"mask": FULL}),
    ("softcap_infinite", {}),
    ("pad_head_dim", {}),
    ("pad_value_dim", {}),
]
EXACT = [("gqa_repeat", {}), ("scaled_query", {"mask": CAUSAL})]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "e4m3"])
@pytest.mark.parametrize(("question", "changes"), WITHIN_BOUNDS)
def test_the_ideal_kernel_passes(question, changes, dtype, small, ask, numbers) -> None:
    asked = small(**changes, dtype=dtype, distribution="outliers")
    assert ask(Ideal(), question, asked, **numbers(question, asked)[-1]) is None


@pytest.mark.parametrize("distribution", ["large_logits", "outliers", "negative_logits", "sink"])
@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16"])
@pytest.mark.parametrize("score", [Spec.of("none"), Spec.of("softcap", cap=20.0)])
def test_scaled_queries_keep_every_bit(dtype, distribution, score, small, ask) -> None:
    for scale in (0.0, 30.0, 2.0**-100):
        asked = small(CAUSAL, dtype=dtype, distribution=distribution, score=score, scale=scale)
        for exponent in relation_named("scaled_query").allowed(asked)["exponent"]:
            assert ask(Ideal(), "scaled_query", asked, exponent=exponent) is None


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("tensor", [0, 1, 2])
@pytest.mark.parametrize(
    "tiling", [Tiling(block_query=4, block_kv=2), Tiling(block_query=4, block_kv=4, reverse=True)]
)
def test_halved_numbers_keep_every_bit(tensor, dtype, tiling, small, ask) -> None:
    for distribution in ("normal", "outliers", "zero_q"):
        asked = small(CAUSAL, dtype=dtype, distribution=distribution)
        assert ask(Ideal(tiling), "descale", asked, tensor=tensor) is None


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "e4m3"])
def test_repeated_heads_keep_every_bit(dtype, small, ask) -> None:
    asked = small(CAUSAL, dtype=dtype, heads=6, score=Spec.of("alibi"))
    assert ask(Ideal(), "gqa_repeat", asked) is None


@pytest.mark.parametrize(
    ("question", "changes"), [*WITHIN_BOUNDS[::2], *EXACT, ("descale", {"dtype": "e4m3"})]
)
def test_triton_flash2_passes(question, changes, small, ask, numbers) -> None:
    asked = small(**({"batch": 1, "heads": 2, "kv_heads": 1} | changes))
    assert ask("triton-flash2", question, asked, **numbers(question, asked)[-1]) is None


@pytest.mark.parametrize(("question", "changes"), [*WITHIN_BOUNDS[:4], *WITHIN_BOUNDS[5:], *EXACT])
def test_sdpa_passes(question, changes, small, ask, numbers) -> None:
    asked = small(**changes, dtype="fp16")
    assert ask("sdpa-math", question, asked, **numbers(question, asked)[-1]) is None


@pytest.mark.parametrize(
    ("fault", "question", "changes", "chosen"),
    [
        ("ShortWindow", "window_beyond", {"mask": CAUSAL}, {"window": 5}),
        ("OverflowingWindow", "window_beyond", {"mask": CAUSAL}, {"window": LARGEST}),
        ("LongPrefix", "prefix_zero", {"mask": CAUSAL}, {"prefix": 1}),
        ("ShortPrefix", "prefix_full", {"mask": FULL}, {"prefix": 7}),
        ("FixedCap", "softcap_infinite", {}, {"exponent": 24}),
        ("CancellingTanh", "softcap_infinite", {}, {"exponent": 40}),
        ("InterleavedHeads", "gqa_repeat", {}, {}),
        ("ScaleOfItsOwn", "pad_head_dim", {}, {"columns": 8}),
        ("Trace", "pad_value_dim", {}, {"columns": 1}),
        ("ScaleOfItsOwn", "scaled_query", {}, {"exponent": 4}),
        ("ClippedScores", "scaled_query", {}, {"exponent": 4}),
        ("WithoutQueryDescale", "descale", {"dtype": "e4m3"}, {"tensor": 0}),
        ("WithoutKeyDescale", "descale", {"dtype": "e5m2"}, {"tensor": 1}),
        ("WithoutValueDescale", "descale", {"dtype": "e4m3"}, {"tensor": 2}),
    ],
)
def test_a_planted_fault_is_found(fault, question, changes, chosen, small, ask) -> None:
    found = ask(getattr(planted, fault)(), question, small(**changes), **chosen)
    assert isinstance(found, Finding)


@pytest.mark.parametrize(
    ("fault", "question", "chosen"),
    [
        ("ShortWindow", "window_beyond", {"window": 6}),
        ("OverflowingWindow", "window_beyond", {"window": 6}),
        ("LongPrefix", "prefix_zero", {"prefix": 0}),
    ],
)
def test_a_fault_of_other_numbers_is_not_found(fault, question, chosen, small, ask) -> None:
    assert ask(getattr(planted, fault)(), question, small(CAUSAL), **chosen) is None


def test_appended_columns_are_exactly_0(small, ask) -> None:
    found = ask(planted.Trace(), "pad_value_dim", small(), columns=1)
    assert found.place[-1] == small().value_dim
    assert (found.expected, found.allowed) == (0.0, 0.0)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_scaled_query_is_the_same_question(dtype, small) -> None:
    drawn = inputs_room.draw_inputs(small(dtype=dtype, distribution="outliers"))
    drawn = drawn.replace(q=drawn.q * 2.0**7)  # in fp16 some are beyond a further 2^8
    before, after = relation_named("scaled_query").runs(drawn, {"exponent": 10})
    assert after.problem.scale * 2**8 == before.problem.scale == drawn.problem.scale / 4
    assert torch.equal(after.q.double(), before.q.double() * 2**8)
    assert torch.isfinite(after.q).all()
    assert torch.equal(before.q.double(), torch.where(before.q == 0, 0.0, 4 * drawn.q.double()))


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_halved_inputs_are_the_same_numbers(dtype, small) -> None:
    drawn = inputs_room.draw_inputs(small(dtype=dtype, distribution="outliers"))
    before, after = relation_named("descale").runs(drawn, {"tensor": 1})
    for one, other in zip(before.promoted(), after.promoted(), strict=True):
        assert torch.equal(one, other)
    changed = before.k.float() != drawn.k.float()
    assert bool((before.k.float()[changed] == 0).all())
    # Only a subnormal number may have no half, and the largest is far above those.
    assert bool((drawn.k.float()[changed].abs() < 2 * 2.0**-6).all())


@pytest.mark.parametrize(
    ("question", "changes", "reason"),
    [
        ("window_beyond", {}, "neither causal nor sliding_window"),
        ("window_beyond", {"mask": Spec.of("offset", CAUSAL, rows=3)}, "neither causal nor"),
        ("prefix_zero", {}, "neither causal nor prefix_lm"),
        ("prefix_full", {"mask": CAUSAL}, "neither full nor prefix_lm"),
        ("softcap_infinite", {"score": Spec.of("alibi")}, "neither none nor softcap"),
        ("gqa_repeat", {"kv_heads": 4}, "key head of its own"),
        ("pad_head_dim", {"head_dim": 256}, "the largest"),
        ("pad_value_dim", {"value_dim": 256}, "the largest"),
        ("scaled_query", {"dtype": "e4m3"}, "as large as can be"),
        ("scaled_query", {"scale": 2.0**-126}, "subnormal"),
        ("descale", {}, "only fp8"),
    ],
)
def test_a_problem_of_which_nothing_can_be_said(question, changes, reason, small) -> None:
    assert reason in relation_named(question).unfit(small(**changes))


@pytest.mark.parametrize("question", sorted({name for name, _ in [*WITHIN_BOUNDS, *EXACT]}))
def test_a_softmax_has_none_of_these(question, softmax) -> None:
    assert relation_named(question).unfit(softmax()) == "it is about attention"
