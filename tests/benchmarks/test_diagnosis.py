"""Diagnosis of strangers' kernels: what is planted, and how its answers are counted."""

from types import SimpleNamespace

import diagnosis
import pytest

from attncheck.fault_models import FAULT_MODELS
from attncheck.fault_models.fault_model import SIGNS
from attncheck.records.record import Diagnosis, Explanation
from attncheck.subjects.capabilities.configuration import read_configuration

FAULTS = diagnosis.stranger_faults()


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_of_a_stranger_is_planted_and_names_what_there_is(fault, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = fault.plant(tmp_path)
    assert set(read_configuration().kernels) == {name}
    compile((tmp_path / f"{name}.py").read_text(), name, "exec")
    # A host alone is right, and nothing of it is to be named.
    assert bool(fault.named) == ("." in fault.id)
    assert set(fault.named) <= {*FAULT_MODELS, *SIGNS}


def test_answers_are_counted_by_the_place_of_what_is_to_be_named():
    def record(*models):
        ranked = tuple(
            Explanation(model=model, sentence="", share=1.0, explains_all=True) for model in models
        )
        said = Diagnosis(ranked=ranked, tied=1, tried=1) if models else None
        return SimpleNamespace(diagnosis=said, case={"question": "compare"}, reason="wrong")

    fault = FAULTS["torch.next-key"]
    (right,) = fault.named
    rows = []
    for models in ((right,), ("scale-off", right), ("scale-off",), ()):
        found = record(*models)
        place = diagnosis.rank(found, fault.named)
        rows.append((fault, {"alone": found, "together": found}, {"together": place}))
    rows.append((fault, None, {"together": 0}))  # not caught
    counts = "1 of 5 named first, 2 among the first three, 1 named otherwise, 2 not named"
    assert diagnosis.stranger_counts(rows) == counts
    page = diagnosis.stranger_page(rows, {"torch": "no failure"}, counts)
    assert f"| torch.next-key | {right} | 2 | scale-off, {right} | compare |" in page
    assert f"| torch.next-key | {right} | — | not caught | — |" in page
