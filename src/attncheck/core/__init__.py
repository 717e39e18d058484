"""Core: errors, number formats, outputs, exact quantities, judgements and text; imports no room."""

VERSION = "0.1.0"  # of attncheck, as in pyproject.toml
