"""Reads and writes a project's configuration of kernels, and reads packages' entry points.

The tables are ``[tool.attncheck.kernels.NAME]`` in pyproject.toml or ``[kernels.NAME]`` in
attncheck.toml, in the nearest folder upwards that has any; the entry points are those of the group
``attncheck.kernels``.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attncheck.core.errors import UnknownName, UsageError, did_you_mean
from attncheck.core.files import read_bytes, write_files
from attncheck.subjects.capabilities.capability_table import AUTOGRAD, pattern_files, read_table
from attncheck.subjects.capabilities.named_kernels import BUILTIN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tomlkit.items import Comment, Table, Whitespace

    from attncheck.subjects.capabilities.capability_table import Capabilities


GROUP = "attncheck.kernels"  # the entry-point group of published kernels

FILES = {"attncheck.toml": (), "pyproject.toml": ("tool", "attncheck")}
"""Names of configuration files, and the keys that lead to attncheck's table in each."""

_KERNELS = "kernels"
_LARGEST_FILE = 1 << 22  # bytes; a larger configuration file is refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The kernels that a project's configuration file names."""

    path: Path | None = None
    kernels: Mapping[str, Capabilities] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The folder to which paths in entries are relative."""
        return self.path.parent if self.path else Path.cwd()


def read_configuration() -> Configuration:
    """Return the configuration of the nearest folder, from the working directory upwards, with one.

    Raises:
        UsageError: in one line, if a file is not TOML, a key or a name is invalid, or two files of
            one folder both configure attncheck.
    """
    path, tables = nearest_tables()
    return Configuration(path=path, kernels=read_tables(tables, path) if path else {})


def nearest_tables() -> tuple[Path | None, Mapping[str, Any]]:
    """Return the file that ``read_configuration`` reads, or None, and its tables unchecked.

    Raises UsageError like ``read_configuration``, except for errors within a table.
    """
    start = Path.cwd().absolute()
    for folder in (start, *start.parents):
        files = [folder / name for name in FILES if (folder / name).is_file()]
        configured = {path: tables for path in files if (tables := tables_of(path)) is not None}
        if len(configured) > 1:
            names = " and ".join(path.name for path in configured)
            raise UsageError(f"{names} of {folder} both configure attncheck: keep one.")
        for path, tables in configured.items():
            return path, tables
    return None, {}


def tables_of(path: Path) -> Mapping[str, Any] | None:
    """Return the unchecked tables of kernels in ``path`` by name; None if it configures none.

    Raises UsageError if the file is not TOML or has a key other than ``kernels``.
    """
    try:
        text = read_bytes(path, _display_path(path), "configuration", _LARGEST_FILE).decode("utf-8")
        data: Any = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{_display_path(path)} is no TOML: {error}.") from None
    place = _place(path)
    for key in place:
        data = data.get(key) if isinstance(data, Mapping) else None
    if data is None:
        return None
    what = f"{_display_path(path)}: {'.'.join(place) or 'the file'}"
    if not isinstance(data, Mapping):
        raise UsageError(f"{what} must be a table.")
    # A misspelt key must not be ignored silently.
    for key in data:
        if key != _KERNELS:
            raise UnknownName(f"{what}: key", key, [_KERNELS])
    tables = data.get(_KERNELS, {})
    if not isinstance(tables, Mapping):
        raise UsageError(f"{what}: {_KERNELS} must be a table, with one table a kernel in it.")
    return tables


def _place(path: Path) -> tuple[str, ...]:
    return FILES.get(path.name, FILES["attncheck.toml"])


def read_tables(tables: Mapping[str, Any], path: Path) -> dict[str, Capabilities]:
    """Return the Capabilities of tables from ``tables_of``; raises UsageError for mistakes."""
    kernels = {}
    for name, table in tables.items():
        what = f"{_display_path(path)}: {_KERNELS}.{name}"
        if not name.strip() or set(name) & set(":/\\"):
            raise UsageError(f"{what}: a kernel's name has no ':', '/' or '\\'.")
        # A kernel that shadowed a built-in one would be ambiguous on the command line.
        if name in BUILTIN:
            raise UsageError(f"{what}: attncheck has a kernel of this name: give it another.")
        kernels[name] = read_table(table, what)
    return kernels


def entry_points() -> dict[str, tuple[metadata.EntryPoint, ...]]:
    """Return the entry points of the group by name; several if packages use the same name."""
    points: dict[str, tuple[metadata.EntryPoint, ...]] = {}
    places = tuple((place, _last_change(place)) for place in sys.path)
    for each in _find_entry_points(metadata.entry_points, places):
        if each not in points.get(each.name, ()):  # a package that is found twice on the path
            points[each.name] = (*points.get(each.name, ()), each)
    return points


@functools.lru_cache(maxsize=1)
def _find_entry_points(
    find: Callable[..., Iterable[metadata.EntryPoint]], places: tuple[tuple[str, int], ...]
) -> tuple[metadata.EntryPoint, ...]:
    """Return the group's entry points in ``places``: folders of sys.path and their last changes.

    Cached, because it takes 0.05 s among hundreds of packages and is needed for each kernel.
    """
    del places
    return (*find(group=GROUP),)


def _last_change(place: str) -> int:
    """Return the modification time of a folder of sys.path in ns; 0 if it does not exist."""
    try:
        return Path(place).stat().st_mtime_ns  # "" is the working directory
    except OSError:
        return 0


def _display_path(path: Path) -> str:
    """Return ``path`` relative to the working directory if it is below it, else unchanged."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith(os.pardir) else relative


