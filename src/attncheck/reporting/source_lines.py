"""Where the function is that a kernel's name names: found in text, without importing anything."""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

__all__ = ["Location", "locate"]

_LARGEST = 2**20  # bytes of a source file that is looked into
_ENDS = (".py", "/__init__.py")


@dataclass(frozen=True, slots=True)
class Location:
    """A line of a file of the working directory.

    Attributes:
        path: Relative to it, with ``/``; empty where no file is known.
        line: From 1.
    """

    path: str
    line: int = 1


def locate(kernel: str, root: Path | None = None) -> Location:
    """The line on which ``file.py::name`` or ``package.module:name`` is defined.

    A file outside ``root``, the working directory unless told, is not looked into: names in a
    report are foreign. The path is empty where there is no such file; the line is 1 where the file
    does not define the name.
    """
    return _located(kernel, (Path.cwd() if root is None else root).resolve())


@lru_cache(maxsize=64)
def _located(kernel: str, root: Path) -> Location:
    file, double, name = kernel.partition("::")
    if double:
        paths = [file]
    else:
        module, colon, name = kernel.partition(":")
        parts = module.split(".")
        if not colon or not all(part.isidentifier() for part in parts):
            return Location("")
        paths = [f"{folder}{'/'.join(parts)}{end}" for folder in ("", "src/") for end in _ENDS]
    for path in paths:
        inside = _inside(path, root)
        if inside is not None:
            return Location(inside.relative_to(root).as_posix(), _line(inside, name))
    return Location("")


def _inside(path: str, root: Path) -> Path | None:
    """``path`` where it is a source file below ``root``."""
    try:
        found = (root / path).resolve()
        below = found.is_relative_to(root)
        return found if below and found.suffix == ".py" and found.is_file() else None
    except (OSError, ValueError, RuntimeError):  # a name that no file can have, a loop of links
        return None


def _line(path: Path, name: str) -> int:
    """The first line of what defines ``name``, outermost first; 1 where nothing does."""
    try:
        with path.open("rb") as file:
            source = file.read(_LARGEST + 1)
        if len(source) > _LARGEST:
            return 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of somebody's string literals
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return 1
    for node in ast.walk(tree):
        if _defines(node, name):
            return int(node.lineno)  # type: ignore[attr-defined]  # those nodes have one
    return 1


def _defines(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name == name
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)
