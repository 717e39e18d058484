"""The dtype in which a kernel is checked where none is requested; imports no torch, for reports."""

from __future__ import annotations

DEFAULT_DTYPE = "bf16"
"""The dtype of a check's questions if none is requested and the kernel takes it."""
