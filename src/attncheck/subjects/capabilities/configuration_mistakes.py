"""Every mistake in a file that names kernels, without importing one of them.

For a hook that runs at every commit: neither torch nor anything of the project is imported.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attncheck.core.errors import UnknownName, UsageError, did_you_mean
from attncheck.subjects.capabilities.capability_table import AUTOGRAD, pattern_files
from attncheck.subjects.capabilities.configuration import read_tables, tables_of
from attncheck.subjects.capabilities.named_kernels import BUILTIN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.subjects.capabilities.capability_table import Capabilities

CONVENTION_NAMES = ("native", "sdpa", "flash_attn", "varlen", "flex", "paged")
"""Names of ``conventions.CONVENTIONS``, which imports torch."""


def find_mistakes(path: Path) -> tuple[int, list[str]]:
    """Return how many kernels ``path`` names, and what is wrong with them, a line each.

    Beside what ``read_configuration`` says: entries, gradients and sources that are not there, and
    conventions that are not known.
    """
    try:
        tables = tables_of(path) or {}
    except UsageError as error:
        return 0, [str(error)]
    mistakes: list[str] = []
    for name, table in tables.items():
        try:
            read = read_tables({name: table}, path)
        except UsageError as error:
            # None of a key alone: then the keys contradict each other, and the first error says so.
            mistakes += _mistakes_of_keys(name, table, path) or [str(error)]
        else:
            missing = _missing(read[name], path.absolute().parent)
            mistakes += [f"{path}: kernels.{name}: {reason}" for reason in missing]
    return len(tables), mistakes


def _mistakes_of_keys(name: str, table: object, path: Path) -> list[str]:
    """Return what is wrong with each key for itself: reading the whole table ends at the first."""
    if not isinstance(table, Mapping):
        return []
    mistakes: dict[str, None] = {}  # in order, each once
    for alone in _key_by_key(table):
        try:
            read_tables({name: alone}, path)
        except UsageError as error:
            mistakes[str(error)] = None
    return list(mistakes)


def _key_by_key(table: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The table with one key, and one override, at a time; all else in it is right."""
    if "entry" not in table:
        yield {}
    right = {"entry": "package.module:name"}
    for key, value in table.items():
        if key != "override" or not isinstance(value, list):
            yield right | {key: value}
            continue
        for index, each in enumerate(value):
            # Right ones stand before it, so that the message has its number.
            yield right | {key: [*[{"when": {"device": "cpu"}}] * index, each]}


def _missing(table: Capabilities, folder: Path) -> Iterator[str]:
    """Yield what the table names, and is not there."""
    if table.convention is not None and table.convention not in CONVENTION_NAMES:
        yield str(UnknownName("convention", table.convention, CONVENTION_NAMES))
    if table.entry not in BUILTIN:
        yield from _missing_reference("entry", table.entry, folder)
    if isinstance(table.backward, str) and table.backward != AUTOGRAD:
        yield from _missing_reference("backward", table.backward, folder)
    # A pattern that fits nothing would make ``gate --changed-since`` skip the kernel.
    for pattern in table.sources:
        if next(pattern_files(folder, pattern), None) is None:
            yield f"sources: {pattern!r} fits no file below {folder.name}."


def _missing_reference(key: str, reference: str, folder: Path) -> Iterator[str]:
    """Yield what is wrong with ``file.py::name`` or ``package.module:name``."""
    where, colons, name = reference.partition("::")
    if colons:
        path: Path | None = folder / where
        if not (folder / where).is_file():
            yield f"{key}: there is no file {where}."
            return
    else:
        where, _, name = reference.partition(":")
        if not where or not name:
            yield f"{key}: {reference!r} is neither FILE.py::NAME nor package.module:NAME."
            return
        exists, path = _locate_module(where, folder)
        if not exists:
            yield f"{key}: there is no module {where!r}."
            return
    if path is None:
        return
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        yield f"{key}: {where} is no Python: {error}."
        return
    name, bound = name.partition(".")[0], set(_bound_names(tree))
    if name not in bound and not bound & {"*", "__getattr__"}:  # a star may bring any name
        near = did_you_mean(name, bound)
        yield f"{key}: {where} has no {name!r}{f': {near}' if near else '.'}"


def _locate_module(name: str, folder: Path) -> tuple[bool, Path | None]:
    """Return whether there is such a module, and the Python file that it is, if it is one.

    As ``importlib.util.find_spec``, which imports the packages on the way.
    """
    where: list[str] | None = None
    parts, spec = name.split("."), None
    # The project's own modules count, as they do where the kernel is loaded.
    sys.path.insert(0, str(folder))
    try:
        for count in range(1, len(parts) + 1):
            full = ".".join(parts[:count])
            specs = (finder.find_spec(full, where) for finder in sys.meta_path)
            spec = next((each for each in specs if each is not None), None)
            if spec is None:
                return False, None
            where = list(spec.submodule_search_locations or ())
    finally:
        sys.path.remove(str(folder))
    origin = Path(spec.origin) if spec and spec.origin else None
    return True, origin if origin and origin.suffix == ".py" and origin.is_file() else None


def _bound_names(tree: ast.AST) -> Iterator[str]:
    """Names that a module binds, wherever it does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
