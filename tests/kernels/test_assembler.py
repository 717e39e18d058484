"""Which ptxas assembles attncheck's kernels; kernels of others keep their own."""

import os
from contextlib import nullcontext

import pytest
from triton import knobs

from attncheck.kernels import compilation


def tool(version):
    return knobs.NvidiaTool(path=f"/ptxas-{version}", version=version)


@pytest.mark.parametrize(
    ("default", "other", "path"),
    [
        ("12.8", "12.9", "/ptxas-12.9"),  # Triton 3.6
        ("12.8", "13.4", "/ptxas-13.4"),
        ("12.8", "12.8", None),  # no better one
        ("12.9", "13.4", None),  # Triton 3.9: sound as it is
        ("13.10", "12.9", None),
    ],
)
def test_sound_ptxas_replaces_a_faulty_default(default, other, path):
    assert compilation.choose_assembler(tool(default), tool(other)) == path


def test_interpreter_needs_no_ptxas():
    assert isinstance(compilation.sound_assembler("cpu"), nullcontext)


def test_replacement_ptxas_leaves_the_default_of_other_kernels(monkeypatch):
    path = knobs.nvidia.ptxas_blackwell.path
    before = knobs.nvidia.ptxas.path
    monkeypatch.setattr(compilation, "replacement_assembler", lambda: path)
    with compilation.sound_assembler("cuda"):
        assert knobs.nvidia.ptxas.path == path
    assert knobs.nvidia.ptxas.path == before != path
    assert "TRITON_PTXAS_PATH" not in os.environ
