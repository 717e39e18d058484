"""What is named, what is a family, what nobody knows: faults planted in the ideal kernel."""

import itertools
from dataclasses import replace

import pytest
import torch
from tests.diagnose.told import WAVY, left_out, told
from tests.planted_kernels.other_steps import stepping

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


def test_every_model_is_of_a_family():
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


@pytest.mark.parametrize(("model", "problem", "family"), PLANTED, ids=[one[0] for one in PLANTED])
def test_a_fault_is_named_and_without_its_model_never_another(model, problem, family, monkeypatch):
    kernel = with_fault(model)
    named = told(kernel, problem)
    assert (named.level, named.ranked[0].model) == ("named", model)
    left_out(monkeypatch, model)
    other = told(kernel, problem)
    # What is proven by asking again is so whatever was planted.
    proven = bool(other.ranked) and other.ranked[0].model in SIGNS
    assert other.level != "named" or proven or FAULT_MODELS[other.ranked[0].model].family == family
    assert other.family in {FAMILIES[family], ""}
    assert other.level == "named" or other.facts


@pytest.mark.parametrize(
    ("model", "problem", "family"),
    [PLANTED[0], PLANTED[3], PLANTED[4], PLANTED[7]],
    ids=["mask", "rescaling", "lse", "gradient"],
)
def test_what_is_seen_tells_the_family(model, problem, family, monkeypatch):
    left_out(monkeypatch, *(name for name, one in FAULT_MODELS.items() if one.family == family))
    found = told(with_fault(model), problem)
    assert (found.level, found.family) == ("family", FAMILIES[family])
    assert found.ranked == ()


def test_keys_that_count_and_must_not_are_told(monkeypatch):
    left_out(monkeypatch)
    found = told(with_fault("mask-one-key-wider"), CAUSAL)
    (counted,) = (fact for fact in found.facts if "count although they are hidden" in fact)
    assert counted.startswith("keys 1–")


class Nothing(Ideal):
    """Nothing is kept of any tile: short problems alone look like a tile that is dropped."""

    name = "nothing"

    def prepare(self, inputs):
        right = super().prepare(inputs)

        def call():
            outputs = right()
            gone = torch.full_like(outputs.lse, -torch.inf)
            return Outputs(torch.zeros_like(outputs.out), gone)

        return call


def test_a_tile_that_holds_all_keys_is_no_cause():
    short = PLAIN.replace(query=20, kv=20, mask=Spec.of("padding", lengths=[20]))
    found = told(Nothing(), short)
    assert (found.level, found.ranked[0].model) == ("named", "every-row-empty")
    assert "tile" not in [FAULT_MODELS[one.model].family for one in found.ranked[: found.tied]]


def test_of_what_no_model_fits_only_what_was_seen_is_told():
    found = told(WAVY, CAUSAL)
    assert (found.level, found.ranked, found.family) == ("unknown", (), "")
    assert any("wrong as well without the mask" in fact for fact in found.facts)


def test_a_model_that_a_question_which_passed_contradicts_is_not_named():
    """The mask alone is wrong: of a run in which causal questions passed that cannot be so."""
    kernel = with_fault("mask-one-key-wider")
    passed = [Case(problem=CAUSAL.replace(seed=seed)) for seed in (3, 4)]
    assert told(kernel, CAUSAL).level == "named"
    contradicted = told(kernel, CAUSAL, passed=passed)
    assert contradicted.level != "named"
    assert "mask-one-key-wider" not in [one.model for one in contradicted.ranked]


def test_a_search_remembers_what_passed():
    search, kernel = CauseSearch(), with_fault("mask-one-key-wider")
    right = run_case(Ideal(), Case(problem=CAUSAL.replace(seed=3)), device="cpu")
    assert right.status == "pass"
    search.note(right)
    wrong = run_case(kernel, Case(problem=CAUSAL), device="cpu")
    assert search.diagnose(wrong, kernel, device="cpu").diagnosis.level != "named"


def test_rows_that_memory_does_not_change_are_not_unwritten(monkeypatch):
    left_out(monkeypatch, *(n for n, one in FAULT_MODELS.items() if one.family == "empty rows"))
    found = told(with_fault("lse-plus-infinity-of-empty"), EMPTY)
    assert "rows-unwritten" not in [one.model for one in found.ranked]
    assert found.family != FAMILIES["memory"]


