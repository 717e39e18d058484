"""A GPU that a kernel has taken from its process: who comes after is not to blame."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from attncheck.suite.session import Session

__all__ = ["is_gone", "skip_where_lost"]


def is_gone() -> bool:
    """Whether CUDA works no more in this process.

    An illegal or a misaligned address ends every later call with the same words.
    """
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def skip_where_lost(session: Session) -> None:
    """Skip a test of a process that has no GPU any more."""
    if session.lost_by:
        pytest.skip(f"this process lost its GPU in {session.lost_by}: run again without that")
