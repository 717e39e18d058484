"""The trace of a mod says what the mod says; what cannot be traced says why."""

# every mod has FlexAttention's whole signature

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.core.errors import TraceError
from attncheck.core.formats import fp32
from attncheck.inputs.problem import Problem
from attncheck.mods import masks, scores
from attncheck.mods.expression import Expression, Structure
from attncheck.mods.library import build_mask, build_score
from attncheck.mods.masks import MASKS
from attncheck.mods.scores import SCORES
from attncheck.mods.spec import Dimensions, Spec
from attncheck.mods.trace import count_disagreements, trace_mask, trace_score
from attncheck.subjects.kernel_mods import mask_expression, score_expression

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

DIMENSIONS = Dimensions(batch=2, heads=3, query=37, kv=50)

PLAIN_MASKS = [
    Spec.of("full"),
    Spec.of("causal"),
    Spec.of("causal_bottom_right"),
    Spec.of("sliding_window", window=20),
    Spec.of("prefix_lm", prefix=3),
    Spec.of("document", lengths=[3, 0, 40, 40]),
    Spec.of("padding", lengths=[3, 50]),
    Spec.of("documents", query_lengths=[3, 0, 99], kv_lengths=[0, 9, 41]),
    Spec.of("neighborhood", canvas=[5, 8], kernel=[3, 4]),
    Spec.of("neighborhood_tiled", canvas=[5, 8], kernel=[3, 3], tile=[2, 3]),
    Spec.of("neighborhood_morton", canvas=[5, 8], kernel=[3, 3]),
    Spec.of("offset", Spec.of("causal_bottom_right"), rows=3),
    Spec.of("expression", text="(minimum(q_idx, 9) % 4 <= kv_idx // 2) | ~(h * 3 - b != 3)"),
]
PLAIN_SCORES = [
    Spec.of("none"),
    Spec.of("alibi"),
    Spec.of("softcap", cap=30.0),
    Spec.of("relative_bias", distance=4, seed=1),
    Spec.of("bias", seed=1, per_batch=0, per_head=1),
    Spec.of("offset", Spec.of("bias", seed=1, per_batch=1, per_head=0), rows=3),
    Spec.of("temperature", temperature=2.5),
    Spec.of("expression", text="where(q_idx % 2 == 0, score, -score * 0.1) + kv_idx / 3"),
]
any_mask = st.recursive(
    st.sampled_from(PLAIN_MASKS),
    lambda parts: st.one_of(
        st.lists(parts, min_size=1, max_size=3).map(lambda of: Spec.of("and", *of)),
        st.lists(parts, min_size=1, max_size=3).map(lambda of: Spec.of("or", *of)),
        parts.map(lambda of: Spec.of("not", of)),
        parts.map(lambda of: Spec.of("offset", of, rows=2)),
    ),
    max_leaves=6,
)
any_score = st.recursive(
    st.sampled_from(PLAIN_SCORES),
    lambda parts: st.lists(parts, min_size=1, max_size=3).map(lambda of: Spec.of("chain", *of)),
    max_leaves=6,
)


@given(spec=any_mask)
@settings(max_examples=25, deadline=None)
def test_trace_of_any_mask_agrees_with_its_callable(spec: Spec) -> None:
    mod = build_mask(spec, DIMENSIONS)
    assert count_disagreements(trace_mask(mod), mod, DIMENSIONS, samples=256) == 0


@given(spec=any_score)
@settings(max_examples=25, deadline=None)
def test_trace_of_any_score_agrees_with_its_callable(spec: Spec) -> None:
    mod = build_score(spec, DIMENSIONS)
    assert count_disagreements(trace_score(mod), mod, DIMENSIONS, samples=256) == 0


def test_every_library_mod_is_drawn() -> None:
    assert {spec.name for spec in PLAIN_MASKS} | {"and", "or", "not"} == set(MASKS)
    assert {spec.name for spec in PLAIN_SCORES} | {"chain"} == set(SCORES)


