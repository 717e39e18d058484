"""Verification: one kernel, one Case, one Record, and the loop over cases."""
