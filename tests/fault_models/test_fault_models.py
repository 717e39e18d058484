"""Each fault model names the kernel that has its fault; a right one is named by none."""

from itertools import islice

import pytest
import torch
from tests.fault_models.planted_predictions import (
    PROBLEMS,
    evidence_of,
    exact,
    execution,
    faulty,
    problems_showing,
)
from tests.fault_models.planted_specials import SPECIALS

from attncheck import oracles
from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.diagnose.explanations import explain
from attncheck.fault_models import FAULT_MODELS, RIGHT
from attncheck.fault_models.exact_attention import TRIED_TILES, ExactAttention, ExactGradients
from attncheck.fault_models.fault_model import SIGNS
from attncheck.faults.catalogue import FAULTS
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.judge.fault_explanation import count_equals
from attncheck.verify.evidence_builder import EvidenceBuilder

# Of these none of the problems shows anything: they need memory that is laid out otherwise, values
# that are not finite, or rows so long that fp16 overflows.
NOT_DRAWN = {"contiguous-assumed", "hidden-values-leak", "out-overflows", "weights-underflow"}
NOT_DRAWN |= {"values-behind-keys", "half-unwritten", *SPECIALS}


@pytest.mark.parametrize("number", range(0, len(PROBLEMS), 3))
def test_without_a_fault_it_is_the_exact_result(number):
    evidence = evidence_of(number)
    given, truth = ExactAttention(evidence.inputs), evidence.truth
    torch.testing.assert_close(given.parts.out, truth.out)
    torch.testing.assert_close(given.parts.lse, truth.lse)
    if evidence.case.problem.backward:
        found = ExactGradients(given).gradients()
        for name in ("dq", "dk", "dv"):
            torch.testing.assert_close(getattr(found, name), getattr(truth, name))


def test_some_rows_are_those_of_all():
    problem = Problem(query=40, kv=33, heads=2, dtype="fp16")
    inputs, rows = draw_inputs(problem), torch.tensor([3, 17, 39])
    truth = oracles.truth(inputs)
    torch.testing.assert_close(ExactAttention(inputs, rows=rows).parts.out, truth.out[:, :, rows])


@pytest.mark.parametrize("name", [name for name in FAULT_MODELS if name not in NOT_DRAWN])
def test_a_kernel_with_the_fault_is_named(name):
    """First, or among those that explain it as well: some faults are the same on some problems."""
    model = FAULT_MODELS[name]
    for number in problems_showing(model):
        # A form that shows nothing is there for each kernel of a backward, too.
        for _, evidence, result in islice(faulty(model, number), 8):
            found = explain(result, evidence)
            if found is None or not found.ranking or not found.ranking[0].all:
                continue
            assert name in [one.name for one in found.ranking[: count_equals(found.ranking)]]
            return
    raise AssertionError("no problem shows it")


@pytest.mark.parametrize("size", TRIED_TILES)
def test_padding_of_a_tile_that_holds_all_keys_is_named_with_its_size(size):
    """As many keys of score 0 and value 0 as the tile has room for."""
    evidence = EvidenceBuilder(Case(problem=Problem(query=3, kv=5, head_dim=16)), "cpu")
    evidence.establish(reference_errors=False)
    total = evidence.truth.lse.exp()
    padded = total + size - 5
    outputs = Outputs(evidence.truth.out * (total / padded)[..., None], padded.log())
    found = explain(execution(evidence.case.problem, outputs), evidence)
    first = found.ranking[0]
    assert (first.name, first.all, first.parameters["tile"]) == ("tail-unmasked", True, size)