READABLE = {
    "full": "true",
    "causal": "q_idx >= kv_idx",
    "causal_bottom_right": "(q_idx + 13) >= kv_idx",
    "sliding_window": "((q_idx - kv_idx) < 20) & (q_idx >= kv_idx)",
    "prefix_lm": "(kv_idx < 3) | (q_idx >= kv_idx)",
    "document": "tensor0[q_idx] == tensor0[kv_idx]",
    "padding": "kv_idx < tensor0[b]",
    "documents": "tensor0[q_idx] == tensor1[kv_idx]",
    "neighborhood": (
        "(((((q_idx < 40) & (kv_idx < 40)) & "
        "(((kv_idx // 8) - minimum(maximum((q_idx // 8) - 1, 0), 2)) >= 0)) & "
        "(((kv_idx // 8) - minimum(maximum((q_idx // 8) - 1, 0), 2)) < 3)) & "
        "(((kv_idx % 8) - minimum(maximum((q_idx % 8) - 2, 0), 4)) >= 0)) & "
        "(((kv_idx % 8) - minimum(maximum((q_idx % 8) - 2, 0), 4)) < 4)"
    ),
    "neighborhood_tiled": None,  # some pages
    "neighborhood_morton": None,
    "offset causal_bottom_right": "((q_idx + 3) + 10) >= kv_idx",
    "offset bias": "score + float64(tensor1[b, q_idx + 3, kv_idx])",
    "none": "score",
    "alibi": "score + (float64(tensor0[h]) * (kv_idx - q_idx))",
    "softcap": "tanh(score / 30.0) * 30.0",
    "relative_bias": ("score + float64(tensor3[h, minimum(maximum(kv_idx - q_idx, -4), 4) + 4])"),
    "bias": "score + float64(tensor0[h, q_idx, kv_idx])",
    "temperature": "score / 2.5",
    "(minimum(q_idx, 9) % 4 <= kv_idx // 2) | ~(h * 3 - b != 3)": (
        "((minimum(q_idx, 9) % 4) <= (kv_idx // 2)) | not(((h * 3) - b) != 3)"
    ),
    "where(q_idx % 2 == 0, score, -score * 0.1) + kv_idx / 3": (
        f"where((q_idx % 2) == 0, score, neg(score) * {fp32(0.1)}) + (float64(kv_idx) / 3.0)"
    ),
}


def readable(spec: Spec) -> str | None:
    return READABLE[str(spec.values.get("text", " ".join(part.name for part in spec.walk())))]


@pytest.mark.parametrize("spec", PLAIN_MASKS, ids=str)
def test_a_mask_can_be_read(spec: Spec) -> None:
    assert readable(spec) in {str(trace_mask(build_mask(spec, DIMENSIONS))), None}


@pytest.mark.parametrize("spec", PLAIN_SCORES, ids=str)
def test_a_score_mod_can_be_read(spec: Spec) -> None:
    assert str(trace_score(build_score(spec, DIMENSIONS))) == readable(spec)


def with_op(expression: Expression, op: str, other: str) -> Expression:
    """``expression`` with one operation planted in place of another."""
    structure = expression.structure
    nodes = tuple(dataclasses.replace(n, op=other) if n.op == op else n for n in structure.nodes)
    assert nodes != structure.nodes
    return Expression(Structure(structure.inputs, nodes), expression.captured)


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
def test_a_planted_operation_in_a_mask_is_noticed(spec: Spec, op: str, other: str) -> None:
    dimensions = dataclasses.replace(DIMENSIONS, query=1000, kv=1013)
    mod = build_mask(spec, dimensions)
    assert count_disagreements(trace_mask(mod), mod, dimensions) == 0
    assert count_disagreements(with_op(trace_mask(mod), op, other), mod, dimensions) > 0


@pytest.mark.parametrize("number", [17, -17, 123_456, -123_456])
@pytest.mark.parametrize("ahead", [True, False])
def test_a_planted_operation_is_noticed_where_no_draw_would_hit(
    *, number: int, ahead: bool
) -> None:
    """One diagonal or one column of a million: only looking next to the number finds it."""
    dimensions = Dimensions(batch=1, heads=1, query=1_000_003, kv=1_000_033)

    def distance(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k - q if ahead else q - k) < number

    def column(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k if ahead else -k) < number

    for mod in (distance, column):
        if mod is column and ahead == (number < 0):
            continue  # the same everywhere
        expression = trace_mask(mod)
        assert count_disagreements(expression, mod, dimensions) == 0
        assert count_disagreements(with_op(expression, "lt", "le"), mod, dimensions) > 0


@pytest.mark.parametrize("distance", [-4, -1, 0, 1, 4])
def test_both_sides_of_the_diagonal_are_looked_at(distance: int) -> None:
    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return masks.causal(b, h, q, k) ^ (k - q == distance)

    dimensions = Dimensions(batch=1, heads=1, query=1_000_003, kv=1_000_033)
    assert count_disagreements(trace_mask(masks.causal), mod, dimensions) > 0


class _Shifty(Problem):
    """Its mask and score are other ones for many indices than for the one they are traced with."""

    def mask_mod(self, device: str = "cpu") -> Callable[..., Tensor]:
        return lambda b, h, q, k: q >= k if k.numel() == 1 else q > k

    def score_mod(self, device: str = "cpu") -> Callable[..., Tensor]:
        return lambda s, b, h, q, k: s + 1.0 if k.numel() == 1 else s + 2.0


