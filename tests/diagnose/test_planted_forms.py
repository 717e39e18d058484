"""Kernels that give what one form of a fault model predicts: the diagnosis names that model."""

from dataclasses import replace

import pytest
from tests.diagnose.helpers import diagnose
from tests.planted_kernels.other_steps import SMALL
from tests.planted_kernels.outputs_given import spoiled

from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.core.paged_layout import Paging
from attncheck.fault_models import FAULT_MODELS, ExactAttention
from attncheck.inputs.problem import Case, Problem

pytestmark = pytest.mark.usefixtures("shared_evidence")

OF = Spec.of
PLAIN = Problem(query=40, kv=70, heads=2, head_dim=32, dtype="bf16")
SQUARE = PLAIN.replace(query=70)
WIDE = PLAIN.replace(head_dim=128)
BATCH = PLAIN.replace(batch=2)
GRADIENTS = PLAIN.replace(backward=True)
ALIBI = SQUARE.replace(heads=6, mask=OF("causal"), score=OF("alibi"))
CAP = PLAIN.replace(score=OF("softcap", cap=5.0))
SINK = PLAIN.replace(sink=True, sink_logits="above")
PAGES = BATCH.replace(paging=Paging(size=8, seed=2))
_LENGTHS = {"query_lengths": [20, 0, 20], "kv_lengths": [20, 30, 20]}
DOCUMENTS = PLAIN.replace(mask=OF("documents", **_LENGTHS))
CAUSAL_DOCUMENTS = PLAIN.replace(mask=OF("documents_bottom_right", OF("causal"), **_LENGTHS))
WINDOW = SQUARE.replace(mask=OF("sliding_window", window=5))
WIDE_WINDOW = SQUARE.replace(mask=OF("sliding_window", window=24))
STEP = PLAIN.replace(mask=OF("causal_bottom_right"))
EMPTY_FIRST = BATCH.replace(mask=OF("padding", lengths=[0, 60]))
SHARED = SQUARE.replace(heads=4, kv_heads=2, mask=OF("causal"))
LONG_WINDOW = SQUARE.replace(mask=OF("sliding_window", window=300))


def predicted(name, words):
    """A kernel that gives what the model's first form with these parameters predicts."""
    model = FAULT_MODELS[name]

    def change(inputs, right):
        if not model.applies(inputs.problem):
            return right
        call = ExactAttention(inputs, tile=(SMALL.block_query, SMALL.block_kv))
        forms = model.predictions(call)
        fitting = (
            one for one in forms if one.free is None and words.items() <= one.parameters.items()
        )
        outputs = next((one.outputs for one in fitting), None)
        given = {} if outputs is None else outputs.tensors()
        own = right.tensors()
        return replace(right, **{n: x.to(own[n].dtype) for n, x in given.items() if n in own})

    return spoiled(change, SMALL)


