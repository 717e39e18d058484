"""Diagnoses of faults planted in the ideal kernel: named causes, families, and unknown ones."""

import itertools
from dataclasses import replace

import pytest
import torch
from tests.diagnose.helpers import diagnose, exclude_models
from tests.planted_kernels.other_steps import stepping
from tests.planted_kernels.outputs_given import spoiled

from attncheck.core.mod_spec import FULL, Spec
from attncheck.core.outputs import Outputs
from attncheck.diagnose.confirmation import confirm, independent_cases
from attncheck.diagnose.diagnosis import CauseSearch, diagnose_failure
from attncheck.diagnose.failing_kernel import FailingKernel
from attncheck.fault_models import FAULT_MODELS, ExactAttention
from attncheck.fault_models.fault_model import FAMILIES, SIGNS
from attncheck.fault_models.steps import LOG2E, Steps
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.ideal import Ideal
from attncheck.verify.kernel_hosts import executor_of
from attncheck.verify.run_case import run_case

pytestmark = pytest.mark.usefixtures("shared_evidence")

PLAIN = Problem(query=40, kv=70, heads=2, head_dim=64, dtype="fp16")
CAUSAL = PLAIN.replace(query=40, kv=40, mask=Spec.of("causal"))
EMPTY = PLAIN.replace(query=70, kv=40, mask=Spec.of("causal_bottom_right"))


def with_fault(model, number=0):
    """The ideal kernel with the steps of a model."""
    return stepping(steps=FAULT_MODELS[model].steps[number])


def models_of(family):
    return [name for name, model in FAULT_MODELS.items() if model.family == family]


def test_every_model_belongs_to_a_known_family():
    assert {model.family for model in FAULT_MODELS.values()} == set(FAMILIES)


PLANTED = [
    ("mask-one-key-wider", CAUSAL, "mask"),
    ("mask-ignored", CAUSAL, "mask"),
    ("scale-fixed", PLAIN.replace(scale=0.3), "factor"),
    ("alpha-not-on-out", PLAIN, "rescaling"),
    ("lse-base-2", PLAIN, "lse"),
    ("lse-plus-infinity-of-empty", EMPTY, "empty rows"),
    ("softcap-times-score", PLAIN.replace(score=Spec.of("softcap", cap=2.0)), "score"),
    ("delta-missing", PLAIN.replace(backward=True), "gradient"),
    ("dk-without-scale", PLAIN.replace(backward=True), "gradient"),
    ("alpha-not-of-the-difference", PLAIN, "rescaling"),
]


@pytest.mark.parametrize(("model", "problem", "family"), PLANTED, ids=[case[0] for case in PLANTED])
def test_fault_is_named_and_without_its_model_never_misnamed(model, problem, family, monkeypatch):
    kernel = with_fault(model)
    diagnosis = diagnose(kernel, problem)
    assert (diagnosis.level, diagnosis.ranked[0].model) == ("named", model)
    exclude_models(monkeypatch, model)
    other = diagnose(kernel, problem)
    # A sign is proven by asking again, whatever was planted.
    proven = bool(other.ranked) and other.ranked[0].model in SIGNS
    assert other.level != "named" or proven or FAULT_MODELS[other.ranked[0].model].family == family
    assert other.family in {FAMILIES[family], ""}
    assert other.level == "named" or other.facts


@pytest.mark.parametrize(
    ("model", "problem", "family"),
    [PLANTED[0], PLANTED[3], PLANTED[4], PLANTED[7]],
    ids=["mask", "rescaling", "lse", "gradient"],
)
def test_family_is_recognised_without_its_models(model, problem, family, monkeypatch):
    exclude_models(monkeypatch, *models_of(family))
    diagnosis = diagnose(with_fault(model), problem)
    assert (diagnosis.level, diagnosis.family) == ("family", FAMILIES[family])
    assert diagnosis.ranked == ()


