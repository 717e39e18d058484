"""The command line as typed, without any folder: a report may be read elsewhere."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["as_typed"]


def as_typed(*, files: Collection[str] = (), argument: str = "") -> str:
    """The command line for a report.

    Args:
        files: Options that take a file, or ``FILE.py::NAME``: the file is named without its folder.
        argument: A word that stands without an option and is a file likewise.
    """
    words = iter(sys.argv[1:])
    kept = ["attncheck"]
    for word in words:
        option, equals, value = word.partition("=")
        if option == "--out":
            value = value if equals else next(words, "")
        elif option in files:
            value = _without_folder(value if equals else next(words, ""))
            kept += [f"{option}={value}"] if equals else [option, value]
        else:
            kept.append(_without_folder(word) if word == argument else word)
    return shlex.join(kept)


def _without_folder(text: str) -> str:
    """``file.py::name`` of ``some/folder/file.py::name``."""
    path, separator, name = text.partition("::")
    return Path(path).name + separator + name if path else text
