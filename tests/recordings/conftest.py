"""Fixtures that make recordings, which are removed from the libraries after each test."""

from typing import Any

import pytest
import torch
from tests.oracles.conftest import Allowance

import attncheck
from attncheck.inputs.recorded_calls import Recording
from attncheck.inputs.recording_file import load


@pytest.fixture(autouse=True)
def _one_thread(one_thread, library_as_before):
    """Apply both fixtures to every test here."""


@pytest.fixture(scope="session")
def allowance():
    """The allowance of the oracles' tests: how far two float64 evaluations of Inputs may differ."""
    return Allowance.of


@pytest.fixture
def recorded(tmp_path):
    """Record one call of the function with these arguments, and read it back."""

    def record(*args: Any, **kwargs: Any) -> Recording:
        file = tmp_path / "recorded.safetensors"
        with attncheck.capture(file):
            torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)
        (recording,) = load(file)
        return recording

    return record
