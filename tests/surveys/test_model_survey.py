"""``attncheck model`` locates a faulty kernel in a transformer, and passes a right one."""

import sys
from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace

import pytest
import torch

from attncheck import oracles
from attncheck.core.errors import UsageError
from attncheck.inputs import recording_file
from attncheck.inputs.problem import Case
from attncheck.records.failures import find_reproduction
from attncheck.subjects.ideal import Ideal
from attncheck.subjects.torch_kernels import Sdpa
from attncheck.surveys import model_survey, swapped_model
from attncheck.surveys.model_survey import _distances, drift_chance, right_tilings, survey_model
from attncheck.surveys.swapped_model import SHAPES, ModelSize, draw_tokens, make_model, run_model
from attncheck.verify.environment import prepare
from attncheck.verify.executor import InProcess
from attncheck.verify.run_case import run_case

pytest.importorskip("transformers", reason="the extra `model` is not installed")

SMALL = ModelSize(layers=2, length=24, batch=1, steps=2)
LAYER, HEAD, ROW = 1, 1, 7


pytestmark = pytest.mark.usefixtures("library_as_before")  # recordings register distributions


@pytest.fixture(scope="module", autouse=True)
def interpreted():
    prepare("cpu")


class WrongAtOneCall(Ideal):
    """The ideal kernel, except for one row of its second call."""

    name = "wrong at one call"

    def __init__(self):
        super().__init__()
        self.calls = 0

    def prepare(self, inputs):
        call, number = super().prepare(inputs), self.calls
        self.calls += 1

        def wrong():
            outputs = call()
            if number == LAYER:
                outputs.out[:, HEAD, ROW] *= 2
            return outputs

        return wrong


class WrongWindowBackward(Ideal):
    """The ideal kernel, except that dV is halved where there is a window."""

    name = "wrong backward"

    def prepare(self, inputs):
        call = super().prepare(inputs)

        def wrong():
            outputs = call()
            if outputs.dv is None or inputs.problem.mask.name != "sliding_window":
                return outputs
            return replace(outputs, dv=outputs.dv / 2)

        return wrong


def survey(kernel, folder, spec="llama", size=SMALL, right=2, baselines=()):
    host = SimpleNamespace(subject=kernel, executor=InProcess())
    return list(
        survey_model(spec, size, {kernel.name: host}, [*baselines], right=right, folder=folder)
    )


@pytest.mark.parametrize("spec", SHAPES)
def test_fault_in_one_layer_is_located_and_recorded(spec, tmp_path):
    (record,) = survey(WrongAtOneCall(), tmp_path / "failures", spec)
    fault = record.fault
    assert record.status == "fail"
    assert (fault.layer, fault.step, fault.backward) == (LAYER, 0, False)
    assert (fault.head, fault.position) == (HEAD, ROW)
    assert f".{LAYER}." in fault.module
    assert [call.failed for call in record.calls] == [0, 1]
    assert fault.again is False  # it depends on the previous calls
    # The failing call is saved, and a right kernel passes on it.
    (recording,) = recording_file.load(tmp_path / "failures" / fault.recording)
    saved = find_reproduction(fault.id, tmp_path)
    problem = recording.problem()
    assert Case.from_json(saved.case).problem == problem
    assert problem.sink == (spec == "gpt-oss")
    assert (problem.score.name == "softcap") == (spec == "gemma")
    assert run_case(Ideal(), Case(problem=problem), device="cpu", brief=True).status == "pass"


def test_fault_of_a_backward_is_located_by_layer(tmp_path):
    (record,) = survey(WrongWindowBackward(), tmp_path, "gemma")
    assert (record.fault.layer, record.fault.backward) == (0, True)
    assert [call.failed for call in record.calls] == [1, 0]  # the second layer has no window
    (recording,) = recording_file.load(tmp_path / record.fault.recording)
    assert run_case(Ideal(), Case(problem=recording.problem()), device="cpu").status == "pass"


def test_right_kernel_passes_beside_other_kernels(tmp_path):
    # One of the tilings it is compared with, so it cannot be further away than all of them.
    kernel = Ideal(right_tilings(SMALL.length, 1)[0])
    records = survey(kernel, tmp_path, "mistral", baselines=[Sdpa("math")])
    assert [(record.kernel, record.for_comparison, record.status) for record in records] == [
        ("ideal", False, "pass"),
        ("sdpa-math", True, "pass"),
    ]
    mine = records[0]
    assert mine.fault is None
    assert mine.chance > 1 / 3
    assert not list(tmp_path.iterdir())
    # The prompt, two steps and a backward.
    assert [(call.calls, call.failed) for call in mine.calls] == [(4, 0)] * 2
    assert {drift.phase for drift in mine.drifts} == {"prefill", "decode", "training"}
    assert mine.gradient_norm == pytest.approx(mine.exact_norm, rel=torch.finfo(torch.bfloat16).eps)


