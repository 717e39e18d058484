"""Diagnosis of a failure, and ways to reproduce it."""
