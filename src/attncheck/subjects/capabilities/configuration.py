"""The project's file that names kernels, and entry points of packages: read and written.

``[tool.attncheck.kernels.NAME]`` of pyproject.toml or ``[kernels.NAME]`` of attncheck.toml, in the
nearest folder upwards that has one; entry points of the group ``attncheck.kernels``.
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
"""Files that kernels are named in → the table of theirs that is attncheck's."""

_KERNELS = "kernels"
_LARGEST = 1 << 22  # bytes of such a file


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A project's kernels."""

    path: Path | None = None  # the file; relative entries are relative to its folder
    kernels: Mapping[str, Capabilities] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The folder that entries are relative to."""
        return self.path.parent if self.path else Path.cwd()


def read_configuration() -> Configuration:
    """Read that of the nearest folder from the working directory upwards that has one.

    Raises:
        UsageError: for a file that is no TOML, a key or a name that cannot be, and two files of
            one folder that both name kernels; in one line.
    """
    path, tables = nearest_tables()
    return Configuration(path=path, kernels=read_tables(tables, path) if path else {})


def nearest_tables() -> tuple[Path | None, Mapping[str, Any]]:
    """Return the file that ``read_configuration`` reads, and its tables as written.

    The file is None where there is none. Raises UsageError as ``read_configuration``, but for what
    is wrong within a table.
    """
    start = Path.cwd().absolute()
    for folder in (start, *start.parents):
        files = [folder / name for name in FILES if (folder / name).is_file()]
        ours = {path: tables for path in files if (tables := tables_of(path)) is not None}
        if len(ours) > 1:
            names = " and ".join(path.name for path in ours)
            raise UsageError(f"{names} of {folder} both configure attncheck: keep one.")
        for path, tables in ours.items():
            return path, tables
    return None, {}


def tables_of(path: Path) -> Mapping[str, Any] | None:
    """Return the tables of kernels in ``path`` by name, as written; None where it has none.

    Raises UsageError for a file that is no TOML, or a key other than ``kernels``.
    """
    try:
        text = read_bytes(path, _shown(path), "configuration", _LARGEST).decode("utf-8")
        data: Any = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{_shown(path)} is no TOML: {error}.") from None
    place = _place(path)
    for key in place:
        data = data.get(key) if isinstance(data, Mapping) else None
    if data is None:
        return None
    what = f"{_shown(path)}: {'.'.join(place) or 'the file'}"
    if not isinstance(data, Mapping):
        raise UsageError(f"{what} must be a table.")
    # A misspelt table would be silently nothing.
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
    """Read what ``tables_of`` gives, strictly; raises UsageError as ``read_configuration``."""
    kernels = {}
    for name, table in tables.items():
        what = f"{_shown(path)}: {_KERNELS}.{name}"
        if not name.strip() or set(name) & set(":/\\"):
            raise UsageError(f"{what}: a kernel's name has no ':', '/' or '\\'.")
        # Whoever types the name must get the kernel that they mean.
        if name in BUILTIN:
            raise UsageError(f"{what}: attncheck has a kernel of this name: give it another.")
        kernels[name] = read_table(table, what)
    return kernels


def entry_points() -> dict[str, tuple[metadata.EntryPoint, ...]]:
    """Return those of the group by name; more than one where packages do not agree."""
    points: dict[str, tuple[metadata.EntryPoint, ...]] = {}
    places = tuple((place, _changed(place)) for place in sys.path)
    for each in _published(metadata.entry_points, places):
        if each not in points.get(each.name, ()):  # a package that is found twice on the path
            points[each.name] = (*points.get(each.name, ()), each)
    return points


@functools.lru_cache(maxsize=1)
def _published(
    find: Callable[..., Iterable[metadata.EntryPoint]], places: tuple[tuple[str, int], ...]
) -> tuple[metadata.EntryPoint, ...]:
    """Return those of the group in ``places``, the folders of the path and when each was changed.

    Looked for once: among hundreds of packages it takes a twentieth of a second, for each kernel.
    """
    del places
    return (*find(group=GROUP),)


def _changed(place: str) -> int:
    """Return when a folder of the path was changed last, as its file system counts; 0 of none."""
    try:
        return Path(place).stat().st_mtime_ns  # an empty one is this folder
    except OSError:
        return 0


def published_kernel(
    name: str, published: object, value: str
) -> tuple[object, Capabilities | None]:
    """Return the kernel and the table, if any, of what an entry point holds.

    Args:
        published: A Subject, a function, or a table whose ``entry`` is one, or names one.
        value: Where the entry point says that it is: ``package.module:name``.

    Returns:
        The kernel, or None where the table's ``entry`` names it; and the table.

    Raises:
        UsageError: for a table that cannot be.
    """
    if not isinstance(published, Mapping):
        return published, None
    what = f"entry point {name!r} of {GROUP} ({value})"
    entry = published.get("entry")
    if entry is None or isinstance(entry, str):
        return None, read_table(dict(published), what)
    return entry, read_table({**published, "entry": value}, what)


def _shown(path: Path) -> str:
    """From here where it is here or below, else whole."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith(os.pardir) else relative


