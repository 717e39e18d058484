"""The rules by which other projects accept gradients: ``attncheck.faults.gradient_peers``'s, more.

=================  ===============================================================================
torch              torch.testing.assert_close's defaults by dtype
=================  ===============================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from peers import TORCH

from attncheck.faults import gradient_peers
from attncheck.faults.gradient_peers import GivenGradients, elementwise

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.outputs import Outputs

__all__ = ["PEERS", "GivenGradients"]

_RULES = gradient_peers.RULES

PEERS: dict[str, Callable[[Outputs, GivenGradients], bool]] = {
    "allclose(1e-2)": _RULES["allclose(1e-2)"],
    "torch": elementwise(TORCH),
    "2×": _RULES["2×"],
    "1.1× mean": _RULES["1.1× mean"],
}
