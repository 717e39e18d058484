"""Benchmarks of kernels that take turns, each verified in the same run."""
