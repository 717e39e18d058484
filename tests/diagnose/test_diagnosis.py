"""Diagnoses of failed Records, and the search for causes over the failures of a run."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
import torch
from tests.diagnose.helpers import WAVY, diagnose_record
from tests.planted_kernels.other_steps import stepping
from tests.planted_kernels.outputs_given import spoiled

from attncheck.core.mod_spec import Spec
from attncheck.diagnose import diagnosis as diagnosis_module
from attncheck.diagnose.diagnosis import (
    CauseSearch,
    _as_diagnosis,
    diagnose_failure,
    explain_failure,
    explained_by,
)
from attncheck.diagnose.explanations import Findings
from attncheck.diagnose.failing_kernel import LARGEST_DIAGNOSED
from attncheck.fault_models import FAULT_MODELS
from attncheck.fault_models.steps import steps_with_masks
from attncheck.inputs.problem import Case, Problem
from attncheck.judge.fault_explanation import FaultExplanation, count_ties
from attncheck.records.record import Diagnosis, Record
from attncheck.reporting.diagnosis_text import diagnosis_text
from attncheck.subjects.ideal import Ideal
from attncheck.verify.question_fit import question_named
from attncheck.verify.run_case import run_case

pytestmark = pytest.mark.usefixtures("shared_evidence")

CAUSAL = Problem(query=40, kv=40, heads=2, head_dim=32, dtype="fp16", mask=Spec.of("causal"))


class OneKeyWider(Ideal):
    name = "one-key-wider"

    def visible(self, mask, at):
        later = dataclasses.replace(at, q_idx=at.q_idx + 1)
        return super().visible(mask, later)


def test_failed_comparison_is_diagnosed():
    record = diagnose_record(OneKeyWider(), CAUSAL)
    assert isinstance(record.diagnosis, Diagnosis)
    first = record.diagnosis.ranked[0]
    assert first.model == "mask-one-key-wider"
    assert first.explains_all
    assert record.diagnosis.tied == 1
    text = diagnosis_text(record, kernel="mine")
    assert "likely     the causal mask is one key too wide: row i sees key i + 1 (explains" in text


def test_error_tiles_lie_along_the_diagonal():
    record = diagnose_record(OneKeyWider(), CAUSAL.replace(query=64, kv=64, head_dim=64))
    tiles = record.diagnosis.tiles
    for row, line in enumerate(tiles.values):
        largest = max(range(len(line)), key=line.__getitem__)
        # The last row has no next key, so that nothing is wrong with it.
        assert line[largest] == 0 or abs(largest * tiles.keys - row * tiles.rows) <= tiles.keys
    assert "tiles" in diagnosis_text(record, kernel="mine")


@pytest.mark.parametrize("question", ["decode", "future_keys"])
def test_failed_probe_or_relation_is_diagnosed(question):
    parameters = {
        name: values[0] for name, values in question_named(question).allowed(CAUSAL).items()
    }
    case = Case(problem=CAUSAL, question=question, parameters=parameters)
    record = diagnose_record(OneKeyWider(), case)
    assert "mask-one-key-wider" in [one.model for one in record.diagnosis.ranked]


def test_passed_record_is_not_diagnosed():
    record = run_case(Ideal(), Case(problem=CAUSAL), device="cpu")
    assert record.status == "pass"
    record = diagnose_failure(record, Ideal(), device="cpu")
    assert record.diagnosis is msgspec.UNSET


def test_unexplained_failure_is_reported_as_unknown():
    record = diagnose_record(WAVY, CAUSAL)
    diagnosis = record.diagnosis
    assert (diagnosis.level, diagnosis.ranked, diagnosis.family) == ("unknown", (), "")
    assert any("wrong as well without the mask" in fact for fact in diagnosis.facts)
    text = diagnosis_text(record, kernel="mine")
    assert f"unknown: none of {diagnosis.tried} fault models fits" in text


@pytest.mark.parametrize(
    "large",
    [CAUSAL.replace(query=2048, kv=2048, heads=2), CAUSAL.replace(query=1, kv=2, batch=4097)],
    ids=["pairs", "heads"],
)
def test_large_problem_is_not_explained(large):
    pairs = large.batch * large.heads * large.query * large.kv
    assert pairs > LARGEST_DIAGNOSED or large.batch > large.query * large.kv
    record = run_case(OneKeyWider(), Case(problem=CAUSAL), device="cpu")
    failed = msgspec.structs.replace(record, case=Case(problem=large).to_json())
    assert explain_failure(failed, OneKeyWider(), device="cpu") is None


def test_longer_problem_is_diagnosed_from_some_rows():
    longer = CAUSAL.replace(query=500, kv=500)
    record = diagnose_record(OneKeyWider(), longer)
    assert record.diagnosis.ranked[0].model == "mask-one-key-wider"


def test_two_failures_are_explained_together():
    small = Case(problem=CAUSAL.replace(query=1, kv=2, heads=1, kv_heads=1))
    kernel = OneKeyWider()
    alone = diagnose_record(kernel, small)
    larger = explain_failure(
        run_case(kernel, Case(problem=CAUSAL), device="cpu"), kernel, device="cpu"
    )
    together = diagnose_failure(alone, kernel, device="cpu", before=larger)
    assert together.diagnosis.problems > 2  # both failures, and the problems that confirm the cause
    assert together.diagnosis.ranked[0].model == "mask-one-key-wider"


WINDOW = CAUSAL.replace(mask=Spec.of("sliding_window", window=50), query=33, kv=75)


@pytest.mark.parametrize(
    ("left", "right", "model"),
    [(1, 0, "window-between-corners"), (0, 1, "mask-bottom-right"), (1, 1, "mask-bottom-right")],
)
def test_edge_of_a_window_that_is_aligned_at_the_bottom_right_is_named(left, right, model):
    def build(values, dims, _device):
        late = dims.kv - dims.query
        return lambda _b, _h, i, j: (
            (i + left * late - j < values["window"]) & (i + right * late >= j)
        )

    kernel = stepping(steps=steps_with_masks({"sliding_window": build}))
    diagnosis = diagnose_record(kernel, WINDOW).diagnosis
    assert (diagnosis.level, diagnosis.tied) == ("named", 1)
    assert diagnosis.ranked[0].model == model
    # Nothing declares the corner of a mask that is written out, for a function without a flag.
    advice = 'If its causal flag means that, causal = "bottom_right" in the configuration'
    assert (advice in diagnosis.ranked[0].sentence) == (model == "mask-bottom-right")


def test_models_of_absent_features_are_not_reported():
    """Even where such a model explains a larger problem, and not the one that is reported."""
    plain = Problem(query=3, kv=3, head_dim=16, dtype="fp16")
    record = run_case(WAVY, Case(problem=plain), device="cpu")
    absent = [name for name, model in FAULT_MODELS.items() if not model.applies(plain)]
    assert len(absent) > 50
    ranking = [FaultExplanation(name=name, share=1.0, all=True, unexplained=0.0) for name in absent]
    before = Findings(ranking=ranking, tried=1, tiles=None, finite=True)
    assert diagnose_failure(record, WAVY, device="cpu", before=before).diagnosis.ranked == ()
    for one in ranking:
        assert _as_diagnosis([one], before, plain).ranked == ()
        assert _as_diagnosis([one], before, CAUSAL).ranked or not FAULT_MODELS[one.name].applies(
            CAUSAL
        )


def test_known_cause_is_the_only_one_tried_on_next_failure():
    search = CauseSearch(most=1)
    failures = [
        search.diagnose(
            run_case(OneKeyWider(), Case(problem=one), device="cpu"), OneKeyWider(), device="cpu"
        )
        for one in (CAUSAL, CAUSAL.replace(seed=1), CAUSAL.replace(query=17, kv=33))
    ]
    assert [one.diagnosis.ranked[0].model for one in failures] == ["mask-one-key-wider"] * 3
    assert [one.diagnosis.tried for one in failures[1:]] == [1, 1]
    # A failure that it does not explain stays undiagnosed after ``most`` searches.
    other = run_case(WAVY, Case(problem=CAUSAL), device="cpu")
    assert search.diagnose(other, WAVY, device="cpu").diagnosis is msgspec.UNSET
    known = ["mask-one-key-wider", "mask-ignored"]
    assert explained_by(other, known, WAVY, device="cpu") is None


def test_unexplained_kind_of_failure_is_searched_only_once(monkeypatch):
    tried = []

    def count(record, *_, **__):
        tried.append(record.case_id)
        return diagnose_failure(record, WAVY, device="cpu")

    monkeypatch.setattr(diagnosis_module, "diagnose_failure", count)
    search = CauseSearch()
    for problem in (CAUSAL, CAUSAL.replace(seed=1), CAUSAL.replace(dtype="bf16")):
        record = run_case(WAVY, Case(problem=problem), device="cpu")
        search.diagnose(record, WAVY, device="cpu")
    assert len(tried) == 2


def test_cause_found_late_is_tried_on_earlier_failures(monkeypatch):
    def find_nothing_at_first(record, *rest, **where):
        return record if record is records[0] else diagnose_failure(record, *rest, **where)

    monkeypatch.setattr(diagnosis_module, "diagnose_failure", find_nothing_at_first)
    cases = [Case(problem=CAUSAL.replace(dtype=dtype)) for dtype in ("fp16", "bf16")]
    records = [run_case(OneKeyWider(), case, device="cpu") for case in cases]
    diagnosed = CauseSearch().diagnose_all(records, OneKeyWider(), device="cpu", first=records[0])
    assert [one.diagnosis.ranked[0].model for one in diagnosed] == ["mask-one-key-wider"] * 2
    assert diagnosed[0].diagnosis.tried == 1


def test_larger_problem_breaks_tie_of_models():
    two_keys = Case(problem=CAUSAL.replace(query=1, kv=2, heads=1, kv_heads=1))
    small = explain_failure(
        run_case(OneKeyWider(), two_keys, device="cpu"), OneKeyWider(), device="cpu"
    )
    tied = [one.name for one in small.ranking[: count_ties(small.ranking)]]
    assert {"mask-one-key-wider", "mask-ignored"} <= set(tied)
    diagnosis = diagnose_record(OneKeyWider(), two_keys).diagnosis
    assert [one.model for one in diagnosis.ranked[: diagnosis.tied]] == ["mask-one-key-wider"]
    assert diagnosis.problems > 1


def leave_empty_rows_unwritten(_, right):
    """Rows that see no key keep what the memory held."""
    dead = right.lse == -torch.inf
    out = torch.where(dead[..., None], torch.empty_like(right.out), right.out)
    return dataclasses.replace(right, out=out, lse=right.lse.where(~dead, torch.empty(())))


def test_unwritten_rows_are_distinguished_from_nan():
    late = CAUSAL.replace(query=45, kv=20, mask=Spec.of("causal_bottom_right"))
    record = run_case(spoiled(leave_empty_rows_unwritten), Case(problem=late), device="cpu")
    # The memory may have held the right numbers.
    failed = msgspec.structs.replace(record, status="fail")
    ranking = explain_failure(failed, spoiled(leave_empty_rows_unwritten), device="cpu").ranking
    assert [one.name for one in ranking[: count_ties(ranking)]] == ["rows-unwritten"]


class EveryThirdCall(OneKeyWider):
    """Wrong in every third call."""

    name = "now-and-then"
    calls = 0

    def visible(self, mask, at):
        return OneKeyWider.visible(self, mask, at) if self.bad else Ideal.visible(self, mask, at)

    def prepare(self, inputs):
        self.calls += 1
        self.bad = self.calls % 3 == 0
        return super().prepare(inputs)


def test_intermittent_kernel_is_called_until_it_fails():
    kernel = EveryThirdCall()
    record = run_case(kernel, Case(problem=CAUSAL), device="cpu")
    assert record.status == "pass"
    kernel.calls = 0
    findings = explain_failure(msgspec.structs.replace(record, status="fail"), kernel, device="cpu")
    assert findings.ranking[0].name == "mask-one-key-wider"


def test_record_with_diagnosis_survives_json():
    record = diagnose_record(OneKeyWider(), CAUSAL)
    assert msgspec.json.decode(msgspec.json.encode(record), type=Record) == record
