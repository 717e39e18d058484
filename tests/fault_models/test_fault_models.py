"""Every fault model is named for a kernel that has its fault, and none for a right kernel."""

from dataclasses import replace
from itertools import islice

import pytest
import torch
from tests.fault_models.planted import (
    OF,
    PROBLEMS,
    RAGGED,
    SPECIALS,
    TILES,
    best_models,
    evidence_of,
    execute,
    faulty_executions,
    problems_showing,
    special_evidence,
    special_executions,
)

from attncheck import oracles
from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.diagnose.explanations import explain, judged_predictions, observed_error
from attncheck.fault_models import FAULT_MODELS, RIGHT
from attncheck.fault_models.exact_attention import TRIED_TILES, ExactAttention, ExactGradients
from attncheck.fault_models.fault_model import SIGNS
from attncheck.fault_models.layout_models import contiguous, read_with_strides, wider
from attncheck.faults.catalogue import FAULTS
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.judge.fault_explanation import count_ties
from attncheck.relations import relation_named
from attncheck.verify.evidence_builder import EvidenceBuilder

# Faults that no problem of PROBLEMS shows: they need another layout of memory, values that are not
# finite, or rows so long that fp16 overflows.
NOT_SHOWN = {"contiguous-assumed", "hidden-values-leak", "out-overflows", "weights-underflow"}
NOT_SHOWN |= {"values-behind-keys", "half-unwritten", *SPECIALS}


@pytest.mark.parametrize("number", range(0, len(PROBLEMS), 3))
def test_exact_attention_and_gradients_match_oracle(number):
    evidence = evidence_of(number)
    attention, truth = ExactAttention(evidence.inputs), evidence.truth
    torch.testing.assert_close(attention.parts.out, truth.out)
    torch.testing.assert_close(attention.parts.lse, truth.lse)
    if evidence.case.problem.backward:
        gradients = ExactGradients(attention).gradients()
        for name in ("dq", "dk", "dv"):
            torch.testing.assert_close(getattr(gradients, name), getattr(truth, name))


def test_exact_attention_of_some_rows_matches_oracle():
    problem = Problem(query=40, kv=33, heads=2, dtype="fp16")
    inputs, rows = draw_inputs(problem), torch.tensor([3, 17, 39])
    truth = oracles.truth(inputs)
    torch.testing.assert_close(ExactAttention(inputs, rows=rows).parts.out, truth.out[:, :, rows])


@pytest.mark.parametrize("name", [name for name in FAULT_MODELS if name not in NOT_SHOWN])
def test_model_of_planted_fault_is_named(name):
    """First, or tied with others: on some problems some faults are the same."""
    model = FAULT_MODELS[name]
    for number in problems_showing(model):
        # Forms that show nothing on this problem are predicted too, as for each backward kernel.
        for _, evidence, result in islice(faulty_executions(model, number), 8):
            # If it explains nothing by itself, this form shows nothing.
            alone = explain(result, evidence, among=[name])
            if alone is None or not alone.ranking or not alone.ranking[0].all:
                continue
            assert name in best_models(result, evidence)
            return
    raise AssertionError("no problem shows it")


@pytest.mark.parametrize("size", TRIED_TILES)
def test_unmasked_tail_is_named_with_tile_size(size):
    """The tile has padding keys of score 0 and value 0 behind the five keys."""
    evidence = EvidenceBuilder(Case(problem=Problem(query=3, kv=5, head_dim=16)), "cpu")
    evidence.establish(reference_errors=False)
    total = evidence.truth.lse.exp()
    padded = total + size - 5
    outputs = Outputs(evidence.truth.out * (total / padded)[..., None], padded.log())
    findings = explain(execute(evidence.case.problem, outputs), evidence)
    first = findings.ranking[0]
    assert (first.name, first.all, first.parameters["tile"]) == ("tail-unmasked", True, size)


