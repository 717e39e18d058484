"""Writing a kernel's table into a project's file, with everything else left as it is."""

from __future__ import annotations

import os
import tempfile
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attncheck.errors import UsageError
from attncheck.subjects import builtin, configured

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["check_name", "entry_from", "usual", "with_table", "write"]


def usual() -> Path:
    """The file that configures attncheck, or else that of the project; here, or in a folder above.

    Raises UsageError for one that cannot be read.
    """
    path, _ = configured.nearest()
    here = Path.cwd()
    there = (folder / name for folder in (here, *here.parents) for name in configured.FILES)
    path = path or next((each for each in there if each.is_file()), here / "pyproject.toml")
    return Path(os.path.relpath(path))


def check_name(name: str, path: Path, *, force: bool) -> None:
    """Raises UsageError unless a table called ``name`` may be written into ``path``.

    Args:
        name: Of the kernel.
        path: The file, which need not be there.
        force: Whether one that is there may be replaced.
    """
    if not name.strip() or set(name) & set(":/\\\n"):
        raise UsageError(f"kernel {name!r} cannot be called so: no ':', '/' or '\\' in its name.")
    if name in builtin.SUBJECTS:
        raise UsageError(f"attncheck has a kernel called {name!r}: give yours a --name of its own.")
    if path.is_dir():
        raise UsageError(f"{path} is a folder: name a TOML file.")
    if path.exists() and not force and name in (configured.tables_of(path) or {}):
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
    kept = "".join(_without(before, configured.header(path, name)))
    if kept and not kept.endswith("\n"):
        kept += newline
    between = newline if kept else ""
    after = kept + between + table.replace("\n", newline)
    if not _differ_in_the_table_alone(before, after, path, name):
        raise UsageError(f"{path} writes its tables in a way that cannot be added to: do it there.")
    return after


def write(path: Path, text: str) -> None:
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
    configured.tables_of(path)  # says what is wrong with it
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
    place = configured.FILES.get(path.name, ())
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
