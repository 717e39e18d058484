"""The benchmark of diagnosis on kernels in other styles: its faults, scores and page."""

from types import SimpleNamespace

import diagnosis
import pytest

from attncheck.fault_models import FAULT_MODELS
from attncheck.fault_models.fault_model import FAMILIES, SIGNS
from attncheck.records.record import Diagnosis, Explanation
from attncheck.subjects.capabilities.configuration import read_configuration

FAULTS = diagnosis.stranger_faults()


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_fault_can_be_planted_and_names_existing_models(fault, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = fault.plant(tmp_path)
    assert set(read_configuration().kernels) == {name}
    compile((tmp_path / f"{name}.py").read_text(), name, "exec")
    # An id without a dot is the kernel without a fault, for which no model is right.
    assert bool(fault.named) == ("." in fault.id)
    assert set(fault.named) <= {*FAULT_MODELS, *SIGNS}


def record_of(level, *models, tried=1, family=""):
    ranked = tuple(
        Explanation(model=model, sentence="", share=1.0, explains_all=True) for model in models
    )
    answer = Diagnosis(
        ranked=ranked, tied=1, tried=tried, level=level, family=FAMILIES.get(family, "")
    )
    return SimpleNamespace(diagnosis=answer, case={"question": "compare"}, reason="wrong")


def test_answers_are_scored_by_model_and_family_and_counted():
    fault = FAULTS["torch.next-key"]
    (right,) = fault.named
    answers = {
        "named": record_of("named", right),
        "neighbour": record_of("named", "mask-ignored"),
        "wrong name": record_of("named", "scale-off"),
        "family": record_of("family", "scale-off", family="mask"),
        "wrong family": record_of("family", family="factor"),
        "unknown": record_of("unknown"),
        "proven": record_of("named", "not-the-same-again", tried=0),
        "not caught": None,
    }
    rows = [diagnosis.scored(fault, answer) for answer in answers.values()]
    assert [row["score"] for row in rows] == list(answers) != list(diagnosis.SCORES)
    counts = diagnosis.counts_of(rows)
    assert counts == "8 faults: " + ", ".join(f"1 {score}" for score in diagnosis.SCORES)
    page = diagnosis.page_of({"command": "c", "counts": counts, "faults": rows})
    assert f"| torch.next-key | {right} | wrong name | scale-off | compare |" in page
    assert "| mask | 1 | 1 | 1 | 2 | 1 | 1 | 1 |" in page
