"""What doctor says of Triton's ptxas."""

from attncheck.kernels import compilation
from attncheck.surveys import machine_checkup


def test_a_ptxas_that_is_not_to_be_trusted_is_named(monkeypatch):
    monkeypatch.setattr(compilation, "replacement_assembler", lambda: "/opt/ptxas-12.9")
    (found,) = machine_checkup._assembler("cuda")
    assert found["ok"]
    assert "TRITON_PTXAS_PATH=/opt/ptxas-12.9" in found["finding"]


def test_nothing_is_said_where_it_is_sound_or_unused(monkeypatch):
    monkeypatch.setattr(compilation, "replacement_assembler", lambda: None)
    assert machine_checkup._assembler("cuda") == []
    assert machine_checkup._assembler("cpu") == []
