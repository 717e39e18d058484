"""Measurements as plain data: every page, file and exit code is made from them."""
