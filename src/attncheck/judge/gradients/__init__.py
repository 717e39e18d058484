"""Bounds of a backward's gradients: equations B30–B40 of the manual."""
