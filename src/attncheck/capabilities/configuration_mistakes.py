"""Every mistake in a file that names kernels, without importing one of them.

For a hook that runs at every commit: neither torch nor anything of the project is imported.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attncheck.capabilities import configuration, named_kernels
from attncheck.capabilities.capability_table import AUTOGRAD, pattern_files
from attncheck.core.errors import UnknownName, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.capabilities.capability_table import Capabilities

__all__ = ["CONVENTION_NAMES", "find_mistakes"]

CONVENTION_NAMES = ("native", "sdpa", "flash_attn", "varlen", "flex", "paged")
"""Names of ``conventions.CONVENTIONS``, which imports torch."""

_ENTRY = "package.module:name"  # stands for an entry where another key is looked at
_OVERRIDE = {"when": {"device": "cpu"}}  # one that is right


def find_mistakes(path: Path) -> tuple[int, list[str]]:
    """How many kernels ``path`` names, and what is wrong with them, a line each.

    Beside what ``configured.configuration`` says: entries, gradients and sources that are not
    there, and conventions that are not known.
    """
    try:
        tables = configuration.tables_of(path) or {}
    except UsageError as error:
        return 0, [str(error)]
    found: list[str] = []
    for name, table in tables.items():
        try:
            read = configuration.read_tables({name: table}, path)
        except UsageError as error:
            found += _each(name, table, path) or [str(error)]
        else:
            what = f"{path}: kernels.{name}"
            found += [f"{what}: {said}" for said in _not_there(read[name], path.absolute().parent)]
    return len(tables), found


def _each(name: str, table: object, path: Path) -> list[str]:
    """What is wrong with each key for itself: reading the whole table ends at the first."""
    if not isinstance(table, Mapping):
        return []
    found: dict[str, None] = {}  # in order, each once
    for alone in _alone(table):
        try:
            configuration.read_tables({name: alone}, path)
        except UsageError as error:
            found[str(error)] = None
    return list(found)


def _alone(table: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The table with one key, and one override, at a time."""
    if "entry" not in table:
        yield {}
    for key, value in table.items():
        if key != "override" or not isinstance(value, list):
            yield {"entry": _ENTRY, key: value}
            continue
        for index, each in enumerate(value):
            yield {"entry": _ENTRY, key: [*[_OVERRIDE] * index, each]}


def _not_there(table: Capabilities, folder: Path) -> Iterator[str]:
    """What the table names, and is not there."""
    if table.convention is not None and table.convention not in CONVENTION_NAMES:
        yield str(UnknownName("convention", table.convention, CONVENTION_NAMES))
    if table.entry not in named_kernels.BUILTIN:
        yield from _reference("entry", table.entry, folder)
    if isinstance(table.backward, str) and table.backward != AUTOGRAD:
        yield from _reference("backward", table.backward, folder)
    for pattern in table.sources:
        if next(pattern_files(folder, pattern), None) is None:
            yield f"sources: {pattern!r} fits no file below {folder.name}."


def _reference(key: str, said: str, folder: Path) -> Iterator[str]:
    """What is wrong with ``file.py::name`` or ``package.module:name``."""
    file, colons, name = said.partition("::")
    if colons:
        path: Path | None = folder / file
        if not (folder / file).is_file():
            yield f"{key}: there is no file {file}."
            return
    else:
        module, _, name = said.partition(":")
        if not module or not name:
            yield f"{key}: {said!r} is neither FILE.py::NAME nor package.module:NAME."
            return
        found, path = _module(module, folder)
        if not found:
            yield f"{key}: there is no module {module!r}."
            return
    if path is not None:
        yield from _name(key, path, name.partition(".")[0], file if colons else module)


def _module(name: str, folder: Path) -> tuple[bool, Path | None]:
    """Whether there is such a module, and the Python file that it is, if it is one."""
    where: list[str] | None = None
    parts = name.split(".")
    spec = None
    for count in range(1, len(parts) + 1):
        full = ".".join(parts[:count])
        spec = _spec(full, where, folder)
        if spec is None:
            return False, None
        where = list(spec.submodule_search_locations or ())
    origin = Path(spec.origin) if spec and spec.origin else None
    return True, origin if origin and origin.suffix == ".py" and origin.is_file() else None


def _spec(name: str, where: list[str] | None, folder: Path) -> Any:
    """As ``importlib.util.find_spec``, which imports the packages on the way."""
    sys.path.insert(0, str(folder))
    try:
        found = (finder.find_spec(name, where) for finder in sys.meta_path)
        return next((spec for spec in found if spec is not None), None)
    finally:
        sys.path.remove(str(folder))


def _name(key: str, path: Path, name: str, shown: str) -> Iterator[str]:
    """Whether the file has the name; what it may get otherwise, as by a star, is not looked at."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        yield f"{key}: {shown} is no Python: {error}."
        return
    names = set(_bound(tree))
    if name not in names and not names & {"*", "__getattr__"}:
        yield f"{key}: {shown.partition('::')[0]} has no {name!r}."


def _bound(tree: ast.AST) -> Iterator[str]:
    """Names that a module binds, wherever it does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