# ------------------------------------------------------------------ writing


def default_path() -> Path:
    """Return the file that configures attncheck, else the nearest that could, here or above.

    Raises UsageError if a file cannot be read.
    """
    # A file that already names kernels precedes a nearer one without any.
    path, _ = nearest_tables()
    here = Path.cwd()
    files = (folder / name for folder in (here, *here.parents) for name in FILES)
    path = path or next((file for file in files if file.is_file()), here / "pyproject.toml")
    return Path(os.path.relpath(path))


def check_kernel_name(name: str, path: Path, *, force: bool) -> None:
    """Raise UsageError unless a table called ``name`` may be written into ``path``.

    Args:
        path: The file, which need not exist.
        force: Whether an existing table may be replaced.
    """
    if not name.strip() or set(name) & set(":/\\\n"):
        raise UsageError(f"kernel {name!r} cannot be called so: no ':', '/' or '\\' in its name.")
    if name in BUILTIN:
        raise UsageError(f"attncheck has a kernel called {name!r}: give yours a --name of its own.")
    if path.is_dir():
        raise UsageError(f"{path} is a folder: name a TOML file.")
    if path.exists() and not force and name in (tables_of(path) or {}):
        raise UsageError(
            f"{path} has a table of the kernel {name!r} already: --force replaces it, --name gives "
            "yours another name."
        )


def entry_from(kernel: str, path: Path) -> str:
    """Return ``kernel`` as the ``entry`` of a table in ``path``, relative to its folder."""
    file, colons, name = kernel.partition("::")
    if not colons:
        return kernel
    relative = os.path.relpath(Path(file).absolute(), path.absolute().parent)
    return f"{Path(relative).as_posix()}::{name}"


def table_header(path: Path, name: str) -> str:
    """Return the header of the kernel's table in ``path``: ``tool.attncheck.kernels.mine``."""
    # TOML quotes keys as JSON does.
    key = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)
    return ".".join((*_place(path), _KERNELS, key))


def with_table(path: Path, name: str, table: str) -> str:
    """Return the text of ``path`` with the kernel's table replaced by ``table``, or appended.

    Args:
        path: The file; one that does not exist counts as empty.
        table: The table with its subtables, as ``render_table`` returns them.

    Raises:
        UsageError: if the file is not TOML, or writes its tables in a way that cannot be edited.
    """
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    before = ""
    if path.exists():
        tables_of(path)  # raises UsageError for an invalid file
        # Read as bytes, because reading as text would turn \r\n into \n.
        before = path.read_bytes().decode("utf-8")
    places = (*_place(path), _KERNELS)
    ours: Any = tomlkit.parse(table)
    for key in (*places, name):
        ours = ours[key]
    try:
        document = tomlkit.parse(before)
        holder: Any = document
        for key in places:
            # A super table has no header line of its own.
            holder = holder.setdefault(key, tomlkit.table(is_super_table=True))
        if name in holder:
            # tomlkit counts comments after a table as its own, but they belong to the next one.
            for item in _trailing_comments(holder[name]):
                _last_table(ours).add(item)
        holder[name] = ours
        after = tomlkit.dumps(document)
    except (TOMLKitError, ValueError):  # inline tables cannot be extended
        after = ""
    newline = "\r\n" if "\r\n" in before else "\n"
    after = re.sub(r"\r?\n", newline, after) if newline == "\r\n" else after
    first = f"[{table_header(path, name)}]"
    if f"{newline}{first}" in after and first not in before:  # exactly one blank line before it
        after = re.sub(f"(?:{newline})+{re.escape(first)}", f"{newline * 2}{first}", after, count=1)
    # It is the user's file, so nothing else in it may change.
    if not _differ_in_the_table_alone(before, after, table, (*places, name)):
        raise UsageError(f"{path} writes its tables in a way that cannot be added to: do it there.")
    return after


def _last_table(table: Any) -> Table:
    """Return the innermost table at the end of ``table``'s text, or ``table`` itself."""
    from tomlkit.items import AoT, Table

    for _, item in reversed(table.value.body):
        if isinstance(item, AoT):
            return _last_table(item.body[-1])
        if isinstance(item, Table):
            return _last_table(item)
    result: Table = table
    return result


