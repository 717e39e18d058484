"""The project's file that names kernels, and entry points of packages: read and written.

``[tool.attncheck.kernels.NAME]`` of pyproject.toml or ``[kernels.NAME]`` of attncheck.toml, in the
nearest folder upwards that has one; entry points of the group ``attncheck.kernels``.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attncheck.capabilities import named_kernels
from attncheck.capabilities.capability_table import read_table
from attncheck.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.capabilities.capability_table import Capabilities

__all__ = [
    "FILES",
    "GROUP",
    "Configuration",
    "check_kernel_name",
    "default_path",
    "entry_from",
    "entry_points",
    "nearest_tables",
    "published_kernel",
    "read_configuration",
    "read_tables",
    "table_header",
    "tables_of",
    "with_table",
    "write_file",
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


def read_configuration(start: Path | None = None) -> Configuration:
    """That of the nearest folder from ``start`` (the working directory) upwards that has one.

    Raises:
        UsageError: for a file that is no TOML, a key or a name that cannot be, and two files of
            one folder that both name kernels; in one line.
    """
    path, tables = nearest_tables(start)
    return Configuration(path=path, kernels=read_tables(tables, path) if path else {})


def nearest_tables(start: Path | None = None) -> tuple[Path | None, Mapping[str, Any]]:
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
        if name in named_kernels.BUILTIN:
            raise UsageError(f"{what}: attncheck has a kernel of this name: give it another.")
        found[name] = read_table(table, what)
    return found


def table_header(path: Path, name: str) -> str:
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


def published_kernel(name: str, found: object, value: str) -> tuple[object, Capabilities | None]:
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
        return None, read_table(dict(found), what)
    return entry, read_table({**found, "entry": value}, what)


def _shown(path: Path) -> str:
    """From here where it is here or below, else whole."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith(os.pardir) else relative


def default_path() -> Path:
    """The file that configures attncheck, or else that of the project; here, or in a folder above.

    Raises UsageError for one that cannot be read.
    """
    path, _ = nearest_tables()
    here = Path.cwd()
    there = (folder / name for folder in (here, *here.parents) for name in FILES)
    path = path or next((each for each in there if each.is_file()), here / "pyproject.toml")
    return Path(os.path.relpath(path))


def check_kernel_name(name: str, path: Path, *, force: bool) -> None:
    """Raises UsageError unless a table called ``name`` may be written into ``path``.

    Args:
        name: Of the kernel.
        path: The file, which need not be there.
        force: Whether one that is there may be replaced.
    """
    if not name.strip() or set(name) & set(":/\\\n"):
        raise UsageError(f"kernel {name!r} cannot be called so: no ':', '/' or '\\' in its name.")
    if name in named_kernels.BUILTIN:
        raise UsageError(f"attncheck has a kernel called {name!r}: give yours a --name of its own.")
    if path.is_dir():
        raise UsageError(f"{path} is a folder: name a TOML file.")
    if path.exists() and not force and name in (tables_of(path) or {}):
        raise UsageError(
            f"{path} has a table of the kernel {name!r} already: --force replaces it, --name gives "
            "yours another name."
        )


def entry_from(kernel: str, path: Path) -> str:
    """``kernel`` as a table of the file ``path`` names it: files relative to its folder."""
    file, colons, name = kernel.partition("::")
    if not colons:
        return kernel
    relative = os.path.relpath(Path(file).absolute(), path.absolute().parent)
    return f"{Path(relative).as_posix()}::{name}"


def with_table(path: Path, name: str, table: str) -> str:
    """The text of ``path`` with ``table`` in the place of the kernel's own, or at its end.

    Args:
        path: The file; one that is not there is empty.
        name: Of the kernel.
        table: The table and those below it, as ``capability_table.written`` gives them.

    Raises:
        UsageError: where the file is no TOML, or writes its tables in a way that this cannot edit.
    """
    before = _read(path)
    newline = "\r\n" if "\r\n" in before else "\n"
    kept = "".join(_without(before, table_header(path, name)))
    if kept and not kept.endswith("\n"):
        kept += newline
    between = newline if kept else ""
    after = kept + between + table.replace("\n", newline)
    if not _differ_in_the_table_alone(before, after, path, name):
        raise UsageError(f"{path} writes its tables in a way that cannot be added to: do it there.")
    return after


def write_file(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in one step; a link is followed, and permissions stay.

    Raises UsageError where it cannot be written.
    """
    target = path.resolve()
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
                file.write(text)
            mode = target.stat().st_mode if target.exists() else 0o666 & ~_mask()
            Path(temporary).chmod(mode & 0o777)
            Path(temporary).replace(target)
        except BaseException:
            with suppress(OSError):
                Path(temporary).unlink()
            raise
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}.") from None


def _mask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _read(path: Path) -> str:
    if not path.exists():
        return ""
    tables_of(path)  # says what is wrong with it
    return path.read_bytes().decode("utf-8")


def _without(text: str, header: str) -> Iterator[str]:
    """The lines of ``text`` outside the table ``header`` and those below it."""
    ours = False
    for line in text.splitlines(keepends=True):
        if line.lstrip().startswith("["):
            title = line.strip().lstrip("[").partition("]")[0].strip().replace(" ", "")
            ours = title == header or title.startswith(f"{header}.")
        if not ours:
            yield line


def _differ_in_the_table_alone(before: str, after: str, path: Path, name: str) -> bool:
    """Whether the new text says of everything else what the old one did."""
    try:
        old, new = tomllib.loads(before), tomllib.loads(after)
    except tomllib.TOMLDecodeError:
        return False
    place = FILES.get(path.name, ())
    return _taken_out(old, place, name) == _taken_out(new, place, name)


def _taken_out(data: dict[str, Any], place: tuple[str, ...], name: str) -> dict[str, Any]:
    """``data`` without the kernel's table, and without what only held it."""
    tables = [data]
    for key in (*place, "kernels"):
        tables.append(tables[-1].setdefault(key, {}))
    tables[-1].pop(name, None)
    for table, key in reversed(list(zip(tables, (*place, "kernels"), strict=False))):
        if not table[key]:
            del table[key]
    return data
