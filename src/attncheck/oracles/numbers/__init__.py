"""Number systems: the recurrences are written once and run in any of them.

``ball.Ball`` is not imported here: it needs python-flint, an optional extra.
"""

from __future__ import annotations

from attncheck.oracles.numbers.evaluate import Captures, Evaluate
from attncheck.oracles.numbers.float64 import Float64
from attncheck.oracles.numbers.mp import ManyDigits, Mp
from attncheck.oracles.numbers.protocol import Array, Numbers

__all__ = ["Array", "Captures", "Evaluate", "Float64", "ManyDigits", "Mp", "Numbers"]
