"""The registry of built-in subjects."""

from __future__ import annotations

import subprocess
import sys

import pytest

from attncheck.capabilities import named_kernels
from attncheck.core.errors import UnknownName


def test_the_names_and_their_order():
    assert named_kernels.builtin_names() == (
        "triton-flash2",
        "triton-flash2-vt",
        "triton-flash2-fastacc",
        "triton-flash1",
        "triton-varlen",
        "triton-paged",
        "triton-decode",
        "ideal",
        "sdpa-math",
        "sdpa-flash",
        "sdpa-efficient",
        "sdpa-cudnn",
        "flex",
        "triton-softmax-naive",
        "triton-softmax-safe",
        "triton-softmax-online",
        "triton-softmax-blocked",
        "torch-softmax",
    )


@pytest.mark.parametrize("name", named_kernels.builtin_names())
def test_a_subject_knows_its_name(name):
    subject = named_kernels.subject_named(name)
    assert subject.name == name
    assert subject.summary
    assert "\n" not in subject.summary


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UnknownName, match=r"kernel 'sdpa' is not known: choose from .*sdpa-math"):
        named_kernels.subject_named("sdpa")


def test_listing_them_imports_neither_torch_nor_triton():
    code = (
        "import sys; from attncheck.capabilities.named_kernels import builtin_names;"
        "builtin_names();"
        "sys.exit(bool({'torch', 'triton', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