@pytest.mark.parametrize("size", TRIED_TILES[:3])
def test_wider_mask_is_named_when_loop_stops_at_its_block(size):
    """As in tutorials: the last row of a block is right, since its next key is never visited."""
    problem = Problem(query=77, kv=77, head_dim=16, mask=Spec.of("causal"))
    evidence = EvidenceBuilder(Case(problem=problem), "cpu")
    evidence.establish(reference_errors=False)
    call = ExactAttention(evidence.inputs)
    seen = (call.j <= call.i + 1) & (call.j < (call.i // size + 1) * size)
    result = execute(problem, call.attend(seen=seen.expand(call.shape)))
    first = explain(result, evidence).ranking[0]
    assert (first.name, first.all) == ("mask-one-key-wider", True)


def test_splits_without_fault_merge_to_exact_result():
    call = ExactAttention(draw_inputs(Problem(query=9, kv=150, head_dim=16, dtype="bf16")))
    forms = list(call.by_tile(RIGHT))
    assert {parameters.get("splits") for _, parameters in forms} == {None, 2, 3, 4}
    for outputs, _ in forms:
        torch.testing.assert_close(outputs.out, call.exact.out)
        torch.testing.assert_close(outputs.lse, call.exact.lse)


def test_rows_of_zeros_are_missing_values_and_no_bias():
    """Planted: values are lost in all blocks of rows but the first, or in every block."""
    problem = Problem(query=77, kv=40, head_dim=16, dtype="bf16")
    evidence = EvidenceBuilder(Case(problem=problem), "cpu")
    evidence.establish(reference_errors=False)
    call = ExactAttention(evidence.inputs)
    for first in (0, 64):
        lost = (call.i[..., 0] >= first).expand(call.shape[:3])
        models = best_models(execute(problem, call.with_out(lost, 0.0)), evidence)
        assert "values-missing" in models
        assert "normaliser-biased" not in models


@pytest.mark.parametrize("number", range(0, len(PROBLEMS), 2))
def test_right_kernel_is_explained_by_no_model(number):
    evidence = evidence_of(number)
    findings = explain(execute(evidence.case.problem, evidence.truth), evidence)
    assert findings is None or not any(one.all for one in findings.ranking)


@pytest.mark.parametrize("number", [1, 7, 22])
def test_noise_is_explained_by_no_model(number):
    evidence = evidence_of(number)
    noise = torch.Generator().manual_seed(1)
    outputs = evidence.truth
    wrong = torch.randn(outputs.out.shape, generator=noise, dtype=torch.float64)
    result = execute(evidence.case.problem, outputs)
    result.outputs.out.copy_((outputs.out + wrong).to(result.outputs.out.dtype))
    findings = explain(result, evidence)
    assert findings is not None
    assert not any(one.all or one.share > 0.5 for one in findings.ranking)


PLAIN = Problem(query=40, kv=40, head_dim=32, dtype="fp16")
# Words in a model's sentence that name a feature which PLAIN lacks.
FEATURES = (
    "mask", "causal", "window", "prefix", "document", "sequence", "sink", "score mod", "softcap",
    "ALiBi", "bias is", "key head", "heads", "page", "descale", "gradient", "backward", "delta",
    "dQ", "dK", "hidden", "chunk",
)  # fmt: skip
# Masks that the problem does not request, and masks of a tile's end or of its first maximum; and a
# maximum that may be wrong with any feature, and without.
WITHOUT_FEATURE = {"causal-always", "mask-times-infinity", "scale-of-zero-after-mask"}
WITHOUT_FEATURE |= {"maximum-of-some-scores"}
WITHOUT_FEATURE |= {"tail-unmasked", "only-padding-counts"}


OF_ABSENT_FEATURES = [
    name
    for name, model in FAULT_MODELS.items()
    if model.of == "backward"
    or (name not in WITHOUT_FEATURE and any(word in model.sentence for word in FEATURES))
]


@pytest.mark.parametrize("name", OF_ABSENT_FEATURES)
def test_model_of_absent_feature_does_not_apply(name):
    assert not FAULT_MODELS[name].applies(PLAIN)


def test_every_model_has_id_and_sentence_without_full_stop():
    for name, model in FAULT_MODELS.items():
        assert name == model.id
        assert model.sentence
        assert not model.sentence.endswith(".")


def test_fault_catalogue_names_existing_models():
    named = {name: fault.id for fault in FAULTS.values() for name in fault.named}
    unknown = {name: fault for name, fault in named.items() if name not in {*FAULT_MODELS, *SIGNS}}
    assert not unknown


# ------------------------------------------------------------------ where models apply

# A diagnosis skips a model that raises, so that only this test shows a bug in one.
EVERY_KIND = {
    "full": {},
    "one key": {"query": 1, "kv": 1},
    "other dims": {"head_dim": 40, "value_dim": 17},
    "causal": {"mask": OF("causal")},
    "bottom right": {"mask": OF("causal_bottom_right"), "query": 20},
    "window": {"mask": OF("sliding_window", window=5)},
    "padding": {"mask": OF("padding", lengths=[9, 33])},
    "causal documents": {
        "mask": OF(
            "and",
            OF("documents", query_lengths=[20, 13], kv_lengths=[24, 9]),
            OF("causal_bottom_right"),
        )
    },
    "causal of each sequence": {"mask": OF("bottom_right", OF("causal"), lengths=[33, 9])},
    "a window of each document": {
        "mask": OF(
            "documents_bottom_right",
            OF("sliding_window", window=5),
            query_lengths=[20, 0, 13],
            kv_lengths=[4, 9, 20],
        )
    },
    "prefix": {"mask": OF("prefix_lm", prefix=4)},
    "documents": {"mask": OF("document", lengths=[10, 0, 3, 20])},
    "both": {"mask": OF("and", OF("causal"), OF("padding", lengths=[9, 20]))},
    "softcap": {"score": OF("softcap", cap=5.0)},
    "alibi": {"score": OF("alibi")},
    "bias": {"score": OF("relative_bias", distance=4, seed=0)},
    "fp8": {"dtype": "e4m3"},
    "sink": {"sink": True},
    "backward": {"backward": True},
    "backward, window and softcap": {
        "backward": True,
        "mask": OF("sliding_window", window=5),
        "score": OF("softcap", cap=5.0),
    },
    "gradients of a bias": {
        "backward": True,
        "dcaptured": True,
        "score": OF("relative_bias", distance=4, seed=0),
    },
}


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_applicable_models_predict_without_raising(kind):
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 33, "kv": 33, "head_dim": 16}
    problem = Problem(**sizes | {"dtype": "bf16"} | EVERY_KIND[kind])
    rows = None if problem.backward else torch.arange(0, problem.query, 2)
    attention = ExactAttention(draw_inputs(problem), rows=rows, tile=None)
    models = [model for model in FAULT_MODELS.values() if model.applies(problem)]
    forms = {model.id: len(list(model.predictions(attention))) for model in models}
    assert sum(forms.values()) > len(FAULT_MODELS) // 4


# ------------------------------------------------------------------ faults that few problems show


@pytest.mark.parametrize("name", SPECIALS)
def test_special_fault_is_named(name):
    evidence = special_evidence(name)
    few = islice(special_executions(name, evidence), 9)  # some of them show nothing on this problem
    assert any(name in best_models(result, evidence) for result in few)


@pytest.mark.parametrize("name", SPECIALS)
def test_other_fault_is_not_taken_for_special_one(name):
    evidence, other = special_evidence(name), SPECIALS[name][1]
    result = next(special_executions(other, evidence))
    models = best_models(result, evidence)
    assert other in models
    assert name not in models


def with_unwritten_rows(problem, rows):
    """The exact result, but ``rows`` hold arbitrary numbers."""
    evidence = EvidenceBuilder(Case(problem=problem), "cpu")
    result = execute(problem, evidence.truth, TILES)
    noise = torch.Generator().manual_seed(1)
    out = result.outputs.out
    out[:, :, rows] += 3 * torch.randn(out[:, :, rows].shape, generator=noise).to(out.dtype)
    return result, evidence


def test_rounded_gradients_of_slices_are_named():
    """torch's autograd adds up the gradients of slices in their dtype, the last slice first."""
    sizes = {"heads": 1, "query": 239, "kv": 1, "head_dim": 16, "dtype": "fp16"}
    problem = Problem(**sizes, distribution="small_terms", backward=True)
    evidence = EvidenceBuilder(Case(problem=problem), "cpu")
    exact = ExactGradients(ExactAttention(evidence.inputs)).exact
    dv = torch.zeros(1, 1, 1, 16, dtype=torch.float16)
    for part in reversed(evidence.inputs.loss()[0].split(64, 2)):
        dv = dv + part.sum(2, keepdim=True).half()
    findings = explain(execute(problem, replace(exact, dv=dv.double())), evidence, proven=True)
    assert findings.ranking[0].name == "gradient-rounded"
    assert findings.ranking[0].parameters == {"format": "fp16", "of": "dv", "tile": 64}


def test_single_row_without_its_window_does_not_see_padding():
    window = OF("offset", OF("sliding_window", window=9), rows=76)
    padding = OF("padding", lengths=[60])
    call = ExactAttention(draw_inputs(Problem(query=1, kv=77, mask=OF("and", padding, window))))
    padded = ExactAttention(draw_inputs(Problem(query=1, kv=77, mask=padding)))
    prediction = next(FAULT_MODELS["one-row-sees-all"].predictions(call))
    assert torch.equal(prediction.outputs.out, padded.parts.out)


def test_positions_of_an_offset_bias_are_rounded_within_its_table():
    bias = OF("offset", OF("bias", seed=0, per_batch=0, per_head=0), rows=300)
    call = ExactAttention(draw_inputs(Problem(query=20, kv=320, score=bias)))
    for prediction in FAULT_MODELS["positions-rounded"].predictions(call):
        is_alike = torch.equal(prediction.outputs.out, call.parts.out)
        # From 256 on bf16 skips numbers; fp16 has all below 2048.
        rounds = prediction.parameters["format"] == "bf16"
        assert is_alike == (not rounds or prediction.parameters["of"] == "the mask")


def test_unwritten_half_of_rows_is_named():
    result, evidence = with_unwritten_rows(Problem(**RAGGED), slice(0, RAGGED["query"] // 2))
    assert best_models(result, evidence) == ["half-unwritten"]


def test_few_unwritten_rows_are_not_named_half():
    causal = Problem(**RAGGED | {"mask": OF("causal")})
    result, evidence = with_unwritten_rows(causal, slice(0, 4))
    assert "half-unwritten" not in best_models(result, evidence)


# ------------------------------------------------------------------ strides and gaps

GAPPED = Problem(query=9, kv=21, head_dim=16, heads=2, dtype="fp16")
EXPANDED = GAPPED.replace(backward=True)


def laid_out_evidence(problem, question):
    inputs = relation_named(question).runs(draw_inputs(problem), {})[-1]
    evidence = EvidenceBuilder(Case(problem=problem), "cpu", inputs)
    evidence.establish(reference_errors=False)
    return evidence


@pytest.mark.parametrize(
    ("name", "problem", "question"),
    [
        ("values-behind-keys", GAPPED, "strides_gapped"),
        ("contiguous-assumed", GAPPED, "strides_gapped"),
        ("dout-strides", EXPANDED, "strides_expanded"),
    ],
)
def test_layout_fault_is_named(name, problem, question):
    evidence = laid_out_evidence(problem, question)
    results = [
        explain(execute(problem, variant.outputs), evidence, proven=True)
        for variant in FAULT_MODELS[name].predictions(ExactAttention(evidence.inputs))
    ]
    # Some forms read the right numbers.
    failures = [findings for findings in results if findings is not None]
    assert failures
    for findings in failures:
        assert name in [one.name for one in findings.ranking[: count_ties(findings.ranking)]]


def test_values_behind_keys_is_neither_shown_nor_refuted_without_gaps():
    evidence = EvidenceBuilder(Case(problem=GAPPED), "cpu")
    evidence.establish(reference_errors=False)
    assert not list(FAULT_MODELS["values-behind-keys"].predictions(ExactAttention(evidence.inputs)))
    right = execute(GAPPED, evidence.truth)
    models = ["values-behind-keys", "scale-twice"]
    error = observed_error(right, evidence)
    fits = {
        name: [fits for _, fits in judged_predictions(error, FAULT_MODELS[name])] for name in models
    }
    assert fits["values-behind-keys"] == []
    assert fits["scale-twice"]
    assert not any(fits["scale-twice"])


def test_read_beyond_memory_gives_last_number_or_zero():
    tensor = torch.arange(6.0).view(2, 3)
    assert [x.tolist() for x in read_with_strides(tensor, (3, 1))] == [tensor.tolist()]
    last, zero = read_with_strides(tensor, (5, 1))
    assert last.tolist() == [[0, 1, 2], [5, 5, 5]]
    assert zero.tolist() == [[0, 1, 2], [5, 0, 0]]
    assert next(wider(tensor, 1, 4)).tolist() == [[0, 1, 2, 3], [3, 4, 5, 5]]
    assert contiguous(torch.Size((4, 3, 2))) == (6, 2, 1)
