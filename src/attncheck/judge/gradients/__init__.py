"""Bounds of a backward's gradients: equations B30–B39 of the manual."""
