"""Kernels that are wrong on purpose, for `attncheck demo`: nothing of attncheck imports them."""
