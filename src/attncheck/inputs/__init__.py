"""Inputs: Problems and Cases, the distributions that their tensors come from, and recordings."""
