"""Kernels as subjects: attncheck's own, torch's, the ideal kernel, and users' kernels."""
