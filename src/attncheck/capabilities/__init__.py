"""What a kernel is to attncheck, what its author declares of it, and where a project names it."""
