"""What the parts of an allowance are: a line for each, by the names of ``docs/bounds.md``."""

from __future__ import annotations

__all__ = ["TERMS"]

TERMS = {
    "scores": "q·k and its scale: operands as products read them, sums, and what they do to P",
    "score mod": "the score mod in fp32: its own roundings, and how steep it makes those of scores",
    "exponent": "the maximum subtracted, log2 e, exp2, and rescaling where the maximum moves",
    "rounding of P": "P as the product P·V reads it",
    "rounding of V": "V as the product P·V reads it",
    "row sum": "the sum of P added up key by key",
    "accumulation": "P·V added up key by key",
    "division": "out divided by the row sum, whose own error is in it",
    "underflow": "products too small to be normal numbers",
    "logarithm": "the logarithm of the row sum, the maximum added",
    "output rounding": "out rounded once to its format",
}
"""In the order in which a kernel makes the roundings."""
