"""Calling conventions: somebody's function called, its calls read, and both written as a script."""
