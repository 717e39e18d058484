"""Signs, found without a fault model: calls that differ, and batches that change the result."""

from __future__ import annotations

import dataclasses
import itertools

import msgspec
import pytest
import torch
from tests.diagnose.helpers import diagnose_record
from tests.planted_kernels.outputs_given import spoiled

from attncheck.core.mod_spec import Spec
from attncheck.diagnose import diagnosis as diagnosis_module
from attncheck.fault_models.fault_model import SIGNS
from attncheck.inputs.problem import Case, Problem
from attncheck.reporting.diagnosis_text import diagnosis_text
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal

SMALL = Problem(query=9, kv=9, head_dim=16, dtype="fp16")
BATCH = Problem(batch=2, query=1, kv=129, dtype="bf16")


class Wavy(Ideal):
    """An error that no model predicts, in the calls whose number is ``wrong``."""

    name = "wavy"
    calls: itertools.count

    def __init__(self, wrong=lambda number: number == 0):
        super().__init__()
        self.calls, self.wrong = itertools.count(), wrong

    def normalised(self, out, total):
        wave = torch.arange(out.numel()).view(out.shape).sin()
        return super().normalised(out, total) + wave * self.wrong(next(self.calls))


class Sharing(Ideal):
    """Its tiles depend on the batch size."""

    name = "sharing"

    def tiling(self, problem, device):
        tiling = super().tiling(problem, device)
        if problem.batch == 1:
            return tiling
        return Tiling(block_query=tiling.block_query, block_kv=tiling.block_kv // 2)


def test_wrong_first_call_is_reported_as_not_the_same_again():
    record = diagnose_record(Wavy(), SMALL)
    assert [one.model for one in record.diagnosis.ranked] == ["not-the-same-again"]
    text = diagnosis_text(record, kernel="mine")
    assert f"likely     {SIGNS['not-the-same-again'][:30]}" in text
    assert "% of the error" not in text


@pytest.mark.parametrize(
    ("wrong", "promises", "models"),
    [
        (lambda _: True, Ideal.promises, []),
        (lambda number: 1 + number, Ideal.promises, ["not-the-same-again"]),
        (lambda number: 1 + number, frozenset(), []),
    ],
    ids=["equally wrong", "differently wrong", "without the promise to repeat"],
)
def test_calls_that_differ_are_a_sign_if_the_kernel_promises_to_repeat(wrong, promises, models):
    subject = Wavy(wrong)
    subject.promises = promises
    record = diagnose_record(subject, SMALL)
    assert [cause.model for cause in record.diagnosis.ranked] == models


def test_result_of_another_form_is_no_sign_of_calls_that_differ():
    shorter = spoiled(lambda _, right: dataclasses.replace(right, out=right.out[:, :, 1:]))
    record = diagnose_record(shorter, Case(problem=SMALL, question="repeat"))
    assert record.judgement.rule == "contract"
    assert record.diagnosis is msgspec.UNSET


def test_tiles_that_depend_on_the_batch_are_a_sign():
    record = diagnose_record(Sharing(), Case(problem=BATCH, question="neighbours"))
    assert [one.model for one in record.diagnosis.ranked] == ["depends-on-the-batch"]


def test_sequence_wrong_in_every_batch_is_no_sign_of_the_batch():
    class SharingAndWavy(Sharing, Wavy):
        """Also wrong in every batch."""

    case = Case(problem=BATCH, question="neighbours")
    record = diagnose_record(SharingAndWavy(lambda _: True), case)
    assert record.diagnosis is msgspec.UNSET


class ExceedsGrid(Ideal):
    """Writes nothing if there are more sequences and heads than ``places`` on its grid axis."""

    name = "unlaunched"

    def __init__(self, places):
        super().__init__()
        self.places = places

    def normalised(self, out, total):
        fits = out.shape[0] * out.shape[1] <= self.places
        return super().normalised(out, total) if fits else torch.full_like(out, 3.0)


@pytest.mark.parametrize(("places", "models"), [(6, ["grid-axis-exceeded"]), (5, [])])
def test_grid_axis_that_is_exceeded_is_a_sign(monkeypatch, places, models):
    monkeypatch.setattr(diagnosis_module, "MOST_GRID_PLACES", 6)
    monkeypatch.setattr("attncheck.diagnose.failing_kernel._MOST_HEADS", 3)
    problem = Problem(batch=4, heads=2, query=1, kv=2, dtype="bf16", mask=Spec.of("causal"))
    record = diagnose_record(ExceedsGrid(places), Case(problem=problem, question="first_row"))
    ranked = [] if record.diagnosis is msgspec.UNSET else record.diagnosis.ranked
    assert [one.model for one in ranked] == models


@pytest.mark.parametrize("name", SIGNS)
def test_sign_text_has_no_full_stop(name):
    assert not SIGNS[name].endswith(".")