def _trailing_comments(table: Table) -> list[Comment | Whitespace]:
    """Return the blank lines and comments after a table's last key."""
    from tomlkit.items import Comment, Whitespace

    items: list[Comment | Whitespace] = []
    for _, item in reversed(_last_table(table).value.body):
        if not isinstance(item, Comment | Whitespace):
            break
        items.insert(0, item)
    return items


def _differ_in_the_table_alone(before: str, after: str, table: str, keys: tuple[str, ...]) -> bool:
    """Return whether ``after`` has ``table`` at ``keys`` and otherwise equals ``before``."""
    try:
        old, new, ours = (tomllib.loads(text) for text in (before, after, table))
    except tomllib.TOMLDecodeError:
        return False
    _pop_table(old, keys)
    return bool(_pop_table(new, keys) == _pop_table(ours, keys) and old == new)


def _pop_table(data: dict[str, Any], keys: tuple[str, ...]) -> Any:
    """Remove and return the table at ``keys``, and remove tables that this leaves empty."""
    tables = [data]
    for key in keys[:-1]:
        tables.append(tables[-1].setdefault(key, {}))
    table = tables[-1].pop(keys[-1], None)
    # From the inside out: a parent may be empty once its child is removed.
    for holder, key in reversed(list(zip(tables, keys[:-1], strict=False))):
        if not holder[key]:
            del holder[key]
    return table


def write_file(path: Path, text: str) -> None:
    """Replace the contents of ``path`` atomically; links are followed, and permissions stay.

    Raises UsageError if it cannot be written.
    """
    target = path.resolve()
    # Written as bytes, which keeps the file's line ends.
    write_files({target.name: text.encode()}, target.parent, what=str(path), instead="--file")


CONVENTION_NAMES = ("native", "sdpa", "flash_attn", "varlen", "flex", "paged")
"""Names of ``conventions.CONVENTIONS``, repeated here because that module imports torch."""


def find_mistakes(path: Path) -> tuple[int, list[str]]:
    """Return how many kernels ``path`` names, and their mistakes, one line each.

    Beside the errors of ``read_configuration`` these are entries, gradient functions and sources
    that do not exist, and unknown conventions.
    """
    try:
        tables = tables_of(path) or {}
    except UsageError as error:
        return 0, [str(error)]
    mistakes: list[str] = []
    for name, table in tables.items():
        try:
            capabilities = read_tables({name: table}, path)
        except UsageError as error:
            # If no key is wrong by itself, the keys contradict each other, as ``error`` says.
            mistakes += _mistakes_of_keys(name, table, path) or [str(error)]
        else:
            missing = _missing_references(capabilities[name], path.absolute().parent)
            mistakes += [f"{path}: kernels.{name}: {reason}" for reason in missing]
    return len(tables), mistakes


def _mistakes_of_keys(name: str, table: object, path: Path) -> list[str]:
    """Return the mistakes of each key by itself; reading the whole table stops at the first."""
    if not isinstance(table, Mapping):
        return []
    mistakes: dict[str, None] = {}  # in order, without duplicates
    for variant in _tables_of_one_key(table):
        try:
            read_tables({name: variant}, path)
        except UsageError as error:
            mistakes[str(error)] = None
    return list(mistakes)


def _tables_of_one_key(table: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield valid tables in which one key, or one override, comes from ``table``."""
    if "entry" not in table:
        yield {}
    valid = {"entry": "package.module:name"}
    for key, value in table.items():
        if key != "override" or not isinstance(value, list):
            yield valid | {key: value}
            continue
        for index, each in enumerate(value):
            # Valid overrides precede it, so that the message has its number.
            yield valid | {key: [*[{"when": {"device": "cpu"}}] * index, each]}


def _missing_references(table: Capabilities, folder: Path) -> Iterator[str]:
    """Yield an error for each convention, entry, function or source that does not exist."""
    if table.convention is not None and table.convention not in CONVENTION_NAMES:
        yield str(UnknownName("convention", table.convention, CONVENTION_NAMES))
    if table.entry not in BUILTIN:
        yield from _missing_reference("entry", table.entry, folder)
    if isinstance(table.backward, str) and table.backward != AUTOGRAD:
        yield from _missing_reference("backward", table.backward, folder)
    # A pattern without files would make ``gate --changed-since`` skip the kernel.
    for pattern in table.sources:
        if next(pattern_files(folder, pattern), None) is None:
            yield f"sources: {pattern!r} fits no file below {folder.name}."


def _missing_reference(key: str, reference: str, folder: Path) -> Iterator[str]:
    """Yield an error if ``file.py::name`` or ``package.module:name`` does not exist."""
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
    if name not in bound and not bound & {"*", "__getattr__"}:  # ``import *`` may bind any name
        near = did_you_mean(name, bound)
        yield f"{key}: {where} has no {name!r}{f': {near}' if near else '.'}"


def _locate_module(name: str, folder: Path) -> tuple[bool, Path | None]:
    """Return whether the module exists, and its Python file, if it has one.

    Unlike ``importlib.util.find_spec`` this does not import the parent packages.
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
    """Yield the names that a module binds at any level."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