def test_hidden_keys_that_count_are_listed(monkeypatch):
    exclude_models(monkeypatch)
    diagnosis = diagnose(with_fault("mask-one-key-wider"), CAUSAL)
    (fact,) = (fact for fact in diagnosis.facts if "count although they are hidden" in fact)
    assert fact.startswith("keys 1–")


def leave_every_row_empty(_, right):
    """What a kernel without keys gives; in short problems it looks like one dropped tile."""
    return Outputs(torch.zeros_like(right.out), torch.full_like(right.lse, -torch.inf))


def test_tile_that_holds_all_keys_is_not_named():
    short = PLAIN.replace(query=20, kv=20, mask=Spec.of("padding", lengths=[20]))
    diagnosis = diagnose(spoiled(leave_every_row_empty), short)
    assert (diagnosis.level, diagnosis.ranked[0].model) == ("named", "every-row-empty")
    best = diagnosis.ranked[: diagnosis.tied]
    assert "tile" not in [FAULT_MODELS[cause.model].family for cause in best]


def test_model_contradicted_by_passed_question_is_not_named():
    """The mask alone is wrong, which cannot be if causal questions passed in the same run."""
    kernel = with_fault("mask-one-key-wider")
    passed = [Case(problem=CAUSAL.replace(seed=seed)) for seed in (3, 4)]
    assert diagnose(kernel, CAUSAL).level == "named"
    contradicted = diagnose(kernel, CAUSAL, passed=passed)
    assert contradicted.level != "named"
    assert "mask-one-key-wider" not in [one.model for one in contradicted.ranked]


def test_passed_call_with_the_constant_scale_does_not_refute_it():
    """A hard-coded 1 / √64 is right where the call's scale is that, and wrong elsewhere."""
    passed = [Case(problem=PLAIN.replace(seed=3))]
    diagnosis = diagnose(with_fault("scale-fixed"), PLAIN.replace(scale=0.3), passed=passed)
    assert (diagnosis.level, diagnosis.ranked[0].model) == ("named", "scale-fixed")


def test_scale_that_is_wrong_for_shared_heads_alone_is_no_constant():
    """The same lengths and head dim with a key head for each query head are right."""

    def wrong_for_groups(inputs, right):
        model, problem = FAULT_MODELS["scale-fixed"], inputs.problem
        forms = model.predictions(ExactAttention(inputs))
        at_128 = next(one.outputs for one in forms if one.parameters["scale"] == "0.08839")
        changed = Outputs(at_128.out.to(right.out.dtype), at_128.lse.to(right.lse.dtype))
        return changed if problem.group > 1 else right

    shared = PLAIN.replace(heads=4, kv_heads=2)
    diagnosis = diagnose(spoiled(wrong_for_groups), shared)
    assert "scale-fixed" not in [one.model for one in diagnosis.ranked[: diagnosis.tied]]


def test_passed_call_that_a_form_says_nothing_about_does_not_refute_it():
    """Where k and v are laid out alike, v by the strides of k is v."""

    def read_by_strides_of_k(inputs, right):
        model, problem = FAULT_MODELS["values-of-keys-strides"], inputs.problem
        if problem.head_dim == problem.value_dim:
            return right
        wrong = next(iter(model.predictions(ExactAttention(inputs)))).outputs
        return replace(right, out=wrong.out.to(right.out.dtype))

    wide = PLAIN.replace(head_dim=96, value_dim=128)
    passed = [Case(problem=PLAIN.replace(seed=3))]
    diagnosis = diagnose(spoiled(read_by_strides_of_k), wide, passed=passed)
    assert (diagnosis.level, diagnosis.ranked[0].model) == ("named", "values-of-keys-strides")


def test_rows_that_see_no_key_are_named_before_those_that_miss_the_first_tile():
    def nan(_, right):
        dead = right.lse == -torch.inf
        out = torch.where(dead[..., None], torch.nan, right.out)
        return Outputs(out, torch.where(dead, torch.nan, right.lse))

    diagnosis = diagnose(spoiled(nan), EMPTY)
    assert (diagnosis.level, diagnosis.ranked[0].model) == ("named", "empty-rows-nan")


