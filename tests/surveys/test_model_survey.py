"""A kernel in a whole transformer: found where it is wrong, and let pass where it is right."""

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


pytestmark = pytest.mark.usefixtures("library_as_before")  # its recordings are distributions


@pytest.fixture(scope="module", autouse=True)
def interpreted():
    prepare("cpu")


class AtOneCall(Ideal):
    """The ideal kernel, but for one row of its second call."""

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


class BackwardOfWindows(Ideal):
    """The ideal kernel, but its dV is half as large where there is a window."""

    name = "wrong backward"

    def prepare(self, inputs):
        call = super().prepare(inputs)

        def wrong():
            outputs = call()
            if outputs.dv is None or inputs.problem.mask.name != "sliding_window":
                return outputs
            return replace(outputs, dv=outputs.dv / 2)

        return wrong


def records(kernel, folder, spec="llama", size=SMALL, right=2, beside=()):
    host = SimpleNamespace(subject=kernel, executor=InProcess())
    return list(
        survey_model(spec, size, {kernel.name: host}, [*beside], right=right, folder=folder)
    )


@pytest.mark.parametrize("spec", SHAPES)
def test_a_fault_in_one_layer_is_found_there(spec, tmp_path):
    (record,) = records(AtOneCall(), tmp_path / "failures", spec)
    fault = record.fault
    assert record.status == "fail"
    assert (fault.layer, fault.step, fault.backward) == (LAYER, 0, False)
    assert (fault.head, fault.position) == (HEAD, ROW)
    assert f".{LAYER}." in fault.module
    assert [call.failed for call in record.calls] == [0, 1]
    assert fault.again is False  # it depends on the calls before
    # The very call is kept, and a right kernel answers it rightly.
    (recording,) = recording_file.load(tmp_path / "failures" / fault.recording)
    kept = find_reproduction(fault.id, tmp_path)
    problem = recording.problem()
    assert Case.from_json(kept.case).problem == problem
    assert problem.sink == (spec == "gpt-oss")
    assert (problem.score.name == "softcap") == (spec == "gemma")
    assert run_case(Ideal(), Case(problem=problem), device="cpu", brief=True).status == "pass"


def test_a_backward_is_judged_layer_by_layer(tmp_path):
    (record,) = records(BackwardOfWindows(), tmp_path, "gemma")
    assert (record.fault.layer, record.fault.backward) == (0, True)
    assert [call.failed for call in record.calls] == [1, 0]  # the second layer has no window
    (recording,) = recording_file.load(tmp_path / record.fault.recording)
    assert run_case(Ideal(), Case(problem=recording.problem()), device="cpu").status == "pass"


def test_a_right_kernel_passes_beside_others(tmp_path):
    # One of those that it is compared with: it cannot be further than all of them.
    kernel = Ideal(right_tilings(SMALL.length, 1)[0])
    found = records(kernel, tmp_path, "mistral", beside=[Sdpa("math")])
    assert [(one.kernel, one.for_comparison, one.status) for one in found] == [
        ("ideal", False, "pass"),
        ("sdpa-math", True, "pass"),
    ]
    mine = found[0]
    assert mine.fault is None
    assert mine.chance > 1 / 3
    assert not list(tmp_path.iterdir())
    # The prompt, two steps and a backward.
    assert [(call.calls, call.failed) for call in mine.calls] == [(4, 0)] * 2
    assert {drift.phase for drift in mine.drifts} == {"prefill", "decode", "training"}
    assert mine.gradient_norm == pytest.approx(mine.exact_norm, rel=torch.finfo(torch.bfloat16).eps)


def test_what_a_kernel_does_not_take_is_no_fault(tmp_path):
    (record,) = records(Sdpa("math"), tmp_path, "gemma")
    assert (record.status, record.drifts) == ("unsupported", ())
    assert "takes no score mod" in record.reason


