"""What the parts of an allowance are: a line for each, by the names of ``docs/explanation/bounds.md``."""

from __future__ import annotations

__all__ = ["TERMS"]

TERMS = {
    "scores": "q·k and its scale: operands as products read them, sums, and what they do to P",
    "LSE": "LSE as the kernel gave it, which P comes from again",
    "score mod": "the score mod in fp32: its own roundings, and how steep it makes those of scores",
    "exponent": "the maximum subtracted, log2 e, exp2, and rescaling where the maximum moves",
    "rounding of P": "P as the product P·V reads it",
    "rounding of V": "V as the product P·V reads it",
    "dO·V": "the products of dO and V added up",
    "delta": "the sum of dO·O, taken off dO·V",
    "saved out": "out as the kernel gave it, rounded, in delta",
    "slope": "the score mod's derivative in fp32",
    "products": "P times what delta left of dO·V",
    "rounding of dS": "the gradient of scores, as the products dS·K and dSᵀ·Q read it",
    "rounding of operands": "q, k and dO as products read them",
    "row sum": "the sum of P added up key by key",
    "accumulation": "P·V added up key by key; gradients likewise, key by key or row by row",
    "division": "out divided by the row sum, whose own error is in it",
    "underflow": "products too small to be normal numbers",
    "logarithm": "the logarithm of the row sum, the maximum added",
    "rounding of heads": "each head's gradient, before those that share a key head are added",
    "rounding of parts": "gradients added up tile by tile in the output format",
    "output rounding": "out rounded once to its format; a gradient likewise",
}
"""In the order in which a kernel makes the roundings."""
