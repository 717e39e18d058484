"""Gradients by the oracles: of a loss, given its gradients with respect to out and LSE.

With x = scale · q·k, z = f(x) after the score mod and P = exp(z − LSE) over the attended keys::

    dV = Pᵀ dO        dP = dO Vᵀ        delta = Σ dO·O of each row
    dZ = P (dP − delta + dLSE)          dX = dZ · f'(x)
    dQ = scale · dX K                   dK = scale · dXᵀ Q

dK and dV are sums over the query heads that share a key head. A sink is a key without a value:
dsink = Σ P_sink (dLSE − delta) over rows and sequences. A number that the score mod reads from a
tensor has dcaptured = Σ dZ · ∂f/∂number over the scores that read it.
"""

from __future__ import annotations

from attncheck.oracles.backward_recurrences import dense_backward, flash2_backward
from attncheck.oracles.streaming_backward import streaming_backward

__all__ = ["dense_backward", "flash2_backward", "streaming_backward"]