def test_nothing_in_the_exact_model_is_rounded_to_fp32():
    size = replace(SMALL, dtype="fp32")
    model = make_model("gpt-oss", size)
    prompt = draw_tokens(model, size)

    def run(oracle, model, *, exact):
        return run_model(model, prompt, lambda _, inputs: oracle(inputs), steps=2, exact=exact)

    double = swapped_model.exact_model(model)
    exact = run(oracles.truth, double, exact=True)
    fp32 = _distances(run(Ideal().run, model, exact=False), exact)
    # As far as fp32 rounds, and not exact: were the exact one rounded too, both would agree.
    eps = torch.finfo(torch.float32).eps
    assert all(0 < fp32[place] < 2**6 * eps for place in fp32 if place[1] != "KL")
    rounded = [one for states in exact.states.values() for one in states]
    assert not any(torch.equal(one, one.float().double()) for one in rounded)


def test_a_chance_is_the_place_in_the_order():
    place = ("prefill", "logits")
    for order in permutations([1.0, 1.5, 2.0, 4.0]):
        mine, *right = ({place: distance} for distance in order)
        larger = sum(other[place] >= mine[place] for other in right)
        assert drift_chance(mine, right) == (larger + 1) / 4
    assert drift_chance({place: float("nan")}, [{place: 1.0}] * 3) == 1 / 4
    assert drift_chance({place: 1.0}, [{place: 1.0}] * 3) == 1


def test_right_kernels_differ():
    assert len(set(right_tilings(48, 25))) == 25


def test_a_model_of_a_folder_is_read_from_it(tmp_path):
    model = make_model("llama", SMALL)
    model.save_pretrained(tmp_path)
    read = make_model(str(tmp_path), SMALL)
    assert all(map(torch.equal, model.parameters(), read.parameters()))
    (tmp_path / "model.safetensors").unlink()  # its config alone: random weights
    again = make_model(str(tmp_path), SMALL)
    assert [one.shape for one in again.parameters()] == [one.shape for one in model.parameters()]


@pytest.mark.parametrize(
    ("spec", "size", "said"),
    [
        ("lama", SMALL, "model 'lama' is not known: did you mean 'llama'?"),
        ("some/folder", SMALL, "is no folder with a config.json"),
        ("llama", replace(SMALL, hidden=40), "--hidden 40 must be a multiple of 32"),
    ],
)
def test_a_model_that_is_none(spec, size, said):
    with pytest.raises(UsageError, match=said.replace("?", r"\?")):
        make_model(spec, size)


def test_what_is_wrong_in_a_config_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    with pytest.raises(UsageError, match=r"^model .* cannot be loaded: .*hidden_size.*$") as told:
        make_model(str(tmp_path), SMALL)
    assert "\n" not in str(told.value)


def test_without_transformers_it_is_said_how_to_have_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"pip install 'attncheck\[model\]'"):
        make_model("llama", SMALL)


def test_a_prompt_of_hours_is_refused_before_the_model_runs(tmp_path, monkeypatch):
    made = make_model("llama", SMALL)
    monkeypatch.setattr(model_survey, "make_model", lambda *_: made)
    long = replace(SMALL, length=10**6)
    with pytest.raises(UsageError, match="exact result would take some"):
        list(survey_model("llama", long, {}, [], right=2, folder=tmp_path))


def test_attention_that_is_not_swapped_is_no_pass(tmp_path, monkeypatch):
    made = make_model("llama", SMALL)
    made.config._attn_implementation = "sdpa"
    monkeypatch.setattr(model_survey, "make_model", lambda *_: made)
    with pytest.raises(UsageError, match="none of its attention goes through"):
        records(Ideal(), tmp_path)


def test_a_kernel_that_raises_is_told_with_its_layer(tmp_path):
    class Raises(Ideal):
        name = "raises"

        def prepare(self, inputs):
            if inputs.problem.query == 1:
                raise RuntimeError("no single rows")
            return super().prepare(inputs)

    (record,) = records(Raises(), tmp_path)
    assert record.status == "error"
    assert (record.fault.layer, record.fault.step, record.fault.head) == (0, 1, None)
    assert "no single rows" in record.fault.reason
