"""Each fault model names the kernel that has its fault; a right one is named by none."""

from itertools import islice

import pytest
import torch
from tests.fault_models.planted import (
    OF,
    PROBLEMS,
    RAGGED,
    SPECIALS,
    TILES,
    evidence_of,
    exact,
    execution,
    faulty,
    named,
    planted_special,
    problems_showing,
    special_evidence,
)

from attncheck import oracles
from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.diagnose.explanations import explain, fitting_predictions, observed_error
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
            # Where it explains nothing by itself this form shows nothing.
            alone = explain(result, evidence, among=[name])
            if alone is None or not alone.ranking or not alone.ranking[0].all:
                continue
            assert name in named(result, evidence)
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
        equals = named(execution(problem, call.with_out(gone, 0.0)), evidence)
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


# ------------------------------------------------------------------ where it may be asked

# A diagnosis leaves out a model that raises, so a slip in one would be silence: here it is not.
EVERY_KIND = {
    "full": {},
    "one key": {"query": 1, "kv": 1},
    "other dims": {"head_dim": 40, "value_dim": 17},
    "causal": {"mask": OF("causal")},
    "bottom right": {"mask": OF("causal_bottom_right"), "query": 20},
    "window": {"mask": OF("sliding_window", window=5)},
    "padding": {"mask": OF("padding", lengths=[9, 33])},
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


@pytest.mark.parametrize("of", EVERY_KIND)
def test_none_raises_where_it_applies(of):
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 33, "kv": 33, "head_dim": 16}
    problem = Problem(**sizes | {"dtype": "bf16"} | EVERY_KIND[of])
    some = None if problem.backward else torch.arange(0, problem.query, 2)
    given = ExactAttention(draw_inputs(problem), rows=some, tile=None)
    models = [model for model in FAULT_MODELS.values() if model.applies(problem)]
    forms = {model.id: len(list(model.predictions(given))) for model in models}
    assert sum(forms.values()) > len(FAULT_MODELS) // 4


# ------------------------------------------------------------------ what few problems show


@pytest.mark.parametrize("name", SPECIALS)
def test_a_special_fault_is_named(name):
    evidence = special_evidence(name)
    few = islice(planted_special(name, evidence), 9)  # some of them show nothing on this problem
    assert any(name in named(result, evidence) for result in few)


@pytest.mark.parametrize("name", SPECIALS)
def test_another_fault_is_not_taken_for_it(name):
    evidence, other = special_evidence(name), SPECIALS[name][1]
    result = next(planted_special(other, evidence))
    found = named(result, evidence)
    assert other in found
    assert name not in found


def unwritten(problem, rows):
    """The exact result, but for rows that hold anything."""
    evidence = EvidenceBuilder(Case(problem=problem), "cpu")
    result = execution(problem, evidence.truth, TILES)
    noise = torch.Generator().manual_seed(1)
    out = result.outputs.out
    out[:, :, rows] += 3 * torch.randn(out[:, :, rows].shape, generator=noise).to(out.dtype)
    return result, evidence


def test_rows_of_another_configuration():
    result, evidence = unwritten(Problem(**RAGGED), slice(0, RAGGED["query"] // 2))
    assert named(result, evidence) == ["half-unwritten"]


def test_a_row_too_few_is_no_half():
    result, evidence = unwritten(Problem(**RAGGED | {"mask": OF("causal")}), slice(0, 4))
    assert "half-unwritten" not in named(result, evidence)


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
def test_a_fault_of_layouts_is_named(name, problem, question):
    evidence = laid_out_evidence(problem, question)
    results = [
        explain(execution(problem, variant.outputs), evidence, proven=True)
        for variant in FAULT_MODELS[name].predictions(ExactAttention(evidence.inputs))
    ]
    wrong = [found for found in results if found is not None]  # some read what they should
    assert wrong
    for found in wrong:
        assert name in [one.name for one in found.ranking[: count_ties(found.ranking)]]


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
    assert [x.tolist() for x in read_with_strides(tensor, (3, 1))] == [tensor.tolist()]
    last, none = read_with_strides(tensor, (5, 1))
    assert last.tolist() == [[0, 1, 2], [5, 5, 5]]
    assert none.tolist() == [[0, 1, 2], [5, 0, 0]]
    assert next(wider(tensor, 1, 4)).tolist() == [[0, 1, 2, 3], [3, 4, 5, 5]]
    assert contiguous(torch.Size((4, 3, 2))) == (6, 2, 1)