def test_cause_search_remembers_passed_records():
    search, kernel = CauseSearch(), with_fault("mask-one-key-wider")
    passed = run_case(Ideal(), Case(problem=CAUSAL.replace(seed=3)), device="cpu")
    assert passed.status == "pass"
    search.note(passed)
    failed = run_case(kernel, Case(problem=CAUSAL), device="cpu")
    assert search.diagnose(failed, kernel, device="cpu").diagnosis.level != "named"


def test_rows_that_memory_does_not_change_are_not_unwritten(monkeypatch):
    exclude_models(monkeypatch, *models_of("empty rows"))
    diagnosis = diagnose(with_fault("lse-plus-infinity-of-empty"), EMPTY)
    assert "rows-unwritten" not in [one.model for one in diagnosis.ranked]
    assert diagnosis.family != FAMILIES["memory"]


@pytest.mark.parametrize("problem", [PLAIN, CAUSAL, EMPTY])
def test_independent_cases_are_distinct_and_keep_the_mask(problem):
    case = Case(problem=problem)
    cases = list(independent_cases(case))
    assert case.id not in {one.id for one in cases}
    assert len({one.id for one in cases}) == len(cases) > 4
    assert len({(one.question, one.problem) for one in cases}) == len(cases)
    # A second fault, in a feature that the problem lacks, would refute the cause of this one.
    assert {one.problem.mask.name for one in cases} == {problem.mask.name}


def supports_whole_tiles(problem):
    return problem.query == problem.kv and problem.kv % 16 == 0


def test_independent_cases_are_supported_by_kernel():
    case = Case(problem=CAUSAL.replace(query=48, kv=48))
    problems = [one.problem for one in independent_cases(case, supports_whole_tiles)]
    assert len(problems) > 4
    assert all(map(supports_whole_tiles, problems))
    assert len({one.kv for one in problems}) > 2


def failing_kernel(kernel, case, change_responses=None):
    """A FailingKernel of a failed Case; ``change_responses`` may change what it answers."""

    class Failing(FailingKernel):
        def ask(self, one):
            responses = FailingKernel.ask(self, one)
            return responses if change_responses is None else change_responses(responses)

    record = run_case(kernel, case, device="cpu")
    return Failing(record, kernel, "cpu", executor_of(kernel))


def test_too_few_responses_confirm_nothing():
    kernel, case = with_fault("mask-one-key-wider"), Case(problem=CAUSAL)
    every = confirm(["mask-one-key-wider"], failing_kernel(kernel, case), seconds=0.0)
    assert (every.confirmed, every.unrefuted) == (True, ("mask-one-key-wider",))
    number = itertools.count()
    two = failing_kernel(kernel, case, lambda responses: responses if next(number) < 2 else [])
    few = confirm(["mask-one-key-wider"], two, seconds=0.0)
    assert few.problems == 2
    assert not few.confirmed


def test_tile_model_must_keep_its_tile_in_every_problem():
    """Planted: all keys are lost, as if a dropped first tile had a new size in each problem."""
    case = Case(problem=Problem(query=1, head_dim=16, dtype="bf16", distribution="negative_logits"))

    def without_tiles(responses):  # as from a kernel that declares no tiles
        return [replace(run, call=ExactAttention(run.call.inputs)) for run in responses]

    kernel = failing_kernel(with_fault("maximum-from-zero"), case, without_tiles)
    confirmation = confirm(["maximum-from-zero", "first-tile-dropped"], kernel, seconds=0.0)
    assert (confirmation.confirmed, confirmation.unrefuted) == (True, ("maximum-from-zero",))


