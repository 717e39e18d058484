"""What ``attncheck doctor`` reports about Triton's ptxas."""

from attncheck.kernels import compilation
from attncheck.surveys import machine_checkup


def test_doctor_names_a_replacement_for_an_unreliable_ptxas(monkeypatch):
    monkeypatch.setattr(compilation, "replacement_assembler", lambda: "/opt/ptxas-12.9")
    (row,) = machine_checkup._assembler("cuda")
    assert row["ok"]
    assert "TRITON_PTXAS_PATH=/opt/ptxas-12.9" in row["finding"]


def test_doctor_omits_a_sound_or_unused_ptxas(monkeypatch):
    monkeypatch.setattr(compilation, "replacement_assembler", lambda: None)
    assert machine_checkup._assembler("cuda") == []
    assert machine_checkup._assembler("cpu") == []
