"""The rules by which other projects accept gradients: ``attncheck.faults.peer_rules``'s, more.

=================  ===============================================================================
torch              torch.testing.assert_close's defaults by dtype
=================  ===============================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from peers import TORCH

from attncheck.faults import peer_rules
from attncheck.faults.peer_rules import PeerGradients, elementwise_gradient_rule

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.core.outputs import Outputs

__all__ = ["PEERS", "PeerGradients"]

_RULES = peer_rules.GRADIENT_RULES

PEERS: dict[str, Callable[[Outputs, PeerGradients], bool]] = {
    "allclose(1e-2)": _RULES["allclose(1e-2)"],
    "torch": elementwise_gradient_rule(TORCH),
    "2×": _RULES["2×"],
    "1.1× mean": _RULES["1.1× mean"],
}
