"""Linearity in V, and shifts of all the logits of a row."""

from __future__ import annotations

from fractions import Fraction
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

planted = import_file(Path(__file__).parent / "planted_linear.py", "planted faults")

FULL = Spec.of("full")
CAUSAL = Spec.of("causal")
PADDING = Spec.of("padding", lengths=[4, 0])
QUESTIONS = ("values_scaled", "values_added", "key_shift", "logit_shift")
DTYPES = ["fp32", "tf32", "fp16", "bf16", "e4m3"]


def values_of(question, problem):
    """The one parameter's name and numbers."""
    ((name, values),) = relation_named(question).allowed(problem).items()
    return [{name: value} for value in values]


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("dtype", [*DTYPES, "e5m2"])
@pytest.mark.parametrize("mask", [CAUSAL, PADDING])
def test_the_ideal_kernel_passes(question, dtype, mask, small, ask) -> None:
    asked = small(mask, dtype=dtype, distribution="large_logits")
    for chosen in values_of(question, asked)[-2:]:
        assert ask(Ideal(), question, asked, **chosen) is None


@pytest.mark.parametrize(
    "tiling",
    [
        Tiling(block_query=4, block_kv=2, recurrence="flash1"),
        Tiling(block_query=2, block_kv=2, lazy_rescale=8.0),
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_v_scales_bit_for_bit_in_any_tiling(tiling, dtype, small, ask) -> None:
    asked = small(CAUSAL, dtype=dtype, kv=9, query=9, distribution="large_logits", scale=80.0)
    for chosen in values_of("values_scaled", asked):
        assert ask(Ideal(tiling), "values_scaled", asked, **chosen) is None


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("name", ["triton-flash2", "triton-flash1", "sdpa-math"])
def test_other_right_kernels_pass(question, name, small, ask) -> None:
    assert ask(name, question, small(CAUSAL, dtype="fp16")) is None


def test_a_shift_after_another_score_mod(small, ask) -> None:
    for score in (Spec.of("softcap", cap=5.0), Spec.of("chain", Spec.of("alibi"))):
        assert ask(Ideal(), "logit_shift", small(CAUSAL, score=score), nats=-40) is None


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "e4m3"])
@pytest.mark.parametrize(
    ("fault", "question"),
    [
        ("Biased", "values_scaled"),
        ("FixedPoint", "values_scaled"),
        ("ClippedValues", "values_scaled"),
        ("Biased", "values_added"),
        ("ZeroValuesArePadding", "values_added"),
        ("MaximumFromZero", "key_shift"),
        ("NoMaximum", "key_shift"),
        ("ScoresInBf16", "key_shift"),
        ("Sentinel", "key_shift"),
        ("MaximumFromZero", "logit_shift"),
        ("NoMaximum", "logit_shift"),
        ("Sentinel", "logit_shift"),
        ("LseWithoutMod", "logit_shift"),
        ("FirstHeadsMod", "logit_shift"),
    ],
)
def test_a_planted_fault_is_found(fault, question, dtype, small, ask) -> None:
    asked, kernel = small(CAUSAL, dtype=dtype), getattr(planted, fault)()
    found = (ask(kernel, question, asked, **chosen) for chosen in values_of(question, asked)[::-1])
    assert any(isinstance(each, Finding) for each in found)


@pytest.mark.parametrize("dtype", [*DTYPES, "e5m2"])
@pytest.mark.parametrize("distribution", ["normal", "sink", "zero_q"])
def test_v_is_normal_before_and_after(dtype, distribution, small) -> None:
    asked = small(dtype=dtype, distribution=distribution)
    fmt = asked.formats.storage
    for chosen in values_of("values_scaled", asked):
        first, second = relation_named("values_scaled").runs(inputs_room.draw_inputs(asked), chosen)
        for each in (first, second):
            assert bool((each.v.double().abs() >= 2.0**fmt.min_exponent).all())
            assert bool((each.v.double().abs() <= fmt.max).all())
        assert torch.equal(first.v.double() * 2.0 ** chosen["power"], second.v.double())
        assert bool((first.v.double().sign() == first.v.double()[:, :, :1].sign()).all())
        q, k, _ = first.promoted()
        scores = asked.scale * q @ k.repeat_interleave(2, dim=1).mT
        assert bool((scores.abs() <= 24).all())


@pytest.mark.parametrize("dtype", [*DTYPES, "e5m2"])
def test_a_key_shift_moves_every_logit_alike(dtype, small) -> None:
    asked = small(dtype=dtype)
    for chosen in values_of("key_shift", asked):
        before, after = relation_named("key_shift").runs(inputs_room.draw_inputs(asked), chosen)
        (q, old, v), (same_q, new, same_v) = before.promoted(), after.promoted()
        assert torch.equal(q, same_q)
        assert torch.equal(v, same_v)
        c = new - old
        assert torch.equal(c, c[:, :, :1].expand_as(c))
        assert torch.equal((c != 0).sum(-1), torch.ones(2, 2, 7, dtype=torch.long))
        for b, h, column in ((0, 0, 0), (0, 3, 1), (1, 1, 1), (1, 2, 2)):
            x, y = q[b, h, :, column], c[b, h // 2, 0, column]
            assert len(x.unique()) == 1
            exact = Fraction(asked.scale) * Fraction(float(x[0])) * Fraction(float(y))
            assert exact == float(exact)  # without rounding
            # y is rounded down, to an eighth of 8 or less and 4 or more.
            assert Fraction(4, 5) < exact / chosen["nats"] <= 1


@pytest.mark.parametrize("run", [1, 2, 4])
def test_every_key_is_in_one_of_two_parts(run, small) -> None:
    one, other, both = relation_named("values_added").runs(
        inputs_room.draw_inputs(small(dtype="e4m3")), {"run": run}
    )
    parts = [each.v.float().ne(0).any(-1).long() for each in (one, other)]
    assert torch.equal(parts[0] + parts[1], torch.ones(2, 2, 7, dtype=torch.long))
    assert torch.equal(one.v.float() + other.v.float(), both.v.float())
    assert parts[0][0, 0].tolist() == [1 - j // run % 2 for j in range(7)]


@pytest.mark.parametrize(
    ("question", "changes", "says"),
    [
        (
            "values_scaled",
            {"score": Spec.of("alibi")},
            "its score mod may make scores so far",
        ),
        ("key_shift", {"score": Spec.of("softcap", cap=3.0)}, "its score mod may make something"),
        (
            "key_shift",
            {"dtype": "fp16", "scale": 1e-10},
            "scale=1e-10 asks for q and k",
        ),
        *((question, {"operation": "softmax"}, "it is about attention") for question in QUESTIONS),
    ],
)
def test_what_nothing_can_be_said_of_is_refused(question, changes, says, small, softmax) -> None:
    asked = softmax() if "operation" in changes else small(**changes)
    assert says in (relation_named(question).unfit(asked) or "")
