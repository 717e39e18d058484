"""Somebody's Python file: imported, and what goes wrong with it said in one line."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attncheck.errors import UsageError

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["brief", "import_file", "member", "place_in"]


def import_file(path: Path, what: str) -> ModuleType:
    """The module that the file ``path`` is; imported anew at every call.

    Args:
        path: The file.
        what: What it was asked for, which begins every error: ``kernel 'mine.py::Mine'``.

    Raises:
        UsageError: where there is no such file, or importing it raises anything but
            KeyboardInterrupt; in one line, with the line of the file where there is one.
    """
    if not path.is_file():
        raise UsageError(f"{what}: there is no file {path}.")
    spec = importlib.util.spec_from_file_location(f"attncheck_file_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{what}: {path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and Triton look their module up by name.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # somebody's file: it may raise anything, SystemExit too
        said = f"{brief(error)}{place_in(path, error)}"
        raise UsageError(f"{what}: importing {path} raised {said}.") from error
    return module


def member(text: str, what: str) -> Any:
    """``NAME`` of ``FILE.py::NAME``; raises UsageError as ``import_file``, or where it has none."""
    file, _, name = text.rpartition("::")
    module = import_file(Path(file), what)
    if not hasattr(module, name):
        raise UsageError(f"{what}: {file} has no {name!r}.")
    return getattr(module, name)


def brief(error: BaseException) -> str:
    """``ValueError: the first line of what it says``."""
    name = type(error).__name__
    lines = str(error).split("\n", 1)
    return f"{name}: {lines[0]}" if lines[0] else name


def place_in(path: Path, error: BaseException) -> str:
    """`` at mine.py:7``: the innermost line of the file on the way to ``error``; else nothing."""
    frames = traceback.extract_tb(error.__traceback__)
    numbers = [f.lineno for f in frames if Path(f.filename).resolve() == path.resolve()]
    return f" at {path.name}:{numbers[-1]}" if numbers else ""
