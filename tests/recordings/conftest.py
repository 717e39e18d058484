"""Recordings made in a test are forgotten after it; small ones to make them from."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import attncheck
from attncheck.inputs.distributions import DISTRIBUTIONS
from attncheck.inputs.recorded_calls import Recording
from attncheck.inputs.recording_file import load
from attncheck.mods.masks import MASKS
from attncheck.mods.scores import SCORES


@pytest.fixture(autouse=True)
def _forgotten():
    """Other tests go through all distributions and masks there are."""
    before = [(registry, dict(registry)) for registry in (DISTRIBUTIONS, MASKS, SCORES)]
    yield
    for registry, entries in before:
        registry.clear()
        registry.update(entries)


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """In every test of this room."""


@pytest.fixture(scope="session")
def allowance():
    """How far two float64 evaluations of Inputs may lie apart: that of the oracles' tests."""
    path = Path(__file__).parents[1] / "oracles" / "conftest.py"
    spec = importlib.util.spec_from_file_location("allowance_of_the_oracles", path)
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its module up by name.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module.Allowance.of


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
