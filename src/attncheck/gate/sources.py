"""Detect whether the sources of a kernel have changed since a run or a commit."""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from attncheck.core.errors import UsageError
from attncheck.gate.other_commit import run_git
from attncheck.subjects.capabilities import named_kernels
from attncheck.subjects.capabilities.capability_table import matches_pattern, pattern_files
from attncheck.subjects.capabilities.configuration import read_configuration
from attncheck.subjects.hub_kernels import is_hub_folder
from attncheck.verify.environment import package_version
from attncheck.workers.journal_format import JournalContent

# Packages whose versions affect the judge or the kernels.
_PACKAGES = ("attncheck", "torch", "triton", "numpy")
_MOST_FILES = 2000  # Files of a kernel, or of a pattern, that are read at most.
_LARGEST = 2**28  # Bytes of the largest file that is read.
_FILES = "files"  # Key among the facts of a ``describe`` unit.


def source_fingerprint(kernels: Sequence[str], written: Iterable[str] = ()) -> str:
    """Return a digest, 16 hexadecimal digits, of the kernels' files, tables, and our versions.

    For a kernel in a module it covers only the configured ``sources``, since nothing is imported.

    Args:
        written: Folders that a run writes to, whose files are not sources.
    """
    excluded = [Path(folder).resolve() for folder in written]
    digest = hashlib.sha256()
    for package in _PACKAGES:
        digest.update(f"{package} {package_version(package)}\n".encode())
    for kernel in kernels:
        digest.update(f"{kernel}\n".encode())
        for path in _source_files(kernel):
            if not any(path.resolve().is_relative_to(folder) for folder in excluded):
                # With names, so that exchanging two files counts as a change.
                digest.update(os.fsencode(path) + _file_hash(path).encode())
    return digest.hexdigest()[:16]


def file_hashes(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the SHA-256 of each file that a kernel's process has loaded, for its description.

    Names below the working directory are relative to it. Only regular files are read, since the
    names come from foreign code.
    """
    here = f"{Path.cwd()}{os.sep}"
    paths = (name.removeprefix(here) for name in islice(names, _MOST_FILES))
    hashes = {n.encode(errors="backslashreplace").decode(): _file_hash(Path(n)) for n in paths}
    return {_FILES: hashes}


def changed_source(before: JournalContent) -> str:
    """Return a text on a source that may have changed since the run ``before``; empty for none.

    No kernel is imported; the files that were loaded then are compared.
    """
    described: dict[str, Mapping[str, str]] = {}
    answered: dict[str, None] = {}
    for id_, done in before.results.items():
        unit = before.units.get(id_)
        if unit is None or unit.commit:  # another commit's files do not change
            continue
        answered[unit.kernel] = None
        if unit.kind == "describe":
            hashes = done.facts.get(_FILES)
            described[unit.kernel] = hashes if isinstance(hashes, dict) else {}
    for hashes in described.values():
        for name, old_hash in hashes.items():
            if not _was_temporary(Path(name)) and _file_hash(Path(name)) != old_hash:
                return f"{name} has changed"
    unknown = (k for k in answered if not described.get(k) and not _is_fingerprinted(k))
    return next((f"nobody can tell whether {kernel} has changed" for kernel in unknown), "")


def _was_temporary(path: Path) -> bool:
    """Return whether a file was temporary, such as the modules of torch.distributed."""
    return path.is_relative_to(tempfile.gettempdir()) and not os.path.lexists(path)


def _is_fingerprinted(kernel: str) -> bool:
    """Return whether the fingerprint covers a kernel: it is built-in or has ``sources``."""
    table = read_configuration().kernels.get(kernel)
    return kernel in named_kernels.BUILTIN or (table is not None and bool(table.sources))


def _file_hash(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal digits; empty if it is not a readable file."""
    try:
        # Reading a pipe or a device might never end.
        if not path.is_file() or path.stat().st_size > _LARGEST:
            return ""
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError):  # a name with a NUL
        return ""


def _source_files(kernel: str) -> Iterator[Path]:
    project = read_configuration()
    table = project.kernels.get(kernel)
    entry = kernel if table is None else table.entry
    file, colons, _ = entry.partition("::")
    if table is None and is_hub_folder(file):
        yield from islice(sorted(Path(file, "build").rglob("*")), _MOST_FILES)
    elif colons:
        yield Path(file) if table is None else project.folder / file
    if table is None or project.path is None:
        return
    # The configuration may have been changed to name another function.
    yield project.path
    for pattern in table.sources:
        yield from islice(pattern_files(project.folder, pattern), _MOST_FILES)


def changed_kernels(kernels: Sequence[str], ref: str) -> tuple[str, ...]:
    """Return the kernels whose ``sources`` or entry file differ from the commit ``ref``.

    Uncommitted and untracked files count too. Kernels without configured sources always count as
    changed.

    Raises:
        UsageError: outside of a repository, or if there is no such commit.
    """
    files = frozenset(_changed_files(ref))
    return tuple(kernel for kernel in kernels if _has_changed(kernel, files))


def _has_changed(kernel: str, files: Collection[Path]) -> bool:
    project = read_configuration()
    table = project.kernels.get(kernel)
    if table is None or not table.sources:
        return True
    folder = project.folder.resolve()
    changed = [f.relative_to(folder).as_posix() for f in files if f.is_relative_to(folder)]
    config_changed = project.path is not None and project.path.name in changed
    entry_files = (
        path
        for reference in (table.entry, table.backward)
        for path in _entry_files(reference, folder)
    )
    return (
        config_changed
        or any(path in files or path.resolve() in files for path in entry_files)
        or any(matches_pattern(file, pattern) for file in changed for pattern in table.sources)
    )


def _entry_files(reference: object, folder: Path) -> Iterator[Path]:
    """Yield possible paths of the file of ``FILE.py::NAME`` or ``package.module:NAME``."""
    if not isinstance(reference, str):
        return
    file, colons, _ = reference.partition("::")
    if colons:
        yield folder / file
        return
    module, colon, _ = reference.partition(":")
    if not colon:
        return
    for start in (folder, folder / "src"):
        path = start.joinpath(*module.split("."))
        yield path.with_name(f"{path.name}.py")
        yield path / "__init__.py"


def _changed_files(ref: str) -> list[Path]:
    if ref.startswith("-") or not ref.strip():
        raise UsageError(f"--changed-since {ref!r} is no commit, branch or tag.")
    git = functools.partial(run_git, "--changed-since", Path.cwd())
    root = Path(git("rev-parse", "--show-toplevel")).resolve()
    # A renamed file counts under both names, whatever git's configuration.
    tracked = git("diff", "--no-renames", "--no-relative", "--name-only", "-z", ref, "--")
    new = git("ls-files", "--others", "--exclude-standard", "-z", "--full-name", str(root))
    return [root / name for name in (tracked + new).split("\0") if name]
