"""Diagnosis of a failure, and ways to see it again."""