@pytest.mark.parametrize("mean", [False, True], ids=["nan", "mean"])
def test_rows_that_lost_all_keys_may_be_nan_or_mean(mean):
    class Divided(Ideal):
        name = "divided"
        steps = FAULT_MODELS["mask-one-key-narrower"].steps[0]

        def prepare(self, inputs):
            def call():
                outputs = Ideal.prepare(self, inputs)()
                lost = (outputs.lse == -torch.inf)[..., None]
                usual = inputs.v.float().mean(2, keepdim=True) if mean else torch.tensor(torch.nan)
                usual = usual.repeat_interleave(inputs.problem.group, 1) if mean else usual
                out = torch.where(lost, usual.to(outputs.out.dtype), outputs.out)
                return replace(outputs, out=out, lse=None if mean else outputs.lse)

            return call

    diagnosis = diagnose(Divided(), CAUSAL)
    assert (diagnosis.level, diagnosis.ranked[0].model) == ("named", "mask-one-key-narrower")


@pytest.mark.parametrize("ragged_seeds", [(), (0,)], ids=["whole tiles", "the failing seed too"])
def test_failure_is_confirmed_beyond_the_problems_that_kernel_supports(ragged_seeds):
    """Planted: of ragged lengths, where it is wrong, the kernel supports no more than one seed."""

    class Padded(Ideal):
        name = "padded"

        def inside(self, keys, kv):
            return torch.ones_like(keys, dtype=torch.bool)

    def unsupported(_, problem, device):
        return "too ragged" if problem.kv % 128 and problem.seed not in ragged_seeds else None

    record = run_case(Padded(), Case(problem=PLAIN.replace(seed=0)), device="cpu")
    assert record.status == "fail"
    Padded.unsupported = unsupported
    diagnosis = diagnose_failure(record, Padded(), device="cpu").diagnosis
    assert (diagnosis.level, diagnosis.ranked[0].model) == ("named", "tail-unmasked")


def test_passes_without_mask_do_not_refute_fault_of_masked_loop():
    """Planted: key 0 is dropped only where there is a mask."""

    def without_key_0(problem, device):
        mask = problem.mask_mod(device)
        masked = problem.mask.name != "full"
        return (lambda b, h, i, j: mask(b, h, i, j) & (j > 0)) if masked else None

    kernel = stepping(steps=Steps(mask=without_key_0))
    passed = [Case(problem=CAUSAL.replace(mask=FULL, seed=seed)) for seed in (3, 4)]
    assert diagnose(kernel, CAUSAL, passed=passed).ranked[0].model == "edge-key-dropped"


@pytest.mark.parametrize("dtype", ["fp16", "e4m3"])
def test_nan_on_finite_inputs_is_overflow_family(dtype, monkeypatch):
    class Nan(Ideal):
        name = "nan"

        def normalised(self, out, total):
            return super().normalised(out, total) * torch.nan

    exclude_models(monkeypatch)
    diagnosis = diagnose(Nan(), PLAIN.replace(dtype=dtype))
    assert (diagnosis.level, diagnosis.family) == ("family", FAMILIES["overflow"])


@pytest.mark.parametrize("distribution", ["normal", "negative_logits", "large_logits"])
def test_weights_of_other_base_are_not_taken_for_mask_or_tile(distribution, monkeypatch):
    """Weights that are much too small look like keys that do not count."""
    exclude_models(monkeypatch)
    steps = Steps(scale=lambda problem: problem.scale / LOG2E)
    kernel = stepping(steps=steps)
    problem = PLAIN.replace(query=80, kv=80, distribution=distribution, dtype="bf16")
    assert diagnose(kernel, problem).family not in {FAMILIES["mask"], FAMILIES["tile"]}