@pytest.mark.parametrize("problem", [PLAIN, CAUSAL, EMPTY])
def test_independent_problems_are_others(problem):
    case = Case(problem=problem)
    asked = list(independent_cases(case))
    assert case.id not in {one.id for one in asked}
    assert len({one.id for one in asked}) == len(asked) > 4
    assert len({(one.question, one.problem) for one in asked}) == len(asked)
    # A second fault in what the problem has not would refute the cause of this one.
    assert {one.problem.mask.name for one in asked} == {problem.mask.name}


def takes_whole_tiles(problem):
    return problem.query == problem.kv and problem.kv % 16 == 0


def test_independent_problems_are_those_that_the_kernel_takes():
    case = Case(problem=CAUSAL.replace(query=48, kv=48))
    asked = [one.problem for one in independent_cases(case, takes_whole_tiles)]
    assert len(asked) > 4
    assert all(map(takes_whole_tiles, asked))
    assert len({one.kv for one in asked}) > 2


def failing(kernel, case, answers=None):
    """A kernel that has failed a Case; its responses are changed by ``answers``."""

    class Failing(FailingKernel):
        def ask(self, one):
            responses = FailingKernel.ask(self, one)
            return responses if answers is None else answers(responses)

    record = run_case(kernel, case, device="cpu")
    return Failing(record, kernel, "cpu", executor_of(kernel))


def test_few_answers_confirm_nothing():
    kernel, case = with_fault("mask-one-key-wider"), Case(problem=CAUSAL)
    every = confirm(["mask-one-key-wider"], failing(kernel, case), seconds=0.0)
    assert (every.confirmed, every.unrefuted) == (True, ("mask-one-key-wider",))
    number = itertools.count()
    two = failing(kernel, case, lambda responses: responses if next(number) < 2 else [])
    few = confirm(["mask-one-key-wider"], two, seconds=0.0)
    assert few.problems == 2
    assert not few.confirmed


def test_a_tile_is_no_other_one_each_time():
    """Planted: of keys that are all lost a first tile that is dropped says the same."""
    case = Case(problem=Problem(query=1, head_dim=16, dtype="bf16", distribution="negative_logits"))

    def without_tiles(responses):  # as of a kernel that declares none
        return [replace(run, call=ExactAttention(run.call.inputs)) for run in responses]

    kernel = failing(with_fault("maximum-from-zero"), case, without_tiles)
    told = confirm(["maximum-from-zero", "first-tile-dropped"], kernel, seconds=0.0)
    assert (told.confirmed, told.unrefuted) == (True, ("maximum-from-zero",))


@pytest.mark.parametrize("mean", [False, True], ids=["nan", "mean"])
def test_rows_that_have_lost_all_their_keys_may_be_anything_usual(mean):
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

    found = told(Divided(), CAUSAL)
    assert (found.level, found.ranked[0].model) == ("named", "mask-one-key-narrower")


def test_what_fails_beyond_what_a_kernel_takes_is_asked_beyond_it():
    """Planted: on whole tiles, which it is said to take alone, it is right."""

    class Padded(Ideal):
        name = "padded"

        def inside(self, keys, kv):
            return torch.ones_like(keys, dtype=torch.bool)

    record = run_case(Padded(), Case(problem=PLAIN), device="cpu")
    assert record.status == "fail"
    Padded.unsupported = lambda _, problem, device: "too ragged" if problem.kv % 128 else None
    found = diagnose_failure(record, Padded(), device="cpu").diagnosis
    assert (found.level, found.ranked[0].model) == ("named", "tail-unmasked")


def test_a_problem_that_is_taken_by_itself_is_asked_with_other_numbers():
    """Planted: of ragged lengths only the numbers of the failure are taken."""

    class Padded(Ideal):
        name = "padded"

        def inside(self, keys, kv):
            return torch.ones_like(keys, dtype=torch.bool)

        def unsupported(self, problem, device):
            return "too ragged" if problem.kv % 128 and problem.seed else None

    record = run_case(Padded(), Case(problem=PLAIN.replace(seed=0)), device="cpu")
    assert record.status == "fail"
    found = diagnose_failure(record, Padded(), device="cpu").diagnosis
    assert (found.level, found.ranked[0].model) == ("named", "tail-unmasked")


def test_a_loop_that_is_wrong_under_a_mask_alone_is_right_without_one():
    """Planted: what passed without a mask must not contradict it."""

    def without_key_0(problem, device):
        mask = problem.mask_mod(device)
        masked = problem.mask.name != "full"
        return (lambda b, h, i, j: mask(b, h, i, j) & (j > 0)) if masked else None

    kernel = stepping(steps=Steps(mask=without_key_0))
    passed = [Case(problem=CAUSAL.replace(mask=FULL, seed=seed)) for seed in (3, 4)]
    assert told(kernel, CAUSAL, passed=passed).ranked[0].model == "edge-key-dropped"


