"""The gate for pull requests: the questions to a kernel, their order, and the report."""
