"""Faults that real attention kernels had, planted in copies of ours: the score of a suite."""