# ------------------------------------------------------------------ writing


def default_path() -> Path:
    """Return the file that configures attncheck, or else the project's; here, or in a folder above.

    Raises UsageError for one that cannot be read.
    """
    # A file that has kernels already comes before a nearer one without.
    path, _ = nearest_tables()
    here = Path.cwd()
    files = (folder / name for folder in (here, *here.parents) for name in FILES)
    path = path or next((file for file in files if file.is_file()), here / "pyproject.toml")
    return Path(os.path.relpath(path))


def check_kernel_name(name: str, path: Path, *, force: bool) -> None:
    """Raise UsageError unless a table called ``name`` may be written into ``path``.

    Args:
        path: The file, which need not be there.
        force: Whether one that is there may be replaced.
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
    """Return ``kernel`` as a table of the file ``path`` names it: files relative to its folder."""
    file, colons, name = kernel.partition("::")
    if not colons:
        return kernel
    relative = os.path.relpath(Path(file).absolute(), path.absolute().parent)
    return f"{Path(relative).as_posix()}::{name}"


def table_header(path: Path, name: str) -> str:
    """Return where the kernel ``name`` stands in ``path``: ``tool.attncheck.kernels.mine``."""
    # TOML quotes keys as JSON does.
    key = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)
    return ".".join((*_place(path), _KERNELS, key))


def with_table(path: Path, name: str, table: str) -> str:
    """Return the text of ``path`` with ``table`` in the place of the kernel's own, or at its end.

    Args:
        path: The file; one that is not there is empty.
        table: The table and those below it, as ``render_table`` gives them.

    Raises:
        UsageError: where the file is no TOML, or writes its tables in a way that cannot be edited.
    """
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    before = ""
    if path.exists():
        tables_of(path)  # says what is wrong with it
        # Not as text: Python would turn a file's \r\n into \n.
        before = path.read_bytes().decode("utf-8")
    places = (*_place(path), _KERNELS)
    ours: Any = tomlkit.parse(table)
    for key in (*places, name):
        ours = ours[key]
    try:
        document = tomlkit.parse(before)
        holder: Any = document
        for key in places:
            # A super table writes no empty header of its own.
            holder = holder.setdefault(key, tomlkit.table(is_super_table=True))
        if name in holder:
            # tomlkit counts comments behind a table as its own; a reader, as the next table's.
            for item in _behind(holder[name]):
                _last_table(ours).add(item)
        holder[name] = ours
        after = tomlkit.dumps(document)
    except (TOMLKitError, ValueError):  # an inline table, which holds no others
        after = ""
    newline = "\r\n" if "\r\n" in before else "\n"
    after = re.sub(r"\r?\n", newline, after) if newline == "\r\n" else after
    first = f"[{table_header(path, name)}]"
    if f"{newline}{first}" in after and first not in before:  # a line of its own before it
        after = re.sub(f"(?:{newline})+{re.escape(first)}", f"{newline * 2}{first}", after, count=1)
    # Somebody's file: what cannot be proven harmless is not written.
    if not _differ_in_the_table_alone(before, after, table, (*places, name)):
        raise UsageError(f"{path} writes its tables in a way that cannot be added to: do it there.")
    return after


def _last_table(table: Any) -> Table:
    """The table itself, or the last one within it, which ends where it does."""
    from tomlkit.items import AoT, Table

    for _, item in reversed(table.value.body):
        if isinstance(item, AoT):
            return _last_table(item.body[-1])
        if isinstance(item, Table):
            return _last_table(item)
    result: Table = table
    return result


def _behind(table: Table) -> list[Comment | Whitespace]:
    """Blank lines and comments behind its last key: of what follows it, as a reader sees them."""
    from tomlkit.items import Comment, Whitespace

    items: list[Comment | Whitespace] = []
    for _, item in reversed(_last_table(table).value.body):
        if not isinstance(item, Comment | Whitespace):
            break
        items.insert(0, item)
    return items


def _differ_in_the_table_alone(before: str, after: str, table: str, keys: tuple[str, ...]) -> bool:
    """Return whether the texts differ in the table alone, which the new one has."""
    try:
        old, new, ours = (tomllib.loads(text) for text in (before, after, table))
    except tomllib.TOMLDecodeError:
        return False
    _pop_table(old, keys)
    return bool(_pop_table(new, keys) == _pop_table(ours, keys) and old == new)


def _pop_table(data: dict[str, Any], keys: tuple[str, ...]) -> Any:
    """Take the table out of ``data``, and what only held it; return it."""
    tables = [data]
    for key in keys[:-1]:
        tables.append(tables[-1].setdefault(key, {}))
    table = tables[-1].pop(keys[-1], None)
    # From within: a table that is empty now only held the one that is gone.
    for holder, key in reversed(list(zip(tables, keys[:-1], strict=False))):
        if not holder[key]:
            del holder[key]
    return table


def write_file(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in one step; a link is followed, and permissions stay.

    Raises UsageError where it cannot be written.
    """
    target = path.resolve()
    # As bytes: the line ends are the file's own.
    write_files({target.name: text.encode()}, target.parent, what=str(path), instead="--file")


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
