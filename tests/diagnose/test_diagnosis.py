"""What a Record says may be wrong: of comparisons, probes and relations; of nothing else."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
import torch
from tests.diagnose.told import WAVY, told_record
from tests.planted_kernels.outputs_given import spoiled

from attncheck.core.mod_spec import Spec
from attncheck.diagnose import diagnosis
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
from attncheck.inputs.problem import Case, Problem
from attncheck.judge.fault_explanation import FaultExplanation, count_ties
from attncheck.records.record import Diagnosis, Record
from attncheck.reporting.diagnosis_text import diagnosis_text
from attncheck.subjects.ideal import Ideal
from attncheck.verify.question_fit import allowed_parameters
from attncheck.verify.run_case import run_case

pytestmark = pytest.mark.usefixtures("shared_evidence")

CAUSAL = Problem(query=40, kv=40, heads=2, head_dim=32, dtype="fp16", mask=Spec.of("causal"))


class OneKeyWider(Ideal):
    name = "one-key-wider"

    def visible(self, mask, at):
        later = dataclasses.replace(at, q_idx=at.q_idx + 1)
        return super().visible(mask, later)


def test_a_comparison_is_diagnosed():
    record = told_record(OneKeyWider(), Case(problem=CAUSAL))
    assert isinstance(record.diagnosis, Diagnosis)
    first = record.diagnosis.ranked[0]
    assert first.model == "mask-one-key-wider"
    assert first.explains_all
    assert record.diagnosis.tied == 1
    text = diagnosis_text(record, kernel="mine")
    assert "likely     the causal mask is one key too wide: row i sees key i + 1 (explains" in text


def test_the_tiles_of_the_diagonal_are_shown():
    record = told_record(OneKeyWider(), Case(problem=CAUSAL.replace(query=64, kv=64, head_dim=64)))
    tiles = record.diagnosis.tiles
    for row, line in enumerate(tiles.values):
        largest = max(range(len(line)), key=line.__getitem__)
        # Of the last row there is no next key: nothing is wrong with it.
        assert line[largest] == 0 or abs(largest * tiles.keys - row * tiles.rows) <= tiles.keys
    assert "tiles" in diagnosis_text(record, kernel="mine")


@pytest.mark.parametrize("question", ["decode", "future_keys"])
def test_probes_and_relations_are(question):
    chosen = {name: values[0] for name, values in allowed_parameters(question, CAUSAL).items()}
    record = told_record(OneKeyWider(), Case(problem=CAUSAL, question=question, parameters=chosen))
    assert record.status == "fail"
    assert "mask-one-key-wider" in [one.model for one in record.diagnosis.ranked]


def test_a_right_answer_is_not():
    record = run_case(Ideal(), Case(problem=CAUSAL), device="cpu")
    assert record.status == "pass"
    record = diagnose_failure(record, Ideal(), device="cpu")
    assert record.diagnosis is msgspec.UNSET


def test_what_no_model_explains_is_said_so():
    record = told_record(WAVY, Case(problem=CAUSAL))
    assert record.status == "fail"
    assert record.diagnosis.ranked == ()
    text = diagnosis_text(record, kernel="mine")
    assert f"unknown: none of {record.diagnosis.tried} fault models fits" in text


@pytest.mark.parametrize(
    "large",
    [CAUSAL.replace(query=2048, kv=2048, heads=2), CAUSAL.replace(query=1, kv=2, batch=4097)],
    ids=["pairs", "heads"],
)
def test_large_problems_are_left_out(large):
    pairs = large.batch * large.heads * large.query * large.kv
    assert pairs > LARGEST_DIAGNOSED or large.batch > large.query * large.kv
    record = run_case(OneKeyWider(), Case(problem=CAUSAL), device="cpu")
    asked = msgspec.structs.replace(record, case=Case(problem=large).to_json())
    assert explain_failure(asked, OneKeyWider(), device="cpu") is None


def test_of_a_longer_problem_some_rows_are_predicted():
    longer = CAUSAL.replace(query=500, kv=500)
    record = told_record(OneKeyWider(), Case(problem=longer))
    assert record.diagnosis.ranked[0].model == "mask-one-key-wider"


def test_two_failures_are_explained_together():
    small = Case(problem=CAUSAL.replace(query=1, kv=2, heads=1, kv_heads=1))
    kernel = OneKeyWider()
    alone = told_record(kernel, small)
    larger = explain_failure(
        run_case(kernel, Case(problem=CAUSAL), device="cpu"), kernel, device="cpu"
    )
    together = diagnose_failure(alone, kernel, device="cpu", before=larger)
    assert together.diagnosis.problems > 2  # both, and what is asked to confirm it
    assert together.diagnosis.ranked[0].model == "mask-one-key-wider"


def test_nobody_is_told_of_what_the_problem_does_not_have():
    """Of any model, where it explains a larger problem and not the one that is shown."""
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


def test_what_explains_one_failure_is_tried_alone_on_the_next():
    search = CauseSearch(most=1)
    explained = [
        search.diagnose(
            run_case(OneKeyWider(), Case(problem=one), device="cpu"), OneKeyWider(), device="cpu"
        )
        for one in (CAUSAL, CAUSAL.replace(seed=1), CAUSAL.replace(query=17, kv=33))
    ]
    assert [one.diagnosis.ranked[0].model for one in explained] == ["mask-one-key-wider"] * 3
    assert [one.diagnosis.tried for one in explained[1:]] == [1, 1]
    # Of what it does not explain nothing is said, and no more than so many are looked into.
    other = run_case(WAVY, Case(problem=CAUSAL), device="cpu")
    assert search.diagnose(other, WAVY, device="cpu").diagnosis is msgspec.UNSET
    known = ["mask-one-key-wider", "mask-ignored"]
    assert explained_by(other, known, WAVY, device="cpu") is None


def test_all_models_are_tried_once_on_a_kind_of_failure_that_none_explains(monkeypatch):
    tried = []

    def count(record, *_, **__):
        tried.append(record.case_id)
        return diagnose_failure(record, WAVY, device="cpu")

    monkeypatch.setattr(diagnosis, "diagnose_failure", count)
    search = CauseSearch()
    for problem in (CAUSAL, CAUSAL.replace(seed=1), CAUSAL.replace(dtype="bf16")):
        record = run_case(WAVY, Case(problem=problem), device="cpu")
        search.diagnose(record, WAVY, device="cpu")
    assert len(tried) == 2


def test_a_cause_that_is_found_late_is_tried_on_the_failures_before_it(monkeypatch):
    def find_nothing_at_first(record, *rest, **where):
        return record if record is records[0] else diagnose_failure(record, *rest, **where)

    monkeypatch.setattr(diagnosis, "diagnose_failure", find_nothing_at_first)
    cases = [Case(problem=CAUSAL.replace(dtype=dtype)) for dtype in ("fp16", "bf16")]
    records = [run_case(OneKeyWider(), case, device="cpu") for case in cases]
    found = CauseSearch().diagnose_all(records, OneKeyWider(), device="cpu", first=records[0])
    assert [one.diagnosis.ranked[0].model for one in found] == ["mask-one-key-wider"] * 2
    assert found[0].diagnosis.tried == 1


def test_what_one_row_cannot_tell_apart_a_larger_problem_does():
    two_keys = Case(problem=CAUSAL.replace(query=1, kv=2, heads=1, kv_heads=1))
    small = explain_failure(
        run_case(OneKeyWider(), two_keys, device="cpu"), OneKeyWider(), device="cpu"
    )
    tied = [one.name for one in small.ranking[: count_ties(small.ranking)]]
    assert {"mask-one-key-wider", "mask-ignored"} <= set(tied)
    found = told_record(OneKeyWider(), two_keys).diagnosis
    assert [one.model for one in found.ranked[: found.tied]] == ["mask-one-key-wider"]
    assert found.problems > 1


def unwritten(_, right):
    """Rows that see no key are what the memory held."""
    dead = right.lse == -torch.inf
    out = torch.where(dead[..., None], torch.empty_like(right.out), right.out)
    return dataclasses.replace(right, out=out, lse=right.lse.where(~dead, torch.empty(())))


def test_what_is_never_written_is_told_from_nan():
    late = CAUSAL.replace(query=45, kv=20, mask=Spec.of("causal_bottom_right"))
    record = run_case(spoiled(unwritten), Case(problem=late), device="cpu")
    failed = msgspec.structs.replace(record, status="fail")  # what lay there may have been right
    found = explain_failure(failed, spoiled(unwritten), device="cpu").ranking
    assert [one.name for one in found[: count_ties(found)]] == ["rows-unwritten"]


class NowAndThen(OneKeyWider):
    """Every third call."""

    name = "now-and-then"
    calls = 0

    def visible(self, mask, at):
        return OneKeyWider.visible(self, mask, at) if self.bad else Ideal.visible(self, mask, at)

    def prepare(self, inputs):
        self.calls += 1
        self.bad = self.calls % 3 == 0
        return super().prepare(inputs)


def test_a_kernel_that_is_wrong_now_and_then_is_called_until_it_is():
    kernel = NowAndThen()
    record = run_case(kernel, Case(problem=CAUSAL), device="cpu")
    assert record.status == "pass"
    kernel.calls = 0
    found = explain_failure(msgspec.structs.replace(record, status="fail"), kernel, device="cpu")
    assert found.ranking[0].name == "mask-one-key-wider"


def test_a_record_with_a_diagnosis_is_read_as_it_was_written():
    record = told_record(OneKeyWider(), Case(problem=CAUSAL))
    assert msgspec.json.decode(msgspec.json.encode(record), type=Record) == record
