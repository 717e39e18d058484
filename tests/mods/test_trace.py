"""Traces of mods agree with their callables, can be read, and are cached only where it is safe."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from tests.mods.sample_mods import any_mask, any_score, replace_operation

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
def test_trace_of_drawn_mask_agrees_with_callable(spec):
    mod = build_mask(spec, DIMENSIONS)
    assert count_disagreements(trace_mask(mod), mod, DIMENSIONS, samples=256) == 0


@given(spec=any_score)
@settings(max_examples=25, deadline=None)
def test_trace_of_drawn_score_agrees_with_callable(spec):
    mod = build_score(spec, DIMENSIONS)
    assert count_disagreements(trace_score(mod), mod, DIMENSIONS, samples=256) == 0


def test_full_mask_has_its_trace_without_tracing(monkeypatch):
    """Its ready-made trace is the one that the tracer would give."""

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
def test_trace_prints_as_readable_formula(spec, text):
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
def test_wrong_operation_in_mask_is_detected(spec, op, other):
    dimensions = dataclasses.replace(DIMENSIONS, query=1000, kv=1013)
    mod = build_mask(spec, dimensions)
    assert count_disagreements(trace_mask(mod), mod, dimensions) == 0
    assert count_disagreements(replace_operation(trace_mask(mod), op, other), mod, dimensions) > 0


@pytest.mark.parametrize("number", [17, -17, 123_456, -123_456])
@pytest.mark.parametrize("ahead", [True, False])
def test_wrong_operation_at_one_diagonal_is_detected(*, number, ahead):
    """One diagonal or column of a million differs: only indices next to the number show it."""
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
        assert count_disagreements(replace_operation(expression, "lt", "le"), mod, dimensions) > 0


@pytest.mark.parametrize("distance", [-4, -1, 0, 1, 4])
def test_difference_at_diagonal_near_main_is_detected(distance):
    def mod(b, h, q, k):
        return masks.causal(b, h, q, k) ^ (k - q == distance)

    dimensions = Dimensions(batch=1, heads=1, query=1_000_003, kv=1_000_033)
    assert count_disagreements(trace_mask(masks.causal), mod, dimensions) > 0


class _InconsistentProblem(Problem):
    """Its mask and score mod differ between one index, with which they are traced, and many."""

    def mask_mod(self, device="cpu"):
        return lambda b, h, q, k: q >= k if k.numel() == 1 else q > k

    def score_mod(self, device="cpu"):
        return lambda s, b, h, q, k: s + 1.0 if k.numel() == 1 else s + 2.0


@pytest.mark.parametrize("trace", [mask_expression, score_expression])
def test_expression_for_kernel_refuses_disagreeing_trace(trace, monkeypatch):
    message = r"the trace of (mask 'full'|score mod 'none') .* at \d+ sampled indices of bf16 full"
    with pytest.raises(TraceError, match=message):
        trace(_InconsistentProblem(query=9), "cpu")
    monkeypatch.setattr("attncheck.mods.trace.count_disagreements", lambda *_, **__: 1)
    with pytest.raises(TraceError, match="differs from it at 1 sampled"):
        trace(Problem(query=97), "cpu")  # a length whose trace is not cached


@pytest.mark.parametrize("number", [0, 1, 2])
def test_captured_number_off_by_one_is_detected(number):
    """The three numbers of a relative bias: lower clamp, upper clamp and shift."""
    mod = build_score(Spec.of("relative_bias", distance=4, seed=1), DIMENSIONS)
    expression = trace_score(mod)
    captured = list(expression.captured)
    captured[number] += -1 if number else 1
    wrong = Expression(expression.structure, tuple(captured))
    assert count_disagreements(wrong, mod, DIMENSIONS) > 0


def test_score_computed_in_fp32_is_detected():
    mod = scores.softcap(30.0)
    expression = trace_score(lambda s, *i: mod(s.to(torch.float32), *i).to(torch.float64))
    assert count_disagreements(expression, mod, DIMENSIONS) > 0


def test_mods_that_differ_in_numbers_share_structure():
    short, long = (trace_mask(masks.sliding_window(w)) for w in (0, 64))
    assert short.structure == long.structure
    assert hash(short.structure) == hash(long.structure)
    assert (short.captured, long.captured) == ((0,), (64,))
    # Equal numbers in two places stay two places.
    both = trace_mask(lambda *i: masks.sliding_window(5)(*i) | masks.prefix_lm(5)(*i))
    other = trace_mask(lambda *i: masks.sliding_window(5)(*i) | masks.prefix_lm(6)(*i))
    assert both.structure == other.structure
    assert trace_mask(masks.causal).structure != short.structure


def test_tensor_used_twice_is_captured_once():
    expression = trace_mask(masks.document(torch.tensor([0, 0, 1])))
    assert len(expression.captured) == 1


FEW, MANY = Dimensions(batch=1, heads=2, query=5, kv=7), Dimensions(batch=2, heads=4, query=9, kv=9)


def library_mask(dimensions, name, *parts, **arguments):
    return build_mask(Spec.of(name, *parts, **arguments), dimensions)


def test_library_mask_is_traced_once_for_all_lengths():
    assert trace_mask(library_mask(FEW, "causal")) is trace_mask(library_mask(MANY, "causal"))
    parts = Spec.of("causal"), Spec.of("sliding_window", window=3)
    few, many = (trace_mask(library_mask(sizes, "and", *parts)) for sizes in (FEW, MANY))
    assert few is many
    assert trace_mask(masks.causal) is not trace_score(scores.none)


def test_other_captured_number_gives_other_trace():
    first, second = (trace_mask(masks.sliding_window(window)) for window in (3, 4))
    assert (first.captured, second.captured) == ((3,), (4,))
    assert trace_mask(masks.sliding_window(3)) is first
    bottom = [trace_mask(library_mask(sizes, "causal_bottom_right")) for sizes in (FEW, MANY)]
    assert bottom[0].captured == (2,)
    assert bottom[0] is not bottom[1]


def test_cache_distinguishes_equal_numbers_of_other_type():
    traces = [trace_mask(masks.sliding_window(window)) for window in (1, True, 1.0)]
    assert len({id(expression) for expression in traces}) == 3


def test_cache_compares_tensors_by_dtype_and_contents():
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    first = trace_mask(masks.padding(lengths))
    assert trace_mask(masks.padding(lengths.clone())) is first
    assert trace_mask(masks.padding(lengths.long())) is not first
    other = trace_mask(masks.padding(lengths + 1))
    assert other.captured[0].tolist() == [4, 6]
    assert first.captured[0].tolist() == [3, 5]


def test_derivatives_are_cached_like_traces():
    first = trace_derivative(scores.softcap(30.0))
    assert trace_derivative(scores.softcap(30.0)) is first
    assert trace_derivative(scores.softcap(31.0)) is not first
    assert first is not trace_score(scores.softcap(30.0))


def test_user_mod_is_traced_every_time():
    """A user's closure may change between calls; a cached trace would be stale."""
    reach = 3

    def near(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < reach

    def composed():
        return masks.and_masks(masks.causal, near)

    before = [trace_mask(mod).captured for mod in (near, composed())]
    reach = 4
    after = [trace_mask(mod).captured for mod in (near, composed())]
    assert (before, after) == ([(3,), (3,)], [(4,), (4,)])


def test_untraceable_mod_is_refused_every_time():
    for _ in range(2):
        with pytest.raises(TraceError, match="cannot be traced"):
            trace_mask(masks.sliding_window(None))
