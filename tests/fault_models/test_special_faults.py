"""Faults that few problems show: named where they are, and not where another fault is."""

import dataclasses
from itertools import islice

import pytest
import torch
from tests.fault_models.planted_predictions import OF, RAGGED, execution
from tests.fault_models.planted_specials import SPECIALS, TILES, evidence_of, planted

from attncheck.diagnose.explanations import explain
from attncheck.inputs.problem import Case, Problem
from attncheck.judge.fault_explanation import count_equals
from attncheck.verify.evidence_builder import EvidenceBuilder


def named(found):
    return [one.name for one in found.ranking[: count_equals(found.ranking)]] if found else []


@pytest.mark.parametrize("name", SPECIALS)
def test_a_special_fault_is_named(name):
    evidence = evidence_of(name)
    few = islice(planted(name, evidence), 9)  # some of them show nothing on this problem
    assert any(name in named(explain(result, evidence)) for result in few)


@pytest.mark.parametrize("name", SPECIALS)
def test_another_fault_is_not_taken_for_it(name):
    evidence, other = evidence_of(name), SPECIALS[name][1]
    result = next(planted(other, evidence))
    found = named(explain(result, evidence))
    assert other in found
    assert name not in found


def unwritten(problem, rows):
    """The exact result, but for rows that hold anything."""
    evidence = EvidenceBuilder(Case(problem=problem), "cpu")
    result = dataclasses.replace(execution(problem, evidence.truth), tiling=TILES)
    noise = torch.Generator().manual_seed(1)
    out = result.outputs.out
    out[:, :, rows] += 3 * torch.randn(out[:, :, rows].shape, generator=noise).to(out.dtype)
    return result, evidence


def test_rows_of_another_configuration():
    result, evidence = unwritten(Problem(**RAGGED), slice(0, RAGGED["query"] // 2))
    assert named(explain(result, evidence)) == ["half-unwritten"]


def test_a_row_too_few_is_no_half():
    result, evidence = unwritten(Problem(**RAGGED | {"mask": OF("causal")}), slice(0, 4))
    assert "half-unwritten" not in named(explain(result, evidence))
