"""Masks and score mods, written once in FlexAttention's signature.

``masks``, ``scores`` and ``compose`` hold plain callables; ``spec`` names one of them with its
numbers (what a Problem stores); ``library`` checks the spec (``arguments``) and builds the
callable. ``trace`` turns any callable into an ``expression`` through torch's tracer (``aten``
knows its operations, ``agreement`` asks whether both say the same), and ``to_triton`` prints that
as a Triton function.
"""
