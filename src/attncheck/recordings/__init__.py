"""Attention calls of a running model: recorded to a file, read back, and made into Problems.

``recorder`` writes what ``attncheck.capture`` sees, after ``reduction`` has made a call's arguments
a description and tensors whose ``axes`` are (batch, heads, length, dim). ``schema`` says what the
file holds, ``reading`` checks one, and ``recording`` makes a Problem of each call.
"""

from __future__ import annotations

from attncheck.recordings.reading import load
from attncheck.recordings.recording import Recording

__all__ = ["Recording", "load"]
