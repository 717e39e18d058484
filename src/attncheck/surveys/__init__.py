"""Surveys: a kernel's arithmetic, mods and blocks of a mask, the oracles, this machine."""
