"""Masks and score mods, written once in FlexAttention's signature.

* By name: ``signatures``, ``spec`` (what a Problem stores), ``masks`` and ``scores`` (the callables
  and the tables that build them), ``formula`` (mods written as text), ``mod_files`` (mods from
  users' files), ``library`` (checks a Spec and builds its callable).
* As data: ``expression`` (the vocabulary, a small graph over it, and ``evaluate``), ``trace`` (from
  a callable to its expression, through ``torch_tracer`` and ``aten``), ``captured_reads`` and
  ``captured_gradients`` (derivatives with respect to captured tensors, with and without a trace).
* Algebras in which an expression is evaluated: torch's (``expression``), ``mpmath_algebra``,
  ``ball_algebra`` (both with ``whole_numbers``), ``running_error`` (with the ``operation_errors``
  that an implementation declares), ``index_ranges``, and ``to_triton`` (with
  ``triton_functions``).
* Of a mask at all indices: ``block_mask``, ``page_table``.

Oracles call the original callables: they never import the trace, the expression or a block mask.
"""