@pytest.mark.parametrize("dtype", ["fp16", "e4m3"])
def test_nan_of_finite_numbers_is_told(dtype, monkeypatch):
    class Nan(Ideal):
        name = "nan"

        def normalised(self, out, total):
            return super().normalised(out, total) * torch.nan

    left_out(monkeypatch)
    found = told(Nan(), PLAIN.replace(dtype=dtype))
    assert (found.level, found.family) == ("family", FAMILIES["overflow"])


@pytest.mark.parametrize("distribution", ["normal", "negative_logits", "large_logits"])
def test_weights_of_another_base_are_no_mask_and_no_tile(distribution, monkeypatch):
    """What is much smaller than it must be looks like keys that do not count."""
    left_out(monkeypatch)
    steps = Steps(scale=lambda problem: problem.scale / LOG2E)
    kernel = stepping(steps=steps)
    problem = PLAIN.replace(query=80, kv=80, distribution=distribution, dtype="bf16")
    assert told(kernel, problem).family not in {FAMILIES["mask"], FAMILIES["tile"]}


@pytest.mark.parametrize("first", [16, 48])
def test_a_tile_that_is_gone_is_not_one_that_is_rescaled(first, monkeypatch):
    """Planted: keys of low weight are in doubt, and their tile counts 0 times or once."""

    def without_tile(problem, device):
        mask = problem.mask_mod(device)
        return lambda b, h, i, j: mask(b, h, i, j) & ((j < first) | (j >= first + 16))

    left_out(monkeypatch)
    kernel = stepping(steps=Steps(mask=without_tile))
    found = told(kernel, PLAIN.replace(dtype="bf16"))
    assert (found.level, found.family) == ("family", FAMILIES["tile"])


class NoDq(Ideal):
    """Nothing is added to dQ."""

    name = "no-dq"

    def prepare(self, inputs):
        right = super().prepare(inputs)

        def call():
            outputs = right()
            return replace(outputs, dq=None if outputs.dq is None else torch.zeros_like(outputs.dq))

        return call


def test_one_fault_in_several_words_is_named_in_each():
    """Planted: dQ is 0, as it is where its kernel reads the keys as 0."""
    found = told(NoDq(), PLAIN.replace(backward=True))
    assert found.level == "named"
    assert [one.model for one in found.ranked] == ["gradient-missing", "backward-operand-missing"]
    assert found.tied == 2


class LastRow(Ideal):
    """The last of many rows has a query of 0: beside what all others round it is little."""

    name = "last-row"

    def prepare(self, inputs):
        q = inputs.q.clone()
        q[:, :, -1] = 0
        return super().prepare(inputs.replace(q=q))


def test_what_is_little_beside_rounding_is_named_by_other_problems():
    many = Problem(query=320, kv=320, head_dim=64, dtype="bf16", distribution="uniform")
    found = told(LastRow(), many)
    assert (found.level, found.ranked[0].model) == ("named", "last-row-as-zero")
    assert found.ranked[0].share > 0.5


def test_a_fault_of_one_kernel_of_a_backward_is_not_refuted_where_it_shows_nothing():
    """Planted: dK's rows from the seventeenth on are lost, of which there are none in one case."""
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


def test_what_passed_says_nothing_of_a_tensor_that_the_kernel_does_not_return():
    """With values of 1 out is right at any scale: the exact LSE must not refute the right model."""
    passed = [Case(problem=PLAIN, question="ones")]
    named = told(WithoutScale(), PLAIN, passed=passed)
    assert (named.level, named.ranked[0].model) == ("named", "scale-missing")


def test_a_fitted_factor_is_the_one_that_other_problems_tell():
    """A ramp's weights are 0 and 1 at any scale that is large enough."""
    ragged = PLAIN.replace(query=77, kv=93, dtype="bf16")
    ramp = Case(problem=ragged, question="ramp", parameters={"rise": 32})
    (first,) = [o for o in told(OutAlone(), ramp).ranked if o.model == "scale-off"]
    assert f"{first.parameters['factor']:.2g}" == "5"  # as it is shown


class Lost(Ideal):
    """Everything is NaN."""

    name = "lost"

    def prepare(self, inputs):
        right = super().prepare(inputs)
        return lambda: Outputs(torch.full_like(right().out, torch.nan))


def test_what_is_nan_everywhere_is_explained_by_no_model():
    lost = told(Lost(), PLAIN)
    assert (lost.level, lost.ranked) == ("family", ())
    assert lost.facts[0].startswith("every element of out is NaN on finite inputs: look for")
