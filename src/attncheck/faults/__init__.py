"""Faults that real attention kernels had, planted, and the score of a suite on them."""