def test_unsupported_model_is_not_a_fault(tmp_path):
    (record,) = survey(Sdpa("math"), tmp_path, "gemma")
    assert (record.status, record.drifts) == ("unsupported", ())
    assert "takes no score mod" in record.reason


def test_exact_model_never_rounds_to_fp32():
    size = replace(SMALL, dtype="fp32")
    model = make_model("gpt-oss", size)
    prompt = draw_tokens(model, size)

    def run(oracle, model, *, exact):
        return run_model(model, prompt, lambda _, inputs: oracle(inputs), steps=2, exact=exact)

    double = swapped_model.exact_model(model)
    exact = run(oracles.truth, double, exact=True)
    fp32 = _distances(run(Ideal().run, model, exact=False), exact)
    # About fp32's roundings, and not 0: if the exact model rounded too, both would agree.
    eps = torch.finfo(torch.float32).eps
    assert all(0 < fp32[place] < 2**6 * eps for place in fp32 if place[1] != "KL")
    rounded = [state for states in exact.states.values() for state in states]
    assert not any(torch.equal(state, state.float().double()) for state in rounded)


def test_drift_chance_is_the_rank_among_right_kernels():
    place = ("prefill", "logits")
    for order in permutations([1.0, 1.5, 2.0, 4.0]):
        mine, *right = ({place: distance} for distance in order)
        larger = sum(other[place] >= mine[place] for other in right)
        assert drift_chance(mine, right) == (larger + 1) / 4
    assert drift_chance({place: float("nan")}, [{place: 1.0}] * 3) == 1 / 4
    assert drift_chance({place: 1.0}, [{place: 1.0}] * 3) == 1


def test_right_tilings_are_all_different():
    assert len(set(right_tilings(48, 25))) == 25


def test_model_is_loaded_from_a_folder(tmp_path):
    model = make_model("llama", SMALL)
    model.save_pretrained(tmp_path)
    loaded = make_model(str(tmp_path), SMALL)
    assert all(map(torch.equal, model.parameters(), loaded.parameters()))
    (tmp_path / "model.safetensors").unlink()  # only the config is left: random weights
    from_config = make_model(str(tmp_path), SMALL)
    assert [parameter.shape for parameter in from_config.parameters()] == [
        parameter.shape for parameter in model.parameters()
    ]


@pytest.mark.parametrize(
    ("spec", "size", "message"),
    [
        ("lama", SMALL, "model 'lama' is not known: did you mean 'llama'?"),
        ("some/folder", SMALL, "is no folder with a config.json"),
        ("llama", replace(SMALL, hidden=40), "--hidden 40 must be a multiple of 32"),
    ],
)
def test_make_model_rejects_unknown_models_and_sizes(spec, size, message):
    with pytest.raises(UsageError, match=message.replace("?", r"\?")):
        make_model(spec, size)


def test_invalid_model_config_is_a_one_line_error(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    with pytest.raises(UsageError, match=r"^model .* cannot be loaded: .*hidden_size.*$") as error:
        make_model(str(tmp_path), SMALL)
    assert "\n" not in str(error.value)


def test_missing_transformers_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"pip install 'attncheck\[model\]'"):
        make_model("llama", SMALL)


def test_prompt_that_would_take_hours_is_rejected_before_the_model_runs(tmp_path, monkeypatch):
    model = make_model("llama", SMALL)
    monkeypatch.setattr(model_survey, "make_model", lambda *_: model)
    long = replace(SMALL, length=10**6)
    with pytest.raises(UsageError, match="exact result would take some"):
        list(survey_model("llama", long, {}, [], right=2, folder=tmp_path))


def test_model_whose_attention_is_not_swapped_is_rejected(tmp_path, monkeypatch):
    model = make_model("llama", SMALL)
    model.config._attn_implementation = "sdpa"
    monkeypatch.setattr(model_survey, "make_model", lambda *_: model)
    with pytest.raises(UsageError, match="none of its attention goes through"):
        survey(Ideal(), tmp_path)


def test_raising_kernel_is_an_error_with_its_layer_and_step(tmp_path):
    class Raises(Ideal):
        name = "raises"

        def prepare(self, inputs):
            if inputs.problem.query == 1:
                raise RuntimeError("no single rows")
            return super().prepare(inputs)

    (record,) = survey(Raises(), tmp_path)
    assert record.status == "error"
    assert (record.fault.layer, record.fault.step, record.fault.head) == (0, 1, None)
    assert "no single rows" in record.fault.reason