FORMS = [
    ("operands-rounded", WIDE, {"format": "bf16", "of": "q · scale"}),
    ("score-mod-rounded", ALIBI, {"format": "bf16", "of": "what it adds"}),
    ("score-mod-rounded", CAP, {"format": "bf16", "of": "tanh"}),
    ("split-results-rounded", PLAIN, {"format": "bf16", "of": "LSE"}),
    ("split-results-rounded", PLAIN.replace(dtype="fp32"), {"format": "bf16", "of": "output"}),
    ("weights-of-another-base", PLAIN, {"log2 e": "bf16"}),
    ("scale-default", Problem(query=40, kv=70, head_dim=40), {"padded": "a power of two"}),
    ("maximum-of-hidden-keys", SQUARE.replace(mask=OF("causal"), scale=20.0), {"of": "all"}),
    ("maximum-of-some-scores", PLAIN.replace(scale=30.0), {"of": "even keys"}),
    ("maximum-of-some-scores", SINK, {"of": "keys alone"}),
    ("maximum-from-zero", PLAIN.replace(distribution="negative_logits"), {"first": "0"}),
    ("lse-in-units-of-cap", CAP, {}),
    (
        "positions-rounded",
        PLAIN.replace(kv=340, mask=OF("offset", OF("causal"), rows=300)),
        {"format": "bf16", "of": "the mask"},
    ),
    ("page-0-not-read", PAGES, {}),
    ("page-index-wrong", PAGES, {"which": "pages of the longest sequence for the width"}),
    ("page-index-wrong", PAGES, {"which": "the first of 16 keys, and those behind it"}),
    ("rows-behind-an-empty-sequence", DOCUMENTS, {"without": "rows"}),
    ("rows-behind-an-empty-sequence", CAUSAL_DOCUMENTS, {"without": "rows"}),
    ("rows-where-keys-begin", BATCH, {"of": "LSE"}),
    ("rows-where-keys-begin", CAUSAL_DOCUMENTS, {"of": "LSE"}),
    ("rows-unwritten", PLAIN.replace(query=150), {"blocks": "behind whole groups of 8"}),
    (
        "query-heads-swapped",
        PLAIN.replace(query=1, heads=6, kv_heads=2),
        {"of": "LSE", "head": "by key heads", "when": "one row"},
    ),
    (
        "index-of-another-axis",
        PLAIN.replace(batch=4, heads=4, kv_heads=2),
        {"of": "k, v", "instead": "its sequence by groups"},
    ),
    ("columns-missing", PLAIN.replace(value_dim=48), {"bound": "the smaller dim"}),
    (
        "columns-missing",
        PLAIN.replace(head_dim=80),
        {"of": "q and k", "bound": "whole blocks of 32"},
    ),
    ("heads-swapped", PLAIN.replace(heads=6, kv_heads=2), {"head": "by a shift"}),
    ("columns-missing", PLAIN.replace(head_dim=96), {"of": "q and k", "bound": "always 64"}),
    ("values-stale", PLAIN, {"stages": 3, "which": "all"}),
    ("first-tile-nan", WINDOW, {"of": "the first that its block visits"}),
    ("first-tile-nan", WINDOW, {}),
    ("first-tile-dropped", WIDE_WINDOW, {"when": "it begins within one"}),
    ("loop-bounds", STEP, {"ends with": "a whole tile"}),
    ("loop-bounds", STEP, {"ends with": "another diagonal"}),
    (
        "loop-bounds",
        SQUARE.replace(query=150, mask=OF("causal")),
        {"ends with": "another diagonal, after a tile"},
    ),
    ("loop-bounds", WIDE_WINDOW, {"begins with": "its last row"}),
    ("loop-bounds", WIDE_WINDOW, {"begins with": "the last row"}),
    ("last-tile-dropped", PLAIN.replace(kv=128), {"when": "full"}),
    ("mask-skipped-by-one-row", SQUARE.replace(mask=OF("causal")), {"row": "the last"}),
    ("mask-skipped-by-one-row", WIDE_WINDOW, {"row": "the first"}),
    ("mask-within-the-tile", SQUARE.replace(mask=OF("causal")), {"splits": 2}),
    ("window-two-sided", WIDE_WINDOW, {}),
    ("mask-of-packed-rows", SHARED, {"packed": "head by head"}),
    ("mask-of-packed-rows", SHARED, {"packed": "row by row"}),
    ("score-mod-within-the-tile", ALIBI, {"of": "a key"}),
    ("score-mod-within-the-tile", ALIBI, {"of": "a row"}),
    ("score-mod-within-the-tile", ALIBI, {"of": "a key", "splits": 2}),
    ("lse-of-one-split", PLAIN.replace(kv=150), {"splits": 2}),
    ("split-lse-not-accumulated", PLAIN.replace(kv=150), {"splits": 3}),
    ("split-weights-wrong", PLAIN.replace(kv=150), {"weights": "without sums", "of": "both"}),
    ("split-weights-wrong", SQUARE.replace(mask=OF("causal")), {"weights": "of empty ones"}),
    ("values-of-keys-strides", PLAIN.replace(value_dim=48), {"of": "v by the strides of k"}),
    ("split-weights-wrong", SQUARE.replace(mask=OF("causal")), {"splits": 3, "tile": 1}),
    ("rows-unwritten", PLAIN.replace(query=150), {"blocks": "behind the keys"}),
    ("rows-behind-an-empty-sequence", EMPTY_FIRST, {"without": "keys"}),
    ("backward-scale", GRADIENTS.replace(scale=0.4), {"instead": "the default"}),
    ("backward-mask-top-left", GRADIENTS.replace(mask=OF("causal_bottom_right")), {}),
    (
        "group-other-heads",
        GRADIENTS.replace(heads=6, kv_heads=3),
        {"heads": "interleaved", "of": "dk"},
    ),
    (
        "backward-loop-too-short",
        WIDE_WINDOW.replace(backward=True),
        {"of": "rows", "ends with": "those of its first key"},
    ),
    (
        "backward-loop-too-short",
        GRADIENTS.replace(mask=OF("causal_bottom_right")),
        {"of": "rows", "begins with": "those of its last key"},
    ),
    ("last-row-again", GRADIENTS, {}),
    ("dsink-not-summed", GRADIENTS.replace(sink=True, batch=2), {"which": "the last"}),
    ("backward-sink-ignored", GRADIENTS.replace(sink=True), {}),
    ("slope-of-another-score", CAP.replace(backward=True), {"at": "the modified score"}),
    (
        "backward-loop-too-short",
        GRADIENTS.replace(mask=OF("causal_bottom_right")),
        {"of": "rows", "begins with": "the next tile"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "problem", "words"),
    FORMS,
    ids=[" ".join([f[0], *map(str, f[2].values())]) for f in FORMS],
)
def test_form_is_named_by_its_model(name, problem, words):
    diagnosis = diagnose(predicted(name, words), problem)
    assert (diagnosis.level, diagnosis.ranked[0].model) == ("named", name)


@pytest.mark.parametrize("rows", [SMALL.block_query, 64])
def test_zeros_in_later_blocks_of_a_kernel_without_lse_have_one_name(rows):
    """They are the same again: what memory held, which fits any rows, is no rival."""

    def change(_, right):
        right.out[:, :, rows:] = 0
        return Outputs(right.out)

    tiling = replace(SMALL, block_query=rows)
    diagnosis = diagnose(spoiled(change, tiling), PLAIN.replace(query=77, kv=93))
    assert (diagnosis.level, diagnosis.ranked[0].model) == ("named", "values-missing")


def test_long_window_that_sees_all_is_named_where_shorter_windows_passed():
    """Only they tell it from a mask that is ignored."""
    kernel = predicted("long-window-sees-all", {})
    alone = diagnose(kernel, LONG_WINDOW)
    assert {"long-window-sees-all", "mask-ignored"} <= {one.model for one in alone.ranked}
    passed = [Case(problem=LONG_WINDOW.replace(mask=OF("sliding_window", window=9)))]
    diagnosis = diagnose(kernel, LONG_WINDOW, passed=passed)
    assert (diagnosis.level, diagnosis.tied) == ("named", 1)
    assert diagnosis.ranked[0].model == "long-window-sees-all"