@pytest.mark.parametrize("first", [16, 48])
def test_missing_tile_is_not_taken_for_rescaled_one(first, monkeypatch):
    """Planted: keys of low weight are in doubt, so that their tile may count 0 times or once."""

    def without_tile(problem, device):
        mask = problem.mask_mod(device)
        return lambda b, h, i, j: mask(b, h, i, j) & ((j < first) | (j >= first + 16))

    exclude_models(monkeypatch)
    kernel = stepping(steps=Steps(mask=without_tile))
    diagnosis = diagnose(kernel, PLAIN.replace(dtype="bf16"))
    assert (diagnosis.level, diagnosis.family) == ("family", FAMILIES["tile"])


def clear_dq(_, right):
    return replace(right, dq=None if right.dq is None else torch.zeros_like(right.dq))


def test_models_that_predict_the_same_are_all_named():
    """Planted: dQ is 0, as it is where its kernel reads the keys as 0."""
    diagnosis = diagnose(spoiled(clear_dq), PLAIN.replace(backward=True))
    assert diagnosis.level == "named"
    models = [one.model for one in diagnosis.ranked]
    assert models == ["gradient-missing", "backward-operand-missing"]
    assert diagnosis.tied == 2


class LastRow(Ideal):
    """The last of many rows has a query of 0: a small error beside the rounding of all others."""

    name = "last-row"

    def prepare(self, inputs):
        q = inputs.q.clone()
        q[:, :, -1] = 0
        return super().prepare(inputs.replace(q=q))


def test_error_hidden_by_rounding_is_named_with_other_problems():
    many = Problem(query=320, kv=320, head_dim=64, dtype="bf16", distribution="uniform")
    diagnosis = diagnose(LastRow(), many)
    assert (diagnosis.level, diagnosis.ranked[0].model) == ("named", "last-row-as-zero")
    assert diagnosis.ranked[0].share > 0.5


def test_backward_fault_is_not_refuted_where_it_shows_nothing():
    """Planted: dK loses its rows from the seventeenth on, of which one problem has none."""
    problem = PLAIN.replace(backward=True, query=12)
    call = ExactAttention(draw_inputs(problem))
    forms = FAULT_MODELS["backward-loop-too-short"].predictions(call)
    right = [one for one in forms if torch.equal(one.outputs.dk, call.backward.exact.dk)]
    assert {one.parameters.get("kernel of") for one in right} >= {"dq", "dk, dv"}


class OutAlone(Ideal):
    """A kernel with another scale that returns no LSE."""

    name = "out-alone"
    scale = staticmethod(lambda problem: 5.0 * problem.scale)

    def prepare(self, inputs):
        problem = inputs.problem.replace(scale=self.scale(inputs.problem))
        right = super().prepare(replace(inputs, problem=problem))
        return lambda: Outputs(right().out)


class WithoutScale(OutAlone):
    scale = staticmethod(lambda _problem: 1.0)


def test_passed_question_refutes_nothing_about_missing_lse():
    """With values of 1, out is right at any scale: an LSE that is not returned must not refute."""
    passed = [Case(problem=PLAIN, question="ones")]
    diagnosis = diagnose(WithoutScale(), PLAIN, passed=passed)
    assert (diagnosis.level, diagnosis.ranked[0].model) == ("named", "scale-missing")


def test_fitted_factor_comes_from_other_problems():
    """A ramp's weights are 0 and 1 at any large scale: it alone cannot tell the factor."""
    ragged = PLAIN.replace(query=77, kv=93, dtype="bf16")
    ramp = Case(problem=ragged, question="ramp", parameters={"rise": 32})
    (first,) = [cause for cause in diagnose(OutAlone(), ramp).ranked if cause.model == "scale-off"]
    assert f"{first.parameters['factor']:.2g}" == "5"  # as reports print it


def test_output_of_nan_everywhere_is_explained_by_no_model():
    all_nan = spoiled(lambda _, right: Outputs(torch.full_like(right.out, torch.nan)))
    diagnosis = diagnose(all_nan, PLAIN)
    assert (diagnosis.level, diagnosis.ranked) == ("family", ())
    assert diagnosis.facts[0].startswith("every element of out is NaN on finite inputs: look for")
