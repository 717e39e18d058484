"""``python -m attncheck``."""

from __future__ import annotations

from attncheck.cli import main

main()
