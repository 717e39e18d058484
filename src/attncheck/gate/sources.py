"""What a kernel is made of, as a number: a run goes on only where that is what it was."""

from __future__ import annotations

import hashlib
import os
import tempfile
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attncheck.capabilities import named_kernels
from attncheck.capabilities.capability_table import pattern_files
from attncheck.capabilities.configuration import read_configuration

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from attncheck.workers.journal_format import JournalContent

__all__ = ["differs", "fingerprint", "loaded"]

_PACKAGES = ("attncheck", "torch", "triton", "numpy")
_MOST_FILES = 2000
_LARGEST = 2**28  # bytes of one that is read
_FILES = "files"  # of a description's facts


def fingerprint(kernels: Sequence[str], written: Iterable[str] = ()) -> str:
    """Sixteen hexadecimal digits of the files of ``kernels``, their tables, and our versions.

    Of a kernel in a module nothing is known but its configured ``sources``: no kernel is imported.

    Args:
        kernels: As they are asked for.
        written: Folders that a run writes to: what lies in them is no source.
    """
    apart = [Path(folder).resolve() for folder in written]
    found = hashlib.sha256()
    for package in _PACKAGES:
        found.update(f"{package} {_version(package)}\n".encode())
    for kernel in kernels:
        found.update(f"{kernel}\n".encode())
        for path in _files(kernel):
            if not any(path.resolve().is_relative_to(folder) for folder in apart):
                found.update(os.fsencode(path) + _hash(path).encode())
    return found.hexdigest()[:16]


def loaded(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Facts of a kernel's description: the SHA-256 of each file that its process has loaded.

    Files below the working directory are named from there. The names are foreign: what is no
    regular file is not read.
    """
    here = f"{Path.cwd()}{os.sep}"
    shown = (name.removeprefix(here) for name in islice(names, _MOST_FILES))
    hashes = {name.encode(errors="backslashreplace").decode(): _hash(Path(name)) for name in shown}
    return {_FILES: hashes}


def differs(before: JournalContent) -> str:
    """What of the kernels is another than as ``before`` began, or cannot be told; empty for none.

    No kernel is imported: files that were loaded then are read now.
    """
    told: dict[str, Mapping[str, str]] = {}
    answered: dict[str, None] = {}
    for id_, done in before.results.items():
        unit = before.units.get(id_)
        if unit is None or unit.commit:  # what another commit's files are is not for us to keep
            continue
        answered[unit.kernel] = None
        if unit.kind == "describe":
            told[unit.kernel] = _told(done.facts)
    for hashes in told.values():
        for name, known in hashes.items():
            if not _is_over(Path(name)) and _hash(Path(name)) != known:
                return f"{name} has changed"
    unknown = (k for k in answered if not told.get(k) and not _is_told(k))
    return next((f"nobody can tell whether {kernel} has changed" for kernel in unknown), "")


def _told(facts: Mapping[str, Any]) -> Mapping[str, str]:
    found = facts.get(_FILES)
    return found if isinstance(found, dict) else {}


def _is_over(path: Path) -> bool:
    """Whether it was a process's own, as torch.distributed writes a module for each."""
    return path.is_relative_to(tempfile.gettempdir()) and not os.path.lexists(path)


def _is_told(kernel: str) -> bool:
    """Whether the fingerprint says it of a kernel without files: ours are as our version is."""
    table = read_configuration().kernels.get(kernel)
    return kernel in named_kernels.BUILTIN or (table is not None and bool(table.sources))


def _hash(path: Path) -> str:
    """Hexadecimal digits; empty of what is no file that can be read."""
    try:
        if not path.is_file() or path.stat().st_size > _LARGEST:
            return ""
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError):  # a name with a NUL
        return ""


def _files(kernel: str) -> Iterator[Path]:
    project = read_configuration()
    table = project.kernels.get(kernel)
    entry = kernel if table is None else table.entry
    file, colons, _ = entry.partition("::")
    if colons:
        yield Path(file) if table is None else project.folder / file
    if table is None or project.path is None:
        return
    yield project.path
    for pattern in table.sources:
        yield from islice(pattern_files(project.folder, pattern), _MOST_FILES)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
