"""Core: errors, number formats, outputs, exact quantities, judgements and text; imports no room."""
