"""What doctor says of Triton's ptxas."""

from attncheck.examine import doctor
from attncheck.kernels import assembler


def test_a_ptxas_that_is_not_to_be_trusted_is_named(monkeypatch):
    monkeypatch.setattr(assembler, "replacement", lambda: "/opt/ptxas-12.9")
    (found,) = doctor._assembler("cuda")
    assert found["ok"]
    assert "TRITON_PTXAS_PATH=/opt/ptxas-12.9" in found["finding"]


def test_nothing_is_said_where_it_is_sound_or_unused(monkeypatch):
    monkeypatch.setattr(assembler, "replacement", lambda: None)
    assert doctor._assembler("cuda") == []
    assert doctor._assembler("cpu") == []