@pytest.mark.parametrize("trace", [mask_expression, score_expression])
def test_a_kernel_is_not_given_a_trace_that_disagrees(
    trace: Callable[..., Expression], monkeypatch: pytest.MonkeyPatch
) -> None:
    named = r"the trace of (mask 'full'|score mod 'none') .* at \d+ sampled indices of bf16 full"
    with pytest.raises(TraceError, match=named):
        trace(_Shifty(query=9), "cpu")
    monkeypatch.setattr("attncheck.mods.trace.count_disagreements", lambda *_, **__: 1)
    with pytest.raises(TraceError, match="differs from it at 1 sampled"):
        trace(Problem(query=97), "cpu")  # a length of which no trace is kept


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_number_off_by_one_is_noticed(number: int) -> None:
    """The three places of a relative bias: lower and upper clamp, and the shift."""
    mod = build_score(Spec.of("relative_bias", distance=4, seed=1), DIMENSIONS)
    expression = trace_score(mod)
    captured = list(expression.captured)
    wrong = captured[number]
    assert isinstance(wrong, int)
    captured[number] = wrong - 1 if number else wrong + 1
    planted = Expression(expression.structure, tuple(captured))
    assert count_disagreements(planted, mod, DIMENSIONS) > 0


def test_a_score_in_fp32_is_noticed() -> None:
    mod = scores.softcap(30.0)
    expression = trace_score(lambda s, *i: mod(s.to(torch.float32), *i).to(torch.float64))
    assert count_disagreements(expression, mod, DIMENSIONS) > 0


def test_structure_is_shared_by_mods_that_differ_in_numbers_only() -> None:
    short, long = (trace_mask(masks.sliding_window(w)) for w in (0, 64))
    assert short.structure == long.structure
    assert hash(short.structure) == hash(long.structure)
    assert (short.captured, long.captured) == ((0,), (64,))
    # Equal numbers in two places stay two places.
    both = trace_mask(lambda *i: masks.sliding_window(5)(*i) | masks.prefix_lm(5)(*i))
    other = trace_mask(lambda *i: masks.sliding_window(5)(*i) | masks.prefix_lm(6)(*i))
    assert both.structure == other.structure
    assert trace_mask(masks.causal).structure != short.structure


def test_a_tensor_captured_once_is_one_slot() -> None:
    expression = trace_mask(masks.document(torch.tensor([0, 0, 1])))
    assert len(expression.captured) == 1


BIAS = torch.arange(12, dtype=torch.float32).reshape(3, 4)
FLAGS = torch.tensor([True, False, True])
POWER = torch.tensor(3.0)
TENTH = torch.tensor([0.1], dtype=torch.float64)

SUPPORTED: dict[str, Callable[..., Tensor]] = {
    "floor division": lambda s, b, h, q, k: s + (q - k) // 3,
    "remainder": lambda s, b, h, q, k: s + (q - k) % 5,
    "div floor": lambda s, b, h, q, k: s + torch.div(q - k, 3, rounding_mode="floor"),
    "negative divisor": lambda s, b, h, q, k: s + (q - k) // -3 + (k - q) % -4,
    "where with a number": lambda s, b, h, q, k: torch.where(q > k, s, -float("inf")),
    "where of numbers": lambda s, b, h, q, k: s * torch.where(q > k, 1.0, 2.0),
    "0-d tensor": lambda s, b, h, q, k: s * POWER,
    # A tensor of one element promotes fp32 to float64, one of no dimension does not.
    "1-d number": lambda s, b, h, q, k: s + BIAS[h, b] * TENTH,
    "0-d number": lambda s, b, h, q, k: s + BIAS[h, b] * TENTH[0],
    "tensor in the mod": lambda s, b, h, q, k: s + torch.tensor([0.5, 0.25, 4.0])[h],
    "a row of a table": lambda s, b, h, q, k: s + BIAS[1][h],
    "a fixed column": lambda s, b, h, q, k: s + BIAS[h, 2],
    "negative index": lambda s, b, h, q, k: s + BIAS[h, -1 - h],
    "flags": lambda s, b, h, q, k: torch.where(FLAGS[h], s, -s),
    "logical": lambda s, b, h, q, k: torch.where(torch.logical_xor(q, h) & (k > 1), s, s.abs()),
    "rsub": lambda s, b, h, q, k: s + (1 - q) - (2.5 - s),
    "minimum": lambda s, b, h, q, k: torch.minimum(s, q) + torch.maximum(s, k * 0.5),
    "one-sided clamps": lambda s, b, h, q, k: s.clamp(min=-1) + s.clamp(max=2) + s.clamp_min(0),
    "exp": lambda s, b, h, q, k: torch.exp(-(s * s)) + torch.tanh(s),
    "views": lambda s, b, h, q, k: s.unsqueeze(-1).squeeze(-1) + torch.ones_like(s) * BIAS[h, b],
    "bool as number": lambda s, b, h, q, k: s + (q > k) - (h == 1) * 2,
    "xor of whole numbers": lambda s, b, h, q, k: s + ((q ^ k) & 3),
    "nan": lambda s, b, h, q, k: torch.where(q == k, float("nan"), s),
}


@pytest.mark.parametrize("name", SUPPORTED)
def test_neighbouring_operations_are_traced(name: str) -> None:
    mod = SUPPORTED[name]
    assert count_disagreements(trace_score(mod), mod, DIMENSIONS) == 0
