"""Errors, number formats, outputs, exact quantities, judgements and text; imports no other room."""

VERSION = "0.1.0"  # The version in pyproject.toml.
