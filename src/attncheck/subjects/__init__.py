"""Kernels as subjects: ours, torch's, the ideal kernel, and whatever a user names."""
