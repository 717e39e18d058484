"""Parts of a Problem asked alone: keys, rows, documents, sequences."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from attncheck.core.outputs import Outputs
from attncheck.core.source_files import import_file
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.mods.spec import Spec
from attncheck.relations import relation_named
from attncheck.relations.parts import merge_error, merge_parts
from attncheck.relations.relation import Finding
from attncheck.subjects.ideal import Ideal
from attncheck.verify.executor import Failure

planted = import_file(Path(__file__).parent / "planted_parts.py", "planted faults")

FULL, CAUSAL, BOTTOM_RIGHT = map(Spec.of, ("full", "causal", "causal_bottom_right"))
WINDOW = Spec.of("sliding_window", window=2)
PADDING = Spec.of("padding", lengths=[2, 7])
DOCUMENT = Spec.of("document", lengths=[2, 0, 3, 4])
CAUSAL_DOCUMENT = Spec.of("and", CAUSAL, DOCUMENT)
# Of rows and keys unlike: one without rows, one without keys, one without either.
DOCUMENTS = Spec.of("documents", query_lengths=[1, 0, 0, 2, 2], kv_lengths=[2, 1, 0, 0, 4])
CAUSAL_DOCUMENTS = Spec.of("and", CAUSAL, DOCUMENTS)
SQUARE = {"query": 7, "kv": 7}
ALIBI = Spec.of("alibi")

ASKED = [
    ("split_merge", FULL),
    ("split_merge", CAUSAL),
    ("split_merge", PADDING),
    ("rectangular", CAUSAL),
    ("rectangular", WINDOW),
    ("prefill_rows", PADDING),
    ("prefill_rows", WINDOW),
    ("documents", DOCUMENT),
    ("documents", CAUSAL_DOCUMENT),
    ("documents", DOCUMENTS),
    ("documents", CAUSAL_DOCUMENTS),
    ("alone_in_batch", PADDING),
]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "e4m3"])
@pytest.mark.parametrize(("question", "mask"), ASKED)
def test_the_ideal_kernel_passes(question, mask, dtype, small, ask, numbers) -> None:
    asked = small(mask, dtype=dtype, distribution="large_logits")
    for chosen in numbers(question, asked):
        assert ask(Ideal(), question, asked, **chosen) is None


@pytest.mark.parametrize(("question", "mask"), ASKED[1::2])
def test_triton_flash2_passes(question, mask, small, ask, numbers) -> None:
    asked = small(mask, batch=2, heads=1, kv_heads=1)
    assert ask("triton-flash2", question, asked, **numbers(question, asked)[-1]) is None


@pytest.mark.parametrize(("question", "mask"), ASKED[3:])
def test_sdpa_passes(question, mask, small, ask, numbers) -> None:
    asked = small(mask, distribution="outliers")
    assert ask("sdpa-math", question, asked, **numbers(question, asked)[-1]) is None


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("fault", "question", "changes", "chosen"),
    [
        ("LseInBits", "split_merge", {}, {"cut": 3}),
        ("LseOfPadding", "split_merge", {}, {"cut": 3}),
        ("WithoutLastKey", "split_merge", {}, {"cut": 3}),
        ("WithoutLastKey", "split_merge", {"mask": CAUSAL, **SQUARE}, {"cut": 1}),
        ("TopLeft", "rectangular", {"mask": CAUSAL, **SQUARE}, {"rows": 2, "last": 1}),
        ("TopLeft", "rectangular", {"mask": BOTTOM_RIGHT, **SQUARE}, {"rows": 2, "last": 1}),
        ("FromRowZero", "prefill_rows", {"mask": CAUSAL}, {"rows": 2}),
        ("FromRowZero", "prefill_rows", {"mask": WINDOW}, {"rows": 1}),
        ("ScoredFromRowZero", "prefill_rows", {"score": ALIBI}, {"rows": 1}),
        ("Neighbours", "documents", {"mask": DOCUMENT}, {}),
        ("MeanOfNothing", "documents", {"mask": DOCUMENT, "query": 9, "kv": 5}, {}),
        ("Neighbours", "documents", {"mask": DOCUMENTS}, {}),
        ("MeanOfNothing", "documents", {"mask": DOCUMENTS}, {}),
        ("SameLengths", "documents", {"mask": DOCUMENTS}, {}),
        ("FirstLength", "alone_in_batch", {"mask": PADDING}, {"sequence": 1}),
        ("LargeBatch", "alone_in_batch", {"mask": PADDING}, {"sequence": 1}),
    ],
)
def test_a_planted_fault_is_found(fault, question, changes, chosen, dtype, small, ask) -> None:
    asked = small(**changes, dtype=dtype)
    assert isinstance(ask(getattr(planted, fault)(), question, asked, **chosen), Finding)


def test_what_is_right_but_for_bits_is_allowed_where_none_are_promised(small, ask) -> None:
    kernel = planted.UnpromisedLargeBatch()
    assert ask(kernel, "alone_in_batch", small(PADDING), sequence=1) is None


def test_the_place_is_in_the_batch(small, ask) -> None:
    found = ask(planted.LargeBatch(), "alone_in_batch", small(PADDING), sequence=1)
    assert found.tensor == "lse"
    assert found.place == (1, 0, 0)
    assert found.count == found.compared == 4 * 5


@pytest.mark.parametrize("cut", [1, 3, 6])
@pytest.mark.parametrize(
    "mask",
    [
        BOTTOM_RIGHT,
        WINDOW,
        DOCUMENT,
        Spec.of("padding", lengths=[0, 3]),
        Spec.of("prefix_lm", prefix=3),
        Spec.of("not", FULL),
    ],
)
def test_any_mask_can_be_split(mask, cut, small, ask) -> None:
    score = Spec.of("softcap", cap=5.0)
    assert ask(Ideal(), "split_merge", small(mask, score=score), cut=cut) is None


def test_split_merge_is_not_asked_without_lse(small, ask) -> None:
    found = ask(planted.WithoutLse(), "split_merge", small())
    assert isinstance(found, Failure)
    assert (found.kind, found.message) == ("refused", "gives no LSE")


def _part(out, lse):
    out, lse = (torch.tensor(x, dtype=torch.float64) for x in (out, lse))
    return Outputs(out.view(1, 1, 1, 1), lse.view(1, 1, 1))


def test_parts_are_merged_by_their_weights() -> None:
    both = merge_parts(_part(1.0, math.log(3.0)), _part(5.0, 0.0))
    torch.testing.assert_close(both.out.item(), 2.0)
    torch.testing.assert_close(both.lse.item(), math.log(4.0))


@pytest.mark.parametrize("unseen", [0.0, math.nan, math.inf])
def test_a_part_that_is_not_seen_counts_for_nothing(unseen) -> None:
    nothing, errors = _part(unseen, -math.inf), _part(math.inf, math.inf)
    both = merge_parts(nothing, _part(5.0, 2.0))
    assert (both.out.item(), both.lse.item()) == (5.0, 2.0)
    allowed = merge_error([nothing, _part(5.0, 2.0)], [errors, _part(0.5, 0.25)])
    # The merge's own roundings, which are of float64, and nothing of the other part.
    assert 0.5 <= allowed.out.item() <= 0.5 * (1 + torch.finfo(torch.float32).eps)
    assert 0.25 <= allowed.lse.item() <= 0.25 * (1 + torch.finfo(torch.float32).eps)
    none = merge_parts(nothing, nothing)
    assert (none.out.item(), none.lse.item()) == (0.0, -math.inf)


def test_no_error_within_those_of_the_parts_passes_the_merges() -> None:
    numbers = torch.Generator().manual_seed(0)

    def parts(out, lse):
        return [_part(*pair) for pair in zip(out.tolist(), lse.tolist(), strict=True)]

    for _ in range(100):
        out, lse = torch.randn(2, 2, generator=numbers) * torch.tensor([[1.0], [4.0]])
        of_out, of_lse = torch.rand(2, 2, generator=numbers) * torch.tensor([[1.0], [3.0]])
        signs = torch.randint(0, 2, (2, 2), generator=numbers) * 2 - 1
        off = parts(out + signs[0] * of_out, lse + signs[1] * of_lse)
        exact, found = merge_parts(*parts(out, lse)), merge_parts(*off)
        allowed = merge_error(off, parts(of_out, of_lse))
        # What is added here is rounded to fp32 itself.
        slack = 1 + 16 * torch.finfo(torch.float32).eps
        assert (found.out - exact.out).abs() <= allowed.out * slack
        assert (found.lse - exact.lse).abs() <= allowed.lse * slack


@pytest.mark.parametrize(
    ("question", "changes", "reason"),
    [
        ("split_merge", {"kv": 1}, "one key cannot be cut"),
        ("split_merge", {"score": Spec.of("alibi")}, "later keys alone"),
        ("rectangular", {"query": 1}, "one row has no part"),
        ("prefill_rows", {"query": 1}, "no rows before it"),
        ("documents", {}, "neither document nor"),
        ("documents", {"mask": Spec.of("or", CAUSAL, DOCUMENT)}, "neither document nor"),
        ("alone_in_batch", {"batch": 1}, "is alone"),
    ],
)
def test_a_problem_of_which_nothing_can_be_said(question, changes, reason, small) -> None:
    assert reason in relation_named(question).unfit(small(**changes))


@pytest.mark.parametrize(
    "question", ["split_merge", "rectangular", "prefill_rows", "documents", "alone_in_batch"]
)
def test_a_softmax_has_none_of_these_parts(question, softmax) -> None:
    assert relation_named(question).unfit(softmax()) == "it is about attention"


@pytest.mark.parametrize("rows", [1, 4])
def test_any_mods_can_be_decoded_behind_a_prefill(rows, small, ask) -> None:
    mask = Spec.of("and", Spec.of("prefix_lm", prefix=2), PADDING)
    score = Spec.of("chain", ALIBI, Spec.of("softcap", cap=5.0))
    asked = small(mask, score=score, sink=True)
    assert ask(Ideal(), "prefill_rows", asked, rows=rows) is None


def test_mods_that_read_no_row_are_decoded_by_their_own_names(small) -> None:
    drawn = draw_inputs(small(PADDING, score=Spec.of("softcap", cap=5.0)))
    _, last = relation_named("prefill_rows").runs(drawn, {"rows": 2})
    assert (last.problem.mask, last.problem.score) == (PADDING, drawn.problem.score)
    assert torch.equal(last.q, drawn.q[:, :, -2:])


def test_rows_at_the_end_are_not_asked_where_they_cannot_be_said(small) -> None:
    alibi = small(score=Spec.of("alibi"))
    assert relation_named("rectangular").allowed(alibi)["last"] == [0]
