"""Kernels that somebody has named: in a project's own file, or as entry points of a package.

``[tool.attncheck.kernels.NAME]`` of pyproject.toml or ``[kernels.NAME]`` of attncheck.toml, in the
nearest folder upwards that has one; entry points of the group ``attncheck.kernels``.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attncheck.errors import UsageError
from attncheck.subjects import builtin
from attncheck.subjects.capability_table import read

if TYPE_CHECKING:
    from attncheck.subjects.capabilities import Capabilities

__all__ = [
    "FILES",
    "GROUP",
    "Configuration",
    "configuration",
    "entry_points",
    "header",
    "nearest",
    "published",
    "read_tables",
    "tables_of",
]

GROUP = "attncheck.kernels"
"""The entry-point group of published kernels."""

FILES = {"attncheck.toml": (), "pyproject.toml": ("tool", "attncheck")}
"""Files that kernels are named in → the table of theirs that is attncheck's."""

_KERNELS = "kernels"


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What a project says of its kernels.

    Attributes:
        path: The file; relative entries are relative to its folder.
        kernels: Their tables by name.
    """

    path: Path | None = None
    kernels: Mapping[str, Capabilities] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where entries begin."""
        return self.path.parent if self.path else Path.cwd()


def configuration(start: Path | None = None) -> Configuration:
    """That of the nearest folder from ``start`` (the working directory) upwards that has one.

    Raises:
        UsageError: for a file that is no TOML, a key or a name that cannot be, and two files of
            one folder that both name kernels; in one line.
    """
    path, tables = nearest(start)
    return Configuration(path=path, kernels=read_tables(tables, path) if path else {})


def nearest(start: Path | None = None) -> tuple[Path | None, Mapping[str, Any]]:
    """The file that ``configuration`` reads, None where there is none, and its tables as written.

    Raises UsageError as ``configuration``, but for what is wrong within a table.
    """
    start = (start or Path.cwd()).absolute()
    for folder in (start, *start.parents):
        there = [folder / name for name in FILES if (folder / name).is_file()]
        ours = {path: found for path in there if (found := tables_of(path)) is not None}
        if len(ours) > 1:
            names = " and ".join(path.name for path in ours)
            raise UsageError(f"{names} of {folder} both configure attncheck: keep one.")
        for path, found in ours.items():
            return path, found
    return None, {}


def tables_of(path: Path) -> Mapping[str, Any] | None:
    """The tables of kernels in ``path`` by name, as written; None where it has none of attncheck's.

    Raises UsageError for a file that is no TOML, or a key other than ``kernels``.
    """
    try:
        found: Any = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{_shown(path)} is no TOML: {error}.") from None
    except OSError as error:
        raise UsageError(f"{_shown(path)} cannot be read: {error.strerror or error}.") from None
    place = FILES.get(path.name, FILES["attncheck.toml"])
    for key in place:
        found = found.get(key) if isinstance(found, Mapping) else None
    if found is None:
        return None
    what = f"{_shown(path)}: {'.'.join(place) or 'the file'}"
    if not isinstance(found, Mapping):
        raise UsageError(f"{what} must be a table.")
    for key in found:
        if key != _KERNELS:
            raise UsageError(f"{what}: key {key!r} is not known: choose from {_KERNELS}.")
    tables = found.get(_KERNELS, {})
    if not isinstance(tables, Mapping):
        raise UsageError(f"{what}: {_KERNELS} must be a table, with one table a kernel in it.")
    return tables


def read_tables(tables: Mapping[str, Any], path: Path) -> dict[str, Capabilities]:
    """What ``tables_of`` gives, read strictly; raises UsageError as ``configuration``."""
    found = {}
    for name, table in tables.items():
        what = f"{_shown(path)}: {_KERNELS}.{name}"
        if not name.strip() or set(name) & set(":/\\"):
            raise UsageError(f"{what}: a kernel's name has no ':', '/' or '\\'.")
        if name in builtin.SUBJECTS:
            raise UsageError(f"{what}: attncheck has a kernel of this name: give it another.")
        found[name] = read(table, what)
    return found


def header(path: Path, name: str) -> str:
    """The table of the kernel ``name`` in ``path``: ``tool.attncheck.kernels.mine``."""
    key = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)
    return ".".join((*FILES.get(path.name, FILES["attncheck.toml"]), _KERNELS, key))


def entry_points() -> dict[str, tuple[metadata.EntryPoint, ...]]:
    """Those of the group by name; more than one where packages do not agree."""
    found: dict[str, tuple[metadata.EntryPoint, ...]] = {}
    for each in metadata.entry_points(group=GROUP):
        if each not in found.get(each.name, ()):  # a package that is found twice on the path
            found[each.name] = (*found.get(each.name, ()), each)
    return found


def published(name: str, found: object, value: str) -> tuple[object, Capabilities | None]:
    """The kernel and the table, if any, of what an entry point holds.

    Args:
        name: Of the entry point.
        found: A Subject, a function, or a table whose ``entry`` is one, or names one.
        value: Where the entry point says that it is: ``package.module:name``.

    Returns:
        The kernel, or None where the table's ``entry`` names it; and the table.

    Raises:
        UsageError: for a table that cannot be.
    """
    if not isinstance(found, Mapping):
        return found, None
    what = f"entry point {name!r} of {GROUP} ({value})"
    entry = found.get("entry")
    if entry is None or isinstance(entry, str):
        return None, read(dict(found), what)
    return entry, read({**found, "entry": value}, what)


def _shown(path: Path) -> str:
    """From here where it is here or below, else whole."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith(os.pardir) else relative
