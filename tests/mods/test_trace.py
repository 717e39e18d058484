"""The trace of a mod says what the mod says; what cannot be traced says why."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from tests.mods.sample_mods import any_mask, any_score, planted

from attncheck.core.errors import TraceError
from attncheck.core.formats import fp32
from attncheck.core.mod_spec import Dimensions, Spec
from attncheck.inputs.problem import Problem
from attncheck.mods import masks, scores, trace
from attncheck.mods.expression import Expression
from attncheck.mods.library import build_mask, build_score
from attncheck.mods.trace import count_disagreements, trace_derivative, trace_mask, trace_score
from attncheck.subjects.kernel_mods import mask_expression, score_expression

DIMENSIONS = Dimensions(batch=2, heads=3, query=37, kv=50)


@given(spec=any_mask)
@settings(max_examples=25, deadline=None)
def test_trace_of_any_mask_agrees_with_its_callable(spec):
    mod = build_mask(spec, DIMENSIONS)
    assert count_disagreements(trace_mask(mod), mod, DIMENSIONS, samples=256) == 0


@given(spec=any_score)
@settings(max_examples=25, deadline=None)
def test_trace_of_any_score_agrees_with_its_callable(spec):
    mod = build_score(spec, DIMENSIONS)
    assert count_disagreements(trace_score(mod), mod, DIMENSIONS, samples=256) == 0


def test_what_everything_is_seen_by_needs_no_tracer_which_says_the_same(monkeypatch):
    def copied(b, h, q_idx, kv_idx):
        return masks.full(b, h, q_idx, kv_idx)

    traced = trace_mask(copied)
    monkeypatch.setattr(trace, "_trace", None)
    known = trace_mask(build_mask(Spec.of("full"), DIMENSIONS))
    assert (known.structure, known.captured) == (traced.structure, traced.captured)


READABLE = {
    Spec.of("full"): "true",
    Spec.of("causal"): "q_idx >= kv_idx",
    Spec.of("causal_bottom_right"): "(q_idx + 13) >= kv_idx",
    Spec.of("sliding_window", window=20): "((q_idx - kv_idx) < 20) & (q_idx >= kv_idx)",
    Spec.of("prefix_lm", prefix=3): "(kv_idx < 3) | (q_idx >= kv_idx)",
    Spec.of("document", lengths=[99]): "tensor0[q_idx] == tensor0[kv_idx]",
    Spec.of("padding", lengths=[3, 50]): "kv_idx < tensor0[b]",
    Spec.of("neighborhood", canvas=[1, 8], kernel=[1, 3]): (
        "(((((q_idx < 8) & (kv_idx < 8)) & "
        "(((kv_idx // 8) - minimum(maximum((q_idx // 8) - 0, 0), 0)) >= 0)) & "
        "(((kv_idx // 8) - minimum(maximum((q_idx // 8) - 0, 0), 0)) < 1)) & "
        "(((kv_idx % 8) - minimum(maximum((q_idx % 8) - 1, 0), 5)) >= 0)) & "
        "(((kv_idx % 8) - minimum(maximum((q_idx % 8) - 1, 0), 5)) < 3)"
    ),
    Spec.of("offset", Spec.of("causal_bottom_right"), rows=3): "((q_idx + 3) + 10) >= kv_idx",
    Spec.of("expression", text="(minimum(q_idx, 9) % 4 <= kv_idx // 2) | ~(h * 3 - b != 3)"): (
        "((minimum(q_idx, 9) % 4) <= (kv_idx // 2)) | not(((h * 3) - b) != 3)"
    ),
    Spec.of("none"): "score",
    Spec.of("alibi"): "score + (float64(tensor0[h]) * (kv_idx - q_idx))",
    Spec.of("alibi_by_sequence"): "score + (float64(tensor0[b, h]) * (kv_idx - q_idx))",
    Spec.of("softcap", cap=30.0): "tanh(score / 30.0) * 30.0",
    Spec.of("relative_bias", distance=4, seed=1): (
        "score + float64(tensor3[h, minimum(maximum(kv_idx - q_idx, -4), 4) + 4])"
    ),
    Spec.of("bias", seed=1, per_batch=0, per_head=1): "score + float64(tensor0[h, q_idx, kv_idx])",
    Spec.of("temperature", temperature=2.5): "score / 2.5",
    Spec.of("expression", text="where(q_idx % 2 == 0, score, -score * 0.1) + kv_idx / 3"): (
        f"where((q_idx % 2) == 0, score, neg(score) * {fp32(0.1)}) + (float64(kv_idx) / 3.0)"
    ),
}


@pytest.mark.parametrize(("spec", "text"), READABLE.items(), ids=str)
def test_a_trace_can_be_read(spec, text):
    is_score = "score" in text
    build, trace = (build_score, trace_score) if is_score else (build_mask, trace_mask)
    assert str(trace(build(spec, DIMENSIONS))) == text


@pytest.mark.parametrize(
    ("spec", "op", "other"),
    [
        (Spec.of("causal"), "ge", "gt"),
        (Spec.of("causal"), "ge", "eq"),
        (Spec.of("sliding_window", window=17), "lt", "le"),
        (Spec.of("prefix_lm", prefix=31), "lt", "le"),
        (Spec.of("causal_bottom_right"), "ge", "gt"),
        (Spec.of("padding", lengths=[50, 49]), "lt", "le"),
        (Spec.of("full"), "true", "false"),
    ],
    ids=str,
)
def test_a_planted_operation_in_a_mask_is_noticed(spec, op, other):
    dimensions = dataclasses.replace(DIMENSIONS, query=1000, kv=1013)
    mod = build_mask(spec, dimensions)
    assert count_disagreements(trace_mask(mod), mod, dimensions) == 0
    assert count_disagreements(planted(trace_mask(mod), op, other), mod, dimensions) > 0


@pytest.mark.parametrize("number", [17, -17, 123_456, -123_456])
@pytest.mark.parametrize("ahead", [True, False])
def test_a_planted_operation_is_noticed_where_no_draw_would_hit(*, number, ahead):
    """One diagonal or one column of a million: only looking next to the number finds it."""
    dimensions = Dimensions(batch=1, heads=1, query=1_000_003, kv=1_000_033)

    def distance(b, h, q, k):
        return (k - q if ahead else q - k) < number

    def column(b, h, q, k):
        return (k if ahead else -k) < number

    for mod in (distance, column):
        if mod is column and ahead == (number < 0):
            continue  # the same everywhere
        expression = trace_mask(mod)
        assert count_disagreements(expression, mod, dimensions) == 0
        assert count_disagreements(planted(expression, "lt", "le"), mod, dimensions) > 0


@pytest.mark.parametrize("distance", [-4, -1, 0, 1, 4])
def test_both_sides_of_the_diagonal_are_looked_at(distance):
    def mod(b, h, q, k):
        return masks.causal(b, h, q, k) ^ (k - q == distance)

    dimensions = Dimensions(batch=1, heads=1, query=1_000_003, kv=1_000_033)
    assert count_disagreements(trace_mask(masks.causal), mod, dimensions) > 0


class _Shifty(Problem):
    """Its mask and score are other ones for many indices than for the one they are traced with."""

    def mask_mod(self, device="cpu"):
        return lambda b, h, q, k: q >= k if k.numel() == 1 else q > k

    def score_mod(self, device="cpu"):
        return lambda s, b, h, q, k: s + 1.0 if k.numel() == 1 else s + 2.0


@pytest.mark.parametrize("trace", [mask_expression, score_expression])
def test_a_kernel_is_not_given_a_trace_that_disagrees(trace, monkeypatch):
    named = r"the trace of (mask 'full'|score mod 'none') .* at \d+ sampled indices of bf16 full"
    with pytest.raises(TraceError, match=named):
        trace(_Shifty(query=9), "cpu")
    monkeypatch.setattr("attncheck.mods.trace.count_disagreements", lambda *_, **__: 1)
    with pytest.raises(TraceError, match="differs from it at 1 sampled"):
        trace(Problem(query=97), "cpu")  # a length of which no trace is kept


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_number_off_by_one_is_noticed(number):
    """The three places of a relative bias: lower and upper clamp, and the shift."""
    mod = build_score(Spec.of("relative_bias", distance=4, seed=1), DIMENSIONS)
    expression = trace_score(mod)
    captured = list(expression.captured)
    captured[number] += -1 if number else 1
    wrong = Expression(expression.structure, tuple(captured))
    assert count_disagreements(wrong, mod, DIMENSIONS) > 0


def test_a_score_in_fp32_is_noticed():
    mod = scores.softcap(30.0)
    expression = trace_score(lambda s, *i: mod(s.to(torch.float32), *i).to(torch.float64))
    assert count_disagreements(expression, mod, DIMENSIONS) > 0


def test_structure_is_shared_by_mods_that_differ_in_numbers_only():
    short, long = (trace_mask(masks.sliding_window(w)) for w in (0, 64))
    assert short.structure == long.structure
    assert hash(short.structure) == hash(long.structure)
    assert (short.captured, long.captured) == ((0,), (64,))
    # Equal numbers in two places stay two places.
    both = trace_mask(lambda *i: masks.sliding_window(5)(*i) | masks.prefix_lm(5)(*i))
    other = trace_mask(lambda *i: masks.sliding_window(5)(*i) | masks.prefix_lm(6)(*i))
    assert both.structure == other.structure
    assert trace_mask(masks.causal).structure != short.structure


def test_a_tensor_captured_once_is_one_slot():
    expression = trace_mask(masks.document(torch.tensor([0, 0, 1])))
    assert len(expression.captured) == 1


FEW, MANY = Dimensions(batch=1, heads=2, query=5, kv=7), Dimensions(batch=2, heads=4, query=9, kv=9)


def built(dimensions, name, *parts, **arguments):
    return build_mask(Spec.of(name, *parts, **arguments), dimensions)


def test_a_library_mask_is_traced_once_whatever_the_lengths():
    assert trace_mask(built(FEW, "causal")) is trace_mask(built(MANY, "causal"))
    both = Spec.of("causal"), Spec.of("sliding_window", window=3)
    assert trace_mask(built(FEW, "and", *both)) is trace_mask(built(MANY, "and", *both))
    assert trace_mask(masks.causal) is not trace_score(scores.none)


def test_another_number_in_the_closure_is_another_trace():
    first, second = (trace_mask(masks.sliding_window(window)) for window in (3, 4))
    assert (first.captured, second.captured) == ((3,), (4,))
    assert trace_mask(masks.sliding_window(3)) is first
    bottom = [trace_mask(built(sizes, "causal_bottom_right")) for sizes in (FEW, MANY)]
    assert bottom[0].captured == (2,)
    assert bottom[0] is not bottom[1]


def test_numbers_that_are_equal_and_not_the_same_are_told_apart():
    kept = [trace_mask(masks.sliding_window(window)) for window in (1, True, 1.0)]
    assert len({id(expression) for expression in kept}) == 3


def test_tensors_are_compared_by_what_they_hold_now():
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    first = trace_mask(masks.padding(lengths))
    assert trace_mask(masks.padding(lengths.clone())) is first
    assert trace_mask(masks.padding(lengths.long())) is not first
    other = trace_mask(masks.padding(lengths + 1))
    assert other.captured[0].tolist() == [4, 6]
    assert first.captured[0].tolist() == [3, 5]


def test_derivatives_are_kept_like_traces():
    first = trace_derivative(scores.softcap(30.0))
    assert trace_derivative(scores.softcap(30.0)) is first
    assert trace_derivative(scores.softcap(31.0)) is not first
    assert first is not trace_score(scores.softcap(30.0))


def test_somebody_elses_mod_is_traced_every_time():
    reach = 3

    def near(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < reach

    def composed():
        return masks.and_masks(masks.causal, near)

    before = [trace_mask(mod).captured for mod in (near, composed())]
    reach = 4
    after = [trace_mask(mod).captured for mod in (near, composed())]
    assert (before, after) == ([(3,), (3,)], [(4,), (4,)])


def test_a_mod_that_cannot_be_traced_is_refused_each_time():
    for _ in range(2):
        with pytest.raises(TraceError, match="cannot be traced"):
            trace_mask(masks.sliding_window(None))
