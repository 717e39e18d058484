"""Patterns of the files that a kernel is made of: ``sources`` of its table.

They are relative to the folder of the file that says them: ``*`` and ``**`` are any folders, the
name of a folder is all in it, ``.`` is everything.
"""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["files", "matches", "mistake"]

_WILD = frozenset("*?[")
_EVERYTHING = "."


def mistake(pattern: str) -> str:
    """What is wrong with a pattern, as the end of a sentence; empty where nothing is."""
    if PurePosixPath(pattern).is_absolute() or PureWindowsPath(pattern).is_absolute():
        return "is absolute: it must be relative to the folder of this file"
    if ".." in PurePosixPath(pattern).parts:
        return "has '..': it must be below the folder of this file"
    return ""


def matches(file: str, pattern: str) -> bool:
    """Whether ``file`` is one of a pattern: ``**`` is any folders, a folder is all in it."""
    if not pattern:
        return False
    pattern = str(PurePosixPath(pattern))
    if pattern == _EVERYTHING or fnmatchcase(file, pattern) or file.startswith(f"{pattern}/"):
        return True
    # ``a/**/b`` is ``a/b`` too.
    return "**/" in pattern and matches(file, pattern.replace("**/", "", 1))


def files(folder: Path, pattern: str) -> Iterator[Path]:
    """The files below ``folder`` that fit, in order; none of hidden folders that it does not name.

    A pattern with a mistake fits none.
    """
    if not pattern or mistake(pattern):
        return
    start = folder
    for part in PurePosixPath(pattern).parts:
        if _WILD & set(part):
            break
        start /= part
    below = _below(start) if start.is_dir() else iter([start] if start.is_file() else [])
    yield from (path for path in below if matches(path.relative_to(folder).as_posix(), pattern))


def _below(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "__pycache__")
        yield from (path for name in sorted(names) if (path := Path(root, name)).is_file())
