"""Kernels run in Triton's interpreter with attncheck's repairs; skipped where compiled."""

import pytest
import torch

from attncheck.core.errors import InterpreterUnavailable
from attncheck.kernels import interpreter

try:
    interpreter.enable()
except InterpreterUnavailable:
    if not torch.cuda.is_available():
        raise


@pytest.fixture(autouse=True)
def _interpreted():
    if not interpreter.enabled():
        pytest.skip("this process compiles for its GPU")