@pytest.mark.parametrize("size", TRIED_TILES[:3])
def test_a_mask_one_key_too_wide_is_named_where_the_loop_ends_with_its_block(size):
    """As tutorials write it: the last row of a block is right, for its next key is not visited."""
    problem = Problem(query=77, kv=77, head_dim=16, mask=Spec.of("causal"))
    evidence = EvidenceBuilder(Case(problem=problem), "cpu")
    evidence.establish(reference_errors=False)
    call = ExactAttention(evidence.inputs)
    seen = (call.j <= call.i + 1) & (call.j < (call.i // size + 1) * size)
    result = execution(problem, call.attend(seen=seen.expand(call.shape)))
    first = explain(result, evidence).ranking[0]
    assert (first.name, first.all) == ("mask-one-key-wider", True)


def test_without_a_slip_splits_are_merged_to_the_exact_result():
    call = ExactAttention(draw_inputs(Problem(query=9, kv=150, head_dim=16, dtype="bf16")))
    forms = list(call.by_tile(RIGHT))
    assert {parameters.get("splits") for _, parameters in forms} == {None, 2, 3, 4}
    for outputs, _ in forms:
        torch.testing.assert_close(outputs.out, call.exact.out)
        torch.testing.assert_close(outputs.lse, call.exact.lse)


def test_rows_of_zeros_are_no_bias_and_not_certainly_unwritten():
    """Planted: values are not there for rows of all blocks but the first; or for none."""
    problem = Problem(query=77, kv=40, head_dim=16, dtype="bf16")
    evidence = EvidenceBuilder(Case(problem=problem), "cpu")
    evidence.establish(reference_errors=False)
    call = ExactAttention(evidence.inputs)
    for first in (0, 64):
        gone = (call.i[..., 0] >= first).expand(call.shape[:3])
        found = explain(execution(problem, call.with_out(gone, 0.0)), evidence)
        equals = [one.name for one in found.ranking[: count_equals(found.ranking)]]
        assert "values-missing" in equals
        assert "normaliser-biased" not in equals


@pytest.mark.parametrize("number", range(0, len(PROBLEMS), 2))
def test_a_right_kernel_has_none(number):
    found = exact(number)
    assert found is None or not any(one.all for one in found.ranking)


@pytest.mark.parametrize("number", [1, 7, 22])
def test_a_fault_of_no_model_fits_none(number):
    evidence = evidence_of(number)
    noise = torch.Generator().manual_seed(1)
    outputs = evidence.truth
    wrong = torch.randn(outputs.out.shape, generator=noise, dtype=torch.float64)
    result = execution(evidence.case.problem, outputs)
    result.outputs.out.copy_((outputs.out + wrong).to(result.outputs.out.dtype))
    found = explain(result, evidence)
    assert found is not None
    assert not any(one.all or one.share > 0.5 for one in found.ranking)


PLAIN = Problem(query=40, kv=40, head_dim=32, dtype="fp16")
# Words of a sentence that speak of what PLAIN lacks.
FEATURES = (
    "mask", "causal", "window", "prefix", "document", "sequence", "sink", "score mod", "softcap",
    "ALiBi", "bias is", "key head", "heads", "page", "descale", "gradient", "backward", "delta",
    "dQ", "dK", "hidden", "chunk",
)  # fmt: skip
# What nobody asked for, or what masks the end of a tile or the tiles' first maximum.
NOT_OF_THE_PROBLEM = {"causal-always", "mask-times-infinity", "scale-of-zero-after-mask"}
NOT_OF_THE_PROBLEM |= {"tail-unmasked", "only-padding-counts"}


@pytest.mark.parametrize("name", FAULT_MODELS)
def test_a_model_is_asked_only_where_there_is_what_it_speaks_of(name):
    model = FAULT_MODELS[name]
    if any(word in model.sentence for word in FEATURES) and name not in NOT_OF_THE_PROBLEM:
        assert not model.applies(PLAIN)
    if model.of == "backward":
        assert not model.applies(PLAIN)


def test_every_model_says_what_it_is():
    for name, model in FAULT_MODELS.items():
        assert name == model.id
        assert model.sentence
        assert not model.sentence.endswith(".")


def test_the_catalogue_names_models_that_there_are():
    named = {name: fault.id for fault in FAULTS.values() for name in fault.named}
    unknown = {name: fault for name, fault in named.items() if name not in {*FAULT_MODELS, *SIGNS}}
    assert not unknown
