"""Standalone scripts: a failing Case for somebody without attncheck."""
