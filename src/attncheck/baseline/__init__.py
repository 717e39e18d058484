"""Baselines: is a kernel still as accurate as it was?"""
