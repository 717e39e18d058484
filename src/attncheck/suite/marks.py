"""Words that the plugin and the properties share; imports nothing."""

from __future__ import annotations

__all__ = ["MARK", "SOFTMAX"]

MARK = "attncheck_asks"
"""The marker of a test that ``asks`` made."""
SOFTMAX = "softmax"
"""The family of problems that have no mask: row softmax."""
