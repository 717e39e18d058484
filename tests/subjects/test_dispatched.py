"""What looks on while a function calls torch."""

from __future__ import annotations

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from attncheck.conventions.torch_arithmetic import CpuFlashDetector
from attncheck.verify.further_calls import _Late
from attncheck.verify.memory_patterns import GuardBands


class Plain(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def imports_torchs_compiler(mode):
    """At the first operator that it sees: torch has wrapped its handler."""
    return hasattr(mode.__torch_dispatch__, "__wrapped__")


@pytest.mark.parametrize("mode", [CpuFlashDetector, GuardBands, _Late])
def test_it_imports_no_compiler(mode):
    assert not imports_torchs_compiler(mode)
    assert imports_torchs_compiler(Plain)
