"""The contract of a kernel, what its author declares of it, and where a project names it."""
