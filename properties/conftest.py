"""Which kernel is judged, and how hard: see ``--kernel`` and ``--hypothesis-profile``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from attncheck.pytest_plugin import load_profile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.examine.under_test import UnderTest

load_profile()


@pytest.fixture(scope="session")
def kernel(attncheck_kernel: UnderTest) -> Iterator[UnderTest]:
    """The kernel under test.

    On the CPU with one thread: at these sizes several mostly wait for each other, and where other
    processes want the cores too they were ten times slower than one.
    """
    import torch

    threads = torch.get_num_threads()
    if attncheck_kernel.device == "cpu":
        torch.set_num_threads(1)
    yield attncheck_kernel
    torch.set_num_threads(threads)
