"""What a failure says by itself: of calls that differ, and of batches that matter."""

from __future__ import annotations

import itertools

import msgspec
import pytest
import torch
from tests.diagnose.told import told_record

from attncheck.core.mod_spec import Spec
from attncheck.diagnose import diagnosis as signs
from attncheck.fault_models.fault_model import SIGNS
from attncheck.inputs.problem import Case, Problem
from attncheck.reporting.diagnosis_text import diagnosis_text
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal

SMALL = Problem(query=9, kv=9, head_dim=16, dtype="fp16")
BATCH = Problem(batch=2, query=1, kv=129, dtype="bf16")


class Wavy(Ideal):
    """Wrong as no model is, in some of its calls."""

    name = "wavy"
    calls: itertools.count

    def __init__(self, wrong=lambda number: number == 0):
        super().__init__()
        self.calls, self.wrong = itertools.count(), wrong

    def normalised(self, out, total):
        wave = torch.arange(out.numel()).view(out.shape).sin()
        return super().normalised(out, total) + wave * self.wrong(next(self.calls))


class Sharing(Ideal):
    """Its tiles are those of the batch."""

    name = "sharing"

    def tiling(self, problem, device):
        found = super().tiling(problem, device)
        if problem.batch == 1:
            return found
        return Tiling(block_query=found.block_query, block_kv=found.block_kv // 2)


def test_a_first_call_that_is_wrong():
    record = told_record(Wavy(), Case(problem=SMALL))
    assert [one.model for one in record.diagnosis.ranked] == ["not-the-same-again"]
    text = diagnosis_text(record, kernel="mine")
    assert f"likely     {SIGNS['not-the-same-again'][:30]}" in text
    assert "% of the error" not in text


def test_what_is_wrong_each_time_is_not():
    record = told_record(Wavy(lambda _: True), Case(problem=SMALL))
    assert record.diagnosis.ranked == ()


def test_what_is_wrong_otherwise_each_time():
    record = told_record(Wavy(lambda number: 1 + number), Case(problem=SMALL))
    assert [one.model for one in record.diagnosis.ranked] == ["not-the-same-again"]


def test_what_does_not_promise_to_repeat_itself_may_be_wrong_otherwise():
    subject = Wavy(lambda number: 1 + number)
    subject.promises = frozenset()
    assert told_record(subject, Case(problem=SMALL)).diagnosis.ranked == ()


def test_a_batch_that_decides_the_tiles():
    record = told_record(Sharing(), Case(problem=BATCH, question="neighbours"))
    assert [one.model for one in record.diagnosis.ranked] == ["depends-on-the-batch"]


def test_a_wrong_sequence_is_not_the_batch_s():
    class Both(Sharing, Wavy):
        """Wrong in every batch, too."""

    record = told_record(Both(lambda _: True), Case(problem=BATCH, question="neighbours"))
    assert record.diagnosis is msgspec.UNSET


class Unlaunched(Ideal):
    """Gives what is in its memory where there are more sequences and heads than it has room for."""

    name = "unlaunched"

    def __init__(self, places):
        super().__init__()
        self.places = places

    def normalised(self, out, total):
        fits = out.shape[0] * out.shape[1] <= self.places
        return super().normalised(out, total) if fits else torch.full_like(out, 3.0)


@pytest.mark.parametrize(("places", "told_so"), [(6, ["grid-axis-exceeded"]), (5, [])])
def test_more_sequences_than_an_axis_has_places(monkeypatch, places, told_so):
    monkeypatch.setattr(signs, "MOST_GRID_PLACES", 6)
    monkeypatch.setattr("attncheck.diagnose.failing_kernel._MOST_HEADS", 3)
    problem = Problem(batch=4, heads=2, query=1, kv=2, dtype="bf16", mask=Spec.of("causal"))
    record = told_record(Unlaunched(places), Case(problem=problem, question="first_row"))
    ranked = [] if record.diagnosis is msgspec.UNSET else record.diagnosis.ranked
    assert [one.model for one in ranked] == told_so


@pytest.mark.parametrize("name", SIGNS)
def test_a_sign_is_a_sentence(name):
    assert not SIGNS[name].endswith(".")
