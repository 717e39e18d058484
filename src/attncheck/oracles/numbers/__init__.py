"""Number systems: the recurrences are written once and run in any of them.

``ball.Ball`` is not imported here: it needs python-flint, an optional extra.
"""

from __future__ import annotations

from attncheck.oracles.float64_numbers import Float64
from attncheck.oracles.mp_numbers import ManyDigits, Mp
from attncheck.oracles.number_system import Array, Captures, Evaluate, Numbers

__all__ = ["Array", "Captures", "Evaluate", "Float64", "ManyDigits", "Mp", "Numbers"]
