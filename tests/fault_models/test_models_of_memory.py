"""Fault models of memory, where the problems of all models show nothing: strides and gaps."""

import pytest
import torch
from tests.fault_models.planted_predictions import execution

from attncheck.diagnose.explanations import explain, fitting_predictions, observed_error
from attncheck.fault_models import FAULT_MODELS
from attncheck.fault_models.exact_attention import ExactAttention
from attncheck.fault_models.layout_models import contiguous, read_as, wider
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.judge.fault_explanation import count_equals
from attncheck.relations import relation_named
from attncheck.verify.evidence_builder import EvidenceBuilder

GAPPED = Problem(query=9, kv=21, head_dim=16, heads=2, dtype="fp16")
EXPANDED = GAPPED.replace(backward=True)


def evidence_of(problem, question):
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
def test_a_kernel_with_the_fault_is_named(name, problem, question):
    evidence = evidence_of(problem, question)
    results = [
        explain(execution(problem, variant.outputs), evidence, proven=True)
        for variant in FAULT_MODELS[name].predictions(ExactAttention(evidence.inputs))
    ]
    wrong = [found for found in results if found is not None]  # some read what they should
    assert wrong
    for found in wrong:
        assert name in [one.name for one in found.ranking[: count_equals(found.ranking)]]


def test_where_nothing_lies_behind_the_keys_nothing_is_wrong():
    evidence = EvidenceBuilder(Case(problem=GAPPED), "cpu")
    evidence.establish(reference_errors=False)
    assert not list(FAULT_MODELS["values-behind-keys"].predictions(ExactAttention(evidence.inputs)))
    right = execution(GAPPED, evidence.truth)
    among = ["values-behind-keys", "scale-twice"]
    asked = observed_error(right, evidence)
    refuted = {name for name in among if fitting_predictions(asked, FAULT_MODELS[name]) == []}
    assert set(among) - refuted == {"values-behind-keys"}


def test_beyond_its_memory_the_last_number_is_read_or_none():
    tensor = torch.arange(6.0).view(2, 3)
    assert [x.tolist() for x in read_as(tensor, (3, 1))] == [tensor.tolist()]
    last, none = read_as(tensor, (5, 1))
    assert last.tolist() == [[0, 1, 2], [5, 5, 5]]
    assert none.tolist() == [[0, 1, 2], [5, 0, 0]]
    assert next(wider(tensor, 1, 4)).tolist() == [[0, 1, 2, 3], [3, 4, 5, 5]]
    assert contiguous(torch.Size((4, 3, 2))) == (6, 2, 1)
